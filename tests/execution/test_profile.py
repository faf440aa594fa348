"""Profiles: measured on real workers or learnt from runs, near the stated λ, kept, errors first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import optuna
import pytest
import torch
from distributed import Client, LocalCluster, Worker
from sklearn.linear_model import SGDClassifier

import dagsel
from dagsel.errors import (
    ClusterError,
    DatasetFormatError,
    NoWorkersError,
    SearchError,
    WorkloadError,
)
from dagsel.execution import timing as module
from dagsel.execution.allocator import prepare_allocator
from dagsel.execution.cluster import close
from dagsel.execution.run_spec import EXECUTOR
from dagsel.flow import Ask, Asked, Decision, Event, Finish, Reported, Stop, Train
from dagsel.flows import JobQueue, Marble
from dagsel.planning.scaling import Scaling
from dagsel.profiling import Profile, architecture_of, stored_scaling
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.profiles import write_profile
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.base import Trained
from dagsel.workloads.gang.gang import Gang
from tests.driver.scripted import Scripted

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: No client at all: whoever uses it is told that no scheduler is there.
NOWHERE: Any = object()


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalCluster]:
    cluster = two_workers()
    yield cluster
    close(cluster)


def two_workers() -> LocalCluster:
    return LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    )


@pytest.fixture
def data(tmp_path: Path) -> ShardedDataset:
    return write(tmp_path)


def write(folder: Path) -> ShardedDataset:
    x = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    arrays = {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}
    return ShardedDataset.write(str(folder / "data"), arrays, n_shards=4, overwrite=True)


def torch_workload(batch_size: int = 16) -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        lambda config: torch.nn.Linear(8, config.get("classes", 2)),
        torch.nn.functional.cross_entropy,
        lambda parameters, config: torch.optim.Adam(parameters, lr=config.get("lr", 1e-3)),
        batch_size=batch_size,
    )


def test_a_torch_gang_is_measured_and_kept(pair: LocalCluster, data: ShardedDataset) -> None:
    workload = torch_workload()
    profile = dagsel.profile(workload, {}, data, cluster=pair, n_batches=6, warmup=2)
    assert [timing.n_workers for timing in profile.timings] == [1, 2]
    for timing in profile.timings:
        assert timing.batch_s > 0
        assert timing.samples_per_s == pytest.approx(16 / timing.batch_s)
        assert 0 <= timing.memory_bytes < 1 << 30
    one, two = profile.timings
    assert profile.scaling.speedups == {1: 1.0, 2: one.batch_s / two.batch_s}
    assert profile.best in (1, 2)
    assert profile.architecture == architecture_of(workload, {"lr": 0.5})
    assert "samples/s" in repr(profile)
    assert profile._repr_html_().count("<tr>") == 3

    assert Profile.load(data, profile.architecture) == profile
    again = dagsel.profile(workload, {"lr": 1.0}, data.url, (2,), client=NOWHERE, within=0.5)
    assert again.timings == profile.timings
    assert again.best == profile.scaling.best(2, within=0.5)


def test_the_speedup_is_near_the_stated_one(pair: LocalCluster, data: ShardedDataset) -> None:
    workload = SyntheticWorkload(
        seconds=0.6, n_batches=20, speedup=lambda config, n: {1: 1.0, 2: 1.6}[n]
    )
    profile = dagsel.profile(workload, {}, data, cluster=pair, n_batches=15)
    assert profile.scaling.speedup(2) == pytest.approx(1.6, rel=0.25)
    assert profile.timings[0].batch_s == pytest.approx(0.03, rel=0.5)


def trained_on(
    gangs: tuple[int, ...], data: ShardedDataset, pair: LocalCluster, run_dir: Path, seconds: float
) -> dagsel.Run:
    """Train one trial for an epoch on each of these numbers of workers."""

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1, gang=gangs[0])]
            case Reported(0, epoch) if epoch < len(gangs):
                return [Train(0, 1, gang=gangs[epoch])]
            case Reported():
                return [Stop(0, "the end", "complete"), Finish()]
        return []

    workload = SyntheticWorkload(seconds=seconds, speedup=lambda config, n: 1.6)
    return dagsel.optimize(
        optuna.create_study(), workload, data, flow=Scripted([Ask(1)], answer), metric="loss",
        space=lambda trial: {"model": trial.suggest_categorical("model", ["vgg"])},
        cluster=pair, run_dir=str(run_dir),
    )  # fmt: skip


def test_the_units_of_runs_are_measurements_too(
    pair: LocalCluster, data: ShardedDataset, tmp_path: Path
) -> None:
    alone = trained_on((1,), data, pair, tmp_path / "1", 0.01)
    both = trained_on((1, 2), data, pair, tmp_path / "2", 0.6)
    for by, name in ((None, architecture_of(alone.given_workload, {})), ("model", "vgg")):
        (profile,) = Profile.learnt(both, by=by).values()
        assert profile.architecture == name
        # 1.6 where nothing else runs, which makes the gangs' units longer.
        assert 1.1 < profile.scaling.speedup(2) < 1.9
        assert profile.fit is not None
        assert (profile.fit.n, profile.fit.gangs) == (7, (1, 2))
        assert 0 < profile.fit.error < 0.4
        assert "learnt from 7 units" in repr(profile)
        profile.save(data)
        assert Profile.load(data, name) == profile
        Marble(JobQueue(), {name: profile.scaling}, by="model")
    (pooled,) = Profile.learnt(alone, both).values()
    assert pooled.fit is not None
    assert pooled.fit.n == 11

    with pytest.raises(SearchError, match="of 4 units no architecture"):
        Profile.learnt(alone)
    with pytest.raises(SearchError, match="has no 'net'"):
        Profile.learnt(both, by="net")
    (tmp_path / "others").mkdir()
    elsewhere = trained_on((1,), write(tmp_path / "others"), pair, tmp_path / "3", 0.01)
    with pytest.raises(SearchError, match="several data sets"):
        Profile.learnt(both, elsewhere)


def test_what_is_kept_is_measured_again_only_where_it_does_not_do(
    pair: LocalCluster, tmp_path: Path
) -> None:
    data, name = write(tmp_path), "mine"
    workload = SyntheticWorkload(n_batches=30)
    Profile.given({1: 1, 2: 64.0}, architecture=name).save(data)

    def measure(*gangs: int, **options: Any) -> Profile:
        return dagsel.profile(workload, {}, data, gangs, architecture=name, n_batches=4, **options)

    assert measure(2, client=NOWHERE).scaling.speedup(2) == 64.0
    with pytest.raises(ClusterError, match="client must be a Dask client"):
        measure(2, 3, client=NOWHERE)
    with pytest.raises(ClusterError, match="client must be a Dask client"):
        measure(2, client=NOWHERE, remeasure=True)
    assert measure(1, cluster=pair, remeasure=True).timings
    assert Profile.load(data, name).scaling.speedups.keys() == {1}

    (tmp_path / "data" / data.manifest.folder / "profiles" / f"{name}.json").write_text("{")
    with pytest.raises(DatasetFormatError, match=r"'mine' is damaged.*remeasure=True"):
        measure(1, client=NOWHERE)
    with pytest.raises(SearchError, match=r"'other'.*there: mine"):
        Profile.load(data, "other")
    with pytest.raises(SearchError, match="there: none"):
        Profile.load(write(tmp_path), name)


def test_what_is_missing_joins_what_is_kept(pair: LocalCluster, data: ShardedDataset) -> None:
    workload = SyntheticWorkload(n_batches=30)

    def profile(gangs: tuple[int, ...] | None, **where: Any) -> Profile:
        return dagsel.profile(workload, {}, data, gangs, architecture="mine", n_batches=4, **where)

    Profile.given({1: 1, 4: 3.0}, architecture="mine").save(data)
    assert profile(None).scaling.speedups == {1: 1, 4: 3.0}  # as no cluster is there to ask
    by_default = profile(None, cluster=pair)
    assert by_default.scaling.speedups.keys() == {1, 2, 4}
    assert by_default.scaling.speedups[4] == 3.0
    assert [timing.n_workers for timing in by_default.timings] == [1, 2]
    assert profile(None, cluster=pair) == by_default  # to the last bit: nothing was measured

    replace(by_default, scaling=Scaling({1: 1, 4: 3.0}), timings=by_default.timings[:1]).save(data)
    measured = profile((2,), cluster=pair)
    assert measured.scaling.speedups.keys() == {1, 2, 4}
    assert [timing.n_workers for timing in measured.timings] == [1, 2]
    replace(measured, scaling=Scaling({1: 1, 4: 3.0}), device="another").save(data)
    assert profile((2,), cluster=pair).scaling.speedups.keys() == {1, 2}


def test_workers_are_timed_as_those_of_a_run(
    data: ShardedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    def prepare(worker: Worker) -> None:
        prepare_allocator(worker)
        told.append(EXECUTOR in worker.executors)

    monkeypatch.setattr(module, "prepare_allocator", prepare)
    with Client(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0",
        set_as_default=False,
    ) as client:  # fmt: skip
        dagsel.profile(SyntheticWorkload(n_batches=30), {}, data, (1,), client=client)
        assert told == [True]
        monkeypatch.setattr(module, "gpus_seen", lambda: 2)
        with pytest.raises(ClusterError, match="sees 2 GPUs and has no resource GPU"):
            dagsel.profile(SyntheticWorkload(), {}, data, (1,), client=client, remeasure=True)


def test_a_search_goes_on_without_a_profile_that_it_cannot_read(
    data: ShardedDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workload = SyntheticWorkload()
    name = architecture_of(workload, {})
    Profile.given({1: 1, 2: 1.5}, architecture=name).save(data)
    found = stored_scaling(data, workload, {})
    assert found is not None
    assert found.speedups == {1: 1, 2: 1.5}
    write_profile(data, name, b'{"format": "dagsel.profile", "version": 2, "profile": {}}')
    assert stored_scaling(data, workload, {}) is None
    assert "are not used" in caplog.text

    def denied(data: ShardedDataset) -> list[str]:
        raise PermissionError("not for you")

    monkeypatch.setattr("dagsel.profiling.profile_names", denied)
    assert stored_scaling(data, workload, {}) is None
    assert "not for you" in caplog.text


def test_architectures_are_told_apart_by_shapes_and_batch() -> None:
    plain = architecture_of(torch_workload(), {})
    assert architecture_of(torch_workload(), {"lr": 0.3}) == plain
    assert architecture_of(torch_workload(), {"classes": 3}) != plain
    assert architecture_of(torch_workload(batch_size=32), {}) != plain


def test_a_shard_of_few_batches_is_repeated(pair: LocalCluster, data: ShardedDataset) -> None:
    profile = dagsel.profile(torch_workload(40), {}, data, (1,), cluster=pair, n_batches=30)
    (timing,) = profile.timings
    assert timing.samples_per_s == pytest.approx(40 / timing.batch_s)


@dataclass(frozen=True)
class Untrainable(SyntheticWorkload):
    """Says so if anything is trained."""

    def train(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("it trained")


@pytest.mark.parametrize(
    ("workload", "gangs", "options", "error", "says"),
    [
        (lambda: Untrainable(), (1, 3), {}, ClusterError, "gang of 3.* cluster has 2"),
        (lambda: dagsel.SklearnWorkload(SGDClassifier), (2,), {}, WorkloadError, "gang"),
        (lambda: torch_workload(1), (2,), {}, WorkloadError, "batch"),
        (lambda: Untrainable(), (0,), {}, SearchError, "gangs must be"),
        (lambda: Untrainable(), (2,), {"n_batches": 0}, SearchError, "n_batches must be"),
        (lambda: Untrainable(), (2,), {"warmup": 0}, SearchError, "warmup must be"),
        (lambda: Untrainable(), (2,), {"within": 1.5}, SearchError, "within must be"),
        (lambda: Untrainable(), (2,), {"architecture": "a/b"}, SearchError, "name"),
        (lambda: Untrainable(seconds=-1.0), (2,), {}, WorkloadError, "seconds"),
    ],
)
def test_bad_input_is_told_before_anything_is_trained(
    pair: LocalCluster,
    data: ShardedDataset,
    workload: Callable[[], Any],
    gangs: tuple[int, ...],
    options: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        dagsel.profile(workload(), {}, data, gangs, cluster=pair, **options)


@pytest.mark.parametrize("within", [2, -0.1, 1.0, float("nan")])
def test_a_profile_gives_up_a_share_of_the_speed(within: float) -> None:
    with pytest.raises(SearchError, match="within must be"):
        Profile.given({1: 1, 2: 1.5}, within=within)


def test_a_visit_of_one_batch_cannot_be_timed(pair: LocalCluster, data: ShardedDataset) -> None:
    with pytest.raises(WorkloadError, match="too few batches"):
        dagsel.profile(SyntheticWorkload(), {}, data, (1,), cluster=pair)


@dataclass(frozen=True)
class Unlucky(SyntheticWorkload):
    """Rank 1 fails, or takes its worker down."""

    mishap: str = ""

    def train_gang(self, *args: Any, gang: Gang, **options: Any) -> Trained:
        if gang.rank == 1 and self.mishap == "death":
            os._exit(1)
        if gang.rank == 1 and self.mishap == "error":
            raise WorkloadError("rank 1 has no mind to")
        return super().train_gang(*args, gang=gang, **options)


def test_what_a_rank_raises_is_what_the_caller_gets(
    pair: LocalCluster, data: ShardedDataset
) -> None:
    with pytest.raises(WorkloadError, match="no mind to"):
        dagsel.profile(Unlucky(n_batches=30, mishap="error"), {}, data, (2,), cluster=pair)


def test_a_lost_worker_is_told(data: ShardedDataset) -> None:
    cluster = two_workers()
    try:
        with pytest.raises(ClusterError, match="was lost"):
            dagsel.profile(Unlucky(n_batches=30, mishap="death"), {}, data, (2,), cluster=cluster)
    finally:
        close(cluster)


def test_a_cluster_without_workers_is_told(data: ShardedDataset) -> None:
    with (
        LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        with pytest.raises(NoWorkersError, match="no workers"):
            dagsel.profile(SyntheticWorkload(), {}, data, (1,), client=client)
