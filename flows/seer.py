"""SEER: a deadline and a budget decide how many trials begin, and how many workers each gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, get_args

from dagsel.flows.drawing import check_choice
from dagsel.flows.stages import StagedSearch, StagedState, check_staged
from dagsel.planning.brackets import Brackets, Mode, StagePlan, seer_plan, solve_brackets
from dagsel.planning.budget import to_seconds


@dataclass
class SEER(StagedSearch):
    """Search for so long, and for so much, on a cluster that grows and shrinks.

    The search has stages by the clock, each η times as long as the one before, and brackets whose
    trials have 1, ν, ν², … workers. At the end of a stage every trial stops at its next batch and
    is evaluated; the best 1/η of each bracket go on, and the best of all go to the brackets with
    the most workers. `plan` says what will be done, before anything is.

    Dunlap et al., Elastic Hyperparameter Tuning on the Cloud, SoCC 2021, Algorithms 1 to 3.

    Parameters
    ----------
    deadline
        T: seconds that the search may last, or such as ``"10 min"``.
    budget
        B: worker-seconds that it may cost, or such as ``"30 worker-minutes"``.
    reduction_factor
        η.
    parallelism_factor
        ν.
    min_workers, max_workers
        p_min and p_max: workers of a trial; None for no limit. A trial has fewer than `min_workers`
        only while fewer are there.
    min_stage
        t_min: the first stage lasts as long, or longer; None for a 64th of the deadline.
    mode
        ``"paper"`` is the paper's arithmetic. ``"fill"`` also spends what its rounding leaves over:
        on more trials of the first bracket, and on a longer last stage.
    max_epochs
        Where a trial is complete, however much time is left; None for no limit.
    price_per_worker_hour
        What an hour of a worker costs, if the budget is money, such as ``"12.50 USD"``.

    Raises
    ------
    SearchError
        If a value is none, or nothing can be trained within the deadline and the budget.

    Examples
    --------
    >>> from dagsel.flow import Context
    >>> flow = SEER(deadline=10, budget=80, reduction_factor=2, min_stage=1, mode="paper")
    >>> [stage.n_workers for stage in flow.plan.stages]
    [16, 8, 4]
    >>> flow.start(Context(n_workers=1))  # doctest: +ELLIPSIS
    [Scale(n_workers=16), Wake(seconds=1.428...), Ask(n=12, sampling='study')]
    """

    deadline: float | str
    budget: float | str
    reduction_factor: int = field(default=4, kw_only=True)
    parallelism_factor: int = field(default=2, kw_only=True)
    min_workers: int = field(default=1, kw_only=True)
    max_workers: int | None = field(default=None, kw_only=True)
    min_stage: float | str | None = field(default=None, kw_only=True)
    mode: Mode = field(default="fill", kw_only=True)
    max_epochs: int | None = field(default=None, kw_only=True)
    price_per_worker_hour: float | None = field(default=None, kw_only=True)
    state: StagedState = field(default_factory=StagedState, init=False, repr=False, compare=False)

    across: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        check_staged(
            reduction_factor=self.reduction_factor,
            parallelism_factor=self.parallelism_factor,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            max_epochs=self.max_epochs,
        )
        _ = self.plan  # refuses what cannot be planned

    @cached_property
    def brackets(self) -> Brackets:
        """The paper's quantities."""
        return solve_brackets(
            self.deadline_s,
            self.budget_worker_s,
            reduction_factor=self.reduction_factor,
            parallelism_factor=self.parallelism_factor,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            min_stage_s=min_stage_of(self.min_stage, self.deadline_s),
        )

    @cached_property
    def plan(self) -> StagePlan:
        """What is done if nothing fails and every worker comes at once."""
        return seer_plan(self.brackets, self.deadline_s, self.budget_worker_s, self.mode)


def min_stage_of(min_stage: float | str | None, deadline_s: float) -> float:
    """Read t_min in seconds; None is a 64th of the deadline.

    That makes three stages where one of four trials goes on.

    Examples
    --------
    >>> min_stage_of("1 min", 640.0), min_stage_of(None, 640.0)
    (60.0, 10.0)
    """
    return deadline_s / 64 if min_stage is None else to_seconds("min_stage", min_stage)
