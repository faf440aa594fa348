"""Laws of events that end, take back or repeat something; and of what `check` refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    Bind,
    CheckAdded,
    DispatchEvent,
    FailTrial,
    PriorityChanged,
    RoundAdded,
    TrialAllowed,
    TrialStopped,
    UnitDone,
    UnitReady,
    UnitReturned,
    UnitStarted,
    UnitTrains,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.units import Begun, Chain, Kind, Round, Unit

BUSY = settings(deadline=None)
N_SHARDS = 3
ALL = frozenset(range(N_SHARDS))
FIRST = Unit("train", 0, 1, 0)
EVALUATED = RoundAdded(Round(1, (Chain(0, range(1, 2), N_SHARDS),)))


class Told:
    """A dispatcher that is told of events, a second apart, and checked after each."""

    def __init__(self, *events: DispatchEvent, **config: object) -> None:
        self.dispatcher = Dispatcher(DispatchConfig(n_shards=N_SHARDS, **config))  # type: ignore[arg-type]
        self.now_s = 0.0
        for event in events:
            self(event)

    def __call__(self, *events: DispatchEvent) -> list[object]:
        self.now_s += 1.0
        out = self.dispatcher.handle(*events, now_s=self.now_s)
        self.dispatcher.check()
        return [i.unit if isinstance(i, Bind) else i for i in out]


def epochs(first: int, last: int) -> RoundAdded:
    return RoundAdded(Round(first, (Chain(0, range(first, last + 1), N_SHARDS, evaluate=False),)))


@BUSY
@given(st.permutations(range(N_SHARDS)), st.integers(0, N_SHARDS))
def test_a_check_goes_on_until_all_its_shards_are_scored_and_is_over_then(
    order: list[int], n_done: int
):
    tell = Told(WorkerAdded("a", ALL), epochs(1, 1), CheckAdded(0, 1))
    units = [Unit("check", 0, 1, shard) for shard in order]
    for unit in units[:n_done]:
        assert tell(UnitReady(unit)) == [unit]
        assert tell(UnitDone(unit, 1.0, unit.position)) == []
    for unit in units[n_done:] if n_done < N_SHARDS else units:
        assert tell(UnitReady(unit)) == ([unit] if n_done < N_SHARDS else [])
        tell(UnitReturned(unit))


@BUSY
@given(st.integers(1, 12))
def test_a_worker_that_joins_again_under_its_unit_is_not_counted_as_lost(n_times: int):
    tell = Told(WorkerAdded("a", ALL), epochs(1, 1), max_strikes=1)
    for _ in range(n_times):
        assert tell(UnitReady(FIRST)) == [FIRST]
        tell(UnitStarted(FIRST, "a"), UnitTrains(FIRST, "a"))
        assert not any(isinstance(out, FailTrial) for out in tell(WorkerAdded("a", ALL)))
    assert tell.dispatcher.state.n_lost == 0


@pytest.mark.parametrize("kind", ["train", "evaluate", "check"])
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_unit_that_came_back_is_bound_when_it_is_ready_again_and_not_before(
    kind: Kind, is_bound: bool
):
    unit = Unit(kind, 0, 1, 0)
    tell = Told(*([WorkerAdded("a", ALL)] if is_bound else []), EVALUATED, CheckAdded(0, 1))
    assert tell(UnitReady(unit)) == ([unit] if is_bound else [])
    assert unit not in tell(UnitReturned(unit))
    assert unit not in tell(WorkerAdded("b", ALL))
    assert unit in tell(UnitReady(unit))


@pytest.mark.parametrize("kind", ["train", "evaluate", "check"])
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_unit_that_is_done_is_not_bound_again_wherever_it_was_done(kind: Kind, is_bound: bool):
    unit = Unit(kind, 0, 1, 0)
    tell = Told(*([WorkerAdded("a", ALL)] if is_bound else []), EVALUATED, CheckAdded(0, 1))
    assert tell(UnitReady(unit)) == ([unit] if is_bound else [])
    assert unit not in tell(UnitDone(unit, 1.0, 0))
    assert unit not in tell(WorkerAdded("b", ALL))


def test_a_trial_that_was_stopped_begins_other_epochs_while_its_old_unit_still_runs():
    tell = Told(WorkerAdded("a", ALL), epochs(1, 1), UnitReady(FIRST), TrialStopped(0))
    later = Unit("train", 0, 5, 0)
    assert later not in tell(epochs(5, 6), UnitReady(later))
    assert later in tell(UnitReturned(FIRST))


def loads_what_it_holds(dispatcher: Dispatcher) -> None:
    dispatcher.workers["a"].loading |= 1


def runs_without_its_shard(dispatcher: Dispatcher) -> None:
    dispatcher.workers["a"].held = 0


def is_bound_twice(dispatcher: Dispatcher) -> None:
    dispatcher.bindings[Unit("train", 0, 1, 1)] = dispatcher.bindings[FIRST]


def runs_for_a_trial_that_is_over(dispatcher: Dispatcher) -> None:
    del dispatcher.trials[0]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (loads_what_it_holds, "loads what it holds"),
        (runs_without_its_shard, "does not hold shard"),
        (is_bound_twice, "workers and bindings disagree"),
        (runs_for_a_trial_that_is_over, "its trial is over"),
    ],
)
def test_what_must_not_be_is_refused(break_it: Callable[[Dispatcher], None], words: str):
    tell = Told(WorkerAdded("a", ALL), epochs(1, 1), UnitReady(FIRST))
    assert FIRST in tell.dispatcher.bindings
    break_it(tell.dispatcher)
    with pytest.raises(AssertionError, match=words):
        tell.dispatcher.check()


def unscored_epoch(tell: Told) -> list[DispatchEvent]:
    """Trial 0 has trained an epoch, and its scores are as ready as its next epoch is."""
    done = Begun(tuple(range(N_SHARDS)))
    chain = Chain(0, range(1, 3), N_SHARDS, begun=(done,))
    tell(RoundAdded(Round(2, (chain,))), TrialAllowed(0, gang=2))
    scores = [UnitReady(Unit("evaluate", 0, 1, shard)) for shard in range(N_SHARDS)]
    return [*scores, UnitReady(Unit("train", 0, 2, 0))]


def too_large(tell: Told) -> list[DispatchEvent]:
    tell(epochs(1, 1), TrialAllowed(0, gang=5))
    return [UnitReady(FIRST)]


def crowds_out_a_better_one(tell: Told) -> list[DispatchEvent]:
    """Trial 2 has the highest priority, and needs a worker that a gang of 3 would take."""
    tell(epochs(1, 1), TrialAllowed(0, gang=3))
    tell(RoundAdded(Round(2, (Chain(2, range(1, 2), N_SHARDS, evaluate=False),))))
    return [PriorityChanged(2, 2.0), UnitReady(FIRST), UnitReady(Unit("train", 2, 1, 0))]


@pytest.mark.parametrize("why", [unscored_epoch, too_large, crowds_out_a_better_one])
def test_a_gang_that_cannot_start_yet_lets_the_next_one_start(
    why: Callable[[Told], list[DispatchEvent]],
):
    tell = Told(*(WorkerAdded(worker, ALL) for worker in "abc"))
    waits = why(tell)
    tell(RoundAdded(Round(3, (Chain(1, range(1, 2), N_SHARDS, evaluate=False),))))
    other = Unit("train", 1, 1, 0)
    bound = tell(TrialAllowed(1, gang=2), PriorityChanged(0, 1.0), *waits, UnitReady(other))
    assert other in bound
    assert not any(isinstance(unit, Unit) and unit[:2] == ("train", 0) for unit in bound)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_a_priority_counts_whenever_it_is_told(first: int, when: str):
    units = [Unit("train", trial, 1, 0) for trial in (0, 1)]
    rounds = Round(1, tuple(Chain(trial, range(1, 2), N_SHARDS) for trial in (0, 1)))
    tell, told = Told(RoundAdded(rounds)), PriorityChanged(first, 1.0)
    if when == "before":
        tell(told)
    tell(*map(UnitReady, units), *([told] if when == "while" else []))
    if when == "after":
        tell(told)
    assert tell(WorkerAdded("a", ALL))[0] == units[first]


def test_a_worker_that_joins_under_the_address_of_a_gangs_member_is_another_one():
    tell = Told(*(WorkerAdded(worker, ALL) for worker in "ab"), replicas=2)
    tell(epochs(1, 1), TrialAllowed(0, gang=2))
    assert tell(UnitReady(FIRST)) == [FIRST]
    tell(UnitStarted(FIRST, "a"), UnitTrains(FIRST, "a"))
    tell(WorkerRemoved("a"))
    for n_own in (2, 2):  # the member is lost soon after, and a new one too
        tell.now_s -= 0.9
        tell(WorkerRemoved("b"), WorkerAdded("b", ALL))
        assert tell.dispatcher.state.suspects[FIRST].n_own == n_own
