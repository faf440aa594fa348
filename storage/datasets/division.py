"""Which samples train and which validate, where their rows say it. Pure.

A label is the number of a row's value, in the order in which the values first come: so it does not
matter whether the values are text, numbers or categories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dagsel.storage.datasets.permutation import Shuffle

Rows: TypeAlias = "NDArray[np.int64]"
Labels: TypeAlias = "NDArray[np.integer[Any]]"

#: So many validation samples are fitted exactly from groups; of more, the first come by chance.
_FITTED = 1 << 17


@dataclass(frozen=True, slots=True)
class Division:
    """The rows of each part, rising, and where each row goes. Other rows are left out.

    It stands in the place of a `Shuffle`: destinations count through the training samples, then
    through the validation samples, each part shuffled by itself.

    Examples
    --------
    >>> divided = Division(np.array([0, 2, 5]), np.array([1, 3]), seed=0)
    >>> sorted(divided.sources(np.arange(3)).tolist())
    [0, 2, 5]
    >>> places = divided.destinations(np.arange(6))
    >>> int(places[4]), divided.sources(places[[1, 5]]).tolist()
    (-1, [1, 5])
    """

    train: Rows
    validation: Rows
    seed: int

    def destinations(self, sources: Rows) -> Rows:
        """Return where rows go, shape ``(n,)``: -1 for those that are left out."""
        places = np.full(len(sources), -1, np.int64)
        for rows, shuffle, first in self._parts():
            at = np.minimum(np.searchsorted(rows, sources), len(rows) - 1)
            is_in = rows[at] == sources
            places[is_in] = first + shuffle.destinations(at[is_in])
        return places

    def sources(self, destinations: Rows) -> Rows:
        """Return the rows that go to places: the inverse of `destinations`."""
        found = np.empty(len(destinations), np.int64)
        for rows, shuffle, first in self._parts():
            is_in = (destinations >= first) & (destinations < first + len(rows))
            found[is_in] = rows[shuffle.sources(destinations[is_in] - first)]
        return found

    def _parts(self) -> list[tuple[Rows, Shuffle, int]]:
        train = Shuffle(len(self.train), (self.seed, 0))
        validation = Shuffle(len(self.validation), (self.seed, 1))
        return [(self.train, train, 0), (self.validation, validation, len(self.train))]


def by_class(labels: Labels, n_validation: int, seed: int) -> NDArray[np.bool_]:
    """Choose validation samples, the same share of each class.

    Each class gives its share rounded down; the samples that then lack come from the classes that
    lost most by rounding (the method of the largest remainder).

    Examples
    --------
    >>> labels = np.array([0] * 10 + [1] * 5)
    >>> chosen = by_class(labels, 3, seed=0)
    >>> int(chosen[:10].sum()), int(chosen[10:].sum())
    (2, 1)
    """
    sizes = np.bincount(labels)
    shares = class_shares(sizes.tolist(), n_validation)
    order = np.argsort(labels, kind="stable")  # the rows of each class, one class after the other
    chosen = np.zeros(len(labels), np.bool_)
    first = 0
    for label, (size, share) in enumerate(zip(sizes.tolist(), shares, strict=True)):
        rows = order[first : first + size]
        chosen[rows[Shuffle(size, (seed, 2, label)).sources(np.arange(share))]] = True
        first += size
    return chosen


def class_shares(sizes: Sequence[int], n_validation: int) -> list[int]:
    """Divide a number of samples among classes by their sizes.

    Examples
    --------
    >>> class_shares([70, 25, 5], 10)
    [7, 3, 0]
    """
    n_samples = sum(sizes)
    shares = [size * n_validation // n_samples for size in sizes]
    rest = [size * n_validation % n_samples for size in sizes]
    by_rest = sorted(range(len(sizes)), key=lambda label: (-rest[label], label))
    for label in by_rest[: n_validation - sum(shares)]:
        shares[label] += 1
    return shares


def by_group(labels: Labels, n_validation: int, seed: int) -> NDArray[np.bool_]:
    """Choose validation samples in whole groups, as near to a number as these allow.

    Examples
    --------
    >>> chosen = by_group(np.array([0, 0, 0, 1, 1, 1, 2, 2]), 2, seed=0)
    >>> np.flatnonzero(chosen).tolist()
    [6, 7]
    """
    sizes = np.bincount(labels)
    order = np.random.default_rng((seed, 3)).permutation(len(sizes))
    n_first = int(np.searchsorted(np.cumsum(sizes[order]), n_validation - _FITTED, side="right"))
    first, left = order[:n_first], order[n_first:]
    more = nearest_sum(sizes[left].tolist(), n_validation - int(sizes[first].sum()))
    return np.isin(labels, np.concatenate([first, left[more]]))


def nearest_sum(sizes: Sequence[int], wanted: int) -> list[int]:
    """Return which of some sizes add up to a number as nearly as any of them do.

    Of two sums as near it is the smaller one, and the empty sum is none.

    Examples
    --------
    >>> nearest_sum([5, 4, 4, 7], 9), nearest_sum([6, 6], 8), nearest_sum([20, 30], 5)
    ([0, 1], [0], [0])
    """
    # Of each sum up to twice what is wanted: the item with which it was first reached.
    most = max(2 * wanted, min(sizes))
    reached_by = np.full(most + 1, -1, np.int64)
    is_reached = np.zeros(most + 1, np.bool_)
    is_reached[0] = True
    for item, size in enumerate(sizes):
        if size <= most:
            new = is_reached[: most + 1 - size] & ~is_reached[size:]
            reached_by[size:][new] = item
            is_reached[size:] |= new
        if is_reached[wanted] and wanted:
            break
    sums = np.flatnonzero(is_reached)[1:]
    total = int(sums[np.argmin(np.abs(sums - wanted))])
    found = []
    while total:
        found.append(int(reached_by[total]))
        total -= sizes[found[-1]]
    return sorted(found)


#: Where the samples of an input go.
Places: TypeAlias = Shuffle | Division
