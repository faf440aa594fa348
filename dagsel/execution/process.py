"""What training needs of a worker's process: its allocator, its random numbers, its memory."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import random
import sys
from collections.abc import Mapping

from dagsel.errors import ClusterError

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


def torch_threads() -> int | None:
    """Threads that PyTorch would train with in this process; None if it is not there."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def use_torch_threads(n: int | None) -> None:
    """Let PyTorch train with so many threads, as seen from this thread; None changes nothing."""
    torch = sys.modules.get("torch")
    if n is not None and torch is not None and torch.get_num_threads() != n:
        torch.set_num_threads(n)


#: The resource of a worker that has a GPU of its own. Units do not take it (see `RESOURCE`).
GPU_RESOURCE = "GPU"


def gpus_seen() -> int:
    """Count the GPUs that PyTorch sees in this process; 0 if it has not been imported."""
    torch = sys.modules.get("torch")
    return 0 if torch is None else int(torch.cuda.device_count())


def check_gpu_resource(resources: Mapping[str, float], n_gpus: int) -> None:
    """Check that a worker that sees a GPU says so.

    Workers of one machine all see its GPUs unless each is shown its own, and would then train on
    the first one together. Whoever gives the resource has thought of it.

    Parameters
    ----------
    resources
        The worker's.
    n_gpus
        GPUs that it sees.

    Raises
    ------
    ClusterError
        If it sees one and has no resource ``GPU``.

    Examples
    --------
    >>> check_gpu_resource({"GPU": 1}, n_gpus=1)
    >>> check_gpu_resource({}, n_gpus=0)
    """
    if n_gpus and not resources.get(GPU_RESOURCE):
        raise ClusterError(
            f"it sees {n_gpus} GPU{'s' * (n_gpus > 1)} and has no resource GPU: start one worker "
            'for each GPU with  --resources "GPU=1"  and its own CUDA_VISIBLE_DEVICES, as  '
            'dask cuda worker --resources "GPU=1"  does, or one that trains on the CPU with  '
            'CUDA_VISIBLE_DEVICES=""'
        )


def why_no_gpu(n_gpus: int, built_for: str | None, visible: str | None) -> str | None:
    """Say why there is no GPU to train on; None if there is one.

    Parameters
    ----------
    n_gpus
        GPUs that PyTorch sees.
    built_for
        Version of CUDA that PyTorch is built for; None for none.
    visible
        The environment's ``CUDA_VISIBLE_DEVICES``.

    Examples
    --------
    >>> why_no_gpu(1, "13.0", None)
    >>> why_no_gpu(0, "13.0", "")
    "CUDA_VISIBLE_DEVICES is '' and hides them: unset it"
    """
    if n_gpus:
        return None
    if built_for is None:
        return "this PyTorch is built without CUDA: install one that is, see https://pytorch.org"
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r} and hides them: unset it"
    return f"PyTorch (CUDA {built_for}) finds none: see whether nvidia-smi lists one"


def check_gpus_here() -> None:
    """Raise a `ClusterError` if this machine has no GPU to train on."""
    import torch

    reason = why_no_gpu(
        torch.cuda.device_count(), torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    if reason is not None:
        raise ClusterError(f'cluster="cuda" needs a GPU on this machine, and {reason}')
