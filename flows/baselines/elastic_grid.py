"""Grid search with a half for exploring and a half for the best trial."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagsel.errors import SearchError
from dagsel.flow import Sampling
from dagsel.flows.budgeted import check_staged
from dagsel.flows.drawing import check_counts
from dagsel.flows.stages import StagedSearch
from dagsel.planning.brackets import Stage, StagePlan, exactly, n_workers_of
from dagsel.planning.capacity import Limits, PlannedStage
from dagsel.planning.nodes import nodes_for, nodes_within


@dataclass
class ElasticGrid(StagedSearch):
    """Explore until half of the deadline; then train the best trial on more workers.

    `SEER` is compared with it in Dunlap et al., Elastic Hyperparameter Tuning on the Cloud, SoCC
    2021, Section 6.3 (E-Grid Search). T/2 is for exploring, where each trial has p_min workers, and
    T/2 for the best trial, which has p_max. The budget says how many trials explore: as many as it
    pays for beside the second half.

    The paper does not say which points are explored, nor what is done if the budget does not pay
    for p_max workers. Here `sampling` says the first. In the second case the best trial has as many
    as the budget pays for beside one trial that explores.

    Parameters
    ----------
    deadline, budget, max_epochs, price_per_worker_hour
        In seconds, worker-seconds, epochs and money; see `SEER`.
    n_trials
        How many trials at most; None for as many as the budget pays for.
    min_workers_per_trial, max_workers_per_trial
        p_min and p_max.
    sampling
        Who draws them: ``"grid"`` takes the points of a finite space in their order, ``"random"``
        any of them.

    Raises
    ------
    SearchError
        If a value is wrong, or the budget is less than p_min workers until the deadline.

    Examples
    --------
    >>> flow = ElasticGrid(deadline="10 min", budget="80 worker-minutes")
    >>> [(float(stage.seconds), stage.n_trials, stage.n_workers) for stage in flow.plan.stages]
    [(300.0, (12, 0), 12), (300.0, (0, 1), 4)]
    """

    n_trials: int | None = field(default=None, kw_only=True)
    min_workers_per_trial: int = field(default=1, kw_only=True)
    max_workers_per_trial: int = field(default=4, kw_only=True)
    sampling: Sampling = field(default="grid", kw_only=True)

    def __post_init__(self) -> None:
        least, most = self.min_workers_per_trial, self.max_workers_per_trial
        check_staged(n_trials=self.n_trials)
        check_counts(min_workers_per_trial=least, max_workers_per_trial=most)
        if most < least:
            raise SearchError(
                f"max_workers_per_trial={most} is below min_workers_per_trial={least}; raise the "
                "first or lower the second"
            )
        super().__post_init__()
        n_workers_of(self.deadline_s * least, self.cost.worker_seconds)

    def make_plan(self, limits: Limits) -> StagePlan:
        """Return the two halves."""
        p_min, node = self.min_workers_per_trial, limits.node_size
        least, budget = nodes_for(p_min, node), exactly(limits.worker_seconds)
        half_s = min(exactly(limits.seconds), budget / least) / 2
        paid = int(budget / half_s)  # workers, of the first half and the second one together
        there = paid if limits.most_workers is None else nodes_within(limits.most_workers, node)
        if there < p_min:
            raise SearchError(
                f"min_workers_per_trial={p_min}, and the cluster can have {there} workers: lower "
                "the first, or give the cluster more"
            )
        p_max = min(self.max_workers_per_trial, there, nodes_within(paid - least, node))
        free = min(there, nodes_within(paid - nodes_for(p_max, node), node))
        n_trials = min(free // p_min, self.n_trials or free)
        explore = Stage(half_s, (n_trials, 0), nodes_for(n_trials * p_min, node))
        return StagePlan((p_min, p_max), (explore, Stage(half_s, (0, 1), nodes_for(p_max, node))))

    def n_kept(self, bracket: int, later: PlannedStage) -> int:
        """Return 1 for the trials that explore: the best of all goes on."""
        return sum(later.n_trials) if bracket == 0 else 0

    def assign(self, survivors: list[int]) -> dict[int, int]:
        """Return the bracket with p_max workers."""
        return dict.fromkeys(survivors, 1)
