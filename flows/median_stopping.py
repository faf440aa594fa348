"""The median stopping rule."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import ClassVar

from dagsel.flow import Decision, Event, Reported, Stop
from dagsel.flows.drawing import check_counts
from dagsel.flows.full_training import FullTraining, Trainings


@dataclass(slots=True)
class LearningCurves(Trainings):
    """The state of a search that compares learning curves."""

    curves: dict[int, list[float]] = field(default_factory=dict)  # losses by trial, one an epoch
    # By epoch: the mean until then of each trial that has come so far, sorted.
    means: dict[int, list[float]] = field(default_factory=dict)


@dataclass
class MedianStopping(FullTraining):
    """Stop a trial whose best value so far is worse than the median of the others' averages.

    At epoch e a trial is compared with all other trials that have trained e epochs, whether they
    still train or not. Its best value is compared with the median of the means of their first e
    values.

    Golovin et al., Google Vizier: A Service for Black-Box Optimization, KDD 2017, Section 3.2.2.

    Parameters
    ----------
    max_epochs
        Epochs of each trial that is not stopped.
    n_trials
        How many trials to draw.
    grace_epochs
        A trial is not stopped before the end of this epoch.
    min_trials
        Nor before this many other trials have trained as long.
    n_concurrent
        How many of them train at once; None for four a worker.

    Raises
    ------
    SearchError
        If one of them is below 1.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Reported
    >>> flow = MedianStopping(max_epochs=9, n_trials=4, n_concurrent=4)
    >>> decisions = flow.start(Context(n_workers=1)) + flow.handle(Asked((0, 1, 2, 3)))
    >>> [flow.handle(Reported(trial, 1, 0.5, {}, 1.0)) for trial in (0, 1, 2)]
    [[], [], []]
    >>> flow.handle(Reported(3, 1, 0.6, {}, 1.0))
    [Stop(trial=3, reason='worse than the median of 3 others at epoch 1', outcome='pruned')]
    """

    n_trials: int = field()
    grace_epochs: int = 1
    min_trials: int = 3
    n_concurrent: int | None = field(default=None, kw_only=True)
    state: LearningCurves = field(init=False, repr=False, compare=False)

    takes_several: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(grace_epochs=self.grace_epochs, min_trials=self.min_trials)

    def begins(self) -> LearningCurves:
        """Return the state that a run begins with."""
        return LearningCurves(self.n_trials, self.n_concurrent, max_epochs=self.max_epochs)

    def handle(self, event: Event) -> list[Decision]:
        """Stop a trial that falls behind; draw another one for each that ended."""
        stop = self._compare(event) if isinstance(event, Reported) else None
        return super().handle(event) if stop is None else self.state.end(stop)

    def _compare(self, report: Reported) -> Stop | None:
        epoch = report.epoch
        own = self.state.curves.setdefault(report.trial, [])
        own.append(self.state.drawing.context.loss(report.value))
        others = self.state.means.setdefault(epoch, [])
        n, middle = len(others), median(others) if others else math.inf
        insort(others, fmean(own[:epoch]))
        may_stop = self.grace_epochs <= epoch < (self.state.max_epochs or 0)
        if not may_stop or n < self.min_trials or min(own) <= middle:
            return None
        return Stop(report.trial, f"worse than the median of {n} others at epoch {epoch}")
