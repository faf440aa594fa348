"""What a training unit costs beyond its training: dagsel's unit beside a plain PyTorch loop.

Prints, for a CNN as one trains on MNIST, a small MLP and a model of 25 million parameters: seconds
of a plain loop over one shard with the model at hand, of the same as a unit (state in, state out),
the fixed cost of a unit and of an evaluation (on an empty shard) whose trial is built from its
state, the same where the worker has just trained it, and the cost of asking whether to stop.
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
from dagsel.workloads.torch.live import LiveTrials


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
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def plain(model: Any, optimizer: Any, x: Any, y: Any, visit: Any, batch_size: int) -> None:
    order = torch.from_numpy(visit.order(len(x)))
    for start in range(0, len(x), batch_size):
        index = order[start : start + batch_size]
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()


def compare(
    name: str, factory: Any, n_samples: int, batch_size: int, repeats: int, clock: Any
) -> None:
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
    latest = [state]

    def anew() -> TorchWorkload:
        workload._live = LiveTrials()
        return workload

    def go_on() -> None:
        latest[0] = workload.train(latest[0], empty, {}, visit=visit).state

    calls = {
        "plain": lambda: plain(*alive.pop(), shard["x"], shard["y"], visit, batch_size),
        "unit": lambda: anew().train(state, shard, {}, visit=visit, should_stop=stop.is_set),
        "fixed": lambda: anew().train(state, empty, {}, visit=visit),
        "scored": lambda: anew().evaluate(state, empty, {}),
        "kept": go_on,
        "kept scored": lambda: workload.evaluate(latest[0], empty, {}),
    }
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    for repeat in range(repeats + 1):
        borrow.train(state, empty, {}, visit=visit)  # the plain loop begins at the same state
        for kind, call in calls.items():
            if kind == "kept":
                go_on()  # the worker has just trained it, twice: what it has seen once is not known
                go_on()
            start = clock()
            call()
            if repeat:
                times[kind].append(clock() - start)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    print(
        f"{name:6} {state.nbytes / 1e6:7.1f} MB state, {-(-n_samples // batch_size):3} batches: "
        f"plain {median['plain'] * 1e3:8.1f} ms, unit {median['unit'] * 1e3:8.1f} ms "
        f"({median['unit'] / median['plain']:.3f}x), fixed cost {median['fixed'] * 1e3:6.2f} ms, "
        f"just trained {median['kept'] * 1e3:6.2f} ms; evaluation {median['scored'] * 1e3:6.2f} ms,"
        f" just trained {median['kept scored'] * 1e3:6.2f} ms"
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
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of the clock's")
    options = parser.parse_args()
    repeats, clock = options.repeats, time.process_time if options.cpu else time.perf_counter
    torch.set_num_threads(1)
    compare("CNN", cnn, 1000, 32, repeats, clock)
    compare("MLP", mlp, 1000, 32, repeats, clock)
    compare("large", large, 128, 32, max(repeats // 2, 1), clock)
    print(f"asking whether to stop: {polling():.0f} ns")
