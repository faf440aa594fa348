"""A unit on its worker: how far it goes in a turn, and whose result counts if it ran twice.

No cluster is here: a `UnitRunner` needs a data set, a store and somebody to tell.
"""

from __future__ import annotations

import errno
import math
import operator
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from distributed import Reschedule

from dagsel.dispatch.events import GangBroke, UnitTrains
from dagsel.dispatch.units import Unit
from dagsel.errors import CheckpointNotFoundError, GangBrokenError, OutOfMemoryError
from dagsel.execution import raising, state_cache
from dagsel.execution.gang_parts import How
from dagsel.execution.raising import Raising, StoreFailedError
from dagsel.execution.run_spec import RunSpec, StoredResult
from dagsel.execution.unit_runner import UnitRunner
from dagsel.messages import (
    AbandonGang,
    Assignment,
    GangCalls,
    JoinGang,
    Note,
    PieceRecord,
    StopUnit,
    StoredState,
    UnitRaised,
    WorkerLeaves,
)
from dagsel.state import State, Tensor
from dagsel.storage import CheckpointStore, RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload, seen
from dagsel.workloads.base import ShouldStop, Visit
from dagsel.workloads.gang.gang import join_gang, lead_gang
from dagsel.workloads.random_streams import own_streams
from tests.waiting import wait_until

UNIT = Unit("train", 0, 1, 0)


class Workers:
    """Workers of a run, each with both shards of eight training samples, and all they tell."""

    def __init__(self, folder: Path, n_batches: int) -> None:
        arrays = {"x": np.zeros((20, 2), np.float32)}
        data = ShardedDataset.write(folder / "data.zarr", arrays, n_shards=2)
        self.spec = RunSpec("3f9a", b"", data, RunDir(folder / "run"), seed=0)
        self.workload: Any = SyntheticWorkload(n_batches=n_batches)
        self.told: list[Any] = []

    def come(
        self, address: str, is_short_of_memory: Callable[[int], bool] = lambda _: False
    ) -> UnitRunner:
        made = UnitRunner(
            self.spec,
            self.workload,
            address=address,
            tell=self.told.append,
            tell_surely=self.told.append,
            is_short_of_memory=is_short_of_memory,
        )
        made.load(0)
        made.load(1)
        return made


def test_a_unit_has_to_stop_when_its_time_is_over_or_it_is_told() -> None:
    stop = threading.Event()
    assert ShouldStop(stop, 0.0)()
    for max_seconds in (None, math.inf):
        should_stop = ShouldStop(stop, max_seconds)
        assert not should_stop()
        stop.set()
        assert should_stop()
        stop.clear()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_turn_trains_at_least_a_batch_however_short_it_is(tmp_path: Path, n: int) -> None:
    workers = Workers(tmp_path, n_batches=4)
    worker = workers.come("a")
    for before in range(n):
        turn = Assignment(shard=1, attempt=1 + before, max_seconds=0.0, n_pieces=before)
        with pytest.raises(Reschedule):
            worker.train(UNIT, turn, {}, None)
    pieces = [told for told in workers.told if isinstance(told, PieceRecord)]
    shares = [(piece.losses and piece.losses[0], piece.share) for piece in pieces]
    assert shares == [(1, (1 + before) / 4) for before in range(n)]
    after, (done,) = worker.train(UNIT, Assignment(shard=1, attempt=1 + n, n_pieces=n), {}, None)
    assert isinstance(after, State)
    assert seen(after) == [(1, 1, batch) for batch in range(4)]
    assert done.losses is not None
    assert done.losses[0] == 4 - n


def test_a_unit_may_let_go_of_the_state_that_it_has_made_and_of_none_that_dask_has(
    tmp_path: Path,
) -> None:
    begun = list[State]()

    class LetsGo(SyntheticWorkload):
        def init(self, config: Any, seed: int) -> State:
            return begun[0] if begun else super().init(config, seed)

        def train(self, state: State, *given: Any, **how: Any) -> Any:
            trained, before = super().train(state, *given, **how), state.nbytes
            state.let_go()
            freed.append(before - state.nbytes)
            return trained

    workers, freed = Workers(tmp_path, n_batches=2), list[int]()
    workers.workload = LetsGo(n_batches=2, state_bytes=1000)
    begun.append(workers.workload.init({}, 0))
    before = bytes(begun[0].buffer)
    worker = workers.come("a")
    first, _ = worker.train(UNIT, Assignment(shard=1), {}, None)
    assert bytes(begun[0].buffer) == before, "the workload may keep it"
    assert isinstance(first, State)
    worker.train(Unit("train", 0, 1, 1), Assignment(shard=0, visits=(1,)), {}, first)
    assert freed[0] >= 1000
    assert freed[1] == 0


