"""A scheduler and its workers in processes of their own, so that the scheduler can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from dagsel.testing.synthetic import SyntheticWorkload
from tests.waiting import wait_until


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


def value(config: Any, epoch: int) -> float:
    return float(epoch * config["x"])


def pace(config: Any) -> float:
    """Let trials end one after the other."""
    return 0.01 + 0.1 * float(config["x"])


def workload() -> SyntheticWorkload:
    return SyntheticWorkload(seconds=pace, value=value)


@dataclass
class Processes:
    """A running cluster."""

    address: str
    scheduler: subprocess.Popen[bytes]


@contextlib.contextmanager
def processes(folder: Path, n_workers: int = 2) -> Iterator[Processes]:
    """Start a scheduler and workers; end them at the end."""
    place = folder / "scheduler.json"
    # What is sent to the workers must be found there under the name that it has here.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    common = ["--scheduler-file", str(place), "--no-dashboard"]
    scheduler = ["scheduler", *common, "--host", "127.0.0.1", "--port", "0"]
    worker = ["worker", *common, "--no-nanny", "--nthreads", "2", "--host", "127.0.0.1"]
    worker += ["--death-timeout", "60", "--local-directory", str(folder)]
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("wb") as log:
        for command in [scheduler, *[worker] * n_workers]:
            module = f"distributed.cli.dask_{command[0]}"
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *command[1:]],
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
            )
        try:
            wait_until(
                lambda: place.exists() and place.read_text().strip(), (folder / "log").read_text
            )
            yield Processes(json.loads(place.read_text())["address"], started[0])
        finally:
            for process in reversed(started):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
