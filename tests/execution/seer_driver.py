"""The driver of a search in stages, as a process that can be killed: folder and scheduler."""

from __future__ import annotations

import sys
from typing import Any

import optuna

import dagsel
from dagsel.flows import SEER
from dagsel.testing.synthetic import CountingWorkload

DEADLINE_S, BUDGET = 20.0, 54.0


def workload() -> CountingWorkload:
    return CountingWorkload(0.2, n_batches=20, n_shards=4, value=value)


def value(config: Any, epoch: int) -> float:
    return float(config["quality"]) - 1 / (1 + epoch)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"quality": trial.suggest_float("quality", 0.0, 1.0)}


if __name__ == "__main__":
    folder, address = sys.argv[1:]
    dagsel.optimize(
        optuna.create_study(study_name="seer", storage=f"sqlite:///{folder}/study.db",
                            direction="maximize"),
        workload(),
        f"{folder}/data.zarr",
        space=space,
        flow=SEER(DEADLINE_S, BUDGET, reduction_factor=2, min_stage=2, max_workers_per_trial=2),
        metric="value",
        client=address,
        run_dir=f"{folder}/run",
        deadline=DEADLINE_S,
        budget=BUDGET,
    )  # fmt: skip
