"""Short units of an epoch become one task, and with them its evaluation, if that is short."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    Bind,
    DropShard,
    HorizonSet,
    RoundAdded,
    ShardLoaded,
    TrialAllowed,
    TrialHeld,
    TrialRests,
    TrialStopped,
    UnitDone,
    UnitReady,
    UnitReturned,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.units import Begun
from dagsel.simulation.virtual_cluster import VirtualCluster

from .test_dispatch import Driver, binds, checked_cluster, ready, round_of, score, train

TRAINS_S, SCORES_S = 0.1, 0.03


def second_epoch(tell, *, seconds=TRAINS_S, **chain):
    """Train one trial's first epoch on worker a, which holds both shards; return the next bind."""
    tell(WorkerAdded("a", frozenset({0, 1})), RoundAdded(round_of(1, 2, n_epochs=2, **chain)))
    (first,) = binds(tell(*ready(0)))
    (last,) = binds(tell(UnitDone(first.unit, seconds, first.shard), UnitReady(train(0, 1))))
    if not chain:
        assert last.scores == (0, 1), "the time of a unit is known by now"
    scored = ((0, SCORES_S), (1, SCORES_S))
    out = tell(UnitDone(last.unit, seconds, last.shard, scored), UnitReady(train(0, epoch=2)))
    (next_first,) = binds(out)
    assert next_first.unit == train(0, epoch=2), "nothing is left to score"
    return next_first


def end_of_second_epoch(tell, *more, seconds=TRAINS_S, **chain):
    first = second_epoch(tell, seconds=seconds, **chain)
    done = UnitDone(first.unit, seconds, first.shard)
    return binds(tell(done, UnitReady(train(0, 1, epoch=2)), *more))[0]


def test_the_unit_that_ends_an_epoch_takes_its_evaluation_along():
    tell = Driver(n_shards=2)
    bound = end_of_second_epoch(tell)
    assert bound.scores == (0, 1)
    tell(UnitDone(bound.unit, TRAINS_S, bound.shard, ((0, SCORES_S), (1, SCORES_S))))
    assert not tell.dispatcher.trials[0].open, "all of the epoch is done"
    assert tell(TrialHeld(0)) == [TrialRests(0)]


def test_what_was_left_out_is_scored_by_a_unit_of_its_own():
    tell = Driver(n_shards=2)
    bound = end_of_second_epoch(tell)
    done = UnitDone(bound.unit, TRAINS_S, bound.shard, ((0, SCORES_S),))
    (alone,) = binds(tell(done, UnitReady(score(0, 1, epoch=2))))
    assert alone.unit == score(0, 1, epoch=2)
    assert tell.dispatcher.trials[0].open


def test_nothing_is_scored_with_a_unit_of_an_epoch_that_goes_without():
    assert end_of_second_epoch(Driver(n_shards=2), evaluate=False).scores == ()


@pytest.mark.parametrize(("at_once_s", "is_scored"), [(0.0, False), (1.0, True)])
def test_an_evaluation_that_takes_long_gets_units_of_its_own(at_once_s, is_scored):
    tell = Driver(n_shards=1, at_once_s=at_once_s)
    tell(WorkerAdded("a", frozenset({0})), RoundAdded(round_of(1, 1, n_epochs=2)), *ready(0))
    tell(UnitDone(train(0), 1.0, 0), UnitReady(score(0, 0)))
    (bound,) = binds(tell(UnitDone(score(0, 0), 0.3, 0), UnitReady(train(0, epoch=2))))
    assert bool(bound.scores) == is_scored


def test_a_worker_that_has_nothing_to_do_scores_while_the_trial_goes_on():
    tell = Driver(n_shards=2)
    assert end_of_second_epoch(tell, WorkerAdded("b", frozenset({0, 1}))).scores == ()


def test_a_trial_that_trains_by_the_second_is_scored_in_units_of_its_own():
    tell = Driver(n_shards=2)
    assert end_of_second_epoch(tell, TrialAllowed(0, seconds=10.0)).scores == ()


