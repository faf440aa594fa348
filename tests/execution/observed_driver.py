"""Drivers with observers for tests: each is killed after some epochs, and the next one goes on.

python observed_driver.py FOLDER HOW N_EPOCHS [HOW N_EPOCHS ...]

HOW is optimize or resume, and N_EPOCHS 0 for one that is not killed. Says how each has ended, and
then what MLflow has. All are forks of this process: trackers take seconds to import.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import optuna

import dagsel
from dagsel.flows import ASHA
from dagsel.observers import CSV, MLflow, Observer, TensorBoard, WandB
from dagsel.storage import ShardedDataset
from dagsel.study import StudyDriver
from dagsel.testing.synthetic import SyntheticWorkload

WORKLOAD = SyntheticWorkload(seconds=0.03)
FLOW = ASHA(max_epochs=9, n_trials=6, reduction_factor=3)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


def trackers(folder: str) -> list[Observer]:
    return [
        CSV(f"{folder}/epochs.csv"),
        TensorBoard(f"{folder}/tb"),
        MLflow(f"sqlite:///{folder}/mlflow.db", experiment="killed"),
        WandB("killed", folder=f"{folder}/wb"),
    ]


def main(folder: str, how: str) -> None:
    report = StudyDriver.report

    def reporting(self: StudyDriver, number: int, epoch: int, *values: float) -> None:
        report(self, number, epoch, *values)
        print("reported", number, epoch, flush=True)

    StudyDriver.report = reporting  # type: ignore[method-assign]
    observers = trackers(folder)
    again: dict[str, Any] = {"workload": WORKLOAD, "space": space, "observers": observers}
    if how == "resume":
        run = dagsel.resume(f"{folder}/run", **again)
        print("ended", run.record.n_epochs, flush=True)
        return
    data = ShardedDataset.write(f"{folder}/data.zarr", {"x": np.arange(80)}, n_shards=4)
    study = optuna.create_study(
        storage=f"sqlite:///{folder}/study.db", study_name="killed", direction="maximize"
    )
    dagsel.optimize(study, data=data, flow=FLOW, metric="value", run_dir=f"{folder}/run", **again)


def fork(folder: str, how: str, n_epochs: int) -> str | None:
    """Drive in a process of its own, and kill it after so many epochs; None is said there.

    Returns its last line and its exit code.
    """
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.setsid()
        os.dup2(write, sys.stdout.fileno())
        main(folder, how)
        return None
    os.close(write)
    line = ""
    with os.fdopen(read) as lines:
        for number, said in enumerate(lines, 1):
            line = said.strip()
            if number == n_epochs:
                os.killpg(pid, signal.SIGKILL)
                break
    _, status = os.waitpid(pid, 0)
    return f"{line} {os.waitstatus_to_exitcode(status)}"


def in_mlflow(uri: str) -> Iterator[tuple[str, int]]:
    """Yield trial and epoch of each value that MLflow has."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("killed")
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.status in ("FINISHED", "KILLED"), run.info.status
        if trial := run.data.tags.get("dagsel.trial"):
            for metric in client.get_metric_history(run.info.run_id, "value"):
                yield trial, metric.step


def drive(folder: str, *stages: str) -> None:
    """Do what the command line says."""
    for tracker in trackers(f"{folder}/tried"):  # imports it
        tracker.check()
    shutil.copy(f"{folder}/tried/mlflow.db", folder)  # its tables take seconds, too
    for how, n_epochs in zip(stages[::2], stages[1::2], strict=True):
        if (ended := fork(folder, how, int(n_epochs))) is None:
            return
        print(ended, flush=True)
    for trial, step in in_mlflow(f"sqlite:///{folder}/mlflow.db"):
        print("mlflow", trial, step)


if __name__ == "__main__":
    drive(*sys.argv[1:])
