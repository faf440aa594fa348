"""The elastic partners of SEER keep every law of a flow, and the cluster follows their trials."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Pause,
    Paused,
    Reported,
    Scale,
    Stop,
    Tick,
    Train,
    Wake,
)
from dagsel.flows.baselines.elastic_grid import ElasticGrid
from dagsel.flows.baselines.elastic_hyperband import ElasticHyperband
from dagsel.flows.stages import StagedSearch
from dagsel.planning.capacity import ClusterCapacity
from dagsel.testing import FlowSuite


class TestElasticHyperband(FlowSuite):
    def make_flow(self) -> ElasticHyperband:
        return ElasticHyperband(20, 60, reduction_factor=2, min_stage=3)


class TestElasticHyperbandToTheEnd(FlowSuite):
    def make_flow(self) -> ElasticHyperband:
        return ElasticHyperband(20, 60, reduction_factor=2, min_stage=3, max_epochs=3)


class TestElasticGrid(FlowSuite):
    n_points = 4

    def make_flow(self) -> ElasticGrid:
        return ElasticGrid(20, 80, max_epochs=3)


class TestSharedGrid(FlowSuite):
    def make_flow(self) -> ElasticGrid:
        return ElasticGrid(20, 80, n_trials=7)


def stops(decisions: Sequence[Decision]) -> list[int]:
    return [d.trial for d in decisions if isinstance(d, Stop)]


def test_brackets_halve_at_their_own_times_and_their_workers_go() -> None:
    flow = ElasticHyperband(16, 160, min_stage=1)
    assert [stage.n_trials for stage in flow.plan.stages] == [(21, 7, 3), (5, 7, 3), (1, 1, 3)]
    assert flow.start(Context(31))[1:] == [Scale(31), Wake(1.0), Ask(31)]
    assert flow.handle(Asked(tuple(range(31)))) == [Train(trial, 2) for trial in range(31)]

    # Only the first bracket, trials 0 to 20, has to pause; the others train on.
    assert flow.handle(Tick(1.0)) == [Pause(trial, evaluate=True) for trial in range(21)]
    for trial in range(21):
        decisions = flow.handle(Paused(trial, 0.5, 1.0, value=float(trial)))
    assert stops(decisions) == list(range(5, 21))
    assert [d for d in decisions if isinstance(d, Scale | Wake)] == [Scale(15), Wake(4.0)]
    assert [d.trial for d in decisions if isinstance(d, Train)] == [0, 1, 2, 3, 4]

    # A trial competes within its bracket: the second one's worst is not lost to the first one.
    paused = [*range(5), *range(21, 28)]
    assert flow.handle(Tick(4.0)) == [Pause(trial, evaluate=True) for trial in paused]
    for trial in paused:
        decisions = flow.handle(Paused(trial, 0.5, 4.0, value=float(-trial)))
    assert set(stops(decisions)) == {0, 1, 2, 3, *range(21, 27)}
    assert [d for d in decisions if isinstance(d, Scale | Wake)] == [Scale(5), Wake(15.984)]


def test_a_grid_gives_back_the_workers_of_a_trial_that_ends() -> None:
    flow = ElasticGrid(20, 160, n_trials=4, max_epochs=1)
    assert flow.start(Context(8))[1:] == [Scale(8), Wake(10.0), Ask(4, "grid")]
    assert flow.handle(Asked((0, 1, 2, 3))) == [Train(trial, 1, gang=2) for trial in range(4)]
    stop, scale = flow.handle(Reported(2, 1, 0.5, {}, 3.0))
    assert (stop, scale) == (Stop(2, "trained to the end, 1 epochs", "complete"), Scale(6))


def test_a_large_grid_keeps_to_the_workers_that_the_budget_pays_for() -> None:
    flow = ElasticGrid(20, 80, n_trials=7)
    assert flow.start(Context(4))[1:] == [Scale(4), Wake(10.0), Ask(7, "grid")]
    assert flow.handle(Asked(tuple(range(7)))) == [Train(trial, 2) for trial in range(7)]


def test_a_pause_halfway_tells_how_early_the_last_one_has_to_begin() -> None:
    flow = ElasticGrid(20, 80, n_trials=4)
    flow.start(Context(4))
    flow.handle(Asked((0, 1, 2, 3)))
    pauses = [Pause(trial, evaluate=True) for trial in range(4)]
    assert flow.handle(Tick(10.0)) == pauses
    for trial in (3, 2, 1, 0):
        decisions = flow.handle(Paused(trial, 0.25, 12.5, value=0.1 * trial))
    assert decisions == [*(Train(trial, 0) for trial in range(4)), Wake(17.5)]
    assert flow.handle(Tick(17.5)) == pauses
    # The deadline comes before any of them is evaluated: what they were worth halfway counts.
    ended = [d.outcome for d in flow.handle(DeadlineReached(20.0)) if isinstance(d, Stop)]
    assert ended == ["complete", "pruned", "pruned", "pruned"]


def test_bad_input_is_refused() -> None:
    with pytest.raises(SearchError, match="the smallest that works is 20"):
        ElasticGrid(20, 19)
    with pytest.raises(SearchError, match="the smallest that works is 20"):
        ElasticHyperband(20, 19)
    with pytest.raises(SearchError, match="n_trials must be a whole number of 1 or more"):
        ElasticGrid(20, 80, n_trials=0)


@pytest.mark.parametrize("flow", [ElasticHyperband(60, 60), ElasticGrid(60, 61)])
def test_a_start_that_costs_the_last_worker_ends_the_search_sooner(flow: StagedSearch) -> None:
    """One worker came after 5 s that were planned as 2.5, and nothing else is to be had."""
    capacity = ClusterCapacity(most_workers=4, startup_s=2.5)
    plan = flow.plan_for(Context(0, capacity=capacity))
    assert plan.ends[-1] == pytest.approx(60.0, abs=1.5)
    late = flow.plan_for(Context(1, capacity=capacity, seconds=5.0, worker_seconds=10.0))
    assert late.ends[-1] == pytest.approx(5.0 + flow.cost.worker_seconds - 10.0)
    assert late.stages[-1].n_workers == 1
