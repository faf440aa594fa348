"""A queue of training jobs: MARBLE gives each as many workers as its measured speed-up is worth.

    python examples/marble_queue.py

Two networks are timed on one worker process and on several (their scaling profiles), then a queue
of jobs of different length is trained. Workers of one job share each batch. ``--given`` takes
profiles that are written down below instead. It takes about a minute on two cores.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import torch
from sklearn.datasets import make_classification

import dagsel
from dagsel.flows import JobQueue, Marble
from dagsel.storage import ShardedDataset

WIDTHS = {"small": 32, "wide": 1536}
JOBS = [
    {"architecture": "wide", "lr": 0.001, "epochs": 3},
    {"architecture": "small", "lr": 0.010, "epochs": 12},
    {"architecture": "small", "lr": 0.003, "epochs": 6},
    {"architecture": "wide", "lr": 0.0003, "epochs": 2},
    {"architecture": "small", "lr": 0.030, "epochs": 9},
]
#: How many times as fast an architecture trains on so many workers; for ``--given``.
KNOWN = {"small": {1: 1.0, 2: 0.4}, "wide": {1: 1.0, 2: 1.7}}


def model(config: dict[str, Any]) -> torch.nn.Module:
    width = WIDTHS[config["architecture"]]
    return torch.nn.Sequential(
        torch.nn.Linear(32, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 4),
    )


def job(trial: optuna.Trial) -> dict[str, Any]:
    """Return a job of the list: a search space that is a queue."""
    return JOBS[trial.suggest_int("job", 0, len(JOBS) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description="a queue of jobs on gangs of workers")
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--given", action="store_true", help="measure nothing")
    args = parser.parse_args()

    x, y = make_classification(
        args.samples, 32, n_informative=12, n_classes=4, class_sep=1.5, random_state=0
    )
    folder = Path(tempfile.mkdtemp(prefix="dagsel-marble-"))
    data = ShardedDataset.write(
        folder / "jobs.zarr", {"x": x.astype("float32"), "y": y}, n_shards=2
    )
    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.Adam,
        batch_size=512,
        metrics=["accuracy"],
    )
    profiles = {}
    for name in WIDTHS:
        if args.given:
            profiles[name] = dagsel.Profile.given(KNOWN[name], architecture=name)
        else:
            example = {"architecture": name, "lr": 0.001}
            profiles[name] = dagsel.profile(workload, example, data, architecture=name)
        print(profiles[name])
    run = dagsel.optimize(
        optuna.create_study(study_name="queue", direction="maximize"),
        workload,
        data,
        space=job,
        metric="accuracy",
        flow=Marble(JobQueue(), {name: profile.scaling for name, profile in profiles.items()}),
        run_dir=folder / "run",
    )

    visits = run.timeline().query("kind == 'train'").groupby("trial")
    table = pd.DataFrame([JOBS[t.params["job"]] for t in run.record.trials.values()])
    table["workers"] = visits["gang"].max()
    table["begins (s)"] = visits["start"].min() - visits["start"].min().min()
    table["ends (s)"] = visits["stop"].max() - visits["start"].min().min()
    table["accuracy"] = [trial.value for trial in run.record.trials.values()]
    print(table.to_string(index_names=False, float_format="{:.4g}".format))
    torch.save(run.best_model().state_dict(), folder / "best.pt")
    print(f"{len(table)} jobs done in {table['ends (s)'].max():.1f} s")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")


if __name__ == "__main__":
    main()
