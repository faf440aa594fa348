"""How many epochs the search procedures need to come as far as the full grid, on real digits.

Each procedure searches the same 48 configurations of a small network on scikit-learn's digits. The
table in docs/procedures/index.md is what this prints:

    python tests/benchmarks/flows_on_digits.py [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from distributed import Client
from sklearn.datasets import load_digits

import dagsel
from dagsel.execution.cluster import local_cluster
from dagsel.flows import ASHA, Grid, Hyperband, MedianStopping, SamplerSearch, SuccessiveHalving
from dagsel.storage import ShardedDataset

MAX_EPOCHS = 27
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
WIDTHS = (16, 32, 64, 128)
OPTIMIZERS = ("adam", "sgd")
N_POINTS = len(LEARNING_RATES) * len(WIDTHS) * len(OPTIMIZERS)

FLOWS = {
    "grid": Grid(MAX_EPOCHS),
    "Hyperband, η=3": Hyperband(MAX_EPOCHS),
    "ASHA, promotion, η=3": ASHA(MAX_EPOCHS, n_trials=N_POINTS),
    "ASHA, stopping, η=3": ASHA(MAX_EPOCHS, n_trials=N_POINTS, mode="stopping"),
    "successive halving, η=3": SuccessiveHalving(MAX_EPOCHS, n_trials=N_POINTS),
    "median stopping": MedianStopping(MAX_EPOCHS, n_trials=N_POINTS),
    "TPE, 16 trials": SamplerSearch(MAX_EPOCHS, n_trials=16),
}


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_categorical("lr", LEARNING_RATES),
        "width": trial.suggest_categorical("width", WIDTHS),
        "optimizer": trial.suggest_categorical("optimizer", OPTIMIZERS),
    }


def model(config: Mapping[str, Any]) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, config["width"]), torch.nn.ReLU(), torch.nn.Linear(config["width"], 10)
    )


def optimizer(parameters: Any, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    if config["optimizer"] == "adam":
        return torch.optim.Adam(parameters, lr=config["lr"])
    return torch.optim.SGD(parameters, lr=config["lr"], momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    n_seeds = parser.parse_args().seeds
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    digits = load_digits()
    workload = dagsel.TorchWorkload(
        model,
        torch.nn.functional.cross_entropy,
        optimizer,
        batch_size=32,
        metrics={"accuracy": dagsel.metrics.accuracy},
    )
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in FLOWS}
    with tempfile.TemporaryDirectory() as folder:
        arrays = {"x": (digits.data / 16).astype(np.float32), "y": digits.target.astype(np.int64)}
        data = ShardedDataset.write(f"{folder}/digits.zarr", arrays, n_shards=4)
        with local_cluster() as cluster, Client(cluster) as client:
            for seed in range(n_seeds):
                for name, flow in FLOWS.items():
                    sampler = optuna.samplers.TPESampler(seed=seed)
                    study = optuna.create_study(
                        study_name="digits", direction="maximize", sampler=sampler
                    )
                    run = dagsel.optimize(
                        study, workload, data, space=space, flow=flow, metric="accuracy",
                        client=client, seed=seed, run_dir=str(Path(folder) / f"{seed}-{name}"),
                    )  # fmt: skip
                    found[name].append((run.best_value, run.record.n_epochs))
                    print(
                        f"seed {seed}: {name}: {run.best_value:.4f}, {run.record.n_epochs} epochs"
                    )
    report(found)


def report(found: Mapping[str, list[tuple[float, int]]]) -> None:
    print(f"\n| procedure | best accuracy (median of {len(found['grid'])}) | behind the grid | "
          "epochs | of the grid's |\n| --- | --- | --- | --- | --- |")  # fmt: skip
    grid, grid_epochs = (statistics.median(values) for values in zip(*found["grid"], strict=True))
    for name, runs in found.items():
        accuracy, epochs = (statistics.median(values) for values in zip(*runs, strict=True))
        behind = 100 * (grid - accuracy)
        print(f"| {name} | {accuracy:.4f} | {behind:.1f} points | {epochs:.0f} | "
              f"{epochs / grid_epochs:.0%} |")  # fmt: skip
        if name.startswith(("ASHA", "Hyperband")):
            assert behind <= 1.0, f"{name} is {behind:.1f} points behind the grid"
            assert epochs <= 0.4 * grid_epochs, f"{name} took {epochs} epochs"


if __name__ == "__main__":
    main()
