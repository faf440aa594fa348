"""Gangs of few trials: as fast as the measure lets them be, on the workers that are there."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from dagsel.planning.scaling import UniversalScaling
from dagsel.planning.small_population import SWITCH_S, gang_for, is_worth_a_switch

SCALINGS = st.builds(UniversalScaling, st.floats(0, 0.9), st.floats(0, 0.2))
NUMBERS = st.integers(1, 16)


@given(st.sampled_from(["auto", "gang"]), NUMBERS, NUMBERS, SCALINGS)
def test_no_other_size_is_faster(
    policy: Literal["auto", "gang"], n_trials: int, n_workers: int, scaling: UniversalScaling
) -> None:
    taken = gang_for(policy, n_trials, n_workers, efficiency=scaling.efficiency)
    most = max(1, n_workers // n_trials)
    assert 1 <= taken <= most
    sizes = range(2, most + 1) if policy == "gang" and most > 1 else range(1, most + 1)
    fastest = max(scaling.speedup(size) for size in sizes)
    assert scaling.speedup(taken) >= fastest - 1e-9


@given(NUMBERS, NUMBERS)
def test_what_was_not_measured_is_not_taken_for_granted(n_trials: int, n_workers: int) -> None:
    assert gang_for("auto", n_trials, n_workers, efficiency=None) == 1
    most = max(1, n_workers // n_trials)
    assert gang_for("gang", n_trials, n_workers, efficiency=None) == most
    assert gang_for("hop", n_trials, n_workers, efficiency=lambda gang: 1.0) == 1
    assert gang_for("release", n_trials, n_workers, efficiency=lambda gang: 1.0) == 1


@given(NUMBERS, st.sets(NUMBERS))
def test_a_gang_that_cannot_train_is_not_taken(n_workers: int, sizes: set[int]) -> None:
    taken = gang_for("gang", 1, n_workers, efficiency=None, fits=sizes.__contains__)
    assert taken == max({1, *(size for size in sizes if 1 < size <= n_workers)})


@given(NUMBERS, NUMBERS, st.floats(0, 100), SCALINGS)
def test_there_and_back_never_pays(
    now: int, then: int, left_s: float, scaling: UniversalScaling
) -> None:
    e = scaling.efficiency
    there, back = (is_worth_a_switch(*pair, left_s, e) for pair in ((now, then), (then, now)))
    assert not (there and back)
    won = left_s / scaling.speedup(now) - left_s / scaling.speedup(then)
    assert there == (won > SWITCH_S) or abs(won - SWITCH_S) < 1e-9
    assert is_worth_a_switch(now, then, None, e)
