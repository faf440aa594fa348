"""What training needs of a worker's process: random numbers, threads and GPUs."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import random
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from dagsel.errors import ClusterError
from dagsel.execution.copied_server import limit_threads

#: The resource of a worker that has a GPU of its own. Units do not take it (see `RESOURCE`).
GPU_RESOURCE = "GPU"
#: Set in the environment of workers of our own, whose everyday messages are nobody's concern.
QUIET = "DAGSEL_QUIET_WORKER"


def keep_quiet(level: int = logging.ERROR) -> None:
    """Log only Dask's errors in a worker of ours; with a higher level, after a run, none."""
    if os.environ.get(QUIET):
        logging.getLogger("distributed").setLevel(level)


def own_random_numbers() -> None:
    """Put a second instance of ``random`` into Dask's modules.

    Dask's event loop draws from Python's global stream, which travels with the trial that trains.
    """
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    for name, module in sys.modules.copy().items():  # a unit in another thread may import
        is_dask = name.partition(".")[0] in ("dask", "distributed", "fsspec", "tornado")
        if is_dask and getattr(module, "random", None) is random:
            module.random = second  # type: ignore[attr-defined]


@functools.cache
def this_process(pid: int) -> str:
    """Return a name of this process that no other has on any machine; a fork has another pid."""
    return f"{pid}-{uuid.uuid4().hex}"


def seconds_since_start() -> float:
    """Return for how long the process has been there that started this one: mostly a nanny's."""
    this = psutil.Process()  # perhaps the first one of a container
    first = this.parent() or this
    try:  # since the machine was started: its clock may have been set since
        after_name = Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()
        began_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):  # not Linux
        began_s, now_s = float(first.create_time()), time.time()
    return max(0.0, now_s - began_s)


def imported_torch() -> Any:
    """Return PyTorch if this process has imported it, else None.

    While another thread imports it, it is there and lacks most of its names: that is waited for.
    """
    if "torch" not in sys.modules:
        return None
    import torch

    return torch


def torch_threads() -> int | None:
    """Return how many threads PyTorch would train with; None if it is not imported."""
    torch = imported_torch()
    return None if torch is None else int(torch.get_num_threads())


def use_torch(threads: int | None, dtype: str | None) -> None:
    """Make PyTorch train with so many threads in this thread, and with a default dtype.

    None leaves them as they are in the process.
    """
    limit_threads()
    torch = imported_torch()
    if torch is None:
        return
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if dtype is not None and torch_dtype() != dtype:
        torch.set_default_dtype(getattr(torch, dtype))


def torch_dtype() -> str | None:
    """Return the default dtype of PyTorch, such as ``"float32"``; None if it is not imported."""
    torch = imported_torch()
    return None if torch is None else str(torch.get_default_dtype()).rpartition(".")[2]


def gpus_seen() -> int:
    """Count the GPUs that PyTorch sees in this process; 0 if it is not imported."""
    torch = imported_torch()
    return 0 if torch is None else int(torch.cuda.device_count())


def check_gpu_resource(resources: Mapping[str, float], n_gpus: int) -> None:
    """Raise a `ClusterError` if a worker sees a GPU and lacks the resource ``GPU``.

    Workers of one machine see all its GPUs unless each is shown its own, and would then all train
    on the first one. The resource says that somebody has assigned them.

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


def why_on_cpu(resources: Mapping[str, float]) -> str:
    """Say that PyTorch has no GPU on a worker with the resource ``GPU``; empty if it has one.

    Examples
    --------
    >>> why_on_cpu({"TRAIN": 1})
    ''
    """
    torch = imported_torch()
    if torch is None or not resources.get(GPU_RESOURCE) or torch.cuda.is_available():
        return ""
    return (
        "has the resource GPU, and PyTorch can use none there, so it trains on the CPU: see what "
        "dagsel doctor says on its machine"
    )


def why_no_gpu(n_gpus: int, built_for: str | None, visible: str | None) -> str | None:
    """Say why there is no GPU to train on; None if there is one.

    `built_for` is the version of CUDA that PyTorch is built for, `visible` the environment's
    ``CUDA_VISIBLE_DEVICES``.

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
