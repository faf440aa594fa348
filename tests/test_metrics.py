"""Metrics agree with scikit-learn's, on arrays and on tensors, and import neither library."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel import metrics


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_classification(seed: int, n: int, n_classes: int) -> None:
    rng = np.random.default_rng(seed)
    scores, classes = rng.random((n, n_classes)), rng.integers(0, n_classes, n)
    expected = sklearn.metrics.accuracy_score(classes, scores.argmax(1))
    k = int(rng.integers(1, n_classes + 1))
    ranks = (scores >= scores[np.arange(n), classes][:, None]).sum(1)
    for make in (np.asarray, torch.from_numpy):
        output, target = make(scores), make(classes)
        assert float(metrics.accuracy(output, target)) == pytest.approx(expected, abs=1e-12)
        assert metrics.accuracy(output, target) == metrics.accuracy(output.argmax(1), target)
        assert float(metrics.top_k(k)(output, target)) == pytest.approx(np.mean(ranks <= k))
        binary = metrics.binary_accuracy(output[:, :1] - 0.5, target % 2)
        assert float(binary) == pytest.approx(np.mean((scores[:, 0] > 0.5) == (classes % 2 > 0)))


@given(st.integers(0, 10**6), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_regression(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    output, target = rng.normal(size=(n, 1)), rng.normal(size=n)
    squared = sklearn.metrics.mean_squared_error(target, output[:, 0])
    absolute = sklearn.metrics.mean_absolute_error(target, output[:, 0])
    for make in (np.asarray, torch.from_numpy):
        got = metrics.mean_squared_error(make(output), make(target))
        assert float(got) == pytest.approx(squared)
        got = metrics.mean_absolute_error(make(output), make(target))
        assert float(got) == pytest.approx(absolute)


def test_counts_are_exact_in_low_precision() -> None:
    n = 4099
    output = torch.zeros(n, 2, dtype=torch.float16)
    output[: n - 1, 1] = 1
    assert float(metrics.accuracy(output, torch.ones(n, dtype=torch.int64))) == (n - 1) / n


def test_segmentation_maps_count_every_pixel() -> None:
    output = torch.zeros(2, 3, 4, 4)
    output[:, 1] = 1
    target = torch.ones(2, 4, 4, dtype=torch.int64)
    target[0, 0, 0] = 2
    assert float(metrics.accuracy(output, target)) == 31 / 32


@pytest.mark.parametrize(
    "metric", [metrics.mean_squared_error, metrics.mean_absolute_error, metrics.binary_accuracy]
)
def test_shapes_that_would_broadcast_are_refused(metric: Any) -> None:
    with pytest.raises(ValueError, match=r"output has shape \(3,\) and target \(3, 1\)"):
        metric(np.zeros(3), np.zeros((3, 1)))


def test_a_nan_score_is_no_hit() -> None:
    scores = np.array([[np.nan, 1.0], [0.0, 1.0]])
    assert float(metrics.top_k(2)(scores, np.array([0, 1]))) == 0.5
    with pytest.raises(ValueError, match="k must be a whole number of 1 or more, got 0"):
        metrics.top_k(0)


def test_directions() -> None:
    more = [metrics.accuracy, metrics.binary_accuracy, metrics.top_k(3)]
    less = [metrics.mean_squared_error, metrics.mean_absolute_error]
    assert {metric.direction for metric in more} == {"maximize"}
    assert {metric.direction for metric in less} == {"minimize"}


@pytest.mark.parametrize("module", ["dagsel.metrics", "dagsel.workloads", "dagsel.testing"])
def test_importing_is_cheap(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'sklearn'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("output", "target", "cure"),
    [
        ((6, 1), (6,), "binary_accuracy"),
        ((6, 1), (6, 1), "binary_accuracy"),
        ((6,), (6,), "binary_accuracy"),
        ((6, 3), (6, 3), "one-hot"),
        ((6, 3), (6, 1), "without an axis"),
        ((6,), (6, 1), "without an axis"),
    ],
)
def test_accuracy_refuses_what_would_mean_nothing(output: Any, target: Any, cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        metrics.accuracy(torch.zeros(output), torch.zeros(target))


def test_accuracy_of_scores_with_one_hot_rows_is_refused_of_arrays_too() -> None:
    scores, rows = np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match="in place of one-hot rows"):
        metrics.accuracy(scores, rows)
    predicted = np.array([0.0, 1.0, 1.0])  # as an estimator says classes that are 0.0 and 1.0
    assert metrics.accuracy(predicted, np.array([0.0, 1.0, 0.0])) == 2 / 3


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["NumPy", "PyTorch"])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_differences_of_small_integers_do_not_wrap_around(make: Any, dtype: str) -> None:
    library: Any = np if make is np.array else torch
    low, high = (make([value, value], dtype=getattr(library, dtype)) for value in (3, 100))
    for output, target in ((low, high), (high, low)):
        assert float(metrics.mean_absolute_error(output, target)) == 97.0
        assert float(metrics.mean_squared_error(output, target)) == 97.0**2
