"""How a module's weights lie in memory: with channels last where the CPU is faster so.

PyTorch's convolutions, poolings and normalisations on the CPU take images either with the channels
first, as they are given, or last. With eight channels or more most networks train in 0.6 to 0.85 of
the time with channels last, and are scored in half of it; with fewer, or with `InstanceNorm2d`,
which has no such kernel, they may take longer (`tests/benchmarks/layouts.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from dagsel.workloads.torch.loop import apply

ChannelsLast: TypeAlias = bool | Literal["auto"]

#: Fewer of them do not fill the registers of a CPU.
FEWEST_CHANNELS = 8


def lay_out(module: torch.nn.Module) -> None:
    """Store four-dimensional weights with channels last, in place; their values stay."""
    for parameter in module.parameters():
        if parameter.dim() == 4:
            held = parameter.data.contiguous(memory_format=torch.channels_last)
            _, channels, height, width = held.shape
            # Said in full: of one channel, or one place, the strides of both formats are valid, and
            # a convolution that finds the ordinary ones gives its output the ordinary format.
            strides = (channels * height * width, 1, width * channels, channels)
            parameter.data = held.as_strided(held.shape, strides)


def gains(module: torch.nn.Module) -> bool:
    """Whether a network can be expected to train faster on the CPU with channels last.

    Examples
    --------
    >>> def network(n):
    ...     return torch.nn.Sequential(torch.nn.Conv2d(1, n, 3), torch.nn.Conv2d(n, 1, 3))
    >>> gains(network(16)), gains(network(4)), gains(torch.nn.Linear(64, 64))
    (True, False, False)
    """
    parts = list(module.modules())
    convolutions = [part for part in parts if isinstance(part, torch.nn.Conv2d)]
    if any(isinstance(part, torch.nn.InstanceNorm2d) for part in parts):
        return False
    if not any(part.stride == (1, 1) for part in convolutions):
        return False  # what is left of an image after each of them is small
    # What is between two convolutions; what goes in and comes out is the data's affair.
    between = [convolutions[0].out_channels, *(part.in_channels for part in convolutions[1:])]
    return min(between) >= FEWEST_CHANNELS


def bears(module: torch.nn.Module, make_inputs: Callable[[], Any]) -> bool:
    """Whether a module can be trained and scored with channels last: a copy of it is tried.

    Some cannot: ``x.view(len(x), -1)`` of images is for channels that come first.
    """
    places = [it.untyped_storage().data_ptr() for it in module.parameters() if it.numel()]
    if len(set(places)) < len(places):
        return False  # two that share their memory would no longer
    try:
        tried = copy.deepcopy(module)
        lay_out(tried)
        for is_training in (False, True):  # what is trained goes backwards, too
            output = apply(tried.train(is_training), make_inputs())
        sums = [leaf.sum() for leaf in pytree.tree_leaves(output) if _has_gradients(leaf)]
        torch.autograd.backward(sums)
    except Exception:  # noqa: BLE001 - the model's own code raised it; it stays as it is
        return False
    return True


def _has_gradients(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
