"""LSF: the whole node, to one job after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dagsel.flows.allocation import Allocator, Job, keep
from dagsel.planning.scaling import ScalingModel


def lsf(jobs: Sequence[Job], n_workers: int) -> dict[int, int]:
    """Return all workers for the job that has some, or else for the first one that waits.

    Examples
    --------
    >>> waiting = [Job(trial, most=6) for trial in range(3)]
    >>> lsf(waiting, 6), lsf([Job(0, gang=4, least=1, most=6), *waiting[1:]], 6)
    ({0: 6, 1: 0, 2: 0}, {0: 6, 1: 0, 2: 0})
    """
    gangs = keep(jobs, n_workers)
    if jobs:
        job = min(jobs, key=lambda job: not job.gang)
        free = max(n_workers - sum(gangs.values()), 0)
        gangs[job.trial] = max(gangs[job.trial], min(job.most, gangs[job.trial] + free))
    return gangs


@dataclass
class LSF(Allocator):
    """Train one trial of a search after another, each on all workers, in the order of the queue.

    This is the baseline of MARBLE's paper (Han et al., CCGRID 2020, Section VII-A): LSF gives a job
    the most GPUs that it can have, and the next one waits until there are enough. In a real LSF the
    number is what the user asks for; a job that asks for fewer leaves room for others.

    Parameters
    ----------
    flow
        The search inside; `JobQueue` for a plain queue of jobs.

    Raises
    ------
    SearchError
        If `flow` is not a search.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context
    >>> from dagsel.flows import RandomSearch
    >>> flow = LSF(RandomSearch(max_epochs=5, n_trials=8))
    >>> flow.start(Context(n_workers=2))
    [Ask(n=8, sampling='random')]
    >>> flow.handle(Asked((0, 1)))
    [Train(trial=0, epochs=5, gang=2)]
    """

    scaling: Mapping[str, ScalingModel] = field(default_factory=dict, init=False, repr=False)
    by: str = field(default="", init=False, repr=False)

    needs_profiles: ClassVar[bool] = False

    def divide(self, jobs: Sequence[Job], n_workers: int) -> dict[int, int]:
        """Return how `lsf` divides the workers."""
        return lsf(jobs, n_workers)
