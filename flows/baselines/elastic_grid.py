"""Grid search on as many workers as the budget pays for until the deadline."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from dagsel.flow import Sampling
from dagsel.flows.stages import StagedSearch, StagedState, check_staged
from dagsel.planning.brackets import Stage, StagePlan, exactly, n_workers_of


@dataclass
class ElasticGrid(StagedSearch):
    """Train all trials from the beginning to the deadline, or to their last epoch.

    The comparison partner of `SEER` in Dunlap et al., Elastic Hyperparameter Tuning on the Cloud,
    SoCC 2021. The paper leaves open how large the grid is and who trains on what. Here, so is
    assumed: unless the grid has a size, it has a trial for each worker; the workers are shared
    equally; and those of a trial that ends are released.

    Parameters
    ----------
    deadline, budget, max_epochs, price_per_worker_hour
        In seconds, worker-seconds, epochs and money; see `SEER`.
    n_trials
        How many; None for one a worker.
    sampling
        Who draws them: ``"grid"`` takes the points of a finite space in their order.

    Raises
    ------
    SearchError
        If a value is none, or the budget is less than a worker until the deadline.

    Examples
    --------
    >>> flow = ElasticGrid(deadline="10 min", budget="80 worker-minutes", n_trials=4)
    >>> flow.plan.workers, flow.plan.stages[0].n_workers
    ((2,), 8)
    """

    deadline: float | str
    budget: float | str
    n_trials: int | None = field(default=None, kw_only=True)
    sampling: Sampling = field(default="grid", kw_only=True)
    max_epochs: int | None = field(default=None, kw_only=True)
    price_per_worker_hour: float | None = field(default=None, kw_only=True)
    state: StagedState = field(default_factory=StagedState, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_staged(n_trials=self.n_trials, max_epochs=self.max_epochs)
        _ = self.plan  # refuses what cannot be planned

    @cached_property
    def plan(self) -> StagePlan:
        """One stage."""
        n_workers = n_workers_of(self.deadline_s, self.budget_worker_s)
        n_trials = self.n_trials or n_workers
        gang = max(1, n_workers // n_trials)
        stage = Stage(exactly(self.deadline_s), (n_trials,), min(n_workers, gang * n_trials))
        return StagePlan((gang,), (stage,))
