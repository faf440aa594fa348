"""Pages of mapped files leave a worker's process before it takes too much memory."""

from __future__ import annotations

import math
import threading

import psutil

from dagsel.storage.mapped_shard import MappedShard

_LOOK_S = 0.02  # so often it is seen whether the process takes too much
_WORTH_BYTES = 16 << 20  # fewer are not worth to be read again


class Pages:
    """Keeps the pages of mapped files from filling a worker's memory.

    Parameters
    ----------
    most_bytes
        What the process may take before it forgets them.
    """

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes
        self._process = psutil.Process()
        self._files_bytes: float = 0  # of mapped files, libraries too, when they were forgotten
        self._mapped: dict[int, MappedShard] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, shard: int, mapped: MappedShard) -> None:
        """Watch the pages of a shard."""
        with self._lock:
            self._mapped[shard] = mapped
        if self._thread is None and self._most_bytes < math.inf:
            self._thread = threading.Thread(target=self._watch, name="dagsel-pages", daemon=True)
            self._thread.start()

    def drop(self, shard: int) -> None:
        """Watch the pages of a shard no more."""
        with self._lock:
            self._mapped.pop(shard, None)

    def close(self) -> None:
        """Watch nothing any more."""
        self._end.set()
        with self._lock:
            self._mapped.clear()

    def relieve(self) -> None:
        """Forget all pages if the process takes too much, and they are a part of it."""
        taken = self._process.memory_info()
        of_files = getattr(taken, "shared", taken.rss)
        self._files_bytes = min(self._files_bytes or of_files, of_files)
        is_worth_it = of_files - self._files_bytes >= _WORTH_BYTES
        if taken.rss < self._most_bytes or not is_worth_it:
            return
        with self._lock:
            for mapped in self._mapped.values():
                mapped.forget_pages()

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_S):
            self.relieve()
