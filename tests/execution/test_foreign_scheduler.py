"""A scheduler where dagsel is not installed, or is broken: the error names it, nothing is begun.

The address of its dashboard is shown only if it serves one.
"""

from __future__ import annotations

import os
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
from dagsel.execution.cluster import dashboard_of
from tests.conftest import Optimize
from tests.waiting import wait_until


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


@pytest.mark.parametrize("has", FOREIGN)
def test_a_scheduler_without_dagsel_is_named(
    has: str, optimize: Optimize, study: optuna.Study, tmp_path: Path
) -> None:
    kept, error, text = FOREIGN[has]
    there = tmp_path / "site-packages"
    there.mkdir()
    for entry in Path(distributed.__file__).parents[1].iterdir():
        if "dagsel" not in entry.name or entry.name.endswith(kept):
            (there / entry.name).symlink_to(entry)
    # -S: no site-packages but these.
    with scheduler(tmp_path, "-S", PYTHONPATH=str(there)) as address:
        with pytest.raises(error, match=text):
            optimize(study=study, client=address)
    assert study.trials == []
