"""Workers are killed all the time: no trial fails that does no harm, and one that does fails.

ATTACK_SECONDS says for how long there is work: some seconds without it, a minute in the long form.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cloudpickle
import pytest
from distributed import Client, LocalCluster, SchedulerPlugin

import dagsel
from dagsel.execution.cluster import close
from dagsel.flows import RandomSearch
from dagsel.state import State
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize

STORM_S = float(os.environ.get("ATTACK_SECONDS", "12"))


class Poison(SyntheticWorkload):
    """Trial 0 ends its process in its training, every time."""

    def train(self, state: State, *args: Any, visit: Any, **options: Any) -> Any:
        if visit.trial == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(state, *args, visit=visit, **options)


@contextmanager
def cluster_of(n_workers: int) -> Iterator[LocalCluster]:
    cluster = LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        silence_logs=50,
    )
    yield cluster
    close(cluster)


def listen(cluster: LocalCluster, plugin: SchedulerPlugin) -> None:
    assert cluster.scheduler is not None
    cluster.scheduler.add_plugin(plugin)


def is_training(key: Any) -> bool:
    return isinstance(key, tuple) and key[0].startswith("train-")


class Losses(SchedulerPlugin):
    """Notes the workers that go."""

    def __init__(self, lost: list[str]) -> None:
        self.lost = lost

    def remove_worker(self, scheduler: Any, worker: str, **rest: Any) -> None:
        self.lost.append(worker)


class Hunter(SchedulerPlugin):
    """Kills the worker of trial 0's first unit, so many times, so long after it was sent there."""

    def __init__(self, cluster: LocalCluster, *, kills: int, after_s: float) -> None:
        self.cluster, self.left, self.after_s = cluster, kills, after_s

    def transition(self, key: Any, start: str, finish: str, *args: Any, **rest: Any) -> None:
        is_first = is_training(key) and key[1:] == (0, 1, 0)
        if is_first and finish == "processing" and self.left:
            self.left -= 1
            scheduler: Any = self.cluster.scheduler
            pid = scheduler.tasks[key].processing_on.pid
            asyncio.get_running_loop().call_later(self.after_s, os.kill, pid, signal.SIGKILL)


class Storm(SchedulerPlugin):
    """Kills a worker's process after every second unit of training that is done, whatever it runs.

    Three workers that are not hit take three kills a second so, for units of half a second. A slow
    machine has as many, and as much longer between them: its workers come back to be hit at work.
    A unit that is done again, since the worker that had its state was hit, does not count again.
    """

    def __init__(self, cluster: LocalCluster, *, seed: int) -> None:
        self.cluster, self.chance = cluster, random.Random(seed)
        self.done: set[tuple[int, ...]] = set()  # units, once each
        self.n_killed = 0

    def transition(self, key: Any, start: str, finish: str, *args: Any, **rest: Any) -> None:
        if is_training(key) and finish == "memory" and key[1:] not in self.done:
            self.done.add(key[1:])
            if len(self.done) % 2 == 0:
                after_s = self.chance.uniform(0.0, 0.5)
                asyncio.get_running_loop().call_later(after_s, self._kill)

    def _kill(self) -> None:
        nannies = list(self.cluster.workers.values())
        pids = [pid for nanny in nannies if (pid := getattr(nanny, "pid", None))]
        if pids:
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(pids), signal.SIGKILL)
                self.n_killed += 1


def check_timeline(run: dagsel.Run) -> None:
    frame = run.timeline()
    visits = frame[["kind", "trial", "epoch", "position"]]
    assert not visits.duplicated().any()
    assert (frame.attempts >= 1).all()
    assert (frame.lost_seconds >= 0).all()


@pytest.mark.parametrize("n_workers", [2, 3] if STORM_S >= 60 else [3])
def test_a_storm_fails_no_innocent_trial(
    n_workers: int, optimize: Optimize, digits: ShardedDataset
) -> None:
    # Units are so long that most are hit, and the first ones in a row.
    workload = SyntheticWorkload(seconds=0.5, n_batches=5)
    n_trials = round(STORM_S / 3)
    flow = RandomSearch(max_epochs=2, n_trials=n_trials)
    with cluster_of(n_workers) as cluster, Client(cluster, set_as_default=False) as client:
        storm = Storm(cluster, seed=n_workers)
        listen(cluster, storm)
        run = optimize(flow, workload=workload, data=digits, client=client)
    assert run.failures == []
    assert storm.n_killed > 3 * n_trials  # each trains eight units
    check_timeline(run)
    frame = run.timeline()
    assert len(frame) == n_trials * 2 * digits.n_shards * 2
    assert frame.attempts.sum() > len(frame)
    assert frame.lost_seconds.sum() > 0


@pytest.mark.parametrize(("kills", "after_s"), [(5, 0.0), (4, 0.3)])
def test_chance_may_kill_the_workers_of_one_unit_in_a_row(
    kills: int, after_s: float, optimize: Optimize
) -> None:
    flow = RandomSearch(max_epochs=2, n_trials=3)
    workload = SyntheticWorkload(seconds=0.6, n_batches=2)
    with cluster_of(2) as cluster, Client(cluster, set_as_default=False) as client:
        hunter = Hunter(cluster, kills=kills, after_s=after_s)
        listen(cluster, hunter)
        run = optimize(flow, workload=workload, client=client)
    assert run.failures == []
    assert hunter.left == 0


def test_a_poison_trial_fails_and_costs_at_most_six_workers(optimize: Optimize) -> None:
    flow = RandomSearch(max_epochs=2, n_trials=4)
    workload = Poison(seconds=0.05, n_batches=2)
    lost: list[str] = []
    with cluster_of(2) as cluster, Client(cluster, set_as_default=False) as client:
        listen(cluster, Losses(lost))
        run = optimize(flow, workload=workload, client=client)
        n_lost = len(lost)
    assert [trial.number for trial in run.failures] == [0]
    assert "workers were lost while" in run.failures[0].reason
    assert n_lost <= 6, lost
    check_timeline(run)


def test_a_poison_trial_fails_in_a_storm_and_no_other(optimize: Optimize) -> None:
    flow = RandomSearch(max_epochs=2, n_trials=3)
    workload = Poison(seconds=0.2, n_batches=2)
    with cluster_of(3) as cluster, Client(cluster, set_as_default=False) as client:
        listen(cluster, Storm(cluster, seed=9))
        run = optimize(flow, workload=workload, client=client)
    assert [trial.number for trial in run.failures] == [0]


cloudpickle.register_pickle_by_value(sys.modules[__name__])
