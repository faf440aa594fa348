"""Hyperband on a cluster that shrinks as the brackets halve."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagsel.flows.budgeted import check_staged
from dagsel.flows.seer import min_stage_of
from dagsel.flows.stages import StagedSearch
from dagsel.planning.brackets import StagePlan, hyperband_plan
from dagsel.planning.capacity import Limits


@dataclass
class ElasticHyperband(StagedSearch):
    """Run Hyperband's brackets side by side in training time, a worker for each trial.

    `SEER` is compared with it in Dunlap et al., Elastic Hyperparameter Tuning on the Cloud, SoCC
    2021, Section 6.3 (E-Hyperband); the brackets are those of `Hyperband`. There all brackets run
    at once, and R, the most that one trial gets, is as large as deadline and budget allow. The
    paper does not say what a unit of R is, nor how many workers a trial has (for two tasks it names
    a p_max of 8, Section 6.4), and with the sizes of Hyperband's brackets some of the budget may be
    left over. Here R is training time, the deadline
    itself; each trial has one worker; and the sizes grow in proportion until the budget is used.

    Parameters
    ----------
    deadline, budget, max_epochs, price_per_worker_hour
        In seconds, worker-seconds, epochs and money; see `SEER`.
    reduction_factor
        η: one of η trials goes on.
    min_stage
        The shortest time after which a trial may be stopped; None for a 64th of the deadline. A
        small budget makes it longer.

    Raises
    ------
    SearchError
        If a value is wrong, or the budget is less than a worker until the deadline.

    Examples
    --------
    >>> flow = ElasticHyperband(deadline="16 min", budget="160 worker-minutes", min_stage="1 min")
    >>> [(float(stage.seconds), stage.n_workers) for stage in flow.plan.stages]
    [(60.0, 31), (180.0, 15), (720.0, 5)]
    """

    reduction_factor: int = field(default=4, kw_only=True)
    min_stage: float | str | None = field(default=None, kw_only=True)

    def make_plan(self, limits: Limits) -> StagePlan:
        """Return the stages of all brackets."""
        check_staged(reduction_factor=self.reduction_factor)
        return hyperband_plan(
            limits.seconds,
            limits.worker_seconds,
            reduction_factor=self.reduction_factor,
            min_stage_s=min_stage_of(self.min_stage, limits),
            most_workers=limits.most_workers,
            node_size=limits.node_size,
        )
