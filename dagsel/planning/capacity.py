"""What a cluster can have, and what is planned for it."""

from __future__ import annotations

from dataclasses import dataclass


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

    Examples
    --------
    >>> ClusterCapacity(most_workers=10, node_size=4).most_in_nodes
    8
    """

    most_workers: int | None = None
    startup_s: float = 0.0
    node_size: int = 1

    @property
    def most_in_nodes(self) -> int | None:
        """Workers of as many whole nodes as there can be; at least one worker."""
        if self.most_workers is None:
            return None
        whole = self.most_workers // self.node_size * self.node_size
        return max(1, whole or self.most_workers)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A span of time for which so many workers and trials are planned."""

    begins_s: float  # since the run began
    seconds: float
    n_workers: int
    n_trials: tuple[int, ...]  # of each bracket


@dataclass(frozen=True, slots=True)
class Plan:
    """Say what is planned from now on; nothing is done. `Run.plan` compares it with what was done.

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
    """

    stages: tuple[PlannedStage, ...]
    workers: tuple[int, ...]
    startup_s: float = 0.0
    reason: str = ""
