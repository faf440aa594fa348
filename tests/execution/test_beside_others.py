"""Searches that share a cluster, with each other and with work that is none of dagsel's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from distributed import Client, Scheduler, Worker
from sklearn.linear_model import SGDRegressor

import dagsel
from dagsel.dispatch.units import Chain, Round
from dagsel.errors import WorkerMemoryError
from dagsel.execution.cluster import workers_of
from dagsel.execution.engine import DaskEngine
from dagsel.execution.run_spec import RESOURCE
from dagsel.execution.scheduler_plugin import DispatchPlugin
from dagsel.execution.worker_plugin import TrainingPlugin
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

from .helpers import client_of, done, endless, engine_for, listen, threads_of_this_process

#: Seconds of a unit that are long for Dask, and short enough for the next one to wait behind it.
UNIT_S = 0.2


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a worker that has one thread."""
    with threads_of_this_process(1) as client:
        yield client


def test_a_third_search_trains_while_two_go_on(
    client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    with ExitStack() as ending:
        for number in range(3):
            run_dir = str(tmp_path / f"{number}")
            search = endless(client, digits, run_dir, seconds=UNIT_S)
            ending.callback(search.wait)
            ending.callback(search.finish)


def test_other_work_is_done_while_a_search_trains(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    search = endless(client, digits, run_dir, seconds=UNIT_S)
    try:
        tasks = client.map(time.sleep, [0.001] * 20, pure=False)
        for task in tasks:
            task.result(timeout=60)
    finally:
        search.finish()
        search.wait()


def held(dask_worker: Worker) -> dict[str, tuple[int, int]]:
    """List how many shards each run holds there in memory, and how many on the disk."""
    plugins = [p for p in dask_worker.plugins.values() if isinstance(p, TrainingPlugin)]
    shards = {p.spec.run: p.units.shards for p in plugins if p.units is not None}
    return {run: (len(set(it) - it.on_disk), len(it.on_disk)) for run, it in shards.items()}


def train(engine: DaskEngine, n_shards: int) -> None:
    """Train a trial for an epoch: the worker holds all shards then."""
    engine.submit(Round(1, (Chain(0, range(1, 2), n_shards, evaluate=False),)), {0: {}})
    listen(engine, until=lambda heard: len(done(heard)) == n_shards)


def test_shards_of_all_searches_together_keep_to_the_memory_that_they_may_take(
    client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    n_bytes = max(size.nbytes for size in digits.shard_sizes)
    (worker,) = workers_of(client).values()
    spec = {"shard_share": 6.5 * n_bytes / worker["memory_limit"], "cache_dir": str(tmp_path)}
    about = (client, digits, SyntheticWorkload())
    with ExitStack() as ending:
        runs = []
        for n_on_disk in (0, 2, 4):
            run_dir = str(tmp_path / f"{n_on_disk}")
            engine = ending.enter_context(engine_for(*about, run_dir, spec=spec))
            runs.append(engine.spec.run)
            train(engine, digits.n_shards)
        (found,) = client.run(held).values()
        assert [found[run] for run in runs] == [(4, 0), (2, 2), (0, 4)]
        with (
            pytest.raises(WorkerMemoryError, match="those of other searches take"),
            engine_for(*about, str(tmp_path / "memory"), spec=spec | {"hold": "memory"}),
        ):
            pass


def resident(dask_worker: Worker) -> int:
    return int(psutil.Process().memory_info().rss)


def test_the_memory_of_shards_is_given_back_at_the_end(tmp_path: Path, run_dir: str) -> None:
    """Dask would pause a worker that keeps it, and other work would wait for ever."""
    rng = np.random.default_rng(0)
    arrays = {"x": rng.random((1_000, 50_000), np.float32), "y": rng.random(1_000, np.float32)}
    data = ShardedDataset.write(tmp_path / "large.zarr", arrays, n_shards=8)
    workload = dagsel.SklearnWorkload(SGDRegressor())
    with client_of(1) as client:
        with engine_for(client, data, workload, run_dir, spec={"hold": "memory"}) as engine:
            train(engine, data.n_shards)
            (before,) = client.run(resident).values()
        (after,) = client.run(resident).values()
    assert after < before - arrays["x"].nbytes / 2


def end_all(dask_scheduler: Scheduler) -> dict[str, float]:
    for plugin in [*dask_scheduler.plugins.values()]:
        if isinstance(plugin, DispatchPlugin):
            plugin.end()
    return dict(dask_scheduler.resources[RESOURCE])


def test_searches_that_end_at_once_leave_no_resource(
    client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    about = (client, digits, SyntheticWorkload())
    with engine_for(*about, str(tmp_path / "0")), engine_for(*about, str(tmp_path / "1")):
        assert client.run_on_scheduler(end_all) == {}
