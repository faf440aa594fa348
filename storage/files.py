"""A folder at any fsspec URL: the few operations that this floor needs of a file system.

Three promises live here and nowhere else: what is shown of a URL has no credentials in it, a
file that `replace` writes is there whole or not at all, and listings are never stale.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Mapping
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast
from urllib.parse import unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dagsel.errors import DatasetInputError

Url: TypeAlias = "str | os.PathLike[str]"

# Keys may contain "/" and passwords "@"; better to hide too much of a URL than too little.
_USER = re.compile(r"(?<=://)(?:[^/@:]*:.*|[^/@]*)@")
_S3_USER = re.compile(r"(s3a?://)([^/@:]*):([^@]*)@")
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "memory"}
_PART_BYTES = 16 << 20  # of a multipart upload: the most that an open remote file buffers


def without_credentials(url: str) -> str:
    """Strip what may be secret from a URL: user and password, and the query.

    Parameters
    ----------
    url
        Any URL or path, chained ones (``a::b``) too.

    Examples
    --------
    >>> without_credentials("s3://key:se/cret@bucket/digits.zarr")
    's3://bucket/digits.zarr'
    >>> without_credentials("https://host/digits.zarr?sig=secret")
    'https://host/digits.zarr'
    """
    parts = (_USER.sub("", part) for part in url.split("::"))
    return "::".join(part.split("?", 1)[0] if "://" in part else part for part in parts)


class Folder:
    """A folder at a URL. Pickles as the URL and the options; connects when first used.

    Parameters
    ----------
    url
        Any fsspec URL or a local path.
    storage_options
        Passed to the file system.
    error
        Raised if the URL itself cannot be used.

    Examples
    --------
    >>> folder = Folder("memory://example-folder")
    >>> folder.replace("a/b.json", b"{}")
    >>> folder.read("a/b.json"), folder.names("a"), folder.read("missing")
    (b'{}', ['b.json'], None)
    """

    def __init__(
        self,
        url: Url,
        storage_options: Mapping[str, Any] | None = None,
        *,
        error: type[Exception] = DatasetInputError,
    ) -> None:
        text: Any = os.fspath(url) if hasattr(url, "__fspath__") else url
        if not isinstance(text, str) or not text.strip():
            raise error(f"{text!r} is no URL: give a path or any URL that fsspec knows")
        self._url, self._options = _options_from_url(text, dict(storage_options or {}))
        protocol = fsspec.core.split_protocol(self._url)[0]
        if "::" not in self._url and protocol is not None:
            try:
                fsspec.get_filesystem_class(protocol)
            except ValueError:
                raise error(
                    f"{without_credentials(text)}: fsspec knows no file system {protocol!r}; "
                    "use a path, file://, memory://, s3:// or another that it knows"
                ) from None
        if protocol in (None, "file", "local") and "::" not in self._url:
            # A worker's working directory is not the client's.
            self._url = LocalFileSystem._strip_protocol(self._url)

    @property
    def url(self) -> str:
        """The URL without credentials; a local folder's is its absolute path."""
        return without_credentials(self._url)

    @cached_property
    def _place(self) -> tuple[Any, str]:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(self._url, **self._options))

    @property
    def fs(self) -> Any:
        """The file system."""
        return self._place[0]

    @property
    def is_local(self) -> bool:
        """Whether it is a plain folder of this machine."""
        return isinstance(self.fs, LocalFileSystem)

    def path(self, key: str = "") -> str:
        """Where a key is on the file system."""
        root = self._place[1].rstrip("/")
        return f"{root}/{key}" if key else root

    def read(self, key: str) -> bytes | None:
        """Read a whole object; ``None`` if it is missing."""
        try:
            if self.is_local:
                return Path(self.path(key)).read_bytes()
            return cast("bytes", self.fs.cat_file(self.path(key)))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def open_read(self, key: str) -> tuple[BinaryIO, int]:
        """Open an object to be read from its beginning to its end in one request.

        Returns
        -------
        file, n_bytes
            Local files are streamed; others are fetched whole.
        """
        if self.is_local:
            file = Path(self.path(key)).open("rb")  # noqa: SIM115  # the caller closes it
            return file, os.fstat(file.fileno()).st_size
        data = self.fs.cat_file(self.path(key))
        return BytesIO(data), len(data)

    def open_write(self, key: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open an object to be written in pieces, with little of it in memory at once."""
        path = self.path(key)
        self._make_parent(path)
        return cast(
            "contextlib.AbstractContextManager[BinaryIO]",
            self.fs.open(path, "wb", block_size=_PART_BYTES),
        )

    def replace(self, key: str, data: bytes | memoryview, *, sync: bool = False) -> None:
        """Write an object so that readers see the old one or the new one, whole.

        Parameters
        ----------
        key
            Where.
        data
            What stands there then.
        sync
            Whether to wait until a local disk has it.
        """
        path = self.path(key)
        if self.is_local:
            try:
                _replace_local(path, data, sync=sync)
            except FileNotFoundError:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                _replace_local(path, data, sync=sync)
        else:
            self._make_parent(path)
            self.fs.pipe_file(path, bytes(data))

    def remove_file(self, key: str) -> None:
        """Remove an object; a missing one is fine."""
        path = self.path(key)
        if self.is_local:
            Path(path).unlink(missing_ok=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(path)

    def _make_parent(self, path: str) -> None:
        protocols = self.fs.protocol
        # Object stores know no folders; asked for one, s3fs would create a missing bucket.
        if not _FLAT.intersection([protocols] if isinstance(protocols, str) else protocols):
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def names(self, key: str = "") -> list[str]:
        """List the names in a folder, sorted; none if it is missing."""
        path = self.path(key)
        self.fs.invalidate_cache(path)
        try:
            found = self.fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        # Object stores may list an empty marker object: the folder itself.
        entries = {entry.rstrip("/") for entry in found} - {path}
        return sorted(entry.rpartition("/")[2] for entry in entries)

    def is_file(self) -> bool:
        """Whether there is a plain file where the folder should be."""
        self.fs.invalidate_cache(self.path())
        return bool(self.fs.isfile(self.path()))

    def remove(self, key: str) -> None:
        """Remove an object, or a folder and all in it; missing ones are fine."""
        path = self.path(key)
        self.fs.invalidate_cache(path)
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(path, recursive=True)

    def remove_if_empty(self) -> None:
        """Remove the folder itself where file systems have such things and nothing is in it."""
        with contextlib.suppress(OSError, NotImplementedError):
            if not self.names():
                self.fs.rmdir(self.path())

    def __reduce__(self) -> tuple[Any, ...]:
        return Folder, (self._url, self._options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and (self._url, self._options) == (
            other._url,
            other._options,
        )

    def __hash__(self) -> int:
        return hash(self._url)

    def __repr__(self) -> str:
        return f"Folder({self.url!r})"


def _replace_local(path: str, data: bytes | memoryview, *, sync: bool) -> None:
    aside = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        Path(aside).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(aside).unlink()
        raise
    if sync:
        _sync_directory(path.rpartition("/")[0])


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _options_from_url(url: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Move the credentials of an S3 URL into the options: s3fs would take them for the bucket."""
    match = _S3_USER.match(url)
    if match is None:
        return url, options
    own = {"key": unquote(match[2]), "secret": unquote(match[3])}
    return match[1] + url[match.end() :], own | options
