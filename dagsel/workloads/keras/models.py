"""Compiled models of Keras: whether they can be trained, their metrics, their arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown
from dagsel.errors import WorkloadError
from dagsel.workloads.arrays import code_of
from dagsel.workloads.base import Config
from dagsel.workloads.keras.backend import import_keras
from dagsel.workloads.raised import cure_of

keras = import_keras()
get_keras_mask = import_module("keras.src.backend").get_keras_mask

_CAUSE = re.compile(r"Error encountered:\s+(.*)", re.DOTALL)
#: What Keras says besides: colours, and what a layer was called with, which is told already.
_BESIDES = re.compile(r"\x1b\[\d*m|Arguments received by .*", re.DOTALL)
_COMPARE = (
    "compare its layers, loss and metrics with the shape of a batch, or reshape it in input_fn"
)
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def make(function: Callable[[Any], Any], config: Config) -> Any:
    """Build a model and its optimizer.

    Raises
    ------
    WorkloadError
        If it is no compiled model with weights to train.
    """
    model = function(config)
    if not isinstance(model, keras.Model):
        raise WorkloadError(
            f"model must return a compiled keras.Model, got {shown(model)}; write model=build, "
            "with a function build(config) that ends with  return model"
        )
    name = type(model).__name__
    if isinstance(getattr(model, "history", None), keras.callbacks.History):
        raise WorkloadError(
            f"model(config) calls fit on the {name} that it returns: leave fit out, dagsel trains "
            "the model on the shards, and scores it on samples that it has not seen"
        )
    if not model.compiled or model.optimizer is None:
        raise WorkloadError(
            f"the {name} is not compiled: call model.compile(optimizer=..., loss=..., "
            "metrics=[...]) before model(config) returns it"
        )
    if not model.built or not all(layer.built for layer in model.layers):
        raise WorkloadError(
            f"the {name} has no weights yet: begin it with keras.Input(shape), or call it once, as "
            "in model(numpy.zeros((1, 8))) for samples of shape (8,), before model(config) returns "
            "it; model.build may make none"
        )
    if not (computes_loss(model) or (_owns(model, "train_step") and _owns(model, "test_step"))):
        raise WorkloadError(
            f'the {name} is compiled without a loss: write model.compile(..., loss="mse"), or a '
            "train_step and a test_step of its own"
        )
    if others := _other_optimizers(model):
        raise WorkloadError(
            f"the {name} holds the optimizer {others[0]!r} beside the one that it is compiled "
            "with, and no state holds what it learns: compile one optimizer, or take a "
            "LightningWorkload, which trains with several"
        )
    if not model.trainable_variables:
        raise WorkloadError(f"the {name} has no weights to train: all of its layers are frozen")
    model.optimizer.build(model.trainable_variables)
    return model


def computes_loss(model: Any) -> bool:
    """Whether a model has a loss without its own ``train_step``."""
    return model.loss is not None or bool(model.losses) or _owns(model, "compute_loss")


def _owns(model: Any, method: str) -> bool:
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _other_optimizers(model: Any) -> list[str]:
    return [
        name
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
        if not name.startswith("_")
    ]


def attributes(model: Any) -> dict[str, int | float]:
    """Return the numbers that a model and layers of the user's hold outside their variables."""
    parts = [model, *model._flatten_layers(include_self=False)]
    return {
        f"{type(part).__name__}.{name}": value
        for part in parts
        if not type(part).__module__.startswith("keras.")
        for name, value in vars(part).items()
        if type(value) in (int, float) and not name.startswith("_")
    }


class _Step(keras.Operation):  # type: ignore[misc, name-defined]
    """An evaluation, to be gone through without numbers: it makes losses and metrics."""

    def __init__(self, model: Any) -> None:
        super().__init__(name="dagsel_step")
        self.model, self.n_outputs = model, None

    def call(self, inputs: Any, targets: Any) -> Any:
        output = self.model(inputs, training=False)
        # What pads a sequence, and is masked, may have any number as its class.
        is_masked = get_keras_mask(output) is not None
        self.n_outputs = None if is_masked else getattr(output, "shape", (None,))[-1]
        self.model.compute_metrics(inputs, targets, output, sample_weight=None)
        return self.model.compute_loss(x=inputs, y=targets, y_pred=output, sample_weight=None)


def go_through(model: Any, inputs: Any, targets: Any) -> ClassNumbers | None:
    """Make a model's losses and metrics, which depend on the shapes of a batch.

    There are none of a model that has only steps of its own. Return which numbers its targets may
    have, if its loss takes those of classes.

    Raises
    ------
    WorkloadError
        If model, loss or metrics do not take the batch.
    """
    if not computes_loss(model):
        return None
    given = keras.tree.map_structure(_outlined, (inputs, targets))
    step = _Step(model)
    try:
        step.compute_output_spec(*given)
    except Exception as error:
        said = _CAUSE.search(str(error))
        reason = " ".join(_BESIDES.sub("", said[1] if said else str(error)).split())[:300]
        raise WorkloadError(
            f"the {type(model).__name__} as it is compiled fails for {_shapes('inputs', given[0])} "
            f"and {_shapes('targets', given[1])}: {reason}; {cure_of(reason) or _COMPARE}"
        ) from error
    return ClassNumbers.of(model.loss, step.n_outputs)


