"""Gangs on a real cluster: whole or not at all, and the unit is done whatever becomes of a rank."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cloudpickle
import optuna
import pytest
import torch
from distributed import Client

import dagsel
from dagsel.dispatch.events import FailRun, TrialAllowed, UnitTrains, WorkerRemoved
from dagsel.dispatch.units import Chain, Round
from dagsel.errors import GangBrokenError, SearchError
from dagsel.execution.scheduler_plugin import DispatchPlugin
from dagsel.flow import Ask, Asked, Decision, Event, Finish, Pause, Paused, Reported, Stop, Train
from dagsel.history.script import read_turns
from dagsel.messages import Message, PieceRecord, TrialReport, UnitRecord, WorkerJoined
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload, seen
from tests.conftest import Optimize
from tests.driver.scripted import Scripted
from tests.waiting import wait_until

from .helpers import client_of, done, engine_for, final_state, listen, of

N_GANGS, N_SHARDS = int(os.environ.get("GANGS", "80")), 4


@pytest.fixture
def three() -> Iterator[Client]:
    with client_of(3) as client:
        yield client


@pytest.mark.slow
def test_gangs_in_a_row_of_which_every_tenth_loses_a_rank(
    three: Client, digits: ShardedDataset, run_dir: str
) -> None:
    n_epochs = N_GANGS // N_SHARDS
    workload = SyntheticWorkload(seconds=0.02, n_batches=3)
    pids = three.run(os.getpid)
    n_done, n_killed, n_restarts = 0, 0, 0
    with engine_for(three, digits, workload, run_dir) as engine:
        engine.tell(TrialAllowed(0, 2, None, 1))
        chain = Chain(0, range(1, n_epochs + 1), N_SHARDS, evaluate=False)
        engine.submit(Round(1, (chain,)), {0: {}})
        while n_done < N_GANGS:
            heard = list(engine.messages(timeout_s=60))
            assert heard, f"nothing was heard for 60 s after {n_done} gangs, {n_killed} kills"
            for message in heard:
                assert not isinstance(message, TrialReport | FailRun), message
                if isinstance(message, WorkerJoined) and message.worker not in pids:
                    n_restarts += 1
                    pids |= three.run(os.getpid, workers=[message.worker])
                if not isinstance(message, UnitRecord) or message.recovered:
                    continue
                n_done += 1
                assert len(message.members) == 1
                if n_done % 10 == 0 and n_done < N_GANGS:
                    # Its gang goes on with the next unit: the leader and the other in turn.
                    gang = [message.worker, *message.members]
                    os.kill(pids[gang[n_killed % 2]], signal.SIGKILL)
                    n_killed += 1
        state = final_state(engine, 0, n_epochs, N_SHARDS)
    assert n_killed == N_GANGS // 10 - 1
    assert n_killed - 1 <= n_restarts <= n_killed  # a gang needs two of the three
    counts = Counter(seen(state))
    assert set(counts.values()) == {1}
    assert len(counts) == N_GANGS * 3


def is_over(heard: list[Message]) -> bool:
    return len(done(heard)) == N_SHARDS or bool(of(TrialReport, heard))


class Breaks(SyntheticWorkload):
    """Has a gang that always breaks, as over a network that loses what is sent."""

    def train_gang(self, *args: Any, **rest: Any) -> Any:
        raise GangBrokenError("nothing came")


def test_a_gang_that_breaks_again_and_again_fails_its_trial(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    with engine_for(client, digits, Breaks(), run_dir, dispatch={"max_strikes": 2}) as engine:
        engine.tell(TrialAllowed(0, 2, None, 1))
        chain = Chain(0, range(1, 2), N_SHARDS, evaluate=False)
        engine.submit(Round(1, (chain,)), {0: {}})
        (failed,) = of(TrialReport, listen(engine, until=is_over))
    assert "nothing came (2 strikes)" in failed.reason
    assert failed.raised is None  # nothing that the workload's code is to blame for


class MemberExits(SyntheticWorkload):
    """Has code that ends the process of a gang's member, as `sys.exit` would."""

    def train_gang(self, state: Any, shard: Any, config: Any, **rest: Any) -> Any:
        if rest["gang"].rank == 1:
            sys.exit("bad data")
        return super().train_gang(state, shard, config, **rest)


