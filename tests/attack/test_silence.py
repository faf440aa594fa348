"""What would go wrong without a word is said in the log, or refused with the line to write."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
import scipy.sparse
import torch
from distributed import Client, LocalCluster
from sklearn import metrics as sk
from sklearn.linear_model import SGDClassifier

import dagsel
import dagsel.collate
from dagsel.errors import (
    ClusterError,
    DatasetFormatError,
    DatasetInputError,
    NoCompletedTrialError,
    WorkloadError,
)
from dagsel.execution.cluster import check_cluster
from dagsel.flow import Goal
from dagsel.flows import ASHA, OptunaPruner, RandomSearch, SamplerSearch
from dagsel.metrics import _say_all_are_one, accuracy, f1, over_set
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.inputs import tables
from dagsel.storage.datasets.pair import ArrayPair
from dagsel.storage.files import Folder
from dagsel.study.checks import check_metrics, say_unasked
from dagsel.workloads.base import DataOutline, Visit
from dagsel.workloads.named_metrics import metric_functions

NUMBER = (np.dtype("float32"), ())
FRAME = pd.DataFrame({"a": np.arange(40.0), "b": np.arange(40.0), "y": np.arange(40) % 2})
COLUMNS = {"x": ["a", "b"], "y": "y"}


def test_text_that_is_no_class_is_told_with_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"n": range(120), "y": ["cat", "dog"] * 60})
    texts = frame.assign(text=[f"text {n}" for n in range(120)])
    options: dict[str, Any] = {"n_shards": 2, "overwrite": True}
    few = texts.assign(text=[f"text {n % 100}" for n in range(120)])
    ShardedDataset.write("memory://texts.zarr", few, **options)
    ShardedDataset.write("memory://texts.zarr", texts, columns=["n", "y"], **options)
    assert caplog.text == ""
    ShardedDataset.write("memory://texts.zarr", texts, **options)
    (said,) = caplog.messages
    assert "'text' holds 120 different texts in 120 rows" in said
    assert "leave it out, as by columns=" in said
    with pytest.raises(DatasetInputError, match="or leave out 'text', as by columns=, if no model"):
        ShardedDataset.write(
            "memory://texts.zarr", texts, validation=texts.assign(text="another"), **options
        )


def test_texts_that_are_numbers_are_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    ArrayPair.read(np.zeros((120, 2)), [f"{at}.5" for at in range(120)])
    (said,) = caplog.messages
    assert (
        "each becomes a number, as a class does: they are numbers, so write y.astype(float)" in said
    )


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


def test_metrics_whose_arguments_are_named_the_other_way_round_are_refused() -> None:
    def mine(y_true: Any, y_pred: Any) -> float:
        return float(y_true[0] - 2 * y_pred[0])

    target, output = np.array([5]), np.array([1])
    over = over_set(direction="minimize")(mine)
    for given in (mine, partial(mine), over):
        with pytest.raises(WorkloadError, match="the function mine takes the target first") as why:
            metric_functions({"mine": given})
        write = str(why.value).partition("write metrics=")[2]
        metric = eval(write, {"dagsel": dagsel, "mine": mine})["mine"]
        assert metric_functions({"mine": metric}) == {"mine": metric}
        assert metric(output, target) == 3
        assert getattr(metric, "direction", None) == getattr(given, "direction", None)
    with pytest.raises(WorkloadError, match=r"'m': lambda output, target: function\(target, outp"):
        metric_functions({"m": lambda labels, logits: 0.0})
    for innocent in (lambda y_pred, y_true: 0, lambda preds, target: 0, lambda a, target: 0):
        assert metric_functions({"m": innocent}) == {"m": innocent}


def test_a_class_is_no_metric() -> None:
    class Share:
        def __init__(self, *args: Any) -> None:
            pass

    with pytest.raises(WorkloadError, match=r"metric 'm' is .*Share: make one of it, as in metric"):
        metric_functions({"m": Share})


def test_metrics_of_scikit_learn_that_are_the_same_either_way_are_taken() -> None:
    for function in (sk.accuracy_score, sk.zero_one_loss, sk.mean_absolute_error):
        assert metric_functions({"mine": function}) == {"mine": function}
        target, output = np.array([0, 1, 1, 1]), np.array([1, 1, 0, 1])
        assert function(target, output) == function(output, target)


@pytest.mark.parametrize("metric", ["f1", "binary_accuracy"])
def test_metrics_of_logits_beside_a_loss_of_probabilities_are_refused(
    metric: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = torch.nn.functional.binary_cross_entropy
    loss: Any
    for loss in (plain, torch.nn.BCELoss(), partial(plain, reduction="mean")):
        with pytest.raises(WorkloadError, match=f"'{metric}' takes logits.*_with_logits"):
            metric_functions({metric: metric}, loss)
        assert metric_functions(["auroc"], loss)
    F = torch.nn.functional
    of_logits = lambda o, t: F.binary_cross_entropy(torch.sigmoid(o), t)  # noqa: E731
    for loss in (torch.nn.BCEWithLogitsLoss(), of_logits, lambda o, t: F.mse_loss(o, t), None):
        assert metric_functions([metric], loss)
    assert caplog.text == ""
    assert metric_functions([metric], lambda o, t: F.binary_cross_entropy(o[:, 0], t))
    (said,) = caplog.messages
    assert f"metric '{metric}' takes logits" in said
    assert "and call torch.nn.functional.binary_cross_entropy_with_logits" in said


def test_f1_says_once_that_probabilities_are_no_logits(caplog: pytest.LogCaptureFixture) -> None:
    _say_all_are_one.cache_clear()
    target = np.array([0, 1, 1, 1])
    for innocent in ([0.0, 1.0, 1.0, 0.0], [-0.1, 0.9, 0.1, 0.7], [0.1, 0.9, 0.1, 1.7]):
        f1(np.array(innocent), target)
    assert caplog.text == ""
    for _ in range(2):
        f1(np.array([0.0, 0.9, 0.1, 1.0]), target)
    (said,) = caplog.messages
    assert "let the model return logits" in said


@pytest.mark.parametrize("sizes", [(90, 91), (91,)])
def test_batches_that_no_shard_can_fill_are_told_once_for_each_number(
    sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    workload = dagsel.TorchWorkload(
        lambda config: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, torch.optim.SGD,
        batch_size=lambda config: config["batch_size"],
    )  # fmt: skip
    for n in (91, 92, 92, 93):
        workload.validate_data({"batch_size": n}, DataOutline(sizes, {"x": NUMBER, "y": NUMBER}))
    said = [f"batch_size is {n}, and the largest of the 2 training shards has 91" for n in (92, 93)]
    if len(sizes) == 1:  # a batch of all there is
        said = []
    assert len(caplog.messages) == len(said)
    assert all(each in found for each, found in zip(said, caplog.messages, strict=True))


def test_a_loss_that_is_no_mean_over_samples_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    F, weight = torch.nn.functional, torch.ones(2)
    told: list[Any] = [torch.nn.CrossEntropyLoss(weight), torch.nn.NLLLoss(ignore_index=0)]
    told += [partial(F.cross_entropy, weight=weight), partial(F.nll_loss, ignore_index=0)]
    untold: list[Any] = [torch.nn.CrossEntropyLoss(), torch.nn.BCEWithLogitsLoss(pos_weight=weight)]
    untold += [F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.1)]
    for loss in told + untold:
        caplog.clear()
        workload = dagsel.TorchWorkload(
            lambda config: torch.nn.Linear(4, 2), loss, torch.optim.SGD, batch_size=8
        )
        workload.follows_metric({}, Goal("accuracy", "maximize"))
        assert caplog.text == ""
        for _ in range(2):
            workload.follows_metric({}, Goal("loss", "minimize"))
        assert len(caplog.messages) == (loss in told)
    workload = dagsel.TorchWorkload(
        lambda config: torch.nn.Linear(4, 2), told[0], torch.optim.SGD, batch_size=8,
        metrics={"whole": over_set(told[0], direction="minimize")}, eval_batch_size=4,
    )  # fmt: skip
    x, y = np.random.default_rng(0).normal(size=(20, 4)).astype("float32"), np.arange(20) % 2
    shard, state = workload.prepare({"x": x, "y": y}), workload.init({}, seed=0)
    module = workload.restore(state, {})
    wanted = told[0](module(torch.tensor(x)), torch.tensor(y)).item()
    kept = workload.evaluate(state, shard, {}).kept
    assert kept is not None
    assert workload.pool([kept]) == {"whole": pytest.approx(wanted)}


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


@pytest.mark.parametrize("columns", [["number", "b"], ["number"]])
def test_whole_numbers_that_float32_rounds_are_told_once(
    columns: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def write(start: int) -> None:
        frame = FRAME.assign(number=start + np.arange(40))
        if len(columns) == 1:
            ArrayPair.read(frame[columns], frame["y"])
        else:
            given: Any = {"columns": {"x": columns, "y": "y"}, "overwrite": True}
            ShardedDataset.write("memory://rounded.zarr", frame, n_shards=2, **given)

    tables._say_rounded.cache_clear()
    write(2**24 - 39)
    assert caplog.text == ""
    for _ in range(2):
        write(2**24)
    (said,) = caplog.messages
    assert "column 'number' holds whole numbers above 16777216" in said


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


NET: dict[str, Any] = {
    "model": lambda config: torch.nn.Linear(2, 2),
    "loss": torch.nn.functional.cross_entropy,
    "optimizer": lambda parameters, config: torch.optim.SGD(parameters, lr=0.1),
    "batch_size": 2,
}
BATCH = {"x": np.ones((5, 2), "float32"), "y": np.array([0, 1, 1, 0, 1])}


def test_what_a_loss_learns_is_not_shared_by_trials() -> None:
    scale = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD
    workload = dagsel.TorchWorkload(
        **{**NET, "optimizer": lambda parameters, config: sgd([*parameters, scale], lr=0.1)}
    )
    told = r"a parameter of shape \(3,\) that is none of the model's: .* let the model hold it"
    with pytest.raises(WorkloadError, match=told):
        workload.validate({})


class MadeLate(torch.nn.Module):
    """Makes its last layer when it sees the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if not hasattr(self, "head"):
            self.head = torch.nn.Linear(x.shape[1], 2)
        return self.head(x)