@dataclass(frozen=True)
class ClassNumbers:
    """Numbers of classes that a loss takes; one that has no output counts for nothing on JAX.

    Parameters
    ----------
    n
        How many there are.
    ignored
        A number that the loss leaves out.
    """

    n: int
    ignored: int | None = None

    @classmethod
    def of(cls, loss: Any, n_outputs: int | None) -> ClassNumbers | None:
        """Return those of a loss that a model is compiled with; None if it takes others."""
        name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        is_sparse = name in ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy")
        return (
            cls(n_outputs, getattr(loss, "ignore_class", None)) if is_sparse and n_outputs else None
        )

    def check(self, targets: Any) -> None:
        """Raise a `WorkloadError` if a batch has another one."""
        if not (isinstance(targets, np.ndarray) and targets.size):
            return
        counted = targets if self.ignored is None else targets[targets != self.ignored]
        for end in (counted.min(), counted.max()) if counted.size else ():
            if not 0 <= end < self.n:
                raise WorkloadError(
                    f"Target {int(end)} is out of bounds: the model has {self.n} outputs"
                )


def _outlined(array: Any) -> Any:
    return keras.KerasTensor(array.shape, keras.backend.standardize_dtype(array.dtype))


def _shapes(what: str, given: Any) -> str:
    shapes = [str(tuple(tensor.shape)) for tensor in keras.tree.flatten(given)]
    return f"{what} of shape {', '.join(shapes)}"


def compiled_metrics(model: Any) -> dict[str, Any]:
    """Return the metrics of a model by the names that Keras reports, ``"loss"`` among them."""
    found: dict[str, Any] = {}
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)  # of all that compile() was given
        if inner is None:
            found[metric.name] = metric
        elif inner:
            found.update(zip(metric.result(), inner, strict=True))
    return found


def check_metrics(model: Any, wanted: Iterable[str]) -> None:
    """Raise a `WorkloadError` if a model lacks a metric, or if it is no mean over samples."""
    found = compiled_metrics(model)
    for name in wanted:
        if name not in found:
            others = ", ".join(other for other in found if other != "loss") or "none"
            raise WorkloadError(
                f"the {type(model).__name__} is compiled without a metric {name!r}, its metrics: "
                f"{others}; give the workload one of these, or a function, as in "
                f"metrics={{{name!r}: function}}, or write  model.compile(..., metrics=[{name!r}])"
            )
        metric = found[name]
        is_mean = isinstance(metric, keras.metrics.Mean)
        if not is_mean or type(metric).result is not keras.metrics.Mean.result:
            kind = type(metric).__name__
            raise WorkloadError(
                f"the metric {name!r}, {kind}, is no mean over samples, so that of a whole "
                "validation set does not come of its shards': give it to the workload, as in  "
                f"metrics=[keras.metrics.{kind}(name={name!r})]"
            )


def variables(model: Any) -> dict[str, Any]:
    """Return what of a model training changes, by names that do not depend on the process."""
    parts = {
        "trainable": model.trainable_variables,
        "other": model.non_trainable_variables,
        "optimizer": model.optimizer.variables,
    }
    return {f"{part}.{at}": v for part, held in parts.items() for at, v in enumerate(held)}


def shapes_of(model: Any) -> Shapes:
    """Return dtype and shape of each of these variables."""
    return {
        name: (code_of(variable.dtype, f"{name} ({variable.path})"), tuple(variable.shape))
        for name, variable in variables(model).items()
    }


def read(model: Any) -> dict[str, NDArray[Any]]:
    """Return the numbers of these variables."""
    return {
        name: _as_dtype(to_numpy(variable.value), variable.dtype)
        for name, variable in variables(model).items()
    }


def to_numpy(value: Any) -> NDArray[Any]:
    """Return a tensor of either backend as an array; PyTorch's bfloat16 becomes float32."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    host = value.detach().cpu()
    array: NDArray[Any] = (host.float() if "bfloat16" in str(host.dtype) else host).numpy()
    return array


def _as_dtype(array: NDArray[Any], name: str) -> NDArray[Any]:
    if array.dtype.name == name:
        return array
    import ml_dtypes

    return array.astype(np.dtype(getattr(ml_dtypes, name, name)))


def write(model: Any, values: Mapping[str, NDArray[Any]]) -> None:
    """Set these variables."""
    for name, variable in variables(model).items():
        value = np.array(values[name])
        is_half = value.dtype.name.startswith(("bfloat16", "float8"))
        variable.assign(value.astype(np.float32) if is_half else value)


def narrowed(batch: Any) -> Any:
    """Return a batch whose float64 arrays have the dtype of Keras, as ``fit`` has them."""

    def narrow(array: Any) -> Any:
        is_wide = isinstance(array, np.ndarray) and array.dtype == np.float64
        return array.astype(keras.config.floatx()) if is_wide else array

    return keras.tree.map_structure(narrow, batch)


def loss_of(logs: Mapping[str, Any], model: Any) -> Any:
    """Return the loss that a training step reports."""
    if "loss" not in logs:
        raise WorkloadError(
            f"train_step of the {type(model).__name__} returns no 'loss': return what "
            "self.get_metrics_result() returns"
        )
    return logs["loss"]
