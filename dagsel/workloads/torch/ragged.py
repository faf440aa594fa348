"""Shards with ragged arrays, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.workloads.base import Visit

#: So many batches are sorted together by the sizes of their samples.
SORTED_BATCHES = 50


class RaggedTensor:
    """A `RaggedArray` whose values are a tensor, on any device.

    Examples
    --------
    >>> ragged = RaggedTensor.of(RaggedArray.of([[1, 2], [3], []]))
    >>> [row.tolist() for row in ragged.rows([2, 0])]
    [[], [1, 2]]
    """

    def __init__(
        self, values: torch.Tensor, shapes: list[tuple[int, ...]], offsets: list[int]
    ) -> None:
        self.values, self.shapes, self.offsets = values, shapes, offsets

    @classmethod
    def of(
        cls, array: RaggedArray, as_tensor: Callable[[Any], torch.Tensor] = torch.from_numpy
    ) -> RaggedTensor:
        """Make one of an array, whose values `as_tensor` turns into a tensor."""
        shapes = list(map(tuple, array.shapes.tolist()))
        return cls(as_tensor(array.values), shapes, array.offsets.tolist())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> RaggedTensor:
        """Return the same with other values, such as those on another device."""
        return RaggedTensor(function(self.values), self.shapes, self.offsets)

    def rows(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Return copies of some samples."""
        offsets = self.offsets
        pieces = [self.values[offsets[place] : offsets[place + 1]] for place in places]
        copied = torch.split(torch.cat(pieces), [len(piece) for piece in pieces])
        return [row.view(self.shapes[at]) for row, at in zip(copied, places, strict=True)]

    def sizes(self) -> NDArray[np.int64]:
        """Return the number of values of each sample."""
        offsets = np.array(self.offsets, np.int64)
        return offsets[1:] - offsets[:-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values.nbytes

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.values.device

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.shapes)


def by_size(
    order: NDArray[np.int64], sizes: NDArray[np.int64], batch_size: int, visit: Visit
) -> NDArray[np.int64]:
    """Order the samples of a visit so that those of a batch are of similar size.

    Each sample is there once. Groups of `SORTED_BATCHES` batches are sorted by size, and then whole
    batches change places by chance; which batch is the last, smaller one is chance as well.

    Examples
    --------
    >>> visit = Visit(seed=0, trial=0, epoch=1, shard=0)
    >>> sizes = np.array([9, 1, 8, 2, 7, 3])
    >>> by_size(visit.order(6), sizes, 2, visit).tolist()
    [5, 4, 2, 0, 1, 3]
    """
    n_whole = len(order) - len(order) % batch_size
    window = SORTED_BATCHES * batch_size
    arranged = order.copy()
    for start in range(0, n_whole, window):
        part = arranged[start : min(start + window, n_whole)]
        part[:] = part[np.argsort(sizes[part], kind="stable")]
    batches = arranged[:n_whole].reshape(-1, batch_size)
    key = [visit.seed, visit.trial, visit.epoch, visit.shard, 1]
    arranged[:n_whole] = np.random.default_rng(key).permutation(batches).reshape(-1)
    return arranged
