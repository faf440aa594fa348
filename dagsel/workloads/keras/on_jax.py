"""Training and evaluation of a Keras model on the JAX backend, by its stateless functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from dagsel.workloads.base import Config
from dagsel.workloads.compiled import Program
from dagsel.workloads.keras import models
from dagsel.workloads.keras.backend import import_keras
from dagsel.workloads.random_streams import seed_streams

keras = import_keras()


class JaxPrograms:
    """What is compiled for a configuration and a seed; nothing in it is of a trial's state."""

    def __init__(self, function: Callable[[Any], Any], config: Config, seed: int) -> None:
        seed_streams(seed)
        self.model = models.make(function, config)
        self.shapes = models.shapes_of(self.model)
        self.nbytes = sum(array.nbytes for array in models.read(self.model).values())
        self._n_trainable = len(self.model.trainable_variables)
        self._n_other = len(self.model.non_trainable_variables)
        self._train, self._test = Program(self._training, trains=True), Program(self._testing)
        self._predict = Program(self._predicting)
        self._metrics: list[Any] | None = None  # as they are before the first batch
        self.classes: models.ClassNumbers | None = None

    def go_through(self, inputs: Any, targets: Any) -> bool:
        """Make losses and metrics, if they are not made; return whether they were made."""
        if self._metrics is not None:
            return False
        self.classes = models.go_through(self.model, inputs, targets)
        self.model.reset_metrics()
        self._metrics = [jnp.array(v.value) for v in self.model.metrics_variables]
        return True

    def trial(self, values: Mapping[str, NDArray[Any]]) -> JaxTrial:
        """Return a trial with these numbers."""
        return JaxTrial(self, [jnp.array(values[name], copy=True) for name in self.shapes])

    def _parted(self, arrays: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        first, second = self._n_trainable, self._n_trainable + self._n_other
        return arrays[:first], arrays[first:second], arrays[second:]

    def _training(self, arrays: list[Any], inputs: Any, targets: Any) -> tuple[Any, list[Any]]:
        begun = (*self._parted(arrays), self._metrics)
        logs, state = self.model.train_step(begun, (inputs, targets))
        after = [value for part in state[:3] for value in part]
        return models.loss_of(logs, self.model), _like(arrays, after)

    def _testing(self, arrays: Any, inputs: Any, targets: Any) -> list[Any]:
        values, metrics = arrays
        trainable, other, _ = self._parted(values)
        _, state = self.model.test_step((trainable, other, metrics), (inputs, targets))
        return _like(metrics, state[2])

    def _predicting(self, arrays: list[Any], inputs: Any, targets: Any) -> Any:
        trainable, other, _ = self._parted(arrays)
        return self.model.predict_step((trainable, other), (inputs,))[0]


class JaxTrial:
    """A trial for a unit: its arrays, which go through the programs of its configuration."""

    def __init__(self, programs: JaxPrograms, arrays: list[Any]) -> None:
        self._programs, self._arrays = programs, arrays
        self._metrics = programs._metrics

    @property
    def model(self) -> Any:
        """A model of the configuration; its variables are not the trial's."""
        return self._programs.model

    def go_through(self, inputs: Any, targets: Any) -> bool:
        """Make losses and metrics, if they are not made; return whether they were made."""
        was_made = self._programs.go_through(inputs, targets)
        if self._metrics is None:
            self._metrics = self._programs._metrics
        return was_made

    def train(self, inputs: Any, targets: Any) -> Any:
        """Train on a batch; return its loss."""
        self._check_classes(targets)
        loss, self._arrays = self._programs._train(self._arrays, inputs, targets)
        return loss

    def test(self, inputs: Any, targets: Any) -> None:
        """Take a batch into the metrics."""
        self._check_classes(targets)
        self._metrics = self._programs._test((self._arrays, self._metrics), inputs, targets)

    def _check_classes(self, targets: Any) -> None:
        if self._programs.classes is not None:
            self._programs.classes.check(targets)

    def predict(self, inputs: Any) -> Any:
        """Return a batch's output as arrays of NumPy."""
        made = self._programs._predict(self._arrays, inputs, ())
        return keras.tree.map_structure(models.to_numpy, made)

    def result(self) -> dict[str, float]:
        """Return the metrics of all batches tested."""
        model = self._programs.model
        for variable, value in zip(model.metrics_variables, self._metrics or [], strict=True):
            variable.assign(value)
        found = {name: float(value) for name, value in model.get_metrics_result().items()}
        model.reset_metrics()
        return found

    def values(self) -> dict[str, NDArray[Any]]:
        """Return the trial's numbers."""
        return dict(zip(self._programs.shapes, jax.device_get(self._arrays), strict=True))

    def check(self) -> None:
        """Nothing: JAX itself refuses to trace what is not in the arrays."""


def _like(before: list[Any], after: list[Any]) -> list[Any]:
    """Return arrays with the dtypes of those before: the next batch needs no new program."""
    pairs = zip(before, after, strict=True)
    return [jax.lax.convert_element_type(new, old.dtype) for old, new in pairs]
