"""Workers of our own are copies of a fork server that changes nothing else; nobody watches them."""

from __future__ import annotations

import io
import logging
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import pytest
import torch
from distributed import Client, LocalCluster

from dagsel.execution import fork_server
from dagsel.execution.cluster import dashboard_of, local_cluster
from dagsel.execution.fork_server import IS_WANTED, METHOD
from dagsel.execution.quiet_servers import SELDOM
from tests.waiting import wait_until

from .helpers import client_of

DRIVER = """
import multiprocessing, sys, time
from dagsel.execution.cluster import local_cluster
if __name__ == "__main__":
    with local_cluster(2):
        open(sys.argv[1], "w").close()
        time.sleep(600)
"""


@pytest.fixture(autouse=True)
def as_dask_comes() -> Iterator[None]:
    """Other tests have chosen the fork server for all clusters, and that nobody sees them.

    A server that is a copy of the driver has tests of its own.
    """
    defaults = dask.config.merge(*dask.config.defaults)
    dasks = {name: dask.config.get(name, config=defaults) for name in SELDOM}
    with dask.config.set({METHOD: "spawn", IS_WANTED: "new", **dasks}):
        yield


def parents(client: Client) -> set[int]:
    return set(client.run(os.getppid).values())


def watched(dask_worker: Any) -> tuple[bool, float, float, float]:
    """Whether a worker samples its threads, and how often it looks at others, in milliseconds."""
    callbacks = dask_worker.periodic_callbacks
    names = ("tick", "monitor", "memory_monitor")
    return "profile" in callbacks, *(callbacks[name].callback_time for name in names)


def server() -> psutil.Process:
    """The fork server of this process."""
    here = psutil.Process()
    (found,) = (c for c in here.children() if "forkserver" in " ".join(c.cmdline()))
    return found


def test_workers_of_ours_are_copies_of_one_process_that_imported_what_they_need() -> None:
    for _ in range(2):  # the second cluster's, too
        with local_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
            assert dask.config.get(METHOD) == "forkserver"
            assert parents(client) == {server().pid}
        assert dask.config.get(METHOD) == "spawn"
    assert server().num_threads() == 1  # a copy would have the locks of others, and not the threads


def python() -> float:
    return random.random()


def numpy() -> float:
    return float(np.random.random())


def pytorch() -> float:
    return float(torch.rand(1))


def test_copies_draw_other_random_numbers() -> None:
    with local_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
        assert [len(set(client.run(draw).values())) for draw in (python, numpy, pytorch)] == [2] * 3


