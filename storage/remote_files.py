"""Objects of a store that are read piece by piece, with little of them in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from io import RawIOBase
from typing import Any, TypeAlias

#: An object that is no larger is read in one request; of a larger one so much at a time,
WINDOW_BYTES = 32 << 20
#: in ranges of so many bytes, which come side by side: one connection is slow.
_RANGE_BYTES = 4 << 20

#: Makes a call to a file system: once more where that helps, and with the errors of Python.
Ask: TypeAlias = Callable[[Callable[[], Any]], Any]


def cat_ranges(
    fs: Any, paths: list[str], starts: Sequence[int | None], ends: Sequence[int | None]
) -> list[bytes]:
    """Read ranges of objects, at once where the file system can; names are no patterns."""
    found: list[bytes | Exception] = fs.cat_ranges(
        paths, list(starts), list(ends), on_error="raise"
    )
    read = list[bytes]()
    for each in found:
        if isinstance(each, Exception):  # some file systems return it all the same
            raise each
        read.append(each)
    return read


class Ranges(RawIOBase):
    """Reads an object of a store that gives ranges of it."""

    def __init__(self, fs: Any, path: str, size: int, ask: Ask) -> None:
        self._fs, self._path, self._size, self._ask = fs, path, size, ask
        self._at = 0

    def readable(self) -> bool:
        """Whether it can be read: it can."""
        return True

    def readinto(self, into: Any) -> int:
        """Read the next bytes; return how many, which is 0 at the end."""
        end = min(self._at + len(into), self._size)
        starts = [*range(self._at, end, _RANGE_BYTES)]
        ends = [*starts[1:], end]
        paths = [self._path] * len(starts)
        parts = self._ask(lambda: cat_ranges(self._fs, paths, starts, ends)) if starts else []
        n_read = 0
        for start, stop, part in zip(starts, ends, parts, strict=False):
            into[n_read : n_read + len(part)] = part
            n_read += len(part)
            if len(part) < stop - start:
                break
        self._at += n_read
        return n_read


class Stream(RawIOBase):
    """Reads an object from its beginning on; after an error anew, up to where it was."""

    def __init__(self, begin: Callable[[], Any], ask: Ask) -> None:
        self._begin, self._ask = begin, ask
        self._file: Any = None
        self._at = 0
        self._ask(self._resume)

    @property
    def size(self) -> int | None:
        """Bytes of the object; None if the store does not say."""
        size: int | None = getattr(self._file, "size", None)
        return size

    def readable(self) -> bool:
        """Whether it can be read: it can."""
        return True

    def readinto(self, into: Any) -> int:
        """Read the next bytes; return how many, which is 0 at the end."""
        data: bytes = self._ask(lambda: self._read(len(into)))
        into[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, n_bytes: int) -> Any:
        try:
            self._resume()
            return self._file.read(n_bytes)
        except BaseException:
            self._end()
            raise

    def _resume(self) -> None:
        if self._file is None:
            self._file, left = self._begin(), self._at
            while left and (skipped := self._file.read(min(left, _RANGE_BYTES))):
                left -= len(skipped)

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # it is broken, or nobody needs it
                file.close()

    def close(self) -> None:
        """Let go of the connection."""
        if not self.closed:
            self._end()
        super().close()
