"""A killed driver's run goes on on another kind of cluster, and loses no more than units in flight.

Time and budget of both sessions count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import dagsel
from dagsel.errors import DagselError
from dagsel.storage import RunDir
from tests.waiting import slowness

from .deployed import (
    N_BATCHES,
    N_MOST,
    Outcome,
    check_limits,
    check_model,
    clusters,
    space,
    workload,
)
from .gateway import gateway_server
from .helpers import BY_NIGHT

pytestmark = pytest.mark.slow

TIMEOUT_S = 90


@pytest.mark.parametrize(
    ("before", "after", "flow"),
    [
        ("local", "gateway", "asha"),
        pytest.param("gateway", "machines", "seer", marks=BY_NIGHT),
        pytest.param("machines", "local", "asha", marks=BY_NIGHT),
    ],
)
def test_a_killed_driver_is_resumed_on_another_cluster(
    before: str, after: str, flow: str, tmp_path: Path
) -> None:
    slow = slowness()
    with server(tmp_path, before, after) as address:
        kill_a_driver(before, flow, tmp_path, address, str(slow))
        with clusters(after, tmp_path, address) as cluster:
            called = time.time()
            run = dagsel.resume(
                str(tmp_path / "run"),
                cluster=cluster,
                workload=workload(tmp_path),
                space=space,
                max_cluster_workers=N_MOST,
            )
            outcome = Outcome(run, called, time.time() - called, tmp_path, slow)
    assert len(run.record.sessions) == 2
    check_limits(outcome)
    check_model(outcome)
    assert outcome.n_trained_again <= N_MOST * N_BATCHES


@contextmanager
def server(folder: Path, *kinds: str) -> Iterator[str]:
    """Give the address of a gateway, if one of the clusters needs it."""
    if "gateway" not in kinds:
        yield ""
        return
    pytest.importorskip("dask_gateway_server", reason="needs the extra dev: a dask-gateway server")
    with gateway_server(folder) as address:
        yield address


def kill_a_driver(kind: str, flow: str, folder: Path, *more: str) -> None:
    """Start a driver, and kill it once it has trained some epochs; what it has started ends."""
    command = [sys.executable, "-m", "tests.execution.deployed", kind, flow, str(folder), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / "driver.log").open("wb") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        until = time.monotonic() + TIMEOUT_S
        while n_epochs(RunDir(str(folder / "run"))) < 4:
            with suppress(subprocess.TimeoutExpired):
                driver.wait(0.05)
            assert driver.poll() is None, (folder / "driver.log").read_text()
            assert time.monotonic() < until, (folder / "driver.log").read_text()
        started = psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.kill()
        driver.wait()
    assert not psutil.wait_procs(started, timeout=TIMEOUT_S)[1]


def n_epochs(folder: RunDir) -> int:
    try:
        entries = folder.journal.read()
    except DagselError:  # it is not there yet
        return 0
    return sum(entry.get("event", {}).get("is") in ("Reported", "Paused") for entry in entries)
