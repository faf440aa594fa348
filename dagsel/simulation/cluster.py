"""What the workers of a simulated search are like."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dagsel.errors import SearchError


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Workers that take time for units, loads and hops; they come and die when they are told to.

    Parameters
    ----------
    n_workers
        Workers that are there when the search begins.
    speeds
        Of each how fast it is; 1 by default. What the dispatcher knows of it, it has to measure.
    n_shards
        Training shards of the data set, and validation shards.
    replicas
        Workers that hold each shard; None for as many as give each worker a shard.
    startup_s
        From the request for a worker to its arrival. The search begins when the first ones are
        there, as a real one does.
    load_s, hop_s, switch_s
        Time to load a shard, to move a state to another worker, and to go on with a unit that was
        stopped, or with another gang.
    failures
        Seconds after the beginning, and the number of the worker that dies then, from 0.
    additions
        Seconds after the beginning, and the speed of the worker that is requested then. Its number
        follows that of the last one.
    max_workers
        Up to how many the flow may let it grow (`dagsel.flow.Scale`), down to one; None if it
        cannot. A cluster that can also replaces the workers that die.

    Raises
    ------
    SearchError
        If there is no such cluster.

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

    def __post_init__(self) -> None:
        for name in ("n_workers", "n_shards"):
            if getattr(self, name) < 1:
                raise SearchError(f"{name} must be 1 or more, got {getattr(self, name)!r}")
        if self.replicas is not None and self.replicas < 1:
            raise SearchError(f"replicas must be 1 or more, got {self.replicas!r}")
        if self.speeds is not None and len(self.speeds) != self.n_workers:
            raise SearchError(f"{len(self.speeds)} speeds were given for {self.n_workers} workers")
        speeds = [*(self.speeds or ()), *(speed for _, speed in self.additions)]
        if not all(0.0 < speed < math.inf for speed in speeds):
            raise SearchError(f"speeds must be above 0, got {speeds}")
        if self.max_workers is not None and self.max_workers < self.n_workers:
            raise SearchError(
                f"max_workers is {self.max_workers}, and {self.n_workers} workers are there"
            )
        times = [self.startup_s, self.load_s, self.hop_s, self.switch_s]
        times += [time_s for time_s, _ in (*self.failures, *self.additions)]
        if not all(0.0 <= time_s < math.inf for time_s in times):
            raise SearchError(f"times must be 0 or more seconds, got {times}")
        n_workers = self.n_workers + len(self.additions)
        for _, worker in self.failures:
            if not 0 <= worker < n_workers:
                raise SearchError(f"worker {worker} cannot fail: there are {n_workers}, from 0 on")

    @property
    def worker_speeds(self) -> dict[str, float]:
        """Speed of each worker that is there at the beginning."""
        speeds = self.speeds or (1.0,) * self.n_workers
        return {worker_name(number): speed for number, speed in enumerate(speeds)}

    @property
    def copies(self) -> int:
        """Workers that are to hold each shard."""
        if self.replicas is not None:
            return self.replicas
        return math.ceil((self.n_workers + len(self.additions)) / self.n_shards)


def worker_name(number: int) -> str:
    """Address of a worker.

    Examples
    --------
    >>> worker_name(3)
    'worker-3'
    """
    return f"worker-{number}"