def test_of_two_attempts_at_a_unit_the_first_result_goes_on_and_is_told(tmp_path: Path) -> None:
    """The second attempt is begun when the first is believed lost, with another shard."""
    workers = Workers(tmp_path, n_batches=2)
    slow, other = workers.come("a"), workers.come("b")
    winner, (told,) = other.train(UNIT, Assignment(shard=1, attempt=2), {}, None)
    loser, (told_later,) = slow.train(UNIT, Assignment(shard=0, attempt=1), {}, None)
    assert loser == StoredResult(0, 1, 0)
    assert isinstance(loser, StoredResult)
    assert slow.states.load(loser) == winner
    assert (told_later.shard, told_later.digest) == (told.shard, told.digest) == (1, told.digest)
    after, _ = slow.train(Unit("train", 0, 1, 1), Assignment(shard=0, visits=(1,)), {}, loser)
    assert isinstance(after, State)
    assert [(shard, batch) for _, shard, batch in seen(after)] == [(1, 0), (1, 1), (0, 0), (0, 1)]


def test_of_two_attempts_with_the_same_visits_the_bits_of_the_first_go_on(tmp_path: Path) -> None:
    """On a GPU, or another CPU, the same visits may give other bits."""
    workers = Workers(tmp_path, n_batches=2)
    slow = workers.come("a")
    workers.workload = SyntheticWorkload(n_batches=3)
    winner, (told,) = workers.come("b").train(UNIT, Assignment(shard=1, attempt=2), {}, None)
    state, done = slow.train(UNIT, Assignment(shard=1, attempt=1, scores=(0,)), {}, None)
    assert state == StoredResult(0, 1, 0)
    assert isinstance(state, StoredResult)
    assert slow.states.load(state) == winner
    assert [(each.unit, each.digest) for each in done] == [(UNIT, told.digest)]


def test_an_epoch_is_scored_by_the_state_at_its_end_and_by_no_later_one(tmp_path: Path) -> None:
    """Dask makes a lost end anew as the latest state that is stored: good to train on from."""
    workers = Workers(tmp_path, n_batches=2)
    worker, end = workers.come("a"), Unit("train", 0, 1, 1)
    state: State | StoredResult | None = None
    for unit in (UNIT, end, Unit("train", 0, 2, 0)):
        state, _ = worker.train(unit, Assignment(shard=unit.position), {}, state)
    scoring, again = Unit("evaluate", 0, 1, 1), Assignment(shard=1, attempt=2)
    worker.evaluate(scoring, again, {}, StoredResult(0, 1, 1))
    workers.spec.run_dir.states.delete(0, 1, 1)
    lost, _ = workers.come("b").train(end, again, {}, None)
    assert lost == StoredResult(0, 2, 0)
    assert isinstance(lost, StoredResult)
    with pytest.raises(CheckpointNotFoundError, match="end of epoch 1 of trial 0 is lost"):
        worker.evaluate(scoring, again, {}, lost)
    worker.evaluate(Unit("check", 0, 1, 1), again, {}, lost)


def test_a_unit_tells_that_it_has_started_only_where_its_input_is_yet_to_come(
    tmp_path: Path,
) -> None:
    workers = Workers(tmp_path, n_batches=1)
    worker = workers.come("a")

    def notices(position: int, state: State | StoredResult | None, attempt: int = 1) -> Any:
        workers.told.clear()
        binding = Assignment(shard=position, attempt=attempt)
        after, _ = worker.train(Unit("train", 0, 1, position), binding, {}, state)
        return after, [type(told).__name__ for told in workers.told]

    first, told = notices(0, None)
    assert told == ["UnitTrains"]
    assert notices(1, first)[1] == ["UnitTrains"]
    assert notices(1, StoredResult(0, 1, 0))[1] == ["UnitStarted", "UnitTrains"]
    assert notices(1, None)[1] == ["UnitStarted", "UnitTrains"]  # it is in the store
    assert notices(0, None, attempt=2)[1][0] == "UnitStarted"  # it looks what there is


class Scoring(SyntheticWorkload):
    """Tells which shard is scored, and perhaps raises or has itself stopped there."""

    def __init__(self, on_scoring: Any) -> None:
        super().__init__(n_batches=2)
        self.on_scoring = on_scoring

    def evaluate(self, state: State, shard: Any, config: Any) -> Any:
        self.on_scoring()
        return super().evaluate(state, shard, config)


def fails() -> None:
    raise ValueError("a metric that fails")


