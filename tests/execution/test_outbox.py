"""What a turn of the driver sends is one message, in order, and nothing of it is lost."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.events import TrialHeld
from dagsel.dispatch.units import Chain, Round
from dagsel.errors import ClusterError
from dagsel.execution.engine import DaskEngine
from dagsel.execution.outbox import Outbox
from dagsel.execution.run_spec import CHANNEL, unit_key
from dagsel.messages import COMMANDS, UnitRecord
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.waiting import wait_until

from .helpers import engine_for, listen, of, own_cluster


def round_of(engine: DaskEngine, number: int, trial: int) -> Round:
    n_shards = engine.spec.data.n_shards
    return Round(number, (Chain(trial, range(1, 2), n_shards, evaluate=False),))


def train(engine: DaskEngine, number: int, trial: int) -> list[UnitRecord]:
    engine.submit(round_of(engine, number, trial), {trial: {}})
    return of(
        UnitRecord,
        listen(engine, lambda heard: len(of(UnitRecord, heard)) == engine.spec.data.n_shards),
    )


def is_known(dask_scheduler: Scheduler, key: Any) -> bool:
    return key in dask_scheduler.tasks


def ops(client: Client) -> list[list[str]]:
    """What each of the client's messages to the scheduler was made of."""
    sent: Any = client.scheduler_comm
    return [[part["op"] for part in parts] for parts in sent.recent_message_log]


def test_a_round_its_tasks_and_what_is_given_up_go_together_and_in_order(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        train(engine, 1, 0)
        engine.release(0, 1)
        engine.tell(TrialHeld(0, 1))
        train(engine, 2, 1)
        (sent,) = [parts for parts in ops(client)[-3:] if parts.count(CHANNEL) == 2]
    assert sent.index("client-releases-keys") < sent.index("update-graph")
    assert sent[-1] == "update-graph", "the round is known before its tasks are"


def test_what_is_given_up_is_forgotten_though_nothing_else_goes_out(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        key = unit_key(engine.spec.run, train(engine, 1, 0)[-1].unit)
        assert client.run_on_scheduler(is_known, key=key)
        engine.release(0, 1)

        def is_forgotten() -> bool:
            list(engine.messages(timeout_s=0.1))
            return not client.run_on_scheduler(is_known, key=key)

        wait_until(is_forgotten, "the result is given up")


def test_what_sending_raises_is_raised_in_the_driver_and_names_the_cause(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ArithmeticError("no copy of me")

    with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        engine.submit(round_of(engine, 1, 0), {0: {"x": Unpicklable()}})
        with pytest.raises(TypeError, match="Could not serialize") as caught:
            listen(engine, until=lambda heard: False)
    assert "no copy of me" in str(caught.value.__cause__)


def test_a_command_for_a_run_that_is_over_and_one_that_raises_leave_the_client_connected(
    client: Client, digits: ShardedDataset, run_dir: str, tmp_path: Path
) -> None:
    with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        over = engine._outbox
    over.tell(TrialHeld(0, 1))
    over.flush()
    with engine_for(client, digits, SyntheticWorkload(), str(tmp_path / "next")) as engine:
        for command in (COMMANDS.to_text(TrialHeld(0, 1)), "nonsense"):
            told = {"op": CHANNEL, "run": engine.spec.run, "command": command}
            client._send_to_scheduler(told)
        assert len(train(engine, 1, 1)) == digits.n_shards


def test_a_scheduler_that_is_gone_is_said_by_what_is_sent_next(
    digits: ShardedDataset, run_dir: str
) -> None:
    with (
        own_cluster(1) as cluster,
        Client(cluster, set_as_default=False) as client,
        engine_for(client, digits, SyntheticWorkload(), run_dir) as engine,
    ):
        train(engine, 1, 0)
        cluster.close()
        wait_until(lambda: not engine._connection.is_there, "the client has seen it")
        with pytest.raises(ClusterError, match="is gone"):
            engine.submit(round_of(engine, 2, 1), {1: {}})


class Wanted:
    """A future: Dask gives it up in the next turn of the loop, which then sends that."""

    def __init__(self, loop: Loop, number: int) -> None:
        self.loop, self.number = loop, number

    def __del__(self) -> None:
        self.loop.add_callback(self.loop._send_to_scheduler, self.number)


class Loop:
    """An event loop's queue, and a client that sends by it, as Dask's does."""

    def __init__(self) -> None:
        self.steps: deque[Any] = deque()
        self.sent: list[Any] = []
        self.loop = self

    def add_callback(self, do: Any, *args: Any) -> None:
        self.steps.append((do, args))

    def _send_to_scheduler(self, message: Any) -> None:
        self.add_callback(self.sent.append, message)

    def check(self) -> None:
        """The connection is there."""

    @property
    def client(self) -> Loop:
        return self

    def run(self, n: int | None = None) -> None:
        while self.steps and n != 0:
            do, args = self.steps.popleft()
            do(*args)
            n = None if n is None else n - 1


@given(st.lists(st.tuples(st.sampled_from(["tell", "give up", "flush"]), st.integers(0, 3))))
def test_all_goes_out_in_the_order_it_was_put_in_however_the_loop_runs(
    steps: list[tuple[str, int]],
) -> None:
    loop: Any = Loop()
    outbox = Outbox(loop, "run", wake=lambda: None)
    steps = [*steps, ("tell", 0)]
    for number, (kind, n) in enumerate(steps):
        if kind == "tell":
            outbox.tell(TrialHeld(number, 1))
        elif kind == "give up":
            outbox._futures[number] = {1: [Wanted(loop, number)]}  # type: ignore[list-item]
            outbox.give_up(number)
        else:
            outbox.flush()
            loop.run(n)
    outbox.flush()
    loop.run()
    sent: list[int] = []
    for it in loop.sent:
        held: Any = [] if isinstance(it, int) else COMMANDS.from_text(it["command"])
        sent += [told.trial for told in held] or [it]
    assert sent == [at for at, (kind, _) in enumerate(steps) if kind != "flush"]
