"""The searches whose run directories are kept here: as they were called, to resume and replay them.

``python searches.py`` made the folders beside it, with dagsel as it was at commit 163b1ee (journal
entries without a format number). It is not run again: the folders stand for those that users have.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch

import dagsel
from dagsel.flows import ASHA, PBT, Hermes, RandomSearch, Range
from dagsel.storage import Journal, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

HERE = Path(__file__).parent


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.01, 1.0)}


def value(config: Any, epoch: int) -> float:
    return epoch * config["x"]


def model(config: Any) -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets)


def optimizer(parameters: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config["x"])


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def synthetic(seconds: float = 0.01) -> SyntheticWorkload:
    """Counts what it saw, so its states are the same bytes on every machine."""
    return SyntheticWorkload(seconds=seconds, n_batches=4, value=value)


def slow() -> SyntheticWorkload:
    return synthetic(seconds=0.12)


def trained() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        model, loss, optimizer, batch_size=8, metrics={"accuracy": accuracy}
    )


#: By name of the folder: workload, metric, options of `dagsel.optimize`, and after how many writes
#: to the journal the driver was killed (None: it came to its end).
SEARCHES: dict[str, tuple[Any, str, dict[str, Any], int | None]] = {
    "asha-ended": (
        synthetic, "value", {"flow": ASHA(max_epochs=4, n_trials=6, reduction_factor=2)}, None,
    ),
    "asha-killed": (
        synthetic, "value", {"flow": ASHA(max_epochs=4, n_trials=6, reduction_factor=2)}, 30,
    ),
    "pbt-killed": (
        synthetic, "value",
        {"flow": PBT(max_epochs=4, n_trials=4, mutations={"x": Range(0.01, 1.0)})}, 22,
    ),
    "hermes-killed": (
        slow, "value", {"flow": Hermes(max_epochs=4, n_trials=4, quantum="0.2 s")}, 40,
    ),
    "gangs-ended": (
        synthetic, "value",
        {"flow": RandomSearch(max_epochs=3, n_trials=3, n_concurrent=1),
         "small_population": "gang"}, None,
    ),
    "convergence-killed": (
        synthetic, "value",
        {"flow": RandomSearch(max_epochs=3, n_trials=6), "priority": "convergence"}, 14,
    ),
    "torch-ended": (
        trained, "accuracy", {"flow": RandomSearch(max_epochs=2, n_trials=3)}, None,
    ),
}  # fmt: skip


def make(name: str) -> None:
    workload, metric, options, n_writes = SEARCHES[name]
    written = Journal.append
    n = 0

    def counted(self: Journal, records: Any) -> None:
        nonlocal n
        written(self, records)
        n += 1
        if n == n_writes:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.append = counted  # type: ignore[method-assign]
    dagsel.optimize(
        optuna.create_study(study_name=name, direction="maximize"), workload(),
        str(HERE / "data.zarr"), space=space, metric=metric, run_dir=str(HERE / name), **options,
    )  # fmt: skip


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 4)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    ShardedDataset.write(str(HERE / "data.zarr"), {"x": x, "y": y}, n_shards=3)
    for name in SEARCHES:
        shutil.rmtree(HERE / name, ignore_errors=True)
        process = multiprocessing.get_context("spawn").Process(target=make, args=(name,))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
