"""What a cluster can have, and what is planned for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dagsel.errors import SearchError
from dagsel.planning.brackets import StagePlan
from dagsel.planning.nodes import nodes_for, nodes_within

#: Share of a budget that may go into the starts of workers that the search could do without.
STARTUP_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ClusterCapacity:
    """What a cluster can have, as far as it is known.

    Parameters
    ----------
    most_workers
        Workers that it can have at most; None if nobody knows.
    startup_s
        Seconds from the request for a worker to its first unit; 0 if nobody knows.
    node_size
        Workers that come and go together, as those of a batch system's job.
    bills_requests
        Whether a worker costs from its request on; in a batch system's queue it costs nothing.

    Examples
    --------
    >>> ClusterCapacity(most_workers=10, node_size=4).most_in_nodes
    8
    """

    most_workers: int | None = None
    startup_s: float = 0.0
    node_size: int = 1
    bills_requests: bool = True

    @property
    def start_cost_s(self) -> float:
        """Worker-seconds that the start of a worker costs."""
        return self.startup_s if self.bills_requests else 0.0

    @property
    def most_in_nodes(self) -> int | None:
        """Workers of as many whole nodes as there can be; at least one worker."""
        if self.most_workers is None:
            return None
        return max(1, nodes_within(self.most_workers, self.node_size))

    def affordable(self, seconds: float, worker_seconds: float, n_there: int = 0) -> int | None:
        """Return how many workers are worth their starts; None for no bound.

        A worker costs from its request on. So many are worth it as use up the budget just in time,
        and more only if the starts of all that are to come take no more than `STARTUP_SHARE` of it.
        Starts never take more than half of it, and none begins that would take half of the time.
        How long a start takes on a machine that is busy shows when the first ones have come: until
        then no more are asked for. Without a deadline no number is in time, and all come at once
        whose starts take no more than that share.

        Parameters
        ----------
        seconds, worker_seconds
            Time and budget that are left; infinity for no limit.
        n_there
            Workers that are there.

        Examples
        --------
        >>> cluster = ClusterCapacity(most_workers=16, startup_s=3.0)
        >>> cluster.affordable(60.0, 120.0), cluster.affordable(57.0, 114.0, n_there=2)
        (2, 5)
        >>> cluster.affordable(math.inf, 120.0), cluster.affordable(math.inf, 1e4)
        (4, 16)
        """
        most = self.most_in_nodes
        if not self.startup_s or math.isinf(worker_seconds):
            return most
        is_late = seconds < 2 * self.startup_s  # they would train for less than they take to come
        if not (self.bills_requests or is_late):
            return most
        in_time = math.ceil(worker_seconds / seconds)
        n_cheap = int(STARTUP_SHARE * worker_seconds / self.startup_s)
        cheap = n_there + n_cheap if n_there or math.isinf(seconds) else 1
        node_s = self.node_size * self.startup_s
        paid = 0 if is_late else int(worker_seconds / 2 / node_s) * self.node_size
        n_worth = max(1, n_there, min(max(in_time, cheap), n_there + paid))
        n_workers = nodes_for(n_worth, self.node_size)
        return n_workers if most is None else min(most, n_workers)

    def why_fewer(self, n_workers: int | None, seconds: float, worker_seconds: float) -> str:
        """Say why fewer workers begin than there can be, if no deadline asks for more of them.

        Examples
        --------
        >>> cluster = ClusterCapacity(most_workers=16, startup_s=3.0)
        >>> cluster.why_fewer(4, math.inf, 120.0)  # doctest: +ELLIPSIS
        '4 of 16 workers begin: the start of each costs 3 of 120 worker-seconds; with a ...'
        >>> cluster.why_fewer(2, 60.0, 120.0), cluster.why_fewer(16, math.inf, 1e4)
        ('', '')
        """
        most = self.most_in_nodes
        is_all = n_workers is None or most is None or n_workers >= most
        if is_all or math.isfinite(seconds) or math.isinf(worker_seconds):
            return ""
        return (
            f"{n_workers} of {most} workers begin: the start of each costs {self.startup_s:.3g} of "
            f"{worker_seconds:.3g} worker-seconds; with a deadline= as many begin as use up the "
            "budget in time"
        )

    def check(self, seconds: float, worker_seconds: float, n_there: int = 0) -> None:
        """Raise a `SearchError` if no worker can be there within deadline and budget.

        Examples
        --------
        >>> ClusterCapacity(startup_s=90.0).check(60.0, math.inf)
        Traceback (most recent call last):
        ...
        dagsel.errors.SearchError: the first worker takes 90 s to come, and 60 s are left ...
        """
        startup_s = self.startup_s
        if n_there:
            return
        if seconds <= startup_s:
            raise SearchError(
                f"the first worker takes {startup_s:.3g} s to come, and {max(0.0, seconds):.3g} s "
                f"are left until the deadline: let it be more than {startup_s - seconds:.3g} s "
                "later, or start workers beforehand"
            )
        least = self.start_cost_s * self.node_size
        if worker_seconds <= least:
            first = f"a job of {self.node_size} workers" if self.node_size > 1 else "one worker"
            raise SearchError(
                f"the start of {first} costs {least:.3g} worker-seconds, and the budget is "
                f"{worker_seconds:.3g}: give more than {least:.3g}, or start workers beforehand"
            )


def fewer(n_workers: int, capacity: ClusterCapacity) -> int:
    """Return a number of workers, or what a cluster can have if that is less."""
    return min(n_workers, capacity.most_in_nodes or n_workers)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan has to keep to.

    Parameters
    ----------
    seconds, worker_seconds
        Time and budget that are left.
    most_workers
        Workers of all trials together; None for no bound.
    node_size
        Workers that come and go together.
    epoch_s
        Worker-seconds of an epoch of a trial; None before they are measured.
    """

    seconds: float
    worker_seconds: float
    most_workers: int | None = None
    node_size: int = 1
    epoch_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A span of time for which so many workers and trials are planned."""

    begins_s: float  # since the run began
    seconds: float
    n_workers: int
    n_trials: tuple[int, ...]  # of each bracket


@dataclass(frozen=True, slots=True)
class Plan:
    """Say what is planned from now on. It changes nothing.

    `Run.plan` compares it with what was done.

    Parameters
    ----------
    stages
        One after the other.
    workers
        Workers of a trial of each bracket.
    startup_s
        Seconds that are reckoned for the start of a worker.
    reason
        Why it was made, or made again.

    Examples
    --------
    >>> stages = (PlannedStage(0.0, 60.0, 4, (8,)), PlannedStage(60.0, 120.0, 2, (2,)))
    >>> Plan(stages, workers=(1,)).ends
    (60.0, 180.0)
    """

    stages: tuple[PlannedStage, ...]
    workers: tuple[int, ...]
    startup_s: float = 0.0
    reason: str = ""

    @property
    def ends(self) -> tuple[float, ...]:
        """When each stage ends, in seconds since the run began."""
        later = [stage.begins_s for stage in self.stages[1:]]
        return (*later, self.stages[-1].begins_s + self.stages[-1].seconds)


def dated(plan: StagePlan, begins_s: float, startup_s: float, reason: str) -> Plan:
    """Return a plan whose first stage begins at a time of the run.

    Examples
    --------
    >>> from fractions import Fraction
    >>> from dagsel.planning.brackets import Stage, StagePlan
    >>> stages = (Stage(Fraction(2), (4,), 4), Stage(Fraction(8), (1,), 1))
    >>> dated(StagePlan((1,), stages), 3.0, 3.0, "why").ends
    (5.0, 13.0)
    """
    begins = (begins_s, *(begins_s + end for end in plan.ends))
    stages = (
        PlannedStage(begin, float(stage.seconds), stage.n_workers, stage.n_trials)
        for begin, stage in zip(begins, plan.stages, strict=False)
    )
    return Plan(tuple(stages), plan.workers, startup_s, reason)
