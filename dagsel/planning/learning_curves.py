"""Learning curves of the trials of a run: what they will come to, and how many are worth it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Epochs (with a part of one) and the best loss until then, whenever it was scored.
Curve: TypeAlias = Sequence[tuple[float, float]]
Vector: TypeAlias = NDArray[np.float64]

#: The share of a doubling's gain that the next one brings, before the run has shown it; and for how
#: many trials this counts.
DECAY, DECAY_TRIALS = 0.6, 3
#: How much of its own last gain is expected of a trial; the rest is what the others gained.
OWN_SHARE = 0.25
#: No trial is expected to gain more than so many times what the others did.
MOST_GAIN = 3.0
#: The error of a forecast, as a share of the expected gain, beyond what the run shows.
GAIN_ERROR = 0.5
#: After one value, as shares of the distance from the median to the best: gain, and error.
FIRST_GAIN, FIRST_ERROR = 0.25, 0.75
#: Larger losses count as this one, so that squares and sums of them stay finite.
LARGEST = 1e100
#: Draws of the errors in which an expected best is found.
N_DRAWS = 128


@dataclass(frozen=True, slots=True)
class Forecast:
    """What losses will be: arrays of an entry for each trial, but for `decay`.

    Parameters
    ----------
    epochs, losses
        How far each has trained, and its best loss until then.
    gains
        What each gained in the last doubling of its epochs, smoothed over the trials.
    errors
        Standard deviation of the loss after one more doubling.
    decay
        ρ: the gain of a doubling as a share of that of the one before.
    """

    epochs: Vector
    losses: Vector
    gains: Vector
    errors: Vector
    decay: float

    def after(self, more: float | Vector, max_epochs: float = math.inf) -> tuple[Vector, Vector]:
        """Return the expected losses and their errors after so many more epochs of each.

        Examples
        --------
        >>> ones = np.ones(1)
        >>> Forecast(8 * ones, 0.5 * ones, 0.2 * ones, 0.1 * ones, decay=0.5).after(24.0)
        (array([0.35]), array([0.141...]))
        """
        reached = np.minimum(self.epochs + more, max(max_epochs, 1.0))
        doublings = np.log2(np.maximum(reached / self.epochs, 1.0))
        rho = self.decay
        gained = self.gains * rho * (1.0 - rho**doublings) / (1.0 - rho)
        return self.losses - gained, self.errors * np.sqrt(doublings)


def forecast(curves: Sequence[Curve]) -> Forecast:
    """Extrapolate curves, all together; each has a value.

    A power law of the epochs gains in each doubling of them the same share ρ of what it gained in
    the one before. ρ is common to all trials, and so is most of the gain: from a trial's own few
    values neither can be told. The error is how far the same forecast, made a doubling earlier, was
    from what came, over the better half of the trials.

    Examples
    --------
    >>> found = forecast([[(n, 1 / n + 0.1 * k) for n in (1, 2, 4)] for k in range(4)])
    >>> found.losses, found.gains
    (array([0.25, 0.35, 0.45, 0.55]), array([0.25, 0.25, 0.25, 0.25]))
    >>> round(found.decay, 3)
    0.533
    """
    epochs = np.array([curve[-1][0] for curve in curves])
    losses = np.array([_at(curve, curve[-1][0]) for curve in curves])
    half = np.array([_at(curve, curve[-1][0] / 2) for curve in curves])
    quarter = np.array([_at(curve, curve[-1][0] / 4) for curve in curves])
    spread = float(np.median(losses) - losses.min())
    better = np.argsort(losses, kind="stable")[: max(3, len(losses) // 2)]

    known, gained = ~np.isnan(half), half - losses
    gains = np.where(known, gained, FIRST_GAIN * spread)
    typical = float(np.median(gains[better]))
    twice = [trial for trial in better if not np.isnan(quarter[trial])]
    before = (quarter - half)[twice]
    weight = DECAY_TRIALS * typical
    total = float(before.sum()) + weight
    decay = (float(gained[twice].sum()) + DECAY * weight) / total if total > 0 else DECAY
    decay = min(0.95, max(0.2, decay))

    once = [trial for trial in better if known[trial]]
    misses = gained[twice] - decay * _smooth(before) if len(twice) > 2 else gained[once]
    missed = float(np.std(misses)) if len(misses) > 2 else 0.0
    gains = _smooth(gains, typical)
    errors = np.where(known, missed + GAIN_ERROR * gains, FIRST_ERROR * spread)
    return Forecast(epochs, losses, gains, errors, decay)


def _at(curve: Curve, epochs: float) -> float:
    """Return the loss after so many epochs, linear between values; NaN before the first one."""
    place = bisect_right(curve, (epochs, math.inf))
    if place == 0:
        return math.nan
    before, loss = curve[place - 1]
    loss = min(loss, LARGEST)
    if place == len(curve) or epochs <= before:
        return loss
    after, later = curve[place]
    return loss + (min(later, LARGEST) - loss) * (epochs - before) / (after - before)


def _smooth(gains: Vector, typical: float | None = None) -> Vector:
    if typical is None:
        typical = float(np.median(gains)) if len(gains) else 0.0
    own = np.minimum(gains, MOST_GAIN * typical)
    return np.maximum(0.0, typical + OWN_SHARE * (own - typical))


@dataclass(frozen=True, slots=True)
class Prospect:
    """Which trials go on, by their place among the curves, the best first; what that comes to."""

    kept: tuple[int, ...]
    expected: float


def choose(
    found: Forecast,
    more_of: Callable[[int], Sequence[float]],
    *,
    floor: float = math.inf,
    n_new: int = 0,
    most: int | None = None,
    max_epochs: float = math.inf,
) -> Prospect:
    """Return the trials that promise the best loss when what is left is shared by them.

    Parameters
    ----------
    found
        The forecast.
    more_of
        The epochs that each of k trials can still train, the best one first.
    floor
        The best loss of trials that train no more.
    n_new
        New trials that are drawn first. They are taken to be like those that are there, and the one
        that looks best of them is kept too.
    most
        Of trials that go on at most; None for all.
    max_epochs
        Epochs of a trial at most.

    Examples
    --------
    >>> found = forecast([[(1, 0.5)], [(1, 0.1)], [(1, 0.9)], [(1, 0.12)]])
    >>> choose(found, lambda k: [24 / k] * k).kept
    (1, 3)
    """
    n, best = len(found.losses), Prospect((), math.inf)
    normal = _normal(n + 2 * n_new + 1)
    for k in (k for k in _COUNTS if k <= min(n, most or n)):
        more = np.array(more_of(k))
        losses, errors = found.after(float(more.mean()), max_epochs)
        order = np.argsort(losses, kind="stable")[:k]
        if more.max() > more.min():
            by_trial = np.full(n, more[-1])
            by_trial[order] = more
            losses, errors = found.after(by_trial, max_epochs)
        came = (losses[order] + errors[order] * normal[:, :k]).min(axis=1)
        if n_new:
            came = np.minimum(came, _best_of_new(losses, errors, n_new, normal[:, n:]))
        expected = float(np.minimum(came, floor).mean())
        if expected <= best.expected:
            best = Prospect(tuple(order.tolist()), expected)
    return best


_COUNTS = sorted({1, *(2**n for n in range(1, 10)), *(3 * 2**n for n in range(9))})


def _best_of_new(losses: Vector, errors: Vector, n_new: int, normal: Vector) -> Vector:
    like = (np.abs(normal[:, :n_new]) * 1e6).astype(np.int64) % len(losses)
    looks_best = np.take_along_axis(like, losses[like].argmin(axis=1)[:, None], axis=1)[:, 0]
    return losses[looks_best] + errors[looks_best] * normal[:, -1]


def _normal(n: int) -> Vector:
    """Return `N_DRAWS` rows of normal numbers; the columns are always the same."""
    return np.random.default_rng(0).standard_normal((n, N_DRAWS)).T
