"""Records the loss traces of this folder: Hermes' grid of 192 configurations, for two networks.

    python tests/benchmarks/hermes_traces/record.py [--data ../shared/data] [--models cnn mlp]

A recording that was killed goes on where it stopped. README.md says what is in the files.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks import grids

HERE = Path(__file__).resolve().parent
N_ITERATIONS, EVERY = 1000, 50
N_HELD_OUT = 2000
#: What is kept of one configuration.
TRACE = np.dtype(
    [
        ("losses", np.float32, N_ITERATIONS),
        ("test_loss", np.float32, N_ITERATIONS // EVERY + 1),
        ("test_accuracy", np.float32, N_ITERATIONS // EVERY + 1),
        ("iteration_s", np.float32),
        ("evaluation_s", np.float32),
    ]
)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


MODELS = {"cnn": cnn, "mlp": mlp}


def optimizer(parameters: Any, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    name, lr, weight_decay = config["optimizer"], config["lr"], config["weight_decay"]
    if name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=lr, weight_decay=weight_decay)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay)
    momentum = 0.9 if name == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)


def batches(n: int, size: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Give batches for ever, from one permutation of the images after another."""
    left = np.empty(0, np.int64)
    while True:
        if len(left) < size:
            left = np.concatenate([left, rng.permutation(n)])
        yield torch.from_numpy(left[:size])
        left = left[size:]


def record(
    name: str, config: dict[str, Any], images: torch.Tensor, labels: torch.Tensor, seed: list[int]
) -> Any:
    """Train one configuration; give its trace."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(int(rng.integers(2**31)))
    model = MODELS[name]()
    stepper = optimizer(model.parameters(), config)
    held_x, held_y = images[:N_HELD_OUT], labels[:N_HELD_OUT]
    x, y = images[N_HELD_OUT:], labels[N_HELD_OUT:]
    trace = np.zeros((), TRACE)
    source = batches(len(x), config["batch"], rng)
    training_s = evaluation_s = 0.0
    for iteration in range(N_ITERATIONS + 1):
        if iteration % EVERY == 0:
            began = time.thread_time()
            with torch.no_grad():
                scores = torch.cat([model(part) for part in held_x.split(250)])
                trace["test_loss"][iteration // EVERY] = cross_entropy(scores, held_y).item()
                right = (scores.argmax(1) == held_y).float().mean().item()
                trace["test_accuracy"][iteration // EVERY] = right
            evaluation_s += time.thread_time() - began
        if iteration == N_ITERATIONS:
            break
        began = time.thread_time()
        chosen = next(source)
        stepper.zero_grad()
        loss = cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        stepper.step()
        trace["losses"][iteration] = loss.item()
        training_s += time.thread_time() - began
    trace["iteration_s"] = training_s / N_ITERATIONS
    trace["evaluation_s"] = evaluation_s / len(trace["test_loss"])
    return trace


def show(trace: Any) -> str:
    """Say what was recorded of a configuration."""
    return (
        f"loss {trace['losses'][-50:].mean():.3f}, accuracy {trace['test_accuracy'][-1]:.3f}, "
        f"{1000 * trace['iteration_s']:.2f} ms, evaluation {1000 * trace['evaluation_s']:.1f} ms"
    )


def keep(traces: NDArray[Any]) -> dict[str, Any]:
    """Return the arrays of the file; losses are exact to 0.05%: less than the noise of a batch."""
    rest = {key: traces[key] for key in TRACE.names or () if key != "losses"}
    return {"losses": traces["losses"].astype(np.float16), **rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=HERE.parents[3] / "shared/data")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    grids.one_thread()
    images, labels = map(torch.from_numpy, grids.images(args.data))
    for name in args.models:
        place = list(MODELS).index(name)

        def one(number: int, config: dict[str, Any], name: str = name, place: int = place) -> Any:
            return record(name, config, images, labels, [args.seed, place, number])

        grids.record_all(args.out / f"{name}.npz", grids.HERMES, TRACE, one, show, keep)


if __name__ == "__main__":
    main()
