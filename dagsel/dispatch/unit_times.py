"""How long a unit takes: trial cost × worker pace, corrected by every finished unit.

``log seconds = scale + cost(trial) + pace(worker) + noise``. Scale, cost and pace are small Kalman
filters with a scalar variance each (covariances are left out): a residual is shared among the three
in proportion to how uncertain each is. So the first unit sets the scale, a new trial starts at the
cost of the known ones, and a worker that slows down is believed after a few units, while one odd
unit is not (residuals are clipped).
"""

from __future__ import annotations

import math

from dagsel.dispatch.events import Worker

SCALE_VARIANCE = 100.0  # nothing is known of the seconds in a unit of cost
COST_VARIANCE = 0.25  # a trial's first cost is right within a factor of e^0.5 or so
OPTIMISM = 2.7  # two standard deviations
PACE_VARIANCE = 0.05
PACE_DRIFT = 0.004  # variance that a worker's pace gains with each of its units
NOISE_VARIANCE = 0.04
#: Workers whose measured speeds differ by less than this factor count as equally fast.
SAME_SPEED = 1.8
EVALUATION_RATIO = 0.35  # of a training unit; a backward pass takes about twice the forward's time


class UnitTimes:
    """Estimates of the seconds that a unit takes.

    Examples
    --------
    >>> times = UnitTimes()
    >>> times.add_trial(0)
    >>> times.add_trial(1, cost=2.0)
    >>> times.add_worker("a", speed=1.0)
    >>> times.known
    False
    >>> for _ in range(20):
    ...     times.observe(0, "a", seconds=3.0)
    >>> round(times.seconds(1, "a") / times.seconds(0, "a"), 1) > 1.5
    True
    """

    def __init__(self) -> None:
        self.cost: dict[int, float] = {}
        self.pace: dict[Worker, float] = {}
        self.n_observed: dict[Worker, int] = {}
        self.observed_s: dict[Worker, float] = {}
        self._cost_variance: dict[int, float] = {}
        self._unknown: set[int] = set()
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

    def add_trial(self, trial: int, cost: float = 1.0) -> None:
        """Add a trial, unless it is known; `cost` is its work relative to other trials'."""
        if trial not in self.cost:
            self.cost[trial] = cost
            self._cost_variance[trial] = COST_VARIANCE
            if cost == 1.0:
                self._unknown.add(trial)

    def add_worker(self, worker: Worker, speed: float) -> None:
        """Add a worker with the speed that it is expected to have."""
        self.pace[worker] = 1.0 / speed
        self._pace_variance[worker] = PACE_VARIANCE
        self.n_observed[worker] = 0
        self.observed_s[worker] = 0.0

    def forget_trial(self, trial: int) -> None:
        """Forget a trial that is over."""
        self.cost.pop(trial, None)
        self._cost_variance.pop(trial, None)
        self._unknown.discard(trial)

    def forget_worker(self, worker: Worker) -> None:
        """Forget a worker that has gone."""
        for table in (self.pace, self._pace_variance, self.n_observed, self.observed_s):
            table.pop(worker, None)

    def seconds(self, trial: int, worker: Worker) -> float:
        """Estimate the seconds of a training unit."""
        return self.unit_s * self.cost[trial] * self.pace[worker]

    def optimism(self, trial: int) -> float:
        """Return a factor by which a trial may well cost more: above 1 if nothing is known of it.

        Such a trial is served early, as if it were long: if it is, its chain must begin early.
        """
        return OPTIMISM if trial in self._unknown else 1.0

    def speed_error(self, worker: Worker) -> float:
        """Return the standard deviation of the logarithm of the worker's pace."""
        return math.sqrt(self._pace_variance[worker])

    def observe(self, trial: int, worker: Worker, seconds: float) -> None:
        """Learn from a finished training unit; a time of 0 teaches nothing."""
        if seconds <= 0.0 or trial not in self.cost or worker not in self.pace:
            return
        self._unknown.discard(trial)
        expected = self._log_scale + math.log(self.cost[trial] * self.pace[worker])
        v_scale, v_cost = self._scale_variance, self._cost_variance[trial]
        v_pace = self._pace_variance[worker] + PACE_DRIFT
        total = v_scale + v_cost + v_pace + self._noise
        residual = math.log(seconds) - expected
        limit = 3.0 * math.sqrt(total)
        residual = min(limit, max(-limit, residual))
        self._log_scale += residual * v_scale / total
        self.cost[trial] *= math.exp(residual * v_cost / total)
        self.pace[worker] *= math.exp(residual * v_pace / total)
        self._scale_variance = v_scale * (1.0 - v_scale / total)
        self._cost_variance[trial] = v_cost * (1.0 - v_cost / total)
        self._pace_variance[worker] = v_pace * (1.0 - v_pace / total)
        surplus = residual * residual - (total - self._noise)
        self._noise = min(1.0, max(1e-4, self._noise + 0.05 * (max(surplus, 0.0) - self._noise)))
        self.n_observed[worker] += 1
        self.observed_s[worker] += seconds
        self._refresh()

    def observe_evaluation(self, trial: int, worker: Worker, seconds: float) -> None:
        """Learn how long evaluating takes beside training, once training times are known."""
        if seconds <= 0.0 or not self.known or trial not in self.cost or worker not in self.pace:
            return
        residual = math.log(seconds / self.seconds(trial, worker)) - self._log_ratio
        total = self._ratio_variance + self._noise + COST_VARIANCE / 4.0
        self._log_ratio += residual * self._ratio_variance / total
        self._ratio_variance = max(
            0.01, self._ratio_variance * (1.0 - self._ratio_variance / total)
        )
        self.ratio = math.exp(self._log_ratio)

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
