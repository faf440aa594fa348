"""A trial that has trained on nothing is never complete, and a loss of NaN is never silent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client
from sklearn.linear_model import SGDClassifier

import dagsel
from dagsel.errors import WorkloadError
from dagsel.flows import Grid, RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing import WorkloadSuite
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.testing.workloads import in_gang
from dagsel.workloads import Visit
from dagsel.workloads.base import checks
from dagsel.workloads.gang.gang import Gang
from tests.conftest import Optimize

N_SHARDS = 2
N_TRAIN = 81  # shards of 41 and 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    x = np.random.default_rng(0).normal(size=(101, 4)).astype(np.float32)
    arrays = {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}
    url = str(tmp_path_factory.mktemp("data") / "data.zarr")
    data = ShardedDataset.write(url, arrays, n_shards=N_SHARDS, validation=0.2)
    assert data.n_train == N_TRAIN
    return data


def torch_workload(**options: Any) -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        **{
            "model": lambda config: torch.nn.Linear(4, 2),
            "loss": torch.nn.functional.cross_entropy,
            "optimizer": lambda parameters, config: torch.optim.SGD(parameters, lr=0.1),
            "batch_size": 8,
            "metrics": {"accuracy": dagsel.metrics.accuracy},
            **options,
        }
    )


@pytest.fixture
def search(optimize: Optimize, data: ShardedDataset) -> Optimize:
    flow = RandomSearch(max_epochs=1, n_trials=1)
    return partial(optimize, flow=flow, data=data, metric="accuracy")


def test_a_batch_larger_than_a_shard_is_refused_before_anything_starts(
    search: Optimize, data: ShardedDataset, run_dir: str
) -> None:
    workload = torch_workload(batch_size=41, drop_last=True)
    with pytest.raises(WorkloadError, match=r"41 .*drop_last.* 2 training shards has 40 .* 40"):
        search(workload=workload, client="tcp://127.0.0.1:9")
    assert not Path(run_dir).exists()
    checks(torch_workload(batch_size=40, drop_last=True), data.manifest)({})
    checks(torch_workload(batch_size=41), data.manifest)({})  # without drop_last it is trained


def test_of_the_configurations_only_those_fail_whose_batch_is_too_large(
    search: Optimize, client: Client
) -> None:
    run = search(
        workload=torch_workload(batch_size=lambda config: config["batch"], drop_last=True),
        space=lambda trial: {"batch": trial.suggest_categorical("batch", [8, 41])},
        flow=Grid(max_epochs=1),
        client=client,
    )
    assert {t.config["batch"]: t.state for t in run.record.trials.values()} == {
        8: "complete",
        41: "failed",
    }
    (failed,) = run.failures
    assert failed.reason.startswith("WorkloadError: batch_size is 41 with drop_last=True")


def consumes_nothing(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    """A loop whose body was forgotten."""


def consumes_one(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    for inputs, targets in batches:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        batches.log(loss)
        break


def without_a_loss(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def empty(batch: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["x"][:0], batch["y"][:0]


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, target, reduction="sum")


@dataclass(frozen=True)
class Own(SyntheticWorkload):
    """A user's workload that changes what it says of a unit."""

    change: Callable[[Any], Any] = lambda trained: trained

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(super().train(*args, **kwargs))


def no_samples(trained: Any) -> Any:
    return replace(trained, n_samples=0)


def nan_loss(trained: Any) -> Any:
    return replace(trained, loss=math.nan)


def no_loss(trained: Any) -> Any:
    return replace(trained, loss=None)


@pytest.mark.parametrize(
    ("make", "metric", "says"),
    [
        (lambda: torch_workload(train_fn=consumes_nothing), "accuracy", "none of the 4"),
        (lambda: torch_workload(input_fn=empty, loss=summed), "accuracy", "input_fn"),
        (lambda: Own(change=no_samples), "value", "none of the 4"),
    ],
)
def test_a_unit_that_consumes_nothing_fails_its_trial_by_name(
    search: Optimize, client: Client, make: Any, metric: str, says: str
) -> None:
    # One trial of two, so that the search goes on to its end.
    with pytest.raises(Exception, match=f"(?s)NothingTrainedError.*{says}"):
        search(workload=make(), metric=metric, client=client).best  # noqa: B018


