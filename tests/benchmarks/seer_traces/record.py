"""Records the learning curves of this folder: the 144 points of SEER's Table 1, for one network.

    python tests/benchmarks/seer_traces/record.py [--data ../shared/data] [--epochs 210]

A recording that was killed goes on where it stopped. README.md says what is in the file, and how
the paper's hyper-parameters were mapped onto this network.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy

HERE = Path(__file__).parent
N_TRAIN, BATCH = 4000, 128
#: Table 1 of Dunlap et al. 2021.
GRID: dict[str, tuple[float, ...]] = {
    "lr": (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0),
    "weight_decay": (0.0001, 0.0005, 0.001, 0.005),
    "momentum": (0.9, 0.95, 0.99, 0.997),
}


def configs() -> list[dict[str, float]]:
    """Give the grid in its order, the last hyper-parameter fastest."""
    return [dict(zip(GRID, point, strict=True)) for point in itertools.product(*GRID.values())]


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


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of bytes."""
    with gzip.open(path) as file:
        raw = file.read()
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def load(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Give images of 14 × 14 and labels, shuffled: the file's second half is harder."""
    x = read_idx(folder / "mnist-10k-images-idx3-ubyte.gz").astype(np.float32) / 255
    y = read_idx(folder / "mnist-10k-labels-idx1-ubyte.gz").astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    images = torch.from_numpy((x[order, None] - 0.1307) / 0.3081)
    return avg_pool2d(images, 2).flatten(1), torch.from_numpy(y[order])


def record(
    config: dict[str, float], images: torch.Tensor, labels: torch.Tensor, n_epochs: int, seed: int
) -> Any:
    """Train one configuration; give its trace."""
    rng = np.random.default_rng([seed, configs().index(config)])
    torch.manual_seed(int(rng.integers(2**31)))
    model = nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))
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
    parser.add_argument("--out", type=Path, default=HERE / "mlp.npz")
    parser.add_argument("--epochs", type=int, default=210)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    images, labels = load(args.data)
    part, kind = args.out.with_suffix(".part"), trace_type(args.epochs)
    done = part.stat().st_size // kind.itemsize if part.exists() else 0
    with part.open("ab") as file:
        file.truncate(done * kind.itemsize)  # what was written when it was killed
        for number, config in list(enumerate(configs()))[done:]:
            trace = record(config, images, labels, args.epochs, args.seed)
            file.write(trace.tobytes())
            file.flush()
            print(f"{number} {config}: {1000 * trace['epoch_s']:.1f} ms an epoch", flush=True)
    traces = np.fromfile(part, kind)
    arrays: dict[str, Any] = {key: np.array([one[key] for one in configs()]) for key in GRID}
    arrays |= {key: traces[key] for key in ("n_right", "epoch_s", "evaluation_s")}
    with np.errstate(over="ignore"):  # what is more than 65,504 is infinite
        arrays["loss"] = traces["loss"].astype(np.float16)
    arrays["n_held_out"], arrays["experiment"] = len(images) - N_TRAIN, "seer-table-1"
    np.savez_compressed(args.out, **arrays)
    part.unlink()


if __name__ == "__main__":
    main()
