"""`cluster="cuda"`: a worker a GPU with its resources; clear words where something is missing.

Where there is no GPU a `LocalCluster` under dask-cuda's name takes the same arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
from distributed import LocalCluster
from torch.nn.functional import cross_entropy

import dagsel
from dagsel.errors import ClusterError
from dagsel.execution import cluster as module
from dagsel.execution import raising
from dagsel.execution.cluster import check_cluster, connect, local_cluster, workers_of
from dagsel.execution.process import check_gpu_resource, gpus_seen, why_no_gpu
from dagsel.flows import Grid
from dagsel.storage import ShardedDataset
from tests.conftest import Optimize
from tests.waiting import wait_until


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LocalCluster]]:
    """Put a cluster of two CPU workers under dask-cuda's name, and see which were made."""
    made: list[LocalCluster] = []

    class LocalCUDACluster(LocalCluster):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "n_workers": 0})
            self.scale(2)  # as the real one makes its workers
            self.sync(self._correct_state)
            made.append(self)

    stand_in = ModuleType("dask_cuda")
    stand_in.LocalCUDACluster = LocalCUDACluster  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dask_cuda", stand_in)
    monkeypatch.setattr(module, "check_gpus_here", lambda: None)
    yield made
    for cluster in made:
        cluster.close()


def test_it_is_not_made_beside_a_client(made: list[LocalCluster]) -> None:
    with pytest.raises(ClusterError, match="give no client"):
        check_cluster("127.0.0.1:1", "cuda")
    assert made == []


def test_a_search_runs_on_it_and_closes_it(
    optimize: Optimize, made: list[LocalCluster], digits: ShardedDataset
) -> None:
    workload = dagsel.TorchWorkload(
        lambda config: torch.nn.Linear(64, 10),
        cross_entropy,
        lambda parameters, config: torch.optim.SGD(parameters, lr=config["lr"]),
        batch_size=64,
        metrics={"accuracy": dagsel.metrics.accuracy},
    )
    run = optimize(
        workload=workload,
        data=digits,
        space=lambda trial: {"lr": trial.suggest_float("lr", 0.1, 1.0, log=True)},
        metric="accuracy",
        cluster="cuda",
    )
    assert run.best_value > 0.5
    (cluster,) = made
    assert cluster.status.name == "closed"
    n_told = sum("can use none there, so it trains on the CPU" in it for it in run.record.notes)
    assert n_told == (0 if torch.cuda.is_available() else 2)


def test_each_worker_has_both_resources(made: list[LocalCluster]) -> None:
    with connect(cluster="cuda") as client:
        workers = workers_of(client).values()
        assert [worker["resources"] for worker in workers] == [{"TRAIN": 1, "GPU": 1}] * 2
        assert {worker["host"] for worker in workers} == {"127.0.0.1"}


def test_its_workers_have_the_environment_of_the_moment(
    made: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copies of a process that may have begun long before."""

    def look() -> Any:
        import os

        return os.environ.get("DAGSEL_TEST_OF_WORKERS")

    with connect(cluster="cuda") as client:
        assert {*client.run(look).values()} == {None}
    monkeypatch.setenv("DAGSEL_TEST_OF_WORKERS", "now")
    with connect(cluster="cuda") as client:
        assert {*client.run(look).values()} == {"now"}


def test_without_dask_cuda_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask_cuda", None)
    with pytest.raises(ClusterError, match=r"pip install dagsel\[cuda\]"), connect(cluster="cuda"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("dask_cuda")
    stand_in.LocalCUDACluster = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dask_cuda", stand_in)
    with pytest.raises(ClusterError, match="needs a GPU on this machine"), connect(cluster="cuda"):
        pass


@pytest.mark.parametrize(
    ("n_gpus", "built_for", "visible", "reason"),
    [
        (2, "13.0", None, None),
        (1, "13.0", "0", None),
        (0, None, None, "this PyTorch is built without CUDA"),
        (0, "13.0", "", "CUDA_VISIBLE_DEVICES is '' and hides them"),
        (0, "13.0", None, "nvidia-smi"),
    ],
)
def test_why_there_is_none(
    n_gpus: int, built_for: str | None, visible: str | None, reason: str | None
) -> None:
    found = why_no_gpu(n_gpus, built_for, visible)
    assert (found is None) == (reason is None)
    assert reason is None or (found is not None and reason in found)


def test_a_worker_that_sees_a_gpu_must_say_so() -> None:
    check_gpu_resource({"GPU": 1, "TRAIN": 1}, 1)
    check_gpu_resource({"TRAIN": 1}, 0)
    for resources in ({}, {"TRAIN": 1.0}, {"GPU": 0.0}):
        with pytest.raises(ClusterError, match='--resources "GPU=1"'):
            check_gpu_resource(resources, 2)


def test_workers_of_a_plain_local_cluster_see_no_gpu() -> None:
    def look() -> Any:
        import os

        import torch

        return os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count()

    with local_cluster(1) as cluster, connect(cluster=cluster) as client:
        assert [*client.run(look).values()] == [("", 0)]


def test_gpus_are_counted_once_pytorch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_seen() == torch.cuda.device_count()
    monkeypatch.delitem(sys.modules, "torch")
    assert gpus_seen() == 0


def test_a_trial_after_which_cuda_is_of_no_use_fails_alone(
    optimize: Optimize, digits: ShardedDataset
) -> None:
    def model(config: Any) -> torch.nn.Module:
        import dagsel.execution.raising as on_worker

        def fail(*_: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

        def spoil(module: Any, inputs: Any) -> None:
            gpu = SimpleNamespace(is_initialized=lambda: True, mem_get_info=fail, empty_cache=fail)
            on_worker.cuda_here = lambda: gpu
            fail()

        module = torch.nn.Linear(64, 10)
        if config["spoils"]:
            module.register_forward_pre_hook(spoil)
        return module

    workload = dagsel.TorchWorkload(
        model, cross_entropy, lambda parameters, config: torch.optim.SGD(parameters, lr=0.1),
        batch_size=64,
    )  # fmt: skip
    with local_cluster(1) as cluster:
        run = optimize(
            study=optuna.create_study(),
            workload=workload,
            data=digits,
            space=lambda trial: {"spoils": trial.suggest_categorical("spoils", [True, False])},
            flow=Grid(max_epochs=2),
            metric="loss",
            cluster=cluster,
        )
    states = {trial.config["spoils"]: trial.state for trial in run.record.trials.values()}
    assert states == {True: "failed", False: "complete"}
    assert any("restarts, since CUDA refuses all" in note for note in run.record.notes)


def test_a_search_gives_a_gpus_memory_back_at_its_end(
    optimize: Optimize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other libraries on the same workers want it, and PyTorch would keep it."""
    emptied: list[int] = []
    gpu = SimpleNamespace(
        is_initialized=lambda: True, mem_get_info=lambda: (10**10, 10**10),
        memory_reserved=lambda: 0, memory_allocated=lambda: 0,
        empty_cache=lambda: emptied.append(1),
    )  # fmt: skip
    monkeypatch.setattr(raising, "cuda_here", lambda: gpu)
    with LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        optimize(cluster=cluster)
        wait_until(lambda: emptied == [1], "the cache is emptied")