def test_a_member_that_would_end_its_process_fails_the_trial_with_its_error(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    with engine_for(client, digits, MemberExits(n_batches=2), run_dir) as engine:
        engine.tell(TrialAllowed(0, 2, None, 1))
        chain = Chain(0, range(1, 2), N_SHARDS, evaluate=False)
        engine.submit(Round(1, (chain,)), {0: {}})
        (failed,) = of(TrialReport, listen(engine, until=is_over))
    assert "SystemExit('bad data')" in failed.reason
    assert "strikes" not in failed.reason


class LeavesOnce(SyntheticWorkload):
    """Has a gang's member told, once, that its machine is taken back."""

    def train_gang(self, state: Any, shard: Any, config: Any, **rest: Any) -> Any:
        if rest["gang"].rank == 1 and not Path(config["told"]).exists():
            Path(config["told"]).touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_gang(state, shard, config, **rest)


def test_notice_to_a_member_costs_no_more_than_a_batch(
    three: Client, digits: ShardedDataset, run_dir: str, tmp_path: Path
) -> None:
    workload = LeavesOnce(seconds=2.0, n_batches=40)
    with engine_for(three, digits, workload, run_dir, dispatch={"max_strikes": 1}) as engine:
        engine.tell(TrialAllowed(0, 2, None, 1))
        engine.submit(
            Round(1, (Chain(0, range(1, 2), N_SHARDS, evaluate=False),)),
            {0: {"told": str(tmp_path / "told")}},
        )
        heard = listen(engine, until=is_over)
        assert of(TrialReport, heard) == []
        state = final_state(engine, 0, 1, N_SHARDS)
    pieces = of(PieceRecord, heard)
    assert [0 < piece.share < 1 for piece in pieces] == [True]
    counts = Counter(seen(state))
    assert set(counts.values()) == {1}
    assert len(counts) == N_SHARDS * 40
    last = of(UnitRecord, heard)[-1]
    assert not {last.worker, *last.members} & {*pieces[0].members}


def test_dask_does_not_take_a_gangs_member_for_idle(
    three: Client, digits: ShardedDataset, run_dir: str
) -> None:
    workload = SyntheticWorkload(seconds=600.0, n_batches=60_000)
    cluster: Any = three.cluster
    with engine_for(three, digits, workload, run_dir) as engine:
        engine.tell(TrialAllowed(0, 2, None, 1))
        engine.submit(Round(1, (Chain(0, range(1, 2), N_SHARDS, evaluate=False),)), {0: {}})
        listen(engine, until=lambda heard: of(UnitTrains, heard))
        scheduler = cluster.scheduler
        (plugin,) = (it for it in scheduler.plugins.values() if isinstance(it, DispatchPlugin))
        (binding,) = plugin.dispatcher.bindings.values()
        assert len(binding.workers) == 2
        # The third one is not idle while it still reads a shard.
        wait_until(lambda: scheduler.adaptive_target() == 2, "two workers are wanted")
        assert scheduler.workers_to_close(n=1) == [*scheduler.workers.keys() - {*binding.workers}]
        assert not {*binding.members} & {*scheduler.workers_to_close(n=3)}


class Kept(SyntheticWorkload):
    """Takes a configuration whose function has to come to each rank as it is."""

    def train_gang(self, state: Any, shard: Any, config: Any, **rest: Any) -> Any:
        assert config["double"](4) == 8
        assert config["kind"] is torch.nn.ReLU
        return super().train_gang(state, shard, config, **rest)


def test_a_configuration_without_a_form_in_json_reaches_all_ranks(
    three: Client, digits: ShardedDataset, run_dir: str
) -> None:
    with engine_for(three, digits, Kept(seconds=0.0, n_batches=2), run_dir) as engine:
        engine.tell(TrialAllowed(0, 2, None, 1))
        config = {"double": lambda x: 2 * x, "kind": torch.nn.ReLU}
        engine.submit(Round(1, (Chain(0, range(1, 2), N_SHARDS, evaluate=False),)), {0: config})
        heard = listen(engine, until=is_over)
        assert of(TrialReport, heard) == []
    assert {len(unit.members) for unit in of(UnitRecord, heard)} == {1}


class LosesTheOther(SyntheticWorkload):
    """Kills the other workers as the leader makes its state, and lets it go on when told to."""

    def init(self, config: Any, seed: int) -> Any:
        go = Path(config["go"])
        if not go.exists():
            for pid in {*config["pids"]} - {os.getpid()}:
                os.kill(pid, signal.SIGKILL)
        while not go.exists():
            time.sleep(0.01)
        return super().init(config, seed)


def test_a_gang_does_not_wait_for_a_member_that_was_lost_before_it_gathered(
    digits: ShardedDataset, run_dir: str, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"go": str(tmp_path / "go")}
    patience = {"gang_timeout_s": 600.0}  # `listen` waits 60
    with client_of(2) as two:
        config |= {"pids": [*two.run(os.getpid).values()]}
        with engine_for(two, digits, LosesTheOther(), run_dir, spec=patience) as engine:
            engine.tell(TrialAllowed(0, 2, None, 1))
            engine.submit(Round(1, (Chain(0, range(1, 2), N_SHARDS, evaluate=False),)), {0: config})
            listen(engine, until=lambda heard: of(WorkerRemoved, heard))
            Path(config["go"]).touch()
            heard = listen(engine, until=is_over)
            assert of(TrialReport, heard) == []


def test_gangs_of_two_searches_do_not_wait_for_each_other(
    client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    """Two trials of each have their states on different workers as their gangs begin."""
    n_epochs, workload = 3, SyntheticWorkload(seconds=0.02, n_batches=2)
    patience: Any = {"dispatch": {"max_strikes": 1}, "spec": {"gang_timeout_s": 2.0}}
    with ExitStack() as ending:
        engines = [
            ending.enter_context(
                engine_for(client, digits, workload, str(tmp_path / name), **patience)
            )
            for name in "ab"
        ]
        for engine in engines:
            alone = [Chain(trial, range(1, 2), N_SHARDS, evaluate=False) for trial in range(2)]
            engine.submit(Round(1, tuple(alone)), {0: {}, 1: {}})
        for engine in engines:
            listen(engine, until=lambda heard: len(done(heard)) == 2 * N_SHARDS)
        for engine in engines:
            for trial in range(2):
                engine.tell(TrialAllowed(trial, 2, None, 1))
            epochs = range(2, n_epochs + 1)
            chains = [Chain(trial, epochs, N_SHARDS, evaluate=False) for trial in range(2)]
            engine.submit(Round(2, tuple(chains)), {0: {}, 1: {}})
        n_units = 2 * N_SHARDS * (n_epochs - 1)
        for engine in engines:
            heard = listen(
                engine, until=lambda heard: len(done(heard)) == n_units or of(TrialReport, heard)
            )
            assert of(TrialReport, heard) == []
            assert {len(unit.members) for unit in of(UnitRecord, heard)} == {1}


def net(config: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10))


def torch_workload(**options: Any) -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        model=net,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters, config: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        metrics={"accuracy": dagsel.metrics.accuracy},
        **{"batch_size": 24, **options},
    )


