"""Metrics of a whole set are what they are of the pooled set, however it is cut into shards."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn import metrics as sk

import dagsel
from dagsel.errors import WorkloadError
from dagsel.metrics import auroc, f1, over_set, r2
from dagsel.state import State
from dagsel.workloads.base import Visit
from dagsel.workloads.describe import describe
from dagsel.workloads.named_metrics import directions, metric_functions
from dagsel.workloads.pooled import Pool, pooled_values


def cut(output: NDArray[Any], target: NDArray[Any], n: int, batch: int) -> Any:
    """Cut a set into shards, and these into batches."""
    for part in np.array_split(np.arange(len(output)), n):
        yield [
            (output[part[k : k + batch]], target[part[k : k + batch]])
            for k in range(0, len(part), batch)
        ]


def pooled(metrics: dict[str, Any], shards: Any, as_tensor: Any = lambda a: a) -> dict[str, float]:
    parts = []
    for batches in shards:
        pool = Pool(metrics)
        for output, target in batches:
            pool.add(as_tensor(output), as_tensor(target))
        parts.append(State(bytes(pool.pack().buffer)))
    return pooled_values(metrics, parts, as_tensor)


SETS = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(8, 90), st.integers(1, 16), st.integers(1, 20)
)


@given(SETS, st.integers(2, 4), st.booleans())
def test_dagsels_own_are_those_of_scikit_learn(
    how: tuple[int, int, int, int], n_classes: int, ties: bool
) -> None:
    seed, n, n_shards, batch = how
    rng = np.random.default_rng(seed)
    target = rng.permutation(np.arange(n) % n_classes)
    output = rng.normal(size=(n, n_classes))
    output = output.round(0 if ties else 9)
    numbers = rng.normal(size=n) * 3 + 1
    guess = numbers + rng.normal(size=n)
    metrics = {"auroc": auroc, "f1": f1}
    found = pooled(metrics, cut(output, target, n_shards, batch))
    shares = np.exp(output - output.max(1, keepdims=True))  # so that ties are the same ones
    shares /= shares.sum(1, keepdims=True)
    if n_classes == 2:
        wanted = sk.roc_auc_score(target, output[:, 1] - output[:, 0])
        average = "binary"
    else:
        wanted = sk.roc_auc_score(target, shares, multi_class="ovr")
        average = "macro"
    assert found["auroc"] == pytest.approx(wanted, abs=1e-12)
    of_shares = pooled({"auroc": auroc}, cut(shares, target, n_shards, batch))
    assert of_shares["auroc"] == pytest.approx(wanted, abs=1e-12)
    truth = sk.f1_score(target, output.argmax(1), average=average, zero_division=0)
    assert found["f1"] == pytest.approx(truth, abs=1e-12)
    found = pooled({"r2": r2}, cut(guess, numbers, n_shards, batch))
    assert found["r2"] == pytest.approx(sk.r2_score(numbers, guess), abs=1e-12)
    found = pooled({"r2": r2}, cut(np.ones((n, 1)), np.ones(n), n_shards, batch))
    assert found == {"r2": sk.r2_score(np.ones(n), np.ones(n))}


@given(SETS)
def test_of_two_classes_one_logit_will_do(how: tuple[int, int, int, int]) -> None:
    seed, n, n_shards, batch = how
    rng = np.random.default_rng(seed)
    target, output = rng.permutation(np.arange(n) % 2), rng.normal(size=(n, 1)).round(1)
    found = pooled({"auroc": auroc, "f1": f1}, cut(output, target, n_shards, batch))
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(target, output[:, 0]), abs=1e-12)
    wanted = sk.f1_score(target, output[:, 0] > 0, zero_division=0)
    assert found["f1"] == pytest.approx(wanted, abs=1e-12)


@given(SETS)
def test_objects_of_torchmetrics_are_those_of_the_pooled_set(
    how: tuple[int, int, int, int],
) -> None:
    from torchmetrics.classification import (
        BinaryAUROC,
        BinaryF1Score,
        MulticlassConfusionMatrix,
    )
    from torchmetrics.regression import R2Score

    seed, n, n_shards, batch = how
    rng = np.random.default_rng(seed)
    target = rng.permutation(np.arange(n) % 2)
    share = rng.random(n).round(2)
    metrics = {"auroc": BinaryAUROC(), "f1": BinaryF1Score()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pooled(metrics, cut(share, target, n_shards, batch), torch.from_numpy)
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(target, share), abs=1e-6)
    whole = {name: type(metric)() for name, metric in metrics.items()}
    for name, metric in whole.items():
        value = float(metric(torch.from_numpy(share), torch.from_numpy(target)))
        assert found[name] == pytest.approx(value, abs=1e-12)
    classes = rng.integers(0, 3, n)
    guess = rng.integers(0, 3, n)
    confusion = MulticlassConfusionMatrix(3)
    found = pooled({"c": confusion}, cut(guess, classes, n_shards, batch), torch.from_numpy)
    matrix = sk.confusion_matrix(classes, guess, labels=[0, 1, 2])
    assert found == {f"c[{i},{j}]": matrix[i, j] for i in range(3) for j in range(3)}
    numbers = rng.normal(size=n)
    found = pooled({"r2": R2Score()}, cut(numbers + 1, numbers, n_shards, batch), torch.from_numpy)
    assert found["r2"] == pytest.approx(sk.r2_score(numbers, numbers + 1), abs=1e-9)


@pytest.mark.parametrize("n_shards", [1, 2, 5])
def test_an_object_with_a_state_that_is_a_mean_is_merged(n_shards: int) -> None:
    from torchmetrics.image import PeakSignalNoiseRatio

    rng = np.random.default_rng(0)
    target = rng.random((20, 3))
    output = target + rng.normal(scale=0.1, size=(20, 3))
    metric = PeakSignalNoiseRatio(data_range=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pooled({"psnr": metric}, cut(output, target, n_shards, 4), torch.from_numpy)
    wanted = float(metric(torch.from_numpy(output), torch.from_numpy(target)))
    assert found["psnr"] == pytest.approx(wanted, rel=1e-5)


def test_an_object_is_not_changed_by_what_it_is_used_for() -> None:
    from torchmetrics.classification import BinaryAUROC

    metric = BinaryAUROC()
    pooled({"a": metric}, cut(np.array([0.1, 0.9]), np.array([0, 1]), 1, 2), torch.from_numpy)
    assert metric.metric_state == {"preds": [], "target": []}


def test_names_directions_and_descriptions() -> None:
    from torchmetrics.classification import BinaryAUROC
    from torchmetrics.regression import MeanSquaredError

    named = metric_functions(["auroc", BinaryAUROC(), MeanSquaredError(), f1])
    assert list(named) == ["auroc", "BinaryAUROC", "MeanSquaredError", "f1"]
    assert list(directions(named).values()) == ["maximize", "maximize", "minimize", "maximize"]

    def described(function: Any) -> str:
        workload = dagsel.SklearnWorkload(lambda config: None, metrics={"m": over_set(function)})
        return describe(workload)["_metrics"]

    assert described(lambda o, t: 1.0) == described(lambda o, t: 1.0)
    assert described(lambda o, t: 1.0) != described(lambda o, t: 2.0)


def whole() -> Any:
    """Make a metric that needs its whole state to be updated."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Whole(torchmetrics.Metric):  # type: ignore[misc, name-defined, unused-ignore]
        full_state_update = True

        def update(self, output: Any, target: Any) -> None:
            raise AssertionError

        def compute(self) -> Any:
            raise AssertionError

    return Whole()


