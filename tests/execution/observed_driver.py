"""A driver with observers for tests: it is killed. Says after which epochs it is.

python observed_driver.py FOLDER optimize|resume
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import optuna

import dagsel
from dagsel.flows import ASHA
from dagsel.observers import CSV, MLflow, TensorBoard, WandB
from dagsel.storage import ShardedDataset
from dagsel.study import StudyDriver
from dagsel.testing.synthetic import SyntheticWorkload

WORKLOAD = SyntheticWorkload(seconds=0.03)
FLOW = ASHA(max_epochs=9, n_trials=8, reduction_factor=3)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


def main(folder: str, how: str) -> None:
    report = StudyDriver.report

    def reporting(self: StudyDriver, number: int, epoch: int, *values: float) -> None:
        report(self, number, epoch, *values)
        print("reported", number, epoch, flush=True)

    StudyDriver.report = reporting  # type: ignore[method-assign]
    observers = [
        CSV(f"{folder}/epochs.csv"),
        TensorBoard(f"{folder}/tb"),
        MLflow(f"sqlite:///{folder}/mlflow.db", experiment="killed"),
        WandB("killed", folder=f"{folder}/wb"),
    ]
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


if __name__ == "__main__":
    main(*sys.argv[1:])
