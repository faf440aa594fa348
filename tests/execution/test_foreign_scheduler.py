"""A scheduler where dagsel is not installed, or is broken: the error names it, nothing is begun.

The address of its dashboard is shown only if it serves one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import distributed
import optuna
import pytest
from distributed import Client

from dagsel import errors
from dagsel.execution import engine
from dagsel.execution.cluster import dashboard_of, workers_of
from dagsel.storage import ShardedDataset
from tests.conftest import Optimize
from tests.waiting import wait_until

from .helpers import endless


@contextmanager
def scheduler(
    folder: Path, *flags: str, shows: str = "--no-dashboard", **environment: str
) -> Iterator[str]:
    """Run a scheduler in a process of its own; give its address."""
    found = folder / "scheduler.json"
    command = [sys.executable, *flags, "-m", "dask", "scheduler", shows, "--port", "0"]
    command += ["--host", "127.0.0.1", "--scheduler-file", str(found)]
    with (
        (folder / "scheduler.log").open("wb") as log,
        subprocess.Popen(
            command, env=os.environ | environment, cwd=folder, stdout=log, stderr=log
        ) as process,
    ):
        try:
            log_of = (folder / "scheduler.log").read_text
            wait_until(lambda: found.exists() or process.poll() is not None, "the scheduler starts")
            assert process.poll() is None, log_of()
            with Client(scheduler_file=str(found), set_as_default=False) as client:
                yield client.scheduler.address
        finally:
            process.terminate()


@pytest.mark.parametrize("shows", ["--no-dashboard", "--dashboard-address=127.0.0.1:0"])
def test_a_dashboard_is_shown_if_the_scheduler_serves_one(shows: str, tmp_path: Path) -> None:
    with scheduler(tmp_path, shows=shows) as address:
        with Client(address, set_as_default=False) as client:
            link = dashboard_of(client)
            assert bool(link) == (shows != "--no-dashboard")
            if link:
                with urllib.request.urlopen(link) as page:
                    assert page.status == 200


#: What of dagsel the scheduler's machine has, and what a search there ends with.
FOREIGN: dict[str, tuple[tuple[str, ...], type[Exception], str]] = {
    "nothing": (
        (),
        errors.VersionMismatchError,
        "dagsel is not installed on scheduler; install dagsel==",
    ),
    "an installation that is broken": (
        (".dist-info",),
        errors.ClusterError,
        "the scheduler refuses dagsel's plugin; install the same dagsel there as here: Module",
    ),
}


def without_dagsel(folder: Path, kept: tuple[str, ...] = ()) -> str:
    """Make a folder of all installed packages but dagsel, of which files with such ends stay."""
    there = folder / "site-packages"
    there.mkdir()
    for entry in Path(distributed.__file__).parents[1].iterdir():
        if "dagsel" not in entry.name or entry.name.endswith(kept):
            (there / entry.name).symlink_to(entry)
    return str(there)


@contextmanager
def worker(address: str, folder: Path, *flags: str, **environment: str) -> Iterator[None]:
    command = [sys.executable, *flags, "-m", "dask", "worker", address, "--no-dashboard"]
    with (
        (folder / f"worker{len(flags)}.log").open("wb") as log,
        subprocess.Popen(
            [*command, "--nthreads", "2"],
            env=os.environ | environment, cwd=folder, stdout=log, stderr=log,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # one that could not start hears nothing else


def test_a_worker_without_dagsel_that_comes_later_is_named_at_the_end(
    digits: ShardedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine, "_PATIENCE_S", 1.0)
    with (
        scheduler(tmp_path) as address,
        Client(address, set_as_default=False) as client,
        worker(address, tmp_path),
    ):
        client.wait_for_workers(1, timeout=60)
        search = endless(address, digits, str(tmp_path / "run"))
        with worker(address, tmp_path, "-S", PYTHONPATH=without_dagsel(tmp_path)):
            wait_until(lambda: len(workers_of(client)) == 2, "the foreign worker is there")
            (foreign,) = workers_of(client).keys() - {*search.result.timeline().worker}
            search.finish()
            search.wait()
    assert f"worker {foreign} never joined the search: its log says why" in caplog.text


@pytest.mark.parametrize("has", FOREIGN)
def test_a_scheduler_without_dagsel_is_named(
    has: str, optimize: Optimize, study: optuna.Study, tmp_path: Path
) -> None:
    kept, error, text = FOREIGN[has]
    # -S: no site-packages but these.
    with scheduler(tmp_path, "-S", PYTHONPATH=without_dagsel(tmp_path, kept)) as address:
        with pytest.raises(error, match=text):
            optimize(study=study, client=address)
    assert study.trials == []