@pytest.mark.parametrize("case", ["all", "fails", "stopped"])
def test_a_unit_scores_what_it_is_asked_to_until_something_is_in_the_way(
    tmp_path: Path, case: str
) -> None:
    workers = Workers(tmp_path, n_batches=2)
    end = Unit("train", 0, 1, 1)

    def stop() -> None:
        worker.stop(StopUnit(end, 1))

    workers.workload = Scoring({"all": lambda: None, "fails": fails, "stopped": stop}[case])
    worker = workers.come("a")
    state, _ = worker.train(UNIT, Assignment(shard=0), {}, None)
    binding = Assignment(shard=1, visits=(0,), scores=(0, 1))
    after, (done, *scored) = worker.train(end, binding, {}, state)
    assert isinstance(after, State)
    assert (done.unit, done.recovered) == (end, False)
    shards = {"all": [0, 1], "fails": [], "stopped": [0]}[case]
    assert [each.unit for each in scored] == [Unit("evaluate", 0, 1, shard) for shard in shards]
    assert [each.shard for each in scored] == shards
    if case == "fails":  # a unit of its own can say so
        with pytest.raises(ValueError, match="a metric that fails"):
            worker.evaluate(Unit("evaluate", 0, 1, 0), Assignment(shard=0), {}, after)
        return
    alone = worker.evaluate(Unit("evaluate", 0, 1, 0), Assignment(shard=0), {}, after)
    assert (scored[0].metrics, scored[0].n_samples) == (alone.metrics, alone.n_samples)
    times = [(each.start, each.stop) for each in (done, *scored)]
    assert times == sorted(times)
    assert all(before[1] <= then[0] for before, then in pairwise(times))


class Watched(SyntheticWorkload):
    """Does something before each visit of shard 0."""

    def __init__(self, before: Callable[[], None], n_batches: int = 2) -> None:
        super().__init__(n_batches=n_batches)
        self.before = before

    def train(self, state: State, shard: Any, config: Any, *, visit: Visit, **how: Any) -> Any:
        if visit.shard == 0:
            self.before()
        return super().train(state, shard, config, visit=visit, **how)


def store_of(workers: Workers) -> tuple[Any, Any]:
    """Return the places of complete and of partial states."""
    states = workers.spec.run_dir.states
    return states.list(0), states.list(0, partial=True)


def test_a_task_trains_unit_after_unit_and_stores_the_last_state(tmp_path: Path) -> None:
    workers = Workers(tmp_path, n_batches=2)
    worker = workers.come("a")
    after, work = worker.train(UNIT, Assignment(shard=1, then=(0,), scores=(0, 1)), {}, None)
    assert isinstance(after, State)
    assert seen(after) == [(1, 1, 0), (1, 1, 1), (1, 0, 0), (1, 0, 1)]
    kinds = [(done.unit.kind, done.unit.position, done.shard) for done in work]
    assert kinds == [("train", 0, 1), ("train", 1, 0), ("evaluate", 0, 0), ("evaluate", 1, 1)]
    assert [type(told).__name__ for told in workers.told] == ["UnitTrains"]
    times = [(each.start, each.stop) for each in work]
    assert all(before[1] <= then[0] for before, then in pairwise(times))
    assert store_of(workers) == (((1, 1),), ())
    _, meta = workers.spec.run_dir.states.load(0, 1, 1)
    stored = StoredState.read((1, 1), meta)
    assert (stored.visits, stored.n_samples) == ((1, 0), work[1].n_samples)
    assert stored.losses == ((work[0].n_samples, work[0].loss),)
    assert (stored.digest, work[0].digest) == (work[1].digest, "")


@pytest.mark.parametrize("at_once_s", [0.0, 1e6])
def test_a_task_begins_no_unit_after_its_time(tmp_path: Path, at_once_s: float) -> None:
    """The dispatcher may have believed units short that are not."""
    worker = Workers(tmp_path, n_batches=2).come("a")
    bound = Assignment(shard=1, then=(0,), scores=(0, 1), at_once_s=at_once_s)
    after, work = worker.train(UNIT, bound, {}, None)
    assert isinstance(after, State)
    if at_once_s:
        assert len(work) == 4
        return
    assert seen(after) == [(1, 1, 0), (1, 1, 1)]
    assert [done.unit for done in work] == [UNIT]


def test_a_task_that_is_stopped_has_done_the_visits_before(tmp_path: Path) -> None:
    workers = Workers(tmp_path, n_batches=2)
    workers.workload = Watched(lambda: worker.stop(StopUnit(UNIT, 1)))
    worker = workers.come("a")
    binding = Assignment(shard=1, then=(0,))
    after, (done, piece) = worker.train(UNIT, binding, {}, None)
    assert isinstance(after, State)
    assert seen(after) == [(1, 1, 0), (1, 1, 1)]
    assert (done.unit, type(piece)) == (UNIT, PieceRecord)
    assert (piece.unit, piece.shard, piece.share) == (Unit("train", 0, 1, 1), 0, 0.5)
    assert store_of(workers) == (((1, 0),), ((1, 1),))
    again = Assignment(shard=0, attempt=2, visits=(1,), n_pieces=1)
    whole, _ = worker.train(piece.unit, again, {}, after)
    assert isinstance(whole, State)
    assert seen(whole) == [(1, 1, 0), (1, 1, 1), (1, 0, 0), (1, 0, 1)]


