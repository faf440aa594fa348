"""What is left of a deadline and a budget, and what trials can still train with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dagsel.planning.scaling import ScalingModel


@dataclass(frozen=True, slots=True)
class Remainder:
    """Time and budget that are left.

    Parameters
    ----------
    seconds, worker_seconds
        What is left.
    epoch_s
        Worker-seconds of an epoch on one worker.
    most_workers, most_per_trial
        Workers that there can be, and those of one trial; None for no limit.
    scaling
        λ.

    Examples
    --------
    >>> from dagsel.planning.scaling import Scaling
    >>> left = Remainder(10.0, 80.0, 1.0, most_workers=64, scaling=Scaling({2: 1.8, 4: 3.0}))
    >>> left.n_workers, left.best_gang
    (8, 4)
    >>> [(left.workers(k), left.epochs(k)) for k in (1, 3)]
    [(4, [30.0]), (8, [24.0, 24.0, 18.0])]
    """

    seconds: float
    worker_seconds: float
    epoch_s: float
    most_workers: int
    scaling: ScalingModel
    most_per_trial: int | None = None

    @property
    def n_workers(self) -> int:
        """Workers that the budget pays for all the time."""
        paid = self.worker_seconds / self.seconds
        return max(1, min(self.most_workers, math.floor(paid * (1 + 1e-9))))

    @property
    def best_gang(self) -> int:
        """The number of workers beyond which a trial trains no faster."""
        known = 64  # λ of more is not worth the search
        return self.scaling.best(min(self.most_workers, self.most_per_trial or known, known))

    def speed(self, gang: int) -> float:
        """Return λ."""
        return self.scaling.speedup(gang)

    def after(self, seconds: float, worker_seconds: float) -> Remainder:
        """Return what is left when so much is used."""
        left = (self.seconds - seconds, self.worker_seconds - worker_seconds)
        return replace(self, seconds=left[0], worker_seconds=left[1])

    def workers(self, k: int) -> int:
        """Return the workers that k trials train on: those that the budget pays for, or one each.

        One more than it pays for until the deadline is taken if trials come further with it.
        """
        most = min(self.most_workers, k * self.best_gang)
        least = max(self.n_workers, min(k, most))
        numbers = [min(most, n) for n in (least, least + 1)]
        return max(numbers, key=lambda n: (sum(self._epochs(k, n)), -n))

    def epochs(self, k: int) -> list[float]:
        """Return how many more epochs each of k trials can train on these, the best trial first."""
        return self._epochs(k, self.workers(k))

    def _epochs(self, k: int, n_workers: int) -> list[float]:
        seconds = min(self.seconds, self.worker_seconds / n_workers)
        if n_workers < k:  # they take turns
            return [seconds * n_workers / k / self.epoch_s] * k
        gangs = share(n_workers, k, self.best_gang)
        return [seconds * self.speed(gang) / self.epoch_s for gang in gangs]


def share(n_workers: int, k: int, most: int) -> list[int]:
    """Return the workers of each of k trials, the best trial first; no trial has more than `most`.

    If all but the last trial can have that many, they do; otherwise the workers are shared equally.

    Examples
    --------
    >>> share(12, 2, most=8), share(7, 2, most=8), share(2, 3, most=8)
    ([8, 4], [4, 3], [1, 1, 1])
    """
    rest = n_workers - (k - 1) * most
    if k and rest > 0:
        return [*[most] * (k - 1), min(rest, most)]
    return [max(1, n_workers // k + (place < n_workers % k)) for place in range(k)]
