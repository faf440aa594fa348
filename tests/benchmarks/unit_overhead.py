"""What a training unit costs beyond its training: dagsel's unit beside a plain PyTorch loop.

Prints, for a CNN as one trains on MNIST, a small MLP and a model of 25 million parameters: seconds
of a plain loop over one shard with the model at hand, of the same as a unit (state in, state out),
the fixed cost of a unit (one on an empty shard), and the cost of asking whether to stop.
"""

import argparse
import statistics
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from dagsel.workloads import TorchWorkload, Visit


def cnn(config: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def mlp(config: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def large(config: Any) -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(784, 1024), nn.ReLU()]
    for _ in range(23):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def adam(parameters: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def plain(model: Any, optimizer: Any, x: Any, y: Any, visit: Any, batch_size: int) -> None:
    order = torch.from_numpy(visit.order(len(x)))
    for start in range(0, len(x), batch_size):
        index = order[start : start + batch_size]
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()


def compare(name: str, factory: Any, n_samples: int, batch_size: int, repeats: int) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x": rng.random((n_samples, 1, 28, 28), dtype="float32"),
        "y": rng.integers(0, 10, n_samples),
    }
    workload = TorchWorkload(factory, F.cross_entropy, adam, batch_size=batch_size)
    shard = workload.prepare(arrays)
    empty = workload.prepare({key: value[:0] for key, value in arrays.items()})
    visit = Visit(0, 0, 1, 0)
    state = workload.train(workload.init({}, 0), shard, {}, visit=visit).state
    alive = []
    borrow = TorchWorkload(
        factory, F.cross_entropy, adam, batch_size=batch_size,
        train_fn=lambda model, optimizer, batches, config: alive.append((model, optimizer)),
    )  # fmt: skip
    stop = threading.Event()
    times: dict[str, list[float]] = {"plain": [], "unit": [], "fixed": []}
    calls = {
        "plain": lambda: plain(*alive.pop(), shard["x"], shard["y"], visit, batch_size),
        "unit": lambda: workload.train(state, shard, {}, visit=visit, should_stop=stop.is_set),
        "fixed": lambda: workload.train(state, empty, {}, visit=visit),
    }
    for repeat in range(repeats + 1):
        borrow.train(state, empty, {}, visit=visit)  # the plain loop begins at the same state
        for kind, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat:
                times[kind].append(time.perf_counter() - start)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    print(
        f"{name:6} {state.nbytes / 1e6:7.1f} MB state, {-(-n_samples // batch_size):3} batches: "
        f"plain {median['plain'] * 1e3:8.1f} ms, unit {median['unit'] * 1e3:8.1f} ms "
        f"({median['unit'] / median['plain']:.3f}x), fixed cost {median['fixed'] * 1e3:6.2f} ms"
    )


def polling() -> float:
    stop, n = threading.Event(), 1_000_000
    should_stop = stop.is_set
    start = time.perf_counter()
    for _ in range(n):
        should_stop()
    return (time.perf_counter() - start) / n * 1e9


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    compare("CNN", cnn, 1000, 32, repeats)
    compare("MLP", mlp, 1000, 32, repeats)
    compare("large", large, 128, 32, max(repeats // 2, 1))
    print(f"asking whether to stop: {polling():.0f} ns")
