"""Metrics: functions of output and target, of a batch or of the whole validation set.

A function of a batch returns the mean over its samples. What is no mean, such as the area under a
curve, is a function of all predictions: `over_set` says so. All take PyTorch tensors or NumPy
arrays. The attribute ``direction`` tells dagsel whether larger values are better. Metrics of your
own look like this::

    def exact_match(output, target):
        return (output == target).all(-1).mean()

    exact_match.direction = "maximize"

    @over_set(direction="maximize")
    def correlation(output, target):
        return torch.corrcoef(torch.stack([output, target]))[0, 1]
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Metric",
    "OverSet",
    "accuracy",
    "auroc",
    "binary_accuracy",
    "f1",
    "mean_absolute_error",
    "mean_squared_error",
    "over_set",
    "r2",
    "top_k",
]


class Metric(Protocol):
    """A function of a batch that returns the mean over its samples, and the better direction.

    Examples
    --------
    >>> import numpy as np
    >>> def exact_match(output, target):
    ...     return (output == target).all(-1).mean()
    >>> exact_match.direction = "maximize"
    >>> float(exact_match(np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 5]])))
    0.5
    """

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

    Each target counts. Where a loss leaves some out, as PyTorch's ``ignore_index``, take
    ``torchmetrics.classification.MulticlassAccuracy(..., ignore_index=-100)``.

    Parameters
    ----------
    output
        Scores, shape ``(n, n_classes, ...)``, of which the largest counts; or classes, of the
        shape of `target`.
    target
        Classes, shape ``(n, ...)``.

    Raises
    ------
    ValueError
        If the output holds neither, or the target no classes: their shapes would make numbers that
        mean nothing. If there are scores and a class that has none, which would count as wrong.

    Examples
    --------
    >>> import numpy as np
    >>> float(accuracy(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1])))
    0.5
    """
    return _mean(_classes(output, target) == target)


def _classes(output: Any, target: Any) -> Any:
    """Return the classes that an output says, of the shape of the target."""
    scores, classes = tuple(output.shape), tuple(target.shape)
    shapes = f"accuracy: the output has shape {scores} and the target {classes}"
    if len(scores) == len(classes) + 1 and scores[:1] + scores[2:] == classes:
        if scores[1] == 1:
            raise ValueError(
                f"{shapes}: of one score a sample the largest says nothing; take binary_accuracy "
                "for a logit of two classes, or let the model return a score for each class"
            )
        ends = () if 0 in classes else (int(target.min()), int(target.max()))
        if stray := [end for end in ends if not 0 <= end < scores[1]]:
            raise ValueError(
                f"accuracy: the target has the class {stray[0]}, and the scores are of classes 0 "
                f"to {scores[1] - 1}; if the loss leaves it out, write metrics={{'accuracy': "
                f"torchmetrics.classification.MulticlassAccuracy(num_classes={scores[1]}, "
                f"average='micro', ignore_index={stray[0]})}}, else number the classes from 0"
            )
        return output.argmax(1)
    if len(scores) == len(classes) + 1 and scores[:-1] == classes:
        raise ValueError(
            f"{shapes}: the classes' scores must be along its second axis, as PyTorch's "
            "cross_entropy has them; write output.movedim(-1, 1)"
        )
    if scores != classes:
        raise ValueError(
            f"{shapes}: give the number of each sample's class as the target, without an axis for "
            "scores, as in y[:, 0] or y.argmax(1)"
        )
    if "float" in str(output.dtype) and (hasattr(output, "detach") or (output % 1).any()):
        raise ValueError(
            f"{shapes}: so the output is no score for each class; take binary_accuracy for logits "
            "of two classes, or give class numbers as targets in place of one-hot rows"
        )
    return output


@_directed("maximize")
def binary_accuracy(output: Any, target: Any) -> Any:
    """Share of samples whose logit is above 0 exactly if the class is 1.

    Parameters
    ----------
    output
        Logits, no probabilities; of the shape of `target`, or with one more axis of size 1 at the
        end.
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


class OverSet:
    """A metric of the whole validation set. `over_set` makes it.

    Parameters
    ----------
    function
        Function of all outputs and all targets.
    direction
        ``"minimize"``, ``"maximize"``, or None if it is not known.

    Examples
    --------
    >>> isinstance(f1, OverSet), f1.direction
    (True, 'maximize')
    """

    over: Literal["set"] = "set"

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        direction: Literal["minimize", "maximize"] | None,
    ) -> None:
        self.function, self.direction = function, direction
        self.__name__ = str(getattr(function, "__name__", "<lambda>"))
        self.__doc__ = function.__doc__

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the metric of the set."""
        return self.function(output, target)

    def __repr__(self) -> str:
        return f"over_set({self.__name__})"


