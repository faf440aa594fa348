"""The elastic partners of SEER keep every law of a flow, and the cluster follows their trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Finish,
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
from dagsel.flows.baselines.random_trial import RandomTrial
from dagsel.flows.stages import StagedSearch
from dagsel.planning.brackets import exactly
from dagsel.planning.capacity import ClusterCapacity, Limits
from dagsel.planning.nodes import nodes_for
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


class TestSmallGrid(FlowSuite):
    def make_flow(self) -> ElasticGrid:
        return ElasticGrid(20, 80, n_trials=2, min_workers_per_trial=2, sampling="study")


class TestRandomTrial(FlowSuite):
    def make_flow(self) -> RandomTrial:
        return RandomTrial(20, 80, max_epochs=3)


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


def halves(flow: StagedSearch) -> list[tuple[float, tuple[int, ...], int]]:
    return [(float(stage.seconds), stage.n_trials, stage.n_workers) for stage in flow.plan.stages]


@pytest.mark.parametrize(
    ("deadline", "workers", "options", "n_trials", "top"),
    [
        (60, 16, {}, 28, 4),  # 960 - 4 · 30 leaves 840, and a trial explores for 30
        (30, 8, {}, 12, 4),
        (15, 4, {}, 4, 4),
        (180, 16, {"max_workers_per_trial": 8}, 24, 8),
        (60, 16, {"min_workers_per_trial": 2, "max_workers_per_trial": 8}, 12, 8),
        (60, 16, {"n_trials": 5}, 5, 4),
        (60, 2, {}, 1, 3),  # four until halfway pay for three and one
        (60, 1, {}, 1, 1),
    ],
)
def test_the_plan_of_a_grid_is_the_one_that_is_made_by_hand(
    deadline: int, workers: int, options: dict[str, Any], n_trials: int, top: int
) -> None:
    flow = ElasticGrid(deadline, deadline * workers, **options)
    p_min = options.get("min_workers_per_trial", 1)
    assert flow.plan.workers == (p_min, top)
    assert halves(flow) == [
        (deadline / 2, (n_trials, 0), p_min * n_trials),
        (deadline / 2, (0, 1), top),
    ]


@given(
    deadline=st.floats(1, 1e4),
    share=st.floats(1.01, 300),
    p_min=st.integers(1, 4),
    more=st.integers(0, 8),
    most=st.none() | st.integers(8, 100),
    node_size=st.integers(1, 4),
)
def test_a_grid_takes_all_the_time_and_as_many_trials_as_the_budget_pays_for(
    deadline: float, share: float, p_min: int, more: int, most: int | None, node_size: int
) -> None:
    budget = deadline * share * nodes_for(p_min, node_size)
    flow = ElasticGrid(
        deadline, budget, min_workers_per_trial=p_min, max_workers_per_trial=p_min + more
    )
    plan = flow.make_plan(Limits(deadline, budget, most, node_size))
    explore, exploit = plan.stages
    assert explore.seconds == exploit.seconds == exactly(deadline) / 2
    assert plan.cost <= exactly(budget)
    assert explore.n_trials[0] >= 1
    assert p_min <= plan.workers[1] <= p_min + more
    for stage in plan.stages:
        assert stage.n_workers % node_size == 0 or stage.n_workers < node_size
    if most is None:
        another = nodes_for(p_min * (explore.n_trials[0] + 1), node_size) - explore.n_workers
        assert another == 0 or plan.cost + another * explore.seconds > exactly(budget)
    else:
        assert max(explore.n_workers, exploit.n_workers) <= max(most, node_size)


def test_a_grid_explores_and_then_gives_the_best_trial_its_workers() -> None:
    flow = ElasticGrid(20, 80)
    assert flow.start(Context(4))[1:] == [Scale(4), Wake(10.0), Ask(4, "grid")]
    assert flow.handle(Asked((0, 1, 2, 3))) == [Train(trial, 2) for trial in range(4)]
    assert flow.handle(Tick(10.0)) == [Pause(trial, evaluate=True) for trial in range(4)]
    for trial, value in enumerate([0.3, 0.1, 0.2, 0.4]):
        decisions = flow.handle(Paused(trial, 0.25, 11.0, value=value))
    assert stops(decisions) == [2, 0, 3]
    train, wake = decisions[3:]
    assert train == Train(1, 0, gang=4)
    assert wake == Wake(19.0)  # as early as the first pause took long
    assert flow.handle(Tick(19.0)) == [Pause(1, evaluate=True)]
    ended = flow.handle(Paused(1, 9.5, 20.0, value=0.05))
    assert ended == [Stop(1, "the last stage is over; it is the best", "complete"), Finish()]


def test_a_grid_gives_back_the_workers_of_a_trial_that_ends() -> None:
    flow = ElasticGrid(20, 80, max_epochs=1)
    flow.start(Context(4))
    flow.handle(Asked((0, 1, 2, 3)))
    stop, scale = flow.handle(Reported(2, 1, 0.5, {}, 3.0))
    assert (stop, scale) == (Stop(2, "trained to the end, 1 epochs", "complete"), Scale(3))


def test_a_random_trial_has_all_workers_until_the_deadline() -> None:
    flow = RandomTrial(60, 960)
    assert flow.plan.workers == (16,)
    assert halves(flow) == [(60.0, (1,), 16)]
    assert flow.start(Context(16))[1:] == [Scale(16), Wake(30.0), Ask(1, "random")]
    assert flow.handle(Asked((0,))) == [Train(0, 2, gang=16)]


def test_a_pause_halfway_tells_how_early_the_last_one_has_to_begin() -> None:
    flow = RandomTrial(20, 80)
    flow.start(Context(4))
    flow.handle(Asked((0,)))
    assert flow.handle(Tick(10.0)) == [Pause(0, evaluate=True)]
    decisions = flow.handle(Paused(0, 0.25, 12.5, value=0.1))
    assert decisions == [Train(0, 0, gang=4), Wake(17.5)]
    assert flow.handle(Tick(17.5)) == [Pause(0, evaluate=True)]
    # The deadline comes before it is evaluated: what it was worth halfway counts.
    ended = [d.outcome for d in flow.handle(DeadlineReached(20.0)) if isinstance(d, Stop)]
    assert ended == ["complete"]


def test_bad_input_is_refused() -> None:
    with pytest.raises(SearchError, match="the smallest that works is 20"):
        ElasticGrid(20, 19)
    with pytest.raises(SearchError, match="the smallest that works is 20"):
        ElasticHyperband(20, 19)
    with pytest.raises(SearchError, match="n_trials must be a whole number of 1 or more"):
        ElasticGrid(20, 80, n_trials=0)
    with pytest.raises(SearchError, match="max_workers_per_trial=4 is below min_workers_per_trial"):
        ElasticGrid(20, 800, min_workers_per_trial=5)
    with pytest.raises(SearchError, match="the smallest that works is 40"):
        ElasticGrid(20, 39, min_workers_per_trial=2)
    capacity = ClusterCapacity(most_workers=2)
    with pytest.raises(SearchError, match="min_workers_per_trial=3, and the cluster can have 2"):
        ElasticGrid(20, 80, min_workers_per_trial=3).plan_for(Context(1, capacity=capacity))


@pytest.mark.parametrize("flow", [ElasticHyperband(60, 60), ElasticGrid(60, 61)])
def test_a_start_that_costs_the_last_worker_ends_the_search_sooner(flow: StagedSearch) -> None:
    """One worker came after 5 s that were planned as 2.5, and nothing else is to be had."""
    capacity = ClusterCapacity(most_workers=4, startup_s=2.5)
    plan = flow.plan_for(Context(0, capacity=capacity))
    assert plan.ends[-1] == pytest.approx(60.0, abs=1.5)
    late = flow.plan_for(Context(1, capacity=capacity, seconds=5.0, worker_seconds=10.0))
    assert late.ends[-1] == pytest.approx(5.0 + flow.cost.worker_seconds - 10.0)
    assert late.stages[-1].n_workers == 1
