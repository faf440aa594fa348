"""Workers of real processes with a real limit on their memory: what a trial gets that needs more.

A unit that has run out of memory is tried once more with half the samples at once. If that does it,
the trial goes on like that, and a replay comes to the same bits; if not, the trial fails with the
numbers. The worker lives, and the other trials are trained as if nothing had been.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from distributed import Client

import dagsel
from dagsel.driver.mending import Mending
from dagsel.errors import ClusterError
from dagsel.execution.cluster import local_cluster
from dagsel.flows import Grid, RandomSearch
from dagsel.history.trial import TrialRecord
from dagsel.storage import RunDir, ShardedDataset

from .helpers import own_cluster, spawned_cluster

BATCH, MARK = 32, 9.0
ROOM_MB = 1_500  # for a unit


class Hungry(torch.nn.Module):
    """A layer that takes some memory for each sample, in training or in scoring."""

    def __init__(self, mb: int, mb_marked: int, mb_scored: int, mb_filled: int) -> None:
        super().__init__()
        self.mb_filled = mb_filled
        self.layer = torch.nn.Linear(4, 1)
        self.mb, self.mb_marked, self.mb_scored = mb, mb_marked, mb_scored

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mb = self.mb if self.training else self.mb_scored
        if self.training and (x[:, 0] == MARK).any():
            mb = self.mb_marked
        if self.mb_filled and self.training:
            filled = torch.ones(len(x), self.mb_filled, 1_000_000, dtype=torch.uint8)
            threading.Event().wait(60.0)  # until the nanny sees it
            del filled
        taken = torch.empty(len(x), mb, 1_000_000, dtype=torch.uint8)  # untouched: no real memory
        return self.layer(x) + 0.0 * taken.shape[0]


def workload(**more: Any) -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        model=lambda config: Hungry(
            config["mb"],
            config.get("mb_marked", 1),
            config.get("mb_scored", 1),
            config.get("mb_filled", 0),
        ),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters, config: torch.optim.Adam(parameters, lr=0.01),
        batch_size=BATCH,
        eval_batch_size=16,
        **more,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    x = np.random.default_rng(0).normal(size=(192, 4)).astype(np.float32)
    x[7, 0] = MARK
    url = tmp_path_factory.mktemp("data") / "data.zarr"
    return ShardedDataset.write(url, {"x": x, "y": x.sum(1, keepdims=True)}, n_shards=2)


def limit_memory() -> int:
    """Let this process take so much more address space than it has, and no more."""
    torch.nn.functional.mse_loss(torch.ones(9), torch.ones(9))  # with all that it imports
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM_MB * 10**6
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return os.getpid()


@pytest.fixture(scope="module")
def small() -> Iterator[Client]:
    with own_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
        client.run(limit_memory)
        yield client


def optimize(
    client: Client,
    data: ShardedDataset,
    run_dir: str,
    grid: dict[str, list[int]],
    *,
    worker_timeout: float = 60.0,
    **more: Any,
) -> dagsel.Run:
    return dagsel.optimize(
        optuna.create_study(),
        workload(**more),
        data,
        space=space_of(grid),
        flow=Grid(max_epochs=2),
        metric="loss",
        client=client,
        run_dir=run_dir,
        deterministic=True,
        worker_timeout=worker_timeout,
    )


def space_of(grid: dict[str, list[int]]) -> Any:
    return lambda trial: {name: trial.suggest_categorical(name, of) for name, of in grid.items()}


def by_mb(run: dagsel.Run, name: str = "mb") -> dict[int, TrialRecord]:
    return {trial.config[name]: trial for trial in run.record.trials.values()}


def test_a_unit_that_ran_out_is_tried_with_half_and_then_fails_its_trial_alone(
    small: Client, data: ShardedDataset, tmp_path: Path
) -> None:
    before, grid = small.run(os.getpid), {"mb": [1, 64, 160]}
    run = optimize(small, data, str(tmp_path / "run"), grid)
    trials = by_mb(run)
    assert small.run(os.getpid) == before  # no worker was lost
    assert [trials[mb].state for mb in (1, 64, 160)] == ["complete", "complete", "failed"]
    assert [len(trials[mb].epochs) for mb in (1, 64, 160)] == [2, 2, 0]
    assert [told.at_once for told in trials[64].ran_out] == [BATCH]
    reason = trials[160].reason
    assert reason.startswith("OutOfMemoryError: 5.1 GB were asked for in unit 1 of epoch 1 (32 sam")
    assert "2.6 GB were asked for in unit 1 of epoch 1 (16 samples at once), on worker" in reason
    assert "which has " in reason
    assert "smaller batch_size" in reason
    # It ran out in its first unit: from there on as one that has half of a batch at once.
    half = by_mb(optimize(small, data, str(tmp_path / "half"), grid, max_batch=BATCH // 2))
    assert not half[64].ran_out
    assert digests(half[64]) == digests(trials[64])
    assert digests(half[1]) != digests(trials[1])
    into = str(tmp_path / "again")
    with local_cluster(1) as cluster, Client(cluster, set_as_default=False) as roomy:
        again = dagsel.replay(
            run.run_dir, roomy, workload=workload(), space=space_of(grid), into=into
        )
    assert again.record.notes == []
    assert digests(by_mb(again)[64]) == digests(trials[64])


def test_batches_are_cut_from_the_unit_on_that_ran_out_in_a_replay_too(
    small: Client, data: ShardedDataset, tmp_path: Path
) -> None:
    grid = {"mb": [1], "mb_marked": [64], "mb_scored": [1, 128]}
    run = optimize(small, data, str(tmp_path / "run"), grid)
    trials = by_mb(run, "mb_scored")
    ran_out = {n: [told.unit[:1] + told.unit[2:] for told in trials[n].ran_out] for n in trials}
    orders = [run.record.order(trial, 1) or () for trial in (0, 1)]
    (marked,) = (s for s in range(2) if (data.shard(s)["x"][:, 0] == MARK).any())
    first, second = (("train", 1, order.index(marked)) for order in orders)
    assert first[2] == 1, "the unit before it is trained with whole batches"
    assert ran_out[1] == [first]
    assert ran_out[128][0] == second
    # The other worker may score the next epoch before it is known that this one ran out.
    scored = set(ran_out[128][1:])
    assert len(scored) == len(ran_out[128]) - 1, "none twice"
    assert ("evaluate", 1, 0) in scored
    assert scored <= {("evaluate", epoch, 0) for epoch in (1, 2)}
    assert {trial.state for trial in trials.values()} == {"complete"}
    halved = [(done.unit.kind, done.halved) for done in run.record.units if done.unit.trial == 1]
    assert ("evaluate", 1) in halved
    how = {"workload": workload(), "space": space_of(grid), "into": str(tmp_path / "again")}
    with local_cluster(1) as cluster, Client(cluster, set_as_default=False) as roomy:
        again = dagsel.replay(run.run_dir, roomy, **how)
        never = by_mb(optimize(roomy, data, str(tmp_path / "roomy"), grid), "mb_scored")
    assert again.record.notes == []
    assert [digests(trial) for trial in by_mb(again, "mb_scored").values()] == [
        digests(trial) for trial in trials.values()
    ]
    assert digests(never[1]) != digests(trials[1])


def test_a_driver_that_is_lost_between_the_attempts_goes_on_with_the_second(
    small: Client, data: ShardedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, url = {"mb": [64, 160]}, str(tmp_path / "run")

    def is_lost(*_: Any) -> None:
        raise ClusterError("the driver is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Mending, "_go_on", is_lost)
        with pytest.raises(ClusterError, match="the driver is lost"):
            optimize(small, data, url, grid)
    written = [entry for entry in RunDir(url).journal.read() if entry["is"] == "ran_out"]
    assert written, "it is not sent before it is written down"
    run = dagsel.resume(url, small, workload=workload(), space=space_of(grid))
    whole = by_mb(optimize(small, data, str(tmp_path / "whole"), grid))
    trials = by_mb(run)
    assert [trials[mb].state for mb in (64, 160)] == ["complete", "failed"]
    assert [len(trials[mb].ran_out) for mb in (64, 160)] == [1, 1]
    assert digests(trials[64]) == digests(whole[64])


def test_what_says_that_it_fits_nowhere_is_refused_and_the_others_go_on(
    small: Client, data: ShardedDataset, run_dir: str
) -> None:
    grid = {"mb": [1, 64]}
    run = optimize(
        small,
        data,
        run_dir,
        grid,
        memory=lambda config: 10**6 * config["mb"] ** 4,
        worker_timeout=2,
    )
    trials = by_mb(run)
    assert [trials[mb].state for mb in (1, 64)] == ["complete", "failed"]
    assert not trials[64].ran_out
    assert (
        "its units take 16,777,216,000,000 bytes of memory, and a worker has" in trials[64].reason
    )


@pytest.mark.slow
def test_a_unit_under_which_a_nanny_restarts_workers_for_their_memory_is_one_that_ran_out(
    data: ShardedDataset, run_dir: str
) -> None:
    grid = {"mb": [1], "mb_filled": [0, 80]}
    with spawned_cluster(2, "1 GB", silence_logs=60) as cluster:
        with Client(cluster, set_as_default=False) as client:
            run = optimize(client, data, run_dir, grid)
    trials = by_mb(run, "mb_filled")
    assert [trials[mb].state for mb in (0, 80)] == ["complete", "failed"]
    assert [told.unit.position for told in trials[80].ran_out] == [0]
    reason = trials[80].reason
    assert reason.startswith("OutOfMemoryError: memory ran out in unit 1 of epoch 1, on worker ")
    assert "which has 1.0 GB and had taken" in reason
    assert "Dask restarts a worker that takes nearly all of its memory limit" in reason


def peak() -> tuple[float, float]:
    """Return what this process takes and what it had taken at most, in MB."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(status[name].split()[0]) / 1000 for name in ("VmRSS", "VmHWM"))
    return now, most


