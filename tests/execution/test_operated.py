"""What an operator may do to a cluster neither hangs a search nor ends it without a word."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client

from dagsel.errors import ClusterError
from dagsel.execution import engine as engine_module
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize
from tests.waiting import wait_until

from .helpers import engine_for, own_cluster


@contextmanager
def frozen(client: Client) -> Iterator[str]:
    """Freeze the process of a worker; gives its address."""
    worker, pid = next(iter(client.run(os.getpid).items()))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield worker
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_PATIENCE_S", 1.0)


def test_units_wait_for_longer_than_dask_lets_tasks_wait(optimize: Optimize) -> None:
    """Dask may be told to fail a task that no worker may run, and units wait as such tasks."""
    with (
        dask.config.set({"distributed.scheduler.no-workers-timeout": "0.5s"}),
        own_cluster(1) as cluster,
        Client(cluster) as client,
    ):
        run = optimize(
            RandomSearch(max_epochs=4, n_trials=4),
            workload=SyntheticWorkload(seconds=0.1),
            client=client,
            deadline="5 min",
        )
    assert [trial.state for trial in run.record.trials.values()] == ["complete"] * 4


def test_a_search_on_a_cluster_that_is_restarted_ends_and_goes_on(
    optimize: Optimize, tmp_path: Path, digits: ShardedDataset
) -> None:
    begun = tmp_path / "begun"

    here = os.getpid()

    def seconds(config: Any) -> float:
        if os.getpid() != here:  # it is not only being checked
            begun.touch()
        return 0.05

    with own_cluster(1) as cluster, Client(cluster) as client, Client(cluster) as operator:

        def restart() -> None:
            wait_until(begun.exists, "a unit")
            operator.restart()

        thread = threading.Thread(target=restart)
        thread.start()
        with pytest.raises(ClusterError, match=r"Client\.restart.*go on with  dagsel\.resume"):
            optimize(
                RandomSearch(max_epochs=99, n_trials=4),
                workload=SyntheticWorkload(seconds=seconds),
                data=digits,
                client=client,
                deadline="5 min",
            )
        thread.join()


def test_a_worker_that_does_not_answer_is_named_before_a_search_begins(
    optimize: Optimize, impatient: None
) -> None:
    with own_cluster(2) as cluster, Client(cluster) as client, frozen(client) as worker:
        told = f"of 2 workers .*{worker}.* does not answer within 1 s"  # a busy one may not, either
        with pytest.raises(ClusterError, match=told):
            optimize(client=client, worker_timeout=1)


def test_a_worker_that_does_not_answer_does_not_hold_up_the_end(
    digits: ShardedDataset, run_dir: str, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    told = caplog.at_level(logging.WARNING, "dagsel")
    with own_cluster(2) as cluster, Client(cluster) as client, told:
        with engine_for(client, digits, SyntheticWorkload(), run_dir):
            freezing = frozen(client)
            freezing.__enter__()
        try:  # it is frozen still, and the engine is closed
            assert "a worker does not answer" in caplog.text
        finally:
            freezing.__exit__(None, None, None)
