"""Two objectives: an accuracy that is high and a model that is small, and the Pareto front of both.

    python examples/multi_objective.py

MOASHA stops trials that others beat in both. The front is the list of models that no other one
beats in both: take the smallest that is good enough. It takes about half a minute on two cores.
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
from dagsel.flows import MOASHA


def model(config: dict[str, Any]) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    width = 64
    for _ in range(config["layers"]):
        layers += [torch.nn.Linear(width, config["width"]), torch.nn.ReLU()]
        width = config["width"]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def kilobytes_of(config: dict[str, Any]) -> float:
    """Return the size of a model's weights, without making them."""
    with torch.device("meta"):
        return sum(weights.numel() for weights in model(config).parameters()) * 4 / 1000


def inputs(batch: dict[str, Any], config: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Put the model's size beside the labels, where the metrics find it."""
    size = torch.full((len(batch["y"]),), kilobytes_of(config))
    return batch["x"], (batch["y"], size)


def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    labels, _ = target
    return torch.nn.functional.cross_entropy(output, labels)


def accuracy(output: torch.Tensor, target: Any) -> torch.Tensor:
    labels, _ = target
    return dagsel.metrics.accuracy(output, labels)


def kilobytes(output: torch.Tensor, target: Any) -> torch.Tensor:
    _, size = target
    return size.mean()


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "layers": trial.suggest_int("layers", 1, 2),
        "width": trial.suggest_int("width", 2, 128, log=True),
        "lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="accuracy and size at once")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=9, help="of a trial, at most")
    args = parser.parse_args()

    digits = load_digits()
    folder = Path(tempfile.mkdtemp(prefix="dagsel-front-"))
    workload = dagsel.TorchWorkload(
        model=model,
        loss=loss,
        optimizer=torch.optim.Adam,
        batch_size=32,
        metrics={"accuracy": accuracy, "kilobytes": kilobytes},
        input_fn=inputs,
    )
    run = dagsel.optimize(
        optuna.create_study(
            study_name="front", directions=["maximize", "minimize"], sampler=TPESampler(seed=0)
        ),
        workload,
        ((digits.data / 16).astype("float32"), digits.target),
        space=space,
        metric=["accuracy", "kilobytes"],
        flow=MOASHA(max_epochs=args.epochs, n_trials=args.trials),
        run_dir=folder / "run",
    )
    front = run.pareto().sort_values("kilobytes")
    print(front.to_string(index=False, float_format="{:.4g}".format))
    best = front.iloc[-1]  # the largest on the front is the most accurate
    torch.save(run.best_model(trial=int(best["trial"])).state_dict(), folder / "best.pt")
    print(f"{len(front)} of {args.trials} trials are on the front")
    print(
        f"best accuracy {best['accuracy']:.4f} with {best['kilobytes']:.1f} kB; "
        f"model saved in {folder / 'best.pt'}"
    )


if __name__ == "__main__":
    main()
