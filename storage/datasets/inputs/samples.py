"""Data sets whose items are samples: of PyTorch, of Hugging Face, lists, and streams of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.arrays import check_bytes
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.decoding import as_numbers, samples, stream_samples
from dagsel.storage.datasets.inputs.reading import KEY, Input, Reading, Skipped, as_objects, blocks
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.storage.datasets.sources import Batches


def is_stream(source: Any) -> bool:
    """Whether samples can only be had one after the other: an iterator, an ``IterableDataset``."""
    has_places = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    named_so = any(kind.__name__ == "IterableDataset" for kind in type(source).__mro__)
    return hasattr(source, "__iter__") and (named_so or not has_places)


def read_samples(source: Any, reading: Reading, classes: Classes, what: str) -> Input:
    """Stream samples one by one; parts that are text are given as objects."""
    skipped = Skipped(reading.skips, what)
    if is_stream(source):
        reading.nothing_to_decode(what)
        length, read = None, stream_samples(source, what)
    else:
        length, read = len(source), samples(source, reading.workers, what)

    def whole() -> Iterator[dict[str, Any]]:
        n_read = 0
        for parts in read:
            if isinstance(parts, DatasetInputError):
                skipped.add(parts)
            else:
                n_read += 1
                yield parts
        skipped.tell(n_read)

    left = whole()
    first = next(left, None)
    if first is None:
        raise DatasetInputError(
            f"{what} is empty; give at least one sample a shard"
            if not skipped.n
            else skipped.shown[0]
        )
    names = list(first)
    wanted = reading.chosen_ones(names, what, "part of a sample")
    key = reading.key(names, what)
    features: Any = getattr(source, "features", None)  # of Hugging Face: their numbers have names
    for name, of in wanted.items() if isinstance(features, Mapping) else ():
        told = getattr(features.get(of), "names", None)
        if told is not None and not classes.is_fixed:
            classes.known[name] = list(told)

    def batches() -> Iterator[dict[str, Any]]:
        start = 0
        for items in blocks(chain([first], left)):
            for at, item in enumerate(items, start):
                if reading.columns is None and item.keys() != first.keys():
                    _differ(what, at, first, item)
            block: dict[str, Any] = {}
            for name, of in wanted.items():
                values = [item.get(of) for item in items]
                is_text = isinstance(first[of], str)
                block[name] = as_objects(values) if is_text else stacked(values, name, what, start)
            if key is not None:
                block[KEY] = as_objects([_plain(item.get(key)) for item in items])
            yield block
            start += len(items)

    return Input(Batches(batches(), None if reading.skips else length))


def stacked(values: list[Any], name: str, what: str, start: int) -> NDArray[Any] | RaggedArray:
    """Join parts of samples to an array; raise a `DatasetInputError` if they are not alike."""
    for at, value in enumerate(values, start):
        if isinstance(value, tuple) and any(np.ndim(part) for part in value):
            raise DatasetInputError(
                f"{what}: {name!r} of sample {at} is a tuple of arrays; give each a name, as in "
                'return {"a": a, "b": b, "y": y}, and the workload an input_fn that takes both'
            )
    arrays = [np.asarray(as_numbers(value)) for value in values]
    first = next((array for array in arrays if array.size), arrays[0])  # empty lists have no dtype
    for at, array in enumerate(arrays):
        is_alike = array.dtype.kind == first.dtype.kind or not array.size
        if array.ndim != first.ndim or not is_alike:
            raise DatasetInputError(
                f"{what}: {name!r} of sample {start + at} is {array.dtype}{list(array.shape)}, and "
                f"of sample {start} {arrays[0].dtype}{list(arrays[0].shape)}; make them alike"
            )
        if array.dtype == object:
            raise DatasetInputError(
                f"{what}: {name!r} of sample {start + at} is {shown(values[at])}; make it numbers"
            )
    check_bytes(f"{what}: {name!r}", first, values, start)
    is_regular = all(array.shape == first.shape for array in arrays)
    return np.stack(arrays) if is_regular else RaggedArray.of(arrays)


def _differ(what: str, at: int, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise a `DatasetInputError`: a sample has other parts than the first one."""
    extra = [name for name in other if name not in first]
    lacks, has, part = (0, at, extra[0]) if extra else (at, 0, next(iter(first.keys() - other)))
    raise DatasetInputError(
        f"{what}: sample {has} has {part!r}, and sample {lacks} has not; give all samples the same "
        "parts, or choose some of them by columns="
    )


def _plain(value: Any) -> Any:
    """Return a number of an array or a tensor that holds one."""
    return value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
