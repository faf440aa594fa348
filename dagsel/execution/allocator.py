"""The C library's allocator, as training needs it: what one batch frees is there for the next.

glibc gives each thread an arena, which is made of heaps of 64 MB. A larger tensor is mapped for one
batch and faulted in page by page. The main arena has no such bound, and lies where huge pages can
be asked for at once. Threads share it only where there may be no further ones.
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

from distributed import Worker
from distributed.threadpoolexecutor import ThreadPoolExecutor

from dagsel.execution.process import imported_torch
from dagsel.execution.run_spec import EXECUTOR
from dagsel.workloads.memory import give_back_freed, glibc

T = TypeVar("T")

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MADV_HUGEPAGE = 14
#: Set in the size of a block that is not in the main arena.
_IS_ELSEWHERE = 4
_HUGE_PAGE = 2 << 20

#: So much freed memory stays, beside what follows.
_KEPT_BYTES = 1 << 30
#: A thread's heap; the top of the arena grows by as much at once.
_HEAP_BYTES = 64 << 20
#: For so many bytes of addresses huge pages are asked for, at most. They take memory as they are
#: used.
_AHEAD_BYTES = 512 << 20
#: A block that no thread has at hand from others, as it has small ones.
_PROBE_BYTES = 100_000
#: So many threads are tried.
_MOST_TRIED = 16


def prepare_allocator(worker: Worker) -> None:
    """Make a worker's process keep what one batch frees for the next, and give it `EXECUTOR`.

    A Dask task runs in a side thread. Its malloc arena returns memory to the kernel after every
    batch and takes it again for the next, which doubles the time of training.

    The executor has one thread, which shares the main arena, where the process is the worker's
    alone. It stays with the worker when the run has ended. Elsewhere it is the one that the worker
    has.
    """
    largest = _largest_kept(worker.memory_manager.memory_limit)
    if libc := glibc():
        _keep_freed_memory(libc, largest)
    if EXECUTOR not in worker.executors:
        found = _on_main_arena() if worker.nanny is not None else None
        worker.executors[EXECUTOR] = found or worker.executors["default"]
    if (own := own_executor(worker)) is not None:
        # Not waited for: a unit of another run may train there.
        own.submit(_ask_for_huge_pages, min(largest, _AHEAD_BYTES))


def own_executor(worker: Worker) -> Executor | None:
    """Return the executor in which units train alone; None where other tasks share it."""
    found = worker.executors[EXECUTOR]
    return None if found is worker.executors["default"] else found


def where_units_train(worker: Worker, call: Callable[[], T]) -> T:
    """Call what trains or scores in the thread in which units do, and wait for it."""
    own = own_executor(worker)
    if own is None:
        return call()
    return own.submit(contextvars.copy_context().run, call).result()


def begin_training(worker: Worker, train: Callable[[], None]) -> None:
    """Begin what trains where the worker's units do.

    Where these share the threads of other tasks, all of which may be taken, it gets another one.
    """
    own = own_executor(worker)
    if own is None:
        threading.Thread(target=train, name="dagsel-train", daemon=True).start()
    else:
        own.submit(train)


def give_back_memory() -> None:
    """Return all free memory to the kernel: what glibc has, and what PyTorch has pinned for a GPU.

    Dask pauses a worker whose process is too large, and one that kept its freed memory would stay
    paused.
    """
    torch = imported_torch()
    give_back_pinned = getattr(getattr(torch, "_C", None), "_host_emptyCache", None)
    if torch is not None and give_back_pinned is not None and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # CUDA may be of no use to this process any more
            give_back_pinned()
    give_back_freed()


def _largest_kept(memory_limit: int | None) -> int:
    """Return the bytes of the largest block that is not mapped for one batch alone.

    Large blocks leave gaps, and a process with some of 256 MB may take half as much again. So they
    are a 32nd of the worker's memory at most, if that is more than a thread's heap.

    Examples
    --------
    >>> [_largest_kept(limit) >> 20 for limit in (None, 12 << 30, 1 << 30)]
    [1024, 384, 64]
    """
    part = _KEPT_BYTES if memory_limit is None else memory_limit // 32
    return min(max(part, _HEAP_BYTES), _KEPT_BYTES)


def _keep_freed_memory(libc: ctypes.CDLL, largest: int) -> None:
    """Make glibc keep freed memory, up to 1.5 GB, but for blocks that are larger than this."""
    if libc.mallopt(_M_MMAP_THRESHOLD, largest) != 1:  # older versions refuse more than this
        libc.mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES // 2)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES + _AHEAD_BYTES)
    libc.mallopt(_M_TOP_PAD, _HEAP_BYTES)


def _on_main_arena() -> ThreadPoolExecutor | None:
    libc = glibc()
    if libc is None or libc.mallopt(_M_ARENA_MAX, 1) != 1:
        return None
    tried: list[ThreadPoolExecutor] = []  # while they live, their arenas are not given to others
    try:
        for _ in range(_MOST_TRIED):
            executor = ThreadPoolExecutor(1, thread_name_prefix="dagsel-train")
            if executor.submit(_is_on_main_arena, libc).result():
                return executor
            tried.append(executor)
        return None
    finally:
        for executor in tried:
            executor.shutdown(wait=False)


def _is_on_main_arena(libc: ctypes.CDLL) -> bool:
    block = libc.malloc(_PROBE_BYTES)
    if not block:
        return False
    size = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
    libc.free(block)
    return not size & _IS_ELSEWHERE


def _ask_for_huge_pages(n_ahead: int) -> None:
    """Have the next bytes of this thread's arena backed by huge pages, where the kernel has them.

    What is ahead takes blocks of any size. Where addresses are limited (``ulimit -v``), there is
    nothing ahead.
    """
    import resource  # which Windows lacks

    libc, limit = glibc(), resource.getrlimit(resource.RLIMIT_AS)[0]
    if libc is None or limit != resource.RLIM_INFINITY:
        return
    if block := libc.malloc(n_ahead):
        first = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        n_bytes = (block + n_ahead - first) // _HUGE_PAGE * _HUGE_PAGE
        libc.madvise(first, n_bytes, _MADV_HUGEPAGE)
        libc.free(block)
