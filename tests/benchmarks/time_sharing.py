"""What time-sharing costs: trials in turns of a second against the same ones each in one go.

Four trials on two workers of a real cluster, first in first out and then round robin, for states of
1, 10 and 100 MB. Prints the ratio of the wall times, and the medians of what a turn's end takes:
storing its state, the way to the next turn's start (driver and scheduler), and until that trains.

    python tests/benchmarks/time_sharing.py [--megabytes 1,10,100] [--torch]

The trials sleep instead of training; with --torch they train a network, and need a quiet machine.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import optuna
import torch
from distributed import Client

import dagsel
from dagsel.execution.cluster import local_cluster
from dagsel.flow import Flow, Losses
from dagsel.flows import RoundRobin
from dagsel.flows.baselines import FIFO
from dagsel.storage import Journal, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.base import Trained

N_TRIALS, N_SHARDS, QUANTUM_S = 4, 4, 1.0
BATCH_S, N_BATCHES = 0.025, 68  # a unit is no whole number of turns
SAMPLES_PER_SHARD, BATCH_SIZE = 400_000, 64  # of a network of 1 MB
BARS = {10: 1.05}


class Clock:
    """Is asked at each batch's end whether to stop there, and remembers when."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self.should_stop = should_stop
        self.times: list[float] = []

    def __call__(self) -> bool:
        self.times.append(time.time())
        return self.should_stop()

    @property
    def span(self) -> tuple[float, float]:
        """When training began, as far as its batches take equally long, and when it ended."""
        first, *_, last = self.times
        return first - (last - first) / (len(self.times) - 1), last


def timed(train: Callable[..., Trained], *args: Any, should_stop: Any, **options: Any) -> Trained:
    """Train, and tell of a piece's batches when they began and ended instead of their losses."""
    clock = Clock(should_stop)
    trained = train(*args, should_stop=clock, **options)
    losses = trained.losses if len(clock.times) < 2 else Losses(len(clock.times), *clock.span)
    return replace(trained, losses=losses)


class Sleeping(SyntheticWorkload):
    """Copies its state when a piece ends, as a network does."""

    def train(self, *args: Any, **options: Any) -> Trained:
        return timed(super().train, *args, **options)


class Network(dagsel.TorchWorkload):
    """Trains three layers."""

    def train(self, *args: Any, **options: Any) -> Trained:
        return timed(super().train, *args, **options)


def network(side: int) -> Network:
    def model(config: Any) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(4, side), torch.nn.ReLU(),
            torch.nn.Linear(side, side), torch.nn.ReLU(), torch.nn.Linear(side, 1),
        )  # fmt: skip

    return Network(
        model,
        lambda output, target: (output[:, 0] - target).square().mean(),
        lambda parameters, config: torch.optim.SGD(parameters, lr=1e-6, momentum=0.9),
        batch_size=BATCH_SIZE,
    )


def sleeping(n_bytes: int) -> Sleeping:
    return Sleeping(seconds=BATCH_S * N_BATCHES, n_batches=N_BATCHES, state_bytes=n_bytes)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a worker did of a unit, from `start` to `stop`."""

    trial: int
    worker: str
    start: float
    trains: float
    rests: float
    stop: float
    is_cut: bool


def turns(run_dir: str) -> list[Turn]:
    """Read what has trained, in the order in which it began."""
    found = []
    for entry in Journal(run_dir).read():
        if entry["is"] in ("unit", "piece") and entry["unit"][0] == "train":
            _, trains, rests = entry["losses"]
            times = entry["start"], trains, rests, entry["stop"]
            is_cut = entry["is"] == "piece"
            found.append(Turn(entry["unit"][1], entry["worker"], *times, is_cut))
    return sorted(found, key=lambda turn: turn.start)


def search(client: Client, data: ShardedDataset, workload: Any, flow: Flow) -> list[Turn]:
    with tempfile.TemporaryDirectory() as folder:
        dagsel.optimize(
            optuna.create_study(), workload, data, flow=flow, metric="loss", client=client,
            space=lambda trial: {"x": trial.suggest_float("x", 0, 1)}, run_dir=f"{folder}/run",
        )  # fmt: skip
        return turns(f"{folder}/run")


def wall_s(found: Iterable[Turn]) -> float:
    found = list(found)
    return max(turn.stop for turn in found) - min(turn.start for turn in found)


def switches(found: list[Turn]) -> tuple[list[float], list[float], list[float], int]:
    """Of each turn that ended within a unit: store, way, start; how many went on elsewhere."""
    cut = [turn for turn in found if turn.is_cut]
    by_worker = [[t for t in found if t.worker == w] for w in {t.worker for t in found}]
    pairs = [pair for of_one in by_worker for pair in pairwise(of_one) if pair[0].is_cut]
    by_trial = [[t for t in found if t.trial == n] for n in {t.trial for t in found}]
    goes_on = [pair for of_one in by_trial for pair in pairwise(of_one) if pair[0].is_cut]
    n_moved = sum(one.worker != other.worker for one, other in goes_on)
    return (
        [turn.stop - turn.rests for turn in cut],
        [other.start - one.stop for one, other in pairs],
        [max(0.0, other.trains - other.start) for _, other in goes_on if other.is_cut],
        n_moved,
    )


def measure(megabytes: int, *, use_torch: bool) -> float:
    n_bytes = megabytes * 10**6
    n = N_SHARDS * (SAMPLES_PER_SHARD // megabytes if use_torch else BATCH_SIZE)
    # Of each weight there is a momentum.
    workload = network(int((n_bytes / 8) ** 0.5)) if use_torch else sleeping(n_bytes)
    arrays = {"x": np.zeros((n, 4), np.float32), "y": np.zeros(n, np.float32)}
    with tempfile.TemporaryDirectory() as folder, local_cluster(2) as cluster:
        data = ShardedDataset.write(f"{folder}/data", arrays, n_shards=N_SHARDS)
        with Client(cluster, set_as_default=False) as client:
            size: Any = {"max_epochs": 1, "n_trials": N_TRIALS}
            whole = search(client, data, workload, FIFO(**size))
            cut = search(client, data, workload, RoundRobin(**size, quantum=QUANTUM_S))
    store, way, start, n_moved = switches(cut)
    medians = " | ".join(f"{1e3 * statistics.median(t):.1f} ms" for t in (store, way, start))
    ratio = wall_s(cut) / wall_s(whole)
    bar = BARS.get(megabytes, math.inf)
    verdict = "" if bar == math.inf else "held" if ratio <= bar else "**missed**"
    print(
        f"| {megabytes} MB | {wall_s(whole):.1f} s, {wall_s(cut):.1f} s | {ratio:.3f} | "
        f"{'' if bar == math.inf else bar} | {verdict} | {len(store)}, {n_moved} | {medians} |",
        flush=True,
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", default="1,10,100")
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    missed = False
    print("| state | in one go, in turns | ratio | bar | | turns cut, went on elsewhere | store | "
          "until the next turn starts | until it trains |\n" + "| --- " * 9 + "|")  # fmt: skip
    for megabytes in map(int, args.megabytes.split(",")):
        ratio = measure(megabytes, use_torch=args.torch)
        missed |= ratio > BARS.get(megabytes, ratio)
    sys.exit(3 if missed else 0)  # a crash ends with 1


if __name__ == "__main__":
    main()
