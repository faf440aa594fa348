"""What the samples of a data set hold: in a few numbers, and all of them in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.storage.datasets.manifest import ArraySpec
from dagsel.storage.datasets.ragged import RaggedArray

_MOST_CLASSES = 1000


def summaries(
    schema: Mapping[str, ArraySpec], shards: Iterable[Mapping[str, NDArray[Any]]]
) -> list[dict[str, Any]]:
    """Return what shards hold of each array; one shard at a time is in memory.

    Examples
    --------
    >>> spec = ArraySpec(name="y", dtype="<i8", shape=(), train_chunk=1, validation_chunk=1)
    >>> (row,) = summaries({"y": spec}, [{"y": np.array([1, 2])}, {"y": np.array([2, 3])}])
    >>> row["mean"], row["min"], row["max"], row["classes"]
    (2.0, 1.0, 3.0, 3)
    """
    tallies = {name: _Tally(spec.shape) for name, spec in schema.items()}
    for shard in shards:
        for name, tally in tallies.items():
            tally.add(shard[name])
    return [
        {"array": name, "dtype": str(spec.numpy_dtype), "shape": tally.shape, **tally.row}
        for (name, spec), tally in zip(schema.items(), tallies.values(), strict=True)
    ]


@dataclass(frozen=True)
class SplitInMemory:
    """All samples of a split: what PyTorch calls a map-style data set.

    Parameters
    ----------
    arrays
        By name, each of shape ``(n_samples, ...)``.
    """

    arrays: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        """Count the samples."""
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return a sample: of each array its part, in their order."""
        return tuple(array[index] for array in self.arrays.values())


class _Tally:
    """The sums of an array's values."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape: tuple[int | str, ...] = shape
        self._extremes: NDArray[np.int64] | None = None  # of a ragged array's shapes
        self.n = self.n_missing = 0
        self.total = self.squares = 0.0  # squares of the distances from the mean
        self.low, self.high = math.inf, -math.inf
        self.values: set[Any] | None = set()

    def add(self, array: NDArray[Any] | RaggedArray) -> None:
        if isinstance(array, RaggedArray):
            self._measure(array.shapes)
            array = array.values
        if self.values is not None and array.dtype.kind in "biuSU":
            self.values |= set(np.unique(array).tolist())
            self.values = self.values if len(self.values) <= _MOST_CLASSES else None
        elif array.dtype.kind not in "biuSU":
            self.values = None
        if array.dtype.kind not in "biuf":
            return
        numbers = array.astype(np.float64)
        known = numbers[~np.isnan(numbers)]
        self.n_missing += numbers.size - known.size
        if known.size:
            self._join(known)
            self.low, self.high = min(self.low, known.min()), max(self.high, known.max())

    def _join(self, known: NDArray[np.float64]) -> None:
        """Join the sums of a shard to those before it (Chan, Golub and LeVeque 1983)."""
        n = known.size
        with np.errstate(invalid="ignore", over="ignore"):  # of infinite numbers the spread is NaN
            total = float(known.sum())
            self.squares += float(((known - total / n) ** 2).sum())
        if self.n:
            apart = total / n - self.total / self.n
            self.squares += apart * apart * self.n * n / (self.n + n)
        self.n, self.total = self.n + n, self.total + total

    def _measure(self, shapes: NDArray[np.int64]) -> None:
        every = shapes if self._extremes is None else np.concatenate([self._extremes, shapes])
        self._extremes = np.stack([every.min(axis=0), every.max(axis=0)])
        self.shape = tuple(f"{least} to {most}" for least, most in self._extremes.T.tolist())

    @property
    def row(self) -> dict[str, Any]:
        n_classes = None if self.values is None else len(self.values)
        told: dict[str, Any] = {"missing": self.n_missing}
        if self.n:
            mean = self.total / self.n
            spread = math.sqrt(self.squares / self.n)
            told |= {"mean": mean, "std": spread, "min": float(self.low), "max": float(self.high)}
        return {**told, "classes": n_classes}
