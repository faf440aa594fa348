"""Population based training: the worst trials go on from the best ones, with other learning rates.

    python examples/pbt.py

Eight networks train on digits. Every two epochs the worst quarter takes weights and settings of
the best quarter and changes learning rate, dropout and batch size. A table shows which trial went
on from which. It takes about half a minute on two cores.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.samplers import TPESampler
from sklearn.datasets import load_digits

import dagsel
from dagsel.flows import PBT, Range


def model(config: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Dropout(config["dropout"]),
        torch.nn.Linear(64, 10),
    )


def optimizer(parameters: Any, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config["lr"], momentum=0.9)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.6),
        "batch_size": trial.suggest_categorical("batch_size", [16, 32, 64]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="population based training on digits")
    parser.add_argument("--population", type=int, default=8, help="trials, four or more")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--interval", type=int, default=2, help="epochs between two changes")
    args = parser.parse_args()

    digits = load_digits()
    folder = Path(tempfile.mkdtemp(prefix="dagsel-pbt-"))
    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=optimizer,
        batch_size=lambda config: config["batch_size"],
        metrics=["accuracy"],
    )
    flow = PBT(
        max_epochs=args.epochs,
        n_trials=args.population,
        perturbation_interval=args.interval,
        mutations={
            "lr": Range(1e-4, 1.0, log=True),
            "dropout": Range(0.0, 0.6),
            "batch_size": [16, 32, 64],
        },
    )
    run = dagsel.optimize(
        optuna.create_study(study_name="pbt", direction="maximize", sampler=TPESampler(seed=0)),
        workload,
        ((digits.data / 16).astype("float32"), digits.target),
        space=space,
        metric="accuracy",
        flow=flow,
        run_dir=folder / "run",
    )
    print("trial  drawn with  ends with  accuracy  went on from")
    for trial in run.top(args.population):
        sources = ", ".join(
            f"trial {adoption.source} after epoch {adoption.after}" for adoption in trial.adoptions
        )
        drawn, now = trial.params["lr"], trial.config["lr"]
        print(f"{trial.number:5}  lr={drawn:<7.2g}  lr={now:<6.2g}  {trial.value:.4f}    {sources}")
    torch.save(run.best_model().state_dict(), folder / "best.pt")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")


if __name__ == "__main__":
    main()
