"""How long a unit takes: trial cost × worker pace, corrected by every finished task.

``log seconds = scale + cost(trial) + pace(worker) + noise``. Scale, cost and pace are small Kalman
filters with a scalar variance each (covariances are left out): a residual is shared among the three
in proportion to how uncertain each is. So the first task sets the scale, and a worker that slows
down is believed after a few tasks, while one odd task is not (residuals are clipped).

What is learned from is the mean of a task's units. One of them alone says little: the last one
stores the state, the first one of a trial builds its model. Taken one by one, in an order that is
always the same, they move costs and paces apart without end, as covariances are left out.

A trial of which nothing was seen costs what the others do. That is the mean of those seen, so far;
the less their costs differ, the more the latest ones count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dagsel.dispatch.events import Worker

SCALE_VARIANCE = 100.0  # nothing is known of the seconds in a unit of cost
COST_VARIANCE = 0.25  # a trial's first cost is right within a factor of e^0.5 or so
OPTIMISM = 2.7  # two standard deviations
PACE_VARIANCE = 0.05
PACE_DRIFT = 0.004  # variance that a worker's pace gains with each of its tasks
TYPICAL_DRIFT = 0.004  # variance that the cost of a typical trial gains with each new one
SPREAD_SHARE = 1 / 8  # weight of the latest new trial in how much the costs of trials differ
NOISE_VARIANCE = 0.04  # of a unit's time, as long as little is known
NOISE_KEPT = 0.95  # share of what was known of it, after another unit
#: Workers whose measured speeds differ by less than this factor count as equally fast.
SAME_SPEED = 1.8
EVALUATION_RATIO = 0.35  # of a training unit; a backward pass takes about twice the forward's time


class UnitTimes:
    """Estimates of the seconds that a unit takes.

    Examples
    --------
    >>> times = UnitTimes()
    >>> times.add_trial(0)
    >>> times.add_trial(1)
    >>> times.add_worker("a", speed=1.0)
    >>> times.known
    False
    >>> for _ in range(20):
    ...     times.observe(0, "a", [3.0])
    >>> round(times.seconds(1, "a"), 1)
    3.0
    """

    def __init__(self) -> None:
        self.typical_cost = 1.0  # of a trial of which nothing was seen
        self.pace: dict[Worker, float] = {}
        self.n_observed: dict[Worker, int] = {}
        self.observed_s: dict[Worker, float] = {}
        self._cost: dict[int, float] = {}
        self._cost_variance: dict[int, float] = {}  # of trials of which something was seen
        self._unknown: set[int] = set()  # trials whose cost is not known
        self._n_seen = 0  # trials of which something was seen, also those that are over
        self._spread = COST_VARIANCE  # of their costs
        self._last_change = 0.0  # of the last new one: log of its cost over a typical one
        self._pace_variance: dict[Worker, float] = {}
        self._log_scale = 0.0
        self._scale_variance = SCALE_VARIANCE
        self._noise = NOISE_VARIANCE
        self._log_ratio = math.log(EVALUATION_RATIO)
        self._ratio_variance = 1.0
        self._refresh()

    @property
    def known(self) -> bool:
        """Whether the time of any unit was seen; only then are estimates in seconds."""
        return self._scale_variance < SCALE_VARIANCE

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of a unit's time about its estimate."""
        return math.sqrt(self._noise)

    def add_trial(self, trial: int, cost: float | None = None) -> None:
        """Add a trial, unless it is known; `cost` is its work relative to other trials'."""
        if self._has(trial):
            return
        if cost is None:
            self._unknown.add(trial)
        else:
            self._cost[trial] = cost

    def cost(self, trial: int) -> float:
        """Return the trial's work relative to other trials'."""
        return self._cost.get(trial, self.typical_cost)

    def add_worker(self, worker: Worker, speed: float) -> None:
        """Add a worker with the speed that it is expected to have."""
        self.pace[worker] = 1.0 / speed
        self._pace_variance[worker] = PACE_VARIANCE
        self.n_observed[worker] = 0
        self.observed_s[worker] = 0.0

    def forget_trial(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._cost.pop(trial, None)
        self._cost_variance.pop(trial, None)
        self._unknown.discard(trial)

    def forget_worker(self, worker: Worker) -> None:
        """Forget a worker that has gone."""
        for table in (self.pace, self._pace_variance, self.n_observed, self.observed_s):
            table.pop(worker, None)

    def seconds(self, trial: int, worker: Worker) -> float:
        """Estimate the seconds of a training unit."""
        return self.unit_s * self.cost(trial) * self.pace[worker]

    def optimism(self, trial: int) -> float:
        """Return a factor by which a trial may well cost more: above 1 if nothing is known of it.

        Such a trial is served early, as if it were long: if it is, its chain must begin early.
        """
        return OPTIMISM if trial in self._unknown else 1.0

    def speed_error(self, worker: Worker) -> float:
        """Return the standard deviation of the logarithm of the worker's pace."""
        return math.sqrt(self._pace_variance[worker])

    def observe(self, trial: int, worker: Worker, unit_seconds: Iterable[float]) -> None:
        """Learn from the training units of a task; a time of 0 teaches nothing."""
        took = [seconds for seconds in unit_seconds if seconds > 0.0]
        if not took or not self._has(trial) or worker not in self.pace:
            return
        n, cost, is_new = len(took), self.cost(trial), trial not in self._cost_variance
        v_scale, v_cost = self._scale_variance, self._cost_variance.get(trial, COST_VARIANCE)
        v_pace, v_noise = self._pace_variance[worker] + PACE_DRIFT, self._noise / n
        total = v_scale + v_cost + v_pace + v_noise
        expected = self._log_scale + math.log(cost * self.pace[worker])
        residual = math.log(sum(took) / n) - expected
        limit = 3.0 * math.sqrt(total)
        residual = min(limit, max(-limit, residual))
        self._log_scale += residual * v_scale / total
        self._cost[trial] = cost * math.exp(residual * v_cost / total)
        self._cost_variance[trial] = v_cost * (1.0 - v_cost / total)
        self._unknown.discard(trial)
        self._learn_typical_cost(residual * v_cost / total, is_new=is_new)
        self.pace[worker] *= math.exp(residual * v_pace / total)
        self._scale_variance = v_scale * (1.0 - v_scale / total)
        self._pace_variance[worker] = v_pace * (1.0 - v_pace / total)
        # Of a new trial most of it is its cost, and the same in all units.
        surplus = max(0.0, (1 if is_new else n) * (residual * residual - (total - v_noise)))
        noise = self._noise + (1.0 - NOISE_KEPT**n) * (surplus - self._noise)
        self._noise = min(1.0, max(1e-4, noise))
        self.n_observed[worker] += n
        self.observed_s[worker] += sum(took)
        self._refresh()

    def _learn_typical_cost(self, change: float, *, is_new: bool) -> None:
        """Learn from the change of the logarithm of a trial's cost; a new one's was typical."""
        if is_new:
            self._n_seen += 1
            if self._n_seen > 2:  # the first one sets the scale
                surprise = (change - self._last_change) ** 2 / 2
                weight = max(SPREAD_SHARE, 1 / (self._n_seen - 1))
                self._spread += weight * (surprise - self._spread)
            self._last_change = change
            share = max(1.0 / self._n_seen, TYPICAL_DRIFT / (TYPICAL_DRIFT + self._spread))
        else:
            share = 1.0 / self._n_seen
        self.typical_cost *= math.exp(share * change)

    def observe_evaluation(self, trial: int, worker: Worker, seconds: float) -> None:
        """Learn how long evaluating takes beside training, once training times are known."""
        if seconds <= 0.0 or not self.known or not self._has(trial) or worker not in self.pace:
            return
        residual = math.log(seconds / self.seconds(trial, worker)) - self._log_ratio
        total = self._ratio_variance + self._noise + COST_VARIANCE / 4.0
        self._log_ratio += residual * self._ratio_variance / total
        self._ratio_variance = max(
            0.01, self._ratio_variance * (1.0 - self._ratio_variance / total)
        )
        self.ratio = math.exp(self._log_ratio)

    def _has(self, trial: int) -> bool:
        return trial in self._cost or trial in self._unknown

    def _refresh(self) -> None:
        noise = self._noise if self.known else 0.0
        self.unit_s = math.exp(self._log_scale + noise / 2.0)  # a log-normal's mean
        self.ratio = math.exp(self._log_ratio)


class Speeds:
    """Speeds that were measured, the first of each kind.

    Examples
    --------
    >>> speeds = Speeds()
    >>> [speeds.rounded(speed) for speed in (10.0, 14.0, 40.0, 35.0)]
    [10.0, 10.0, 40.0, 40.0]
    """

    def __init__(self) -> None:
        self._known: list[float] = []

    def rounded(self, speed: float) -> float:
        """Return the speed of the first worker that is about as fast."""
        for known in self._known:
            if 1 / SAME_SPEED < speed / known < SAME_SPEED:
                return known
        self._known.append(speed)
        return speed
