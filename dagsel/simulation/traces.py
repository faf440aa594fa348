"""Curves that were recorded batch by batch, with the losses of the batches.

A run of dagsel (`Recorded`) keeps no losses of single batches. These curves come from elsewhere: a
training script's log, a benchmark's data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import SearchError
from dagsel.flow import Losses
from dagsel.simulation.curves import Config, scalars


@dataclass(frozen=True, eq=False)
class Traces:
    """What some configurations did, batch by batch; all trained for the same number of batches.

    Parameters
    ----------
    configs
        The configurations. A simulation may draw no others.
    batch_losses
        Training loss of each batch, shape ``(n_configs, n_batches)``.
    values
        Value of the metric after each epoch, shape ``(n_configs, n_epochs)``.
    batch_s
        Seconds of a batch on a worker of speed 1, shape ``(n_configs,)``.
    evaluation_share
        Time of an epoch's validation, as a share of its training's.

    Raises
    ------
    SearchError
        If the shapes do not fit together.

    Examples
    --------
    >>> curves = Traces(
    ...     [{"lr": 0.1}, {"lr": 0.2}], np.array([[8, 4, 2, 3], [9, 9, 9, 9]]),
    ...     np.array([[0.5, 0.75], [0.1, 0.1]]), np.array([1.5, 3.0]),
    ... )
    >>> curves.value({"lr": 0.1}, 2, trial=0), curves.seconds({"lr": 0.1}, trial=0)
    (0.75, 3.0)
    >>> curves.losses({"lr": 0.1}, 0.5, 2.0, trial=0)
    Losses(n=3, low=2.0, high=4.0)
    """

    configs: Sequence[Config]
    batch_losses: NDArray[np.floating[Any]]
    values: NDArray[np.floating[Any]]
    batch_s: NDArray[np.floating[Any]]
    evaluation_share: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        shapes = [self.batch_losses.shape, self.values.shape, self.batch_s.shape]
        n = len(self.configs)
        is_matched = [len(shape) for shape in shapes] == [2, 2, 1] and {s[0] for s in shapes} == {n}
        if not is_matched or not self.n_epochs or self.batch_losses.shape[1] % self.n_epochs:
            raise SearchError(
                f"losses, values and seconds of {n} configurations must have the shapes "
                f"({n}, epochs * batches), ({n}, epochs) and ({n},), got {shapes}"
            )
        if len(self._numbers) < n:
            raise SearchError("a configuration is there twice, so its trace is not clear")

    @property
    def n_epochs(self) -> int:
        """Epochs of each trace."""
        return int(self.values.shape[1])

    @property
    def n_batches(self) -> int:
        """Batches of an epoch."""
        return int(self.batch_losses.shape[1]) // self.n_epochs

    def value(self, config: Config, epoch: float, *, trial: int) -> float:
        """Return the metric's value after an epoch; inside one, interpolate."""
        self._check(epoch, trial)
        return float(np.interp(epoch, range(1, self.n_epochs + 1), self.values[self.find(config)]))

    def seconds(self, config: Config, *, trial: int) -> float:
        """Return the time of an epoch's training on a worker of speed 1."""
        return float(self.batch_s[self.find(config)]) * self.n_batches

    def losses(self, config: Config, start: float, stop: float, *, trial: int) -> Losses:
        """Return the range of the losses of the batches that end between two moments, in epochs.

        From 0.0 to 1.0 is the first epoch. The batch that ends at `stop` counts, the one that ends
        at `start` does not.
        """
        self._check(stop, trial)
        losses = self.batch_losses[self.find(config), self._batch(start) : self._batch(stop)]
        if not len(losses):
            return Losses()
        return Losses(len(losses), float(losses.min()), float(losses.max()))  # NaN if one is

    def find(self, config: Config) -> int:
        """Return the index of a configuration; raise `SearchError` if it was not recorded."""
        number = self._numbers.get(_key(config))
        if number is None:
            raise SearchError(
                f"{scalars(config)} was not recorded; draw from the {len(self.configs)} "
                f"configurations that were, such as {dict(self.configs[0])}"
            )
        return number

    @cached_property
    def _numbers(self) -> Mapping[frozenset[Any], int]:
        return {_key(config): number for number, config in enumerate(self.configs)}

    def _batch(self, epochs: float) -> int:
        # A sum of pieces that ends with a batch may be a rounding error too small.
        return floor(epochs * self.n_batches + 1e-6)

    def _check(self, epochs: float, trial: int) -> None:
        if epochs > self.n_epochs + 1e-6:
            raise SearchError(
                f"trial {trial} is to train {epochs:g} epochs, and {self.n_epochs} were recorded; "
                f"set max_epochs to {self.n_epochs} or less"
            )


def _key(config: Config) -> frozenset[Any]:
    return frozenset(scalars(config).items())