def test_a_task_that_is_stopped_between_two_visits_begins_no_other(tmp_path: Path) -> None:
    workers = Workers(tmp_path, n_batches=1)  # which ends before it asks whether to stop
    workers.workload = Watched(lambda: worker.stop(StopUnit(UNIT, 1)), n_batches=1)
    worker = workers.come("a")
    after, (done,) = worker.train(UNIT, Assignment(shard=0, then=(1,), scores=(0,)), {}, None)
    assert isinstance(after, State)
    assert seen(after) == [(1, 0, 0)]
    assert done.unit == UNIT
    assert store_of(workers) == (((1, 0),), ())


def test_what_raises_after_the_first_unit_of_a_task_raises_in_its_own(tmp_path: Path) -> None:
    workers = Workers(tmp_path, n_batches=2)
    workers.workload = Watched(fails)
    worker = workers.come("a")
    after, (done,) = worker.train(UNIT, Assignment(shard=1, then=(0,), scores=(0,)), {}, None)
    assert done.unit == UNIT
    assert store_of(workers) == (((1, 0),), ())
    with pytest.raises(ValueError, match="a metric that fails"):
        worker.train(Unit("train", 0, 1, 1), Assignment(shard=0, visits=(1,)), {}, after)


def test_of_two_attempts_at_a_task_the_first_result_goes_on_and_all_its_units_are_told(
    tmp_path: Path,
) -> None:
    workers = Workers(tmp_path, n_batches=2)
    slow, other = workers.come("a"), workers.come("b")
    winner, told = other.train(UNIT, Assignment(shard=1, attempt=2, then=(0,)), {}, None)
    loser, later = slow.train(UNIT, Assignment(shard=0, then=(1,)), {}, None)
    assert loser == StoredResult(0, 1, 1)
    assert isinstance(loser, StoredResult)
    assert slow.states.load(loser) == winner
    assert [each.shard for each in later] == [each.shard for each in told] == [1, 0]
    found, (first,) = slow.train(UNIT, Assignment(shard=0, attempt=3, then=(1,)), {}, None)
    assert (found, first.recovered, first.shard) == (loser, True, 1), "it has visited shard 1"


