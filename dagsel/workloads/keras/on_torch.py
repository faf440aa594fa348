"""Training and evaluation of a Keras model on the PyTorch backend, by its own steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from dagsel.errors import WorkloadError
from dagsel.workloads.keras import models
from dagsel.workloads.keras.backend import import_keras

keras = import_keras()
_GLOBAL = "global_seed_generator"


class TorchTrial:
    """A trial for a unit: a model that was built for it."""

    def __init__(self, model: Any, values: Mapping[str, NDArray[Any]]) -> None:
        self.model = model
        models.write(model, values)
        self._is_made = False
        self._unseeded = _drawn_unseeded()
        self._attributes = models.attributes(model)

    def go_through(self, inputs: Any, targets: Any) -> bool:
        """Make losses and metrics, if they are not made; return whether they were made."""
        if self._is_made:
            return False
        models.go_through(self.model, inputs, targets)
        self.model.reset_metrics()
        self._is_made = True
        return True

    def train(self, inputs: Any, targets: Any) -> Any:
        """Train on a batch; return its loss."""
        self.model.reset_metrics()
        logs = self.model.train_step(_tensors((inputs, targets)))
        loss = models.loss_of(logs, self.model)
        return loss.detach() if isinstance(loss, torch.Tensor) else loss

    def test(self, inputs: Any, targets: Any) -> None:
        """Take a batch into the metrics."""
        with torch.no_grad():
            self.model.test_step(_tensors((inputs, targets)))

    def predict(self, inputs: Any) -> Any:
        """Return a batch's output as arrays of NumPy."""
        with torch.no_grad():
            made = self.model.predict_step((_tensors(inputs),))
        return keras.tree.map_structure(models.to_numpy, made)

    def result(self) -> dict[str, float]:
        """Return the metrics of all batches tested."""
        return {name: float(value) for name, value in self.model.get_metrics_result().items()}

    def values(self) -> dict[str, NDArray[Any]]:
        """Return the trial's numbers."""
        return models.read(self.model)

    def check(self) -> None:
        """Raise a `WorkloadError` if something was drawn or has changed that no state holds."""
        changed = [
            name
            for name, value in models.attributes(self.model).items()
            if self._attributes.get(name, value) != value
        ]
        if changed:
            raise WorkloadError(
                f"training has changed {changed[0]}, which no state holds, so it begins anew in "
                "each pass over a shard: make it a weight, as by self.add_weight(shape=(), "
                'initializer="zeros", trainable=False)'
            )
        if self._unseeded != _drawn_unseeded():
            raise WorkloadError(
                f"the {type(self.model).__name__} draws random numbers without a seed, from a "
                "generator of the process that no state keeps: give the layer a "
                "keras.random.SeedGenerator, and its keras.random functions seed=self.generator"
            )


def _tensors(batch: Any) -> Any:
    return keras.tree.map_structure(keras.ops.convert_to_tensor, batch)


def _drawn_unseeded() -> list[int] | None:
    """Return where Keras's generator for draws without a seed is; None if nothing was drawn."""
    from keras.src.backend.common import global_state

    generator = global_state.get_global_attribute(_GLOBAL)
    return None if generator is None else models.to_numpy(generator.state.value).tolist()
