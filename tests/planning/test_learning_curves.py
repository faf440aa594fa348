"""Curves are extrapolated alike on any scale; what is left is shared and never overspent."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.planning.learning_curves import OWN_SHARE, choose, forecast
from dagsel.planning.remainder import Remainder, share
from dagsel.planning.scaling import Scaling, ScalingModel, UniversalScaling

Points: TypeAlias = list[tuple[float, float]]


@st.composite
def runs(draw: st.DrawFn) -> list[Points]:
    """Trials with up to eight values each that get better, in steps that floats hold exactly."""
    curves = []
    for _ in range(draw(st.integers(1, 12))):
        loss, curve = float(draw(st.integers(-40, 40))), Points()
        for epoch in range(1, 1 + draw(st.integers(1, 8))):
            loss -= draw(st.integers(0, 8)) / 8
            curve.append((float(epoch), loss))
        curves.append(curve)
    return curves


def equally(n_epochs: float, k: int) -> list[float]:
    return [n_epochs / k] * k


@given(runs(), st.sampled_from([2.0**-40, 0.25, 1.0, 8.0, 2.0**60]), st.floats(0, 100))
def test_no_decision_depends_on_the_scale_of_the_metric(
    curves: list[Points], scale: float, n_epochs: float
) -> None:
    scaled = [[(epoch, scale * loss) for epoch, loss in curve] for curve in curves]
    found = choose(forecast(curves), lambda k: equally(n_epochs, k))
    other = choose(forecast(scaled), lambda k: equally(n_epochs, k))
    assert other.kept == found.kept
    assert other.expected == pytest.approx(scale * found.expected, rel=1e-9)


@given(runs(), st.integers(-1000, 1000), st.floats(0, 100))
def test_what_is_added_to_all_values_is_added_to_what_is_expected(
    curves: list[Points], offset: int, n_epochs: float
) -> None:
    moved = [[(epoch, loss + offset) for epoch, loss in curve] for curve in curves]
    found = choose(forecast(curves), lambda k: equally(n_epochs, k))
    other = choose(forecast(moved), lambda k: equally(n_epochs, k))
    assert other.expected == pytest.approx(found.expected + offset, abs=1e-6)


@given(runs(), st.floats(0, 1000), st.floats(0, 1000))
def test_more_training_promises_more_and_is_less_certain(
    curves: list[Points], less: float, more: float
) -> None:
    found = forecast(curves)
    (early, near), (late, far) = (found.after(n) for n in sorted((less, more)))
    assert (late <= early + 1e-9).all()
    assert (far >= near).all()
    assert (found.gains >= 0).all()
    assert 0.2 <= found.decay <= 0.95


@given(runs(), st.floats(0, 50), st.floats(-50, 50))
def test_what_is_expected_is_no_worse_than_what_is_there(
    curves: list[Points], n_epochs: float, floor: float
) -> None:
    found = forecast(curves)
    chosen = choose(found, lambda k: equally(n_epochs, k), floor=floor)
    assert chosen.expected <= floor + 1e-9
    assert len({*chosen.kept}) == len(chosen.kept) >= 1
    alone = choose(found, lambda k: equally(n_epochs, k), floor=floor, most=1)
    assert chosen.expected <= alone.expected + 1e-9
    assert len(alone.kept) == 1


@given(st.floats(0.3, 2.0), st.integers(5, 30))
def test_a_power_law_that_all_follow_is_foretold(power: float, n: int) -> None:
    epochs = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = forecast([[(e, trial + e**-power) for e in epochs] for trial in range(n)])
    expected, _ = found.after(16.0)
    law = np.arange(n) + 32.0**-power
    gain = 16.0**-power - 32.0**-power
    assert np.abs(expected - law).max() < 0.5 * gain


def test_of_two_trials_the_one_that_gains_may_be_worth_more_than_the_better_one() -> None:
    flat: Points = [(1.0, 0.30), (2.0, 0.30), (4.0, 0.30)]
    gaining: Points = [(1.0, 0.60), (2.0, 0.44), (4.0, 0.31)]
    others: list[Points] = [[(1.0, 0.9), (2.0, 0.8), (4.0, 0.7)]] * 4
    found = forecast([flat, gaining, *others])
    assert found.gains[1] - found.gains[0] <= OWN_SHARE * (0.13 - 0.0) + 1e-12
    assert choose(found, lambda k: equally(0.0, k), most=1).kept == (0,)
    assert choose(found, lambda k: equally(60.0, k), most=1).kept == (1,)


def test_where_ranks_say_little_more_trials_go_on() -> None:
    """The same spread; but in one run the trials change places all the time."""
    steady = [[(e, 0.1 * n + 0.5 / e) for e in (1.0, 2.0, 4.0, 8.0)] for n in range(16)]
    wild = [
        [(e, 0.1 * n + 0.5 / e + (0.8 if (n + p) % 3 else 0.0) / e)
         for p, e in enumerate((1.0, 2.0, 4.0, 8.0))]
        for n in range(16)
    ]  # fmt: skip
    kept = [len(choose(forecast(one), lambda k: equally(64.0, k)).kept) for one in (steady, wild)]
    assert kept[0] < kept[1]


def test_new_trials_are_expected_to_be_like_those_that_are_there() -> None:
    rng = np.random.default_rng(0)
    many = [[(1.0, float(loss))] for loss in rng.uniform(size=32)]
    found = forecast(many)
    without = choose(found, lambda k: equally(200.0, k), most=4)
    with_new = choose(found, lambda k: equally(200.0, k), most=4, n_new=32)
    assert with_new.expected < without.expected


@pytest.mark.parametrize("loss", [1e300, 1e150, -1e300])
def test_huge_losses_give_finite_forecasts(loss: float) -> None:
    found = forecast([[(1.0, loss), (2.0, loss)], [(1.0, 0.5), (2.0, 0.4)], [(1.0, 0.2)]])
    for values in (*found.after(10.0), found.gains):
        assert np.isfinite(values).all()


# ---- what is left

MODELS = st.sampled_from(
    [Scaling({2: 1.85, 4: 3.43, 8: 5.4}), UniversalScaling(0.05, 0.0), UniversalScaling(0.1, 0.05)]
)


@given(st.integers(1, 100), st.integers(1, 40), st.integers(1, 16))
def test_workers_are_shared_without_one_too_many_or_idle(n: int, k: int, most: int) -> None:
    gangs = share(n, k, most)
    assert len(gangs) == k
    assert gangs == sorted(gangs, reverse=True)
    assert all(gang == 1 for gang in gangs) or max(gangs) <= most
    if k <= n <= k * most:
        assert sum(gangs) == n


@given(
    seconds=st.floats(1, 1e4),
    rate=st.floats(0.1, 100),
    epoch_s=st.floats(0.1, 1e3),
    most=st.integers(1, 64),
    k=st.integers(1, 80),
    scaling=MODELS,
)
def test_no_share_takes_more_than_is_left(
    seconds: float, rate: float, epoch_s: float, most: int, k: int, scaling: ScalingModel
) -> None:
    left = Remainder(seconds, rate * seconds, epoch_s, most_workers=most, scaling=scaling)
    n_workers = left.workers(k)
    assert 1 <= n_workers <= most
    epochs = left.epochs(k)
    assert len(epochs) == k
    # λ(p) ≤ p: nothing trains more than the workers that are paid for could train alone.
    assert math.fsum(epochs) * epoch_s <= left.worker_seconds * (1 + 1e-9)
    assert max(epochs) * epoch_s <= seconds * left.speed(left.best_gang) * (1 + 1e-9)


def test_one_worker_more_than_the_budget_pays_for_until_the_deadline_may_come_further() -> None:
    left = Remainder(10.0, 19.0, 1.0, most_workers=64, scaling=Scaling({2: 1.8}))
    assert left.n_workers == 1
    assert left.workers(1) == 2
    assert left.epochs(1) == pytest.approx([9.5 * 1.8])
