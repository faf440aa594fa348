"""The kernels by which a `TorchWorkload` steps an optimizer by default, for plain loops."""

from typing import TypeVar

import torch

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def fused(optimizer: Optimizer) -> Optimizer:
    """Set what a script sets by ``fused=True``: in Adam, AdamW and SGD, on single precision."""
    for group in optimizer.param_groups:
        if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            group["fused"] = all(p.dtype is torch.float32 for p in group["params"]) or None
    return optimizer
