"""What trials do and what they cost: the protocol, and curves of a parametric family."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dagsel.errors import SearchError
from dagsel.flow import Losses
from dagsel.planning.scaling import Scaling, UniversalScaling

Config: TypeAlias = Mapping[str, Any]
#: A number for all configurations, two numbers to draw it between, or a function of the
#: configuration.
Parameter: TypeAlias = float | tuple[float, float] | Callable[[Config], float]


@runtime_checkable
class Curves(Protocol):
    """What trials do and what they cost, by configuration.

    A curve may depend on the number of the trial: two trials of one configuration may differ. It
    must not depend on earlier calls.

    Examples
    --------
    >>> class Steps:
    ...     evaluation_share = 0.1
    ...
    ...     def value(self, config, epoch, *, trial):
    ...         return config["lr"] * int(epoch)
    ...
    ...     def seconds(self, config, *, trial):
    ...         return 60.0
    >>> curves = Steps()
    >>> isinstance(curves, Curves), curves.value({"lr": 0.1}, 3, trial=0)
    (True, 0.30000000000000004)
    >>> curves.seconds({"lr": 0.1}, trial=0), curves.evaluation_share
    (60.0, 0.1)
    """

    @property
    def evaluation_share(self) -> float:
        """Time that an epoch's validation takes, as a share of its training's.

        With 0 an epoch is scored at the moment in which it is trained, without evaluating units.
        """
        ...

    def value(self, config: Config, epoch: float, *, trial: int) -> float:
        """Return the value of the metric after an epoch; for a paused trial, inside one.

        Parameters
        ----------
        config
            The configuration.
        epoch
            How far the trial has trained, from 0 on.
        trial
            Number of the trial.

        Raises
        ------
        TrainingError
            If the trial fails in this epoch.
        """
        ...

    def seconds(self, config: Config, *, trial: int) -> float:
        """Return the time of an epoch's training on a worker of speed 1.

        Parameters
        ----------
        config
            The configuration.
        trial
            Number of the trial.
        """
        ...


@runtime_checkable
class Scales(Protocol):
    """Curves that know how trials speed up on several workers; others speed up linearly."""

    def speedup(self, config: Config, gang: int) -> float:
        """Return how many times as fast a gang of so many workers is as one worker."""
        ...


@runtime_checkable
class Loses(Protocol):
    """Curves that know training losses, which flows that share time by convergence need."""

    @property
    def n_batches(self) -> int:
        """Batches of an epoch."""
        ...

    def losses(self, config: Config, start: float, stop: float, *, trial: int) -> Losses:
        """Return the range of the losses of the batches that end between two moments, in epochs."""
        ...


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """Curves ``asymptote + amplitude · epoch^(−rate) + noise``, one for each configuration.

    That holds from the first epoch on. Inside the first epoch the value goes in a straight line
    from `chance` to where the epoch ends, and noise grows from 0 with it, unless `chance` is a
    guess from a function. So with one `chance` for all, trials rank inside the first epoch as they
    do at its end.

    A parameter is a number, a pair of numbers between which it is drawn for each configuration, or
    a function of the configuration. By default asymptote, amplitude and rate are drawn
    independently, so curves cross: the better of two trials after few epochs may be the worse at
    the end. A metric that grows has a negative amplitude.

    Draws depend on ``seed`` and the configuration (without values that JSON does not have), noise
    also on trial and epoch. The order of calls changes nothing.

    Parameters
    ----------
    asymptote
        Value after endless training.
    amplitude
        How far above the asymptote the first epoch ends.
    rate
        How fast the curve falls; above 0.
    chance
        Value before any training, such as 0.1 for the accuracy on ten classes. None for a guess:
        the worst value with which a first epoch can end, or, where asymptote or amplitude is a
        function, as far from that end as the end is from the asymptote. The latter has the whole
        noise of the value, before any training too.
    noise
        Standard deviation of the noise of each value.
    epoch_s
        Seconds of an epoch's training on a worker of speed 1.
    evaluation_share
        Time of an epoch's validation, as a share of its training's.
    scaling
        How trials speed up on several workers: one for all, or a function of the configuration.
        None for linear.
    n_batches
        Batches of an epoch, each of which has a loss: the value at its end.
    seed
        Seeds the draws.

    Examples
    --------
    >>> curves = PowerLaw(asymptote=lambda config: config["lr"], amplitude=1.0, rate=0.5, noise=0)
    >>> [curves.value({"lr": 0.25}, epoch, trial=0) for epoch in (1, 4, 16)]
    [1.25, 0.75, 0.5]
    >>> curves = PowerLaw(asymptote=0.9, amplitude=-0.3, rate=0.5, noise=0, chance=0.1)
    >>> [round(curves.value({}, epoch, trial=0), 2) for epoch in (0, 0.5, 1, 4)]
    [0.1, 0.35, 0.6, 0.75]
    >>> curves.seconds({}, trial=0), curves.speedup({}, gang=4)
    (60.0, 4.0)
    >>> curves.losses({}, 1.0, 1.5, trial=0).n
    50
    """

    asymptote: Parameter = (0.1, 0.5)
    amplitude: Parameter = (0.3, 0.9)
    rate: Parameter = (0.2, 1.5)
    noise: Parameter = 0.005
    epoch_s: Parameter = 60.0
    evaluation_share: float = 0.0
    scaling: Scaling | UniversalScaling | Callable[[Config], Scaling | UniversalScaling] | None = (
        None
    )
    n_batches: int = 100
    seed: int = 0
    chance: Parameter | None = None

    def value(self, config: Config, epoch: float, *, trial: int) -> float:
        """Return the metric's value after an epoch, or inside one, from 0 on.

        Parameters
        ----------
        config
            The configuration.
        epoch
            How far the trial has trained, from 0 on.
        trial
            Number of the trial.
        """
        text = _text(config)
        a, b, c, noise = (
            self._parameter(name, config, text)
            for name in ("asymptote", "amplitude", "rate", "noise")
        )
        if noise:
            a += noise * _NORMAL.inv_cdf(self._uniform("value", text, trial, epoch))
        if epoch >= 1:
            return a + b * math.pow(epoch, -c)
        chance = self._chance(config, text, a, b)
        return (1.0 - epoch) * chance + epoch * (a + b) if epoch > 0 else chance

    def seconds(self, config: Config, *, trial: int) -> float:
        """Return the time of an epoch's training on a worker of speed 1.

        Parameters
        ----------
        config
            The configuration.
        trial
            Number of the trial.
        """
        seconds = self._parameter("epoch_s", config, _text(config))
        if not seconds > 0:
            raise SearchError(f"epoch_s must be above 0, got {seconds!r} for {dict(config)}")
        return seconds

    def speedup(self, config: Config, gang: int) -> float:
        """Return how many times as fast a gang is as one worker.

        Parameters
        ----------
        config
            The configuration.
        gang
            How many workers.
        """
        if self.scaling is None:
            return float(gang)
        scaling = self.scaling(config) if callable(self.scaling) else self.scaling
        return scaling.speedup(gang)

    def losses(self, config: Config, start: float, stop: float, *, trial: int) -> Losses:
        """Return the range of the losses of the batches that end between two moments, in epochs.

        Parameters
        ----------
        config
            The configuration.
        start, stop
            Two moments, in epochs.
        trial
            Number of the trial.
        """
        first, last = (math.floor(at * self.n_batches + 1e-6) for at in (start, stop))
        if last <= first:
            return Losses()
        ends = [self.value(config, n / self.n_batches, trial=trial) for n in (first + 1, last)]
        return Losses(last - first, min(ends), max(ends))

    def _chance(self, config: Config, text: str, asymptote: float, amplitude: float) -> float:
        if self.chance is not None:
            return self._parameter("chance", config, text)
        if callable(self.asymptote) or callable(self.amplitude):
            return asymptote + 2.0 * amplitude
        a, b = (_ends(parameter) for parameter in (self.asymptote, self.amplitude))
        return max(a) + max(b) if max(b) >= 0.0 else min(a) + min(b)

    def _parameter(self, name: str, config: Config, text: str) -> float:
        parameter: Parameter = getattr(self, name)
        if isinstance(parameter, tuple):
            low, high = parameter
            return low + (high - low) * self._uniform(name, text)
        return parameter(config) if callable(parameter) else parameter

    def _uniform(self, *about: str | float) -> float:
        """Draw a number between 0 and 1, without the ends."""
        digest = hashlib.blake2b(repr((self.seed, *about)).encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") // 2048 + 0.5) / 2**53


_NORMAL = NormalDist()


def _ends(parameter: float | tuple[float, float]) -> tuple[float, float]:
    return parameter if isinstance(parameter, tuple) else (parameter, parameter)


def scalars(config: Config) -> dict[str, Any]:
    """Return the configuration without values that JSON does not have.

    Examples
    --------
    >>> scalars({"lr": 0.1, "activation": max})
    {'lr': 0.1}
    """
    return {k: v for k, v in config.items() if v is None or isinstance(v, bool | int | float | str)}


def _text(config: Config) -> str:
    return json.dumps(scalars(config), sort_keys=True)