def test_a_loop_that_breaks_off_has_consumed_its_batch(data: ShardedDataset) -> None:
    workload = torch_workload(train_fn=consumes_one)
    state = workload.init({}, 0)
    trained = workload.train(state, workload.prepare(data.shard(0)), {}, visit=Visit(0, 0, 1, 0))
    assert (trained.n_samples, trained.finished, trained.losses.n) == (8, True, 1)
    assert trained.loss is not None
    assert math.isfinite(trained.loss)


def test_a_unit_that_is_stopped_before_its_first_batch_is_no_failure(
    data: ShardedDataset,
) -> None:
    workload = torch_workload(input_fn=lambda batch, config: (batch["x"], batch["y"]))
    state, shard = workload.init({}, 0), workload.prepare(data.shard(0))
    first = workload.train(state, shard, {}, visit=Visit(0, 0, 1, 0), should_stop=lambda: True)
    assert not first.finished
    rest = workload.train(first.state, shard, {}, visit=Visit(0, 0, 1, 0))
    assert (rest.n_samples, rest.finished) == (41, True)


@pytest.mark.parametrize(
    ("make", "metric", "warns"),
    [
        (lambda: torch_workload(train_fn=without_a_loss), "accuracy", True),
        (lambda: Own(change=nan_loss), "value", True),
        (lambda: Own(change=no_loss), "value", False),
        (lambda: torch_workload(), "accuracy", False),
        (lambda: dagsel.SklearnWorkload(SGDClassifier(), classes=[0, 1]), "accuracy", False),
    ],
)
def test_a_loss_of_nan_is_a_warning_on_the_trial(
    search: Optimize,
    client: Client,
    caplog: pytest.LogCaptureFixture,
    make: Any,
    metric: str,
    warns: bool,
) -> None:
    with caplog.at_level(logging.WARNING, logger="dagsel"):
        run = search(
            workload=make(),
            metric=metric,
            space=lambda trial: {"alpha": trial.suggest_float("alpha", 1e-3, 1e-2)},
            flow=RandomSearch(max_epochs=2, n_trials=2),
            client=client,
        )
    said = [r.getMessage() for r in caplog.records if "training loss" in r.getMessage()]
    table = run.trials().set_index("trial")
    assert list(table["state"]) == ["complete", "complete"]
    assert len(said) == (2 if warns else 0)  # once a trial, not once an epoch
    for trial in run.record.trials.values():
        assert ("the training loss of epoch 1 is NaN" in trial.warning) is warns
        assert table.loc[trial.number, "warning"] == trial.warning
        assert table.loc[trial.number, "param_alpha"] == trial.params["alpha"]


def test_the_suite_finds_a_workload_that_consumes_nothing() -> None:
    class Suite(WorkloadSuite):
        def __init__(self, workload: Any) -> None:
            self.workload = workload

        def make_workload(self) -> Any:
            return self.workload

        def make_arrays(self, seed: int) -> Any:
            return {"x": np.zeros((20, 4), np.float32), "y": np.zeros(20, np.int64)}

    Suite(Own(n_batches=4)).test_a_unit_trains_on_its_shard()
    with pytest.raises(AssertionError):
        Suite(Own(n_batches=4, change=no_samples)).test_a_unit_trains_on_its_shard()


@pytest.mark.alone
@pytest.mark.parametrize("options", [{"train_fn": consumes_nothing}, {"input_fn": empty}])
def test_a_gang_that_consumes_nothing_is_seen_too(
    data: ShardedDataset, options: dict[str, Any]
) -> None:
    made = torch_workload(**options, loss=summed)
    state, shard = made.init({}, 0), made.prepare(data.shard(0))

    def rank(gang: Gang) -> int:
        mine = state if gang.rank == 0 else None
        visit = Visit(0, 0, 1, 0)
        try:
            return made.train_gang(mine, shard, {}, visit=visit, gang=gang).n_samples
        except dagsel.errors.NothingTrainedError:
            return 0

    assert in_gang(2, rank) == [0, 0]
    whole = in_gang(2, lambda gang: torch_workload().train_gang(
        state if gang.rank == 0 else None, shard, {}, visit=Visit(0, 0, 1, 0), gang=gang
    ))  # fmt: skip
    assert [trained.n_samples for trained in whole] == [41, 41]


def test_a_profile_is_not_made_of_nothing(client: Client, data: ShardedDataset) -> None:
    with pytest.raises(WorkloadError, match="nothing of it would be trained on"):
        dagsel.profile(torch_workload(batch_size=64, drop_last=True), {}, data, client=client)
