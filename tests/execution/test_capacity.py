"""What a cluster can have is known before the search, and corrected by what happens in it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import dask.config
import dask.system
import psutil
import pytest
from distributed import Client, SpecCluster, Worker

import dagsel
import dagsel.session
from dagsel.errors import ClusterError, NoWorkersError
from dagsel.execution.cluster import (
    LOCAL_STARTUP_S,
    WorkerLimit,
    capacity_here,
    close,
    connect,
    limit_of_gpus,
    local_cluster,
)
from dagsel.execution.elastic import elastic_for
from dagsel.messages import Note
from dagsel.planning.capacity import ClusterCapacity
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize

from .helpers import client_of, engine_for, processes, started_since, there
from .test_elastic import SCHEDULER, TIMEOUT_S, Job, Queued, TwoDevices, cluster_of, jobs_of_two


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask.system, "CPU_COUNT", 16)


@pytest.mark.parametrize(
    ("limit", "asked", "most"),
    [
        (WorkerLimit(), None, None),
        (WorkerLimit(), 7, 7),
        (WorkerLimit(4), None, 4),
        (WorkerLimit(4), 2, 2),
        (WorkerLimit(4), 9, 9),  # a machine may run more processes than it has cores
        (limit_of_gpus(4), 2, 2),
        (WorkerLimit(4, "there are 4", is_fixed=True), 4, 4),
        (WorkerLimit(None, "nobody has come", is_fixed=True), 4, 4),
    ],
)
def test_the_user_bounds_what_there_can_be(
    limit: WorkerLimit, asked: int | None, most: int | None
) -> None:
    assert limit.capacity(asked, startup_s=2.0) == ClusterCapacity(most, 2.0)


@pytest.mark.parametrize(
    ("limit", "asked"), [(limit_of_gpus(4), 5), (WorkerLimit(4, "there are 4", is_fixed=True), 3)]
)
def test_a_contradiction_is_refused_with_the_number_that_works(
    limit: WorkerLimit, asked: int
) -> None:
    cure = rf"max_cluster_workers={asked}: there are 4.*; give max_cluster_workers=4, or leave"
    with pytest.raises(ClusterError, match=cure):
        limit.capacity(asked, startup_s=0.0)


def test_less_than_a_job_is_refused() -> None:
    with pytest.raises(ClusterError, match="give max_cluster_workers=4, or start smaller jobs"):
        WorkerLimit().capacity(3, startup_s=0.0, node_size=4)
    assert WorkerLimit().capacity(6, startup_s=0.0, node_size=4).most_in_nodes == 4


@pytest.mark.usefixtures("sixteen_cores")
def test_a_local_cluster_has_the_cores_of_this_machine_over_its_threads() -> None:
    with cluster_of(1, threads_per_worker=4) as (_, client):
        driver = elastic_for(client)
        assert driver.capacity() == ClusterCapacity(4)  # threads of this process start at once
        assert driver.capacity(20, 5.0) == ClusterCapacity(20, 5.0)
    with cluster_of(3, threads_per_worker=8) as (_, client):
        assert elastic_for(client).capacity().most_workers == 3  # no less than it has


def test_our_own_cluster_has_what_was_said_before_it_was_started() -> None:
    before = capacity_here(None)
    assert before == ClusterCapacity(dask.system.CPU_COUNT, LOCAL_STARTUP_S)
    with connect(n_workers=1) as client:
        assert len(there(client)) == 1
        assert elastic_for(client).capacity() == before
        assert elastic_for(client).own_since is not None


def test_our_own_cluster_is_not_waited_for_longer_than_there_is_time(
    tmp_path: Path,
) -> None:
    late = tmp_path / "late.py"
    late.write_text("import asyncio\nasync def dask_setup(worker):\n    await asyncio.sleep(60)\n")
    before = processes()
    with (
        dask.config.set({"distributed.worker.preload": [str(late)]}),
        pytest.raises(NoWorkersError, match="no worker process .* within 6 s: give a later"),
        connect(n_workers=2, within_s=6.0),
    ):
        pass
    # On a busy machine one that is still starting ends in the background.
    assert not psutil.wait_procs(started_since(before), timeout=TIMEOUT_S)[1]


def test_a_cluster_of_gpus_has_its_devices() -> None:
    with cluster_of(1, kind=TwoDevices) as (cluster, client):
        gpus: Any = cluster
        gpus.cuda_visible_devices = [0, 1]  # as dask-cuda's
        assert elastic_for(client).capacity().most_workers == 2
        with pytest.raises(ClusterError, match="there are 2 GPUs here"):
            elastic_for(client).capacity(3)


def test_a_client_alone_has_the_workers_that_are_there() -> None:
    with cluster_of(2) as (cluster, _), Client(cluster.scheduler_address) as client:
        driver = elastic_for(client)
        assert driver.capacity().most_workers == driver.capacity(2).most_workers == 2
        for wrong in (1, 3):
            with pytest.raises(ClusterError, match="the cluster has 2, and only a cluster object"):
                driver.capacity(wrong)
        assert elastic_for(client, cluster).capacity(3).most_workers == 3


def test_a_client_without_workers_knows_nothing() -> None:
    with SpecCluster(scheduler=SCHEDULER) as cluster, Client(cluster) as client:
        assert elastic_for(client).capacity() == ClusterCapacity()


def test_each_session_says_what_there_can_be_and_how_long_a_start_takes(
    optimize: Optimize, run_dir: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[ClusterCapacity]()

    def engine(*_: Any, known: ClusterCapacity, **__: Any) -> None:
        heard.append(known)
        raise KeyboardInterrupt

    monkeypatch.setattr(dagsel.session, "DaskEngine", engine)
    with pytest.raises(KeyboardInterrupt):
        optimize(client=client, worker_startup="7 s", max_cluster_workers=2)
    with pytest.raises(KeyboardInterrupt):
        dagsel.resume(
            run_dir,
            client,
            workload=SyntheticWorkload(),
            space=lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)},
            worker_startup="9 s",
            max_cluster_workers=2,
        )
    assert heard == [ClusterCapacity(2, 7.0), ClusterCapacity(2, 9.0)]


def test_jobs_have_as_many_as_the_user_says() -> None:
    worker = {"cls": Job, "options": {}, "group": ["-0", "-1"]}
    with SpecCluster(scheduler=SCHEDULER, worker=worker) as cluster, Client(cluster) as client:
        driver = elastic_for(client)
        assert driver.capacity() == ClusterCapacity(None, 0.0, 2)
        assert driver.capacity(5, 60.0) == ClusterCapacity(5, 60.0, 2)


def test_an_adaptive_cluster_has_its_maximum() -> None:
    with cluster_of(1) as (cluster, client):
        cluster.adapt(minimum=1, maximum=2)
        assert elastic_for(client).capacity().most_workers == 2
        with pytest.raises(ClusterError, match=r"cluster.adapt\(\) decides"):
            elastic_for(client).capacity(3)


def test_the_start_of_workers_is_measured(digits: ShardedDataset, run_dir: str) -> None:
    with cluster_of(1) as (_, client):
        driver = elastic_for(client)
        known = ClusterCapacity(2, startup_s=1000.0)
        with engine_for(
            client, digits, SyntheticWorkload(), run_dir, driver=driver, known=known
        ) as engine:
            assert engine.capacity == known  # the one that was found tells nothing
            asked = engine.now()
            engine.scale(2)
            while len(engine.workers) < 2:
                list(engine.messages(timeout_s=TIMEOUT_S))
            assert 0 < engine.capacity.startup_s <= engine.now() - asked


def test_no_more_is_asked_for_than_there_can_be(digits: ShardedDataset, run_dir: str) -> None:
    with cluster_of(1) as (cluster, client):
        driver = elastic_for(client)
        with engine_for(
            client,
            digits,
            SyntheticWorkload(),
            run_dir,
            driver=driver,
            known=ClusterCapacity(2),
        ) as engine:
            engine.scale(9)
            (note,) = (m for m in engine.messages(timeout_s=TIMEOUT_S) if isinstance(m, Note))
            assert note.text == "9 workers were wanted, and the cluster can have 2"
            assert engine.bill.n_billed == 2
            driver.close()
            assert len(cluster.worker_spec) == 2


def test_a_refusal_tells_what_there_can_be(digits: ShardedDataset, run_dir: str) -> None:
    with cluster_of(1, kind=TwoDevices) as (_, client):
        driver = elastic_for(client)
        with engine_for(client, digits, SyntheticWorkload(), run_dir, driver=driver) as engine:
            before = engine.capacity
            assert before.most_workers is None
            engine.scale(4)
            while (most := engine.capacity.most_workers) is None:
                list(engine.messages(timeout_s=0.1))
            assert most == 2


def test_a_run_begins_with_no_more_workers_than_there_may_be(
    digits: ShardedDataset, run_dir: str
) -> None:
    with cluster_of(3) as (_, client):
        with engine_for(
            client,
            digits,
            SyntheticWorkload(),
            run_dir,
            driver=elastic_for(client),
            known=ClusterCapacity(2),
        ) as engine:
            while len(engine.workers) > 2:
                list(engine.messages(timeout_s=TIMEOUT_S))
            assert len(there(client)) <= 2


def test_an_empty_cluster_is_asked_for_the_first_workers(
    digits: ShardedDataset, run_dir: str
) -> None:
    worker = {"cls": Worker, "options": {"nthreads": 1}}
    with SpecCluster(scheduler=SCHEDULER, worker=worker) as cluster, Client(cluster) as client:
        with engine_for(
            client, digits, SyntheticWorkload(), run_dir, driver=elastic_for(client), n_first=3
        ) as engine:
            assert len(cluster.worker_spec) == engine.bill.n_billed == 3


def test_found_workers_are_billed_from_the_call_to_the_end_of_the_run(
    digits: ShardedDataset, run_dir: str
) -> None:
    with cluster_of(2) as (_, client):
        began = time.monotonic() - 100.0
        with engine_for(
            client, digits, SyntheticWorkload(), run_dir, driver=elastic_for(client), began=began
        ) as engine:
            passed = engine.now() - began
            assert 200.0 < 2 * passed <= engine.bill.worker_seconds(engine.now())
        end = engine.now()
        cost = engine.bill.worker_seconds(end)
        assert cost <= 2 * (end - began)
        assert engine.bill.worker_seconds(end + 100.0) == cost


def test_our_own_workers_are_billed_from_the_request_for_them(
    digits: ShardedDataset, run_dir: str
) -> None:
    began = time.monotonic()
    with connect(n_workers=1) as client:
        driver = elastic_for(client)
        assert driver.own_since is not None
        early = began - 1000.0
        with engine_for(
            client, digits, SyntheticWorkload(), run_dir, driver=driver, began=early
        ) as engine:
            now = engine.now()
            assert engine.bill.worker_seconds(now) == pytest.approx(now - driver.own_since)
            assert 0 < engine.capacity.startup_s <= now - driver.own_since


def test_a_job_that_was_found_is_billed_as_one(digits: ShardedDataset, run_dir: str) -> None:
    with jobs_of_two(1) as (_, client):
        began = time.monotonic() - 100.0
        with engine_for(
            client, digits, SyntheticWorkload(), run_dir, driver=elastic_for(client), began=began
        ) as engine:
            now = engine.now()
            assert engine.bill.worker_seconds(now) == pytest.approx(2 * (now - began))


def test_workers_that_wait_in_a_queue_are_given_up_at_the_end(
    digits: ShardedDataset, run_dir: str
) -> None:
    workers: dict[int, Any] = {0: {"cls": Worker, "options": {"nthreads": 1}}}
    with (
        SpecCluster(scheduler=SCHEDULER, workers=workers, worker={"cls": Queued}) as cluster,
        Client(cluster) as client,
    ):
        with engine_for(
            client, digits, SyntheticWorkload(), run_dir, driver=elastic_for(client)
        ) as engine:
            engine.scale(4)
        assert list(cluster.worker_spec) == [0]
        assert engine.bill.n_billed == 0


def test_gpus_are_counted_before_a_cluster_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagsel.execution.cluster.check_gpus_here", lambda: None)
    monkeypatch.setattr("dagsel.execution.cluster.gpus_seen", lambda: 2)
    assert capacity_here("cuda").most_workers == 2
    with pytest.raises(ClusterError, match="give max_cluster_workers=2"):
        capacity_here("cuda", 3)


def test_a_cluster_that_somebody_else_has_started_is_not_ours() -> None:
    with local_cluster(1) as cluster, connect(cluster=cluster) as client:
        assert elastic_for(client, cluster).own_since is None


@pytest.mark.parametrize("replicas", ["auto", 2, 500])
def test_more_copies_than_the_cluster_can_have_workers_are_told_of_once(
    optimize: Optimize, caplog: pytest.LogCaptureFixture, replicas: Any
) -> None:
    with client_of(2) as client, caplog.at_level(logging.WARNING, "dagsel"):
        run = optimize(client=client, replicas=replicas)
    assert run.record.best is not None
    told = [r.getMessage() for r in caplog.records if "replicas" in r.getMessage()]
    assert told == [
        f"replicas={replicas}, and the cluster can have 2 workers: each holds a shard once, so "
        "there are no more copies than that"
    ] * (replicas == 500)


@pytest.mark.parametrize(("limits", "n_said"), [({"budget": 6}, 1), ({"budget": 6e4}, 0), ({}, 0)])
def test_fewer_workers_than_there_can_be_are_told_of_once(
    optimize: Optimize, caplog: pytest.LogCaptureFixture, limits: Any, n_said: int
) -> None:
    with caplog.at_level(logging.WARNING, "dagsel"):
        run = optimize(max_cluster_workers=2, worker_startup=2.5, **limits)
    assert run.record.best is not None
    assert caplog.text.count("1 of 2 workers begin: the start of each costs 2.5 of 6 ") == n_said
    assert caplog.text.count("workers begin") == n_said


def test_where_nobody_knows_how_many_workers_come_any_number_of_copies_may_be(
    optimize: Optimize, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = ClusterCapacity(None)
    monkeypatch.setattr(WorkerLimit, "capacity", lambda *given, **known: unknown)
    with client_of(2) as client, caplog.at_level(logging.WARNING, "dagsel"):
        optimize(client=client, replicas=500)
    assert "replicas" not in caplog.text


async def started(address: str) -> Worker:
    return await Worker(address, nthreads=1, name="outside", host="127.0.0.1")


def test_workers_that_came_from_outside_stay_though_there_are_fewer_cores(
    monkeypatch: pytest.MonkeyPatch, optimize: Optimize
) -> None:
    monkeypatch.setattr(dask.system, "CPU_COUNT", 1)
    cluster = local_cluster(1)
    try:
        with Client(cluster, set_as_default=False) as client:
            outside = cluster.sync(started, cluster.scheduler_address)
            before = there(client)
            assert len(before) == elastic_for(client).limit.most == 2
            optimize(workload=SyntheticWorkload(seconds=0.02), client=client)
            assert there(client) == before
            cluster.sync(outside.close)
    finally:
        close(cluster)
