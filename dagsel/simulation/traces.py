"""Curves that were recorded batch by batch, with the losses of the batches.

A run of dagsel (`Recorded`) keeps no losses of single batches. These curves come from elsewhere: a
training script's log, a benchmark's data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import SearchError
from dagsel.flow import Losses
from dagsel.simulation.curves import Config, PowerLaw, scalars

#: Rates that a fit tries.
RATES = np.round(np.arange(0.05, 3.0, 0.05), 2)


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
    initial
        Value of the metric before the first epoch, shape ``(n_configs,)``. Without it a value
        inside the first epoch is refused.

    Raises
    ------
    SearchError
        If the shapes do not fit together; later, if an epoch is asked for that was not recorded.

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
    initial: NDArray[np.floating[Any]] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        shapes = [self.batch_losses.shape, self.values.shape, self.batch_s.shape]
        n = len(self.configs)
        is_matched = [len(shape) for shape in shapes] == [2, 2, 1] and {s[0] for s in shapes} == {n}
        if not is_matched or not self.n_epochs or self.batch_losses.shape[1] % self.n_epochs:
            raise SearchError(
                f"losses, values and seconds of {n} configurations must have the shapes "
                f"({n}, epochs * batches), ({n}, epochs) and ({n},), got {shapes}"
            )
        if self.initial is not None and self.initial.shape != (n,):
            raise SearchError(
                f"initial values of {n} configurations must have the shape ({n},), got "
                f"{self.initial.shape}"
            )
        if len(self._numbers) < n:
            raise SearchError(
                "a configuration is there twice, so its trace is not clear; leave one of them out"
            )

    @property
    def n_epochs(self) -> int:
        """Epochs of each trace."""
        return int(self.values.shape[1])

    @property
    def n_batches(self) -> int:
        """Batches of an epoch."""
        return int(self.batch_losses.shape[1]) // self.n_epochs

    def value(self, config: Config, epoch: float, *, trial: int) -> float:
        """Return the metric's value after an epoch; inside one, interpolate.

        Parameters
        ----------
        config
            The configuration.
        epoch
            How far the trial has trained, from 0 on.
        trial
            Number of the trial.
        """
        first = 1 if self.initial is None else 0
        self._check(epoch, trial, first)
        number = self.find(config)
        known = self.values[number]
        if self.initial is not None:
            known = np.concatenate([self.initial[number : number + 1], known])
        return float(np.interp(epoch, range(first, self.n_epochs + 1), known))

    def seconds(self, config: Config, *, trial: int) -> float:
        """Return the time of an epoch's training on a worker of speed 1.

        Parameters
        ----------
        config
            The configuration.
        trial
            Number of the trial.
        """
        return float(self.batch_s[self.find(config)]) * self.n_batches

    def losses(self, config: Config, start: float, stop: float, *, trial: int) -> Losses:
        """Return the range of the losses of the batches that end between two moments, in epochs.

        From 0.0 to 1.0 is the first epoch. The batch that ends at `stop` counts, the one that ends
        at `start` does not.

        Parameters
        ----------
        config
            The configuration.
        start, stop
            Two moments, in epochs.
        trial
            Number of the trial.
        """
        self._check(stop, trial)
        losses = self.batch_losses[self.find(config), self._batch(start) : self._batch(stop)]
        if not len(losses):
            return Losses()
        return Losses(len(losses), float(losses.min()), float(losses.max()))  # NaN if one is

    def fitted(self) -> PowerLaw:
        """Return power laws that are fitted to the values: curves that need no table.

        Asymptote, amplitude and rate of each configuration are those with the least squared error
        over its epochs; the noise is the standard deviation of what is left.

        Examples
        --------
        >>> epochs = np.arange(1, 9)
        >>> curves = Traces([{"lr": 0.1}], np.ones((1, 8)), 0.9 - 0.5 / epochs[None], np.ones(1))
        >>> law = curves.fitted()
        >>> round(law.value({"lr": 0.1}, 100, trial=0), 3)
        0.895
        """
        epochs, n = np.arange(1, self.n_epochs + 1), len(self.configs)
        least, found = np.full(n, np.inf), np.zeros((4, n))
        for rate in RATES:
            columns = np.stack([np.ones(self.n_epochs), epochs**-rate], axis=1)
            fit = np.linalg.lstsq(columns, self.values.T, rcond=None)[0]
            error = np.sqrt(np.mean((columns @ fit - self.values.T) ** 2, axis=0))
            is_better = error < least
            least[is_better] = error[is_better]
            parameters = np.stack([fit[0], fit[1], np.full(n, rate), error])
            found[:, is_better] = parameters[:, is_better]

        def parameter(which: int) -> Callable[[Config], float]:
            return lambda config: float(found[which, self.find(config)])

        return PowerLaw(
            asymptote=parameter(0),
            amplitude=parameter(1),
            rate=parameter(2),
            noise=parameter(3),
            epoch_s=lambda config: self.seconds(config, trial=0),
            evaluation_share=self.evaluation_share,
            n_batches=self.n_batches,
        )

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

    def _check(self, epochs: float, trial: int, first: int = 0) -> None:
        if first - 1e-6 <= epochs <= self.n_epochs + 1e-6:
            return
        cure = f"set max_epochs to {self.n_epochs} or less"
        if epochs < first:
            cure = "give initial=, the values before the first epoch"
        raise SearchError(
            f"trial {trial} is asked for epoch {epochs:g}, and epochs {first} to {self.n_epochs} "
            f"were recorded; {cure}"
        )


def _key(config: Config) -> frozenset[Any]:
    return frozenset(scalars(config).items())
