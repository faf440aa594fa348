"""Convolutional networks with channels first and channels last, on one core: milliseconds an epoch.

    python tests/benchmarks/layouts.py [--rounds 5]

What is assumed:

- Data: 512 random images of 28 × 28 in grey or of 32 × 32 in colours (float32), 10 classes.
- Networks: those of tutorials, small: what is between their convolutions has 4 to 64 channels.
  Adam with a rate of 0.001; batches of 64.
- One process with one thread. It keeps freed memory as dagsel's workers do, the loop's as well.
- ``loop``: a loop over shuffled batches, as a script has it; ``first`` and ``last``: an epoch by
  `TorchWorkload.train` with ``channels_last`` false and true, and its scores by ``evaluate``. They
  take turns; the fastest of the rounds counts, as whatever else a machine does makes it slower.

`TorchWorkload` takes channels last by default where the table says so. It ends with 3 if a network
trains slower so than with channels first, or is left as it is and would train faster by a fifth.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dagsel.workloads import TorchWorkload, Visit
from dagsel.workloads.torch.layout import bears, gains

N_IMAGES, BATCH_SIZE, N_CLASSES = 512, 64, 10
GREY, COLOURED = (1, 28, 28), (3, 32, 32)
CONFIG = {"lr": 1e-3}
KEPT = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=1073741824"


def blocks(colours: int, widths: list[int], norm: Any = None, stride: int = 1) -> list[nn.Module]:
    """Convolutions, each with a norm and a pooling, or with a stride in its place."""
    made: list[nn.Module] = []
    for n_in, n_out in zip([colours, *widths], widths, strict=False):
        made += [nn.Conv2d(n_in, n_out, 3, stride, 1)]
        made += [] if norm is None else [norm(n_out)]
        made += [nn.ReLU(), *([nn.MaxPool2d(2)] if stride == 1 else [])]
    return made


def small(width: int, norm: Any = None, stride: int = 1) -> nn.Module:
    body = blocks(1, [width, 2 * width], norm, stride)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(98 * width, N_CLASSES))


class Shortcut(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        self.past = nn.Conv2d(n_in, n_out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.past(x))


def pooled(*body: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, N_CLASSES))


def residual() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU()]
    body = [Shortcut(16, 16, 1), Shortcut(16, 32, 2), Shortcut(32, 64, 2)]
    return pooled(*stem, *body, width=64)


def separable() -> nn.Module:
    body: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU6()]
    for n_in, n_out, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        body += [nn.Conv2d(n_in, n_in, 3, stride, 1, groups=n_in), nn.BatchNorm2d(n_in)]
        body += [nn.ReLU6(), nn.Conv2d(n_in, n_out, 1), nn.BatchNorm2d(n_out), nn.ReLU6()]
    return pooled(*body, width=64)


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Sequential(*blocks(1, [16, 32])), nn.Linear(1568, N_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.last(x.view(x.size(0), -1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "two convolutions of 8 and 16 channels": (lambda: small(8), GREY),
    "of 16 and 32": (lambda: small(16), GREY),
    "of 16 and 32, batch norms": (lambda: small(16, nn.BatchNorm2d), GREY),
    "three of 16, 32 and 64, batch norms": (
        lambda: pooled(*blocks(3, [16, 32, 64], nn.BatchNorm2d), width=64),
        COLOURED,
    ),
    "the same, group norms": (
        lambda: pooled(*blocks(3, [16, 32, 64], lambda n: nn.GroupNorm(4, n)), width=64),
        COLOURED,
    ),
    "residual, 16 to 64": (residual, COLOURED),
    "depthwise separable, 16 to 64": (separable, COLOURED),
    "two of 4 and 8": (lambda: small(4), GREY),
    "two of 16 and 32, all of stride 2": (lambda: small(16, None, 2), GREY),
    "three of 16, 32 and 64, instance norms": (
        lambda: pooled(*blocks(3, [16, 32, 64], nn.InstanceNorm2d), width=64),
        COLOURED,
    ),
    "two of 16 and 32, then `x.view`": (Viewed, GREY),
}


def loop(network: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    model = network().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=CONFIG["lr"])

    def epoch() -> None:
        for index in torch.randperm(N_IMAGES).split(BATCH_SIZE):
            optimizer.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()

    return epoch


def ways_of(network: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return functions of the epoch by name: what each way trains, or scores."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N_IMAGES, *shape)).astype("float32")
    arrays = {"x": x, "y": rng.integers(0, N_CLASSES, N_IMAGES)}
    ways: dict[str, Any] = {"loop": loop(network, *map(torch.from_numpy, arrays.values()))}

    def add(layout: str, *, channels_last: bool) -> None:
        workload = TorchWorkload(
            lambda config: network(), cross_entropy, torch.optim.Adam, batch_size=BATCH_SIZE,
            channels_last=channels_last,
        )  # fmt: skip
        shard, state, epochs = workload.prepare(arrays), workload.init(CONFIG, 0), iter(range(99))

        def train() -> None:
            nonlocal state
            state = workload.train(state, shard, CONFIG, visit=Visit(0, 0, next(epochs), 0)).state

        ways[f"train {layout}"] = train
        ways[f"score {layout}"] = lambda: workload.evaluate(state, shard, CONFIG)

    add("first", channels_last=False)
    if bears(network(), lambda: torch.ones(2, *shape)):
        add("last", channels_last=True)
    return ways


def measured(network: Callable[[], nn.Module], shape: tuple[int, ...], n: int) -> dict[str, float]:
    ways, took = ways_of(network, shape), dict[str, list[float]]()
    for _ in range(n + 1):
        for name, epoch in ways.items():
            began = time.perf_counter()
            epoch()
            took.setdefault(name, []).append(time.perf_counter() - began)
    return {name: min(seconds[1:]) for name, seconds in took.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if os.environ.get("GLIBC_TUNABLES") != KEPT:  # read when a process starts
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": KEPT}
        )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        "| network | default | loop | first over loop | last over loop | scores, last over first |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    is_held = True
    for name, (network, shape) in NETWORKS.items():
        found = measured(network, shape, args.rounds)
        bearable = "train last" in found
        takes = bearable and gains(network())
        ratio = found["train last"] / found["train first"] if bearable else 1.0
        is_held = is_held and (ratio <= 1.0 if takes else ratio >= 0.8)
        cells = [name, "last" if takes else "first", f"{found['loop'] * 1e3:.0f} ms"]
        cells += [f"{found['train first'] / found['loop']:.2f}"]
        cells += [f"{found['train last'] / found['loop']:.2f}" if bearable else "an error"]
        cells += [f"{found['score last'] / found['score first']:.2f}" if bearable else "–"]
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0 if is_held else 3


if __name__ == "__main__":
    sys.exit(main())
