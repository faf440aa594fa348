"""Units on a real cluster: cut into pieces, withdrawn, hostile, hung; rounds without barriers."""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster, Scheduler, Worker

import dagsel
from dagsel.dispatch.dispatcher import DispatchConfig
from dagsel.dispatch.events import (
    FailRun,
    RestartWorker,
    ShardLoaded,
    TrialAllowed,
    TrialHeld,
    TrialRests,
    UnitTrains,
    WorkerRemoved,
)
from dagsel.dispatch.suspicion import MOST_UNBEGUN
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.errors import WorkerMemoryError
from dagsel.execution import state_cache
from dagsel.execution.attempts import Attempts
from dagsel.execution.cluster import workers_of
from dagsel.execution.engine import DaskEngine
from dagsel.execution.run_spec import CHANNEL, RESOURCE, plugin_name
from dagsel.messages import (
    ORDERS,
    REPORTS,
    Message,
    Note,
    PieceRecord,
    PreemptTrial,
    StatePlace,
    TrialReport,
    UnitRecord,
    WorkerJoined,
    WorkerLost,
)
from dagsel.state import State
from dagsel.storage import CheckpointStore, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload, seen
from tests.waiting import wait_until

from .helpers import (
    done,
    engine_for,
    final_state,
    listen,
    log_anew,
    look_up,
    of,
    own_cluster,
    spawned_cluster,
)

ORDER = ((2, 0, 3, 1), (1, 3, 0, 2))


def build_model(config: Any) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2),
        torch.nn.Linear(16, 10),
    )  # fmt: skip


def torch_workload() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        build_model,
        torch.nn.functional.cross_entropy,
        lambda parameters, config: torch.optim.Adam(parameters, lr=config["lr"]),
        batch_size=32,
        lr_scheduler=lambda optimizer, config: torch.optim.lr_scheduler.ExponentialLR(
            optimizer, 0.5
        ),
    )


def train_all(
    client: Client, data: ShardedDataset, folder: str, *, nudge: bool = False,
    turn_s: float | None = None,
) -> dict[int, State]:  # fmt: skip
    """Train three trials in a fixed order of shards; give their final states."""
    configs = {trial: {"lr": 10.0 ** -(trial + 1)} for trial in range(3)}
    chains = tuple(Chain(t, range(1, 3), 4, order=ORDER, evaluate=False) for t in configs)
    with engine_for(client, data, torch_workload(), folder) as engine:
        heard: list[Message] = []
        for trial in configs if turn_s else ():
            engine.tell(TrialAllowed(trial, seconds=turn_s))
        engine.submit(Round(1, chains), configs)
        while len(done(heard)) < 24:
            new = listen(engine, until=bool)
            heard += new
            for rests in of(TrialRests, new):
                engine.tell(TrialAllowed(rests.trial, seconds=turn_s))
            if nudge:
                engine.tell(PreemptTrial(len(heard) % 3))
        if turn_s:
            assert {piece.unit.trial for piece in of(PieceRecord, heard)} == configs.keys()
        return {trial: final_state(engine, trial, 2, 4) for trial in configs}


