"""HyperSched keeps every law of a flow; it explores while there is time, then reallocates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

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
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.flows.hypersched import HyperSched
from dagsel.planning.scaling import Scaling
from dagsel.testing import FlowSuite


class TestHyperSched(FlowSuite):
    def make_flow(self) -> HyperSched:
        return HyperSched(30, 90, reduction_factor=2)


class TestScaling(FlowSuite):
    n_points = 5

    def make_flow(self) -> HyperSched:
        return HyperSched(30, 120, reduction_factor=2, scaling=Scaling({2: 1.5}), max_epochs=4)


class TestToTheEnd(FlowSuite):
    def make_flow(self) -> HyperSched:
        return HyperSched(
            30, 90, min_epochs=2, reduction_factor=2, max_workers_per_trial=2, max_epochs=5
        )


def begun(max_workers: int | None = None) -> HyperSched:
    flow = HyperSched(100, 400, reduction_factor=2, max_workers_per_trial=max_workers)
    assert flow.start(Context(4)) == [Scale(4), Wake(49.95), Ask(4)]
    assert flow.handle(Asked((0, 1, 2, 3))) == [Train(trial, 1) for trial in range(4)]
    return flow


def pause_all(flow: HyperSched, at: float, until: float) -> Sequence[Decision]:
    """Pause all for the first time; no pause brings a value."""
    pauses = flow.handle(Tick(at))
    trials = [d.trial for d in pauses if isinstance(d, Pause)]
    assert pauses == [Pause(trial, evaluate=True) for trial in trials]
    assert trials
    for trial in trials:
        decisions = flow.handle(Paused(trial, 0.5, until))
        assert not decisions or trial == trials[-1]
    return decisions


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e30])
def test_of_trials_as_bad_the_first_is_the_best_wherever_they_were_scored(value: float) -> None:
    """One was scored in the middle of its first epoch, the other at the end of one."""
    flow = begun()
    flow.handle(Reported(1, 1, value, {}, 10.0))
    pauses = flow.handle(Tick(49.95))
    for decision in pauses:
        if isinstance(decision, Pause):
            flow.handle(Paused(decision.trial, 0.5, 50.0, value=value))
    ended = flow.handle(DeadlineReached(100.0))
    (best,) = [d.trial for d in ended if isinstance(d, Stop) and d.outcome == "complete"]
    assert best == 0


def gangs(decisions: Sequence[Decision]) -> dict[int, int]:
    return {d.trial: d.gang for d in decisions if isinstance(d, Train)}


def test_it_explores_as_asha_does() -> None:
    flow = begun()
    assert flow.handle(Reported(0, 1, 0.5, {}, 10.0)) == [Ask(1)]  # one of one is not a half
    assert flow.handle(Asked((4,))) == [Train(4, 1)]
    assert flow.handle(Reported(1, 1, 0.4, {}, 10.0)) == [Train(1, 1)]  # the better of two
    assert flow.handle(Reported(2, 1, 0.6, {}, 10.0)) == [Ask(1)]
    assert flow.handle(Asked((5,))) == [Train(5, 1)]
    assert flow.handle(Reported(3, 1, 0.7, {}, 10.0)) == [Train(0, 1)]  # two of four


def test_when_nothing_new_can_catch_up_the_workers_go_to_the_best() -> None:
    flow = begun()
    for trial, loss in enumerate([0.5, 0.4, 0.6]):
        for decision in flow.handle(Reported(trial, 1, loss, {}, 10.0)):
            if isinstance(decision, Ask):
                flow.handle(Asked((4 + trial,)))
    again = [Train(trial, 0) for trial in (1, 3, 4, 6)]
    assert pause_all(flow, 49.95, 49.95) == [Wake(99.9), *again]
    # At 27.5 s an epoch a new trial cannot reach the second epoch of trial 1 by 100 s.
    decisions = flow.handle(Reported(1, 2, 0.3, {}, 90.0))
    stopped = [d.trial for d in decisions if isinstance(d, Stop)]
    assert stopped == [4, 6]  # of six the best four stay; 3, 4 and 6 have no value
    assert gangs(decisions) == {1: 1, 0: 1, 2: 1, 3: 1}
    assert any(isinstance(d, Wake) and d.seconds == pytest.approx(94.95) for d in decisions)
    # Half of the time that was left has gone twice.
    decisions = flow.handle(Tick(94.95))
    assert [d.trial for d in decisions if isinstance(d, Stop)] == [2, 3]
    assert gangs(decisions) == {1: 2, 0: 2}
    assert any(isinstance(d, Wake) and d.seconds == pytest.approx(97.425) for d in decisions)
    decisions = flow.handle(Tick(97.425))
    assert gangs(decisions) == {1: 4}
    assert decisions[-1] == Wake(99.9)
    assert flow.handle(Tick(99.9)) == [Pause(1, evaluate=True)]
    decisions = flow.handle(Paused(1, 2.5, 99.95, value=0.2))
    assert decisions == [
        Stop(1, "the deadline is there; it is the best", "complete"),
        Finish(),
    ]


@pytest.mark.parametrize("min_epochs", [1, 2, 3, 8])
@pytest.mark.parametrize("n_done", [0, 1, 5])
def test_a_trial_that_is_given_workers_has_two_epochs_ahead_or_what_it_was_given_before(
    min_epochs: int, n_done: int
) -> None:
    flow = HyperSched(100, 400, min_epochs=min_epochs, reduction_factor=2)
    flow.start(Context(4))
    begun, *shared = flow.handle(Asked((0,), exhausted=True))
    assert begun == Train(0, min_epochs)
    assert gangs(shared) == {0: 4}  # nothing else is to come, so it has all workers
    for epoch in range(1, n_done + 1):
        flow.handle(Reported(0, epoch, 0.5, {}, float(epoch)))
    given = flow.state.trials[0].n_given
    decisions = [*pause_all(flow, 49.95, 49.95), *flow.handle(Tick(99.0))]
    trains = [d for d in decisions if isinstance(d, Train)]
    assert trains[-1].gang == 4
    assert given + sum(train.epochs for train in trains) == max(given, n_done + 2)


def test_no_trial_has_more_than_max_workers() -> None:
    flow = begun(max_workers=2)
    for trial in range(4):
        flow.handle(Reported(trial, 1, 0.1 * trial, {}, 60.0))
    assert set(gangs(pause_all(flow, 80.0, 80.0)).values()) == {2}
    assert set(gangs(flow.handle(Tick(90.0))).values()) <= {2}


def test_what_the_last_pause_tells_counts_for_a_trial_without_a_whole_epoch() -> None:
    flow = begun()
    pause_all(flow, 49.95, 49.95)
    assert len(flow.handle(Tick(99.9))) == 4
    for trial, value in enumerate([0.5, 0.3, 0.4]):
        assert flow.handle(Paused(trial, 0.5, 99.95, value=value)) == []
    decisions = flow.handle(Paused(3, 0.5, 99.95, value=0.6))
    ended = {d.trial: d.outcome for d in decisions if isinstance(d, Stop)}
    assert ended == {0: "pruned", 1: "complete", 2: "pruned", 3: "pruned"}


def test_a_trial_that_ends_in_the_last_pause_is_complete() -> None:
    flow = HyperSched(100, 200, max_epochs=2)
    flow.start(Context(2))
    flow.handle(Asked((0,)))
    flow.handle(Reported(0, 1, 0.5, {}, 60.0))
    flow.handle(Tick(99.9))
    decisions = flow.handle(Reported(0, 2, 0.4, {}, 99.95))
    assert decisions == [Stop(0, "trained to the end, 2 epochs", "complete"), Finish()]


def test_the_last_pause_begins_as_early_as_the_first_one_took_long() -> None:
    flow = begun()
    assert flow.handle(Reported(0, 1, 0.5, {}, 10.0)) == [Ask(1)]
    flow.handle(Asked((4,)))
    assert flow.handle(Tick(49.95)) == [Pause(trial, evaluate=True) for trial in (1, 2, 3, 4)]
    assert flow.handle(Reported(1, 1, 0.4, {}, 50.0)) == []  # from now on it stands on its rung
    assert flow.handle(WorkersChanged(5)) == []
    for trial in (1, 2, 3):
        assert flow.handle(Paused(trial, 0.5, 55.0, value=0.4)) == []
    again = flow.handle(Paused(4, 0.5, 59.95, value=0.4))
    assert again == [Wake(90.0), *(Train(trial, 0) for trial in (2, 3, 4)), Train(1, 1)]
    pauses = flow.handle(Tick(90.0))
    assert pauses == [Pause(trial, evaluate=True) for trial in (1, 2, 3, 4)]


def test_no_trial_has_more_workers_than_make_it_faster_and_so_many_go_on_that_all_are_used() -> (
    None
):
    flow = HyperSched(100, 800, reduction_factor=2, scaling=Scaling({2: 1.9, 4: 3.5}))
    flow.start(Context(8))
    flow.handle(Asked(tuple(range(8))))
    for trial in range(8):
        flow.handle(Reported(trial, 1, 0.1 * trial, {}, 60.0))  # no new one can come so far
    assert set(gangs(pause_all(flow, 80.0, 80.0)).values()) == {2}
    decisions = flow.handle(Tick(90.0))
    assert gangs(decisions) == {0: 4, 1: 4}  # of one trial alone four would be idle
    assert decisions[-1] == Wake(99.9)


def test_workers_that_no_trial_is_left_for_are_released() -> None:
    flow = HyperSched(100, 800, max_workers_per_trial=2, max_epochs=2)
    flow.start(Context(8))
    decisions = flow.handle(Asked((0, 1, 2), exhausted=True))
    assert Scale(6) in decisions
    assert gangs(decisions) == {0: 2, 1: 2, 2: 2}
    assert flow.handle(WorkersChanged(6)) == []  # these were not lost
    assert flow.handle(WorkersChanged(5))[0] == Scale(6)
    flow.handle(Reported(1, 1, 0.5, {}, 5.0))
    decisions = flow.handle(Reported(1, 2, 0.4, {}, 10.0))
    assert Scale(4) in decisions


def test_with_several_shards_two_trials_a_worker_train_until_they_are_halved() -> None:
    flow = HyperSched(100, 400, reduction_factor=2)
    assert flow.start(Context(4, n_shards=3))[-1] == Ask(8)
    trials = tuple(range(8))
    assert flow.handle(Asked(trials)) == [Train(trial, 1) for trial in trials]
    for trial in trials:
        flow.handle(Reported(trial, 1, 0.1 * trial, {}, 60.0))  # no new one can come so far
    assert [flow.state.trials[trial].gang for trial in trials] == 8 * [1]
    decisions = pause_all(flow, 80.0, 80.0)
    assert [d.trial for d in decisions if isinstance(d, Stop)] == [2, 3, 4, 5, 6, 7]
    assert gangs(decisions) == {0: 2, 1: 2}  # of 4 that have a worker each, the better half


def test_of_a_space_with_no_more_trials_it_stops_exploring_when_a_worker_is_free() -> None:
    flow = HyperSched(100, 400, reduction_factor=2)
    flow.start(Context(4, n_shards=3))
    flow.handle(Asked(tuple(range(6)), exhausted=True))
    assert flow.handle(Reported(0, 1, 0.5, {}, 10.0)) == []  # it is beaten by none, but alone
    assert flow.handle(Reported(1, 1, 0.6, {}, 10.0)) == [Train(0, 1)]
    assert flow.state.explores
    flow.handle(Reported(0, 2, 0.5, {}, 20.0))
    flow.handle(TrialFailed(2, "its worker died"))
    assert not flow.state.explores


def test_lost_workers_are_asked_for_again() -> None:
    flow = begun()
    assert flow.handle(WorkersChanged(3)) == [Scale(4)]
    assert flow.handle(WorkersChanged(4)) == []


def test_bad_input_is_refused() -> None:
    with pytest.raises(SearchError, match="buys no worker until the deadline.*works is 100"):
        HyperSched(100, 99)
    with pytest.raises(SearchError, match="reduction_factor must be 2 or more"):
        HyperSched(100, 100, reduction_factor=1)
    with pytest.raises(SearchError, match="min_epochs=9 is above max_epochs=5; lower the first"):
        HyperSched(100, 100, min_epochs=9, max_epochs=5)
    with pytest.raises(SearchError, match="scaling must be a Scaling or a UniversalScaling"):
        HyperSched(100, 100, scaling={2: 1.8})  # type: ignore[arg-type]


@pytest.mark.parametrize("ended", [(0.5,), (0.5, 0.2), (0.2, 0.5), (0.4, 0.3)])
@pytest.mark.parametrize("loss", [0.1, 0.25, 0.35, 0.9])
def test_a_trial_is_complete_at_the_end_if_it_is_the_best_of_all(
    ended: tuple[float, ...], loss: float
) -> None:
    flow = HyperSched(100, 400, reduction_factor=2, max_epochs=2)
    flow.start(Context(4))
    flow.handle(Asked((0, 1, 2), exhausted=True))
    for trial, found in enumerate(ended):
        for epoch in (1, 2):
            flow.handle(Reported(trial, epoch, found, {}, 10.0 * trial + epoch))
    flow.handle(Reported(2, 1, loss, {}, 50.0))
    decisions = flow.handle(DeadlineReached(100.0))
    (outcome,) = [d.outcome for d in decisions if isinstance(d, Stop) and d.trial == 2]
    assert outcome == ("complete" if loss < min(ended) else "pruned")