@overload
def over_set(
    function: Callable[[Any, Any], Any],
    *,
    direction: Literal["minimize", "maximize"] | None = None,
) -> OverSet: ...
@overload
def over_set(
    function: None = None, *, direction: Literal["minimize", "maximize"] | None = None
) -> Callable[[Callable[[Any, Any], Any]], OverSet]: ...
def over_set(
    function: Callable[[Any, Any], Any] | None = None,
    *,
    direction: Literal["minimize", "maximize"] | None = None,
) -> Any:
    """Say that a function is one of all outputs and targets of the validation set.

    It is called once an epoch, in the driver, with the outputs of all samples and their targets:
    tensors on the CPU where PyTorch trains. They have to fit in the driver's memory, for one trial
    at a time, and wait in the run directory until all shards are scored. It may return an array,
    such as a confusion matrix; each of its elements is a metric then. Also a decorator.

    Parameters
    ----------
    function
        Function of output and target.
    direction
        Whether larger values are better, if it is known.

    Examples
    --------
    >>> import numpy as np
    >>> @over_set(direction="minimize")
    ... def worst(output, target):
    ...     return abs(output - target).max()
    >>> float(worst(np.array([1.0, 2.0, 5.0]), np.array([1.0, 2.0, 3.0]))), worst.direction
    (2.0, 'minimize')
    """
    if direction not in (None, "minimize", "maximize"):
        raise ValueError(f"direction must be 'minimize' or 'maximize', got {direction!r}")
    if function is None:
        return lambda given: OverSet(given, direction)
    return OverSet(function, direction)


@over_set(direction="maximize")
def auroc(output: Any, target: Any) -> float:
    """Area under the ROC curve, over the whole set; of several classes the mean of one-vs-rest.

    NaN if an output is NaN.

    Parameters
    ----------
    output
        Logits, shape ``(n,)``, ``(n, 1)`` or ``(n, n_classes)``; or probabilities of the classes.
    target
        Classes, shape ``(n,)``: 0 or 1, or the column of the logit.

    Raises
    ------
    ValueError
        If the set lacks a class, or has one only, or the outputs are classes and no logits.

    Examples
    --------
    >>> import numpy as np
    >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    0.75
    """
    if _are_classes(output):
        raise ValueError(
            "auroc ranks samples by their logits, and the model returns classes, as estimators of "
            "scikit-learn do; take f1 or accuracy"
        )
    scores, classes = _scores(output, target)
    if np.isnan(scores).any():
        return math.nan
    if scores.shape[1] == 1:
        return _area(scores[:, 0], classes == 1, 1)
    if scores.shape[1] == 2:
        return _area(scores[:, 1] - scores[:, 0], classes == 1, 1)
    shares = scores
    if (scores < 0).any() or not np.allclose(scores.sum(1), 1, atol=0.01):  # no probabilities yet
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
    areas = [_area(shares[:, k], classes == k, k) for k in range(scores.shape[1])]
    return float(np.mean(areas))


def _area(scores: NDArray[Any], is_positive: NDArray[Any], label: int) -> float:
    n_positive = int(is_positive.sum())
    n_negative = len(scores) - n_positive
    if not n_positive or not n_negative:
        there = "all are" if n_positive else "none is"
        raise ValueError(
            f"auroc needs samples of class {label} and of others, and {there} of it among the "
            f"{len(scores)} of the validation set"
        )
    # The rank of a score, of equal ones their mean rank: Mann and Whitney's U over the pairs.
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    pairs = n_positive * n_negative
    return float((ranks[is_positive].sum() - n_positive * (n_positive + 1) / 2) / pairs)


