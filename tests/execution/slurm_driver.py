"""The driver of a search on Slurm or on this machine, as a process that can be killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import optuna
from dask_jobqueue import SLURMCluster

import dagsel
from dagsel.flows import RandomSearch
from dagsel.testing.synthetic import CountingWorkload

from .helpers import own_cluster

UNIT_S, N_BATCHES, N_SHARDS, N_TRIALS = 0.2, 10, 4, 4
ANY_PORT = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}


def workload() -> CountingWorkload:
    return CountingWorkload(UNIT_S, n_batches=N_BATCHES, n_shards=N_SHARDS, value=value)


def value(config: Mapping[str, Any], epoch: int) -> float:
    return float(config["quality"]) - 1 / (1 + epoch)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"quality": trial.suggest_float("quality", 0.0, 1.0)}


@contextmanager
def slurm_cluster(folder: Path, *, size: int = 1, **options: Any) -> Iterator[SLURMCluster]:
    """A cluster of jobs of so many workers each, by its configuration; there is none yet."""
    with (
        dask.config.set({"jobqueue.slurm.processes": size}),
        SLURMCluster(
            cores=2 * size,
            memory=f"{size} GB",
            log_directory=str(folder / "jobs"),
            local_directory=str(folder),
            scheduler_options=ANY_PORT,
            silence_logs=50,
            **options,
        ) as cluster,
    ):
        yield cluster


if __name__ == "__main__":
    kind, place = sys.argv[1:]
    here = Path(place)
    with slurm_cluster(here) if kind == "slurm" else own_cluster(2) as cluster:
        cluster.scale(2)
        dagsel.optimize(
            optuna.create_study(study_name="killed", storage=f"sqlite:///{here}/study.db",
                                direction="maximize"),
            workload(),
            f"{here}/data.zarr",
            space=space,
            flow=RandomSearch(max_epochs=3, n_trials=N_TRIALS),
            metric="value",
            cluster=cluster,
            run_dir=f"{here}/run",
            small_population="hop",
        )  # fmt: skip
