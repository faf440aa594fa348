"""The batches of a shard: made on its device, or sent there ahead of their use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from dagsel.collate import Images
from dagsel.errors import WorkloadError
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.workloads.base import Config, DataOutline, Visit
from dagsel.workloads.batches import as_pair, check_order
from dagsel.workloads.gang.gang import Gang
from dagsel.workloads.torch.augment import Augment, Augmentation
from dagsel.workloads.torch.ddp import GangBatches
from dagsel.workloads.torch.device import (
    Accelerator,
    Shard,
    copy_rows,
    gather_rows,
    moved,
    pin,
    rows_at,
    send_ahead,
    transfer_device,
)
from dagsel.workloads.torch.loop import ShardBatches
from dagsel.workloads.torch.ragged import RaggedTensor, by_size
from dagsel.workloads.torch.state import as_torch

InputFn: TypeAlias = Callable[[dict[str, Any], Any], tuple[Any, Any]]
Collate: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Making:
    """What is made of a batch's arrays before the model gets them; see `TorchWorkload`."""

    input_fn: InputFn | None = None
    collate: Collate | None = None
    augment: Augment | None = None
    bucket_by: str | None = None

    @property
    def uses_all(self) -> bool:
        """Whether all arrays are given away; else the first and the last one are used."""
        return self.input_fn is not None or self.collate is not None

    def check(self, data: DataOutline) -> None:
        """Raise a `WorkloadError` if batches of a data set cannot become tensors."""
        if self.input_fn is None:
            check_order(data)
        ragged, names = [name for name in data.arrays if name in data.ragged], list(data.arrays)
        if ragged and self.collate is None and self.input_fn is None:
            fills = ", ".join(f"{name}=0" for name in ragged)
            raise WorkloadError(
                f"the samples of {' and '.join(map(repr, ragged))} differ in shape: give the "
                f"workload collate=dagsel.collate.pad({fills})"
            )
        if self.bucket_by is not None and self.bucket_by not in ragged:
            what = "samples of one shape" if self.bucket_by in names else "no array of the data set"
            others = ", ".join(ragged) or "none"
            raise WorkloadError(
                f"bucket_by is {self.bucket_by!r}, {what}; arrays whose samples differ in shape: "
                f"{others}"
            )

    def collated(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `collate` makes of a batch."""
        if self.collate is None:
            return dict(batch)
        made = self.collate(batch)
        if not isinstance(made, Mapping):
            raise WorkloadError(
                f"collate returns a {type(made).__name__}: return a mapping of names to tensors; "
                "dagsel.collate.samples takes functions of a list of samples"
            )
        return dict(made)

    def pair(self, batch: dict[str, Any], config: Config) -> tuple[Any, Any]:
        """Return what the model gets, and the targets."""
        if self.input_fn is not None:
            return as_pair(self.input_fn(batch, config))
        first, last = next(iter(batch.values())), next(reversed(batch.values()))
        return first, last if last is not first else last.clone()


def tensors_of(arrays: Mapping[str, Any]) -> Shard:
    """View a shard's arrays as tensors."""
    try:
        return {
            name: RaggedTensor.of(array, as_torch)
            if isinstance(array, RaggedArray)
            else as_torch(np.asarray(array))
            for name, array in arrays.items()
        }
    except TypeError as error:
        raise WorkloadError(f"the data cannot become tensors: {error}") from error


def training_batches(
    shard: Shard, config: Config, visit: Visit, *, making: Making, gang: Gang | None, **options: Any
) -> ShardBatches:
    """Return the batches of a visit; `options` are those of `ShardBatches`."""
    first: Any = next(iter(shard.values()))
    last: Any = next(reversed(shard.values()))
    order = visit.order(len(first))
    sorted_by = None if making.bucket_by is None else shard.get(making.bucket_by)
    if isinstance(sorted_by, RaggedTensor):
        order = by_size(order, sorted_by.sizes(), options["batch_size"], visit)
    device = transfer_device(shard)
    change = None
    if making.augment is not None:
        change = Augmentation(making.augment, config, visit, len(first))
    gather = partial(_gathered, shard, making, change=change)
    is_plain = making.collate is None and change is None and not _is_ragged(shard)

    def make(index: torch.Tensor) -> tuple[Any, Any]:
        if not is_plain:
            return pair(gather(index))
        if making.input_fn is None:
            return rows_at(first, index), rows_at(last, index)
        return pair({name: rows_at(rows, index) for name, rows in shard.items()})

    def pair(batch: dict[str, Any]) -> tuple[Any, Any]:
        inputs, targets = making.pair(batch, config)
        its.is_empty &= isinstance(inputs, torch.Tensor) and not inputs.numel()
        return inputs, targets

    # What is made sample by sample needs the places as numbers.
    places = torch.from_numpy(order).to(first.device if is_plain else "cpu")
    batches = (
        ShardBatches(places, make, **options)
        if gang is None
        else GangBatches(places, make, gang=gang, **options)
    )
    its = weakref.proxy(batches)  # they hold `make`, and with it they would hold themselves
    batches.is_empty = making.input_fn is not None
    if device is not None:
        rows = partial(gather_rows, shard, device) if is_plain else _pinned(gather, device)
        batches.feed = lambda parts: map(pair, send_ahead(rows, parts, device))
    return batches


def evaluation_batches(
    shard: Shard, config: Config, size: int, making: Making
) -> Iterator[tuple[int, Any, Any]]:
    """Yield the number of samples, inputs and targets of each batch, in order."""
    # Copies, as in training: a model that works in place must not change the shard.
    n_samples, device = len(next(iter(shard.values()))), transfer_device(shard)
    parts = [slice(start, min(start + size, n_samples)) for start in range(0, n_samples, size)]
    is_plain = making.collate is None and not _is_ragged(shard)

    def copy(part: slice) -> dict[str, Any]:
        if is_plain:
            return copy_rows(shard, device, part)
        rows = _gathered(shard, making, torch.arange(part.start, part.stop))
        return rows if device is None else pin(rows, device)

    sent = map(copy, parts) if device is None else send_ahead(copy, parts, device)
    for part, batch in zip(parts, sent, strict=True):
        yield part.stop - part.start, *making.pair(batch, config)


def _gathered(
    shard: Shard, making: Making, index: torch.Tensor, change: Augmentation | None = None
) -> dict[str, Any]:
    """Return the samples at some places, changed and collated, where the shard is."""
    places: Sequence[int] = index.tolist()
    batch = {
        name: rows.rows(places)
        if isinstance(rows, RaggedTensor)
        else rows_at(rows, index.to(rows.device))
        for name, rows in shard.items()
    }
    if change is None:
        made = making.collated(batch)
    elif isinstance(making.collate, Images):  # what is changed are the images, not their files
        made = making.collate.stack(change(making.collate.decode(batch), places))
    else:
        made = making.collated(change(batch, places))
    return moved(made, next(iter(shard.values())).device)


def _pinned(
    gather: Callable[[torch.Tensor], dict[str, Any]], device: Accelerator
) -> Callable[[torch.Tensor], dict[str, Any]]:
    return lambda index: pin(gather(index), device)


def _is_ragged(shard: Shard) -> bool:
    return any(isinstance(rows, RaggedTensor) for rows in shard.values())
