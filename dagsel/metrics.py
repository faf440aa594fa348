"""Metrics: functions of a batch's output and target that return the mean over its samples.

All take PyTorch tensors or NumPy arrays, and import neither. The attribute ``direction`` tells
dagsel whether larger values are better. A metric of your own looks like this::

    def exact_match(output, target):
        return (output == target).all(-1).mean()

    exact_match.direction = "maximize"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

__all__ = [
    "Metric",
    "accuracy",
    "binary_accuracy",
    "mean_absolute_error",
    "mean_squared_error",
    "top_k",
]


class Metric(Protocol):
    """A function that returns a mean over the samples of a batch, and the better direction."""

    direction: Literal["minimize", "maximize"]

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the mean over the batch."""
        ...


def _directed(
    direction: Literal["minimize", "maximize"],
) -> Callable[[Callable[[Any, Any], Any]], Metric]:
    def mark(function: Callable[[Any, Any], Any]) -> Metric:
        function.direction = direction  # type: ignore[attr-defined]
        return function  # type: ignore[return-value]

    return mark


def _mean(values: Any) -> Any:
    # In float64, so that a count is exact and the order of summation hardly matters.
    if hasattr(values, "detach"):
        return values.double().mean()
    return values.astype("float64").mean()


@_directed("maximize")
def accuracy(output: Any, target: Any) -> Any:
    """Share of samples whose class is right.

    Parameters
    ----------
    output
        Scores, shape ``(n, n_classes, ...)``, of which the largest counts; or classes, of the
        shape of `target`.
    target
        Classes, shape ``(n, ...)``.

    Examples
    --------
    >>> import numpy as np
    >>> float(accuracy(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1])))
    0.5
    """
    predicted = output.argmax(1) if output.ndim > target.ndim else output
    return _mean(predicted == target)


@_directed("maximize")
def binary_accuracy(output: Any, target: Any) -> Any:
    """Share of samples whose logit is above 0 exactly if the class is 1.

    Parameters
    ----------
    output
        Logits, of the shape of `target` or with one more dimension of size 1 at the end.
    target
        0 or 1, shape ``(n, ...)``.

    Examples
    --------
    >>> import numpy as np
    >>> float(binary_accuracy(np.array([[2.0], [-1.0], [0.5]]), np.array([1, 0, 0])))
    0.6666666666666666
    """
    return _mean((_aligned(output, target) > 0) == (target > 0))


def top_k(k: int) -> Metric:
    """Return the metric: share of samples whose class is among the `k` with the highest scores.

    Among classes of equal score, the target counts as the last.

    Parameters
    ----------
    k
        How many classes count.

    Examples
    --------
    >>> import numpy as np
    >>> top_2 = top_k(2)
    >>> float(top_2(np.array([[0.1, 0.5, 0.4], [0.7, 0.2, 0.1]]), np.array([2, 2])))
    0.5
    """
    if isinstance(k, bool) or not hasattr(k, "__index__") or k < 1:
        raise ValueError(f"k must be a whole number of 1 or more, got {k!r}; write top_k(5)")
    return _TopK(int(k))


class _TopK:
    direction: Literal["minimize", "maximize"] = "maximize"

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, output: Any, target: Any) -> Any:
        classes = target.reshape(-1, 1)
        if hasattr(output, "detach"):
            own = output.gather(1, classes)
        else:
            own = output[range(len(output)), classes[:, 0]].reshape(-1, 1)
        # NaN equals nothing, itself included: a class whose score is NaN is no hit.
        return _mean((own == own)[:, 0] & ((output >= own).sum(1) <= self.k))

    def __repr__(self) -> str:
        return f"top_k({self.k})"


@_directed("minimize")
def mean_squared_error(output: Any, target: Any) -> Any:
    """Mean of the squared differences.

    Parameters
    ----------
    output
        Predictions, of the shape of `target` or with one more dimension of size 1 at the end.
    target
        Targets, shape ``(n, ...)``.

    Examples
    --------
    >>> import numpy as np
    >>> float(mean_squared_error(np.array([[1.0], [3.0]]), np.array([1.0, 1.0])))
    2.0
    """
    return _mean((_aligned(output, target) - target) ** 2)


@_directed("minimize")
def mean_absolute_error(output: Any, target: Any) -> Any:
    """Mean of the absolute differences.

    Parameters
    ----------
    output
        Predictions, of the shape of `target` or with one more dimension of size 1 at the end.
    target
        Targets, shape ``(n, ...)``.

    Examples
    --------
    >>> import numpy as np
    >>> float(mean_absolute_error(np.array([1.0, 3.0]), np.array([1.0, 1.0])))
    1.0
    """
    return _mean(abs(_aligned(output, target) - target))


def _aligned(output: Any, target: Any) -> Any:
    # Without this, (n, 1) - (n,) would be broadcast to (n, n).
    if output.ndim == target.ndim + 1 and output.shape[-1] == 1:
        output = output[..., 0]
    if output.shape != target.shape:
        raise ValueError(f"output has shape {tuple(output.shape)} and target {tuple(target.shape)}")
    return output
