"""Scripts for ``dagsel run``, and the command as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: The command as it is installed, beside the interpreter.
DAGSEL = str(Path(sys.executable).with_name("dagsel"))

#: A search whose trials sleep, so that others have the time to look at it.
SLEEPING = """
from pathlib import Path

import numpy as np
import optuna

from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload


def space(trial):
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


def search():
    if not Path("data.zarr").exists():
        ShardedDataset.write("data.zarr", {"x": np.arange(40)}, n_shards=2)
    return {
        "study": optuna.create_study(direction="maximize"),
        "workload": SyntheticWorkload(seconds=%(seconds)r, n_batches=4),
        "data": "data.zarr",
        "space": space,
        "flow": RandomSearch(max_epochs=%(epochs)d, n_trials=%(trials)d),
        "metric": "value",
    }
"""


def write_script(folder: Path, *, epochs: int, trials: int = 3, seconds: float = 0.0) -> Path:
    """Write a script with such a search."""
    script = folder / "search.py"
    script.write_text(SLEEPING % {"epochs": epochs, "trials": trials, "seconds": seconds})
    return script


def environment(first: Path | None = None) -> dict[str, str]:
    """Return that of a process that imports this dagsel, and looks in a folder first."""
    here = str(Path(__file__).parents[2])
    path = here if first is None else os.pathsep.join((str(first), here))
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}


def call(
    *words: object, cwd: Path, code: int = 0, first: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Call the command in a process of its own, and check its exit code."""
    done = subprocess.run(
        [DAGSEL, *map(str, words)],
        cwd=cwd,
        env=environment(first),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def asked(*words: object, cwd: Path, code: int = 0, first: Path | None = None) -> Any:
    """Return the JSON that the command prints."""
    return json.loads(call(*words, "--json", cwd=cwd, code=code, first=first).stdout)
