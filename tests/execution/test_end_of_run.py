"""The end of a run is quick, leaves nothing behind, and says what it waits for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, SpecCluster, Status, Worker

from dagsel.dispatch.units import Chain, Round
from dagsel.execution import answers as answers_module
from dagsel.execution import spec_cluster as spec_cluster_module
from dagsel.execution.cluster import connect
from dagsel.execution.elastic import elastic_for
from dagsel.execution.engine import DaskEngine
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.waiting import slowness, wait_until

from .helpers import engine_for, own_cluster, processes, there
from .test_elastic import SCHEDULER, TIMEOUT_S, until

#: Issue 15: "the prompt is back within 5 s of the deadline on a local cluster".
PROMPT_S = 5.0


def wait_for(path: Path) -> None:
    wait_until(path.exists, str(path), timeout_s=TIMEOUT_S)


@contextmanager
def back_at_once() -> Iterator[None]:
    prompt_s, began = PROMPT_S * slowness(), time.monotonic()
    yield
    assert time.monotonic() - began < prompt_s


@pytest.fixture
def busy(tmp_path: Path, digits: ShardedDataset, run_dir: str) -> Any:
    """Open an engine on a client; one worker trains a batch without end, another one starts so."""
    trains, starts, preload = tmp_path / "trains", tmp_path / "starts", tmp_path / "preload.py"
    preload.write_text(
        "import pathlib, time\n"
        f"def dask_setup(worker):\n    pathlib.Path({str(starts)!r}).touch()\n    time.sleep(600)\n"
    )

    def seconds(config: Mapping[str, Any]) -> float:
        trains.touch()
        return 600.0

    @contextmanager
    def open_engine(client: Client) -> Iterator[DaskEngine]:
        workload = SyntheticWorkload(seconds=seconds)
        driver = elastic_for(client)
        with engine_for(client, digits, workload, run_dir, driver=driver) as engine:
            engine.submit(Round(1, (Chain(0, range(1, 2), digits.n_shards),)), {0: {}})
            wait_for(trains)
            with dask.config.set({"distributed.worker.preload": [str(preload)]}):
                engine.scale(2)
                wait_for(starts)
            yield engine

    return open_engine


def test_our_own_processes_do_not_hold_up_the_prompt(
    busy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = processes()
    with ExitStack() as ending:
        with connect(n_workers=1) as client, busy(client):
            ending.enter_context(back_at_once())
    assert processes() <= before
    # No traceback of a worker that does not start any more. Dask may say that another process was
    # first to remove what a worker that was killed had left.
    assert [r for r in caplog.records if r.name != "distributed.diskutils"] == []


def test_workers_that_start_are_given_up_at_once(busy: Any, digits: ShardedDataset) -> None:
    with own_cluster(1) as cluster, Client(cluster, set_as_default=False) as client:
        before = processes()
        with ExitStack() as ending:
            with busy(client):
                ending.enter_context(back_at_once())
        assert list(cluster.worker_spec) == [0]
        assert len(there(client)) == 1
        assert processes() <= before


def test_one_that_trains_a_long_batch_is_given_back_at_once(
    tmp_path: Path, digits: ShardedDataset, run_dir: str
) -> None:
    def seconds(config: Mapping[str, Any]) -> float:
        (tmp_path / str(config["trial"])).touch()
        return 600.0

    with own_cluster(1) as cluster, Client(cluster, set_as_default=False) as client:
        old, before = there(client), processes()
        workload, driver = SyntheticWorkload(seconds=seconds), elastic_for(client)
        with ExitStack() as ending:
            with engine_for(client, digits, workload, run_dir, driver=driver) as engine:
                engine.scale(2)
                chains = tuple(Chain(trial, range(1, 2), digits.n_shards) for trial in (0, 1))
                engine.submit(Round(1, chains), {trial: {"trial": trial} for trial in (0, 1)})
                wait_for(tmp_path / "0")
                wait_for(tmp_path / "1")
                ending.enter_context(back_at_once())
        assert there(client) == old
        assert processes() <= before


def test_workers_that_are_not_wanted_any_more_are_let_go_at_once(busy: Any) -> None:
    with own_cluster(1) as cluster, Client(cluster, set_as_default=False) as client:
        before = processes()
        with busy(client) as engine:
            engine.scale(1)
            while engine.bill.n_billed > 1:
                list(engine.messages(timeout_s=0.1))
            wait_until(lambda: processes() <= before, "the process of the worker ends")
            assert list(cluster.worker_spec) == [0]


class Late(Worker):
    """A machine that the provider promises, and gives when it likes."""

    may_come = threading.Event()

    async def start_unsafe(self) -> Any:
        await until(self.may_come.is_set)
        return await super().start_unsafe()


def test_one_that_does_not_come_is_waited_for_with_an_end_and_goes_when_it_comes(
    digits: ShardedDataset,
    run_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(spec_cluster_module, "CLOSE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(answers_module, "TELL_AFTER_S", 0.1)
    monkeypatch.setattr(Late, "may_come", threading.Event())
    workers = {0: {"cls": Worker, "options": {"nthreads": 1}}}
    with (
        SpecCluster(scheduler=SCHEDULER, workers=workers, worker={"cls": Late}) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        old = there(client)
        driver = elastic_for(client)
        with ExitStack() as ending:
            with engine_for(client, digits, SyntheticWorkload(), run_dir, driver=driver) as engine:
                engine.scale(2)
                while driver.wanted < 2:
                    list(engine.messages(timeout_s=0.1))
                (late,) = cluster.sync(starting, cluster)
                ending.enter_context(back_at_once())
        assert list(cluster.worker_spec) == [0]
        Late.may_come.set()
        cluster.sync(until, lambda: late.status == Status.closed)
        assert there(client) == old
    assert "the SpecCluster has not closed the workers yet" in caplog.text


async def starting(cluster: SpecCluster) -> list[Late]:
    """Wait for a worker that is about to start."""
    found: list[Late] = []
    while not found:
        found = [worker for worker in cluster._created if isinstance(worker, Late)]
        await asyncio.sleep(0.01)
    return found
