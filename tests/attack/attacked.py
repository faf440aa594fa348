"""Small run directories and a data set to damage, and what is made of them afterwards."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from sklearn.linear_model import SGDClassifier

import dagsel
from dagsel.flow import Direction, Flow
from dagsel.flows import PBT, Hermes, RandomSearch, Range
from dagsel.storage import Journal, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

N_SHARDS = 3
RANDOM = RandomSearch(max_epochs=3, n_trials=3, n_concurrent=2)
#: A search that takes longer hangs: it takes half a second.
HANGS_AFTER_S = 60


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.01, 1.0)}


def model(config: Any) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(), torch.nn.Linear(3, 2))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets)


def optimizer(parameters: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config["x"])


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def torch_workload() -> dagsel.Workload:
    return dagsel.TorchWorkload(
        model, loss, optimizer, batch_size=4, metrics={"accuracy": accuracy}
    )


def estimator(config: Any) -> SGDClassifier:
    return SGDClassifier(alpha=config["x"], random_state=0)


def sklearn_workload() -> dagsel.Workload:
    return dagsel.SklearnWorkload(estimator, classes=[0, 1])


def value(config: Any, epoch: int) -> float:
    return epoch * math.sin(9 * config["x"])


def synthetic_workload() -> dagsel.Workload:
    """Its state is the list of what it has seen."""
    return SyntheticWorkload(value=value)


def slow_workload() -> dagsel.Workload:
    """Its units can be stopped between two batches."""
    return SyntheticWorkload(seconds=0.02, n_batches=4, value=value)


#: By name of a search: what it trains, its metric, and its flow.
SEARCHES: dict[str, tuple[Callable[[], dagsel.Workload], str, Flow]] = {
    "torch": (torch_workload, "accuracy", RANDOM),
    "sklearn": (sklearn_workload, "accuracy", RANDOM),
    "synthetic": (synthetic_workload, "value", RANDOM),
    # What these decide depends on what came first.
    "pbt": (
        synthetic_workload,
        "value",
        PBT(max_epochs=4, n_trials=4, mutations={"x": Range(0.01, 1.0)}),
    ),
    "hermes": (slow_workload, "value", Hermes(max_epochs=2, n_trials=3, quantum="0.05 s")),
}
DIRECTION: Direction = "maximize"


def write_data(url: Path) -> ShardedDataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(31, 4)).astype("float32")
    return ShardedDataset.write(url, {"x": x, "y": (x[:, 0] > 0).astype("int64")}, n_shards=3)


def read_data(url: Path) -> list[dict[str, Any]]:
    """Read all that a search reads."""
    data = ShardedDataset.open(url)
    shards = range(data.n_shards)
    return [data.shard(i) for i in shards] + [data.validation_shard(i) for i in shards]


@dataclass(frozen=True)
class Outcome:
    """What a search has come to: all that must not change in silence."""

    trials: Mapping[int, Any]
    best: Any
    model: bytes
    failures: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: dagsel.Run) -> Outcome:
        run.best_model()  # raises what a user would see
        best, states = run.best, run.run_dir.states
        if best.check:
            blob, _ = states.load_check(best.trial, best.check)
        else:
            blob, _ = states.load(best.trial, best.epoch, best.position, partial=best.is_partial)
        trials = {
            trial.number: (
                dict(trial.params),
                trial.state,
                [(epoch.value, dict(epoch.metrics), epoch.digest) for epoch in trial.epochs],
            )
            for trial in run.record.trials.values()
        }
        return cls(trials, best, blob, tuple(trial.reason for trial in run.failures))


@contextlib.contextmanager
def interrupted_after(n_records: int | None) -> Iterator[None]:
    """Interrupt a search when its journal has so many records, or one write more."""
    append, n = Journal.append, 0

    def counted(self: Journal, records: Any) -> None:
        nonlocal n
        append(self, records)
        before, n = n, n + len(records)
        if n_records is not None and before < n_records <= n:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", counted)
        try:
            yield
        except KeyboardInterrupt:
            assert n_records is not None
            assert n >= n_records
        else:
            assert n_records is None


def begin(
    kind: str, data: ShardedDataset, run_dir: Path, client: Any, n_records: int | None = None
) -> None:
    """Search; interrupt it when so many records are in the journal, if a number is given."""
    workload, metric, flow = SEARCHES[kind]
    with interrupted_after(n_records):
        dagsel.optimize(
            optuna.create_study(study_name="attacked", direction=DIRECTION),
            workload(),
            data,
            space=space,
            flow=flow,
            metric=metric,
            client=client,
            run_dir=str(run_dir),
            deterministic=True,
        )


def go_on(kind: str, data: ShardedDataset, run_dir: Path, client: Any) -> Outcome:
    """Resume a search to its end."""
    workload, _, _ = SEARCHES[kind]
    run = dagsel.resume(str(run_dir), client, workload=workload(), space=space, data=data)
    return Outcome.of(run)


def repeat(kind: str, data: ShardedDataset, run_dir: Path, into: Path, client: Any) -> list[str]:
    """Replay a search; return how it differs from what is recorded."""
    workload, _, _ = SEARCHES[kind]
    parts: dict[str, Any] = {"workload": workload(), "space": space, "data": data}
    return dagsel.replay(str(run_dir), client, **parts, into=str(into)).record.notes


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """Raise a TimeoutError where the block takes too long."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"it hangs: {HANGS_AFTER_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANGS_AFTER_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def contents(folder: Path, *, but: Path | None = None) -> dict[str, bytes]:
    """Return all files of a folder, without those of one in it."""
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (but is None or not path.is_relative_to(but))
    }
