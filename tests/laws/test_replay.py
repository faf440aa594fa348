"""Replay and determinism: the same weights again, compared by hash, over seeds (law 7).

``REPLAY_SEEDS`` says how many; `make replay` runs ten.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import optuna
import pytest
import torch
from distributed import Client
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import dagsel
from dagsel.execution.cluster import close, local_cluster
from dagsel.flow import Flow
from dagsel.flows import ASHA, PBT, RandomSearch, Range
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

SEEDS = range(int(os.environ.get("REPLAY_SEEDS", "1")))


def workload() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        lambda config: torch.nn.Sequential(
            torch.nn.Linear(64, 24), torch.nn.BatchNorm1d(24), torch.nn.Dropout(0.2),
            torch.nn.ReLU(), torch.nn.Linear(24, 10),
        ),
        torch.nn.functional.cross_entropy,
        lambda parameters, config: torch.optim.Adam(parameters, config["lr"]),
        batch_size=32,
        lr_scheduler=schedule,
        metrics={"accuracy": dagsel.metrics.accuracy},
    )  # fmt: skip


def schedule(optimizer: torch.optim.Optimizer, config: Any) -> Any:
    if config["lr"] < 3e-3:
        return ExponentialLR(optimizer, 0.9)
    return ReduceLROnPlateau(optimizer, "max", patience=0, threshold=0.05)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}


def search(
    client: Client, data: ShardedDataset, run_dir: Path, flow: Flow, seed: int, **options: Any
) -> dagsel.Run:
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
    )
    return dagsel.optimize(
        study, workload(), data, space=space, flow=flow, metric="accuracy", client=client,
        run_dir=str(run_dir), seed=seed, **options,
    )  # fmt: skip


def fingerprint(run: dagsel.Run) -> tuple[str, dict[tuple[int, int], tuple[str, Any]]]:
    """Hash of the best state, and of each epoch the checksum of its state and its metrics."""
    best = run.best
    blob, _ = run.run_dir.states.load(best.trial, best.epoch, best.position)
    epochs = {
        (trial.number, epoch.epoch): (epoch.digest, dict(epoch.metrics))
        for trial in run.record.trials.values()
        for epoch in trial.epochs
    }
    assert all(digest for digest, _ in epochs.values())
    return hashlib.sha256(blob).hexdigest(), epochs


FLOWS: dict[str, Callable[[], Flow]] = {
    "ASHA": lambda: ASHA(max_epochs=4, n_trials=8, reduction_factor=2),
    "PBT": lambda: PBT(max_epochs=3, n_trials=4, mutations={"lr": Range(1e-4, 1e-1, log=True)}),
}


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_gives_the_same_weights_and_decisions(
    name: str, seed: int, client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    run = search(client, digits, tmp_path / "run", FLOWS[name](), seed)
    again = dagsel.replay(
        str(tmp_path / "run"), client, workload=workload(), space=space, into=str(tmp_path / "2")
    )
    assert again.record.notes == []
    assert fingerprint(again) == fingerprint(run)
    ends = [(t.number, t.state, len(t.epochs)) for t in run.record.trials.values()]
    assert ends == [(t.number, t.state, len(t.epochs)) for t in again.record.trials.values()]
    assert (
        again.record.visits().items()
        >= {
            place: visits
            for place, visits in run.record.visits().items()
            if place[1] <= len(run.record.trials[place[0]].epochs)
        }.items()
    )


SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def clients() -> Any:
    """Clients of clusters of these sizes, whose workers may be killed time and again."""
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}):
        clusters = [local_cluster(n) for n in SIZES]
        clients = [Client(cluster, set_as_default=False) for cluster in clusters]
        yield clients
        for client, cluster in zip(clients, clusters, strict=True):
            client.close()
            close(cluster)


def test_a_replay_has_what_trials_were_drawn_with(
    client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    def bound(trial: optuna.Trial) -> dict[str, Any]:
        x = trial.suggest_float("x", 0.0, 1.0)
        trial.set_constraint("low", x - 0.6)
        return {"x": x, "constant": trial.user_attrs.get("constant", 1)}

    study = optuna.create_study(direction="maximize")
    study.enqueue_trial({"x": 0.5}, user_attrs={"constant": 7})
    parts: Any = (SyntheticWorkload(), digits)
    how: Any = {"space": bound, "metric": "value", "client": client, "run_dir": tmp_path / "run"}
    run = dagsel.optimize(study, *parts, flow=RandomSearch(max_epochs=2, n_trials=6), **how)
    again = dagsel.replay(
        run.run_dir.url, client, workload=parts[0], space=bound, into=str(tmp_path / "again")
    )
    assert again.record.notes == []
    assert again.best.trial == run.best.trial

    def about(of: dagsel.Run) -> list[Any]:
        return [(t.params, t.config, t.is_feasible) for t in of.record.trials.values()]

    assert about(again) == about(run)
    assert about(again)[0][1] == {"x": 0.5, "constant": 7}
    assert {feasible for *_, feasible in about(run)} == {True, False}
    loaded = dagsel.load(again.run_dir.url).record.trials.values()
    assert [trial.config["constant"] for trial in loaded] == [7, 1, 1, 1, 1, 1]
    other: Any = lambda trial: bound(trial) | {"constant": 2}  # noqa: E731
    unlike = dagsel.replay(
        run.run_dir.url, client, workload=parts[0], space=other, into=str(tmp_path / "other")
    )
    assert any("trial 0: the space makes" in note for note in unlike.record.notes)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deterministic_run_gives_the_same_weights_on_any_cluster(
    seed: int, clients: list[Client], digits: ShardedDataset, tmp_path: Path
) -> None:
    found = []
    for n_workers, client in zip(SIZES, clients, strict=True):
        client.wait_for_workers(n_workers, timeout=60)  # one was killed with the seed before
        killed: list[int] = []

        def kill(
            study: optuna.Study, trial: Any, client: Client = client, killed: Any = killed
        ) -> None:
            if not killed:  # one worker dies once the first trial has ended
                killed += [info["pid"] for info in client.run(_about).values()][:1]
                os.kill(killed[0], signal.SIGKILL)

        run = search(
            client, digits, tmp_path / str(n_workers), RandomSearch(2, n_trials=5, n_concurrent=3),
            seed, deterministic=True, callbacks=[kill] if n_workers > 1 else [],
        )  # fmt: skip
        found.append(fingerprint(run))
    assert found[0] == found[1] == found[2]
    orders = [RunDir(str(tmp_path / str(n))).about()["deterministic"] for n in SIZES]
    assert orders == [True] * 3


def _about() -> dict[str, int]:
    return {"pid": os.getpid()}