def test_a_worker_has_the_environment_and_the_path_of_today(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with local_cluster(1):  # so that the server has begun
        monkeypatch.setenv("DAGSEL_TEST", "set later")
        monkeypatch.syspath_prepend(tmp_path)
        with local_cluster(1) as cluster, Client(cluster, set_as_default=False) as client:
            assert set(client.run(os.getenv, "DAGSEL_TEST").values()) == {"set later"}
            assert set(client.run(os.getenv, "OMP_NUM_THREADS").values()) == {"1"}
            (path,) = client.run(lambda: sys.path).values()
            assert str(tmp_path) in path
        assert dask.config.get(METHOD) == "forkserver"  # one of ours is open


@pytest.mark.parametrize("chosen", [{IS_WANTED: False}, {METHOD: "forkserver"}])
def test_what_somebody_has_chosen_stays(chosen: dict[str, Any]) -> None:
    with dask.config.set(chosen):
        before = dask.config.get(METHOD)
        with local_cluster(1) as cluster, Client(cluster, set_as_default=False) as client:
            assert dask.config.get(METHOD) == before
            assert (parents(client) == {os.getpid()}) == (before == "spawn")
        assert dask.config.get(METHOD) == before


def test_where_no_server_can_be_workers_are_spawned(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    script, there = tmp_path / "driver.py", tmp_path / "there"
    script.write_text(DRIVER.replace("time.sleep(600)", "print(multiprocessing.active_children())"))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(there)],
        env={**os.environ, "TMPDIR": str(deep)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.count("<SpawnProcess") == 2
    assert done.stderr.count("each worker process imports all anew") == 1


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_platform_without_a_server_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_chosen: bool
) -> None:
    """No other platform is here. Nothing is said where it would be used, but is not wanted."""
    if not is_chosen:
        monkeypatch.setattr(fork_server, "_is_supported", lambda: False)
    fork_server._say_spawned.cache_clear()
    with dask.config.set({IS_WANTED: not is_chosen}):
        assert not any(fork_server.is_there() for _ in range(2))
    said = [record for record in caplog.records if record.name == "dagsel"]
    assert len(said) == (not is_chosen)


def test_a_cluster_of_somebody_else_is_spawned() -> None:
    with client_of(1) as client:
        assert isinstance(client.cluster, LocalCluster)
        assert parents(client) == {os.getpid()}


def has_ended(server: psutil.Process) -> bool:
    """Whether a server has ended; a nanny that starts another one takes its zombie away."""
    try:
        return server.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_server_that_was_killed_is_started_again() -> None:
    with local_cluster(1):
        before = server()
        before.kill()
        wait_until(lambda: has_ended(before), "it ends")
    with local_cluster(1) as cluster, Client(cluster, set_as_default=False) as client:
        assert parents(client) == {server().pid}


def test_a_lost_worker_comes_back_however_long_that_takes() -> None:
    """Dask closes its nanny where none is back by then; here it looks at once."""
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 ms"}),
        local_cluster(1) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        ((lost, process),) = client.run(os.getpid).items()
        psutil.Process(process).kill()
        wait_until(lambda: {*cluster.scheduler.workers} - {lost}, "another one")
        assert client.submit(int, "7").result(timeout=60) == 7


@pytest.mark.parametrize("kind", ["true", "new"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_server_and_workers_end_with_the_driver(
    end: signal.Signals, kind: str, tmp_path: Path
) -> None:
    script, there = tmp_path / "driver.py", tmp_path / "there"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(there)]
    chosen = {**os.environ, "DASK_DAGSEL__FORK_SERVER": kind}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=chosen) as driver:
        wait_until(lambda: there.exists() or driver.poll() is not None, "the cluster")
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(end)
        driver.wait(60)
    assert len(family) >= 4  # with Python's tracker of resources
    assert not psutil.wait_procs(family, timeout=60)[1]


def looks(cluster: LocalCluster, name: str) -> set[float]:
    """How often the cluster's servers in this process look at something, in milliseconds."""
    servers: list[Any] = [cluster.scheduler, *cluster.workers.values()]
    found = (server.periodic_callbacks.get(name) for server in servers)
    return {callback.callback_time for callback in found if callback is not None}


def test_workers_of_ours_do_nothing_for_a_dashboard_that_is_not_there() -> None:
    with local_cluster(1) as cluster, Client(cluster, set_as_default=False) as client:
        assert set(client.run(watched).values()) == {(False, 500, 1_000, 250)}
        assert looks(cluster, "tick") == {500}
        assert looks(cluster, "monitor") == looks(cluster, "idle-timeout") == {1_000}
        assert looks(cluster, "memory_monitor") == {250}
        assert dashboard_of(client) == ""
    with (
        dask.config.set({"distributed.worker.memory.monitor-interval": "70ms"}),
        local_cluster(1) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):  # what the user has chosen stays
        assert set(client.run(watched).values()) == {(False, 500, 1_000, 70)}
        assert looks(cluster, "memory_monitor") == {70}
    alone: dict[str, Any] = {"n_workers": 1, "processes": False}
    alone |= {"dashboard_address": "127.0.0.1:0", "scheduler_kwargs": {"dashboard": False}}
    with LocalCluster(**alone) as theirs, Client(theirs, set_as_default=False) as client:
        assert set(client.run(watched).values()) == {(True, 20, 500, 100)}
        assert looks(theirs, "tick") == {20}
        assert looks(theirs, "monitor") == {500}
        assert looks(theirs, "idle-timeout") == {250}
        assert dashboard_of(client) == ""
    seen = {"n_workers": 0, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**seen) as theirs, Client(theirs, set_as_default=False) as client:
        with urllib.request.urlopen(dashboard_of(client)) as page:
            assert page.status == 200


def test_dask_logs_errors_alone_until_the_last_of_our_clusters_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Other tests may have one open.
    monkeypatch.setattr("dagsel.execution.fork_server._n_silent", 0)
    monkeypatch.setattr("dagsel.execution.fork_server._silence", ExitStack())
    theirs, logs = logging.getLogger("distributed"), logging.StreamHandler(io.StringIO())
    theirs.addHandler(logs)
    levels = []
    try:
        with local_cluster(1) as first:
            with local_cluster(1) as second:
                levels.append(logs.level)
                first.close()
                levels.append(logs.level)
                with monkeypatch.context() as failing:
                    failing.setattr(LocalCluster, "_close", fails)
                    with pytest.raises(TimeoutError):
                        second.close()  # Dask closes it once more at the end
                levels.append(logs.level)
            levels.append(logs.level)
    finally:
        theirs.removeHandler(logs)
    assert levels == [logging.ERROR, logging.ERROR, logging.ERROR, logging.NOTSET]


async def fails(cluster: LocalCluster) -> None:
    raise TimeoutError
