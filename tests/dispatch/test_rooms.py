"""Memory as a resource: which trials may run on which workers.

No unit is bound to a worker that has less memory than its trial says it takes. What fits somewhere
is trained to its end, on however few workers, and whatever workers come, go and are lost; what fits
nowhere fails with the numbers, and nothing else does. Trials that say nothing are dispatched as
where nobody says anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    Bind,
    DrainRequested,
    FailTrial,
    HorizonSet,
    Instruction,
    MemoryFilled,
    RoundAdded,
    ShardLoaded,
    TimerFired,
    TrialAllowed,
    UnitDone,
    UnitReady,
    UnitTrains,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.rooms import Rooms
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.simulation.virtual_cluster import VirtualCluster

SHARD = 10  # bytes
rooms = st.none() | st.integers(20, 100)
needs = st.none() | st.integers(1, 100)


@dataclass
class Seen:
    """Looks at each list of instructions."""

    dispatcher: Dispatcher
    needs: dict[int, int | None]

    def __call__(self, instructions: list[Instruction]) -> None:
        self.dispatcher.check()
        for bind in instructions:
            if isinstance(bind, Bind):
                need = self.needs[bind.unit.trial]
                for worker in (bind.worker, *bind.members):
                    room = self.room(worker)
                    assert need is None or room is None or need <= room, f"{bind}: {need} > {room}"

    def room(self, worker: str) -> int | None:
        return self.dispatcher.workers[worker].room_beside(self.dispatcher.config.shard_bytes)


def search(
    the_rooms: Sequence[int | None],
    the_needs: Sequence[int | None],
    *,
    n_shards: int = 3,
    shard_bytes: int = 0,
    more: Any = (),
    gangs: Any = (),
) -> tuple[VirtualCluster, Seen]:
    config = DispatchConfig(n_shards, room_timeout_s=5.0, shard_bytes=shard_bytes)
    dispatcher = Dispatcher(config)
    seen = Seen(dispatcher, dict(enumerate(the_needs)))
    cluster = VirtualCluster(
        dispatcher, lambda unit, worker, shard: 1.0 + 0.1 * unit.trial, load_seconds=0.5, watch=seen
    )
    for number, room in enumerate(the_rooms):
        cluster.at(0.0, WorkerAdded(f"w{number}", room=room))
    for at_s, event in more:
        cluster.at(at_s, event)
    for trial, size in gangs:
        cluster.at(0.0, TrialAllowed(trial, size))
    chains = (
        Chain(trial, range(1, 3), n_shards, memory_bytes=need)
        for trial, need in enumerate(the_needs)
    )
    cluster.add_round(Round(0, tuple(chains)))
    cluster.at(100.0, TimerFired())  # until then the cluster goes on
    return cluster, seen


def trained(cluster: VirtualCluster, trial: int) -> set[Unit]:
    return {ran.unit for ran in cluster.outcome.timeline if ran.unit.trial == trial}


def every_unit(trial: int, n_shards: int = 3) -> set[Unit]:
    kinds = ("train", "evaluate")
    return {Unit(k, trial, epoch, s) for k in kinds for epoch in (1, 2) for s in range(n_shards)}  # type: ignore[arg-type]


@given(st.lists(rooms, min_size=1, max_size=5), st.lists(needs, min_size=1, max_size=6))
def test_what_fits_somewhere_ends_there_and_the_rest_fails_with_the_numbers(
    the_rooms: list[int | None], the_needs: list[int | None]
) -> None:
    cluster, _ = search(the_rooms, the_needs)
    outcome = cluster.run()
    most = 101 if None in the_rooms else max(room for room in the_rooms if room is not None)
    too_large = {trial for trial, need in enumerate(the_needs) if need is not None and need > most}
    assert outcome.failed.keys() == too_large
    for trial, need in enumerate(the_needs):
        assert trained(cluster, trial) == (set() if trial in too_large else every_unit(trial))
        if trial in too_large:
            assert f"its units take {need} bytes of memory" in outcome.failed[trial]
            assert f"has {most} at most" in outcome.failed[trial]


@given(
    st.lists(rooms, min_size=2, max_size=5),
    st.lists(needs, min_size=1, max_size=6),
    st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(0, 4), st.booleans()), max_size=3),
    st.sampled_from([0, SHARD]),
    st.none() | st.floats(1.0, 9.0),
)
def test_no_unit_is_bound_where_it_does_not_fit_whoever_comes_and_goes(
    the_rooms: list[int | None],
    the_needs: list[int | None],
    gone: list[tuple[float, int, bool]],
    shard_bytes: int,
    horizon: float | None,
) -> None:
    leaves = [
        (at_s, DrainRequested(f"w{n}") if told else WorkerRemoved(f"w{n}", expected=True))
        for at_s, n, told in gone
        if n < len(the_rooms) - 1
    ]
    late = [(4.0, WorkerAdded("late", room=55))]
    ends = [] if horizon is None else [(0.0, HorizonSet(horizon))]
    more = [*ends, *leaves, *late]
    cluster, seen = search(the_rooms, the_needs, shard_bytes=shard_bytes, more=more)
    outcome = cluster.run()  # each instruction is looked at
    if horizon is not None:
        return
    left = [seen.room(worker) for worker in cluster.workers]
    for trial, need in enumerate(the_needs):
        if need is None:
            assert trained(cluster, trial) == every_unit(trial)
        elif trial not in outcome.failed:
            assert trained(cluster, trial) == every_unit(trial), "it neither ends nor fails"
        elif not shard_bytes:  # one that had room may have gone for ever
            assert all(room is not None and need > room for room in left)


@given(st.lists(st.none(), min_size=1, max_size=4), st.integers(1, 6))
def test_where_all_have_room_nothing_changes(the_rooms: list[None], n_trials: int) -> None:
    silent, _ = search(list(the_rooms), [None] * n_trials)
    told, _ = search([100 for _ in the_rooms], [*range(1, 1 + n_trials)])
    assert told.run().timeline == silent.run().timeline


def test_a_trial_waits_for_a_worker_with_room_rather_than_to_take_another() -> None:
    cluster, _ = search([30, 100], [90, 10, 10, 10])
    outcome = cluster.run()
    large = [ran for ran in outcome.timeline if ran.unit.trial == 0]
    assert {ran.worker for ran in large} == {"w1"}
    assert {ran.worker for ran in outcome.timeline} == {"w0", "w1"}  # the small one works too
    assert {worker for worker, _ in outcome.loaded} == {"w0", "w1"}
    assert sorted(shard for worker, shard in outcome.loaded if worker == "w1") == [0, 1, 2]


def test_a_worker_that_comes_in_time_takes_what_had_no_room() -> None:
    for at_s, fails in ((4.0, False), (6.0, True)):
        cluster, _ = search([30], [90, 10], more=[(at_s, WorkerAdded("late", room=90))])
        assert (0 in cluster.run().failed) == fails
        assert trained(cluster, 1) == every_unit(1)


def test_shards_in_memory_take_room_but_no_more_than_they_may() -> None:
    dispatcher = Dispatcher(DispatchConfig(2, shard_bytes=SHARD, room_timeout_s=0.0))
    chain = Chain(0, range(1, 2), 2, memory_bytes=85)
    dispatcher.handle(WorkerAdded("a", room=100), RoundAdded(Round(0, (chain,))), now_s=0.0)
    unit = Unit("train", 0, 1, 0)
    assert Bind in map(type, dispatcher.handle(ShardLoaded("a", 0), UnitReady(unit), now_s=1.0))
    other = replace(chain, trial=1)
    told = dispatcher.handle(ShardLoaded("a", 1), RoundAdded(Round(1, (other,))), now_s=2.0)
    assert not [each for each in told if isinstance(each, FailTrial)], "nothing of it is ready yet"
    (failed,) = dispatcher.handle(UnitReady(unit._replace(trial=1)), now_s=3.0)
    assert isinstance(failed, FailTrial)
    assert "85 bytes of memory, and a worker has 80 at most beside its process" in failed.reason
    within = Dispatcher(DispatchConfig(2, shard_bytes=SHARD, room_timeout_s=0.0))
    bounded = WorkerAdded("a", frozenset({0, 1}), room=100, shard_room=15)
    told = within.handle(bounded, RoundAdded(Round(0, (chain,))), UnitReady(unit), now_s=0.0)
    assert Bind in map(type, told)


def test_a_gang_is_formed_of_workers_with_room_alone() -> None:
    cluster, _ = search([30, 100, 100], [90, 10], gangs=[(0, 2)])
    outcome = cluster.run()
    gangs = {(ran.worker, *ran.members) for ran in outcome.timeline if ran.unit[:2] == ("train", 0)}
    assert {frozenset(gang) for gang in gangs} == {frozenset({"w1", "w2"})}
    cluster, _ = search([30, 100], [90, 10], gangs=[(0, 2)])
    reason = cluster.run().failed[0]
    assert "a gang of 2 was wanted, and 1 of 2 workers have the 90 bytes" in reason


@given(st.lists(st.tuples(st.sampled_from("abc"), rooms) | st.tuples(st.integers(0, 3), needs)))
def test_what_is_known_is_what_it_comes_to_if_counted_anew(changes: list[Any]) -> None:
    known, workers, trials = Rooms(), dict[str, Any](), dict[int, Any]()
    for who, n_bytes in changes:
        if isinstance(who, str):
            known.set_room(who, n_bytes)
            workers[who] = n_bytes
        else:
            known.set_need(who, n_bytes)
            trials[who] = n_bytes
        for worker, room in workers.items():
            over = {t for t, n in trials.items() if n is not None and room is not None and n > room}
            assert known.barred(worker) == over
        some = set().union(*(known.barred(worker) for worker in workers))
        assert known.barred_somewhere == some
        assert known.is_used == bool(some)
    for worker in workers:
        known.remove_worker(worker)
    assert not known.is_used


def test_a_trial_fails_whose_workers_cannot_hold_all_shards() -> None:
    dispatcher = Dispatcher(DispatchConfig(2, room_timeout_s=0.0))
    chains = tuple(Chain(t, range(1, 2), 2, memory_bytes=n) for t, n in enumerate((90, 10)))
    unit = Unit("train", 0, 1, 0)
    large = WorkerAdded("large", frozenset({0}), room=100, max_shards=1)
    there = large, WorkerAdded("small", room=20), RoundAdded(Round(0, chains))
    told = dispatcher.handle(*there, UnitReady(unit), now_s=0.0)
    assert [bind.worker for bind in told if isinstance(bind, Bind)] == ["large"]
    done = UnitDone(unit, 1.0, 0), UnitReady(unit._replace(position=1))
    told = dispatcher.handle(*done, now_s=1.0)
    (failed,) = (each for each in told if isinstance(each, FailTrial))
    assert "the workers that have them do not hold all shards" in failed.reason


@pytest.mark.parametrize("trains", [True, False])
def test_a_unit_that_has_filled_its_workers_memory_fails_at_once(trains: bool) -> None:
    dispatcher = Dispatcher(DispatchConfig(1))
    unit, there = Unit("train", 0, 1, 0), WorkerAdded("a", frozenset({0}))
    round_ = RoundAdded(Round(0, (Chain(0, range(1, 2), 1),)))
    dispatcher.handle(there, round_, UnitReady(unit), now_s=0.0)
    if trains:
        dispatcher.handle(UnitTrains(unit, "a"), now_s=1.0)
    dispatcher.handle(MemoryFilled("a", 95, 100), now_s=2.0)
    assert dispatcher.trial_on("a") == (0, (95, 100) if trains else None)
    told = dispatcher.handle(WorkerRemoved("a"), UnitReady(unit), now_s=3.0)
    failed = [each for each in told if isinstance(each, FailTrial)]
    assert [each.filled for each in failed] == [(unit, "a", 95, 100)] * trains


@pytest.mark.parametrize("kind", [None, "train", "evaluate"])
def test_the_second_attempt_has_a_task_for_itself(kind: Any) -> None:
    n_shards = 3
    ran_out: tuple[Unit, ...] = () if kind is None else (Unit(kind, 0, 2, 0),)
    chain = Chain(0, range(1, 3), n_shards, ran_out=ran_out)
    dispatcher = Dispatcher(DispatchConfig(n_shards, at_once_s=1e9))
    there = WorkerAdded("a", frozenset(range(n_shards))), RoundAdded(Round(0, (chain,)))
    dispatcher.handle(*there, now_s=0.0)
    now_s, binds, ready = 0.0, list[Bind](), [Unit("train", 0, 1, 0)]
    while ready:
        now_s += 1.0
        told = dispatcher.handle(*map(UnitReady, ready), now_s=now_s)
        (bind,) = (each for each in told if isinstance(each, Bind))
        binds.append(bind)
        scored, then = (tuple((s, 0.1) for s in shards) for shards in (bind.scores, bind.then))
        last = bind.unit._replace(position=bind.unit.position + len(then))
        ready = [unit for unit in ready if unit != bind.unit]
        if bind.unit.kind == "train" and last.position < n_shards - 1:
            ready.append(last._replace(position=last.position + 1))
        elif bind.unit.kind == "train":
            shards = set(range(n_shards)) - {*bind.scores}
            ready += [Unit("evaluate", 0, last.epoch, shard) for shard in sorted(shards)]
            ready += [Unit("train", 0, 2, 0)] * (last.epoch == 1)
        dispatcher.handle(UnitDone(bind.unit, 0.1, bind.shard, scored, then), now_s=now_s + 0.5)
    second = [bind for bind in binds if bind.unit.epoch == 2]
    alone = [bind.unit for bind in second if bind.alone]
    match kind:
        case None:  # training and scoring are one task
            assert len(second) == 1
        case "train":
            assert alone == [ran_out[0]]
            assert not second[0].then
            assert second[1].then
        case "evaluate":
            assert alone == [Unit("evaluate", 0, 2, shard) for shard in range(n_shards)]
            assert len(second) == 1 + n_shards


@pytest.mark.parametrize("n_shards", [1, 4])
def test_one_large_worker_among_many_small_ones_trains_the_large_trials(n_shards: int) -> None:
    cluster, _ = search([20] * 6 + [100], [50, 60, 70, None, 5], n_shards=n_shards)
    outcome = cluster.run()
    assert not outcome.failed
    for trial in range(5):
        assert trained(cluster, trial) == every_unit(trial, n_shards)
