"""Around any search: what it decides stays, and of equals the one that gains most goes first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import Asked, Context, Decision, Direction, Flow, Losses, Paused, Reported, Train
from dagsel.flows import (
    ASHA,
    PBT,
    ByConvergence,
    Hermes,
    MedianStopping,
    OptunaPruner,
    SuccessiveHalving,
)
from dagsel.flows.baselines import FIFO
from dagsel.simulation import PowerLaw, SimulatedCluster, simulate
from dagsel.testing import FlowSuite
from dagsel.testing.world import Tape, World, replay


class TestAsha(FlowSuite):
    n_concurrent = 3

    def make_flow(self) -> Flow:
        return ByConvergence(ASHA(max_epochs=9, n_trials=12, n_concurrent=3))


class TestHalving(FlowSuite):
    direction: Direction = "maximize"

    def make_flow(self) -> Flow:
        return ByConvergence(SuccessiveHalving(max_epochs=9, n_trials=9))


class TestPbt(FlowSuite):
    def make_flow(self) -> Flow:
        return ByConvergence(PBT(6, 4, {"x": [0.0, 0.5, 1.0]}, perturbation_interval=2))


class TestHermes(FlowSuite):
    def make_flow(self) -> Flow:
        return ByConvergence(Hermes(max_epochs=3, n_trials=5))


class TestFifo(FlowSuite):
    def make_flow(self) -> Flow:
        return ByConvergence(FIFO(max_epochs=3, n_trials=5))


class TestPruner(FlowSuite):
    def make_flow(self) -> Flow:
        return ByConvergence(ByConvergence(OptunaPruner(max_epochs=3, n_trials=6)))


def flow_of(n_trials: int, direction: Direction = "minimize") -> ByConvergence:
    flow = ByConvergence(MedianStopping(9, n_trials, min_trials=99, n_concurrent=n_trials))
    flow.start(Context(1, direction))
    flow.handle(Asked(tuple(range(n_trials))))
    return flow


def report(flow: Flow, trial: int, epoch: int, value: float) -> float | None:
    decisions = flow.handle(Reported(trial, epoch, value, {}, 1.0))
    match decisions:
        case []:
            return None
        case [Train(number, 0, priority, 1, None)] if number == trial:
            return priority
    raise AssertionError(decisions)


def test_gains_of_an_epoch_are_the_priority() -> None:
    flow = flow_of(4)
    assert report(flow, 0, 1, 1.0) is None  # the worst first value so far: no gain
    assert report(flow, 1, 1, 0.5) == pytest.approx(0.5 / 3)  # (1.0 - 0.5) / (2 · 1.5)
    assert report(flow, 1, 2, 0.25) == pytest.approx(0.25 / 2.5)
    assert report(flow, 1, 3, 0.5) == pytest.approx(-0.25 / 2.5)
    assert report(flow, 2, 1, math.nan) == -0.5
    assert report(flow, 2, 2, 0.75) == pytest.approx(0.25 / 2.5)  # from the worst first value


def test_a_quantum_does_not_begin_anew() -> None:
    flow = ByConvergence(Hermes(max_epochs=9, n_trials=1))
    flow.start(Context(1))
    flow.handle(Asked((0,)))
    assert [report(flow, 0, epoch, 1 / epoch) for epoch in (1, 2, 3)] == [None, None, None]
    losses = Losses(9, 1.0, 2.0)
    priority: Any = pytest.approx((1 / 2 - 1 / 3) / (2 + 1 / 3))
    again = Train(0, 0, priority=priority, seconds=10.0)
    assert flow.handle(Paused(0, 3.5, 10.0, 10.0, losses)) == [again]


def test_a_metric_to_maximize_gains_by_growing() -> None:
    flow = flow_of(2, direction="maximize")
    report(flow, 0, 1, 0.25)
    assert report(flow, 0, 2, 0.5) == pytest.approx(0.25 / 2.5)


@settings(deadline=None)
@given(choices=st.binary(min_size=30, max_size=120))
def test_what_the_search_decides_is_the_same(choices: bytes) -> None:
    inner = ASHA(max_epochs=4, n_trials=9, reduction_factor=2, n_concurrent=4)
    world = World(ByConvergence(inner), Context(2), Tape(choices), lambda trial: {})
    world.run()
    alone = ASHA(max_epochs=4, n_trials=9, reduction_factor=2, n_concurrent=4)
    for step, decisions in replay(alone, Context(2), world.steps):
        assert [bare(d) for d in step.decisions if bare(d)] == list(decisions)
        assert all(abs(d.priority) <= 0.5 for d in step.decisions if isinstance(d, Train))


def bare(decision: Decision) -> Decision | None:
    """Take away what was added."""
    if isinstance(decision, Train):
        return replace(decision, priority=0.0) if decision.epochs else None
    return decision


def test_it_goes_around_a_search() -> None:
    with pytest.raises(SearchError, match="ByConvergence goes around a search"):
        ByConvergence("asha")  # type: ignore[arg-type]


def test_the_pruner_of_the_search_inside_is_asked() -> None:
    def search(flow: Flow) -> list[str]:
        curves, cluster = PowerLaw(epoch_s=60.0), SimulatedCluster(n_workers=2)
        run = simulate(flow, curves, cluster, space=lambda t: {"x": t.suggest_float("x", 0, 1)})
        return [trial.state.name for trial in run.study.trials]

    flow = OptunaPruner(max_epochs=4, n_trials=12, pruner=optuna.pruners.MedianPruner(2))
    assert search(ByConvergence(flow)).count("PRUNED") > 0


def test_a_trial_has_a_new_priority_until_it_has_trained_to_the_end() -> None:
    flow = flow_of(1)
    found = [report(flow, 0, epoch, 1 / epoch) for epoch in range(1, 9)]
    assert found[0] is None
    assert None not in found[1:]
    last = flow.handle(Reported(0, 9, 0.1, {}, 1.0))
    assert not any(isinstance(decision, Train) for decision in last)
