"""Rungs and brackets are those of the paper and of the public implementations, exactly."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.flows.rungs import (
    Bracket,
    Rounding,
    hyperband_brackets,
    n_halvings,
    rung_epochs,
    rung_sizes,
)

whole = st.integers(1, 2000)
factors = st.integers(2, 12)


def sizes(brackets: tuple[Bracket, ...]) -> list[list[int]]:
    return [[rung.n_trials for rung in bracket] for bracket in brackets]


def epochs(brackets: tuple[Bracket, ...]) -> list[list[int]]:
    return [[rung.epochs for rung in bracket] for bracket in brackets]


def n_calls(bracket: Bracket) -> int:
    before = (0, *(rung.epochs for rung in bracket))
    return sum(r.n_trials * (r.epochs - b) for r, b in zip(bracket, before, strict=False))


def test_brackets_of_dask_ml_for_81_epochs() -> None:
    # dask-ml, HyperbandSearchCV(max_iter=81).metadata: Li et al., JMLR 2018, Algorithm 1
    brackets = hyperband_brackets(1, 81, 3)
    assert sizes(brackets) == [[81, 27, 9, 3, 1], [34, 11, 3, 1], [15, 5, 1], [8, 2], [5]]
    assert epochs(brackets) == [[1, 3, 9, 27, 81], [3, 9, 27, 81], [9, 27, 81], [27, 81], [81]]
    assert sum(bracket[0].n_trials for bracket in brackets) == 143


def test_rounded_up_as_syne_tune_does() -> None:
    # Syne Tune 0.13, SynchronousHyperbandRungSystem.geometric(1, 81, 3).
    brackets = hyperband_brackets(1, 81, 3, "ceil")
    assert sizes(brackets) == [[81, 27, 9, 3, 1], [34, 12, 4, 2], [15, 5, 2], [8, 3], [5]]
    assert epochs(brackets) == [[1, 3, 9, 27, 81], [3, 9, 27, 81], [9, 27, 81], [27, 81], [81]]


@pytest.mark.parametrize(
    ("max_epochs", "n_models", "n_epochs"),
    [(9, 17, 69), (15, 17, 101), (20, 17, 144), (27, 49, 357)],
)
def test_models_and_epochs_of_dask_ml(max_epochs: int, n_models: int, n_epochs: int) -> None:
    # dask-ml, HyperbandSearchCV(max_iter=..., aggressiveness=3).metadata
    brackets = hyperband_brackets(1, max_epochs, 3)
    assert sum(bracket[0].n_trials for bracket in brackets) == n_models
    assert sum(map(n_calls, brackets)) == n_epochs


@pytest.mark.parametrize(
    ("max_epochs", "reduction_factor", "n_trials"),
    [(243, 3, [243, 98, 41, 18, 9, 6]), (1000, 10, [1000, 134, 20, 4])],
)
def test_first_rungs_of_ray(max_epochs: int, reduction_factor: int, n_trials: list[int]) -> None:
    # Ray Tune, HyperBandScheduler: n0(s) = ceil((s_max + 1) / (s + 1) · η^s)
    brackets = hyperband_brackets(1, max_epochs, reduction_factor)
    assert [bracket[0].n_trials for bracket in brackets] == n_trials


@given(reduction_factor=factors, power=st.integers(0, 12), least=st.integers(1, 9))
def test_powers_lose_no_bracket(reduction_factor: int, power: int, least: int) -> None:
    most = least * reduction_factor**power
    assert n_halvings(least, most, reduction_factor) == power
    assert n_halvings(least, reduction_factor * most - 1, reduction_factor) == power
    if power:
        assert n_halvings(least, most - 1, reduction_factor) == power - 1
        expected = tuple(least * reduction_factor**k for k in range(power + 1))
        assert rung_epochs(least, most, reduction_factor) == expected


@given(least=whole, more=st.integers(0, 2000), reduction_factor=factors)
def test_rungs_are_the_powers_below_the_maximum_and_the_maximum(
    least: int, more: int, reduction_factor: int
) -> None:
    most = least + more
    powers = (least * reduction_factor**k for k in range(12))
    expected = [*(power for power in powers if power < most), most]
    assert list(rung_epochs(least, most, reduction_factor)) == expected


@given(
    n_trials=whole,
    n_rungs=st.integers(1, 8),
    reduction_factor=factors,
    rounding=st.sampled_from(["floor", "ceil"]),
)
def test_each_rung_keeps_its_share_and_at_least_one(
    n_trials: int, n_rungs: int, reduction_factor: int, rounding: Rounding
) -> None:
    cut = math.floor if rounding == "floor" else math.ceil
    kept = rung_sizes(n_trials, n_rungs, reduction_factor, rounding)
    assert kept[0] == n_trials
    assert len(kept) == n_rungs
    for before, after in pairwise(kept):
        assert after == max(1, cut(Fraction(before, reduction_factor)))


@given(
    least=st.integers(1, 9),
    more=st.integers(0, 500),
    reduction_factor=factors,
    rounding=st.sampled_from(["floor", "ceil"]),
)
def test_brackets_begin_as_the_paper_says(
    least: int, more: int, reduction_factor: int, rounding: Rounding
) -> None:
    most = least + more
    brackets = hyperband_brackets(least, most, reduction_factor, rounding)
    s_max = len(brackets) - 1
    for s, bracket in zip(range(s_max, -1, -1), brackets, strict=True):
        assert len(bracket) == s + 1
        share = Fraction((s_max + 1) * reduction_factor**s, s + 1)
        assert bracket[0].n_trials == math.ceil(share)
        assert bracket[0].epochs == math.floor(Fraction(most, reduction_factor**s)) >= least
        assert bracket[-1].epochs == bracket[0].epochs * reduction_factor**s <= most
