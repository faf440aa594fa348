"""A shard's file, mapped into memory: its arrays are read as they are used."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dagsel.storage.datasets.manifest import SPLITS, Split
from dagsel.storage.shared_folder import opened

_READ_BYTES = 1 << 20
_POPULATE_READ = 22  # Linux's MADV_POPULATE_READ, which Python does not name
_TAKEN_BYTES = 16 << 20


class MappedShard:
    """A shard whose arrays are read from its file as they are needed.

    Parameters
    ----------
    path
        The file.
    mapping
        It, mapped into memory.
    arrays
        Its arrays by split and name, some of them ragged; they cannot be written to.
    ends
        Where the arrays of each split end in it; those of the first one begin at 0.
    fetched_bytes
        Bytes in memory of what was read from the store for it.
    """

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        arrays: dict[Split, dict[str, Any]],
        ends: Mapping[Split, int],
        fetched_bytes: int,
    ) -> None:
        self.arrays, self.fetched_bytes = arrays, fetched_bytes
        self._path, self._mapping, self._ends = path, mapping, ends

    def forget_pages(self) -> None:
        """Take the file's pages out of this process; the system may keep them.

        They come back when they are needed, at any moment, also while another thread reads.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    @contextlib.contextmanager
    def read_ahead(self, split: Split, most_bytes: float = math.inf) -> Iterator[None]:
        """While the block lasts, have the system read what it does not hold of a split.

        One after the other, in a thread: the order in which samples are needed takes a disk much
        longer. Where the system holds all of it, no thread is started: its pages become this
        process's at once, if they are no more than `most_bytes`, and not one by one.
        """
        end = self._ends[split]
        start = 0 if split == SPLITS[0] else self._ends[SPLITS[0]]
        missing = _missing(self._mapping, start, end)
        if not missing:
            if end - start <= most_bytes:
                self._take_pages(start, min(end, len(self._mapping)))
            yield
            return
        stop = threading.Event()
        told = (self._path, missing, stop)
        threading.Thread(target=_read, args=told, name="dagsel-ahead", daemon=True).start()
        try:
            yield
        finally:
            stop.set()

    def _take_pages(self, start: int, end: int) -> None:
        with contextlib.suppress(OSError):  # Linux before 5.14, and other systems
            for block in range(start, end, _TAKEN_BYTES):  # other threads wait as long
                self._mapping.madvise(_POPULATE_READ, block, min(_TAKEN_BYTES, end - block))


def _missing(mapping: mmap.mmap, start: int, end: int) -> list[int]:
    """Return the blocks of a mapped file between two places that the system does not hold."""
    mincore = _mincore()
    n_pages = -(-(min(end, len(mapping)) - start) // mmap.PAGESIZE)
    if mincore is None or n_pages <= 0:
        return []
    held = np.zeros(n_pages, np.uint8)
    address = np.frombuffer(mapping, np.uint8).ctypes.data + start
    if mincore(address, n_pages * mmap.PAGESIZE, held.ctypes.data):
        return []
    pages = np.flatnonzero(~held & 1)
    blocks = np.unique((start + pages * mmap.PAGESIZE) // _READ_BYTES)
    return [int(block) * _READ_BYTES for block in blocks]


@functools.cache
def _mincore() -> Any:
    """Return the system's function that says which pages it holds; None on other systems."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).mincore
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return function


def _read(path: Path, blocks: Sequence[int], stop: threading.Event) -> None:
    """Read blocks of a file, for the system to hold them, until that is of no use any more."""
    buffer = bytearray(_READ_BYTES)
    with contextlib.suppress(OSError), opened(path) as file:
        for block in blocks:
            if stop.is_set():
                return
            os.preadv(file.fileno(), [buffer], block)
