"""What may be shown and kept of a URL, and which hosts it reaches.

A URL may hold a user, a password, a query and a fragment. None of them is written to a file, a log
or an error. A URL that was read from a file is only used if it reaches no unknown host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from urllib.parse import unquote

#: Names hosts that a ``run.json`` may send requests to, beside that of its folder:
#: ``s3://bucket postgresql://db.example.org``.
KNOWN_HOSTS = "DAGSEL_KNOWN_HOSTS"

# Keys may contain "/" and passwords "@"; better to hide too much of a URL than too little.
_USER = re.compile(r"(?<=://)(?:[^/@:]*:.*|[^/@]*)@")
_PART = re.compile(r"::(?=[A-Za-z][\w+.-]*(?:://|::))")  # a password may contain "::"
#: Names of objects there may contain "#".
_HAS_KEYS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "memory", "file"}
_LOCAL = {"file", "local", "memory"}
_WRAPPERS = {"simplecache", "filecache", "blockcache", "dir", "zip", "tar"}
_SAME = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "https": "http"}


def without_credentials(url: str) -> str:
    """Remove user, password, query and fragment from a URL, also from chained ones (``a::b``).

    Examples
    --------
    >>> without_credentials("s3://key:se/cret@bucket/digits.zarr")
    's3://bucket/digits.zarr'
    >>> without_credentials("https://host/digits.zarr?sig=secret#token=secret")
    'https://host/digits.zarr'
    """
    return "::".join(map(_plain, _PART.split(url)))


def _plain(part: str) -> str:
    if "://" not in part:
        return part
    place, query, fragment = _cut(_USER.sub("", part))
    keeps = part.partition("://")[0] in _HAS_KEYS and "=" not in fragment and not query
    return f"{place}#{fragment}" if fragment and keeps else place


def _cut(part: str) -> tuple[str, str, str]:
    """Return a URL without query and fragment, its query, and its fragment."""
    place, mark, rest = part.partition("?")
    if mark:
        query, _, fragment = rest.partition("#")
        return place, query, fragment
    place, _, fragment = part.partition("#")
    return place, "", fragment


def secrets_in(url: str, *, harmless: Collection[str] = ()) -> set[str]:
    """Return the texts of a URL that must not be shown, as they are written and decoded.

    Parameters
    ----------
    url
        The URL.
    harmless
        Names in its query whose values may be shown.

    Examples
    --------
    >>> sorted(secrets_in("https://me:pass%20word@host/x?sig=4711&mode=rw", harmless=["mode"]))
    ['4711', 'me:pass%20word', 'pass word', 'pass%20word', 'sig=4711']
    """
    found: set[str] = set()
    for part in _PART.split(url):
        if "://" not in part:
            continue
        for user in (match.rstrip("@") for match in _USER.findall(part)):
            found |= {user, user.rpartition(":")[2]}
        _, query, fragment = _cut(_USER.sub("", part))
        for pair in query.split("&"):
            name, _, value = pair.partition("=")
            if name not in harmless:
                found |= {pair, value}
        if fragment and fragment not in _plain(part):
            found |= {fragment, fragment.partition("=")[2]}
    return found | {unquote(text) for text in found if "%" in text and ":" not in text}


def hide(text: str, secrets: Iterable[str]) -> str:
    """Replace secrets in a text; what is shorter than three letters is no secret.

    Examples
    --------
    >>> hide("denied for token1234", ["token1234", "d"])
    'denied for ***'
    """
    # Replacing a letter or two would hide nothing and spoil the text.
    for secret in sorted((text for text in secrets if len(text) > 2), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def said_of(url: str, error: BaseException) -> str:
    """Return what an error says, without the secrets of the URL that it is about; its type if none.

    Examples
    --------
    >>> said_of("https://host/x.tar?sig=4711", OSError("403: https://host/x.tar?sig=4711"))
    '403: https://host/x.tar?***'
    >>> said_of("https://host/x.tar", TimeoutError())
    'TimeoutError'
    """
    return hide(str(error), secrets_in(url)) or type(error).__name__


def hosts_in(url: str) -> list[str]:
    """Return the hosts that a URL reaches, with their schemes; none for a local or cached file.

    Examples
    --------
    >>> hosts_in("simplecache::https://me@example.org/x"), hosts_in("/data/digits.zarr")
    (['http://example.org'], [])
    """
    hosts = []
    *wrappers, last = url.split("::")
    for part in (*wrappers, last if "://" in last else f"file://{last}"):
        scheme, _, rest = part.partition("://")
        if scheme not in (_LOCAL | _WRAPPERS if wrappers else _LOCAL):
            authority = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
            hosts.append(f"{_SAME.get(scheme, scheme)}://{authority.lower()}")
    return hosts


def unknown_hosts(hosts: Iterable[str], run_dir: str) -> list[str]:
    """Return those hosts that neither a run's folder nor ``DAGSEL_KNOWN_HOSTS`` names."""
    told = re.split(r"[\s,]+", os.environ.get(KNOWN_HOSTS, ""))
    known = {*hosts_in(run_dir), *(host for url in told if "://" in url for host in hosts_in(url))}
    known |= {re.sub(r":\d+$", "", host) for host in known}  # with a port and without
    return [host for host in hosts if host not in known]
