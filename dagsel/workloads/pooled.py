"""Metrics of a whole validation set: what is kept of each shard, and the numbers that come of all.

A mean over samples can be taken shard by shard. The area under a curve cannot: it is a function of
all predictions. Of such a metric each validation shard keeps its outputs and targets, or what an
object of torchmetrics has accumulated over them, and the driver puts the shards together in their
order. So the value is that of the whole set, whatever the shards and the workers are.
"""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown
from dagsel.errors import WorkloadError
from dagsel.state import State, Tensor

_OUTPUT, _TARGET = "output", "target"
#: What a metric has that accumulates: an object of torchmetrics.
_ACCUMULATES = ("update", "compute", "reset", "metric_state", "merge_state")


def accumulates(metric: Any) -> bool:
    """Whether a metric is an object of torchmetrics, or one that works alike."""
    return not isinstance(metric, type) and all(hasattr(metric, name) for name in _ACCUMULATES)


def is_pooled(metric: Any) -> bool:
    """Whether a metric is a function of all predictions."""
    return getattr(metric, "over", "batch") == "set" or accumulates(metric)


def check_pooled(name: str, metric: Any) -> None:
    """Raise a `WorkloadError` if what shards have accumulated of a metric cannot be added up."""
    over = getattr(metric, "over", "batch")
    if over not in ("batch", "set"):
        raise WorkloadError(f'metric {name!r}: over must be "batch" or "set", got {shown(over)}')
    if not accumulates(metric):
        return
    needs_all = getattr(metric, "full_state_update", False) is not False
    if needs_all or getattr(metric, "dist_sync_on_step", False):
        raise WorkloadError(
            f"metric {name!r}: {type(metric).__name__} cannot be merged from shards (its "
            "full_state_update is not False); write metrics={...: "
            "dagsel.metrics.over_set(lambda output, target: metric(output, target), direction=...)}"
        )


class Pool:
    """What a shard keeps of the metrics of a whole set, batch by batch.

    Parameters
    ----------
    metrics
        These metrics by name.

    Examples
    --------
    >>> import numpy as np
    >>> from dagsel.metrics import over_set
    >>> spread = {"spread": over_set(lambda output, target: output.max() - output.min())}
    >>> parts = []
    >>> for outputs in ([1.0, 2.0], [7.0]):
    ...     pool = Pool(spread)
    ...     pool.add(np.array(outputs), np.zeros(len(outputs)))
    ...     parts.append(pool.pack())
    >>> pooled_values(spread, parts)
    {'spread': 6.0}
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._accumulating = {
            name: copy.deepcopy(metric) for name, metric in metrics.items() if accumulates(metric)
        }
        for metric in self._accumulating.values():
            metric.reset()
        self._is_new = True
        self._of_outputs = [name for name in metrics if name not in self._accumulating]
        self._arrays: dict[str, list[NDArray[Any]]] = {}  # of outputs and targets, by their keys
        self._forms: dict[str, Form] = {}

    def add(self, output: Any, target: Any) -> None:
        """Take in a batch's outputs and targets."""
        if self._is_new and hasattr(output, "device"):
            for metric in self._accumulating.values():
                metric.to(output.device)
        self._is_new = False
        for metric in self._accumulating.values():
            metric.update(output, target)
        if self._of_outputs:
            for what, value in ((_OUTPUT, output), (_TARGET, target)):
                self._forms[what], arrays = _taken_apart(what, value)
                for key, array in arrays.items():
                    self._arrays.setdefault(key, []).append(array)

    def pack(self) -> State:
        """Return what is kept."""
        tensors = {
            key: Tensor.from_numpy(_joined(key, arrays, self._of_outputs))
            for key, arrays in self._arrays.items()
        }
        n_pieces: dict[str, int] = {}
        for name, metric in self._accumulating.items():
            of_metric, lists = packed_metric(name, metric)
            tensors |= of_metric
            n_pieces |= lists
        return State.pack(tensors, {"lists": n_pieces, "forms": self._forms})


