"""What the workers of a simulated search are like."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from dagsel.checks import is_number, number, short_traceback, shown, whole
from dagsel.errors import SearchError
from dagsel.planning.pools import Workers, check_room, check_workers


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Workers that take time for units, loads and hops; they join and die at given times.

    Parameters
    ----------
    n_workers
        Number of workers when the search begins.
    speeds
        Speed of each worker; 1 by default. The dispatcher is not told, it has to measure it.
    n_shards
        Number of training shards of the data set, and of validation shards.
    replicas
        How many workers hold each shard; None for enough copies to give each worker a shard. (On a
        real cluster `dagsel.optimize` makes more, as far as they take little memory.)
    startup_s
        Time from the request for a worker to its arrival. The time of the search counts from the
        request for the first ones, as on a real cluster; its flow begins when they are there.
    load_s, hop_s, switch_s
        Time to load a shard, to move a state to another worker, and to go on with a unit that was
        stopped, if another trial has trained on the worker since, or with a gang of another size.
    failures
        Pairs: seconds after the beginning, and the number (from 0) of the worker that dies then.
    additions
        Pairs: seconds after the beginning, and the speed of a worker that is requested then.
        Numbers go on after the first workers.
    max_workers
        The most workers that the flow may ask for (`dagsel.flow.Scale`); None if the cluster cannot
        grow or shrink. If it can, it also replaces workers that die.
    workers
        Pools of workers with a price each, as for `dagsel.optimize`; empty for workers that are all
        alike. The first workers are of the cheapest pools that have room.
    interruptions_per_hour
        How often the provider takes a worker back, on average, for each hour that the worker is
        there: of the pools with ``spot=True``, or of all workers if there are no pools. When is
        drawn from the seed (exponentially). Another one is asked for at once.
    notice_s
        How long before that a worker is told, so that it stops at its next batch.
    draw
        Another number draws other interruptions for the same seed.

    Raises
    ------
    SearchError
        If a number is out of range.

    Examples
    --------
    >>> SimulatedCluster(n_workers=16).copies
    4
    >>> SimulatedCluster(n_workers=2, speeds=(1.0, 0.5), failures=((60.0, 0),)).worker_speeds
    {'worker-0': 1.0, 'worker-1': 0.5}
    """

    n_workers: int
    speeds: tuple[float, ...] | None = None
    n_shards: int = 4
    replicas: int | None = None
    startup_s: float = 0.0
    load_s: float = 0.0
    hop_s: float = 0.0
    switch_s: float = 0.0
    failures: tuple[tuple[float, int], ...] = ()
    additions: tuple[tuple[float, float], ...] = ()
    max_workers: int | None = None
    workers: tuple[Workers, ...] = ()
    interruptions_per_hour: float = 0.0
    notice_s: float = 30.0
    draw: int = 0

    @short_traceback
    def __post_init__(self) -> None:
        for name in ("n_workers", "n_shards"):
            whole(name, getattr(self, name))
        if self.replicas is not None:
            whole("replicas", self.replicas)
        for name in ("failures", "additions"):
            pairs: Any = getattr(self, name)
            if not isinstance(pairs, tuple | list) or not all(map(_is_pair, pairs)):
                raise SearchError(f"{name} must be pairs of numbers, got {shown(pairs)}")
        given: Any = self.speeds
        if given is not None and not isinstance(given, tuple | list):
            raise SearchError(f"speeds must be one number for each worker, got {shown(given)}")
        if self.speeds is not None and len(self.speeds) != self.n_workers:
            raise SearchError(
                f"{len(self.speeds)} speeds were given for {self.n_workers} workers; give one "
                "for each"
            )
        speeds = [*(self.speeds or ()), *(speed for _, speed in self.additions)]
        if not all(is_number(speed) and 0.0 < speed < math.inf for speed in speeds):
            raise SearchError(f"speeds must be above 0, got {speeds}")
        if self.max_workers is not None and whole("max_workers", self.max_workers) < self.n_workers:
            raise SearchError(
                f"max_workers is {self.max_workers}, and {self.n_workers} workers are there at "
                "the beginning; raise max_workers or lower n_workers"
            )
        if self.workers:
            check_workers(self.workers)
            check_room(self.workers, self.n_workers)
        rate: Any = self.interruptions_per_hour
        number("interruptions_per_hour", rate, "0 or more", lambda n: 0.0 <= n < math.inf)
        whole("draw", self.draw, least=0)
        times = [self.startup_s, self.load_s, self.hop_s, self.switch_s, self.notice_s]
        times += [time_s for time_s, _ in (*self.failures, *self.additions)]
        if not all(is_number(time_s) and 0.0 <= time_s < math.inf for time_s in times):
            raise SearchError(f"times must be 0 or more seconds, got {times}")
        n_workers = self.n_workers + len(self.additions)
        for _, worker in self.failures:
            if not 0 <= worker < n_workers:
                raise SearchError(
                    f"worker {worker} cannot fail: there are {n_workers}; their numbers begin "
                    "with 0"
                )

    @property
    def worker_speeds(self) -> dict[str, float]:
        """Speed of each worker that is there at the beginning."""
        speeds = self.speeds or (1.0,) * self.n_workers
        return {worker_name(number): speed for number, speed in enumerate(speeds)}

    def lifetime_s(self, worker: str, pool: str, seed: int) -> float:
        """Return after how many seconds a worker is taken back; infinity for never.

        Parameters
        ----------
        worker
            Its name.
        pool
            Name of its pool.
        seed
            Seed of the run.

        Examples
        --------
        >>> SimulatedCluster(n_workers=1).lifetime_s("worker-0", "", seed=0)
        inf
        """
        kinds = {kind.name: kind.spot for kind in self.workers}
        if not self.interruptions_per_hour or not kinds.get(pool, True):
            return math.inf
        # One draw for each worker: what becomes of one changes nothing for the others.
        drawn = random.Random(f"{seed} {self.draw} {worker}")  # noqa: S311
        return drawn.expovariate(self.interruptions_per_hour / 3600)

    @property
    def copies(self) -> int:
        """How many workers should hold each shard."""
        if self.replicas is not None:
            return self.replicas
        return math.ceil((self.n_workers + len(self.additions)) / self.n_shards)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and all(map(is_number, pair))


def worker_name(number: int) -> str:
    """Return a worker's address."""
    return f"worker-{number}"
