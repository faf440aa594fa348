"""The jobs of a batch system, as dask-jobqueue submits them.

Dask does not hear what becomes of a job in its queue. This keeps what can be known of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from distributed import Status

#: A nanny has started its worker again after so long, or does not.
RESTART_S = 8.0


class Jobs:
    """Jobs of one worker or several: whose workers came, whose have all gone, and when.

    One whose workers have all gone has ended, unless a nanny starts one of them again in time.

    Examples
    --------
    >>> now = 0.0
    >>> jobs = Jobs(clock=lambda: now)
    >>> specs = {"a": {"a-0", "a-1"}, "b": {"b-0", "b-1"}}
    >>> jobs.look(specs, {"a-0", "a-1"})
    >>> jobs.look(specs, set())
    >>> [*jobs.alone], jobs.ended()
    (['a'], set())
    >>> now = 9.0
    >>> jobs.ended()
    {'a'}
    """

    #: A batch system charges nothing for a job that waits.
    bills_requests: ClassVar[bool] = False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._met: set[str] = set()
        self.alone: dict[Any, float] = {}  # jobs without a worker that had some: since when

    def meet(self, job: str) -> None:
        """Note that a worker of this job has come."""
        self._met.add(job)

    def look(self, specs: Mapping[Any, set[str]], there: set[str]) -> None:
        """Note which jobs have workers, by the names of all that they should have."""
        self._met &= {str(job) for job in specs}
        self._met |= {str(job) for job, members in specs.items() if members & there}
        now = self._clock()
        alone = (job for job, members in specs.items() if not members & there)
        self.alone = {job: self.alone.get(job, now) for job in alone if str(job) in self._met}

    def ended(self) -> set[Any]:
        """Return the jobs whose workers do not come back."""
        late = self._clock() - RESTART_S
        return {job for job, since in self.alone.items() if since < late}

    def find_refused(self, jobs: Iterable[Any]) -> None:
        """Mark those as failed that the batch system has not taken.

        dask-jobqueue does not, and Dask then fails to close the cluster.
        """
        for job in jobs:
            if job.status == Status.created:
                job.status = Status.failed


class NoJobs(Jobs):
    """Machines of other clusters tell what becomes of them, and cost from the request on."""

    bills_requests = True

    def look(self, specs: Mapping[Any, set[str]], there: set[str]) -> None:
        """Do nothing."""

    def find_refused(self, jobs: Iterable[Any]) -> None:
        """Do nothing."""


def jobs_of(cluster: Any) -> Jobs:
    """Return what is to be known of a cluster's jobs, if it has any."""
    if not hasattr(cluster, "job_script"):
        return NoJobs()
    n_workers = cluster._dummy_job.worker_processes
    if n_workers > 1:
        # dask-jobqueue leaves it out where its configuration or the cores decide the number.
        cluster.new_spec.setdefault("group", [f"-{k}" for k in range(n_workers)])
    return Jobs()
