"""Scaling profiles: how much faster a trial trains on several workers at once.

The speedup λ(p) is the speed on p workers divided by the speed on one, with the same global batch.
`Scaling` holds measured speedups; `UniversalScaling` is a law of two parameters, which `fit` finds
from the times of finished units.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import is_number, number, whole
from dagsel.errors import SearchError

Architecture = TypeVar("Architecture", bound=Hashable)


class _Model:
    __slots__ = ()

    def speedup(self, n: int) -> float:
        raise NotImplementedError

    def efficiency(self, n: int) -> float:
        """Return the efficiency e(n) = λ(n) / n.

        Parameters
        ----------
        n
            Number of workers.
        """
        return self.speedup(n) / n

    def best(self, most: int, *, within: float = 0.03) -> int:
        """Return the smallest number of workers that is about as fast as the fastest one.

        Parameters
        ----------
        most
            The largest number to consider.
        within
            Share of the top speed that may be given up.
        """
        number("within", within, "at least 0 and below 1", lambda share: 0 <= share < 1)
        _check_workers(most)
        speedups = [self.speedup(n) for n in range(1, most + 1)]
        enough = (1 - within) * max(speedups)
        return 1 + next(index for index, speedup in enumerate(speedups) if speedup >= enough)


@dataclass(frozen=True, slots=True)
class Scaling(_Model):
    """Measured speedups.

    Parameters
    ----------
    speedups
        λ by number of workers. λ(1) is 1 and may be left out.

    Examples
    --------
    >>> resnet = Scaling({2: 1.7, 3: 2.2, 6: 2.25})
    >>> resnet.speedup(4), resnet.speedup(100)
    (2.216..., 2.25)
    >>> resnet.best(6), resnet.best(2), round(resnet.efficiency(2), 3)
    (3, 2, 0.85)
    """

    speedups: Mapping[int, float]

    def __post_init__(self) -> None:
        speedups: Any = self.speedups
        if not isinstance(speedups, Mapping):
            raise SearchError(
                f"speedups must be by number of workers, got {speedups!r}; write {{1: 1, 2: 1.8}}"
            )
        for n, speedup in self.speedups.items():
            _check_workers(n)
            if not (_is_number(speedup) and speedup > 0):
                raise SearchError(
                    f"the speedup of {n} workers must be above 0, got {speedup!r}; give how "
                    "many times as fast as one worker they are"
                )
        if self.speedups.get(1, 1) != 1:
            raise SearchError(
                f"the speedup of 1 worker is 1, got {self.speedups[1]!r}: divide all by it"
            )
        known = {1: 1.0, **{n: float(speedup) for n, speedup in self.speedups.items()}}
        object.__setattr__(self, "speedups", dict(sorted(known.items())))

    def speedup(self, n: int) -> float:
        """Return λ(n): linear between known numbers, constant beyond the last one.

        Parameters
        ----------
        n
            Number of workers.
        """
        _check_workers(n)
        known = list(self.speedups)
        after = bisect_right(known, n)
        low = known[after - 1]
        if after == len(known):
            return self.speedups[low]
        high = known[after]
        share = (n - low) / (high - low)
        return (1 - share) * self.speedups[low] + share * self.speedups[high]


@dataclass(frozen=True, slots=True)
class UniversalScaling(_Model):
    """The universal scalability law: λ(p) = p / (1 + σ (p - 1) + κ p (p - 1)).

    Gunther, *Guerrilla Capacity Planning* (2007), chapter 4. With κ = 0 it is Amdahl's law.

    Parameters
    ----------
    contention
        σ: the share of the work that only one worker at a time can do.
    coherence
        κ: the cost of each pair of workers; with it λ falls again beyond some number.

    Examples
    --------
    >>> law = UniversalScaling(contention=0.1, coherence=0.05)
    >>> [round(law.speedup(p), 2) for p in (1, 2, 4, 8)]
    [1.0, 1.67, 2.11, 1.78]
    >>> law.best(8)
    4
    >>> round(law.efficiency(4), 2)
    0.53
    """

    contention: float
    coherence: float

    def __post_init__(self) -> None:
        for name in ("contention", "coherence"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise SearchError(f"{name} must be a number of at least 0, got {value!r}")

    def speedup(self, n: int) -> float:
        """Return λ(n).

        Parameters
        ----------
        n
            Number of workers.
        """
        _check_workers(n)
        return n / (1 + (n - 1) * (self.contention + self.coherence * n))


ScalingModel: TypeAlias = Scaling | UniversalScaling


@dataclass(frozen=True, slots=True)
class Fit:
    """A scaling model that was fitted to the times of units, and its error.

    Parameters
    ----------
    model
        A `UniversalScaling`. If units ran on one number of workers only, it is a `Scaling` that is
        linear up to this number and constant beyond.
    seconds
        Time of a unit on one worker, by the model.
    error
        Relative root mean square error on the observations: 0.1 is 10%. It means little if there
        are no more numbers of workers than parameters of the model.
    unseen_error
        The same, by cross-validation over the numbers of workers: the error to expect for a number
        that was not observed. None with fewer than four numbers.
    n
        Number of observations.
    gangs
        The numbers of workers that were observed.

    Examples
    --------
    >>> found = fit([(1, 12.0), (2, 6.6), (4, 3.9)])
    >>> round(found.predict(8), 1), found.gangs
    (2.5, (1, 2, 4))
    """

    model: ScalingModel
    seconds: float
    error: float
    unseen_error: float | None
    n: int
    gangs: tuple[int, ...]

    def predict(self, n: int) -> float:
        """Return the seconds of a unit on so many workers.

        Parameters
        ----------
        n
            Number of workers.
        """
        return self.seconds / self.model.speedup(n)


def fit(observations: Sequence[tuple[int, float]]) -> Fit:
    """Fit the universal scalability law to times of units; none of them needs to be on one worker.

    Parameters
    ----------
    observations
        Workers and seconds of each unit. All units are of one architecture and of the same work.

    Returns
    -------
    Fit
        With two numbers of workers, coherence is 0; with one, see `Fit.model`.

    Examples
    --------
    >>> law = UniversalScaling(contention=0.1, coherence=0.05)
    >>> found = fit([(p, 12.0 / law.speedup(p)) for p in (2, 3, 4, 6)])
    >>> round(found.model.contention, 6), round(found.model.coherence, 6), round(found.seconds, 6)
    (0.1, 0.05, 12.0)
    """
    for n, seconds in observations:
        _check_workers(n)
        if not (_is_number(seconds) and seconds > 0):
            raise SearchError(f"a unit on {n} workers took {seconds!r} s; give times above 0")
    if not observations:
        raise SearchError(
            "no unit was observed, so there is nothing to fit; give at least one time"
        )
    gangs = tuple(sorted({n for n, _ in observations}))
    model, seconds = _fit(observations, gangs)
    error = _rms(model, seconds, observations)
    unseen_error = None
    if len(gangs) >= 4:  # without one, three are left for the three unknowns
        squares = 0.0
        for gang in gangs:
            kept = [pair for pair in observations if pair[0] != gang]
            left_out = [pair for pair in observations if pair[0] == gang]
            others = _fit(kept, tuple(n for n in gangs if n != gang))
            squares += len(left_out) * _rms(*others, left_out) ** 2
        unseen_error = math.sqrt(squares / len(observations))
    return Fit(model, seconds, error, unseen_error, len(observations), gangs)


def learn(units: Iterable[tuple[Architecture, int, float]]) -> dict[Architecture, Fit]:
    """Learn how architectures scale from the finished units of earlier runs.

    Parameters
    ----------
    units
        Architecture, workers and seconds of each.

    Examples
    --------
    >>> found = learn([("vgg", 1, 9.0), ("vgg", 2, 6.0), ("resnet", 2, 4.0)])
    >>> round(found["vgg"].model.speedup(2), 6), found["resnet"].model
    (1.5, Scaling(speedups={1: 1.0, 2: 2.0}))
    """
    by_architecture: defaultdict[Architecture, list[tuple[int, float]]] = defaultdict(list)
    for architecture, gang, seconds in units:
        by_architecture[architecture].append((gang, seconds))
    return {architecture: fit(pairs) for architecture, pairs in by_architecture.items()}


def _fit(
    observations: Sequence[tuple[int, float]], gangs: tuple[int, ...]
) -> tuple[ScalingModel, float]:
    # t(p) = t₁/p + t₁σ (p - 1)/p + t₁κ (p - 1), linear in three unknowns of at least 0. Each row is
    # divided by its time, so relative errors are minimized: a short unit counts as much as a long
    # one, and an outlier that took very long has an error of at most 1.
    p, t = np.array(observations, dtype=float).T
    columns = np.stack([1 / p, (p - 1) / p, p - 1], axis=1)[:, : len(gangs)] / t[:, None]
    one, contended, incoherent = (*_least_squares(columns), 0.0, 0.0)[:3]
    if len(gangs) == 1:
        top = gangs[0]
        return Scaling({top: float(top)}), one
    return UniversalScaling(contended / one, incoherent / one), one


def _least_squares(columns: NDArray[np.float64]) -> list[float]:
    # The best x ≥ 0 for columns·x = 1, by trying which of at most three entries are 0. The first,
    # the time on one worker, is not.
    n = columns.shape[1]
    best: tuple[float, list[float]] = (math.inf, [])
    for rest in itertools.product((True, False), repeat=n - 1):
        support = np.flatnonzero([True, *rest])
        found = np.linalg.lstsq(columns[:, support], np.ones(len(columns)), rcond=None)[0]
        x = np.zeros(n)
        x[support] = found
        residual = float(np.sum((columns @ x - 1) ** 2))
        if x[0] > 0 and np.all(x >= 0) and residual < best[0]:
            best = (residual, x.tolist())
    return best[1]


def _rms(model: ScalingModel, seconds: float, observations: Sequence[tuple[int, float]]) -> float:
    squares = [(seconds / model.speedup(p) / t - 1) ** 2 for p, t in observations]
    return math.sqrt(math.fsum(squares) / len(squares))


def _check_workers(n: object) -> None:
    whole("a number of workers", n)


def _is_number(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)
