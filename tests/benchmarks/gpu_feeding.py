"""Samples a second of one worker: dagsel's units beside a plain loop fed by a ``DataLoader``.

A CNN on MNIST and a small transformer on sequences of 64 tokens, each fed four ways: (a) units over
shards that are resident on the device; (b) units over shards in pinned memory of the host, sent
ahead; (c) a plain loop over ``DataLoader(num_workers=4, pin_memory=True)``; (d) as (c) with no
workers. Units include what they cost: state in, state out. The ways take turns, the first turn does
not count, medians do. What counts are the ratios of one run.

    python tests/benchmarks/gpu_feeding.py --data PATH [--repeats 5] [--samples N]

PATH is a folder with the IDX files of MNIST; without it the images are noise of the same shape.
Where there is no GPU it runs once on the CPU with few samples, so that it is known to work, and
says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dagsel.workloads import TorchWorkload, Visit

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

N_SHARDS = 4
N_TOKENS, LENGTH, WIDTH = 256, 64, 128


class Transformer(nn.Module):
    """Two encoder layers over tokens, and a class from their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(N_TOKENS, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.tokens(x) + self.places).mean(1))


def cnn() -> nn.Module:
    from mnist_cnn import model

    return model({"channels": 16, "width": 128})


def images(data: str | None, n: int | None) -> dict[str, Any]:
    from mnist_cnn import arrays, read_mnist

    rng = np.random.default_rng(0)
    if data is None:
        noise = rng.integers(0, 256, (n or 60_000, 28, 28), np.uint8)
        return arrays(noise, rng.integers(0, 10, len(noise)))
    return {name: array[:n] for name, array in arrays(*read_mnist(data)).items()}


def tokens(n: int | None) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, N_TOKENS, (n or 60_000, LENGTH))
    return {"x": x, "y": x[:, 0] % 10}


def adam(parameters: Any, config: Any = None) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def by_units(
    model: Callable[[], nn.Module], arrays: dict[str, Any], batch_size: int, options: dict[str, Any]
) -> Callable[[], object]:
    """Give a function that trains for an epoch: one unit for each shard."""
    workload = TorchWorkload(
        lambda config: model(), F.cross_entropy, adam, batch_size=batch_size, **options
    )
    parts = [{k: v[i::N_SHARDS] for k, v in arrays.items()} for i in range(N_SHARDS)]
    shards = [workload.prepare(part) for part in parts]
    state, epoch = workload.init({}, 0), 0

    def train() -> None:
        nonlocal state, epoch
        epoch += 1
        for i, shard in enumerate(shards):
            state = workload.train(state, shard, {}, visit=Visit(0, 0, epoch, i)).state

    return train


def by_loader(
    model: Callable[[], nn.Module], arrays: dict[str, Any], batch_size: int, n_workers: int
) -> Callable[[], object]:
    """Give a function that trains for an epoch: a script's loop over a ``DataLoader``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = model().to(device).train()
    optimizer = adam(network.parameters())
    loader = DataLoader(
        TensorDataset(*map(torch.from_numpy, arrays.values())),
        batch_size=batch_size,
        shuffle=True,
        num_workers=n_workers,
        persistent_workers=n_workers > 0,
        pin_memory=device.type == "cuda",
    )

    def train() -> None:
        for inputs, targets in loader:
            x, y = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return train


def compare(
    name: str,
    model: Callable[[], nn.Module],
    arrays: dict[str, Any],
    batch_size: int,
    repeats: int,
    options: dict[str, Any],
) -> None:
    n_samples = len(next(iter(arrays.values())))
    ways = {
        "(a) resident shards": by_units(model, arrays, batch_size, options),
        "(c) DataLoader, 4 workers": by_loader(model, arrays, batch_size, 4),
        "(d) DataLoader, no workers": by_loader(model, arrays, batch_size, 0),
    }
    if torch.cuda.is_available():
        ways["(b) pinned shards"] = by_units(
            model, arrays, batch_size, options | {"device_memory": 0}
        )
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, train in ways.items():
            start = time.perf_counter()
            train()
            if turn:
                rates[way].append(n_samples / (time.perf_counter() - start))
    medians = {way: statistics.median(found) for way, found in rates.items()}
    print(f"{name}: {n_samples:,} samples in {N_SHARDS} shards, batches of {batch_size}")
    for way, rate in medians.items():
        ratio = rate / medians["(c) DataLoader, 4 workers"]
        print(f"  {way:28}{rate:12,.0f} samples/s, {ratio:.2f} times (c)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder with the IDX files of MNIST")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, help="take only so many")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--fused", action="store_true")
    args = parser.parse_args()
    n = args.samples
    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    else:
        print("NO GPU HERE: a smoke run on the CPU without (b); its figures say nothing about GPUs")
        n, args.repeats = n or 512, 1
    options = {
        "precision": args.precision,
        "cuda_graphs": args.cuda_graphs,
        "fused": args.fused,
    }
    if any(value not in (False, "fp32") for value in options.values()):
        print(f"(a) and (b) with {options}; (c) and (d) are plain PyTorch")
    source = "MNIST" if args.data else "noise of MNIST's shape"
    compare(f"CNN on {source}", cnn, images(args.data, n), 256, args.repeats, options)
    compare("transformer", Transformer, tokens(n), 256, args.repeats, options)


if __name__ == "__main__":
    main()