@pytest.mark.slow
def test_a_unit_that_is_large_beside_its_worker_takes_twice_its_state(
    data: ShardedDataset, run_dir: str
) -> None:
    """Beside it there is neither the state that it began with, nor a gradient."""
    width, n_layers = 1000, 20

    def model(config: Any) -> torch.nn.Module:
        layers = (torch.nn.Linear(width, width) for _ in range(n_layers))
        return torch.nn.Sequential(torch.nn.Linear(4, width), *layers, torch.nn.Linear(width, 1))

    with spawned_cluster(1, "1 GB", silence_logs=60) as cluster:
        with Client(cluster, set_as_default=False) as client:
            client.run(torch.ones, 1)  # with all that it imports
            ((before, _),) = client.run(peak).values()
            run = dagsel.optimize(
                optuna.create_study(),
                dagsel.TorchWorkload(
                    model, torch.nn.functional.mse_loss, torch.optim.Adam, batch_size=BATCH
                ),
                data,
                space=lambda trial: {"seed": trial.suggest_int("seed", 0, 9)},
                flow=RandomSearch(max_epochs=2, n_trials=1),
                metric="loss",
                client=client,
                run_dir=run_dir,
            )
            ((_, most),) = client.run(peak).values()
    assert not run.failures
    state_mb = 3 * 4e-6 * n_layers * width**2
    assert 2.0 <= (most - before) / state_mb <= 2.3


def digests(trial: TrialRecord) -> list[str]:
    return [epoch.digest for epoch in trial.epochs]