class Ranks(SyntheticWorkload):
    """Writes down what ranks of a gang train with."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def validate_gang(self, config: Any, size: int) -> None:
        pass

    def train_gang(self, state: Any, shard: Any, config: Any, *, visit: Visit, **_: Any) -> Any:
        self.told.append((config, visit.last_value))


def begin(train: Callable[[], None]) -> None:
    threading.Thread(target=train, daemon=True).start()


def at_call(workers: Workers, leader: UnitRunner, react: Callable[[], None]) -> None:
    """Do something as soon as the leader of a gang calls another worker."""

    def tell(notice: Any) -> None:
        workers.told.append(notice)
        if isinstance(notice, GangCalls):
            react()

    leader.gangs._tell = tell


def test_each_rank_of_a_gang_is_told_the_metric_of_the_epoch_before(tmp_path: Path) -> None:
    workers = Workers(tmp_path, n_batches=1)
    workers.workload = Ranks()
    leader, member = workers.come("tcp://127.0.0.1:1"), workers.come("tcp://127.0.0.1:2")
    unit = Unit("train", 0, 2, 0)
    state = workers.workload.init({}, 0)

    at_call(workers, leader, lambda: leader.gangs.abandon(unit, 1, "a test"))
    with pytest.raises(Reschedule):
        leader.train(unit, Assignment(shard=0, gang=2), {"lr": 0.5}, state, 0.25)
    (call,) = (told for told in workers.told if isinstance(told, GangCalls))
    about: Any = {"name": "0-2-0-1", "secret": workers.spec.secret, "timeout_s": 20.0}

    def call_it(rank: int, port: int) -> None:
        member.gangs.join(JoinGang(unit, 1, 0, rank, 2, "127.0.0.1", port, call.how), begin)

    with lead_gang("127.0.0.1", size=2, call=call_it, **about):
        wait_until(member.is_idle, "the rank to end")
    assert workers.workload.told == [({"lr": 0.5}, 0.25)]


def test_a_leader_that_is_told_to_stop_waits_for_no_other(tmp_path: Path) -> None:
    workers = Workers(tmp_path, n_batches=1)
    workers.workload = Ranks()
    leader = workers.come("tcp://127.0.0.1:1")

    at_call(workers, leader, lambda: leader.stop(StopUnit(UNIT, 1)))
    with pytest.raises(Reschedule):
        leader.train(UNIT, Assignment(shard=0, gang=2), {}, None)
    assert [type(told) for told in workers.told] == [GangCalls]  # it has not broken


def test_a_leader_that_was_told_to_stop_before_it_waits_calls_nobody(tmp_path: Path) -> None:
    class Stops(Ranks):
        def init(self, config: Any, seed: int) -> State:
            leader.stop(StopUnit(UNIT, 1))
            return super().init(config, seed)

    workers = Workers(tmp_path, n_batches=1)
    workers.workload = Stops()
    leader = workers.come("tcp://127.0.0.1:1")
    with pytest.raises(Reschedule):
        leader.train(UNIT, Assignment(shard=0, gang=2), {}, None)
    assert workers.told == []


def test_a_gang_that_breaks_when_its_time_is_over_has_broken(tmp_path: Path) -> None:
    """Else one that always breaks would be tried without end in turns."""
    workers = Workers(tmp_path, n_batches=1)
    workers.workload = Ranks()
    leader = workers.come("tcp://127.0.0.1:1")

    at_call(workers, leader, lambda: leader.gangs.abandon(UNIT, 1, "a test"))
    with pytest.raises(Reschedule):
        leader.train(UNIT, Assignment(shard=0, gang=2, max_seconds=0.0), {}, None)
    assert [type(told) for told in workers.told] == [GangCalls, GangBroke]


def test_a_gang_trains_since_all_have_come(tmp_path: Path) -> None:
    """Before that its workers may train for another search, for whatever time."""
    workers, came, limits = Workers(tmp_path, n_batches=1), list[float](), list[float]()

    class Begins(Ranks):
        def train_gang(self, *_: Any, **how: Any) -> Any:
            limits.append(how["should_stop"]._deadline)
            raise RuntimeError("it trains")

    workers.workload = Begins()
    leader = workers.come("tcp://127.0.0.1:1")

    def join() -> None:
        port, name = workers.told[-1].port, f"0-1-0-{workers.told[-1].attempt}"
        about: Any = {"name": name, "secret": workers.spec.secret, "timeout_s": 20.0}
        came.append(time.monotonic())
        with suppress(GangBrokenError), join_gang("127.0.0.1", port, rank=1, size=2, **about) as it:
            it.agree(True)

    at_call(workers, leader, lambda: begin(join))
    for attempt in (1, 2):
        workers.told.clear()
        with pytest.raises(RuntimeError, match="it trains"):
            leader.train(UNIT, Assignment(0, attempt, max_seconds=9.0, gang=2), {}, None)
        assert [type(told) for told in workers.told] == [GangCalls, UnitTrains]
        assert limits[-1] >= came[-1] + 9.0


def test_a_worker_that_cannot_join_a_gang_says_why(tmp_path: Path) -> None:
    workers = Workers(tmp_path, n_batches=1)
    workers.workload = Ranks()
    how = b64encode(cloudpickle.dumps(How({}))).decode()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    call = JoinGang(UNIT, 1, 0, 1, 2, "127.0.0.1", port, how)
    workers.come("tcp://127.0.0.1:2").gangs.join(call, lambda train: train())
    (lacks,) = workers.told
    assert (lacks.unit, lacks.attempt) == (UNIT, 1)
    assert f"its leader at 127.0.0.1:{port} is not there" in lacks.reason


def test_memory_that_ran_out_on_a_member_of_a_gang_is_that_of_its_worker(tmp_path: Path) -> None:
    class RunsOut(Ranks):
        def train_gang(self, *_: Any, **how: Any) -> Any:
            raise MemoryError("Unable to allocate 1.00 TiB for an array")

    workers = Workers(tmp_path, n_batches=1)
    workers.workload = RunsOut()
    leader, member = workers.come("tcp://127.0.0.1:1"), workers.come("tcp://127.0.0.1:2")
    leader.raising.worker, member.raising.worker = "w1", "w2"
    how = b64encode(cloudpickle.dumps(How({}))).decode()
    about: Any = {"name": "0-1-0-1", "secret": workers.spec.secret, "timeout_s": 20.0}

    def call_it(rank: int, port: int) -> None:
        member.gangs.join(JoinGang(UNIT, 1, 0, rank, 2, "127.0.0.1", port, how), begin)

    def lead() -> None:
        with leader.raising.telling(UNIT, {}, 0):
            with lead_gang("127.0.0.1", size=2, call=call_it, **about) as gang:
                gang.agree(True)

    with pytest.raises(OutOfMemoryError, match="asked for in unit 1 of epoch 1, on worker w2: "):
        lead()


@pytest.mark.parametrize(("state_bytes", "n_trained"), [(0, 2), (2_000_000, 1)])
def test_a_task_trains_on_where_memory_is_short_only_with_a_small_state(
    tmp_path: Path, state_bytes: int, n_trained: int
) -> None:
    """While the next unit trains there is one more state; a small one makes no difference."""
    workers = Workers(tmp_path, n_batches=1)
    workers.workload = SyntheticWorkload(state_bytes=state_bytes)
    worker = workers.come("a", is_short_of_memory=lambda _: True)
    _, done = worker.train(UNIT, Assignment(shard=0, then=(1,)), {}, None)
    assert len(done) == n_trained


def test_a_unit_that_is_told_to_stop_before_its_turn_trains_nothing(tmp_path: Path) -> None:
    workers = Workers(tmp_path, n_batches=2)
    worker = workers.come("a")
    worker.stop(StopUnit(UNIT, 1))
    with pytest.raises(Reschedule):
        worker.train(UNIT, Assignment(shard=0), {}, None)
    assert (workers.told, store_of(workers)) == ([], ((), ()))
    after, _ = worker.train(UNIT, Assignment(shard=0, attempt=2), {}, None)
    assert isinstance(after, State)
    assert seen(after) == [(1, 0, 0), (1, 0, 1)]


def test_a_worker_that_has_left_a_run_begins_nothing_and_stores_nothing(tmp_path: Path) -> None:
    """A task may come to its turn as the worker leaves, and the run's store be tidied already."""
    workers = Workers(tmp_path, n_batches=2)
    state, _ = workers.come("a").train(UNIT, Assignment(shard=0), {}, None)
    assert isinstance(state, State)
    worker, before = workers.come("b"), store_of(workers)
    worker.stop_all()
    worker.clear()
    with pytest.raises(Reschedule):
        worker.train(Unit("train", 0, 1, 1), Assignment(shard=1), {}, state)
    with pytest.raises(Reschedule):
        worker.evaluate(Unit("evaluate", 0, 1, 0), Assignment(shard=0), {}, state)
    assert store_of(workers) == before
    assert worker.is_idle()


