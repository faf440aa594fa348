"""A workload of your own: a linear classifier in NumPy, without PyTorch or scikit-learn's training.

    python examples/own_workload.py
    python -m pytest examples/own_workload.py

A workload says how a trial begins, trains on a shard and is scored on one. It is checked with
dagsel's conformance suite, and then a search trains it on digits. It takes about 15 seconds on two
cores.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.samplers import TPESampler
from sklearn.datasets import load_digits

import dagsel
from dagsel.errors import WorkloadError
from dagsel.flow import Direction
from dagsel.flows import ASHA
from dagsel.state import State, Tensor
from dagsel.testing import WorkloadSuite, check
from dagsel.workloads import Evaluated, Trained, Visit

Config = Mapping[str, Any]
Shard = tuple[np.ndarray, np.ndarray]
N_FEATURES, N_CLASSES, BATCH = 64, 10, 32


def softmax(scores: np.ndarray) -> np.ndarray:
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


class Softmax:
    """Multinomial logistic regression by SGD with momentum."""

    metrics: Mapping[str, Direction | None] = {"accuracy": "maximize", "loss": "minimize"}

    def validate(self, config: Config) -> None:
        if not config["lr"] > 0:
            raise WorkloadError(f"lr is {config['lr']}; it must be above 0")

    def prepare(self, arrays: Mapping[str, np.ndarray]) -> Shard:
        """Turn the arrays of a shard into what `train` and `evaluate` get, once a worker."""
        return arrays["x"].astype(np.float64), arrays["y"]

    def init(self, config: Config, seed: int) -> State:
        weights = 0.01 * np.random.default_rng(seed).normal(size=(N_FEATURES, N_CLASSES))
        return self.pack(weights, np.zeros_like(weights))

    def train(
        self,
        state: State,
        shard: Shard,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        """Train on a shard. When told to stop, keep the place in it, and go on there next time."""
        x, y = shard
        weights = state.tensors["weights"].numpy().copy()
        velocity = state.tensors["velocity"].numpy().copy()
        done, total = state.meta["done"], state.meta["total"]
        order = visit.order(len(x))  # the same whenever this visit is repeated
        while done < len(x):
            batch = order[done : done + BATCH]
            shares = softmax(x[batch] @ weights)
            right = shares[np.arange(len(batch)), y[batch]]
            total -= float(np.log(np.maximum(right, 1e-300)).sum())
            shares[np.arange(len(batch)), y[batch]] -= 1
            velocity = config["momentum"] * velocity - config["lr"] * x[batch].T @ shares / len(
                batch
            )
            weights += velocity
            done += len(batch)
            if done < len(x) and should_stop():
                rest = self.pack(weights, velocity, done, total)
                return Trained(rest, done, total / done, finished=False)
        loss = total / max(done, 1)
        return Trained(self.pack(weights, velocity), done, loss, diverged=math.isnan(loss))

    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        x, y = shard
        shares = softmax(x @ state.tensors["weights"].numpy())
        right = np.maximum(shares[np.arange(len(y)), y], 1e-300)
        accuracy = float((shares.argmax(axis=1) == y).mean())
        return Evaluated(len(x), {"accuracy": accuracy, "loss": float(-np.log(right).mean())})

    def restore(self, state: State, config: Config) -> np.ndarray:
        """Return the model that `run.best_model()` gives to its user."""
        return state.tensors["weights"].numpy().copy()

    def pack(
        self, weights: np.ndarray, velocity: np.ndarray, done: int = 0, total: float = 0.0
    ) -> State:
        arrays = {"weights": weights, "velocity": velocity}
        tensors = {name: Tensor.from_numpy(array) for name, array in arrays.items()}
        return State.pack(tensors, {"done": done, "total": total})


class TestSoftmax(WorkloadSuite):
    """The laws that every workload keeps; pytest finds them in this file, too."""

    config: Mapping[str, Any] = {"lr": 0.1, "momentum": 0.9}

    def make_workload(self) -> Any:
        return Softmax()

    def make_arrays(self, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"x": rng.random((100, N_FEATURES)), "y": rng.integers(N_CLASSES, size=100)}


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-3, 3.0, log=True),
        "momentum": trial.suggest_float("momentum", 0.0, 0.95),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a workload of your own")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=9, help="of a trial, at most")
    args = parser.parse_args()

    kept = check(TestSoftmax)  # raises if the workload breaks a law
    print(f"{len(kept)} laws kept")

    digits = load_digits()
    folder = Path(tempfile.mkdtemp(prefix="dagsel-own-workload-"))
    run = dagsel.optimize(
        optuna.create_study(study_name="softmax", direction="maximize", sampler=TPESampler(seed=0)),
        Softmax(),
        (digits.data / 16, digits.target),
        space=space,
        metric="accuracy",
        flow=ASHA(max_epochs=args.epochs, n_trials=args.trials),
        run_dir=folder / "run",
    )
    print(run.leaderboard(5).to_string(index=False, float_format="{:.4g}".format))
    np.save(folder / "best.npy", run.best_model())
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.npy'}")


if __name__ == "__main__":
    main()
