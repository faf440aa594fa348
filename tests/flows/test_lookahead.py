"""Lookahead keeps every law of a flow, its deadline and its budget; it draws while that pays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
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
    WorkersChanged,
)
from dagsel.flows import Lookahead
from dagsel.planning.capacity import ClusterCapacity
from dagsel.planning.scaling import Scaling
from dagsel.simulation import PowerLaw, SimulatedCluster, SimulatedRun, simulate
from dagsel.testing import FlowSuite

SCALING = Scaling({2: 1.85, 4: 3.43, 8: 5.40})


class TestLookahead(FlowSuite):
    def make_flow(self) -> Lookahead:
        return Lookahead(30, 90)


class TestScaling(FlowSuite):
    n_points = 5

    def make_flow(self) -> Lookahead:
        return Lookahead(30, 120, scaling=Scaling({2: 1.5}), max_epochs=4)


class TestToTheEnd(FlowSuite):
    def make_flow(self) -> Lookahead:
        return Lookahead(30, 20, max_workers_per_trial=2, max_epochs=5)


@pytest.mark.skipif(settings().max_examples < 500, reason="by night: make laws")
class TestLong(FlowSuite):
    """Epochs are short beside the deadline, so there are many looks."""

    def make_flow(self) -> Lookahead:
        return Lookahead(1000, 3000, max_epochs=20)


# ---- in virtual time


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}


def searched(
    flow: Lookahead, cluster: SimulatedCluster, epoch_s: float, seed: int = 0
) -> SimulatedRun:
    return simulate(
        flow,
        PowerLaw(epoch_s=epoch_s, scaling=SCALING, seed=seed),
        cluster,
        seed=seed,
        space=space,
        sampler=optuna.samplers.RandomSampler(seed=seed),
        deadline=flow.deadline_s,
    )


@settings(max_examples=12, deadline=None)
@given(
    deadline_s=st.sampled_from([60.0, 300.0, 900.0]),
    rate=st.sampled_from([0.4, 1.0, 3.7, 16.0]),
    share=st.sampled_from([0.003, 0.02, 0.08, 0.4, 1.5]),
    most=st.sampled_from([1, 2, 5, 200]),
    startup=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 3),
)
def test_deadline_and_budget_hold_and_there_is_a_model(
    deadline_s: float, rate: float, share: float, most: int, startup: float, seed: int
) -> None:
    flow = Lookahead(deadline_s, rate * deadline_s, scaling=SCALING)
    cluster = SimulatedCluster(1, max_workers=most, startup_s=startup * deadline_s)
    run = searched(flow, cluster, share * deadline_s, seed)
    assert run.seconds <= deadline_s * (1 + 1e-9)
    assert run.cost <= rate * deadline_s * (1 + 1e-9)
    assert run.record.best is not None
    assert run.record.best.is_complete
    assert not [trial for trial in run.record.trials.values() if trial.is_live]


@pytest.mark.parametrize(("n_workers", "minutes"), [(4, 15), (16, 15), (16, 60), (8, 30)])
def test_what_is_billed_is_used(n_workers: int, minutes: int) -> None:
    deadline_s = 60.0 * minutes
    flow = Lookahead(deadline_s, deadline_s * n_workers, scaling=SCALING)
    run = searched(flow, SimulatedCluster(1, n_shards=1, max_workers=500), 60.0)
    ran = (*run.record.units, *run.record.pieces)
    used = sum((done.stop - done.start) * done.gang for done in ran)
    assert 0.95 * run.cost <= used <= run.cost + 1e-6
    assert run.cost >= 0.9 * deadline_s * n_workers


def test_the_cluster_grows_first_and_shrinks_then() -> None:
    flow = Lookahead("30 min", "480 worker-minutes", scaling=SCALING)
    run = searched(flow, SimulatedCluster(1, n_shards=1, max_workers=500), 60.0)
    sizes = [moment.n_workers for moment in run.record.course]
    assert max(sizes) >= 4 * 16
    assert sizes[-1] <= 16 + 1
    assert len(run.record.trials) >= 0.9 * 0.2 * 480  # a fifth of the budget, an epoch each


def test_on_a_small_cluster_trials_take_turns() -> None:
    flow = Lookahead("20 min", "40 worker-minutes")
    run = searched(flow, SimulatedCluster(2, n_shards=1, max_workers=2), 20.0)
    assert len(run.record.trials) >= 16
    epochs = sorted(len(trial.epochs) for trial in run.record.trials.values())
    assert epochs[-1] >= 20
    assert epochs[len(epochs) // 2] <= 3


# ---- event by event


def of(kind: type[Any], decisions: Iterable[Decision]) -> list[Any]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def begun(n: int = 8, **options: Any) -> Lookahead:
    """A search of ten minutes on two workers' budget; trials of an epoch a minute."""
    flow = Lookahead(600, 1200, **options)
    assert flow.start(Context(2)) == [Scale(8), Wake(60.0), Ask(8)]
    trains = flow.handle(Asked(tuple(range(n)), exhausted=n < 8))
    assert of(Train, trains) == [Train(trial, 2) for trial in range(n)]
    flow.handle(WorkersChanged(n))
    return flow


def report(
    flow: Lookahead, losses: Sequence[float], at: float = 60.0, epoch: int = 1
) -> list[Decision]:
    """Report an epoch of each trial; answer the pauses that follow."""
    answers = list[Decision]()
    for trial, loss in enumerate(losses):
        answers = flow.handle(Reported(trial, epoch, loss, {}, at))
    trials = [pause.trial for pause in of(Pause, answers)]
    assert trials == list(range(len(losses)))
    assert not of(Scale, answers)  # workers are released when they are idle
    for trial in trials:
        answers = flow.handle(Paused(trial, float(epoch), at))
    return answers