def test_a_worker_that_leaves_a_run_waits_for_what_is_scored(tmp_path: Path) -> None:
    """What it keeps for metrics of the whole set is stored by then."""
    workers = Workers(tmp_path, n_batches=1)
    worker, begins, goes_on = workers.come("a"), threading.Event(), threading.Event()
    state, _ = worker.train(UNIT, Assignment(shard=0), {}, None)
    assert isinstance(state, State)
    evaluate = SyntheticWorkload.evaluate

    def waits(*what: Any) -> Any:
        begins.set()
        assert goes_on.wait(60)
        return evaluate(*what)

    scoring: Any = (Unit("evaluate", 0, 1, 0), Assignment(shard=0), {}, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyntheticWorkload, "evaluate", waits)
        patch.setattr("dagsel.execution.stops.LEAVE_S", 60.0)
        scores = threading.Thread(target=worker.evaluate, args=scoring)
        scores.start()
        assert begins.wait(60)
        leaves = threading.Thread(target=worker.clear)
        leaves.start()
        leaves.join(0.1)
        assert leaves.is_alive()
        assert worker.is_idle()  # a worker that is told to end need not wait for scores
        goes_on.set()
        leaves.join(60)
        assert not leaves.is_alive()
        scores.join(60)


@pytest.mark.parametrize(
    ("state_bytes", "is_short", "may_train"),
    [(0, True, True), (2_000_000, True, False), (2_000_000, False, True)],
)
def test_the_next_unit_may_train_while_a_state_is_stored_unless_memory_is_short(
    tmp_path: Path, state_bytes: int, is_short: bool, may_train: bool
) -> None:
    workers = Workers(tmp_path, n_batches=1)
    workers.workload = SyntheticWorkload(n_batches=1, state_bytes=state_bytes)
    worker = workers.come("a", is_short_of_memory=lambda _: is_short)
    told, save = list[bool](), CheckpointStore.save_first

    def take_turn() -> None:
        with own_streams(give_up=lambda: True) as is_its_turn:
            told.append(is_its_turn)

    def watched(store: CheckpointStore, *what: Any) -> Any:
        other = threading.Thread(target=take_turn)
        other.start()
        other.join()
        return save(store, *what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "save_first", watched)
        _, done = worker.train(UNIT, Assignment(shard=0, then=(), scores=(0, 1)), {}, None)
    assert told == [may_train]
    assert len(done) == (3 if may_train else 1)  # what is not scored here has tasks of its own


def test_what_a_unit_has_scored_does_not_count_if_another_attempt_was_first(tmp_path: Path) -> None:
    workers = Workers(tmp_path, n_batches=2)
    slow, other = workers.come("a"), workers.come("b")
    other.train(UNIT, Assignment(shard=1, attempt=2, then=(0,)), {}, None)
    binding = Assignment(shard=0, attempt=1, then=(1,), scores=(0, 1))
    state, done = slow.train(UNIT, binding, {}, None)
    assert state == StoredResult(0, 1, 1)
    assert [each.unit for each in done] == [UNIT, UNIT._replace(position=1)]


