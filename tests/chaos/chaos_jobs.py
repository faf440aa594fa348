"""The searches that the chaos test puts through faults, and what they must come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import dagsel
from dagsel.flow import Flow
from dagsel.flows import ASHA, RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing.faulty import FaultyWorkload
from dagsel.testing.synthetic import CountingWorkload
from dagsel.workloads.base import Config, Workload

N_SHARDS, N_TRIALS, N_EPOCHS, N_BATCHES = 4, 6, 3, 3
POISONED = 2
UNIT_S = (0.08, 0.15)
#: Of a search whose workers survive.
METRIC = {"counting": "value", "torch": "accuracy"}


@dataclass(frozen=True)
class Job:
    """A search: what a driver process needs to begin it, go on with it or repeat it."""

    seed: int
    workload: Literal["counting", "torch"]
    flow: Literal["random", "asha"]
    poison: bool
    folder: str
    run_dir: str

    @property
    def study_url(self) -> str:
        return f"sqlite:///{self.folder}/study.db"

    @property
    def starts(self) -> str:
        return f"{self.folder}/starts"

    @property
    def kept(self) -> Path:
        return Path(self.folder) / "kept"

    def make_flow(self) -> Flow:
        if self.flow == "random":
            return RandomSearch(max_epochs=N_EPOCHS, n_trials=N_TRIALS, n_concurrent=5)
        # More trials: most are stopped after their first epoch.
        return ASHA(max_epochs=N_EPOCHS, n_trials=2 * N_TRIALS, reduction_factor=2, n_concurrent=5)

    def make_workload(self, pace: float = 1.0) -> FaultyWorkload:
        # A part that is a `partial` is told apart by its function's name: the pace may change.
        seconds = partial(unit_seconds, pace)
        inner: Workload
        if self.workload == "counting":
            inner = CountingWorkload(seconds, n_batches=N_BATCHES, value=value, n_shards=N_SHARDS)
            return FaultyWorkload(inner, starts=self.starts, poison=self.poisoned)
        inner = dagsel.TorchWorkload(
            build_model,
            torch.nn.functional.cross_entropy,
            build_optimizer,
            batch_size=32,
            lr_scheduler=build_schedule,
            metrics={"accuracy": dagsel.metrics.accuracy},
        )
        return FaultyWorkload(inner, self.starts, self.poisoned, seconds)

    @property
    def poisoned(self) -> tuple[int, ...]:
        return (POISONED,) if self.poison else ()

    def make_data(self) -> ShardedDataset:
        chance = np.random.default_rng(self.seed)
        y = chance.integers(0, 3, 400)
        x = chance.normal(size=(400, 8)).astype(np.float32) + y[:, None].astype(np.float32)
        url = f"{self.folder}/data.zarr"
        return ShardedDataset.write(url, {"x": x, "y": y.astype(np.int64)}, n_shards=N_SHARDS)


def unit_seconds(pace: float, config: Config) -> float:
    return pace * float(config["seconds"])


def value(config: Config, epoch: int) -> float:
    return float(config["lr"]) * epoch


def suggest(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        "seconds": trial.suggest_float("seconds", *UNIT_S),
    }


def build_model(config: Config) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 3),
    )


def build_optimizer(parameters: Any, config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config["lr"])


def build_schedule(optimizer: torch.optim.Optimizer, config: Config) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def plain_pytorch(
    job: Job, trial: int, config: Mapping[str, Any], visits: list[tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Train as a script does, on one core, visiting the shards in the given orders."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = ShardedDataset.open(f"{job.folder}/data.zarr")
    shards = [
        {name: torch.from_numpy(array) for name, array in data.shard(index).items()}
        for index in range(N_SHARDS)
    ]
    seed = int(np.random.SeedSequence([job.seed, trial]).generate_state(1)[0])
    try:
        torch.manual_seed(seed)
        model = build_model(config)
        optimizer = build_optimizer(model.parameters(), config)
        schedule = build_schedule(optimizer, config)
        for epoch, order in enumerate(visits, start=1):
            for index in order:
                x, y = shards[index]["x"], shards[index]["y"]
                order_of = np.random.default_rng([job.seed, trial, epoch, index])
                for batch in torch.from_numpy(order_of.permutation(len(x))).split(32):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                    optimizer.step()
            schedule.step()
    finally:
        torch.set_num_threads(threads)
    return model.state_dict()
