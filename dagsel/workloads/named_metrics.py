"""Metrics as workloads are given them: by name, and functions of output and target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import dagsel.metrics
from dagsel.checks import short_traceback, shown, takes, takes_in_another_order
from dagsel.errors import WorkloadError
from dagsel.flow import Direction
from dagsel.workloads.pooled import accumulates, check_pooled

logger = logging.getLogger("dagsel")


def directions(metrics: Mapping[str, Any]) -> dict[str, Direction | None]:
    """Return the better direction of each metric, if it says so, as dagsel's or torchmetrics'."""
    of_torchmetrics: dict[bool | None, Direction] = {True: "maximize", False: "minimize"}
    return {
        name: getattr(
            metric, "direction", of_torchmetrics.get(getattr(metric, "higher_is_better", None))
        )
        for name, metric in metrics.items()
    }


@short_traceback
def metric_functions(metrics: Any, loss: Any = None) -> dict[str, Callable[[Any, Any], Any]]:
    """Return metrics by name; names of dagsel's own, and functions with a name, will do.

    Raises
    ------
    WorkloadError
        If one is no function, or dagsel has none of that name. If one takes logits, and `loss` is
        one of PyTorch's that takes probabilities.

    Examples
    --------
    >>> list(metric_functions(["accuracy", dagsel.metrics.mean_squared_error]))
    ['accuracy', 'mean_squared_error']
    >>> metric_functions("f2")
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: dagsel has no metric 'f2', it has accuracy, binary_accuracy, ...
    """
    if metrics is None:
        return {}
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, Mapping):
        if not isinstance(metrics, list | tuple | set | frozenset):
            raise _no_metric(metrics)
        metrics = {item if isinstance(item, str) else _name(item): item for item in metrics}
    named: dict[str, Any] = {
        name: _OWN.get(it, it) if isinstance(it, str) else it for name, it in metrics.items()
    }
    for name, function in named.items():
        if isinstance(function, str):
            own = _OTHER_NAMES.get(function.casefold())
            write = f"metrics={{{function!r}: function}} with a function of output and target"
            raise WorkloadError(
                f"dagsel has no metric {function!r}, it has {', '.join(_OWN)}; write "
                + (f"{own!r}, or {write}" if own else write)
            )
        if isinstance(function, type):
            raise WorkloadError(
                f"metric {name!r} is {shown(function)}: make one of it, as in "
                f"metrics={{{name!r}: {function.__name__}(...)}}"
            )
        _check_order_of_arguments(name, function)
        if not (accumulates(function) or takes(function, 2)):
            raise _no_metric(function)
        check_pooled(name, function)
        _check_logits(name, function, loss)
    return named


#: Metrics by name, or names of dagsel's own.
Metrics: TypeAlias = Mapping[str, Callable[[Any, Any], Any] | str] | Sequence[Any]

_OWN: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(dagsel.metrics, name)
    for name in (
        "accuracy",
        "binary_accuracy",
        "mean_absolute_error",
        "mean_squared_error",
        "auroc",
        "f1",
        "r2",
    )
}
#: What others call some of them.
_OTHER_NAMES = {
    "acc": "accuracy",
    "accuracy_score": "accuracy",
    "auc": "auroc",
    "f1_macro": "f1",
    "f1_score": "f1",
    "mae": "mean_absolute_error",
    "mse": "mean_squared_error",
    "r2_score": "r2",
    "roc_auc": "auroc",
    "roc_auc_score": "auroc",
}


#: Functions of scikit-learn that are means over samples, and the same either way round.
_EITHER_WAY = frozenset(
    {"accuracy_score", "hamming_loss", "mean_absolute_error", "mean_squared_error", "zero_one_loss"}
)


def _check_order_of_arguments(name: str, function: Any) -> None:
    """Raise a `WorkloadError` for a function that takes the target first, as scikit-learn's do.

    What is called the other way round returns a number too, and another one: precision for recall.
    Of another function the names of its arguments tell.
    """
    inner = function.function if isinstance(function, dagsel.metrics.OverSet) else function
    while isinstance(inner, partial):
        inner = inner.func
    theirs = getattr(inner, "__name__", "")
    is_sklearns = str(getattr(inner, "__module__", "")).startswith("sklearn.metrics")
    if is_sklearns and theirs in _EITHER_WAY:
        return
    if not (is_sklearns and theirs):  # a scorer has no name
        if takes_in_another_order(inner, ["output", "target"]):
            raise WorkloadError(
                f"metric {name!r} is called with output and target, and {shown(inner)} takes the "
                f"target first; write metrics={{{name!r}: {_the_other_way(function, theirs)}}}"
            )
        return
    if theirs.endswith("_score"):  # so scikit-learn names what is better if it is larger
        better = ', direction="maximize"'
    else:
        better = ', direction="minimize"' if theirs.endswith(("_error", "_loss")) else ""
    raise WorkloadError(
        f"{theirs} of scikit-learn takes the target first, and dagsel's metrics take "
        f"it last; write metrics={{{name!r}: dagsel.metrics.over_set(lambda output, target: "
        f"{theirs}(target, output){better})}}, with output.argmax(1) where the output has "
        "a score for each class"
    )


def _the_other_way(function: Any, name: str) -> str:
    called = name if name.isidentifier() else "function"
    write = f"lambda output, target: {called}(target, output)"
    if isinstance(function, dagsel.metrics.OverSet):
        return f"dagsel.metrics.over_set({write}, direction={function.direction!r})"
    return write


#: Losses of PyTorch whose outputs are probabilities.
_OF_PROBABILITIES = frozenset({"BCELoss", "binary_cross_entropy"})
_SIGMOIDS = frozenset({"Sigmoid", "sigmoid", "expit"})


def _check_logits(name: str, function: Any, loss: Any) -> None:
    """Raise a `WorkloadError` for a metric that compares logits with 0 beside such a loss.

    A function that calls such a loss may call a sigmoid, too: it is told in the log.
    """
    if function not in (dagsel.metrics.f1, dagsel.metrics.binary_accuracy):
        return
    while isinstance(loss, partial):
        loss = loss.func
    theirs = getattr(loss, "__name__", type(loss).__name__)
    is_torchs = str(getattr(loss, "__module__", "")).startswith("torch.nn.")
    cure = (
        "let the model return logits, without its last sigmoid, and write "
        "loss=torch.nn.functional.binary_cross_entropy_with_logits"
    )
    if is_torchs and theirs in _OF_PROBABILITIES:
        raise WorkloadError(
            f"metric {name!r} takes logits, of which those above 0 say class 1, and {theirs} takes "
            f"probabilities, which all are: {cure}"
        )
    called = set(getattr(getattr(loss, "__code__", None), "co_names", ()))
    if called & _OF_PROBABILITIES and not called & _SIGMOIDS:
        logger.warning(
            "metric %r takes logits, of which those above 0 say class 1, and the loss calls %s, "
            "which takes probabilities: %s",
            name,
            min(called & _OF_PROBABILITIES),
            cure.replace("write loss=", "call "),
        )


def _name(function: Any) -> str:
    kind = type(function).__name__ if accumulates(function) else "<lambda>"
    name = getattr(function, "__name__", kind)
    if not callable(function) or not name.isidentifier():
        raise _no_metric(function)
    return str(name)


def _no_metric(given: Any) -> WorkloadError:
    return WorkloadError(
        f"metrics must be functions of output and target by name, got {shown(given)}; write "
        'metrics={"accuracy": dagsel.metrics.accuracy} or metrics=["accuracy"]'
    )