class Setting(SyntheticWorkload):
    """The clock of its machine is set as it trains, and as it scores."""

    def __init__(self, patch: pytest.MonkeyPatch, by: float) -> None:
        super().__init__(n_batches=2)
        self.clock, self.by = time.time, by
        self.patch = patch

    def set(self) -> None:
        self.clock = partial(operator.add, self.clock(), self.by)
        self.patch.setattr(time, "time", self.clock)

    def train(self, *what: Any, **how: Any) -> Any:
        self.set()
        return super().train(*what, **how)

    def evaluate(self, *what: Any) -> Any:
        self.set()
        return super().evaluate(*what)


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
def test_a_clock_that_is_set_is_no_time_that_a_unit_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    """So it is where a laptop sleeps in the middle of a unit."""
    workers = Workers(tmp_path, n_batches=2)
    workers.workload = Setting(monkeypatch, by)
    worker, later = workers.come("a"), UNIT._replace(position=1)
    with pytest.raises(Reschedule):
        worker.train(UNIT, Assignment(shard=0, max_seconds=0.0), {}, None)
    at_once = Assignment(shard=0, attempt=2, n_pieces=1, then=(1,), scores=(0,))
    state, done = worker.train(UNIT, at_once, {}, None)
    again = worker.train(later, Assignment(shard=1, attempt=2, visits=(0,)), {}, None)[1]
    scored = worker.evaluate(Unit("evaluate", 0, 1, 1), Assignment(shard=1), {}, state)
    pieces = [told for told in workers.told if isinstance(told, PieceRecord)]
    assert [each.recovered for each in again] == [True]
    assert [each.unit.kind for each in done] == ["train", "train", "evaluate"]
    for each in (*pieces, *done, *again, scored):
        times = (each.stop - each.start, each.save_seconds, each.ready_seconds)
        assert all(0 <= seconds < abs(by) / 2 for seconds in times)


class Keeping(SyntheticWorkload):
    """Each shard keeps the state that it has scored, and so many bytes."""

    n_bytes = 0

    def evaluate(self, state: State, shard: Any, config: Any) -> Any:
        visits = [int(visit) for _, visit, _ in seen(state)]
        room = Tensor.from_numpy(np.zeros(self.n_bytes, np.uint8))
        kept = State.pack({"room": room}, {"visits": visits})
        return replace(super().evaluate(state, shard, config), kept=kept)


def visits_scored(workers: Workers, shard: int) -> Any:
    """Return the visits of the state of which a shard has kept something."""
    return State(workers.spec.run_dir.states.load_scores(0, "epoch", 1, shard)).meta["visits"]


def test_what_shards_keep_is_that_of_the_state_that_is_stored(tmp_path: Path) -> None:
    """A worker that was believed lost comes back when its successor has scored the same shard."""
    workers = Workers(tmp_path, n_batches=1)
    workers.workload = Keeping(n_batches=1)
    slow, other = workers.come("a"), workers.come("b")
    theirs = Assignment(shard=1, attempt=2, then=(0,), scores=(0,))
    state, done = other.train(UNIT, theirs, {}, None)
    assert [each.unit.kind for each in done] == ["train", "train", "evaluate"]
    slow.train(UNIT, Assignment(shard=0, attempt=1, then=(1,), scores=(0, 1)), {}, None)
    other.evaluate(Unit("evaluate", 0, 1, 1), Assignment(shard=1), {}, state)
    assert [visits_scored(workers, shard) for shard in (0, 1)] == [[1, 0], [1, 0]]


@pytest.mark.parametrize("is_short", [False, True])
def test_a_task_scores_no_more_shards_when_memory_is_short_of_what_they_keep(
    tmp_path: Path, is_short: bool
) -> None:
    workers = Workers(tmp_path, n_batches=1)
    workers.workload = Keeping(n_batches=1)
    workers.workload.n_bytes = 2_000_000
    worker = workers.come("a", lambda _: is_short)
    _, done = worker.train(UNIT, Assignment(shard=0, then=(1,), scores=(0, 1)), {}, None)
    scored = [each.unit.position for each in done if each.unit.kind == "evaluate"]
    assert scored == ([0] if is_short else [0, 1])