def test_a_layer_that_is_made_in_forward_is_named() -> None:
    workload = dagsel.TorchWorkload(**{**NET, "model": lambda config: MadeLate()})
    shard, visit = workload.prepare(BATCH), Visit(seed=1, trial=0, epoch=0, shard=0)
    with pytest.raises(WorkloadError, match=r"training has made 'head\.weight'.*none in forward"):
        workload.train(workload.init({}, seed=1), shard, {}, visit=visit)


class Remade(torch.nn.Module):
    """Makes a buffer another one while it trains."""

    held: Any

    def __init__(self, remake: Any, held: Any) -> None:
        super().__init__()
        self.layer, self.remake = torch.nn.Linear(2, 2), remake
        self.register_buffer("held", held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.held = self.remake(self.held, x)
        return self.layer(x)


@pytest.mark.parametrize(
    ("remake", "held", "told"),
    [
        (lambda held, x: torch.cat([held, x])[-4:], torch.zeros(0, 2), r"and shape \(4, 2\), and"),
        (lambda held, x: held.double(), torch.zeros(2), r"'held' a tensor of torch\.float64 and"),
        (lambda held, x: x.sum(0), None, "made the buffer 'held', which is None as the model"),
        (lambda held, x: held + x.sum(0), torch.zeros(2), None),
    ],
)
def test_a_buffer_that_a_new_model_could_not_load_is_named(
    remake: Any, held: Any, told: str | None
) -> None:
    workload = dagsel.TorchWorkload(**{**NET, "model": lambda config: Remade(remake, held)})
    shard, visit = workload.prepare(BATCH), Visit(seed=1, trial=0, epoch=0, shard=0)
    with nullcontext() if told is None else pytest.raises(WorkloadError, match=told):
        workload.train(workload.init({}, seed=1), shard, {}, visit=visit)


def test_an_expanded_buffer_is_named() -> None:
    workload = dagsel.TorchWorkload(
        **{**NET, "model": lambda config: Remade(None, torch.zeros(1, 2).expand(3, 2))}
    )
    with pytest.raises(WorkloadError, match=r"'held' of the model is expanded, .*write \.clone"):
        workload.validate({})


class Drawn(torch.nn.Module):
    """Holds what it has drawn beside what its state has."""

    def __init__(self, draw: Any, *, name: str = "features") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("kept", torch.as_tensor(draw()))
        if name == "buffer":
            self.register_buffer("buffer", torch.as_tensor(draw()), persistent=False)
        elif name != "kept":
            setattr(self, name, {"nested": [draw()]})


def drawn_by_numpy() -> Any:
    return np.random.default_rng().normal(size=3)


def drawn_by_torch() -> Any:
    return torch.rand(3, generator=torch.Generator().manual_seed(torch.seed()))


@pytest.mark.parametrize("draw", [drawn_by_numpy, drawn_by_torch])
@pytest.mark.parametrize("name", ["features", "buffer"])
def test_a_model_that_is_another_each_time_it_is_made_is_refused(draw: Any, name: str) -> None:
    """A trial's model is made anew for each unit: it would be scored with other features."""
    workload = dagsel.TorchWorkload(**{**NET, "model": lambda config: Drawn(draw, name=name)})
    with pytest.raises(WorkloadError, match=f"makes another '{name}' each time.*register_buffer"):
        workload.validate({})


@pytest.mark.parametrize(
    ("draw", "name"),
    [(lambda: torch.randn(3), "features"), (lambda: np.random.rand(3), "buffer"),
     (drawn_by_numpy, "kept")],
)  # fmt: skip
def test_a_model_may_draw_from_the_seeded_streams_or_keep_it_in_its_state(
    draw: Any, name: str
) -> None:
    workload = dagsel.TorchWorkload(**{**NET, "model": lambda config: Drawn(draw, name=name)})
    workload.validate({})
    workload.validate({})


def accumulating(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    """Step after each `every` batches, and at the end if the configuration says so."""
    for at, (inputs, targets) in enumerate(batches, start=1):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        if at % config["every"] == 0:
            optimizer.step()
            optimizer.zero_grad()
        batches.log(loss)
    if config.get("at_end"):
        optimizer.step()


def with_its_own_optimizer(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    accumulating(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, config)


@pytest.mark.parametrize(
    ("loop", "config", "is_refused"),
    [
        (accumulating, {"every": 1}, False),
        (accumulating, {"every": 3}, False),  # of three batches
        (accumulating, {"every": 2}, True),
        (accumulating, {"every": 9}, True),
        (accumulating, {"every": 2, "at_end": True}, False),
        (with_its_own_optimizer, {"every": 1}, False),
        (with_its_own_optimizer, {"every": 2}, True),
    ],
)
def test_gradients_that_no_step_follows_fail_the_trial(
    loop: Any, config: dict[str, Any], is_refused: bool
) -> None:
    workload = dagsel.TorchWorkload(**NET, train_fn=loop)
    state, shard = workload.init(config, 0), workload.prepare(BATCH)
    visit = Visit(seed=0, trial=0, epoch=1, shard=0, ends_epoch=True)
    if not is_refused:
        assert workload.train(state, shard, config, visit=visit).finished
        return
    with pytest.raises(WorkloadError, match=r"wait for an optimizer\.step\(\).*after the loop"):
        workload.train(state, shard, config, visit=visit)


@pytest.mark.parametrize("left_out", [-100, 255])
def test_targets_that_a_loss_leaves_out_are_not_counted_as_wrong(left_out: int) -> None:
    scores, tags = np.zeros((4, 3, 5)), np.full((4, 5), left_out)
    with pytest.raises(ValueError, match=f"has the class {left_out}, .*write metrics=") as caught:
        accuracy(scores, tags)
    write = str(caught.value).partition("write metrics=")[2].partition(", else")[0]
    (metric,) = eval(write, {"torchmetrics": pytest.importorskip("torchmetrics")}).values()
    tags[0, 0] = 0
    assert metric(torch.tensor(scores), torch.tensor(tags)) == 1.0


def test_accuracy_takes_classes_of_one_byte_and_no_samples() -> None:
    scores, classes = torch.eye(300), torch.arange(300)
    assert accuracy(scores[:256], classes[:256].to(torch.uint8)) == 1.0
    assert accuracy(scores[:128].numpy(), classes[:128].to(torch.int8).numpy()) == 1.0
    assert math.isnan(accuracy(scores[:0], classes[:0]))


def test_the_scores_of_classes_are_along_the_second_axis() -> None:
    scores, tags = np.zeros((4, 3, 5)), np.zeros((4, 5))
    with pytest.raises(ValueError, match=r"write output\.movedim\(-1, 1\)"):
        accuracy(np.moveaxis(scores, 1, -1), tags)


@pytest.mark.parametrize(("target", "fill"), [(torch.int64, -100), (torch.float32, 0)])
def test_the_targets_of_a_sequence_are_filled_up_by_what_no_loss_counts(
    target: torch.dtype, fill: int
) -> None:
    rows = {"ids": [torch.ones(2), torch.ones(3)], "tags": [torch.ones(2, dtype=target)] * 2}
    with pytest.raises(WorkloadError, match=rf"write pad\(ids=0, tags={fill}\)"):
        dagsel.collate.pad(ids=0)(rows)


@pytest.mark.parametrize(
    "returns", [lambda batch: batch["x"], lambda batch: (batch["x"], batch["y"], batch["y"])]
)
def test_an_input_fn_that_returns_no_pair_is_told_what_to_return(returns: Any) -> None:
    workload = dagsel.TorchWorkload(**NET, input_fn=lambda batch, config: returns(batch))
    state, shard = workload.init({}, 0), workload.prepare(BATCH)
    visit = Visit(seed=0, trial=0, epoch=1, shard=0, ends_epoch=True)
    with pytest.raises(WorkloadError, match="input_fn returns .*return batch.'x'., batch.'y'."):
        workload.train(state, shard, {}, visit=visit)


def test_a_sparse_matrix_is_refused_with_the_call_that_makes_an_array(tmp_path: Path) -> None:
    for form in ("csr", "csc"):
        x = scipy.sparse.random(20, 3, density=0.5, format=form)
        with pytest.raises(DatasetInputError, match=r"x is a sparse matrix; give x\.toarray\(\)"):
            ShardedDataset.write(tmp_path / form, {"x": x, "y": np.zeros(20)}, n_shards=2)
