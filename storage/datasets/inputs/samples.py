"""Data sets whose items are samples: of PyTorch, of Hugging Face, lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.tables import Columns, chosen_columns
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.storage.datasets.sources import Batches

SAMPLES = 256  # that are joined in a block


def read_samples(source: Any, columns: Columns | None, classes: Classes, what: str) -> Batches:
    """Stream a data set whose items are samples: of PyTorch, of Hugging Face, a list."""
    length = len(source)
    if not length:
        raise DatasetInputError(f"{what} is empty")
    first = _named(source[0], what, 0)
    wanted = chosen_columns(columns, list(first), what)
    if any(len(of) > 1 for of in wanted.values()):
        raise DatasetInputError(f"{what}: an array is made of one part of a sample, not of several")
    labels = [name for name, (of,) in wanted.items() if isinstance(first[of], str)]
    features: Any = getattr(source, "features", None)  # of Hugging Face: their numbers have names
    for name, (of,) in wanted.items() if isinstance(features, Mapping) else ():
        names = getattr(features.get(of), "names", None)
        if names is not None and not classes.is_fixed:
            classes.known[name] = list(names)
    if labels and not classes.is_fixed:
        for name in labels:
            found = {_named(source[at], what, at)[wanted[name][0]] for at in range(length)}
            classes.known[name] = sorted(value for value in found if isinstance(value, str))

    def batches() -> Iterator[dict[str, Any]]:
        for start in range(0, length, SAMPLES):
            places = range(start, min(start + SAMPLES, length))
            items = [_named(source[at], what, at) for at in places]
            block: dict[str, Any] = {}
            for name, (of,) in wanted.items():
                values = [item.get(of) for item in items]
                if name in labels:
                    told = np.array(values, dtype=object)
                    block[name] = classes.encode(name, told, f"{what}, samples from {start} on")
                else:
                    block[name] = _stacked(values, name, what, start)
            yield block

    return Batches(batches(), length)


def _named(item: Any, what: str, at: int) -> dict[str, Any]:
    """Return the parts of a sample by name: x and y of a pair."""
    if isinstance(item, Mapping):
        return dict(item)
    is_row = isinstance(item, list) and all(isinstance(part, int | float) for part in item)
    if isinstance(item, tuple | list) and not is_row:  # a list of numbers is one array
        if len(item) == 2:
            return dict(zip(("x", "y"), item, strict=True))
        return {f"x{number}": part for number, part in enumerate(item)}
    if item is None:
        raise DatasetInputError(f"{what}: sample {at} is None")
    return {"x": item}


def _stacked(values: list[Any], name: str, what: str, start: int) -> NDArray[Any] | RaggedArray:
    arrays = [_sample_array(value) for value in values]
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
    is_regular = all(array.shape == first.shape for array in arrays)
    return np.stack(arrays) if is_regular else RaggedArray.of(arrays)


def _sample_array(value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)
