"""The column that says how samples are divided: its values as numbers, in the order they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import DatasetInputError


@dataclass
class Labels:
    """Values as numbers, block by block: four bytes a sample, whatever the values are.

    Examples
    --------
    >>> labels = Labels("groups='patient'")
    >>> labels.add(np.array(["eve", "bob", "eve"]))
    >>> labels.add(np.array(["ann", "bob"]))
    >>> labels.numbers.tolist(), labels.values
    ([0, 1, 0, 2, 1], ['eve', 'bob', 'ann'])
    """

    what: str
    values: list[Any] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)
    _parts: list[NDArray[np.int32]] = field(default_factory=list)
    _n: int = 0

    @classmethod
    def of(cls, what: str, blocks: Iterable[NDArray[Any]]) -> Labels:
        """Take in the values of all blocks."""
        labels = cls(what)
        for block in blocks:
            labels.add(block)
        return labels

    def add(self, block: NDArray[Any]) -> None:
        """Take in the values of the next samples."""
        import pandas as pd  # only here: workers that read shards do without

        block = np.asarray(block)
        if block.ndim != 1:
            raise DatasetInputError(
                f"{self.what}: row {self._n} has {list(block.shape[1:])} values, and needs one; "
                "give a column of single values"
            )
        block = block.astype("U") if block.dtype.kind == "S" else block
        try:
            codes, found = pd.factorize(block.astype(object) if block.dtype.kind == "U" else block)
        except TypeError:
            raise DatasetInputError(
                f"{self.what} holds neither text nor numbers from row {self._n} on; "
                "give another column"
            ) from None
        if (codes < 0).any():
            row = self._n + int(np.flatnonzero(codes < 0)[0])
            raise DatasetInputError(
                f"{self.what}: row {row} has no value; fill it in, or leave the row out"
            )
        for value in found.tolist():
            if value not in self._known:
                self._known[value] = len(self.values)
                self.values.append(value)
        numbers = np.array([self._known[value] for value in found.tolist()], np.int32)
        self._parts.append(numbers[codes])
        self._n += len(block)

    @property
    def numbers(self) -> NDArray[np.int32]:
        """The number of each sample's value."""
        return np.concatenate([np.empty(0, np.int32), *self._parts])
