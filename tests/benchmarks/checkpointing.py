"""What storing a state after each unit costs, and how much of it stays on the disk.

Two measurements:

- overhead: a search on MNIST (or scikit-learn's digits without ``--data``); the time that units
  spend on storing, over the wall time of all workers; at most 3%;
- bound: 200 trials of 50 epochs; the files are counted while it runs. At no time may there be more
  than two states of each live trial, that of its last reported epoch, and the best one.

    python tests/benchmarks/checkpointing.py [--data ../shared/data]
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from distributed import Client, LocalCluster
from sklearn.datasets import load_digits

import dagsel
from dagsel.execution.cluster import local_cluster
from dagsel.flows import ASHA, RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

OVERHEAD_BAR = 0.03


def arrays(data: Path | None) -> dict[str, np.ndarray]:
    if data is None:
        digits = load_digits()
        images = (digits.images[:, None] / 16).astype(np.float32)
        return {"x": images, "y": digits.target.astype(np.int64)}
    found = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        (path,) = data.glob(f"*{kind}*.gz")
        found.append(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header))
    images = found[0].reshape(-1, 1, 28, 28)
    return {"x": (images / 255).astype(np.float32), "y": found[1].astype(np.int64)}


def model(config: Mapping[str, Any]) -> torch.nn.Module:
    n = config["channels"]
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, n, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(), torch.nn.Linear(16 * n, 10),
    )  # fmt: skip


def overhead(client: Client, data: ShardedDataset, folder: str) -> bool:
    workload = dagsel.TorchWorkload(
        model,
        torch.nn.functional.cross_entropy,
        lambda parameters, config: torch.optim.Adam(parameters, config["lr"]),
        batch_size=64,
        metrics={"accuracy": dagsel.metrics.accuracy},
    )
    study = optuna.create_study(study_name="mnist", direction="maximize")
    run = dagsel.optimize(
        study, workload, data, metric="accuracy", client=client, run_dir=f"{folder}/overhead",
        flow=ASHA(max_epochs=9, n_trials=16),
        space=lambda trial: {
            "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            "channels": trial.suggest_int("channels", 4, 16),
        },
    )  # fmt: skip
    units = run.timeline()
    wall = (units.stop.max() - units.start.min()) * units.worker.nunique()
    share = units.save_seconds.sum() / wall
    trained = units[units.kind == "train"]
    unit_ms = 1e3 * (trained.stop - trained.start).median()
    save_ms = 1e3 * trained.save_seconds.median()
    is_held = share <= OVERHEAD_BAR
    print(f"| storing after each of {len(trained)} units of {unit_ms:.0f} ms | {save_ms:.2f} ms, "
          f"{share:.2%} of the workers' time | {OVERHEAD_BAR:.0%} | {verdict(is_held)} |",
          flush=True)  # fmt: skip
    return is_held


def verdict(is_held: bool) -> str:
    return "held" if is_held else "**missed**"


def names(folder: Path) -> list[str]:
    """Files of a folder that may be gone by now."""
    try:
        return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []


class Watch(threading.Thread):
    """Counts the states in a folder again and again, against what the journal says is live."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self.states, self.done, self.most = run_dir / "states", threading.Event(), 0.0
        self.n_looks, self.live = 0, lambda: 1

    def run(self) -> None:
        while not self.done.wait(0.02):
            n_states = sum(
                name.endswith(".json")
                for trial in names(self.states)
                for name in names(self.states / trial)
            )
            self.most = max(self.most, n_states / (3 * self.live() + 1))
            self.n_looks += 1


def bound(cluster: LocalCluster, client: Client, data: ShardedDataset, folder: str) -> bool:
    run_dir = Path(folder) / "bound"
    watch, ended = Watch(run_dir), [0]
    watch.live = lambda: min(16, 200 - ended[0]) + 2  # two more: what has ended is dropped in turn
    study = optuna.create_study(study_name="bound", direction="maximize")
    watch.start()
    dagsel.optimize(
        study, SyntheticWorkload(0.002), data, metric="value", client=client, run_dir=str(run_dir),
        space=lambda trial: {"x": trial.suggest_float("x", 0, 1)},
        flow=RandomSearch(max_epochs=50, n_trials=200, n_concurrent=16),
        callbacks=[lambda study, trial: ended.__setitem__(0, ended[0] + 1)],
    )  # fmt: skip
    watch.done.set()
    watch.join()
    left = len(list((run_dir / "states").glob("*/*.json")))
    is_held = watch.most <= 1.0
    print(f"| most states on the disk, 200 trials × 50 epochs, {watch.n_looks} looks | "
          f"{watch.most:.0%} of three a live trial | 100% | {verdict(is_held)} |")  # fmt: skip
    assert left == 1, "states are left"
    return is_held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, local_cluster() as cluster:
        with Client(cluster, set_as_default=False) as client:
            data = ShardedDataset.write(f"{folder}/data", arrays(options.data), n_shards=4)
            print("| what | measured | bar | |\n| --- | --- | --- | --- |")
            is_held = overhead(client, data, folder)
            tiny = ShardedDataset.write(f"{folder}/tiny", {"x": np.zeros((16, 1))}, n_shards=2)
            is_held &= bound(cluster, client, tiny, folder)
    return 0 if is_held else 3  # a crash ends with 1


if __name__ == "__main__":
    sys.exit(main())