def test_a_unit_under_which_a_worker_was_lost_does_nothing_besides():
    tell = Driver(n_shards=2)
    bound = end_of_second_epoch(tell)
    tell(WorkerRemoved("a"))
    out = tell(WorkerAdded("c", frozenset({0, 1})), UnitReady(bound.unit), at=1.0)
    (again,) = binds(out)
    assert again.is_suspect
    assert again.scores == ()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_shard_that_is_to_be_scored_is_not_dropped(order):
    tell = Driver(n_shards=2)
    bound = end_of_second_epoch(tell, order=(order, order))
    assert bound.scores == (0, 1)
    tell(WorkerAdded("b", max_shards=1))
    out = tell(*(ShardLoaded("b", shard) for shard in (0, 1) if asked(tell, "b", shard)))
    assert not [i for i in out if isinstance(i, DropShard)]
    scored = ((0, SCORES_S), (1, SCORES_S))
    out = tell(UnitDone(bound.unit, TRAINS_S, bound.shard, scored), at=1.0)
    assert [i.worker for i in out if isinstance(i, DropShard)] == ["a"]


# ---- visits that follow each other in one task


def second_bind(tell, *more, held=range(8), seconds=0.05, n_shards=8, **chain):
    """Tell how long a first trial's first unit took; return the bind of a second trial's first."""
    tell(WorkerAdded("a", frozenset(held)), RoundAdded(round_of(1, n_shards)))
    (first,) = binds(tell(*ready(0)))
    assert first.then == (), "nothing is known of its time"
    tell(UnitDone(first.unit, seconds, first.shard), TrialStopped(0))
    added = RoundAdded(round_of(1, n_shards, number=1, first=1, **chain))
    (bound,) = binds(tell(added, *more, *ready(1)))
    return bound


@pytest.mark.parametrize(("seconds", "n_more"), [(0.08, 5), (0.2, 1), (0.4, 0), (0.001, 7)])
def test_a_task_visits_as_many_shards_as_are_over_in_a_moment(seconds, n_more):
    bound = second_bind(Driver(n_shards=8), seconds=seconds)
    assert len(bound.then) == n_more
    assert len({bound.shard, *bound.then}) == 1 + n_more
    assert bound.scores == (tuple(range(8)) if n_more == 7 else ())


def test_what_a_task_visits_is_in_the_order_of_its_epoch():
    order = (3, 0, 6, 1, 7, 2, 5, 4)
    bound = second_bind(Driver(n_shards=8), order=(order,), seconds=0.1)
    assert (bound.shard, *bound.then) == order[:4]


@pytest.mark.parametrize("held", [{0, 1, 3}, {5}])
def test_a_task_visits_what_its_worker_holds(held):
    tell = Driver(n_shards=8)
    tell(WorkerAdded("b", frozenset(set(range(8)) - held)))
    bound = second_bind(tell, held=held)
    mask = tell.dispatcher.workers[bound.worker].held
    assert all(mask >> shard & 1 for shard in (bound.shard, *bound.then))


def test_a_task_visits_one_shard_where_more_would_do_harm():
    assert second_bind(Driver(n_shards=8, unit_timeout_s=9.0)).then == ()
    assert second_bind(Driver(n_shards=8), TrialAllowed(1, seconds=10.0)).then == ()
    begun = (Begun(partial=2),)
    assert second_bind(Driver(n_shards=8), begun=begun).then == (), "its time is not known"


def test_a_task_ends_before_the_horizon():
    assert len(second_bind(Driver(n_shards=8), HorizonSet(0.16)).then) == 2


@pytest.mark.parametrize("n_done", [0, 2, 3])
def test_what_a_task_leaves_out_is_bound_again(n_done):
    tell = Driver(n_shards=8)
    bound = second_bind(tell)
    took = tuple((shard, 0.05) for shard in bound.then[:n_done])
    done = UnitDone(bound.unit, 0.05, bound.shard, then=took)
    following = train(1, 1 + n_done)
    (again,) = binds(tell(done, UnitReady(following)))
    assert again.unit == following
    left = set(range(8)) - {bound.shard, *bound.then[:n_done]}
    assert {again.shard, *again.then} <= left


