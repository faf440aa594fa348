"""A number of each worker, to be changed one by one or all at once."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, MutableMapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

W = TypeVar("W", bound=Hashable)


class WorkerNumbers(MutableMapping[W, float]):
    """A mapping from workers to numbers, which are also there as one array.

    Examples
    --------
    >>> load = WorkerNumbers()
    >>> load["a"], load["b"] = 1.0, 2.0
    >>> load.numbers[:] += 0.5
    >>> dict(load)
    {'a': 1.5, 'b': 2.5}
    """

    __slots__ = ("_numbers", "_place", "n_changes")

    def __init__(self) -> None:
        self._numbers = array("d")
        self._place: dict[W, int] = {}
        self.n_changes = 0  # how often a worker has come or gone

    def __getitem__(self, worker: W) -> float:
        return self._numbers[self._place[worker]]

    def __setitem__(self, worker: W, number: float) -> None:
        place = self._place.get(worker)
        if place is not None:
            self._numbers[place] = number
            return
        self._place[worker] = len(self._numbers)
        self._numbers.append(number)
        self.n_changes += 1

    def __delitem__(self, worker: W) -> None:
        del self._numbers[self._place.pop(worker)]
        self._place = {other: place for place, other in enumerate(self._place)}
        self.n_changes += 1

    def __iter__(self) -> Iterator[W]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, worker: Any) -> bool:
        return worker in self._place

    @property
    def numbers(self) -> npt.NDArray[np.float64]:
        """The numbers themselves, in the workers' order; no worker can come or go meanwhile."""
        return np.frombuffer(self._numbers) if self._numbers else np.empty(0)