@pytest.fixture
def search(optimize: Optimize, client: Client, digits: ShardedDataset) -> Optimize:
    def call(flow: Scripted, workload: Any, **given: Any) -> dagsel.Run:
        given = {"study": optuna.create_study(), "metric": "loss", "client": client, **given}
        return optimize(flow, workload=workload, data=digits, deterministic=True, **given)

    return call


def in_gangs_of(size: int, n_epochs: int = 3) -> Scripted:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, n_epochs, gang=size)]
            case Reported(0, epoch) if epoch == n_epochs:
                return [Stop(0, "the end", "complete"), Finish()]
        return []

    return Scripted([Ask(1)], answer)


def losses(run: dagsel.Run) -> list[float]:
    return [value for e in run.record.trials[0].epochs for value in (e.train_loss, e.value)]


def test_a_gang_has_the_loss_curve_of_a_single_worker(search: Optimize, tmp_path: Path) -> None:
    alone = search(in_gangs_of(1), torch_workload(), run_dir=str(tmp_path / "1"))
    gang = search(in_gangs_of(2), torch_workload(), run_dir=str(tmp_path / "2"))
    assert {unit.gang for unit in gang.record.units if unit.unit.kind == "train"} == {2}
    assert losses(gang) == pytest.approx(losses(alone), rel=1e-5)


