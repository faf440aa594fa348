"""What would go wrong without a word is said in the log, or refused with the line to write."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from distributed import Client, LocalCluster
from sklearn import metrics as sk
from sklearn.linear_model import SGDClassifier

import dagsel
from dagsel.errors import (
    ClusterError,
    DatasetFormatError,
    DatasetInputError,
    NoCompletedTrialError,
    WorkloadError,
)
from dagsel.execution.cluster import check_cluster
from dagsel.flows import ASHA, OptunaPruner, RandomSearch, SamplerSearch
from dagsel.metrics import over_set
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.pair import ArrayPair
from dagsel.storage.files import Folder
from dagsel.study.checks import check_metrics, say_unasked
from dagsel.workloads.base import DataOutline, Visit
from dagsel.workloads.named_metrics import metric_functions

NUMBER = (np.dtype("float32"), ())
FRAME = pd.DataFrame({"a": np.arange(40.0), "b": np.arange(40.0), "y": np.arange(40) % 2})
COLUMNS = {"x": ["a", "b"], "y": "y"}


def test_an_estimator_says_once_which_arrays_it_is_not_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workload = dagsel.SklearnWorkload(SGDClassifier())
    workload.validate_data({}, DataOutline((8,), {"x": NUMBER, "y": NUMBER}))
    assert caplog.text == ""
    other = dagsel.SklearnWorkload(SGDClassifier())
    for _ in range(2):
        other.validate_data({}, DataOutline((8,), {"noise": NUMBER, "x": NUMBER, "y": NUMBER}))
    (said,) = caplog.messages
    assert "gets 'noise', the target is 'y', and nothing uses 'x'" in said
    assert 'columns={"x": [...], "y": \'y\'}' in said


@pytest.mark.parametrize(
    ("function", "direction"),
    [(sk.precision_score, "maximize"), (sk.log_loss, "minimize"), (sk.confusion_matrix, None)],
)
def test_metrics_of_scikit_learn_are_not_called_the_wrong_way_round(
    function: Any, direction: str | None
) -> None:
    target, output = np.array([0, 1, 1, 1]), np.array([1, 1, 0, 1])
    for given in (function, partial(function), over_set(function)):
        with pytest.raises(WorkloadError, match="takes the target first") as caught:
            metric_functions({"mine": given})
        write = str(caught.value).partition("write metrics=")[2].partition(", with ")[0]
        metric = eval(write, {"dagsel": dagsel, function.__name__: function})["mine"]
        assert metric_functions({"mine": metric}) == {"mine": metric}
        assert metric.over == "set"
        assert metric.direction == direction
        assert np.array_equal(metric(output, target), function(target, output))


def test_metrics_of_scikit_learn_that_are_the_same_either_way_are_taken() -> None:
    for function in (sk.accuracy_score, sk.zero_one_loss, sk.mean_absolute_error):
        assert metric_functions({"mine": function}) == {"mine": function}
        target, output = np.array([0, 1, 1, 1]), np.array([1, 1, 0, 1])
        assert function(target, output) == function(output, target)


def test_the_names_that_others_give_metrics_lead_to_dagsels() -> None:
    with pytest.raises(WorkloadError, match="has no metric 'MAE'.*write 'mean_absolute_error', or"):
        metric_functions("MAE")


@pytest.mark.parametrize("kind", ["frame", "validation", "parquet"])
def test_missing_values_of_a_table_are_told_with_column_and_row(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holed = FRAME.copy()
    holed.loc[[5, 7], "b"] = np.nan
    holed.to_parquet(tmp_path / "holed.parquet")
    source: Any = {"frame": holed, "parquet": str(tmp_path / "holed.parquet")}.get(kind, FRAME)
    validation = holed if kind == "validation" else FRAME
    url = str(tmp_path / "data.zarr")
    ShardedDataset.write(url, source, columns=COLUMNS, validation=validation, n_shards=2)
    (said,) = caplog.messages
    assert "column 'b' lacks 2 of its values, the first in row 5" in said


def test_a_table_in_a_file_is_told_the_call_that_reads_its_columns(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "a.csv", index=False)
    FRAME.to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(DatasetFormatError) as caught:
            ShardedDataset.open(str(tmp_path / name))
        write = str(caught.value).partition("make one of it with ")[2].partition(", and give")[0]
        write = write.replace("data.zarr", str(tmp_path / f"{name}.zarr"))
        write = write.replace("[...]", '["a", "b"]').replace('"..."', '"y"')
        data = eval(write, {"ShardedDataset": ShardedDataset, "pandas": pd})
        assert data.columns == {"x": ("a", "b")}


def test_an_ordered_column_keeps_its_order() -> None:
    sizes = ["S", "M", "L", "XL"]
    column = pd.Categorical(sizes * 10, categories=sizes, ordered=True)
    table = FRAME.assign(size=column)
    kept = ShardedDataset.write(
        "memory://sizes.zarr", table, columns={"x": ["a", "b"], "size": "size"}, n_shards=2
    )
    assert kept.classes == {"size": tuple(sizes)}
    pair = ArrayPair.read(FRAME[["a", "b"]], pd.Series(column))
    assert pair.write(Folder("memory://pair.zarr")).classes == {"y": tuple(sizes)}
    by_alphabet = ArrayPair.read(FRAME[["a", "b"]], pd.Series(column.as_unordered()))
    assert by_alphabet.write(Folder("memory://other.zarr")).classes == {"y": ("L", "M", "S", "XL")}


def test_a_sample_of_nested_arrays_is_not_joined() -> None:
    samples = [((np.zeros(4), np.ones(4)), number % 2) for number in range(20)]
    with pytest.raises(DatasetInputError, match="'x' of sample 0 is a tuple of arrays"):
        ShardedDataset.write("memory://nested.zarr", samples, n_shards=2)


def test_a_sampler_and_a_pruner_that_nobody_asks_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = optuna.create_study(
        sampler=optuna.samplers.GridSampler({"lr": [0.1]}),
        pruner=optuna.pruners.ThresholdPruner(lower=0.9),
    )
    few: dict[str, Any] = {"max_epochs": 4, "n_trials": 4}
    plain = optuna.create_study()
    for flow, study, n in [
        (RandomSearch(**few), mine, 2),
        (SamplerSearch(**few), mine, 1),
        (ASHA(**few), mine, 1),
        (OptunaPruner(**few), mine, 0),
        (RandomSearch(**few), plain, 0),
    ]:
        caplog.clear()
        say_unasked(study, type(flow).__name__, flow.traits)
        assert len(caplog.messages) == n
        assert all("is not asked" in said for said in caplog.messages)


def test_a_study_minimizes_by_default_and_says_so_of_what_may_be_better_if_larger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    up, down = optuna.create_study(direction="maximize"), optuna.create_study()
    check_metrics(up, ["mine"], {"mine": None})
    check_metrics(down, ["loss"], {"loss": "minimize"})
    assert caplog.text == ""
    check_metrics(down, ["mine"], {"mine": None})
    (said,) = caplog.messages
    assert "nothing says whether a larger mine is better" in said


def test_an_optimizer_may_go_through_the_parameters_more_than_once() -> None:
    def optimizer(parameters: Any, config: Any) -> torch.optim.Optimizer:
        decayed = [it for it in parameters if it.ndim > 1]
        others = [it for it in parameters if it.ndim == 1]
        return torch.optim.SGD([{"params": decayed}, {"params": others}], lr=0.1)

    workload = dagsel.TorchWorkload(
        model=lambda config: torch.nn.Linear(4, 2),
        loss=torch.nn.functional.cross_entropy,
        optimizer=optimizer,
        batch_size=8,
    )
    arrays = {"x": np.ones((8, 4), np.float32), "y": np.zeros(8, np.int64)}
    state = workload.init({}, seed=0)
    visit = Visit(seed=0, trial=0, epoch=1, shard=0, ends_epoch=True)
    after = workload.train(state, workload.prepare(arrays), {}, visit=visit).state
    modules: list[Any] = [workload.restore(each, {}) for each in (state, after)]
    biases = [module.bias.tolist() for module in modules]
    assert biases[0] != biases[1]


def test_a_client_and_a_cluster_have_to_be_of_one_scheduler() -> None:
    options: Any = {"n_workers": 0, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as one, LocalCluster(**options) as other:
        with Client(one, set_as_default=False) as client:
            check_cluster(client, one)
            with pytest.raises(ClusterError, match="client is not connected to what cluster= is"):
                check_cluster(client, other)
            with pytest.raises(ClusterError, match="write client= in place of cluster="):
                check_cluster(None, client)


def test_a_search_that_goes_on_says_that_its_trials_are_scored(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    search = dagsel.start(
        optuna.create_study(direction="maximize"),
        dagsel.SklearnWorkload(SGDClassifier()),
        digits,
        space=lambda trial: {"alpha": trial.suggest_float("alpha", 1e-5, 1e-2, log=True)},
        metric="accuracy",
        flow=RandomSearch(max_epochs=100_000, n_trials=1),
        client=client,
        run_dir=run_dir,
        progress=False,
    )
    run = search.wait("2 min", until=lambda run: len(run.leaderboard()) > 0)
    with pytest.raises(NoCompletedTrialError, match="1 that are scored still train"):
        run.best  # noqa: B018
    search.finish()
    assert search.wait("2 min").best.trial == 0
