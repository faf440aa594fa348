"""What the dispatcher does in each situation, event by event."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from dagsel.dispatch import openings
from dagsel.dispatch.description import ProcessNow, describe
from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    Bind,
    Drained,
    DrainRequested,
    DropShard,
    FailRun,
    FailTrial,
    GangBroke,
    HorizonSet,
    LoadShard,
    Preempt,
    PriorityChanged,
    RestartWorker,
    RoundAdded,
    ShardFailed,
    ShardLoaded,
    TimerFired,
    TrialAllowed,
    TrialHeld,
    TrialRests,
    TrialStopped,
    UnitDone,
    UnitFailed,
    UnitLost,
    UnitReady,
    UnitReturned,
    UnitStarted,
    UnitTrains,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.unit_times import UnitTimes
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.errors import ShardCorruptError
from dagsel.simulation.virtual_cluster import VirtualCluster


def train(trial, position=0, epoch=1):
    return Unit("train", trial, epoch, position)


def score(trial, shard, epoch=1):
    return Unit("evaluate", trial, epoch, shard)


def round_of(n_trials, n_shards, *, n_epochs=1, evaluate=True, number=0, first=0, **options):
    return Round(
        number,
        tuple(
            Chain(trial, range(1, 1 + n_epochs), n_shards, evaluate=evaluate, **options)
            for trial in range(first, first + n_trials)
        ),
    )


def ready(*trials):
    return [UnitReady(train(trial)) for trial in trials]


def binds(instructions):
    return [i for i in instructions if isinstance(i, Bind)]


def checked_cluster(seconds, *, options=None, **config):
    """A model cluster whose dispatcher is checked after every call."""
    dispatcher = Dispatcher(DispatchConfig(**config))
    return VirtualCluster(dispatcher, seconds, watch=lambda _: dispatcher.check(), **options or {})


class Driver:
    """A dispatcher whose time is passed by hand."""

    def __init__(self, **config):
        self.dispatcher = Dispatcher(DispatchConfig(**config))
        self.now = 0.0

    def __call__(self, *events, at=None):
        self.now = self.now if at is None else at
        out = self.dispatcher.handle(*events, now_s=self.now)
        self.dispatcher.check()
        return out


def test_a_worker_with_the_shard_gets_the_unit():
    tell = Driver(n_shards=2)
    out = tell(WorkerAdded("a", frozenset({0})), WorkerAdded("b", frozenset({1})))
    assert out == []
    out = tell(RoundAdded(round_of(1, 2)), *ready(0))
    assert len(binds(out)) == 1
    assert (out[0].worker, out[0].shard) in {("a", 0), ("b", 1)}


def test_ready_before_its_round_is_remembered():
    tell = Driver(n_shards=1)
    assert tell(WorkerAdded("a", frozenset({0})), *ready(0)) == []
    assert binds(tell(RoundAdded(round_of(1, 1)))) == [Bind(train(0), "a", 0)]


def test_a_batch_is_taken_in_before_anything_is_decided():
    """The longest trial is bound although it is said last to be ready."""
    tell = Driver(n_shards=1)
    tell.dispatcher.times.add_trial(1, cost=5.0)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(2, 1)))
    assert binds(tell(*ready(0, 1))) == [Bind(train(1), "a", 0)]


def test_a_shorter_unit_is_bound_where_the_longest_would_end_too_late():
    tell = Driver(n_shards=1)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(2, 1, n_epochs=3)), *ready(0, 1))
    first, second = (0, 1) if tell.dispatcher.bindings.keys() == {train(0)} else (1, 0)
    tell(UnitDone(train(first), 10.0, 0), at=10.0)
    tell(UnitDone(train(second), 1.0, 0), at=11.0)
    tell(HorizonSet(13.0))  # what is expected after one unit each lies nearer together
    out = tell(UnitReady(train(first, epoch=2)), UnitReady(train(second, epoch=2)), at=11.0)
    assert binds(out) == [Bind(train(second, epoch=2), "a", 0, scores=(0,))]


def test_a_turn_that_ends_in_time_begins_though_its_unit_would_not():
    tell = Driver(n_shards=1)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(1, 1, n_epochs=3)), *ready(0))
    tell(UnitDone(train(0), 10.0, 0), at=10.0)
    tell(HorizonSet(15.0))
    assert binds(tell(UnitReady(train(0, epoch=2)), at=11.0)) == []
    assert binds(tell(TrialAllowed(0, seconds=4.5), at=11.0)) == []
    out = binds(tell(TrialAllowed(0, seconds=4.0), at=11.0))
    assert [(bind.unit, bind.seconds) for bind in out] == [(train(0, epoch=2), 4.0)]


def test_evaluations_come_before_training_and_prefer_the_state_at_home():
    tell = Driver(n_shards=1)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(2, 1)), *ready(0, 1))
    out = tell(UnitDone(train(0), 1.0, 0), UnitReady(score(0, 0)), at=1.0)
    assert binds(out) == [Bind(score(0, 0), "a", 0)]


def test_an_evaluation_runs_beside_the_next_epoch():
    tell = Driver(n_shards=1, replicas=2)
    tell(WorkerAdded("a", frozenset({0})), WorkerAdded("b", frozenset({0})))
    tell(RoundAdded(round_of(1, 1, n_epochs=2)), *ready(0))
    out = tell(
        UnitDone(train(0), 1.0, 0), UnitReady(score(0, 0)), UnitReady(train(0, epoch=2)), at=1.0
    )
    assert {i.unit for i in binds(out)} == {score(0, 0), train(0, epoch=2)}
    assert len({i.worker for i in binds(out)}) == 2


@pytest.mark.parametrize("slower", [1.1, 1.5, 3.0])
def test_a_unit_that_hangs_on_a_faster_worker_keeps_no_trial_waiting(slower):
    tell = Driver(n_shards=1, replicas=2)
    tell(WorkerAdded("fast", frozenset({0})), WorkerAdded("slow", frozenset({0})))
    tell(RoundAdded(round_of(2, 1, n_epochs=9)), *ready(0, 1))
    running = {binding.worker: unit for unit, binding in tell.dispatcher.bindings.items()}
    at = 10.0
    tell(UnitDone(running["fast"], at, 0), at=at)
    tell(UnitDone(running["slow"], slower * at, 0), at=slower * at)
    hangs = score(running["fast"].trial, 0)
    assert binds(tell(UnitReady(hangs), at=100.0)) == [Bind(hangs, "fast", 0)]
    waits = train(hangs.trial, epoch=2)
    out, n_asked = tell(UnitReady(waits), at=200.0), 0
    while not binds(out):
        n_asked += 1
        wake_at = tell.dispatcher.wake_at
        assert n_asked < 4, "it is asked again and again"
        assert wake_at is not None, "nothing asks for it again"
        out = tell(TimerFired(), at=wake_at)
    assert [(bind.unit, bind.worker) for bind in binds(out)] == [(waits, "slow")]


def test_a_fixed_order_is_kept():
    tell = Driver(n_shards=3)
    tell(WorkerAdded("a", frozenset({0, 1, 2})))
    out = tell(RoundAdded(round_of(1, 3, order=((2, 0, 1),))), *ready(0))
    assert out == [Bind(train(0), "a", 2)]
    out = tell(UnitDone(train(0), 1.0, 2), UnitReady(train(0, 1)), at=1.0)
    assert binds(out) == [Bind(train(0, 1), "a", 0)]


def test_looks_ahead_only_when_the_end_is_near_and_nobody_is_idle():
    tell = Driver(n_shards=2, lookahead_s=0.1)
    tell(WorkerAdded("a", frozenset({0, 1})), RoundAdded(round_of(3, 2, evaluate=False)))
    first = binds(tell(*ready(0, 1, 2)))
    assert len(first) == 1, "nothing is known yet: no look-ahead"
    tell(UnitStarted(first[0].unit, "a"))
    out = tell(UnitDone(first[0].unit, 0.1, first[0].shard), at=0.1)
    second = binds(out)
    assert len(second) == 1
    wake_at = tell.dispatcher.wake_at
    assert wake_at is not None
    assert 0.15 < wake_at < 0.2
    assert binds(tell(TimerFired(), at=wake_at - 0.01)) == []
    assert len(binds(tell(TimerFired(), at=wake_at))) == 1
    assert binds(tell(TimerFired(), at=wake_at + 0.001)) == [], "one behind is enough"


def storing_and_beginning():
    """A worker that stores what a unit has trained at 0.2 s while another one begins."""
    tell = Driver(n_shards=2, lookahead_s=0.1)
    tell(WorkerAdded("a", frozenset({0, 1})), RoundAdded(round_of(3, 2, evaluate=False)))
    (first,) = binds(tell(*ready(0, 1, 2)))
    (stores,) = binds(tell(UnitDone(first.unit, 0.1, first.shard), at=0.1))
    tell(UnitStarted(stores.unit, "a"), UnitTrains(stores.unit, "a"))
    (begins,) = binds(tell(TimerFired(), at=tell.dispatcher.wake_at))
    tell(UnitStarted(begins.unit, "a"), at=0.2)
    return tell, stores, begins


def test_a_unit_whose_state_is_stored_takes_no_more_of_its_workers_time():
    tell, stores, begins = storing_and_beginning()
    seconds = tell.dispatcher.bindings[begins.unit].seconds
    for _ in range(2):
        assert tell.dispatcher.list_scheduler.free_at["a"] == pytest.approx(0.2 + seconds)
        tell(UnitDone(stores.unit, 0.1, stores.shard))


def test_a_view_is_told_what_a_worker_trains_and_not_what_it_stores():
    tell, _, begins = storing_and_beginning()
    state = tell.dispatcher.state
    (now,) = describe(state.workers.values(), state.bindings.values(), {"a": ProcessNow()})
    assert now.unit == begins.unit


@pytest.mark.parametrize("trains", [True, False])
def test_not_the_unit_whose_state_is_stored_is_suspected_of_its_workers_death(trains):
    tell, stores, begins = storing_and_beginning()
    if trains:
        tell(UnitTrains(begins.unit, "a"))
    tell(WorkerRemoved("a"), *(UnitReady(each.unit) for each in (stores, begins)))
    again = []
    for worker in "bc":
        again += binds(tell(WorkerAdded(worker, frozenset({0, 1}))))
    assert [each.unit for each in again if each.is_suspect] == [begins.unit]


def test_long_units_whose_end_is_vague_are_not_looked_behind():
    tell = Driver(n_shards=2, lookahead_s=0.1)
    tell(WorkerAdded("a", frozenset({0, 1})), RoundAdded(round_of(3, 2, evaluate=False)))
    (first,) = binds(tell(*ready(0, 1, 2)))
    tell(UnitDone(first.unit, 60.0, first.shard), at=60.0)
    assert tell.dispatcher.wake_at is None


@pytest.mark.parametrize(
    ("n_shards", "unit_s", "is_looked_behind"), [(1, 0.4, False), (8, 0.05, True)]
)
def test_the_end_of_a_task_of_many_visits_is_less_vague_than_that_of_one(
    n_shards: int, unit_s: float, is_looked_behind: bool
):
    tell = Driver(n_shards=n_shards + 1, lookahead_s=0.1)  # the worker lacks one
    shards = frozenset(range(n_shards))
    tell(WorkerAdded("a", shards), RoundAdded(round_of(9, n_shards + 1, evaluate=False)))
    for _ in range(27):  # the noise falls to a tenth of a unit
        tell.dispatcher.times.observe(0, "a", [unit_s])
    (first,) = binds(tell(*ready(*range(9))))
    assert len((first.shard, *first.then)) == n_shards
    assert (tell.dispatcher.wake_at is not None) is is_looked_behind


def running_and_waiting(n_waiting: int, *, unit_s: float = 0.4):
    """Two workers with all shards that run units, whose ends are vague, while trials wait."""
    tell = Driver(n_shards=1, lookahead_s=0.1)
    tell(*(WorkerAdded(worker, frozenset({0})) for worker in "ab"))
    tell(RoundAdded(round_of(2 + n_waiting, 1, evaluate=False)))
    for sign in (-1, 1) * 9:
        for worker in "ab":
            tell.dispatcher.times.observe(0, worker, [unit_s * (1 + 0.6 * sign)])
    first = binds(tell(*ready(*range(2 + n_waiting))))
    assert len(first) == 2
    return tell, {bound.worker: bound.unit for bound in first}


@pytest.mark.parametrize("unit_s", [0.06, 0.4])
def test_where_trials_for_all_workers_wait_the_next_one_is_bound_before_an_end(unit_s: float):
    tell, first = running_and_waiting(3, unit_s=unit_s)
    seconds = tell.dispatcher.bindings[first["a"]].seconds
    assert seconds == pytest.approx(tell.dispatcher.bindings[first["b"]].seconds, rel=0.1)
    opens = seconds - min(0.1, seconds / 2)
    assert tell.dispatcher.wake_at == pytest.approx(opens, rel=0.1)
    assert binds(tell(TimerFired(), at=opens * 0.8)) == []
    behind = binds(tell(TimerFired(), at=opens * 1.1))
    assert [bound.worker for bound in behind] == ["a", "b"], "one each, and one trial is left"
    done = tell(UnitDone(first["a"], unit_s, 0), at=opens * 1.2)
    assert binds(done) == [], "it has one, and its next is bound when that ends"


def test_the_last_trials_that_wait_are_for_whoever_is_free_first():
    tell, first = running_and_waiting(1)
    assert binds(tell(TimerFired(), at=0.35)) == []
    (third,) = binds(tell(UnitDone(first["b"], 0.4, 0), at=0.36))
    assert third.worker == "b"


def test_long_units_are_not_looked_behind_however_many_trials_wait():
    tell, _ = running_and_waiting(9, unit_s=1.5)
    assert tell.dispatcher.wake_at is None


def test_does_not_bind_behind_a_running_unit_what_an_idle_worker_can_run():
    tell = Driver(n_shards=1, replicas=2, lookahead_s=1.0, overhead_s=1.0)
    tell(WorkerAdded("a", frozenset({0})), WorkerAdded("b", frozenset({0})))
    tell(RoundAdded(round_of(2, 1, evaluate=False)), *ready(0))
    out = tell(UnitDone(train(0), 0.5, 0), *ready(1), at=1.0)
    assert len(binds(out)) == 1
    assert all(len(host.bound) <= 1 for host in tell.dispatcher.workers.values())


def test_a_state_stays_where_the_trial_still_needs_shards():
    cluster = checked_cluster(lambda *_: 1.0, n_shards=8)
    cluster.add_workers({"a": 1.0, "b": 1.0}, shards={"a": range(4), "b": range(4, 8)})
    cluster.add_round(round_of(2, 8, evaluate=False))
    outcome = cluster.run()
    assert outcome.makespan_s == 8.0
    assert len(outcome.timeline) == 16
    assert sum(ran.hop for ran in outcome.timeline) == 2


def test_a_higher_priority_goes_first():
    tell = Driver(n_shards=1)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(3, 1)))
    assert binds(tell(PriorityChanged(2, 1.0), *ready(0, 1, 2))) == [Bind(train(2), "a", 0)]


def test_as_many_workers_are_of_use_as_the_work_that_is_left_keeps_busy():
    tell = Driver(n_shards=2)
    usable = tell.dispatcher.usable
    assert usable(5.0) == 0
    tell(WorkerAdded("a", frozenset({0, 1})), RoundAdded(round_of(4, 2, n_epochs=2)), *ready(0))
    assert usable(5.0) == 1  # nobody knows how long a unit takes
    tell(UnitDone(train(0), 2.0, tell.dispatcher.bindings[train(0)].shard), at=2.0)
    assert usable(1.0) == 4  # each trial is on one worker at a time
    times = tell.dispatcher.times
    left_s = times.unit_s * (15 + 16 * times.ratio)
    assert [usable(left_s / n) for n in (0.5, 1.5, 2.5, 9.0)] == [1, 2, 3, 4]
    tell(TrialHeld(1, 1), TrialAllowed(2, 2, None, 1))
    assert usable(1.0) == 4
    tell(*(TrialStopped(trial) for trial in range(4)))
    assert usable(1.0) == 0


def test_a_gang_has_use_for_all_of_its_workers_at_once():
    tell = Driver(n_shards=2)
    tell(*(WorkerAdded(worker, frozenset({0, 1})) for worker in "abcd"))
    tell(RoundAdded(round_of(2, 2, evaluate=False)), TrialAllowed(0, 3), TrialAllowed(1, 2))
    usable = tell.dispatcher.usable
    assert usable(5.0) == 3  # nobody knows how long a unit takes
    (bind,) = binds(tell(*ready(0)))
    tell(UnitTrains(bind.unit, bind.worker))
    tell(UnitDone(bind.unit, 10.0, bind.shard), UnitReady(train(0, 1)), at=10.0)
    assert usable(5.0) == 5  # one unit of 10 s on three workers is left of one of the trials
    assert usable(1000.0) == 3


def test_a_stopped_trial_is_forgotten_and_preempted():
    tell = Driver(n_shards=2)
    tell(WorkerAdded("a", frozenset({0, 1})), RoundAdded(round_of(2, 2)))
    running = binds(tell(*ready(0, 1)))[0].unit
    assert tell(TrialStopped(running.trial)) == [Preempt(running, "a")]
    other = 1 - running.trial
    shard: Any = pytest.approx(0, abs=1)
    assert binds(tell(UnitReturned(running, 0), UnitReady(running))) == [
        Bind(train(other), "a", shard)
    ]
    assert tell(TrialStopped(7)) == []


def test_an_interrupted_unit_goes_on_with_its_shard():
    tell = Driver(n_shards=3)
    tell(WorkerAdded("a", frozenset({0, 1, 2})), RoundAdded(round_of(1, 3)))
    (bound,) = binds(tell(*ready(0)))
    (again,) = binds(tell(UnitReturned(bound.unit, bound.shard), UnitReady(bound.unit)))
    assert again == bound


def test_a_lost_unit_is_bound_with_its_recorded_shard():
    tell = Driver(n_shards=2)
    tell(WorkerAdded("a", frozenset({0, 1})), RoundAdded(round_of(1, 2)))
    (first,) = binds(tell(*ready(0)))
    (second,) = binds(tell(UnitDone(first.unit, 1.0, first.shard), UnitReady(train(0, 1)), at=1.0))
    tell(WorkerRemoved("a"), UnitLost(first.unit), UnitReturned(second.unit))
    out = tell(WorkerAdded("b", frozenset({0, 1})), UnitReady(first.unit))
    assert binds(out) == [Bind(first.unit, "b", first.shard)]


def test_a_result_is_made_again_that_is_lost_when_its_trial_has_nothing_else_to_do():
    """The trial was not counted among those that have, whenever work was counted anew."""
    tell = Driver(n_shards=1)
    tell(WorkerAdded("a", frozenset({0})))
    tell(RoundAdded(round_of(1, 1, evaluate=False)), *ready(0))
    tell(UnitDone(train(0), 1.0, 0), at=1.0)
    tell(RoundAdded(round_of(1, 1, first=1, number=1)), *ready(1))
    assert tell.dispatcher.state.busy.keys() == {1}
    tell(UnitLost(train(0)), UnitReady(train(0)))
    tell(RoundAdded(round_of(1, 1, first=2, number=2)))
    assert tell.dispatcher.state.busy.keys() == {0, 1, 2}
    assert binds(tell(UnitDone(train(1), 1.0, 0), at=2.0))[0].unit == train(0)


def test_a_lost_unit_waits_while_the_trials_next_epoch_runs():
    """Isolation: its evaluations need the result again, but the trial has a unit that runs."""
    tell = Driver(n_shards=1, replicas=3)
    tell(*(WorkerAdded(worker, frozenset({0})) for worker in "abc"))
    tell(RoundAdded(round_of(1, 1, n_epochs=2)))
    (first,) = binds(tell(*ready(0)))
    done = UnitDone(first.unit, 1.0, 0)
    out = tell(done, UnitReady(score(0, 0)), UnitReady(train(0, epoch=2)), at=1.0)
    (second,) = [i for i in binds(out) if i.unit.kind == "train"]
    assert binds(tell(UnitLost(first.unit), UnitReturned(score(0, 0)), UnitReady(first.unit))) == []
    out = tell(UnitDone(second.unit, 1.0, 0), at=2.0)
    assert [i.unit for i in binds(out)] == [first.unit]


def test_the_shard_that_was_really_visited_counts():
    """A unit that was executed again found its stored result, of another shard than the bound."""
    tell = Driver(n_shards=2)
    tell(WorkerAdded("a", frozenset({0, 1})), RoundAdded(round_of(1, 2)))
    (first,) = binds(tell(*ready(0)))
    out = tell(UnitDone(first.unit, 0.0, 1 - first.shard), UnitReady(train(0, 1)), at=1.0)
    assert binds(out) == [Bind(train(0, 1), "a", first.shard)]


def test_only_the_unit_that_trains_is_suspected():
    tell = Driver(n_shards=1, max_strikes=1, lookahead_s=10.0, overhead_s=10.0)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(3, 1, evaluate=False)))
    (first,) = binds(tell(*ready(0, 1, 2)))
    running, behind = binds(tell(UnitDone(first.unit, 1.0, 0), at=1.0))
    tell(UnitStarted(running.unit, "a"), UnitTrains(running.unit, "a"), at=2.0)
    assert tell(WorkerRemoved("a"), at=3.0) == []
    out = tell(WorkerAdded("b", frozenset({0})), UnitReady(running.unit), UnitReady(behind.unit))
    assert [i.unit for i in binds(out)] == [behind.unit], "the other one waits"
    assert tell.dispatcher.wake_at == 11.0, "for eight times as long as it trained"
    out = tell(TimerFired(), at=11.0)
    assert [i.trial for i in out if isinstance(i, FailTrial)] == [running.unit.trial]


def test_a_worker_that_was_asked_to_go_gives_no_strike():
    tell = Driver(n_shards=1, max_strikes=1)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(1, 1)), *ready(0))
    assert tell(WorkerRemoved("a", expected=True)) == []


def test_an_exception_fails_the_trial():
    tell = Driver(n_shards=1)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(1, 1)), *ready(0))
    assert tell(UnitFailed(train(0), "a", "boom")) == [FailTrial(0, "boom")]


def test_all_workers_of_a_hung_gang_are_restarted_for_one_strike():
    tell = Driver(n_shards=1, unit_timeout_s=10.0, grace_s=5.0, max_strikes=2)
    there = [WorkerAdded(worker, frozenset({0})) for worker in "ab"]
    out = tell(*there, RoundAdded(round_of(1, 1)), TrialAllowed(0, 2), *ready(0))
    (bind,) = binds(out)
    tell(UnitStarted(train(0), bind.worker), at=1.0)
    assert tell(TimerFired(), at=11.0) == [Preempt(train(0), bind.worker)]
    restarts = tell(TimerFired(), at=16.0)
    assert [restart.worker for restart in restarts] == [bind.worker, *bind.members]
    assert tell(*map(WorkerRemoved, "ab"), *ready(0), at=17.0) == []
    there = [WorkerAdded(worker, frozenset({0})) for worker in "cd"]
    assert [i.unit for i in binds(tell(*there, at=18.0))] == [train(0)]


def test_a_hung_unit_is_stopped_and_its_worker_restarted():
    tell = Driver(n_shards=1, unit_timeout_s=10.0, grace_s=5.0, max_strikes=2)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(1, 1)), *ready(0))
    tell(UnitStarted(train(0), "a"), at=1.0)
    assert tell.dispatcher.wake_at == 11.0
    assert tell(TimerFired(), at=11.0) == [Preempt(train(0), "a")]
    assert tell.dispatcher.wake_at == 16.0
    (restart,) = tell(TimerFired(), at=16.0)
    assert isinstance(restart, RestartWorker)
    assert tell(TimerFired(), at=17.0) == []
    assert tell(WorkerRemoved("a"), at=18.0) == [], "the strike was given when the time was over"


def test_the_shards_of_a_dead_worker_are_loaded_by_others_at_once():
    tell = Driver(n_shards=2)
    tell(WorkerAdded("a", frozenset({0})), WorkerAdded("b", frozenset({1})))
    tell(RoundAdded(round_of(1, 2)))
    assert tell(WorkerRemoved("a")) == [LoadShard("b", 0)]


def moments_of(n_trials: int) -> tuple[VirtualCluster, int]:
    """Run trials on four workers; return the cluster, and most moments that it has kept at once."""
    dispatcher, draws = Dispatcher(DispatchConfig(8, replicas=4)), iter(range(10**6))
    n_kept = 0

    def watch(_: object) -> None:
        nonlocal n_kept
        n_kept = max(n_kept, len(dispatcher.state.openings._agenda))

    cluster = VirtualCluster(
        dispatcher, lambda *_: 0.2 * math.exp(0.02 * math.sin(97.0 * next(draws))), watch=watch
    )
    cluster.add_workers({f"w{k}": 1.0 for k in range(4)})
    cluster.add_round(round_of(n_trials, 8, n_epochs=30, evaluate=False))
    cluster.run()
    return cluster, n_kept


@pytest.mark.parametrize("n_trials", [4, 6])
def test_what_is_kept_of_workers_does_not_grow_with_the_units_and_decides_nothing(
    monkeypatch, n_trials
):
    cluster, n_kept = moments_of(n_trials)
    assert n_kept <= openings.MOST * 4 + openings.FEW + 4
    for most in (0, 10**6):  # all are tidied up at once, or none
        monkeypatch.setattr(openings, "MOST", most)
        monkeypatch.setattr(openings, "FEW", most)
        again, n_kept = moments_of(n_trials)
        assert again.outcome == cluster.outcome
    assert n_kept > 200 or n_trials > 4


def test_a_new_worker_takes_shards_which_are_dropped_once_they_are_there():
    tell = Driver(n_shards=4)
    tell(WorkerAdded("a", frozenset(range(4))), RoundAdded(round_of(1, 4)))
    loads = tell(WorkerAdded("b"))
    assert [i.worker for i in loads] == ["b", "b"]
    assert tell(ShardLoaded("b", loads[0].shard)) == [DropShard("a", loads[0].shard)]


def test_a_shard_in_use_is_not_dropped():
    tell = Driver(n_shards=2)
    tell(WorkerAdded("a", frozenset({0, 1})), RoundAdded(round_of(2, 2, order=((1, 0),))))
    (bound,) = binds(tell(*ready(0, 1)))
    (load,) = tell(WorkerAdded("b"))
    assert load.shard == bound.shard == 1
    out = tell(ShardLoaded("b", 1))
    assert not any(isinstance(i, DropShard) for i in out)
    out = tell(UnitDone(bound.unit, 1.0, 1), at=1.0)
    assert DropShard("a", 1) in out


def test_a_drained_worker_goes_when_others_hold_what_it_held():
    tell = Driver(n_shards=2)
    tell(WorkerAdded("a", frozenset({0})), WorkerAdded("b", frozenset({1})))
    tell(RoundAdded(round_of(1, 2)))
    assert tell(DrainRequested("a")) == [LoadShard("b", 0)]
    assert tell(ShardLoaded("b", 0)) == [Drained("a")]
    assert {i.worker for i in binds(tell(*ready(0)))} == {"b"}
    assert tell(TimerFired()) == []


def test_an_unfit_worker_gives_its_units_to_the_others():
    tell = Driver(n_shards=1)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(1, 1)), *ready(0))
    tell(WorkerAdded("b", frozenset({0})))
    assert tell(DrainRequested("a", "stale")) == [Preempt(train(0), "a")]
    out = tell(UnitReturned(train(0)), UnitReady(train(0)))
    assert [(bound.unit, bound.worker) for bound in binds(out)] == [(train(0), "b")]


def test_the_run_fails_once_no_worker_can_store():
    tell = Driver(n_shards=1, capacity_timeout_s=30.0)
    tell(WorkerAdded("a", frozenset({0})), WorkerAdded("b", frozenset({0})))
    tell(RoundAdded(round_of(1, 1)))
    assert not any(isinstance(i, FailRun) for i in tell(DrainRequested("a", "a: stale")))
    (failure,) = [i for i in tell(DrainRequested("b", "b: stale")) if isinstance(i, FailRun)]
    assert failure.reason.startswith("none of 2 workers can use the store: a: stale; ")
    assert tell(TimerFired(), at=99.0) == []


@pytest.mark.parametrize("comes", [False, True])
def test_another_worker_is_waited_for_when_the_last_goes_that_could_store(comes):
    tell = Driver(n_shards=1, capacity_timeout_s=30.0)
    tell(WorkerAdded("a", frozenset({0})), WorkerAdded("b", frozenset({0})))
    tell(RoundAdded(round_of(1, 1)), DrainRequested("a", "stale"))
    assert tell(WorkerRemoved("b"), at=5.0) == []
    assert tell.dispatcher.wake_at == 35.0
    if comes:
        tell(WorkerAdded("c", frozenset({0})), at=20.0)
    out = tell(TimerFired(), at=35.0)
    assert any(isinstance(i, FailRun) for i in out) == (not comes)


def test_the_run_fails_with_numbers_when_memory_does_not_suffice():
    tell = Driver(n_shards=4, capacity_timeout_s=30.0)
    tell(WorkerAdded("a", max_shards=3))
    tell(RoundAdded(round_of(1, 4)))
    assert tell.dispatcher.wake_at == 30.0
    (failure,) = tell(TimerFired(), at=30.0)
    assert isinstance(failure, FailRun)
    assert "1 of 4 shards" in failure.reason
    assert "memory for 3" in failure.reason


def test_the_run_fails_when_every_worker_refuses_a_shard():
    tell = Driver(n_shards=1)
    tell(WorkerAdded("a"), WorkerAdded("b"), RoundAdded(round_of(1, 1)))
    tell(ShardFailed("a", 0, "corrupt"))
    (failure,) = tell(ShardFailed("b", 0, "corrupt"))
    assert failure == FailRun("shard 0 can be loaded nowhere: a: corrupt; b: corrupt")


def test_the_run_fails_for_its_data_if_every_worker_finds_it_damaged():
    damage = repr(ShardCorruptError(0, "x", "d.zarr", "checksum mismatch"))
    for last, is_of_data in ((damage, True), ("OSError('no route')", False)):
        tell = Driver(n_shards=1)
        tell(WorkerAdded("a"), WorkerAdded("b"), RoundAdded(round_of(1, 1)))
        tell(ShardFailed("a", 0, damage))
        (failure,) = tell(ShardFailed("b", 0, last))
        assert failure.is_of_data == is_of_data
        assert failure.reason.startswith("shard 0 can be loaded nowhere: ")
        error = ShardCorruptError(0, "x", "d.zarr", "checksum mismatch")
        assert f"ShardCorruptError: {error}" in failure.reason
        assert is_of_data or failure.reason.endswith("; b: OSError: no route")
        assert ("restore it from a copy" in failure.reason) == is_of_data


def test_a_second_round_is_served_while_the_first_one_runs():
    tell = Driver(n_shards=1)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(1, 1)), *ready(0))
    tell(WorkerAdded("b", frozenset({0})))
    out = tell(RoundAdded(round_of(1, 1, number=1, first=1)), *ready(1))
    assert binds(out) == [Bind(train(1), "b", 0)]


def test_an_epoch_is_not_added_twice():
    tell = Driver(n_shards=1)
    tell(RoundAdded(round_of(1, 1)))
    with pytest.raises(ValueError, match="trial 0: epoch 1 was added before"):
        tell(RoundAdded(round_of(1, 1, number=1)))


def straggler(**options):
    """Four workers, one of which becomes three times slower than it said."""
    slow = {"w0": 3.0}
    cluster = checked_cluster(
        lambda unit, worker, shard: slow.get(worker, 1.0), n_shards=16, **options
    )
    cluster.add_workers({f"w{k}": 1.0 for k in range(4)})
    cluster.add_round(round_of(12, 16, n_epochs=4, evaluate=False))
    return cluster.run(), cluster


def test_a_straggler_is_seen_and_loaded_less():
    fixed, _ = straggler(rebalance=False)
    moved, cluster = straggler()
    assert moved.makespan_s < 0.6 * fixed.makespan_s
    ideal = 12 * 16 * 4 / (3 + 1 / 3)
    assert moved.makespan_s < 1.1 * ideal
    assert len(moved.loaded) <= 16 + 6, "few shards move, and once"
    held = {w: host.held.bit_count() for w, host in cluster.dispatcher.workers.items()}
    assert held["w0"] < min(held["w1"], held["w2"], held["w3"])


def test_noise_moves_shards_in_one_search_of_twenty_at_most():
    n_loaded = []
    for first in range(20):
        draws = iter(range(1000 * first, 10**6))
        cluster = VirtualCluster(
            Dispatcher(DispatchConfig(n_shards=16)),
            lambda *_, draws=draws: math.exp(0.3 * math.sin(97.0 * next(draws))),
        )
        cluster.add_workers({f"w{k}": 1.0 for k in range(4)})
        cluster.add_round(round_of(12, 16, n_epochs=3))
        n_loaded.append(len(cluster.run().loaded))
    assert sum(n > 16 for n in n_loaded) <= 1


def test_workers_come_die_and_are_drained_in_virtual_time():
    started = []

    def begin(unit: Unit, *_: object) -> float:
        started.append(unit)
        return 1.0

    cluster = checked_cluster(begin, options={"load_seconds": 0.3}, n_shards=8)
    cluster.add_workers(dict.fromkeys("abcd", 1.0))
    cluster.add_round(round_of(6, 8, n_epochs=2))
    cluster.at(5.5, WorkerRemoved("a"))
    cluster.at(11.2, WorkerAdded("e", speed=2.0), WorkerAdded("f"))
    cluster.at(14.1, DrainRequested("b"))
    outcome = cluster.run()
    assert outcome.failed == {}
    visits = Counter((*ran.unit[:3], ran.shard) for ran in outcome.timeline)
    assert set(visits.values()) == {1}
    assert len(visits) == len(outcome.timeline) == 6 * 8 * 2 * 2
    assert len(started) - len(outcome.timeline) <= 1
    assert "b" not in cluster.dispatcher.workers


def test_what_was_stopped_inside_a_shard_goes_on_where_its_state_waits():
    tell = Driver(n_shards=1, replicas=2)
    tell(WorkerAdded("a", frozenset({0})), WorkerAdded("b", frozenset({0})))
    out = binds(tell(RoundAdded(round_of(2, 1)), *ready(0, 1)))
    homes = {bind.unit.trial: bind.worker for bind in out}
    assert len(set(homes.values())) == 2
    for trial in (0, 1):
        tell(UnitReturned(train(0), 0, 1.0), UnitReturned(train(1), 0, 1.0))
        for alone in (trial, 1 - trial):
            assert [bind.worker for bind in binds(tell(*ready(alone)))] == [homes[alone]]


def test_trials_that_train_by_the_second_may_go_on_on_every_worker():
    tell = Driver(n_shards=2)
    tell(WorkerAdded("a", frozenset({0})), WorkerAdded("b", frozenset({1})))
    assert tell(TrialAllowed(0), RoundAdded(round_of(1, 2))) == []
    out = tell(TrialAllowed(0, seconds=1.0))
    assert {(i.worker, i.shard) for i in out} == {("a", 1), ("b", 0)}
    assert all(isinstance(i, LoadShard) for i in out)


def gang_of_two(tell):
    """Let trial 0 train with shard 0 on the workers a, which leads, and b; c, the third, goes."""
    for worker, shard in (("a", 0), ("b", 0), ("c", 1)):
        tell(WorkerAdded(worker, frozenset({shard}), max_shards=1))
    out = tell(RoundAdded(round_of(1, 2)), TrialAllowed(0, gang=2), *ready(0))
    assert binds(out) == [Bind(train(0), "a", 0, ("b",))]
    return tell(WorkerRemoved("c"))


@pytest.mark.parametrize("is_known", [False, True])
def test_a_gangs_member_may_come_back_under_its_old_address(is_known):
    tell = Driver(n_shards=2)
    gang_of_two(tell)
    if not is_known:
        tell(WorkerRemoved("b"))
    tell(WorkerAdded("b", frozenset({0, 1})), RoundAdded(round_of(1, 2, number=1, first=1)))
    (other,) = binds(tell(*ready(1)))
    assert other.worker == "b", "it is free: it knows nothing of the gang"
    tell(GangBroke(train(0), "it lost b"), UnitReturned(train(0)), UnitReady(train(0)))
    assert tell.dispatcher.worker_of(other.unit) == "b"


def test_a_shard_that_a_gangs_member_trains_on_is_not_dropped():
    tell = Driver(n_shards=2)
    assert gang_of_two(tell) == []
    out = tell(UnitDone(train(0), 1.0, 0), UnitReady(train(0, 1)), at=1.0)
    (drop,) = [i for i in out if isinstance(i, DropShard)]
    assert LoadShard(drop.worker, 1) in out


@pytest.mark.parametrize("seconds", [5.0, 95.0])
def test_a_trial_that_runs_trains_so_many_seconds_from_when_it_was_told(seconds):
    rests_at: list[float] = []

    def watch(instructions):
        rests_at.extend(cluster.now_s for i in instructions if isinstance(i, TrialRests))

    dispatcher = Dispatcher(DispatchConfig(n_shards=1))
    cluster = VirtualCluster(dispatcher, lambda *_: 100.0, batches=lambda _: 100, watch=watch)
    cluster.add_workers({"a": 1.0}, shards={"a": [0]})
    cluster.add_round(round_of(1, 1, n_epochs=2, evaluate=False))
    cluster.at(10.0, TrialAllowed(0, seconds=seconds))
    cluster.run()
    assert rests_at == [pytest.approx(10.0 + seconds, abs=1.0)]


def test_a_gang_waits_for_workers_as_any_trial_does_when_all_are_away():
    tell = Driver(n_shards=1, capacity_timeout_s=60.0)
    tell(RoundAdded(round_of(1, 1)), TrialAllowed(0, gang=2), *ready(0))
    assert tell(TimerFired(), at=1000.0) == []
    tell(WorkerAdded("a", frozenset({0})))
    assert tell(TimerFired(), at=1059.0) == []
    assert binds(tell(WorkerAdded("b", frozenset({0})))) == [Bind(train(0), "a", 0, ("b",))]


def test_a_gang_that_is_too_large_for_the_workers_that_are_there_fails():
    tell = Driver(n_shards=1, capacity_timeout_s=60.0)
    tell(RoundAdded(round_of(1, 1)), TrialAllowed(0, gang=2), *ready(0))
    tell(WorkerAdded("a", frozenset({0})), at=1000.0)
    (failure,) = tell(TimerFired(), at=1060.0)
    assert "a gang of 2 was wanted, and there are 1 workers" in failure.reason


def test_a_gang_has_one_worker_of_a_process():
    tell = Driver(n_shards=1, capacity_timeout_s=60.0)
    tell(*(WorkerAdded(worker, frozenset({0}), process="p") for worker in "ab"))
    assert tell(RoundAdded(round_of(1, 1)), TrialAllowed(0, gang=2), *ready(0)) == []
    (other,) = binds(tell(WorkerAdded("c", frozenset({0}), process="q"), at=59.0))
    assert {other.worker, *other.members} in ({"a", "c"}, {"b", "c"})


def test_a_gang_that_wants_more_processes_than_there_are_fails_and_says_so():
    tell = Driver(n_shards=1, capacity_timeout_s=60.0)
    tell(*(WorkerAdded(worker, frozenset({0}), process="p") for worker in "ab"))
    tell(RoundAdded(round_of(1, 1)), TrialAllowed(0, gang=2), *ready(0))
    (failure,) = tell(TimerFired(), at=60.0)
    assert "2 workers are threads of 1 processes" in failure.reason
    assert "Client(processes=True)" in failure.reason


def test_a_gang_does_not_wait_for_trials_that_do_not_fit_on_its_workers():
    tell = Driver(n_shards=2)
    tell(*(WorkerAdded(worker, frozenset({0, 1}), room=100) for worker in "ab"))
    tell(WorkerAdded("large", frozenset({0, 1}), room=1000))
    large = round_of(3, 2, n_epochs=2, evaluate=False, memory_bytes=500)
    assert [i.worker for i in binds(tell(RoundAdded(large), *ready(0, 1, 2)))] == ["large"]
    small = round_of(1, 2, number=1, first=3, evaluate=False, memory_bytes=10)
    tell(RoundAdded(small), TrialAllowed(3, gang=2), *ready(3))  # each small one loads a shard
    out = tell(ShardLoaded("a", 1), ShardLoaded("b", 0))
    assert [(i.unit, i.worker, i.members) for i in binds(out)] == [(train(3), "a", ("b",))]


def test_a_gang_does_not_wait_for_trials_whose_shards_its_workers_do_not_hold():
    tell = Driver(n_shards=2)
    tell(*(WorkerAdded(worker, frozenset({0}), max_shards=1) for worker in "ab"))
    tell(WorkerAdded("other", frozenset({1}), max_shards=1))
    fixed = round_of(3, 2, n_epochs=2, evaluate=False, order=((1, 0), (1, 0)))
    (bind,) = binds(tell(RoundAdded(fixed), *ready(0, 1, 2)))
    assert bind.worker == "other"
    free = round_of(1, 2, number=1, first=3, evaluate=False)
    out = tell(RoundAdded(free), TrialAllowed(3, gang=2), *ready(3))
    assert [(i.unit, i.worker, i.members) for i in binds(out)] == [(train(3), "a", ("b",))]


def test_no_worker_is_kept_for_a_gang_that_cannot_end_before_the_horizon():
    tell = Driver(n_shards=2)
    tell(*(WorkerAdded(worker, frozenset({0, 1})) for worker in "ab"))
    long, short = round_of(2, 2, n_epochs=8), round_of(1, 2, n_epochs=2, number=1, first=2)
    tell(RoundAdded(long), RoundAdded(short), TrialAllowed(0, gang=2))
    (bind,) = binds(tell(*ready(0)))
    tell(UnitTrains(bind.unit, bind.worker))
    tell(UnitDone(bind.unit, 100.0, bind.shard), at=100.0)
    (alone,) = binds(tell(*ready(1), HorizonSet(150.0)))
    tell(UnitTrains(alone.unit, alone.worker))
    assert binds(tell(UnitReady(train(0, 1)))) == []
    assert [i.unit for i in binds(tell(*ready(2)))] == [train(2)]


def test_a_unit_that_waits_on_its_worker_is_not_past_its_time():
    tell = Driver(n_shards=1, unit_timeout_s=10.0, grace_s=5.0, max_strikes=1)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(1, 1)), *ready(0))
    assert tell(TimerFired(), at=100.0) == []
    tell(UnitStarted(train(0), "a"), at=100.0)
    assert tell(TimerFired(), at=109.0) == []
    assert any(isinstance(i, FailTrial) for i in tell(TimerFired(), at=110.0))


def test_workers_that_are_billed_together_go_together():
    tell = Driver(n_shards=1, replicas=4)
    tell(*(WorkerAdded(worker, frozenset({0})) for worker in "abcd"))
    assert tell.dispatcher.cheapest(2) == ("a", "b")
    assert tell.dispatcher.cheapest(2, nodes={"a": "0", "b": "1", "c": "0"}) == ("b", "d")
    assert tell.dispatcher.cheapest(3, nodes={"a": "0", "b": "1", "c": "0"}) == ("b", "d")


def test_a_gang_takes_turns_with_trials_on_one_worker():
    cluster = checked_cluster(lambda *_: 1.0, n_shards=1)
    cluster.add_workers({"a": 1.0, "b": 1.0}, shards={"a": [0], "b": [0]})
    chains = [Chain(t, range(1, 1 + n), 1, evaluate=False) for t, n in ((0, 40), (1, 20))]
    cluster.at(0.0, TrialAllowed(0, gang=2))
    cluster.add_round(Round(0, tuple(chains)))
    ran = [(done.unit.trial, done.stop_s) for done in cluster.run().timeline]
    for trial, n in ((0, 40), (1, 20)):
        ends = [end for number, end in ran if number == trial]
        assert len(ends) == n
        assert ends[0] < 15.0, "the other one would be over at 20"
        assert max(after - end for end, after in pairwise(ends)) < 10.0


def test_a_trial_of_unknown_cost_ranks_as_if_it_were_longer() -> None:
    times = UnitTimes()
    times.add_worker("a", 1.0)
    times.add_trial(0)
    times.add_trial(1, cost=3.0)
    assert times.optimism(0) > times.optimism(1) == 1.0
    times.observe(0, "a", [2.0])
    assert times.optimism(0) == 1.0


@pytest.mark.parametrize("gang", [1, 2])
def test_the_last_piece_of_a_unit_does_not_teach_how_long_a_unit_takes(gang: int) -> None:
    tell = Driver(n_shards=3, replicas=2)
    tell(*(WorkerAdded(worker, frozenset({0, 1, 2})) for worker in "ab"))
    (first,) = binds(tell(RoundAdded(round_of(1, 3)), TrialAllowed(0, gang=gang), *ready(0)))
    (second,) = binds(
        tell(UnitDone(first.unit, 10.0, first.shard), UnitReady(train(0, 1)), at=10.0)
    )
    assert len(second.members) == gang - 1
    state = tell.dispatcher.state
    before = state.unit_seconds(train(0, 2), "a", gang)
    assert before > 5.0
    tell(UnitReturned(second.unit, second.shard, 9.9), at=20.0)
    (rest,) = binds(tell(UnitReady(second.unit)))
    tell(UnitDone(rest.unit, 0.1, rest.shard), at=20.1)
    assert state.unit_seconds(train(0, 2), "a", gang) == before


def test_how_long_scoring_takes_is_learnt_beside_training() -> None:
    tell = Driver(n_shards=4)
    tell(WorkerAdded("a", frozenset(range(4))), RoundAdded(round_of(1, 4)), *ready(0))
    for position in range(4):
        unit, now = train(0, position), 10.0 * (position + 1)
        done = UnitDone(unit, 10.0, tell.dispatcher.bindings[unit].shard)
        tell(done, *([UnitReady(train(0, position + 1))] if position < 3 else []), at=now)
    before = tell.dispatcher.state.unit_seconds(score(0, 0), "a")
    tell(*(UnitReady(score(0, shard)) for shard in range(4)))
    for number in range(1, 4):  # each takes twice as long as training
        (bound,) = [unit for unit in tell.dispatcher.bindings if unit.kind == "evaluate"][:1]
        tell(UnitDone(bound, 20.0, bound.position), at=40.0 + 20.0 * number)
    after = tell.dispatcher.state.unit_seconds(score(0, 0), "a")
    assert before < 5.0
    assert 15.0 < after < 25.0
