"""One random configuration on all workers: what a search must be better than."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagsel.flow import Sampling
from dagsel.flows.stages import StagedSearch
from dagsel.planning.brackets import Stage, StagePlan, exactly, n_workers_of
from dagsel.planning.capacity import Limits


@dataclass
class RandomTrial(StagedSearch):
    """Train one random configuration until the deadline, on all workers that the budget pays for.

    `SEER` is compared with it in Dunlap et al., Elastic Hyperparameter Tuning on the Cloud, SoCC
    2021, Section 6.3 (Random).

    Parameters
    ----------
    deadline, budget, max_epochs, price_per_worker_hour
        In seconds, worker-seconds, epochs and money; see `SEER`.

    Raises
    ------
    SearchError
        If a value is wrong, or the budget is less than a worker until the deadline.

    Examples
    --------
    >>> flow = RandomTrial(deadline="10 min", budget="80 worker-minutes")
    >>> flow.plan.workers, flow.plan.stages[0].n_trials
    ((8,), (1,))
    """

    sampling: Sampling = field(default="random", init=False, repr=False)

    def make_plan(self, limits: Limits) -> StagePlan:
        """Return one stage."""
        n_workers = n_workers_of(limits.seconds, limits.worker_seconds)
        if limits.most_workers is not None:
            n_workers = min(n_workers, limits.most_workers)
        return StagePlan((n_workers,), (Stage(exactly(limits.seconds), (1,), n_workers),))