def test_a_task_that_is_stopped_within_its_second_visit_goes_on_with_that_shard():
    tell = Driver(n_shards=8)
    bound = second_bind(tell)
    done, cut = UnitDone(bound.unit, 0.05, bound.shard), train(1, 1)
    (again,) = binds(tell(done, UnitReturned(cut, bound.then[0], 0.02), UnitReady(cut)))
    assert (again.unit, again.shard) == (cut, bound.then[0])


def test_a_task_under_which_a_worker_was_lost_visits_one_shard():
    tell = Driver(n_shards=8)
    bound = second_bind(tell)
    tell(WorkerRemoved("a"))
    (again,) = binds(tell(WorkerAdded("c", frozenset(range(8))), UnitReady(bound.unit), at=1.0))
    assert again.is_suspect
    assert again.then == ()


@pytest.mark.parametrize(("n_others", "n_visits"), [(0, 8), (1, 4), (3, 8)])
def test_while_other_trials_wait_a_task_takes_a_share_of_what_is_left(n_others, n_visits):
    """What a single trial has left is a chain: nobody is helped if it is cut."""
    tell = Driver(n_shards=8, at_once_s=100.0)
    more = RoundAdded(round_of(n_others, 8, evaluate=False, number=2, first=2))
    others = ready(*range(2, 2 + n_others))
    bound = second_bind(tell, more, *others, evaluate=False)
    assert 1 + len(bound.then) == n_visits, "of two trials a quarter is half of one"


def asked(tell, worker, shard):
    return tell.dispatcher.workers[worker].loading >> shard & 1


@given(
    lost_s=st.floats(0.0, 1.5),
    notice_s=st.sampled_from([0.0, 0.02, 1.0]),
    n_trials=st.integers(2, 4),
    n_shards=st.integers(1, 3),
)
def test_each_shard_is_scored_once_though_workers_go(lost_s, notice_s, n_trials, n_shards):
    def seconds(unit, *_):
        return TRAINS_S if unit.kind == "train" else SCORES_S

    cluster = checked_cluster(seconds, options={"batches": lambda _: 5}, n_shards=n_shards)
    everything = {worker: range(n_shards) for worker in "ab"}
    cluster.add_workers(dict.fromkeys("ab", 1.0), shards=everything)
    cluster.add_round(round_of(n_trials, n_shards, n_epochs=3))
    cluster.take_back("a", lost_s, notice_s=notice_s)
    outcome = cluster.run()
    done = Counter(ran.unit for ran in outcome.timeline)
    chains = round_of(n_trials, n_shards, n_epochs=3).chains
    scored = {unit for chain in chains for epoch in (1, 2, 3) for unit in chain.evaluations(epoch)}
    trained = {unit for chain in chains for unit in chain.units}
    assert done == Counter(scored | trained)
    assert not outcome.failed


def test_units_that_are_longer_than_believed_end_a_task():
    """A new trial is believed to be as quick as the one before it."""
    bound = list[Bind]()

    def watch(instructions):
        bound.extend(bind for bind in binds(instructions) if bind.unit.trial)

    dispatcher = Dispatcher(DispatchConfig(n_shards=8, at_once_s=0.5))
    cluster = VirtualCluster(dispatcher, lambda unit, *_: float(unit.trial) or 0.001, watch=watch)
    cluster.add_workers({"a": 1.0}, shards={"a": range(8)})
    cluster.add_round(round_of(2, 8))
    cluster.run()
    trained = [each for each in bound if each.unit.kind == "train"]
    assert any(each.then for each in trained), "it was believed to be quick"
    assert [each.unit.position for each in trained] == [*range(8)]


def test_that_saves_what_telling_of_units_costs():
    """In virtual time nothing is saved, and nothing may be lost."""

    def makespan(at_once_s):
        cluster = checked_cluster(
            lambda unit, *_: TRAINS_S if unit.kind == "train" else SCORES_S,
            n_shards=2,
            at_once_s=at_once_s,
        )
        cluster.add_workers(dict.fromkeys("ab", 1.0), shards=dict.fromkeys("ab", (0, 1)))
        cluster.add_round(round_of(8, 2, n_epochs=5))
        return cluster.run().makespan_s

    assert makespan(0.25) <= 1.02 * makespan(0.0)
