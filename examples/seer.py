"""A deadline and a budget and nothing else: SEER decides how many trials start, and on what.

    python examples/seer.py
    python examples/seer.py --deadline "5 min" --budget "0.20 USD" --price "2.50 USD"

It prints what the search will take before anything starts, searches, and prints the plan beside
what was done. The search ends by its deadline, here one minute. The last line names an HTML report.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.samplers import TPESampler
from sklearn.datasets import make_classification

import dagsel
from dagsel.flows import SEER


def model(config: dict[str, Any]) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    width = 16
    for _ in range(config["layers"]):
        layers += [torch.nn.Linear(width, config["width"]), torch.nn.ReLU()]
        width = config["width"]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 8))


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "layers": trial.suggest_int("layers", 1, 3),
        "width": trial.suggest_int("width", 16, 256, log=True),
        "lr": trial.suggest_float("lr", 1e-4, 0.1, log=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a search within a deadline and a budget")
    parser.add_argument("--deadline", default="60 s")
    parser.add_argument("--budget", default="100 worker-s", help="worker time, or money")
    parser.add_argument("--price", default="2.50 USD", help="of an hour of a worker")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="at most")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, help="of a trial, at most")
    args = parser.parse_args()

    x, y = make_classification(
        args.samples, 16, n_informative=10, n_classes=8, class_sep=1.5, random_state=0
    )
    flow = SEER(
        deadline=args.deadline,
        budget=args.budget,
        price_per_worker_hour=args.price,
        max_epochs=args.epochs,
    )
    print(dagsel.preview(flow, max_cluster_workers=args.workers))

    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.Adam,
        batch_size=128,
        metrics=["accuracy"],
    )
    folder = Path(tempfile.mkdtemp(prefix="dagsel-seer-"))
    run = dagsel.optimize(
        optuna.create_study(study_name="seer", direction="maximize", sampler=TPESampler(seed=0)),
        workload,
        (x.astype("float32"), y),
        space=space,
        metric="accuracy",
        flow=flow,
        max_cluster_workers=args.workers,
        run_dir=folder / "run",
    )
    print(run.plan)
    print(run.leaderboard(5).to_string(index=False, float_format="{:.4g}".format))
    torch.save(run.best_model().state_dict(), folder / "best.pt")
    print(f"{run.worker_seconds:.1f} worker-seconds, {run.money:.4f} {run.currency}")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")
    print(f"report written to {run.report(folder / 'report.html')}")


if __name__ == "__main__":
    main()