def packed_metric(name: str, metric: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return what an object of torchmetrics has accumulated, and how long lists in it are."""
    tensors: dict[str, Tensor] = {}
    n_pieces: dict[str, int] = {}
    for key, value in metric.metric_state.items():
        pieces = value if isinstance(value, list) else [value]
        if isinstance(value, list):
            n_pieces[f"{name}.{key}"] = len(pieces)
        for number, piece in enumerate(pieces):
            array = _array(piece, f"state {key!r} of metric {name!r}")
            tensors[f"{name}.{key}.{number}"] = Tensor.from_numpy(array)
    return tensors, n_pieces


def pooled_values(
    metrics: Mapping[str, Any],
    parts: Sequence[State],
    as_tensor: Callable[[NDArray[Any]], Any] = lambda array: array,
) -> dict[str, float]:
    """Return the metrics of a whole set.

    Parameters
    ----------
    metrics
        Metrics of a whole set by name.
    parts
        What the shards have kept, in their order.
    as_tensor
        Makes what the metrics get of an array.

    Returns
    -------
    dict
        The value of each. Of one that is an array, such as a confusion matrix, each element:
        ``confusion[0,1]``.

    Raises
    ------
    WorkloadError
        If one is no number and no array of numbers. What a metric itself raises is not caught.
    """
    functions = {name: metric for name, metric in metrics.items() if not accumulates(metric)}
    values: dict[str, Any] = {}
    if functions:
        filled = [part for part in parts if part.meta["forms"]]  # a shard may have no samples
        arrays = [{key: tensor.numpy() for key, tensor in part.tensors.items()} for part in filled]
        forms = filled[0].meta["forms"]
        output, target = (
            _put_together(
                what,
                forms[what],
                lambda key: as_tensor(_joined(key, [array[key] for array in arrays], functions)),
            )
            for what in (_OUTPUT, _TARGET)
        )
        values |= {name: function(output, target) for name, function in functions.items()}
    for name, metric in metrics.items():
        if name not in functions:
            values[name] = _accumulated(name, metric, parts, as_tensor)
    return dict(item for name in metrics for item in _numbers(name, values[name]))


def _accumulated(
    name: str,
    metric: Any,
    parts: Sequence[State],
    as_tensor: Callable[[NDArray[Any]], Any],
) -> Any:
    whole = copy.deepcopy(metric)
    whole.reset()
    for number, part in enumerate(parts):
        if hasattr(whole, "_update_count"):  # a state that is a mean is merged by it
            whole._update_count = number + 1
        lists, tensors = part.meta["lists"], part.tensors
        state: dict[str, Any] = {}
        for key in whole.metric_state:
            n = lists.get(f"{name}.{key}")
            found = [
                as_tensor(tensors[f"{name}.{key}.{at}"].numpy().copy())
                for at in range(1 if n is None else n)
            ]
            state[key] = found[0] if n is None else found
        if number == 0:
            for key, value in state.items():
                setattr(whole, key, value)
        else:
            earlier = whole.metric_state
            for key, value in state.items():  # the later one comes second, as it was trained
                setattr(whole, key, value)
            whole.merge_state(earlier)
    return whole.compute()


#: How outputs or targets are made of arrays: one, so many in a tuple, some with these names, or
#: those of a named tuple, by the name of its class and its fields.
Form: TypeAlias = "int | list[str] | dict[str, list[str]] | None"


def _taken_apart(what: str, value: Any) -> tuple[Form, dict[str, NDArray[Any]]]:
    """Return of which arrays outputs or targets consist: one, those of a tuple or of a mapping."""
    if isinstance(value, Mapping):
        names = list(map(str, value))
        return names, {f"{what}.{name}": _array(value[name], what) for name in value}
    if isinstance(value, tuple | list):
        fields = getattr(value, "_fields", None)
        form: Form = len(value) if fields is None else {type(value).__name__: list(fields)}
        return form, {f"{what}.{at}": _array(part, what) for at, part in enumerate(value)}
    return None, {what: _array(value, what)}


def _joined(what: str, arrays: Sequence[NDArray[Any]], metrics: Iterable[str]) -> NDArray[Any]:
    """Return outputs or targets of several batches as one array."""
    try:
        return np.concatenate(arrays)
    except ValueError:
        shapes = {array.shape[1:]: array.shape for array in arrays}
        found = " and ".join(map(str, [*shapes.values()][:2]))
        raise WorkloadError(
            f"metrics over the whole set ({', '.join(map(repr, metrics))}) need the {what} of all "
            f"batches as one array, and it has shape {found}: give every sample a row of one "
            "shape, as by padding to one length in a collate of your own, or take a mean over "
            "batches or an object of torchmetrics"
        ) from None


def _put_together(what: str, form: Form, get: Callable[[str], Any]) -> Any:
    """Make outputs or targets of their arrays."""
    if form is None:
        return get(what)
    if isinstance(form, int):
        return tuple(get(f"{what}.{at}") for at in range(form))
    if isinstance(form, dict):
        ((name, fields),) = form.items()
        return namedtuple(name, fields)(*(get(f"{what}.{at}") for at in range(len(fields))))
    return {name: get(f"{what}.{name}") for name in form}


def _array(value: Any, what: str) -> NDArray[Any]:
    """Return a tensor or an array as a NumPy array; half precision becomes float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    if not isinstance(value, np.ndarray | np.generic):
        raise WorkloadError(
            f"a metric over the whole set needs tensors, one or those of a tuple or a mapping, and "
            f"the {what} has {shown(value)}; take a mean over batches, or an object of torchmetrics"
        )
    return np.asarray(value)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    try:
        found = _array(value, name) if hasattr(value, "detach") else np.asarray(value)
        numbers = found.astype(np.float64)
    except (TypeError, ValueError):
        raise WorkloadError(
            f"metric {name!r} must be a number, got {shown(value)}; return one, such as "
            "value.item()"
        ) from None
    if numbers.size == 1:
        yield name, float(numbers.reshape(()))
        return
    for at in np.ndindex(numbers.shape):
        yield f"{name}[{','.join(map(str, at))}]", float(numbers[at])


class PoolsMetrics:
    """A workload some of whose metrics are functions of all predictions (`base.PoolsScores`)."""

    _metrics: Mapping[str, Any]
    #: Makes what metrics of the whole set get of an array.
    _as_tensor: Callable[[NDArray[Any]], Any] = staticmethod(lambda array: array)

    @property
    def pooled_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are functions of all predictions."""
        return tuple(name for name, metric in self._metrics.items() if is_pooled(metric))

    def pool(self, kept: Sequence[State]) -> dict[str, float]:
        """Return these metrics, of what the validation shards have kept."""
        metrics = {name: self._metrics[name] for name in self.pooled_metrics}
        return pooled_values(metrics, kept, self._as_tensor)

    def _parted(self) -> tuple[Pool | None, dict[str, Any]]:
        """Return a new pool for a shard, if one is needed, and the metrics that are means."""
        names = self.pooled_metrics
        means = {name: metric for name, metric in self._metrics.items() if name not in names}
        return (Pool({name: self._metrics[name] for name in names}) if names else None), means
