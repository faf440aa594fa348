"""What a search that looks ahead holds: its live trials, its stage, and what it has spent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dagsel.flows.budgeted import BudgetedState

#: So large a loss counts as one that is not finite: gains and errors are shared by all trials, and
#: one such value would be all that is in them.
DIVERGED = 1e29


@dataclass(slots=True)
class LookaheadTrial:
    """A live trial."""

    curve: list[tuple[float, float]] = field(default_factory=list)  # epochs, best loss until then
    epochs: int = 0
    trained: float = 0.0  # epochs, with a part of one
    n_given: int = 0
    gang: int = 0  # 0 while it has nothing to train
    is_paused: bool = False
    is_scored: bool = False
    since: float = 0.0  # when its present epoch began, or it was resumed
    n_looks: int = 0  # looks before it was drawn

    @property
    def loss(self) -> float:
        """The best loss so far."""
        return self.curve[-1][1] if self.curve else math.inf

    def score(self, epochs: float, loss: float) -> None:
        """Note a loss."""
        self.trained, self.is_scored = max(self.trained, epochs), True
        best = min(loss if loss < DIVERGED else math.inf, self.loss)
        if math.isfinite(best):
            self.curve = [*(point for point in self.curve if point[0] < epochs), (epochs, best)]


@dataclass(slots=True)
class LookaheadState(BudgetedState):
    """The state of a search that looks ahead."""

    n_wanted: int = 0  # that were asked for
    n_billed: int = 0  # the most that cost something since the last event that has a time
    spent: float = 0.0  # worker-seconds
    trials: dict[int, LookaheadTrial] = field(default_factory=dict)
    target: int = 1  # epochs of the present stage
    draws: bool = True  # new trials train to the target, all others wait
    looks_at: float = 0.0  # when the stage is over, at the latest
    n_looks: int = 0
    is_last: bool = False
    halts: bool = False  # all pause
    evaluates: bool = False  # and are scored
    ends_stage: bool = False  # and the stage is over
    epoch_s: float | None = None  # worker-seconds of an epoch
    stage_at: float = 0.0  # when the stage began
    n_timed: float = 0.0  # epochs of the stage whose time was taken, and what they took
    timed_s: float = 0.0
    n_stage: int = 0  # epochs that ended in the stage
    is_crowded: bool = False  # more trials train in the stage than there are workers
    floor: float = math.inf  # the best loss of trials that were stopped
