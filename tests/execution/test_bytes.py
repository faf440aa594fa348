"""What is read and what hops, by our counters and by Dask's own logs."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster, Scheduler, SchedulerPlugin

from dagsel.dispatch.events import ShardLoaded, WorkerRemoved
from dagsel.dispatch.units import Chain, Round
from dagsel.execution.cluster import local_cluster
from dagsel.execution.engine import DaskEngine
from dagsel.messages import Message, TrialReport, UnitRecord
from dagsel.state import State
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload, seen

from .helpers import done, engine_for, final_state, listen, of, spawned_cluster

N_TRIALS, N_EPOCHS, STATE_BYTES = 6, 2, 50_000
SPILLING = ("distributed.worker.memory.target", "distributed.worker.memory.spill")
N_WIDE = 4  # workers, as many as the digits have shards


@pytest.fixture(scope="module")
def wide_client() -> Iterator[Client]:
    with local_cluster(N_WIDE) as cluster, Client(cluster, set_as_default=False) as client:
        yield client


def transfers(run: str, dask_worker: Any) -> list[tuple[tuple[Any, ...], int]]:
    """List the states of a run that this worker fetched: key and bytes, from Dask's own log."""
    return [
        (key, n_bytes)
        for entry in dask_worker.transfer_incoming_log
        for key, n_bytes in entry["keys"].items()
        if key[0] == f"train-{run}"
    ]


def counters(run: str, dask_worker: Any) -> tuple[int, int, list[int]]:
    units = dask_worker.plugins[f"dagsel-{run}"].units
    return (
        units.counters.shard_bytes_read,
        units.counters.units_started,
        sorted(units.shards),
    )


def run_trials(engine: DaskEngine, n_shards: int, *, evaluate: bool) -> list[Message]:
    chains = tuple(
        Chain(t, range(1, N_EPOCHS + 1), n_shards, evaluate=evaluate) for t in range(N_TRIALS)
    )
    engine.submit(Round(1, chains), {t: {} for t in range(N_TRIALS)})
    n_units = N_TRIALS * N_EPOCHS * n_shards * (2 if evaluate else 1)
    return listen(engine, until=lambda heard: len(done(heard)) == n_units)


def check_hops(client: Client, engine: DaskEngine, heard: list[Message]) -> int:
    """Compare our counters with Dask's log of transfers; give the bytes that hopped."""
    logs = client.run(transfers, engine.spec.run)
    hops = [record for record in of(UnitRecord, heard) if record.hop]
    assert Counter(record.worker for record in hops) == Counter(
        {w: len(log) for w, log in logs.items()}
    )
    for log in logs.values():
        sent = Counter(key for key, _ in log)
        assert max(sent.values()) <= 2, "once to be trained, once to be scored"
    fetched = [n_bytes for log in logs.values() for _, n_bytes in log]
    assert all(STATE_BYTES <= n_bytes <= 1.1 * STATE_BYTES for n_bytes in fetched)
    return sum(fetched)


def largest_state(heard: list[Message]) -> int:
    return max(record.state_bytes for record in of(UnitRecord, heard))


@pytest.mark.parametrize("evaluate", [False, True])
def test_our_counters_agree_with_dasks_log(
    client: Client, digits: ShardedDataset, run_dir: str, evaluate: bool
) -> None:
    workload = SyntheticWorkload(seconds=0.005, state_bytes=STATE_BYTES)
    with engine_for(client, digits, workload, run_dir, dispatch={"rebalance": False}) as engine:
        heard = run_trials(engine, digits.n_shards, evaluate=evaluate)
        n_bytes = check_hops(client, engine, heard)
        counted = client.run(counters, engine.spec.run)
    visits = N_EPOCHS * digits.n_shards * N_TRIALS
    assert 0 < n_bytes <= 1.05 * visits * largest_state(heard)
    assert sum(started for _, started, _ in counted.values()) == visits
    # Each shard is on one worker, and was read there once.
    assert sorted(s for _, _, shards in counted.values() for s in shards) == [0, 1, 2, 3]
    assert sum(n_read for n_read, _, _ in counted.values()) == digits.nbytes


@pytest.mark.parametrize("n_shards", [N_WIDE, 2 * N_WIDE])
def test_a_state_is_sent_once_to_each_worker_to_train_and_once_to_score(
    wide_client: Client, run_dir: str, tmp_path: Path, n_shards: int
) -> None:
    arrays = {"x": np.zeros((200, 4), np.float32)}
    data = ShardedDataset.write(f"{tmp_path}/data.zarr", arrays, n_shards=n_shards)
    workload = SyntheticWorkload(seconds=0.005, state_bytes=STATE_BYTES)
    with engine_for(wide_client, data, workload, run_dir) as engine:
        heard = run_trials(engine, n_shards, evaluate=True)
        n_bytes = check_hops(wide_client, engine, heard)
    epochs = N_EPOCHS * N_TRIALS
    # To train: at most one a shard; to score: one to each worker but the one that has the state.
    most = n_shards + N_WIDE - 1 if n_shards == N_WIDE else 1.05 * n_shards
    assert 0 < n_bytes <= most * epochs * largest_state(heard)


