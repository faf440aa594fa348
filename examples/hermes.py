"""More trials than workers: Hermes gives the next turn to the trial that converges fastest.

    python examples/hermes.py

Eight trials share the cores of this machine in turns of a second; none is stopped early. At the
end a table says how soon each trial came to the accuracy ``--goal``, and how many turns it
had. It takes about a minute on two cores.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import torch
from optuna.samplers import TPESampler
from sklearn.datasets import load_digits

import dagsel
from dagsel.flows import Hermes


def model(config: dict[str, Any]) -> torch.nn.Module:
    channels = config["channels"]
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, channels, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(channels, 2 * channels, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * channels * 16, 10),
    )


def optimizer(parameters: Any, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config["lr"], momentum=config["momentum"])


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "channels": trial.suggest_categorical("channels", [8, 16]),
        "lr": trial.suggest_float("lr", 1e-4, 0.3, log=True),
        "momentum": trial.suggest_float("momentum", 0.0, 0.9),
    }


def turns(run: dagsel.Run, goal: float) -> pd.DataFrame:
    """Return for each trial its lr, its best accuracy, and when it came to the goal."""
    metrics = run.metrics
    scored = metrics[(metrics["split"] == "validation") & (metrics["name"] == "accuracy")]
    visits = run.timeline().query("kind == 'train'")
    rows = []
    for trial in run.top(len(run.record.trials)):
        mine = scored[scored["trial"] == trial.number]
        rows.append(
            {
                "trial": trial.number,
                "lr": trial.config["lr"],
                "accuracy": mine["value"].max(),
                "goal after (s)": mine.loc[mine["value"] >= goal, "seconds"].min(),
                "ended after (s)": mine["seconds"].max(),
                "turns": visits.loc[visits["trial"] == trial.number, "attempts"].sum(),
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="trials that share workers by convergence")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--quantum", default="1 s", help="how long a turn lasts at first")
    parser.add_argument("--goal", type=float, default=0.9, help="an accuracy")
    args = parser.parse_args()

    digits = load_digits()
    folder = Path(tempfile.mkdtemp(prefix="dagsel-hermes-"))
    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=optimizer,
        batch_size=32,
        metrics=["accuracy"],
    )
    run = dagsel.optimize(
        optuna.create_study(study_name="hermes", direction="maximize", sampler=TPESampler(seed=0)),
        workload,
        ((digits.data / 16).astype("float32"), digits.target),
        space=space,
        metric="accuracy",
        flow=Hermes(max_epochs=args.epochs, n_trials=args.trials, quantum=args.quantum),
        run_dir=folder / "run",
    )
    print(turns(run, args.goal).to_string(index=False, float_format="{:.4g}".format))
    torch.save(run.best_model().state_dict(), folder / "best.pt")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")


if __name__ == "__main__":
    main()
