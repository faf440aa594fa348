"""A first search: 8 configurations of a small network on scikit-learn's digits, 5 epochs each.

    python examples/digits.py

It writes a data set of 4 shards, starts one worker process for each core, and prints the
leaderboard and where the best model was saved. It takes about ten seconds on two cores.
"""

import tempfile
from pathlib import Path

import optuna
import torch
from sklearn.datasets import load_digits

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset


def model(config):
    width = config["width"]
    return torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )


def optimizer(parameters, config):
    return torch.optim.AdamW(parameters, lr=config["lr"], weight_decay=config["weight_decay"])


def space(trial):
    return {
        "width": trial.suggest_int("width", 32, 256, log=True),
        "lr": trial.suggest_float("lr", 1e-3, 3e-2, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [16, 32, 64]),
    }


def main():
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    folder = Path(tempfile.mkdtemp(prefix="dagsel-digits-"))
    data = ShardedDataset.write(
        str(folder / "digits.zarr"), {"x": images, "y": digits.target}, n_shards=4
    )
    print(data)

    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=optimizer,
        batch_size=lambda config: config["batch_size"],
        metrics={"accuracy": dagsel.metrics.accuracy},
    )
    study = optuna.create_study(study_name="digits", direction="maximize")
    run = dagsel.optimize(
        study,
        workload,
        data,
        space=space,
        metric="accuracy",
        flow=RandomSearch(max_epochs=5, n_trials=8),
        run_dir=str(folder / "run"),
    )

    print(run.leaderboard().to_string(index=False, float_format="{:.4g}".format))
    print(f"best accuracy {run.best_value:.4f} with {dict(run.best_params)}")
    torch.save(run.best_model().state_dict(), folder / "best.pt")
    print(f"best model saved in {folder / 'best.pt'}")


if __name__ == "__main__":
    main()
