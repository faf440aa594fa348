"""A folder at any fsspec URL, and the few operations that this package needs of a file system.

It promises five things: URLs and errors show no credentials; a file that `replace`, `copy` or
`create` writes is there as a whole or not at all, on local disks and object stores; listings are
never old; nothing inside the folder is written or deleted through a symbolic link (the folder
itself may be one); a store that has answered before is waited for while nobody answers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast
from urllib.parse import unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dagsel.checks import shown
from dagsel.errors import DatasetInputError, LinkError
from dagsel.storage import disk
from dagsel.storage.disk import PATIENCE_S
from dagsel.storage.reach import read_error, retry_while_away
from dagsel.storage.remote_files import WINDOW_BYTES, Ranges, Stream, cat_ranges
from dagsel.storage.urls import hide, secrets_in, without_credentials

Url: TypeAlias = "str | os.PathLike[str]"
Bytes: TypeAlias = "bytes | bytearray | memoryview"
T = TypeVar("T")

_S3_USER = re.compile(r"(s3a?://)([^/@:]*):([^@]*)@")
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "memory"}
#: In such a URL no query names a folder; one of Azure may have keys there.
_NO_QUERY = {"s3", "s3a", "gs", "gcs", "memory"}
_SECRET = re.compile(r"key|secret|token|pass|sas|cred|connection_string|auth", re.IGNORECASE)
_PART_BYTES = 16 << 20  # of a multipart upload: the most that an open remote file buffers


class Folder:
    """A folder at a URL. Pickles as the URL and the options; connects when first used.

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
        depth: int = 0,
        is_known: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        text: Any = os.fspath(url) if hasattr(url, "__fspath__") else url
        if not isinstance(text, str) or not text.strip():
            raise error(f"{shown(text)} is no URL: pass a path or any URL that fsspec knows")
        options: Any = storage_options or {}
        if not isinstance(options, Mapping):
            raise error(f"storage_options must be a dict of options by name, got {shown(options)}")
        self._url, self._options = _options_from_url(text, dict(options))
        self._depth = depth  # how far below the folder that a user has named
        self._is_known = is_known  # it has answered before
        self._patience_s = patience_s  # how long to wait for it then
        protocol = fsspec.core.split_protocol(self._url)[0]
        if "::" not in self._url and protocol is not None:
            try:
                fsspec.get_filesystem_class(protocol)
            except ValueError:
                raise error(
                    f"{without_credentials(text)}: fsspec knows no file system {protocol!r}; "
                    "use a path, file://, memory://, s3:// or another that it knows"
                ) from None
        if protocol in _NO_QUERY and "::" not in self._url and "?" in self._url:
            raise error(
                f"a URL with a question mark is no folder of {protocol}://, where a query begins "
                f"with it: leave it out, as in {self.url}, and pass options as storage_options"
            )
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
    def protocols(self) -> set[str]:
        """Names of the file system's protocol."""
        found: Any = self.fs.protocol
        return {found} if isinstance(found, str) else set(found)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of a local file system."""
        return isinstance(self.fs, LocalFileSystem)

    def path(self, key: str = "") -> str:
        """Return the path of a key on the file system."""
        root: str = self._place[1]
        return _inside(root, key) if key else root.rstrip("/")

    def child(self, key: str) -> Folder:
        """Return a folder inside this one, with the same options."""
        return Folder(
            _inside(self._url, key),
            self._options,
            depth=self._depth + key.count("/") + 1,
            is_known=self._is_known,
            patience_s=self._patience_s,
        )

    def impatient(self) -> Folder:
        """Return the same folder for those who ask again by themselves."""
        return Folder(self._url, self._options, depth=self._depth, patience_s=0.0)

    def own(self, key: str, *, whole: bool = True) -> Path:
        """Return the local path of a key that is to be written or deleted.

        Raises a `LinkError` if a folder on the way is a symbolic link, or, unless the object is
        replaced as a `whole`, the object itself.
        """
        path = self.path(key)
        on_way = path.rpartition("/")[0] if whole else path
        for _ in range(key.count("/") + self._depth + (not whole)):  # what no user has named
            # Each save asks, and to make a `Path` takes longer than to ask.
            if os.path.islink(on_way):  # noqa: PTH114
                raise LinkError(
                    f"{on_way} is a symbolic link: dagsel writes and deletes nothing through it; "
                    "put what it leads to in its place, or let the whole folder be the link"
                )
            on_way = on_way.rpartition("/")[0]
        return Path(path)

    def read(self, key: str) -> bytes | None:
        """Read a whole object; ``None`` if it is missing."""
        try:
            if self.is_local:
                return Path(self.path(key)).read_bytes()
            return cast("bytes", self._ask(lambda: self.fs.cat_file(self.path(key))))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def read_all(self, keys: Sequence[str]) -> list[bytes]:
        """Read whole objects, at once where the file system can."""
        if self.is_local:
            return [Path(self.path(key)).read_bytes() for key in keys]
        paths = [self.path(key) for key in keys]
        if not paths:
            return []
        ends = [None] * len(paths)  # of `cat`, names with signs of patterns would be those
        return self._ask(lambda: cat_ranges(self.fs, paths, ends, ends))

    def open_read(self, key: str, *, expected: int = 0) -> tuple[BinaryIO, int]:
        """Open an object; return it and its size, or the `expected` one if the store says none.

        One of a store is fetched, unless it is expected to be large: then it is read in pieces.
        """
        path = self.path(key)
        if self.is_local:
            file = Path(path).open("rb")  # noqa: SIM115  # the caller closes it
            return file, os.fstat(file.fileno()).st_size
        if expected <= WINDOW_BYTES or "memory" in self.protocols:
            data = self._ask(lambda: self.fs.cat_file(path))
            return BytesIO(data), len(data)
        is_http = bool({"http", "https"} & self.protocols)  # servers that give no ranges are many
        if getattr(self.fs, "async_impl", False) and not is_http:
            size = self._ask(lambda: self.fs.size(path))
            size = expected if size is None else size
            return BufferedReader(Ranges(self.fs, path, size, self._ask), WINDOW_BYTES), size
        # With its size the server is not asked for it, and an error is told as what it is.
        how = {"block_size": 0, "size": expected} if is_http else {}
        stream = Stream(lambda: self.fs.open(path, "rb", **how), self._ask)
        size = expected if stream.size is None else stream.size
        return BufferedReader(stream, _PART_BYTES), size

    def open_write(self, key: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open an object to write it in pieces, with little of it in memory."""
        path = str(self.own(key, whole=False)) if self.is_local else self.path(key)
        self._make_parent(path)
        return Path(path).open("wb") if self.is_local else self._uploading(path)

    @contextlib.contextmanager
    def _uploading(self, path: str) -> Iterator[BinaryIO]:
        file = self._ask(lambda: self.fs.open(path, "wb", block_size=_PART_BYTES))
        try:
            yield cast("BinaryIO", _Upload(file, self._ask_once))
        finally:
            self._ask_once(file.close)

    def replace(self, key: str, data: bytes | memoryview, *, sync: bool = False) -> None:
        """Write an object; readers see the old one or the new one, whole.

        With `sync`, wait until a local disk has it.
        """
        if self.is_local:
            disk.replace(self.own(key), data, sync=sync)
        else:
            path, whole = self.path(key), bytes(data)
            self._make_parent(path)
            self._ask(lambda: self.fs.pipe_file(path, whole))

    def copy(self, key: str, to: str) -> None:
        """Copy an object, inside the store if the store can; a link is not followed."""
        if self.is_local:
            disk.copy(self.own(key, whole=False), self.own(to))
        else:
            source, goal = self.path(key), self.path(to)
            try:
                self._ask(lambda: self.fs.cp_file(source, goal))
            except NotImplementedError:
                self._ask(lambda: self.fs.pipe_file(goal, self.fs.cat_file(source)))

    def create(self, key: str, data: bytes, *, sync: bool = False) -> bool:
        """Write an object if there is none; return whether the given one is there now.

        Local disks and S3 (``If-None-Match``) let one of two writers win. On other stores a moment
        passes between the check and the write.
        """
        if self.is_local:
            return disk.create(self.own(key), data, sync=sync)
        path = self.path(key)
        self._make_parent(path)
        try:
            self._ask(lambda: self.fs.pipe_file(path, data, mode="create"))
        except FileExistsError:
            # Perhaps by the first try of a request that was sent again.
            return self.read(key) == data
        except (NotImplementedError, OSError) as error:
            # Some speak S3 but not this word of it.
            if isinstance(error, OSError) and error.errno != errno.ENOSYS:
                raise
            if self.read(key) is not None:
                return False
            self._ask(lambda: self.fs.pipe_file(path, data))
        return True

    def append(self, key: str, data: bytes, *, at: int) -> None:
        """Append bytes to a file of a local folder and wait until the disk has them, all or none.

        Raises an OSError unless the file has `at` bytes before: someone else writes to it. If `at`
        is 0, the file is created.
        """
        disk.append(self.own(key, whole=False), data, at=at)

    def cut(self, key: str, n_bytes: int) -> None:
        """Shorten a file of a local folder."""
        disk.cut(self.own(key, whole=False), n_bytes)

    def remove_file(self, key: str) -> None:
        """Remove an object; a missing one is fine, and a folder of that name stays."""
        if self.is_local:
            with contextlib.suppress(IsADirectoryError):
                self.own(key).unlink(missing_ok=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._ask(lambda: self.fs.rm_file(self.path(key)))

    def _make_parent(self, path: str) -> None:
        # Object stores have no folders; s3fs would create a missing bucket instead.
        if not _FLAT & self.protocols:
            parent = path.rpartition("/")[0]
            self._ask(lambda: self.fs.makedirs(parent, exist_ok=True))

    def make(self) -> None:
        """Make a local folder if it is not there."""
        disk.make_directory(Path(self.path()), sync=False)

    def names(self, key: str = "") -> list[str]:
        """List the names in a folder, sorted; none if it is missing."""
        return sorted(self.kinds(key))

    def kinds(self, key: str = "") -> dict[str, str]:
        """Return the names in a folder, each with its kind: ``"file"``, ``"directory"``, other."""
        path = self.path(key)
        self.fs.invalidate_cache(path)
        try:
            found = self._ask(lambda: self.fs.ls(path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        # Object stores may list an empty marker object: the folder itself.
        entries = {entry["name"].rstrip("/"): entry["type"] for entry in found}
        return {
            name.rpartition("/")[2]: kind
            for name, kind in entries.items()
            if name.lstrip("/") != path.lstrip("/")
        }

    def is_file(self) -> bool:
        """Whether there is a file instead of a folder."""
        self.fs.invalidate_cache(self.path())
        return bool(self.fs.isfile(self.path()))

    def remove_own(self, key: str, own: re.Pattern[str]) -> None:
        """Remove the objects in a folder and below whose keys in it match, and emptied folders."""
        root = self.path(key)
        objects, folders = self._below(root)
        ours = [inner for inner in objects if own.fullmatch(inner)]
        if ours and not self.is_local and not set("*?[") & set(root):  # no patterns for fsspec
            with contextlib.suppress(FileNotFoundError):  # in few requests
                self._ask(lambda: self.fs.rm([f"{root}/{inner}" for inner in ours]))
        else:
            for inner in ours:
                self.remove_file(f"{key}/{inner}")
        if not _FLAT & self.protocols:
            for folder in sorted(folders, reverse=True):  # those inside first
                self.remove_if_empty(f"{key}/{folder}")
            self.remove_if_empty(key)

    def keys(self, key: str = "") -> list[str]:
        """List the objects in a folder and below, by their paths in it."""
        return sorted(self._below(self.path(key))[0])

    def _below(self, root: str) -> tuple[list[str], list[str]]:
        """Return the paths of the objects and the folders below a folder, relative to it."""
        found: dict[str, bool] = {}  # path: whether it is a folder
        if not self.is_local:
            self.fs.invalidate_cache(root)
            below = self._ask(lambda: self.fs.find(root, withdirs=True, detail=True))
            found = {path: about["type"] == "directory" for path, about in below.items()}
        elif not Path(root).is_symlink():
            for place, folders, names in os.walk(root):  # does not follow links
                found |= {f"{place}/{name}": False for name in names}
                found |= {f"{place}/{name}": True for name in folders}
        parts = [(path.removeprefix(f"{root}/"), is_folder) for path, is_folder in found.items()
                 if path != root]  # fmt: skip
        return [path for path, of in parts if not of], [path for path, of in parts if of]

    def remove_if_empty(self, key: str = "") -> None:
        """Remove a folder, or the folder itself, if it is empty and the file system has folders."""
        with contextlib.suppress(OSError, NotImplementedError):
            if not self.names(key):
                self._ask_once(lambda: self.fs.rmdir(self.path(key)))

    def hide(self, text: str) -> str:
        """Remove the credentials of this folder's URL and options from a text."""
        return hide(text.replace(self._url, self.url), self._secrets)

    @cached_property
    def _secrets(self) -> set[str]:
        return {*_strings(self._options), *secrets_in(self._url)}

    def _ask(self, call: Callable[[], T]) -> T:
        """Ask the file system; wait while one that is known does not answer."""
        if self.is_local:
            return self._ask_once(call)
        try:
            patience_s = self._patience_s if self._is_known else 0.0
            answer = retry_while_away(lambda: self._ask_once(call), self.url, patience_s=patience_s)
        except (FileNotFoundError, FileExistsError):
            self._is_known = True
            raise
        self._is_known = True
        return answer

    def _ask_once(self, call: Callable[[], T]) -> T:
        """Ask the file system; its errors become those of Python, without credentials."""
        try:
            return call()
        except NotImplementedError:
            raise
        except Exception as error:
            found = read_error(error, self.url, self.hide)
            if found is error:
                raise
            raise found from None

    def __reduce__(self) -> tuple[Any, ...]:
        # It is sent to workers by a process that has reached it.
        make = partial(Folder, depth=self._depth, is_known=True, patience_s=self._patience_s)
        return make, (self._url, self._options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and (self._url, self._options) == (
            other._url,
            other._options,
        )

    def __hash__(self) -> int:
        return hash(self._url)

    def __repr__(self) -> str:
        return f"Folder({self.url!r})"


class _Upload:
    """A file of a store that is written in pieces, with the errors of Python."""

    def __init__(self, file: Any, ask: Callable[[Callable[[], int]], int]) -> None:
        self._file, self._ask = file, ask

    def write(self, data: Bytes) -> int:
        return self._ask(lambda: self._file.write(data))


def _inside(root: str, key: str) -> str:
    """Append a key to a URL, before its query."""
    place, mark, query = root.partition("?") if "://" in root else (root, "", "")
    return f"{place.rstrip('/')}/{key}{mark}{query}"


def _strings(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what may be secret in the options of a file system."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _strings(value)
        elif isinstance(value, str):
            yield from {value} if _SECRET.search(name) else secrets_in(value)


def _options_from_url(url: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Move the credentials of an S3 URL into the options: s3fs would take them for the bucket."""
    match = _S3_USER.match(url)
    if match is None:
        return url, options
    own = {"key": unquote(match[2]), "secret": unquote(match[3])}
    return match[1] + url[match.end() :], own | options
