"""A driver for tests of the rim: it is interrupted or kills itself. Says what it does line by line.

python steered_driver.py FOLDER optimize|leave|kill|hold|answer|take

With ``leave`` the script ends at once. With the last three it pauses two trials, and so waits for
commands from outside. ``answer`` kills it when it would answer the first one, ``take`` when it has
found it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import optuna

import dagsel
from dagsel import session
from dagsel.execution import cluster
from dagsel.flows import RandomSearch
from dagsel.listening import Listener
from dagsel.storage import ShardedDataset
from dagsel.storage.runs.control import Control
from dagsel.study import StudyDriver
from dagsel.testing.synthetic import SyntheticWorkload

WORKLOAD = SyntheticWorkload(seconds=0.05)
N_TRIALS, N_EPOCHS = 4, 8


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


def say(text: str) -> None:
    print(text, flush=True)


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, how: str) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data = ShardedDataset.write(f"{folder}/data.zarr", {"x": np.arange(80)}, n_shards=4)
    study = optuna.create_study(
        study_name="test", direction="maximize", storage=f"sqlite:///{folder}/study.db"
    )
    connect, of_session = cluster.connect, vars(session)

    def connecting(*args: Any, **options: Any) -> Any:
        say("connecting")
        return connect(*args, **options)

    of_session["connect"] = connecting
    search: dict[str, Any] = {
        "study": study,
        "workload": WORKLOAD,
        "data": data,
        "space": space,
        "flow": RandomSearch(max_epochs=N_EPOCHS, n_trials=N_TRIALS),
        "metric": "value",
        "run_dir": f"{folder}/run",
    }
    report = StudyDriver.report

    def reporting(self: StudyDriver, number: int, epoch: int, *values: float) -> None:
        report(self, number, epoch, *values)
        say("reported")

    StudyDriver.report = reporting  # type: ignore[method-assign]
    if how == "answer":
        Control.answer = killed  # type: ignore[assignment,method-assign]
    elif how == "take":
        Listener._take = killed  # type: ignore[assignment,method-assign]
    if how == "optimize":
        run = dagsel.optimize(**search)
        say(f"run {len(run.record.trials)} {run.record.n_live}")
        return
    held = dagsel.start(**search)
    if how == "leave":
        say("left")
        return
    while not (trials := held.result.record.trials) or not trials[1].epochs:
        pass
    if how != "kill":
        held.pause(1)
        held.pause(2)
        say("paused")
        say(f"run {len(held.wait().record.trials)}")
        return
    held.stop(0)
    held.pause(2)
    clone = held.clone(1, x=0.25)
    added = held.add({"x": 0.75})
    say(f"given {clone} {added}")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
