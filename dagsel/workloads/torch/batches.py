"""The batches of a shard: made on its device, or sent there ahead of their use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch

from dagsel.workloads.base import Config, Visit
from dagsel.workloads.gang.gang import Gang
from dagsel.workloads.torch.ddp import GangBatches
from dagsel.workloads.torch.device import (
    Tensors,
    copy_rows,
    gather_rows,
    send_ahead,
    transfer_device,
)
from dagsel.workloads.torch.loop import ShardBatches

InputFn: TypeAlias = Callable[[Tensors, Any], tuple[Any, Any]]


def training_batches(
    shard: Tensors,
    config: Config,
    visit: Visit,
    *,
    input_fn: InputFn | None,
    gang: Gang | None,
    **options: Any,
) -> ShardBatches:
    """Return the batches of a visit; `options` are those of `ShardBatches`."""
    first, last = next(iter(shard.values())), next(reversed(shard.values()))
    order = torch.from_numpy(visit.order(len(first))).to(first.device)

    def make(index: torch.Tensor) -> tuple[Any, Any]:
        if input_fn is None:
            return first.index_select(0, index), last.index_select(0, index)
        return pair({name: array.index_select(0, index) for name, array in shard.items()})

    def pair(batch: Tensors) -> tuple[Any, Any]:
        inputs, targets = _pair(batch, config, input_fn)
        its.is_empty &= isinstance(inputs, torch.Tensor) and not inputs.numel()
        return inputs, targets

    batches = (
        ShardBatches(order, make, **options)
        if gang is None
        else GangBatches(order, make, gang=gang, **options)
    )
    its = weakref.proxy(batches)  # they hold `make`, and with it they would hold themselves
    batches.is_empty = input_fn is not None
    device = transfer_device(shard)
    if device is not None:
        batches.feed = lambda parts: (
            pair(batch) for batch in send_ahead(partial(gather_rows, shard, device), parts, device)
        )
    return batches


def evaluation_batches(
    shard: Tensors, config: Config, size: int, input_fn: InputFn | None
) -> Iterator[tuple[int, Any, Any]]:
    """Yield the number of samples, inputs and targets of each batch, in order."""
    # Copies, as in training: a model that works in place must not change the shard.
    n_samples, device = len(next(iter(shard.values()))), transfer_device(shard)
    parts = [slice(start, start + size) for start in range(0, n_samples, size)]
    copy = partial(copy_rows, shard, device)
    sent = map(copy, parts) if device is None else send_ahead(copy, parts, device)
    for part, batch in zip(parts, sent, strict=True):
        yield min(size, n_samples - part.start), *_pair(batch, config, input_fn)


def _pair(batch: Tensors, config: Config, input_fn: InputFn | None) -> tuple[Any, Any]:
    if input_fn is not None:
        return input_fn(batch, config)
    first, last = next(iter(batch.values())), next(reversed(batch.values()))
    return first, last if last is not first else last.clone()
