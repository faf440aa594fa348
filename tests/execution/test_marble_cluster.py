"""MARBLE's job sets take as long on a real cluster as in the simulator: 10% more if it is quiet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
from distributed import Client, LocalCluster

import dagsel
from dagsel.execution.cluster import local_cluster
from dagsel.flow import Flow
from dagsel.flows import JobQueue, Marble
from dagsel.flows.baselines import LSF
from dagsel.planning.scaling import Scaling
from dagsel.state import State
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.base import Config, Trained, Visit, never
from dagsel.workloads.gang.gang import Gang
from tests.benchmarks.papers.marble_sets import N_GPUS, Assumed, Job, choose, jobs_of, play

ASSUMED = Assumed()
SCALING = ASSUMED.scaling()
#: The sets of the paper are played so many times as fast, each job in four epochs.
FASTER = 20.0
SWITCH_S = 0.3  # of a cluster here


@dataclass(frozen=True)
class Sleeper(SyntheticWorkload):
    """Sleeps through an epoch as long as λ says; the other ranks wait for the first."""

    scaling: Mapping[str, Scaling] = field(default_factory=dict)

    def validate_gang(self, config: Config, size: int) -> None:
        """Let any number share a batch."""

    def train_gang(
        self,
        state: State | None,
        shard: Any,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
        gang: Gang,
    ) -> Trained:
        if state is None:
            gang.agree(False)
            return Trained(self.init(config, 0), 0, 0.0)
        speed = self.scaling[config["architecture"]].speedup(gang.size)
        faster = replace(self, seconds=self._seconds(config) / speed)
        trained = faster.train(state, shard, config, visit=visit, should_stop=should_stop)
        gang.agree(False)
        return trained


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    arrays = {"x": np.zeros((8, 1), np.float32)}
    url = str(tmp_path_factory.mktemp("data") / "one-shard.zarr")
    return ShardedDataset.write(url, arrays, n_shards=1)


@pytest.fixture(scope="module")
def node(data: ShardedDataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(N_GPUS) as cluster:
        # The first gang of a worker imports torch.
        jobs = [{"architecture": "VGG-16", "epochs": 1, "epoch_s": 0.0}]
        search(LSF(JobQueue()), jobs, cluster, data, str(tmp_path_factory.mktemp("first") / "run"))
        yield cluster


def search(
    flow: Flow, jobs: Sequence[Job], node: LocalCluster, data: ShardedDataset, run_dir: str
) -> dagsel.Run:
    workload = Sleeper(seconds=lambda config: config["epoch_s"], n_batches=40, scaling=SCALING)
    with Client(node, set_as_default=False) as client:
        return dagsel.optimize(
            optuna.create_study(direction="maximize"), workload, data,
            space=lambda trial: choose(trial, jobs), flow=flow, metric="value",
            client=client, run_dir=run_dir,
        )  # fmt: skip


def slowed(units: pd.DataFrame, simulated: pd.DataFrame) -> float:
    """Return how many times as long the machine took for an epoch as it should sleep in it."""
    both = units.merge(simulated, on=["kind", "trial", "epoch", "gang"]).query("kind == 'train'")
    times = (both["stop_x"] - both["start_x"]) / (both["stop_y"] - both["start_y"])
    return float(times.median())


#: Job sets and policies, and how much longer they may take. MARBLE_CASES=all runs all of them on a
#: machine that does nothing else, in three minutes.
CASES, SLACK = [(3, "marble")], 0.6
if os.environ.get("MARBLE_CASES") == "all":
    CASES, SLACK = [*CASES, (1, "marble"), (2, "marble"), (3, "lsf")], 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), CASES)
def test_the_makespan_is_the_simulators(
    number: int, name: str, node: LocalCluster, data: ShardedDataset, run_dir: str
) -> None:
    jobs = jobs_of(number, ASSUMED, faster=FASTER, n_epochs=4)
    queue = JobQueue()
    flow: Flow = LSF(queue) if name == "lsf" else Marble(queue, SCALING, switch_s=SWITCH_S)
    run = search(flow, jobs, node, data, run_dir)
    simulated = play(jobs, flow, SCALING, SWITCH_S)
    units = run.timeline()
    took_s, pace = units["stop"].max() - units["start"].min(), slowed(units, simulated.timeline())
    told = f"{took_s:.1f} s, simulated {simulated.seconds:.1f} s, epochs {pace:.2f} times as long"
    print(f"set {number}, {name}: {told}")
    assert 0.9 < took_s / (pace * simulated.seconds) < 1 + SLACK, told
    assert len(run.record.trials) == len(jobs)
