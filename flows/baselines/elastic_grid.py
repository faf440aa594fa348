"""Grid search on as many workers as the budget pays for until the deadline."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagsel.flow import Sampling
from dagsel.flows.stages import StagedSearch, check_staged
from dagsel.planning.brackets import Stage, StagePlan, exactly, n_workers_of
from dagsel.planning.capacity import Limits


@dataclass
class ElasticGrid(StagedSearch):
    """Train all trials from the beginning to the deadline, or to their last epoch.

    `SEER` is compared with it in Dunlap et al., Elastic Hyperparameter Tuning on the Cloud, SoCC
    2021. The paper leaves open how large the grid is and which trial has which workers. Here a grid
    has a trial for each worker if it has no size of its own; the workers are shared equally; and
    those of a trial that ends are released.

    Parameters
    ----------
    deadline, budget, max_epochs, price_per_worker_hour
        In seconds, worker-seconds, epochs and money; see `SEER`.
    n_trials
        How many trials; None for one a worker.
    sampling
        Who draws them: ``"grid"`` takes the points of a finite space in their order.

    Raises
    ------
    SearchError
        If a value is wrong, or the budget is less than a worker until the deadline.

    Examples
    --------
    >>> flow = ElasticGrid(deadline="10 min", budget="80 worker-minutes", n_trials=4)
    >>> flow.plan.workers, flow.plan.stages[0].n_workers
    ((2,), 8)
    """

    n_trials: int | None = field(default=None, kw_only=True)
    sampling: Sampling = field(default="grid", kw_only=True)

    def make_plan(self, limits: Limits) -> StagePlan:
        """Return one stage."""
        check_staged(n_trials=self.n_trials)
        n_workers = n_workers_of(limits.seconds, limits.worker_seconds)
        if limits.most_workers is not None:
            n_workers = min(n_workers, limits.most_workers)
        n_trials = self.n_trials or n_workers
        gang = max(1, n_workers // n_trials)
        stage = Stage(exactly(limits.seconds), (n_trials,), min(n_workers, gang * n_trials))
        return StagePlan((gang,), (stage,))