def test_a_trial_cut_into_pieces_ends_as_the_uncut_one(
    client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    whole = train_all(client, digits, f"{tmp_path}/whole")
    assert train_all(client, digits, f"{tmp_path}/batches", turn_s=1e-6) == whole
    assert train_all(client, digits, f"{tmp_path}/seconds", turn_s=0.004) == whole
    assert train_all(client, digits, f"{tmp_path}/told", nudge=True) == whole


def test_a_call_to_a_worker_that_was_lost_is_given_up(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        lost = f"tcp://127.0.0.1:{server.getsockname()[1]}"  # nobody listens there any more

    async def call(dask_worker: Worker) -> str:
        try:
            await dask_worker.rpc.connect(lost, timeout=600)
        except OSError as error:
            return str(error)
        return "somebody answers"

    def tell(dask_scheduler: Scheduler, run: str) -> None:
        for worker in dask_scheduler.workers:
            told = {"op": CHANNEL, "run": run, "order": ORDERS.to_text(WorkerLost(lost))}
            dask_scheduler.worker_send(worker, told)

    with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        with ThreadPoolExecutor(1) as pool:
            calls = pool.submit(client.run, call)
            while not calls.done():
                client.run_on_scheduler(tell, run=engine.spec.run)
        assert set(calls.result().values()) == {"Address removed."}


def test_a_cut_unit_says_how_far_it_has_come(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    chain = Chain(0, range(1, 2), 4, order=ORDER[:1], evaluate=False)
    heard: list[Message] = []
    with engine_for(client, digits, torch_workload(), run_dir) as engine:
        engine.tell(TrialAllowed(0, 1, seconds=1e-6))
        engine.submit(Round(1, (chain,)), {0: {"lr": 0.01}})
        while len(done(heard)) < 4:
            heard += listen(engine, until=lambda new: of(TrialRests, new) or len(done(new)))
            engine.tell(TrialAllowed(0, 1, seconds=1e-6))
    cuts = [piece for piece in of(PieceRecord, heard) if piece.unit.position == 0]
    assert len(cuts) > 1
    assert all(math.isfinite(cut.loss) for cut in cuts if cut.loss is not None)
    assert all(cut.loss is not None for cut in cuts)
    samples = [cut.n_samples or 0 for cut in cuts]
    assert samples == [(k + 1) * samples[0] for k in range(len(cuts))]


def test_results_that_were_heard_are_let_go(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    def scored(dask_scheduler: Any) -> set[int]:
        return {key[2] for key in dask_scheduler.tasks if key[0].startswith("evaluate")}

    with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        engine.submit(Round(1, (Chain(0, range(1, 3), 4),)), {0: {}})
        listen(engine, until=lambda heard: len(done(heard)) == 16)
        assert client.run_on_scheduler(scored) == {1, 2}
        engine.release(0, 1)

        def is_forgotten() -> bool:
            look_up(engine)
            return bool(client.run_on_scheduler(scored) == {2})

        wait_until(is_forgotten, "the first score is forgotten")


def test_a_worker_keeps_a_workload_and_not_its_bytes_too(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    """A base that was given as a module may be most of its memory."""

    def kept(dask_worker: Worker) -> list[int]:
        named = dask_worker.plugins.items()
        plugins: list[Any] = [it for name, it in named if name.startswith("dagsel")]
        return [len(it.spec.workload) for it in plugins if it.units is not None]

    with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        engine.submit(Round(1, (Chain(0, range(1, 2), 4),)), {0: {}})
        listen(engine, until=lambda heard: len(done(heard)) == 4)
        assert [0] in client.run(kept).values()


def test_what_is_known_of_units_is_forgotten_with_them_and_sent_again_they_are_known(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        name = plugin_name(engine.spec.run)

        def n_known(dask_scheduler: Any) -> int:
            attempts = dask_scheduler.plugins[name]._attempts
            return len(attempts._numbers) + len(attempts._results)

        def is_forgotten() -> bool:
            look_up(engine)
            return not client.run_on_scheduler(n_known)

        engine.submit(Round(1, (Chain(0, range(1, 3), 4),)), {0: {}})
        listen(engine, until=lambda heard: len(done(heard)) == 16)
        assert client.run_on_scheduler(n_known) >= 16
        engine.stop(0)
        wait_until(is_forgotten, "the units are forgotten")
        engine.submit(Round(2, (Chain(0, range(2, 3), 4),)), {0: {}})
        heard = listen(engine, until=lambda heard: len(done(heard)) == 8)
        again = [work for work in of(UnitRecord, heard) if work.unit.kind == "train"]
        assert all(work.recovered for work in again), "their results are looked for in the store"


def test_a_unit_that_was_forgotten_has_higher_numbers_and_later_ones_begin_with_the_first() -> None:
    attempts, unit, next_ = Attempts(n_shards=4), Unit("train", 0, 2, 1), Unit("train", 0, 2, 2)
    assert [attempts.next(unit, 1), attempts.next(unit)] == [1, 2]
    for each in (unit, next_):
        attempts.forget(each)
    late = attempts.number(unit)
    assert attempts.next(next_) > late >= 2
    assert attempts.next(Unit("train", 0, 1, 3)) > late
    for other in (Unit("train", 0, 3, 0), Unit("train", 1, 2, 1), Unit("check", 0, 2, 1)):
        assert attempts.next(other) == 1


def test_what_is_noted_while_workers_join_is_heard_afterwards() -> None:
    client: Any = SimpleNamespace(
        register_plugin=lambda plugin: ["a", "b"],
        scheduler=None,
        scheduler_comm=None,
        status="running",
    )
    spec: Any = SimpleNamespace(run="0")
    engine = DaskEngine(client, spec, DispatchConfig(n_shards=1))
    for worker, threads in (("a", 1), ("b", 2)):
        engine._hear((0.0, REPORTS.to_text(WorkerJoined(worker, worker, threads))))
    engine._hear((0.0, REPORTS.to_text(WorkerRemoved("b"))))
    engine._wait_for_workers()
    (note,) = engine.messages(timeout_s=0.0)
    assert isinstance(note, Note)
    assert "train with 1 and 2 threads" in note.text


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_trial_that_is_told_something_else_is_not_scored_where_it_was(
    client: Client, digits: ShardedDataset, run_dir: str, goes_on: bool
) -> None:
    def checks(dask_scheduler: Any) -> set[int]:
        return {key[2] for key in dask_scheduler.tasks if key[0].startswith("check")}

    workload = SyntheticWorkload(seconds=0.1, n_batches=10)
    with engine_for(client, digits, workload, run_dir) as engine:
        engine.submit(Round(1, (Chain(0, range(1, 2), 4, evaluate=False),)), {0: {}})
        listen(engine, until=done)
        engine.tell(TrialHeld(0, 1))
        listen(engine, until=lambda heard: of(TrialRests, heard))
        engine.check(0, 1, StatePlace(1, 0), {0: {}})
        look_up(engine)
        wait_until(lambda: client.run_on_scheduler(checks), "the check is submitted")
        if goes_on:
            engine.tell(TrialAllowed(0, 1, None, 2))
        else:
            engine.tell(TrialHeld(0, 2))
        look_up(engine)
        wait_until(lambda: not client.run_on_scheduler(checks), "the check is taken back")


def test_a_stopped_trial_lets_go_at_its_next_batch(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    endless = SyntheticWorkload(
        seconds=lambda config: config["s"], n_batches=100_000
    )  # 10 ms a batch: the unit would take 1,000 s
    configs = {0: {"s": 1000.0}, 1: {"s": 1000.0}, 2: {"s": 0.0}}
    with engine_for(client, digits, endless, run_dir) as engine:
        engine.submit(Round(1, tuple(Chain(t, range(1, 2), 4) for t in (0, 1))), configs)
        listen(engine, until=lambda heard: len(of(ShardLoaded, heard)) == 4)
        engine.submit(Round(2, (Chain(2, range(1, 2), 4, evaluate=False),)), configs)
        engine.stop(0)
        engine.stop(1)
        heard = listen(engine, until=lambda heard: len(done(heard)) == 4)
        assert {unit.trial for unit in done(heard)} == {2}
        keys = client.run_on_scheduler(
            lambda dask_scheduler: [k for k in dask_scheduler.tasks if k[0].startswith("train")]
        )
        assert {key[1] for key in keys} <= {2}


def test_rounds_have_no_barrier(client: Client, digits: ShardedDataset, run_dir: str) -> None:
    workload = SyntheticWorkload(seconds=lambda config: config["s"])
    configs = {0: {"s": 0.5}, 1: {"s": 0.001}, 2: {"s": 0.001}}
    # Each worker holds all shards, so that no quick unit has to be where the slow one is.
    with engine_for(client, digits, workload, run_dir, dispatch={"replicas": None}) as engine:
        slow, quick = Chain(0, range(1, 2), 4), Chain(1, range(1, 4), 4)
        engine.submit(Round(1, (slow, quick)), configs)
        engine.submit(Round(2, (Chain(2, range(1, 2), 4),)), configs)
        heard = listen(engine, until=lambda heard: len(done(heard)) == 8 + 24 + 8)
    order = [unit for unit in done(heard) if unit.kind == "train"]
    last_of_slow = order.index(Unit("train", 0, 1, 3))
    assert order.index(Unit("train", 1, 2, 0)) < last_of_slow
    assert order.index(Unit("train", 2, 1, 3)) < last_of_slow


def test_a_run_begins_while_a_unit_of_a_killed_driver_is_still_stopping(
    digits: ShardedDataset, run_dir: str, tmp_path: Path
) -> None:
    """The scheduler forgot what its worker can do, the worker did not: nothing trained for ever."""
    options: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    long = SyntheticWorkload(seconds=6.0, n_batches=2)
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, **options) as cluster,
        Client(cluster, set_as_default=False) as other,
    ):
        with (
            Client(cluster, set_as_default=False) as client,
            engine_for(client, digits, long, run_dir) as engine,
        ):
            engine.submit(Round(1, (Chain(0, range(1, 2), 4),)), {0: {}})
            listen(engine, until=lambda heard: of(UnitTrains, heard))
            client.close()
        with engine_for(other, digits, SyntheticWorkload(), str(tmp_path / "next")) as engine:
            engine.submit(Round(1, (Chain(0, range(1, 2), 4),)), {0: {}})
            assert listen(engine, until=lambda heard: len(done(heard)) == 8)
        has = other.run(lambda dask_worker: RESOURCE in dask_worker.state.total_resources)
        assert not any(has.values()), "it is left as it was"


def _ran(
    dask_scheduler: Scheduler, kind: str, step: tuple[str, str] = ("processing", "memory")
) -> int:
    """Count the tasks of a kind that a worker has run, or that have taken another step."""
    log = dask_scheduler.transition_log
    return sum(
        str(key[0]).startswith(kind) and (start, finish) == step
        for key, start, finish, *_ in log
        if isinstance(key, tuple)
    )


def test_short_units_of_an_epoch_are_one_task_that_scores_it_too(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    """Each is told as a unit of its own, but the scheduler has run few, and keeps none."""
    client.run_on_scheduler(log_anew)
    chains = tuple(Chain(trial, range(1, 7), 4) for trial in range(4))
    workload = SyntheticWorkload(seconds=0.01, value=lambda config, epoch: epoch / 10)
    with engine_for(client, digits, workload, run_dir, dispatch={"replicas": None}) as engine:
        engine.submit(Round(1, chains), {trial: {} for trial in range(4)})
        heard = listen(engine, until=lambda heard: len(done(heard)) >= 4 * 6 * (4 + 4))
        units = [*(unit for chain in chains for unit in chain.units)]
        units += [u for chain in chains for epoch in range(1, 7) for u in chain.evaluations(epoch)]
        assert sorted(done(heard)) == sorted(units)
        assert client.run_on_scheduler(_ran, kind="train") < 4 * 6 * 4 / 2
        assert client.run_on_scheduler(_ran, kind="evaluate") < 4 * 6 * 4 / 2
        became_ready = {"kind": "evaluate", "step": ("waiting", "no-worker")}
        assert client.run_on_scheduler(_ran, **became_ready) < 4 * 6 * 4 / 2
        told = [r for r in of(UnitRecord, heard) if r.unit.kind == "evaluate"]
        assert all(dict(r.metrics or {})["value"] == r.unit.epoch / 10 for r in told)
        wait_until(
            lambda: client.run_on_scheduler(
                lambda dask_scheduler: {task.state for task in dask_scheduler.tasks.values()}
            ) <= {"memory", "released"},  # what the last few evaluations were tasks of
            "nothing waits",
        )  # fmt: skip
        assert client.run_on_scheduler(_held_in_vain) == []
        wait_until(
            lambda: not any(client.run(_has_states, run=engine.spec.run).values()),
            "the workers have forgotten the last states",
        )


def test_a_task_of_units_that_are_longer_than_believed_begins_no_other_after_half_a_second(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    """A new trial is believed to be as quick as those before it, which may be far from true."""
    client.run_on_scheduler(log_anew)
    workload = SyntheticWorkload(seconds=lambda config: config["s"])
    configs = {0: {"s": 0.001}, 1: {"s": 0.6}}
    with engine_for(client, digits, workload, run_dir, dispatch={"replicas": None}) as engine:
        engine.submit(Round(1, (Chain(0, range(1, 4), 4, evaluate=False),)), configs)
        listen(engine, until=lambda heard: len(done(heard)) == 12)
        n_before = client.run_on_scheduler(_ran, kind="train")
        assert n_before < 12
        engine.submit(Round(2, (Chain(1, range(1, 2), 4, evaluate=False),)), configs)
        listen(engine, until=lambda heard: len(done(heard)) == 4)
        assert client.run_on_scheduler(_ran, kind="train") == n_before + 4


def _held_in_vain(dask_scheduler: Scheduler) -> list[Any]:
    """Return what workers hold, as the scheduler believes, of tasks that it has forgotten."""
    tasks, workers = dask_scheduler.tasks, dask_scheduler.workers.values()
    held = [task for worker in workers for task in worker.has_what]
    return [task.key for task in held if tasks.get(task.key) is not task]


def _has_states(dask_worker: Worker, run: str) -> bool:
    return any(isinstance(key, tuple) and key[0] == f"train-{run}" for key in dask_worker.data)


class Hostile(SyntheticWorkload):
    """Does to its worker what the configuration says."""

    def train(self, state: State, shard: Any, config: Any, **rest: Any) -> Any:
        match config.get("does"):
            case "exit":
                os._exit(1)
            case "sys.exit":
                sys.exit("enough")
            case "segv":
                ctypes.string_at(0)
            case "eat":
                eaten = []
                while True:
                    eaten.append(np.ones(1_000_000))
                    time.sleep(0.01)  # so that the nanny sees it in time
            case "overeat":
                np.ones(1 << 50)
            case "hang":
                time.sleep(10_000)
            case "raise":
                raise RuntimeError("this unit is broken")
        return super().train(state, shard, config, **rest)


REASONS = {
    "exit": "workers were lost while",
    "sys.exit": "the trial's code raised SystemExit('enough'), which would end the worker",
    "segv": "workers were lost while",
    "eat": "filled the memory of worker",  # the nanny ends it at 95% of its memory
    "overeat": "MemoryError",
    "raise": "this unit is broken",
}


#: Workers that a unit may cost before its trial fails, before it was known to have begun and after.
MOST_LOST = (MOST_UNBEGUN + 2) * DispatchConfig(1).max_strikes - 1


@pytest.mark.parametrize("does", REASONS)
def test_a_bad_unit_fails_its_trial_and_no_other(
    does: str, digits: ShardedDataset, run_dir: str
) -> None:
    configs = {0: {"does": does}, 1: {}, 2: {}, 3: {}}
    workload = Hostile(seconds=0.02, n_batches=2)
    eats = does == "eat"
    with (
        spawned_cluster(2, "500 MB", logging.CRITICAL) if eats else own_cluster(2) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        with engine_for(client, digits, workload, run_dir) as engine:
            engine.submit(Round(1, tuple(Chain(t, range(1, 3), 4) for t in configs)), configs)

            def over(heard: list[Message]) -> bool:
                good = {unit for unit in done(heard) if unit.trial}
                return len(good) == 3 * 16 and bool(of(TrialReport, heard))

            heard = listen(engine, until=over)
            failed = {report.trial: report.reason for report in of(TrialReport, heard)}
            assert set(failed) == {0}
            assert REASONS[does] in failed[0]
            assert len(of(WorkerRemoved, heard)) <= MOST_LOST
            told = [note.text for note in of(Note, heard)]
            assert any("was lost while it ran" in text for text in told) == (
                does in ("exit", "segv")
            )
            assert any("whose memory trial 0 has filled" in text for text in told) == (
                does == "eat"
            )
            for trial in (1, 2, 3):
                visits = seen(final_state(engine, trial, 2, 4))
                both = [(e, s, b) for e in (1, 2) for s in range(4) for b in range(2)]
                assert sorted(visits) == both


@contextmanager
def paused(client: Client) -> Iterator[None]:
    """Have Dask pause all workers for their memory."""

    def pause_from(dask_worker: Worker, share: float) -> float:
        memory = dask_worker.memory_manager
        before, memory.memory_pause_fraction = float(memory.memory_pause_fraction), share
        return before

    def are_paused() -> bool:
        return {about["status"] for about in workers_of(client).values()} == {"paused"}

    before = min(client.run(pause_from, share=1e-6).values())
    try:
        wait_until(are_paused, "Dask's pause")
        yield
    finally:
        client.run(pause_from, share=before)


def test_a_worker_that_dask_has_paused_for_its_memory_is_told_of(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    """Else the search would wait, and nobody know why."""
    with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        with paused(client):
            engine.submit(Round(1, (Chain(0, range(1, 2), 4, evaluate=False),)), {0: {}})
            heard = listen(engine, until=lambda heard: of(Note, heard))
        assert "takes no units: its process has" in of(Note, heard)[0].text
        listen(engine, until=lambda more: len(done(heard + more)) == 4)


def test_a_search_whose_workers_are_all_paused_ends_with_the_numbers(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    """What a process itself has, nothing gives back: the search would wait for ever."""
    n = len(workers_of(client))
    told = rf"paused {n} of {n} workers .* of [0-9,]+ bytes; give workers"
    with paused(client), engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
        engine._standstill.timeout_s = 0.5
        engine.submit(Round(1, (Chain(0, range(1, 2), 4, evaluate=False),)), {0: {}})

        def go_on() -> None:
            while True:
                list(engine.messages(timeout_s=0.1))
                engine.check_alive()

        with pytest.raises(WorkerMemoryError, match=told):
            go_on()


@contextmanager
def without_store(client: Client, workers: list[str]) -> Iterator[None]:
    """Have no state stored by these workers, as where a mount has become stale."""

    def break_it() -> None:
        def fail(*given: Any, **how: Any) -> None:
            raise OSError(errno.ESTALE, "Stale file handle")

        state_cache.PATIENCE_S = 0.0
        CheckpointStore.was_save_first = CheckpointStore.save_first  # type: ignore[attr-defined]
        CheckpointStore.save_first = fail  # type: ignore[method-assign,assignment]

    def mend_it() -> None:
        state_cache.PATIENCE_S = 10.0
        CheckpointStore.save_first = CheckpointStore.was_save_first  # type: ignore[attr-defined,method-assign]

    client.run(break_it, workers=workers)
    try:
        yield
    finally:
        client.run(mend_it, workers=workers)


def test_a_worker_whose_store_fails_costs_no_trial(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    broken, *_ = workers_of(client)
    chains = tuple(Chain(trial, range(1, 3), 4) for trial in range(4))
    with (
        without_store(client, [broken]),
        engine_for(client, digits, SyntheticWorkload(seconds=0.02), run_dir) as engine,
    ):
        engine.submit(Round(1, chains), {trial: {} for trial in range(4)})
        heard = listen(engine, until=lambda heard: len(done(heard)) == 64)
        assert engine.n_workers == len(workers_of(client)) - 1
    assert not of(TrialReport, heard)
    assert {work.worker for work in of(UnitRecord, heard) if work.unit.kind == "train"} == (
        workers_of(client).keys() - {broken}
    )
    (told,) = [note.text for note in of(Note, heard) if "cannot use the store" in note.text]
    assert f"at {broken}" in told
    assert f"{run_dir}/states: OSError: [Errno {errno.ESTALE}] Stale" in told


def test_a_run_ends_for_a_resume_once_the_store_fails_on_all_workers(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    there = list(workers_of(client))
    chains = tuple(Chain(trial, range(1, 3), 4) for trial in range(4))
    with (
        without_store(client, there),
        engine_for(client, digits, SyntheticWorkload(), run_dir) as engine,
    ):
        engine.submit(Round(1, chains), {trial: {} for trial in range(4)})
        heard = listen(engine, until=lambda heard: of(FailRun, heard))
    assert not of(TrialReport, heard)
    (failure,) = of(FailRun, heard)
    assert f"none of {len(there)} workers can use the store" in failure.reason
    assert "go on with dagsel.resume" in failure.reason


def test_a_hung_unit_is_bounded(digits: ShardedDataset, run_dir: str) -> None:
    limits = {"unit_timeout_s": 1.0, "grace_s": 0.5, "max_strikes": 2}
    configs = {0: {"does": "hang"}, 1: {}}
    with own_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
        with engine_for(client, digits, Hostile(), run_dir, dispatch=limits) as engine:
            engine.submit(Round(1, tuple(Chain(t, range(1, 2), 4) for t in configs)), configs)

            def over(heard: list[Message]) -> bool:
                good = {unit for unit in done(heard) if unit.trial == 1}
                return len(good) == 8 and bool(of(TrialReport, heard))

            heard = listen(engine, until=over)
            (failed,) = of(TrialReport, heard)
            assert failed.trial == 0
            assert "ran longer than 1 s" in failed.reason
            assert of(RestartWorker, heard)


cloudpickle.register_pickle_by_value(sys.modules[__name__])
