"""What the errors of an object store say, and waiting while it is out of reach.

The library under each of fsspec's file systems raises errors of its own, and many are no `OSError`.
Whoever uses a `Folder` meets only errors of Python: a `ConnectionError` where nobody answers, a
`PermissionError` where there are no keys.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from dagsel.storage.disk import PATIENCE_S, retry_while

T = TypeVar("T")

#: Nobody answers, or not now. Names, as none of these libraries need be there.
_AWAY = {
    "botocore.exceptions.ConnectionError",
    "botocore.exceptions.HTTPClientError",
    "aiohttp.client_exceptions.ClientConnectionError",
    "aiohttp.client_exceptions.ClientPayloadError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
    "google.auth.exceptions.TransportError",
    "azure.core.exceptions.ServiceRequestError",
    "azure.core.exceptions.ServiceResponseError",
}
_NO_KEYS = {
    "botocore.exceptions.NoCredentialsError",
    "botocore.exceptions.PartialCredentialsError",
    "botocore.exceptions.CredentialRetrievalError",
    "botocore.exceptions.TokenRetrievalError",
    "botocore.exceptions.SSOError",
    "botocore.exceptions.ProfileNotFound",
    "google.auth.exceptions.DefaultCredentialsError",
    "google.auth.exceptions.RefreshError",
    "azure.core.exceptions.ClientAuthenticationError",
}
#: S3's "slow down" is EBUSY and its "internal error" EREMOTEIO, which is not everywhere.
_AWAY_NUMBERS = {
    getattr(errno, name)
    for name in (
        "EBUSY", "EREMOTEIO", "ETIMEDOUT", "ENETUNREACH", "ENETDOWN", "EHOSTUNREACH", "EHOSTDOWN",
    )
    if hasattr(errno, name)
}  # fmt: skip
_AWAY_STATUS = {429, 500, 502, 503, 504}
#: Where errors of aiohttp, of gcsfs and of Azure have it, one for each.
_STATUS = ("status", "code", "status_code")


def read_error(error: Exception, where: str, hide: Callable[[str], str]) -> OSError:
    """Return the error of a file system as one of Python's.

    Parameters
    ----------
    error
        What its library raised.
    where
        The folder's URL.
    hide
        Removes credentials from a text.

    Examples
    --------
    >>> read_error(TimeoutError(), "s3://bucket/run", str)
    ConnectionError('s3://bucket/run cannot be reached: TimeoutError')
    >>> read_error(FileNotFoundError("token1234"), "s3://b", lambda text: text.replace("1234", "*"))
    FileNotFoundError('token*')
    """
    text = hide(str(error))
    told = ": ".join(filter(None, [type(error).__name__, text]))
    if _is_away(error):
        return ConnectionError(f"{where} cannot be reached: {told}")
    if _names(error) & _NO_KEYS or (isinstance(error, PermissionError) and text == "Forbidden"):
        return PermissionError(
            f"{where} is not open to these keys: {told}; give others in storage_options, or by the "
            "environment of this process and of the workers"
        )
    if not isinstance(error, OSError):
        return OSError(f"{where}: {told}")
    if text.endswith("bucket does not exist"):
        return FileNotFoundError(f"{where}: {text}; make it, or check the URL")
    if text == str(error):
        return error
    return FileNotFoundError(text) if isinstance(error, FileNotFoundError) else OSError(told)


def retry_while_away(
    ask: Callable[[], T],
    where: str,
    *,
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Ask; if nobody answers, warn and ask again until somebody does or `patience_s` is over.

    `ask` raises errors as `read_error` returns them.
    """
    return retry_while(
        lambda error: isinstance(error, ConnectionError),
        ask,
        lambda error: f"{error}; waiting up to {patience_s:g} s: see to the network and the server",
        f"{where} can be reached again",
        patience_s=patience_s,
        sleep=sleep,
    )


def _is_away(error: Exception) -> bool:
    return (
        isinstance(error, ConnectionError | TimeoutError | socket.gaierror)
        or (isinstance(error, OSError) and error.errno in _AWAY_NUMBERS)
        or any(status in _AWAY_STATUS for status in _statuses(error))
        or bool(_names(error) & _AWAY)
    )


def _statuses(error: BaseException | None) -> Iterator[int]:
    """Yield the HTTP statuses of an error, and of those that it was made of."""
    while error is not None:
        found = (getattr(error, name) for name in _STATUS if hasattr(error, name))
        status = next(found, None)
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):  # of botocore: s3fs makes one error of many
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            yield status
        error = error.__cause__


def _names(error: Exception) -> set[str]:
    return {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