LOSSES = [0.5, 0.1, 0.9, 0.12, 0.8, 0.7, 0.6, 0.95]


def test_more_trials_are_drawn_until_a_fifth_of_the_budget_is_used() -> None:
    flow = Lookahead(3600, 7200)
    assert of(Ask, flow.start(Context(2))) == [Ask(8)]
    flow.handle(Asked(tuple(range(8))))
    flow.handle(WorkersChanged(8))
    answers = report(flow, LOSSES)
    assert of(Ask, answers) == [Ask(16)]  # 24 epochs of a minute are 1440 of 7200 s
    assert of(Scale, answers) == [Scale(16)]
    assert not of(Train, answers)  # the others wait
    assert of(Train, flow.handle(Asked((8, 9))))[0] == Train(8, 2)


def test_a_space_that_has_no_more_is_not_asked() -> None:
    flow = begun(n=3)
    answers = report(flow, LOSSES[:3])
    assert not of(Ask, answers)
    assert {train.trial for train in of(Train, answers)} >= {1}


def test_the_best_go_on_with_all_workers_and_the_others_are_stopped() -> None:
    flow = begun()
    answers = report(flow, LOSSES)  # eight epochs of a minute are more than a fifth
    stopped = {stop.trial for stop in of(Stop, answers)}
    kept = {train.trial: train.gang for train in of(Train, answers)}
    assert stopped | kept.keys() == set(range(8))
    assert {1, 3} <= kept.keys()
    assert 7 in stopped
    (scale,) = of(Scale, answers)
    assert sum(kept.values()) == scale.n_workers
    assert isinstance(answers[-1], Wake)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_trial_without_a_finite_value_does_not_go_on(bad: float) -> None:
    flow = begun()
    answers = report(flow, [bad, *LOSSES[1:7], bad])
    assert {0, 7} <= {stop.trial for stop in of(Stop, answers)}


def test_if_no_value_is_finite_others_are_drawn() -> None:
    flow = begun()
    answers = report(flow, [math.nan] * 8)
    assert len(of(Ask, answers)) == 1
    assert len(of(Stop, answers)) == 7


def test_if_no_epoch_ends_in_a_tenth_of_the_time_trials_are_scored_where_they_are() -> None:
    flow = begun()
    pauses = flow.handle(Tick(60.0))
    assert pauses == [Pause(trial, evaluate=True) for trial in range(8)]
    for trial, loss in enumerate(LOSSES):
        answers = flow.handle(Paused(trial, 0.25, 61.0, value=loss))
    assert 7 in {stop.trial for stop in of(Stop, answers)}
    assert 1 in {train.trial for train in of(Train, answers)}
    assert flow.state.epoch_s == pytest.approx(4 * 61.0)


def test_a_trial_that_is_best_in_the_last_pause_is_complete() -> None:
    flow = begun()
    report(flow, LOSSES)
    kept = [*flow.state.trials]
    pauses = flow.handle(Tick(599.0))
    for trial in [pause.trial for pause in of(Pause, pauses)]:
        answers = flow.handle(Paused(trial, 1.5, 599.5, value=0.01 if trial == kept[-1] else 0.4))
    outcomes = {stop.trial: stop.outcome for stop in of(Stop, answers)}
    assert outcomes == {trial: "complete" if trial == kept[-1] else "pruned" for trial in kept}
    assert answers[-1] == Finish()


def test_a_worse_value_takes_nothing_from_a_trial() -> None:
    flow = begun()
    report(flow, LOSSES)
    for at, (epoch, loss) in enumerate([(2, 0.05), (3, 0.9)]):
        flow.handle(Reported(1, epoch, loss, {}, 70.0 + at))
    assert flow.state.trials[1].loss == 0.05
    ended = flow.handle(DeadlineReached(600.0))
    assert [stop.trial for stop in of(Stop, ended) if stop.outcome == "complete"] == [1]


def test_the_last_pause_begins_as_early_as_the_longest_one_took_long() -> None:
    flow = begun()
    flow.handle(Tick(60.0))
    for trial, loss in enumerate(LOSSES):
        flow.handle(Paused(trial, 0.25, 70.0, value=loss))
    assert flow.state.pause_s == 10.0
    trains = {trial for trial, one in flow.state.trials.items() if one.gang}
    pauses = of(Pause, flow.handle(Tick(590.0)))
    assert trains
    assert {pause.trial for pause in pauses if pause.evaluate} == trains


def test_lost_workers_are_asked_for_again() -> None:
    flow = begun()
    assert flow.handle(WorkersChanged(5))[0] == Scale(8)
    assert not of(Scale, flow.handle(WorkersChanged(8)))


def test_no_more_workers_are_wanted_than_there_can_be() -> None:
    flow = Lookahead(600, 6000)
    context = Context(1, capacity=ClusterCapacity(most_workers=3))
    assert flow.workers_to_begin(context) == 3
    assert of(Ask, flow.start(context)) == [Ask(3)]


def test_bad_input_is_refused() -> None:
    with pytest.raises(SearchError, match="scaling must be a Scaling or a UniversalScaling"):
        Lookahead(100, 100, scaling={2: 1.8})  # type: ignore[arg-type]
    with pytest.raises(SearchError, match="deadline"):
        Lookahead("soon", 100)
    with pytest.raises(SearchError, match="max_epochs"):
        Lookahead(100, 100, max_epochs=0)