def test_replicas_are_read_once_each_and_save_hops(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    options = {"rebalance": False, "replicas": 2}
    with engine_for(
        client, digits, SyntheticWorkload(seconds=0.005), run_dir, dispatch=options
    ) as engine:
        heard = run_trials(engine, digits.n_shards, evaluate=False)
        listen(engine, until=lambda more: loaded(heard + more) == 2 * digits.n_shards)
        counted = client.run(counters, engine.spec.run)
    assert all(shards == [0, 1, 2, 3] for _, _, shards in counted.values())
    assert sum(n_bytes for n_bytes, _, _ in counted.values()) == 2 * digits.nbytes


def loaded(heard: list[Message]) -> int:
    return len(of(ShardLoaded, heard))


def test_states_wait_in_the_store_where_memory_is_short(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    workload = SyntheticWorkload(state_bytes=STATE_BYTES)
    with engine_for(client, digits, workload, run_dir, spec={"state_share": 0.0}) as engine:
        run_trials(engine, digits.n_shards, evaluate=True)
        run = engine.spec.run
        fetched = [pair for pairs in client.run(transfers, run).values() for pair in pairs]
        states = [
            final_state(engine, trial, N_EPOCHS, digits.n_shards) for trial in range(N_TRIALS)
        ]
    assert all(n_bytes < 1_000 for _, n_bytes in fetched), "a state hopped through memory"
    for state in states:
        assert len(set(seen(state))) == len(seen(state)) == N_EPOCHS * digits.n_shards


class Watch(SchedulerPlugin):
    """Counts, at each step of the scheduler, the states that workers hold and their copies.

    And the notes, which stand for states in the store.
    """

    name = "watch"

    def __init__(self, run: str) -> None:
        self.run, self.n_states, self.n_copies, self.most_notes = run, 0, 0, 0

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def transition(self, key: Any, *args: Any, **kwargs: Any) -> None:
        tasks: Any = self.scheduler.tasks.values()
        states = [t for t in tasks if t.key[0] == f"train-{self.run}" and t.who_has]
        self.n_states += len(states)
        self.n_copies += sum(len(state.who_has) for state in states)
        self.most_notes = max(self.most_notes, sum(0 < t.nbytes < 1_000 for t in states))


def watched(dask_scheduler: Any) -> tuple[float, int]:
    """Return how many workers hold a state, on average over all steps, and the most notes."""
    watch = dask_scheduler.plugins["watch"]
    return watch.n_copies / watch.n_states, watch.most_notes


def small_cluster() -> AbstractContextManager[LocalCluster]:
    return spawned_cluster(1, "400 MB", logging.ERROR)


def test_a_worker_that_is_too_small_for_its_states_keeps_them_in_the_store(
    digits: ShardedDataset, run_dir: str
) -> None:
    # 14 states of 20 MB and the process itself are more than 65% of the limit; what a unit needs
    # beside them brings the worker near the 80% at which Dask pauses it. Dask would write some to
    # the worker's disk, of which the store then need not have any.
    n_trials = 14
    each_alone = {"at_once_s": 0.0}  # an epoch in one task leaves no state behind
    workload = SyntheticWorkload(state_bytes=20_000_000)
    with (
        dask.config.set(dict.fromkeys(SPILLING, False)),
        small_cluster() as cluster,
        Client(cluster, set_as_default=False) as client,
        engine_for(client, digits, workload, run_dir, dispatch=each_alone) as engine,
    ):
        client.register_plugin(Watch(engine.spec.run))
        chains = tuple(Chain(t, range(1, 2), digits.n_shards) for t in range(n_trials))
        engine.submit(Round(1, chains), {t: {} for t in range(n_trials)})
        n_units = n_trials * digits.n_shards * 2
        heard = listen(engine, until=lambda heard: len(done(heard)) == n_units)
        _, n_notes = client.run_on_scheduler(watched)
        for trial in range(n_trials):
            assert len(seen(final_state(engine, trial, 1, digits.n_shards))) == digits.n_shards
    assert n_notes > 0
    assert not [*of(WorkerRemoved, heard), *of(TrialReport, heard)]


class Wasteful(SyntheticWorkload):
    """Takes 86% of the limit for a moment, in pieces that its process keeps when they are freed."""

    def evaluate(self, state: State, shard: Any, config: Any) -> Any:
        pieces = []
        while psutil.Process().memory_info().rss < 345_000_000:
            pieces.append([np.ones(12_500) for _ in range(10)])
        return super().evaluate(state, shard, config)


def test_a_worker_that_dask_pauses_goes_on(digits: ShardedDataset, run_dir: str) -> None:
    with (
        small_cluster() as cluster,
        Client(cluster, set_as_default=False) as client,
        engine_for(client, digits, Wasteful(evaluation_seconds=0.15), run_dir) as engine,
    ):
        engine.submit(Round(1, (Chain(0, range(1, 3), digits.n_shards),)), {0: {}})
        heard = listen(engine, until=lambda heard: len(done(heard)) == 4 * digits.n_shards)
    assert not [*of(WorkerRemoved, heard), *of(TrialReport, heard)]


def test_a_copy_of_a_state_is_dropped_when_it_was_read(
    wide_client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    n_trials = 24
    workload = SyntheticWorkload(seconds=0.01, state_bytes=STATE_BYTES)
    with engine_for(wide_client, digits, workload, run_dir) as engine:
        wide_client.register_plugin(Watch(engine.spec.run))
        chains = tuple(Chain(t, range(1, N_EPOCHS + 1), digits.n_shards) for t in range(n_trials))
        engine.submit(Round(1, chains), {t: {} for t in range(n_trials)})
        n_units = n_trials * N_EPOCHS * digits.n_shards * 2
        listen(engine, until=lambda heard: len(done(heard)) == n_units)
        n_copies, _ = wide_client.run_on_scheduler(watched)
        wide_client.unregister_scheduler_plugin("watch")
    # 1.07 to 1.10, on a busy machine too; where none is dropped, 1.21 to 1.24.
    assert 1 <= n_copies < 1.15


cloudpickle.register_pickle_by_value(sys.modules[__name__])
