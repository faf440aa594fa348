"""What training needs of a worker's process: its allocator, its random numbers, its memory."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import random
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_GIGABYTE = 1 << 30


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next batch instead of giving it back to the kernel.

    A Dask task runs in a side thread, whose malloc arena returns memory after every batch and
    faults it in again for the next: training takes twice as long. Up to 1 GB that was freed stays
    with the process.

    Returns
    -------
    bool
        Whether there was a glibc to tell.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    return all(
        mallopt(option, value) == 1
        for option, value in (
            (_M_TRIM_THRESHOLD, _GIGABYTE),
            (_M_MMAP_THRESHOLD, _GIGABYTE),
            (_M_TOP_PAD, 64 << 20),
        )
    )


def give_back_memory() -> None:
    """Give all memory that is free to the kernel, as far as glibc is there to be told.

    Dask pauses a worker by the size of its process, and one that keeps what it has freed would
    never go on.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def own_random_numbers() -> None:
    """Give Dask random numbers of its own.

    Its event loop draws from Python's global stream while a unit trains; the draws would be seen in
    the stream that travels with the trial. Its modules get a second instance of ``random``.
    """
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    for name, module in list(sys.modules.items()):
        is_dask = name.partition(".")[0] in ("dask", "distributed", "fsspec", "tornado")
        if is_dask and getattr(module, "random", None) is random:
            module.random = second  # type: ignore[attr-defined]


def shards_that_fit(memory_limit: int | None, shard_bytes: int, *, share: float) -> int | None:
    """How many shards a worker may hold.

    Parameters
    ----------
    memory_limit
        The worker's memory limit in bytes; None or 0 for no limit.
    shard_bytes
        Bytes of the largest shard with its validation shard.
    share
        Share of the limit that shards may take; the rest is for states and training.

    Returns
    -------
    int or None
        None for any number.

    Examples
    --------
    >>> shards_that_fit(1000, 150, share=0.5)
    3
    >>> shards_that_fit(None, 150, share=0.5)
    """
    if not memory_limit:
        return None
    return int(memory_limit * share) // max(shard_bytes, 1)


def torch_threads() -> int | None:
    """Threads that PyTorch would train with in this process; None if it is not there."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def use_torch_threads(n: int | None) -> None:
    """Let PyTorch train with so many threads, as seen from this thread; None changes nothing."""
    torch = sys.modules.get("torch")
    if n is not None and torch is not None and torch.get_num_threads() != n:
        torch.set_num_threads(n)
