"""Records the learning curves of this folder: the 144 points of SEER's Table 1, for a network.

    python tests/benchmarks/seer_traces/record.py [--network cnn] [--data ../shared/data]

A recording that was killed goes on where it stopped. README.md says what is in the file, and how
the paper's hyper-parameters were mapped onto this network.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks import grids

HERE = Path(__file__).resolve().parent
N_TRAIN, BATCH = 4000, 128
NAME = "seer-table-1"


def trace_type(n_epochs: int) -> np.dtype[Any]:
    """Say what is kept of one configuration."""
    return np.dtype(
        [
            ("loss", np.float32, n_epochs),
            ("n_right", np.int16, n_epochs + 1),
            ("epoch_s", np.float32),
            ("evaluation_s", np.float32),
        ]
    )


def load(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Give images of 14 × 14, flattened, and labels."""
    x, y = grids.images(folder)
    return avg_pool2d(torch.from_numpy(x), 2).flatten(1), torch.from_numpy(y)


def network(name: str) -> nn.Module:
    """Return a network that takes images of 14 × 14, flattened, with new weights."""
    if name == "mlp":
        return nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(
        nn.Unflatten(1, (1, 14, 14)),
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def record(
    name: str,
    config: dict[str, float],
    images: torch.Tensor,
    labels: torch.Tensor,
    n_epochs: int,
    seed: list[int],
) -> Any:
    """Train one configuration; give its trace."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(int(rng.integers(2**31)))
    model = network(name)
    stepper = torch.optim.SGD(
        model.parameters(),
        lr=config["lr"],
        momentum=config["momentum"],
        weight_decay=config["weight_decay"],
    )
    # "5 epochs without any accuracy increase" are four bad ones that are borne, and a fifth.
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        stepper, mode="max", factor=0.5, patience=4, threshold=0.0, min_lr=0.0, eps=0.0
    )
    x, y, held_x, held_y = images[:N_TRAIN], labels[:N_TRAIN], images[N_TRAIN:], labels[N_TRAIN:]
    trace = np.zeros((), trace_type(n_epochs))
    training_s = evaluation_s = 0.0
    n_done = 0
    for epoch in range(n_epochs + 1):
        began = time.thread_time()
        with torch.no_grad():
            trace["n_right"][epoch] = int((model(held_x).argmax(1) == held_y).sum())
        evaluation_s += time.thread_time() - began
        if epoch == n_epochs:
            break
        if epoch:
            plateau.step(float(trace["n_right"][epoch]))
            if not np.isfinite(trace["loss"][epoch - 1]):  # the weights are lost for good
                trace["n_right"][epoch:], trace["loss"][epoch:] = trace["n_right"][epoch], np.nan
                break
        began = time.thread_time()
        order = torch.from_numpy(rng.permutation(N_TRAIN))
        losses = []
        for part in order.split(BATCH)[: N_TRAIN // BATCH]:
            stepper.zero_grad()
            loss = cross_entropy(model(x[part]), y[part])
            loss.backward()
            stepper.step()
            losses.append(loss.detach())
        trace["loss"][epoch] = torch.stack(losses).mean().item()
        training_s += time.thread_time() - began
        n_done += 1
    trace["epoch_s"], trace["evaluation_s"] = training_s / n_done, evaluation_s / (n_done + 1)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=HERE.parents[3] / "shared/data")
    parser.add_argument("--network", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--out", type=Path, help="file; that of the network in this folder")
    parser.add_argument("--epochs", type=int, default=210)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    grids.one_thread()
    images, labels = load(args.data)

    def keep(traces: NDArray[Any]) -> dict[str, Any]:
        with np.errstate(over="ignore"):  # what is more than 65,504 is infinite
            losses = traces["loss"].astype(np.float16)
        counts = {key: traces[key] for key in ("n_right", "epoch_s", "evaluation_s")}
        return counts | {"loss": losses, "n_held_out": len(images) - N_TRAIN, "experiment": NAME}

    grids.record_all(
        args.out or HERE / f"{args.network}.npz",
        grids.SEER,
        trace_type(args.epochs),
        lambda n, config: record(args.network, config, images, labels, args.epochs, [args.seed, n]),
        lambda trace: f"{1000 * trace['epoch_s']:.1f} ms an epoch",
        keep,
    )


if __name__ == "__main__":
    main()
