"""MARBLE: each job gets the number of workers that it makes good use of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dagsel.checks import number
from dagsel.flows.allocation import Allocator, Job, keep


def marble(jobs: Sequence[Job], n_workers: int, switch_s: float | None = None) -> dict[int, int]:
    """Return how many workers each job gets by MARBLE's rule.

    First the jobs that run on fewer workers than are best for them (the *secondaries*) get more, as
    far as workers are free and the time saved is above what a switch costs; then jobs that wait
    begin on their best number, or on what is left. Both in the order of the jobs. With `switch_s=0`
    every promotion is made, as in the paper, which does not weigh the cost of a switch against it;
    so it is where nothing is known of the time that a job has left. A switch takes `switch_s`; with
    None as long as the job itself says.

    Examples
    --------
    >>> from dagsel.planning.scaling import Scaling
    >>> resnet = Scaling({2: 1.7, 3: 2.2, 6: 2.25})
    >>> waiting = [Job(trial, most=6, scaling=resnet) for trial in range(3)]
    >>> marble(waiting, 6), marble(waiting, 4)
    ({0: 3, 1: 3, 2: 0}, {0: 3, 1: 1, 2: 0})
    >>> secondary = Job(1, gang=1, least=1, most=6, scaling=resnet, left_s=10.0)
    >>> marble([secondary, waiting[2]], 6), marble([secondary, waiting[2]], 6, switch_s=10.0)
    ({1: 3, 2: 3}, {1: 1, 2: 3})
    """
    gangs = keep(jobs, n_workers)
    free = max(n_workers - sum(gangs.values()), 0)
    for job in sorted(jobs, key=lambda job: not job.gang):
        if not free:
            break
        gang = gangs[job.trial]
        cost_s = job.switch_s if switch_s is None else switch_s
        more = min(job.scaling.best(n_workers), job.most, gang + free)
        more = job.scaling.best(more, within=0.0)  # a part of the best number may be slower
        if more > gang and (not gang or not cost_s or job.won_s(gang, more) > cost_s):
            gangs[job.trial] = more
            free -= more - gang
    return gangs


@dataclass
class Marble(Allocator):
    """Train each trial of a search on the number of workers that is best for it.

    A job is a `Train` of the inner search, until its epochs end, it is paused or it is stopped.
    Jobs are served in their order (`Allocator`). The one at the head of the queue becomes a
    *primary* when its best number of workers is free; otherwise it and those after it begin as
    *secondaries* on what is left. When workers come free, secondaries are promoted before new jobs
    begin: suspended, and resumed with more workers, up to their best number.

    Han et al., MARBLE: A Multi-GPU Aware Job Scheduler for Deep Learning on HPC Systems, CCGRID
    2020, Section V-C and Algorithm 1. What differs from it:

    - The best number is the smallest whose λ is within 3% of the top (`Scaling.best`), of the
      workers that there are; in the paper it is the fastest.
    - A promotion may be partial. Algorithm 1 promotes only to the best number.
    - Of what is left a job takes no more than makes it faster. In the paper it takes all of it.
    - A job is promoted only if that saves more time than a switch costs, by the times of its epochs
      so far. The paper promotes always; so does ``switch_s=0``.

    The paper says nothing of what follows. The trials of a search are jobs. No job loses workers to
    another one. One that trains for a stated time keeps its number until that is over. Where
    workers are lost, the jobs that were served last lose them first.

    Parameters
    ----------
    flow
        The search inside; `JobQueue` for a plain queue of jobs.
    scaling
        λ by architecture: what `dagsel.profile` measures, or a `Scaling` by hand.
    by
        The architecture's key in the configurations.
    switch_s
        Seconds that it takes to suspend and resume a job. By default as the run has measured it:
        the median of the last 20 of the job's architecture, of the others before its first one, and
        1 s before any. With 0 every promotion is made, whatever a switch costs, as in the paper.

    Raises
    ------
    SearchError
        If the search, the profiles or `switch_s` are wrong; or, when a trial is drawn, if its
        configuration names no architecture or one without a profile.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Reported
    >>> from dagsel.flows import RandomSearch
    >>> from dagsel.planning.scaling import Scaling
    >>> resnet = Scaling({2: 1.7, 3: 2.2, 6: 2.25})
    >>> flow = Marble(RandomSearch(max_epochs=5, n_trials=3), {"resnet": resnet})
    >>> flow.start(Context(n_workers=4))
    [Ask(n=3, sampling='random')]
    >>> flow.handle(Asked((0, 1, 2), configs=3 * ({"architecture": "resnet"},)))
    [Train(trial=0, epochs=5, gang=3), Train(trial=1, epochs=5)]
    >>> for epoch in range(1, 6):
    ...     decisions = flow.handle(Reported(0, epoch, 0.5, {}, seconds=60.0 * epoch))
    >>> decisions[1:]
    [Train(trial=1, epochs=0, gang=3), Train(trial=2, epochs=5)]
    """

    switch_s: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.switch_s is not None:
            number("switch_s", self.switch_s, "0 or more seconds", lambda s: 0 <= s < math.inf)

    def divide(self, jobs: Sequence[Job], n_workers: int) -> dict[int, int]:
        """Return how `marble` divides the workers."""
        return marble(jobs, n_workers, self.switch_s)