@over_set(direction="maximize")
def f1(output: Any, target: Any) -> float:
    """F1 of class 1, or with other classes the mean over classes, of the whole set.

    A class that is neither there nor predicted counts 0. NaN if an output is NaN.

    Parameters
    ----------
    output
        Scores, shape ``(n, n_classes)``; logits, no probabilities, shape ``(n,)`` or ``(n, 1)``; or
        classes, as an estimator predicts them: whole numbers or text, of the shape of `target`.
    target
        Classes, shape ``(n,)``: of logits 0 or 1, or the column.

    Examples
    --------
    >>> import numpy as np
    >>> f1(np.array([2.0, -1.0, 0.5]), np.array([1, 1, 0]))
    0.5
    """
    labels: Iterable[Any]
    if _are_classes(output):
        predicted, classes = _numpy(output).reshape(-1), _numpy(target).reshape(-1)
        if predicted.shape != classes.shape:
            raise ValueError(f"output has shape {predicted.shape} and target {classes.shape}")
        known = np.union1d(predicted, classes).tolist()
        labels = [1] if set(known) <= {0, 1} else known
    else:
        scores, classes = _scores(output, target)
        if np.isnan(scores).any():
            return math.nan
        n_classes = scores.shape[1]
        is_share = n_classes == 1 and ((scores >= 0) & (scores <= 1)).all()
        if is_share and (scores % 1).any():
            _say_all_are_one()
        predicted = (scores[:, 0] > 0).astype(np.int64) if n_classes == 1 else scores.argmax(1)
        labels = [1] if n_classes <= 2 else range(n_classes)
    found = []
    for label in labels:
        is_right = ((predicted == label) & (classes == label)).sum()
        n_both = (predicted == label).sum() + (classes == label).sum()
        found.append(2 * is_right / n_both if n_both else 0.0)
    return float(np.mean(found))


@cache
def _say_all_are_one() -> None:
    logging.getLogger("dagsel").warning(
        "f1 takes logits, of which those above 0 say class 1, and all outputs are from 0 to 1, as "
        "those of a sigmoid: let the model return logits, without its last sigmoid"
    )


@over_set(direction="maximize")
def r2(output: Any, target: Any) -> float:
    """Coefficient of determination over the whole set; of several columns the mean.

    Of a target that is constant it is 1 if all predictions are right, and else 0.

    Parameters
    ----------
    output
        Predictions, of the shape of `target` or with one more dimension of size 1 at the end.
    target
        Targets, shape ``(n,)`` or ``(n, n_columns)``.

    Examples
    --------
    >>> import numpy as np
    >>> r2(np.array([2.5, 0.0, 2.0, 8.0]), np.array([3.0, -0.5, 2.0, 7.0])).round(4)
    0.9486
    """
    truth = _numpy(target).astype(np.float64)
    rest = (_aligned(_numpy(output).astype(np.float64), truth) - truth).reshape(len(truth), -1)
    truth = truth.reshape(len(truth), -1)
    left = (rest**2).sum(0)
    spread = ((truth - truth.mean(0)) ** 2).sum(0)
    is_constant = spread == 0
    scores = np.where(is_constant, left == 0, 1 - left / np.where(is_constant, 1, spread))
    return float(scores.mean())


def _numpy(values: Any) -> NDArray[Any]:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _are_classes(output: Any) -> bool:
    """Whether outputs are classes, as an estimator predicts them, and no logits."""
    return _numpy(output).dtype.kind in "biuSU"


def _scores(output: Any, target: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return scores, shape ``(n, n_classes)`` or ``(n, 1)``, and classes, shape ``(n,)``."""
    scores, classes = _numpy(output).astype(np.float64), _numpy(target)
    scores = scores.reshape(len(scores), -1)
    if classes.size != len(scores):
        raise ValueError(
            f"the target has shape {classes.shape}, and this metric takes one class for each of "
            f"{len(scores)} samples; of several labels a sample take binary_accuracy, and where "
            "each pixel or token has a class give a function of yours that flattens both"
        )
    return scores, classes.reshape(-1)


def _aligned(output: Any, target: Any) -> Any:
    if output.ndim == target.ndim + 1 and output.shape[-1] == 1:  # (n, 1) - (n,) would be (n, n)
        output = output[..., 0]
    if output.shape != target.shape:
        raise ValueError(f"output has shape {tuple(output.shape)} and target {tuple(target.shape)}")
    is_whole = "float" not in f"{output.dtype} {target.dtype}"
    return output * 1.0 if is_whole else output  # a difference of small integers wraps around