def half(output: Any, target: Any) -> float:
    return 0.5


half.over = "shard"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (whole, "metric 'm': Whole cannot be merged from shards .*over_set"),
        (lambda: half, "metric 'm': over must be \"batch\" or \"set\", got 'shard'"),
    ],
)
def test_what_cannot_be_merged_is_said_before_anything_trains(make: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        dagsel.SklearnWorkload(lambda config: None, metrics={"m": make()})


def test_a_result_that_is_no_number_and_outputs_that_are_no_tensor_are_refused() -> None:
    data = list(cut(np.arange(4.0), np.arange(4.0), 2, 2))
    with pytest.raises(WorkloadError, match="metric 'm' must be a number, got 'high'"):
        pooled({"m": over_set(lambda o, t: "high")}, data)
    pool = Pool({"m": over_set(lambda o, t: 0.0)})
    with pytest.raises(WorkloadError, match="needs tensors, one or .*, and the output has"):
        pool.add({"logits": {"deeper": np.ones(2)}}, np.ones(2))
    with pytest.raises(WorkloadError, match="needs tensors, one or .*, and the target has 'cat'"):
        pool.add(np.ones(1), ("cat",))
    with pytest.raises(ValueError, match="direction must be 'minimize' or 'maximize', got 'up'"):
        over_set(lambda o, t: 0.0, direction="up")  # type: ignore[call-overload]


@pytest.mark.parametrize("n_shards", [1, 2])
def test_batches_that_cannot_be_joined_are_named_with_their_shapes(n_shards: int) -> None:
    metrics = {"mine": over_set(lambda o, t: 0.0), "other": over_set(lambda o, t: 1.0)}
    batches = [(np.ones((4, 3, 7)), np.ones(4)), (np.ones((2, 3, 9)), np.ones(2))]
    shards = [batches] if n_shards == 1 else [[batch] for batch in batches]
    says = r"\('mine', 'other'\) need the output .* it has shape \(4, 3, 7\) and \(2, 3, 9\): give"
    with pytest.raises(WorkloadError, match=says):
        pooled(metrics, shards)
    with pytest.raises(WorkloadError, match=r"need the target\.1 of .* it has shape \(\): give"):
        pooled(metrics, [[(np.ones(4), (np.ones(4), np.array(0.5)))]])


@given(SETS)
def test_outputs_and_targets_may_be_several_arrays(how: tuple[int, int, int, int]) -> None:
    seed, n, n_shards, batch = how
    rng = np.random.default_rng(seed)
    logits, spare = rng.normal(size=(n, 3)), rng.normal(size=n)
    target, weight = rng.permutation(np.arange(n) % 3), rng.uniform(0.1, 5.0, size=n)
    parts = []
    metric = over_set(
        lambda o, t: sk.accuracy_score(t[0], o["logits"].argmax(1), sample_weight=t[1])
    )
    same = over_set(lambda o, t: float(np.array_equal(o["spare"], spare)))
    for places in np.array_split(np.arange(n), n_shards):
        pool = Pool({"weighted": metric, "same": same})
        for k in range(0, len(places), batch):
            at = places[k : k + batch]
            pool.add({"logits": logits[at], "spare": spare[at]}, (target[at], weight[at]))
        parts.append(State(bytes(pool.pack().buffer)))
    found = pooled_values({"weighted": metric, "same": same}, parts)
    wanted = sk.accuracy_score(target, logits.argmax(1), sample_weight=weight)
    assert found == {"weighted": pytest.approx(wanted, abs=1e-12), "same": 1.0}


class Normal(NamedTuple):
    mean: NDArray[Any]
    log_var: NDArray[Any]


def test_a_named_tuple_keeps_its_names() -> None:
    metric = over_set(lambda o, t: (o.mean * t.log_var).sum() + 100 * o[1].sum() + 1000 * len(o))
    batches = [
        (Normal(np.full(2, n), np.ones(2)), Normal(np.ones(2), np.full(2, n))) for n in (1, 2)
    ]
    assert pooled({"m": metric}, [[batch] for batch in batches]) == {"m": 2410.0}


def test_a_constant_target_is_told_or_not() -> None:
    assert r2(np.ones(3), np.ones(3)) == 1.0
    assert r2(np.zeros(3), np.ones(3)) == 0.0


def test_a_set_that_lacks_a_class_has_no_area() -> None:
    with pytest.raises(ValueError, match="auroc needs samples of class 1 and of others, and none"):
        auroc(np.arange(3.0), np.zeros(3))
    with pytest.raises(ValueError, match="class 1 .* all are of it among the 3"):
        auroc(np.arange(3.0), np.ones(3))
    with pytest.raises(ValueError, match="class 2 .* none is of it"):
        auroc(np.ones((4, 3)), np.array([0, 1, 0, 1]))
    assert math.isclose(f1(np.array([-1.0, -1.0]), np.array([0, 0])), 0.0)


def test_an_estimators_metric_of_the_whole_set() -> None:
    """Not so with logits: what scikit-learn predicts are classes."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import SGDClassifier

    bunch = load_digits()
    macro = over_set(lambda o, t: sk.f1_score(t, o, average="macro"), direction="maximize")
    workload = dagsel.SklearnWorkload(
        SGDClassifier(random_state=0), metrics={"f1": macro}, classes=range(10)
    )
    assert workload.pooled_metrics == ("f1",)
    assert workload.metrics["f1"] == "maximize"
    whole = workload.prepare({"x": bunch.data, "y": bunch.target})
    visit = Visit(seed=0, trial=0, epoch=1, shard=0, ends_epoch=True)
    state = workload.train(workload.init({}, seed=0), whole, {}, visit=visit).state
    kept, n_samples = [], 0
    for part in np.array_split(np.arange(len(bunch.target)), 5):
        shard = workload.prepare({"x": bunch.data[part], "y": bunch.target[part]})
        scored = workload.evaluate(state, shard, {})
        assert "f1" not in scored.metrics
        assert scored.kept is not None
        kept.append(State(bytes(scored.kept.buffer)))
        n_samples += scored.n_samples
    predicted = workload.restore(state, {}).predict(bunch.data)
    wanted = sk.f1_score(bunch.target, predicted, average="macro")
    assert n_samples == len(bunch.target)
    assert workload.pool(kept) == {"f1": pytest.approx(wanted, abs=1e-12)}


@given(SETS, st.sampled_from([2, 4]), st.booleans())
def test_f1_of_classes_is_that_of_scikit_learn(
    how: tuple[int, int, int, int], n_classes: int, text: bool
) -> None:
    """As an estimator predicts them; they are no logits, though of their shape."""
    seed, n, n_shards, batch = how
    rng = np.random.default_rng(seed)
    target, output = rng.integers(0, n_classes, n), rng.integers(0, n_classes, n)
    average = "binary" if n_classes == 2 and not text else "macro"
    if text:
        target, output = (np.array(["a", "b", "c", "d"])[classes] for classes in (target, output))
    wanted = sk.f1_score(target, output, average=average, zero_division=0)
    if average == "macro" and set(target) | set(output) <= {0, 1}:
        wanted = sk.f1_score(target, output, zero_division=0)  # only these two were drawn
    assert f1(output, target) == pytest.approx(wanted, abs=1e-12)
    if not text:
        found = pooled({"f1": f1}, cut(output, target, n_shards, batch))
        assert found["f1"] == pytest.approx(wanted, abs=1e-12)


def test_an_estimators_f1_by_name() -> None:
    from sklearn.linear_model import SGDClassifier

    workload = dagsel.SklearnWorkload(SGDClassifier(random_state=0), metrics=["f1"])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2))
    y = (x[:, 0] > 0.5).astype(int) + (x[:, 1] > 0)
    shard = workload.prepare({"x": x, "y": y})
    visit = Visit(seed=0, trial=0, epoch=1, shard=0)
    state = workload.train(workload.init({}, seed=0), shard, {}, visit=visit).state
    scored = workload.evaluate(state, shard, {})
    assert scored.kept is not None
    predicted = workload.restore(state, {}).predict(x)
    wanted = sk.f1_score(y, predicted, average="macro")
    assert workload.pool([scored.kept])["f1"] == pytest.approx(wanted, abs=1e-12)


def test_what_is_no_number_has_no_score_and_classes_no_area() -> None:
    for output in (np.array([0.1, np.nan, 0.2]), np.array([[0.1, 0.2], [np.nan, 1], [0, 1]])):
        assert math.isnan(auroc(output, np.array([0, 1, 1])))
        assert math.isnan(f1(output, np.array([0, 1, 1])))
    assert math.isnan(r2(np.array([0.1, np.nan]), np.array([0.0, 1.0])))
    for classes in (np.array([0, 1, 1]), torch.tensor([0, 1, 1]), np.array(["a", "b", "b"])):
        with pytest.raises(ValueError, match="auroc ranks samples by their logits, and the model"):
            auroc(classes, np.array([0, 1, 1]))
    with pytest.raises(ValueError, match=r"output has shape \(3,\) and target \(2,\)"):
        f1(np.array([0, 1, 1]), np.array([0, 1]))
