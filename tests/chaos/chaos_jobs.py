"""The searches that the chaos test puts through faults, and what they must come to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from faulty import FaultyWorkload

from dagsel.flow import Flow
from dagsel.flows import ASHA, RandomSearch, RoundRobin
from dagsel.storage import RaggedArray, ShardedDataset
from dagsel.testing.synthetic import CountingWorkload
from dagsel.workloads.base import Config, Workload

N_SHARDS, N_TRIALS, N_EPOCHS, N_BATCHES = 4, 6, 3, 3
POISONED = 2
UNIT_S = (0.08, 0.15)
QUANTUM_S = 0.1
METRIC = {
    "counting": "value",
    **dict.fromkeys(("torch", "adapter", "lightning", "flax", "keras"), "accuracy"),
}


@dataclass(frozen=True)
class Job:
    """A search: what a driver process needs to begin it, go on with it or repeat it."""

    seed: int
    workload: Literal["counting", "torch", "adapter", "lightning", "flax", "keras"]
    flow: Literal["random", "asha", "robin"]
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
        if self.flow == "robin":
            return RoundRobin(max_epochs=N_EPOCHS, n_trials=N_TRIALS, quantum=QUANTUM_S)
        # More trials: most are stopped after their first epoch.
        return ASHA(max_epochs=N_EPOCHS, n_trials=9, reduction_factor=2, n_concurrent=5)

    def make_workload(self, pace: float = 1.0) -> FaultyWorkload:
        # A part that is a `partial` is told apart by its function's name: the pace may change.
        seconds = partial(unit_seconds, pace)
        if self.workload == "counting":
            inner = CountingWorkload(seconds, n_batches=N_BATCHES, value=value, n_shards=N_SHARDS)
            return FaultyWorkload(inner, starts=self.starts, poison=self.poisoned)
        made: Workload
        # Workers that only count need no torch, and are back sooner.
        if self.workload == "torch":
            from chaos_torch import make_torch_workload

            made = make_torch_workload()
        else:
            from chaos_libraries import make_library_workload

            made = make_library_workload(self.workload)
        return FaultyWorkload(made, self.starts, self.poisoned, seconds)

    @property
    def poisoned(self) -> tuple[int, ...]:
        return (POISONED,) if self.poison else ()

    def make_data(self) -> ShardedDataset:
        chance = np.random.default_rng(self.seed)
        y = chance.integers(0, 3, 400)
        x = chance.normal(size=(400, 8)).astype(np.float32) + y[:, None].astype(np.float32)
        y = y.astype(np.int64)
        sizes = chance.integers(0, 7, 400)
        ids = RaggedArray.of([chance.integers(1, 9, size=size) for size in sizes])
        arrays: dict[str, Any] = {"x": x, "ids": ids, "y": y}
        if self.workload == "adapter":
            texts = [
                chance.integers(3 * of, 3 * of + 3, size=2 + size)
                for of, size in zip(y, sizes, strict=True)
            ]
            arrays = {"input_ids": RaggedArray.of(texts), "labels": y}
        elif self.workload not in ("counting", "torch"):
            del arrays["ids"]
        return ShardedDataset.write(f"{self.folder}/data.zarr", arrays, n_shards=N_SHARDS)


def unit_seconds(pace: float, config: Config) -> float:
    return pace * float(config["seconds"])


def value(config: Config, epoch: int) -> float:
    """Rise and fall: the second epoch is the best one."""
    return float(config["lr"]) * (1.0 - 0.3 * abs(epoch - 2))


def suggest(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        "seconds": trial.suggest_float("seconds", *UNIT_S),
    }
