"""An engine on a cluster, without a study: rounds in, messages out."""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import cloudpickle
import dask
import numpy as np
import optuna
import psutil
import pytest
import torch
from distributed import Client, LocalCluster, Scheduler

import dagsel
from dagsel.dispatch.dispatcher import DispatchConfig
from dagsel.dispatch.units import Unit
from dagsel.execution.cluster import close, workers_of
from dagsel.execution.engine import DaskEngine
from dagsel.execution.fork_server import METHOD
from dagsel.execution.run_spec import RESOURCE, RunSpec
from dagsel.flows import RandomSearch
from dagsel.messages import Message, UnitRecord
from dagsel.state import State
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

T = TypeVar("T")

#: Another form of what runs by day, on a cluster of its own.
BY_NIGHT = pytest.mark.skipif(os.environ.get("CLUSTERS") != "all", reason="CLUSTERS=all, by night")


def validation_of(data: ShardedDataset) -> tuple[torch.Tensor, torch.Tensor]:
    """All validation samples and their targets, in the order of the shards."""
    shards = [data.validation_shard(shard) for shard in range(data.n_shards)]
    x, y = (np.concatenate([shard[name] for shard in shards]) for name in ("x", "y"))
    return torch.from_numpy(x), torch.from_numpy(y)


@contextmanager
def own_cluster(n_workers: int) -> Iterator[LocalCluster]:
    """A cluster of the test's own, whose workers may be killed."""
    cluster = LocalCluster(
        n_workers=n_workers,
        threads_per_worker=2,
        resources={RESOURCE: 1},
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=50,
    )
    try:
        # Dask gives up a worker that is away 15 s after it was lost, be it for the second time.
        with dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}):
            yield cluster
    finally:
        close(cluster)


@contextmanager
def threads_of_this_process(n_workers: int) -> Iterator[Client]:
    """A client of workers that import nothing, as they are threads of this process."""
    cluster = LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
        silence_logs=50,
    )
    with Client(cluster, set_as_default=False) as client:
        yield client
    close(cluster)


@contextmanager
def spawned_cluster(n_workers: int, memory_limit: str, silence_logs: int) -> Iterator[LocalCluster]:
    """A cluster whose workers have little memory: a copy would have all that was imported here.

    Those that Dask starts in the place of lost ones are spawned as well, however long that takes.
    """
    with dask.config.set({METHOD: "spawn", "distributed.deploy.lost-worker-timeout": "1 hour"}):
        cluster = LocalCluster(
            n_workers=n_workers,
            threads_per_worker=2,
            memory_limit=memory_limit,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=silence_logs,
        )
        try:
            yield cluster
        finally:
            close(cluster)  # a `with` may wait for ever when a worker was just lost


@contextmanager
def client_of(n_workers: int) -> Iterator[Client]:
    """A client of a cluster of the test's own, whose workers may be killed."""
    with own_cluster(n_workers) as cluster, Client(cluster, set_as_default=False) as client:
        yield client


@contextmanager
def engine_for(
    client: Client,
    data: ShardedDataset,
    workload: Any,
    run_dir: str,
    *,
    seed: int = 0,
    dispatch: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
    **bounds: Any,
) -> Iterator[DaskEngine]:
    run = uuid.uuid4().hex[:8]
    folder = RunDir(run_dir)
    folder.claim(run, {})
    run_spec = RunSpec(run, cloudpickle.dumps(workload), data, folder, seed, **(spec or {}))
    config = DispatchConfig(n_shards=data.n_shards, **(dispatch or {}))
    with DaskEngine(client, run_spec, config, **{"poll_s": 60.0, **bounds}) as engine:
        yield engine


def look_up(engine: DaskEngine) -> list[Message]:
    """Send what was told, as a driver does whenever it looks up; give what there is to hear."""
    return list(engine.messages(timeout_s=0))


def listen(engine: DaskEngine, until: Any) -> list[Message]:
    """Collect messages until a function of all of them says that it is enough."""
    heard: list[Message] = []
    while not until(heard):
        new = list(engine.messages(timeout_s=60))
        assert new, f"nothing was heard for 60 s after {heard[-3:]}"
        heard += new
    return heard


def of(kind: type[T], heard: list[Message]) -> list[T]:
    """List the messages of a kind."""
    return [message for message in heard if isinstance(message, kind)]


def done(heard: list[Message]) -> list[Unit]:
    return [record.unit for record in of(UnitRecord, heard)]


def log_anew(dask_scheduler: Scheduler) -> None:
    """Begin the scheduler's log of transitions anew; it keeps no more than 1,000 by itself."""
    dask_scheduler.transition_log = deque(maxlen=100_000)


def there(client: Client) -> list[str]:
    """Workers that the scheduler knows."""
    return list(workers_of(client))


def processes() -> set[int]:
    """This process's children, but for Python's own helpers: a tracker and a fork server."""
    found, here = set(), psutil.Process()
    for child in here.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that has just ended
            command = " ".join(child.cmdline())
            is_server = "forkserver" in command and child.ppid() == here.pid
            if "resource_tracker" not in command and not is_server:
                found.add(child.pid)
    return found


def started_since(before: set[int]) -> list[psutil.Process]:
    """This process's children that were not there before."""
    found = []
    for pid in processes() - before:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found.append(psutil.Process(pid))
    return found


def final_state(engine: DaskEngine, trial: int, epoch: int, n_shards: int) -> State:
    blob, _ = engine.spec.run_dir.states.load(trial, epoch, n_shards - 1)
    return State(blob)


def endless(
    client: Client | str, data: ShardedDataset, run_dir: str, *, seconds: float = 0.02
) -> dagsel.Search:
    """Begin a search that trains until it is told to finish; its first unit has ended."""
    search = dagsel.start(
        optuna.create_study(direction="maximize"),
        SyntheticWorkload(seconds=seconds),
        data,
        space=lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)},
        flow=RandomSearch(max_epochs=100_000, n_trials=4),
        metric="value",
        client=client,
        run_dir=run_dir,
        progress=False,
    )
    try:
        search.wait(until=lambda run: len(run.record.units) > 0, timeout=60)
    except TimeoutError:
        search.cancel()
        raise
    return search
