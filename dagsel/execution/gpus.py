"""GPUs of a cluster: whether there are any, and that no two workers train on one unawares."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from dagsel.errors import ClusterError

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