def test_what_cannot_be_stored_of_a_score_is_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(tmp_path, n_batches=1)
    workers.workload = Keeping(n_batches=1)
    worker = workers.come("a")

    def fail(*_: Any) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(state_cache, "PATIENCE_S", 0.0)
        patched.setattr(CheckpointStore, "save_scores", fail)
        state, done = worker.train(UNIT, Assignment(shard=0, then=(1,), scores=(0,)), {}, None)
        assert [each.unit.kind for each in done] == ["train", "train"]
        with pytest.raises(StoreFailedError):
            worker.evaluate(Unit("evaluate", 0, 1, 0), Assignment(shard=0), {}, state)
    worker.evaluate(Unit("evaluate", 0, 1, 0), Assignment(shard=0), {}, state)
    assert visits_scored(workers, 0) == [0, 1]


def test_a_worker_whose_store_fails_says_so_once_and_gives_its_units_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(tmp_path, n_batches=1)
    worker = workers.come("a")
    worker.raising = Raising(workers.workload, workers.told.append, worker="0", address="a")

    def fail(*_: Any, **how: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(state_cache, "PATIENCE_S", 0.0)
    monkeypatch.setattr(CheckpointStore, "save_first", fail)
    for _ in range(2):
        with pytest.raises(Reschedule), worker.raising.telling(UNIT, {}, 0):
            worker.train(UNIT, Assignment(shard=0), {}, None)
    leaves = [told for told in workers.told if isinstance(told, WorkerLeaves)]
    notes = [told.text for told in workers.told if isinstance(told, Note)]
    assert [each.worker for each in leaves] == ["a"]
    assert len(notes) == 1
    for told in (leaves[0].unfit, notes[0]):
        assert "worker 0 at a cannot use the store" in told
        assert f"{workers.spec.run_dir.states.url}: OSError: [Errno {errno.EROFS}] Read" in told
    assert not [told for told in workers.told if isinstance(told, UnitRaised)]


def test_a_folder_in_the_place_of_a_state_is_its_trials_trouble(tmp_path: Path) -> None:
    """The store answers: another worker would find the same."""
    workers = Workers(tmp_path, n_batches=1)
    worker = workers.come("a")
    (tmp_path / "run/states/trial-000000/epoch-000001-position-000000.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError), worker.raising.telling(UNIT, {}, 0):
        worker.train(UNIT, Assignment(shard=0), {}, None)
    assert [type(told) for told in workers.told][-1] is UnitRaised


def test_what_pytorch_keeps_of_a_gpu_and_does_not_use_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier run on the same worker has freed it, and PyTorch does not give it back."""
    gpu = SimpleNamespace(
        mem_get_info=lambda: (10, 100), memory_reserved=lambda: 80, memory_allocated=lambda: 5
    )
    monkeypatch.setattr(raising, "cuda_here", lambda: gpu)
    assert raising.gpu_memory() == 85


def test_a_worker_to_which_cuda_is_of_no_use_restarts_and_gives_its_units_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, restarted = Workers(tmp_path, n_batches=1), list[int]()
    worker = workers.come("a")
    who: Any = {"worker": "0", "address": "a", "restart": lambda: restarted.append(1)}
    worker.raising = worker.gangs._raising = Raising(workers.workload, workers.told.append, **who)

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nSearch for it in the docs")

    gpu = SimpleNamespace(is_initialized=lambda: True, mem_get_info=fail)
    monkeypatch.setattr(raising, "cuda_here", lambda: gpu)
    score = Unit("evaluate", 0, 1, 0)
    for run in (
        lambda: worker.train(UNIT, Assignment(shard=0), {}, None),
        lambda: worker.evaluate(score, Assignment(shard=0), {}, State.pack({}, {})),
    ):
        with pytest.raises(Reschedule), worker.raising.telling(UNIT, {}, 0):
            run()
    call = JoinGang(UNIT, attempt=1, shard=0, rank=1, size=2, host="nowhere", port=0, how="")
    worker.gangs.join(call, lambda train: train())
    note, leaves, lacks = workers.told
    assert isinstance(lacks, AbandonGang)
    assert (leaves, restarted) == (WorkerLeaves("a"), [1])
    assert note.text.startswith("worker 0 at a restarts, since CUDA refuses all that its process")
    assert note.text.endswith("of a trial: CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."), 150),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), 150),
        (MemoryError("Unable to allocate 1.00 TiB for an array"), 32),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 32),
    ],
)
def test_memory_that_ran_out_is_that_of_the_gpu_or_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, limit: int
) -> None:
    workers = Workers(tmp_path, n_batches=1)
    gpu = SimpleNamespace(
        is_initialized=lambda: True, mem_get_info=lambda: (9, 150), empty_cache=lambda: None,
        max_memory_allocated=lambda: 8,
    )  # fmt: skip
    monkeypatch.setattr(raising, "cuda_here", lambda: gpu)
    tells = Raising(workers.workload, workers.told.append, worker="0", memory_limit=32)
    with pytest.raises(OutOfMemoryError), tells.telling(UNIT, {}, 0):
        raise error
    assert workers.told[0].raised.ran_out.limit == limit
