"""SEER: a deadline and a budget decide how many trials begin, and how many workers each gets."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, get_args

from dagsel.checks import choice
from dagsel.flows.budgeted import check_staged
from dagsel.flows.stages import StagedSearch
from dagsel.planning.brackets import Brackets, SeerMode, StagePlan, seer_plan, solve_brackets
from dagsel.planning.budget import to_seconds
from dagsel.planning.capacity import Limits, PlannedStage
from dagsel.planning.nodes import nodes_for


@dataclass
class SEER(StagedSearch):
    """Search until a deadline, within a budget, on a cluster that grows and shrinks.

    Time is divided into stages, each η times as long as the one before. Trials are divided into
    brackets: those of the first have 1 worker each, those of the next ν, ν² and so on. At the end
    of a stage every trial stops at its next batch and is evaluated. The best 1/η of each bracket go
    on; the best of all go to the brackets with the most workers. `plan` has the stages before
    anything is started.

    Dunlap et al., Elastic Hyperparameter Tuning on the Cloud, SoCC 2021, Algorithms 1 to 3.

    Parameters
    ----------
    deadline
        T: seconds that the search may last, or such as ``"10 min"``.
    budget
        B: worker-seconds that it may cost, or such as ``"30 worker-minutes"``.
    reduction_factor
        η: one trial in η goes on after a stage.
    parallelism_factor
        ν: trials of a bracket have ν times the workers of the one before.
    min_workers_per_trial, max_workers_per_trial
        p_min and p_max; None for no limit. A trial has fewer than p_min only while the
        cluster has fewer.
        For the workers of all trials together there is ``dagsel.optimize(max_cluster_workers=)``.
    min_stage
        t_min: a trial trains as long, or longer, before it is ranked first. None for an epoch or
        so: a 64th of the time until an epoch is measured, and a 64th to a 16th of it from then on.
    mode
        ``"paper"`` is the paper's arithmetic. ``"fill"`` also spends what its rounding leaves over:
        on more trials of the first bracket, and on a longer last stage.
    max_epochs
        A trial that has trained this many is complete, and another one is drawn in its place; None
        for no limit.
    price_per_worker_hour
        What an hour of a worker costs, such as ``"2.50 USD"``. Needed if the budget is money,
        such as ``"12.50 USD"``; a bare number is in its currency.

    Raises
    ------
    SearchError
        If a value is wrong, or nothing can be trained within the deadline and the budget.

    Examples
    --------
    >>> from dagsel.flow import Context
    >>> flow = SEER(deadline=10, budget=80, reduction_factor=2, min_stage=1, mode="paper")
    >>> [stage.n_workers for stage in flow.plan.stages]
    [16, 8, 4]
    >>> flow.start(Context(n_workers=1))  # doctest: +ELLIPSIS
    [Plan(...), Scale(n_workers=16), Wake(seconds=1.428...), Ask(n=12, sampling='study')]
    """

    _: KW_ONLY
    reduction_factor: int = 4
    parallelism_factor: int = 2
    min_workers_per_trial: int = 1
    max_workers_per_trial: int | None = None
    min_stage: float | str | None = None
    mode: SeerMode = "fill"
    refills: ClassVar[bool] = True

    def __post_init__(self) -> None:
        choice("mode", self.mode, get_args(SeerMode))
        check_staged(
            reduction_factor=self.reduction_factor,
            parallelism_factor=self.parallelism_factor,
            min_workers_per_trial=self.min_workers_per_trial,
            max_workers_per_trial=self.max_workers_per_trial,
        )
        super().__post_init__()

    @property
    def brackets(self) -> Brackets:
        """The paper's quantities: Algorithms 2 and 3."""
        return self._brackets(Limits(self.deadline_s, self.cost.worker_seconds))

    @property
    def measures(self) -> bool:
        """Whether t_min is to be measured."""
        return self.min_stage is None

    def make_plan(self, limits: Limits) -> StagePlan:
        """Return the stages, which `StagedSearch` goes through as Algorithm 1 does."""
        found = self._brackets(limits)
        return seer_plan(found, limits.seconds, limits.worker_seconds, self.mode)

    def _brackets(self, limits: Limits) -> Brackets:
        min_stage_s = min_stage_of(self.min_stage, limits, self.min_workers_per_trial)
        if limits.seconds < self.deadline_s or limits.worker_seconds < self.cost.worker_seconds:
            # What it was before: the start of the cluster may have taken more than was planned.
            least = nodes_for(self.min_workers_per_trial, limits.node_size)
            min_stage_s = min(min_stage_s, limits.seconds, limits.worker_seconds / least)
        return solve_brackets(
            limits.seconds,
            limits.worker_seconds,
            reduction_factor=self.reduction_factor,
            parallelism_factor=self.parallelism_factor,
            min_workers_per_trial=self.min_workers_per_trial,
            max_workers_per_trial=self.max_workers_per_trial,
            min_stage_s=min_stage_s,
            most_workers=limits.most_workers,
            node_size=limits.node_size,
        )

    def is_ranked(self, bracket: int) -> bool:
        """Return True: all trials are ranked after each stage."""
        return True

    def ranked_in(self, bracket: int, later: PlannedStage) -> int:
        """Return the bracket itself; if none of it can go on, the one with the most workers.

        So its best trial is not lost because there were too few of it.
        """
        go_on = [it for it, n_trials in enumerate(later.n_trials) if n_trials]
        if bracket in go_on or not go_on:
            return bracket
        return max(go_on, key=self.now.workers.__getitem__)

    def assign(self, survivors: list[int]) -> dict[int, int]:
        """Return the brackets with the most workers for the best of all trials."""
        return dict(zip(survivors, self.places(), strict=False))


def min_stage_of(min_stage: float | str | None, limits: Limits, n_workers: int = 1) -> float:
    """Return t_min in seconds; None is an epoch, within bounds.

    It is at least a 64th of the time, so that there are three stages where one of four trials goes
    on, and at most a 16th, so that there are two. The time ends when the budget of a trial on so
    many workers does, if that is before the deadline.

    Examples
    --------
    >>> min_stage_of("1 min", Limits(640.0, 640.0)), min_stage_of(None, Limits(640.0, 640.0))
    (60.0, 10.0)
    >>> min_stage_of(None, Limits(640.0, 640.0, epoch_s=20.0))
    20.0
    """
    if min_stage is not None:
        return to_seconds("min_stage", min_stage)
    seconds = min(limits.seconds, limits.worker_seconds / n_workers)
    return min(max(seconds / 64, limits.epoch_s or 0.0), seconds / 16)
