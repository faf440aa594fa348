"""A shuffle is a permutation by its seed alone, uniform, and undone for any few of many."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.storage.datasets.permutation import Shuffle

SEEDS = st.integers(0, 2**64) | st.tuples(st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000) | st.integers(60_000, 140_000), SEEDS)
def test_it_is_a_permutation(n: int, seed: int | tuple[int, int]) -> None:
    places = Shuffle(n, seed).destinations(np.arange(n))
    assert np.array_equal(np.sort(places), np.arange(n))


@given(st.integers(1, 2**50), SEEDS, st.data())
def test_sources_undo_destinations_for_any_few_of_many(
    n: int, seed: int, data: st.DataObject
) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    shuffle = Shuffle(n, seed)
    there = shuffle.destinations(places)
    assert ((there >= 0) & (there < n)).all()
    assert np.array_equal(shuffle.sources(there), places)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(30, 300) | st.integers(70_000, 90_000), st.integers(0, 2**32), st.integers(0, 2**32)
)
def test_it_depends_on_the_seed_alone(n: int, one: int, two: int) -> None:
    everything = np.arange(n)
    first, second = (Shuffle(n, seed).destinations(everything) for seed in (one, two))
    assert np.array_equal(first, second) is (one == two)


def test_all_orders_of_four_come_about_equally_often() -> None:
    counts = Counter(tuple(Shuffle(4, seed).destinations(np.arange(4))) for seed in range(4800))
    assert len(counts) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < 49.7  # 0.999 quantile with 23 degrees of freedom


def test_neighbours_part_and_places_are_uniform() -> None:
    n = 100_000
    places = Shuffle(n, 3).destinations(np.arange(n))
    steps = np.abs(np.diff(places))
    assert abs(steps.mean() / n - 1 / 3) < 0.01
    assert abs(np.corrcoef(places, np.arange(n))[0, 1]) < 0.02
    quarter = np.bincount(places[: n // 4] * 10 // n, minlength=10)
    assert abs(quarter / (n / 40) - 1).max() < 0.08