def test_a_trial_goes_on_with_another_gang_at_the_sample_where_it_stopped(
    search: Optimize, tmp_path: Path
) -> None:
    gangs = itertools.cycle((1, 2, 1, 2, 1, 2, 1))

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 3, gang=2, seconds=0.05)]
            case Paused():
                return [Train(0, 0, gang=next(gangs), seconds=0.05)]
            case Reported(0, 3):
                return [Stop(0, "the end", "complete"), Finish()]
        return []

    workload = torch_workload(batch_size=4)
    cut = search(Scripted([Ask(1)], answer), workload, run_dir=str(tmp_path / "1"))
    whole = search(in_gangs_of(1), workload, run_dir=str(tmp_path / "2"))
    assert len(cut.record.pieces) >= 3
    assert {piece.gang for piece in cut.record.pieces} == {1, 2}
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-5)


def test_a_running_trial_is_resized_without_being_asked_to_pause(search: Optimize) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 4)]
            case Reported(0, 1):
                return [Train(0, 0, gang=2)]
            case Reported(0, 4):
                return [Stop(0, "the end", "complete"), Finish()]
            case Paused():
                raise AssertionError("nobody asked for a pause")
        return []

    workload = SyntheticWorkload(seconds=0.5, n_batches=50)
    run = search(Scripted([Ask(1)], answer), workload)
    sizes = [unit.gang for unit in run.record.units if unit.unit.kind == "train"]
    assert sizes[0] == 1
    assert sizes[-1] == 2
    switches = run.record.switches
    assert switches
    assert len(switches) == len(run.record.pieces)
    assert all(0 < seconds < run.record.seconds for seconds in switches)
    heard = [turn.event for turn in read_turns(run.run_dir.journal.read())]
    told = [event.switches for event in heard if isinstance(event, Reported)]
    assert sum(told, ()) == tuple(switches)


def test_a_small_trial_waits_while_a_gang_has_all_workers(search: Optimize) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 2, gang=2, priority=1.0), Train(1, 2), Train(2, 2)]
            case Reported(trial, 2):
                left.discard(trial)
                return [Stop(trial, "the end", "complete"), *([] if left else [Finish()])]
        return []

    left = {0, 1, 2}
    workload = SyntheticWorkload(seconds=0.05, n_batches=2)
    run = search(Scripted([Ask(3)], answer), workload)
    spans = [(u.start, u.stop, {u.worker, *u.members}) for u in run.record.units
             if u.unit.kind == "train"]  # fmt: skip
    for start, stop, workers in spans:
        for other_start, other_stop, others in spans:
            overlap = min(stop, other_stop) - max(start, other_start)
            assert overlap <= 0.005 or not workers & others or (start, stop) == (
                other_start, other_stop)  # fmt: skip


class NoGangs:
    """A workload that trains on one worker."""

    def __init__(self) -> None:
        self._inner = SyntheticWorkload()
        for name in ("validate", "prepare", "init", "train", "evaluate", "restore"):
            setattr(self, name, getattr(self._inner, name))

    @property
    def metrics(self) -> Any:
        return self._inner.metrics


def test_what_cannot_be_a_gang_says_why_before_it_trains(
    search: Optimize, client: Client, tmp_path: Path
) -> None:
    run = search(in_one_gang(2), NoGangs(), run_dir=str(tmp_path / "1"))
    assert "train_gang" in run.failures[0].reason
    small = torch_workload(batch_size=1)
    run = search(in_one_gang(2), small, run_dir=str(tmp_path / "2"))
    assert "batch of 1" in run.failures[0].reason
    assert not run.record.units
    assert client.scheduler is not None
    address = client.scheduler.address
    with pytest.raises(SearchError, match="never have more than 2"):
        search(in_one_gang(5), torch_workload(), run_dir=str(tmp_path / "3"), client=address)
    run = search(in_one_gang(5), torch_workload(), run_dir=str(tmp_path / "4"), worker_timeout=2.0)
    assert "there are 2 workers" in run.failures[0].reason


def in_one_gang(size: int) -> Scripted:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1, gang=size)]
        return [Finish()]

    return Scripted([Ask(1)], answer)


def test_a_gang_is_suspended_and_scored(search: Optimize) -> None:
    heard: list[Paused] = []

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 50, gang=2), Pause(0, evaluate=True)]
            case Paused():
                heard.append(event)
                return [Stop(0, "enough", "complete"), Finish()]
        return []

    workload = torch_workload(batch_size=4)
    run = search(Scripted([Ask(1)], answer), workload)
    assert len(heard) == 1
    assert heard[0].epochs < 50
    assert (heard[0].value is None) == (run.record.best is None)


cloudpickle.register_pickle_by_value(sys.modules[__name__])
