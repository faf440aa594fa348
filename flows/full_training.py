"""What searches share that draw a trial, train it to the end or give it up, and draw another."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Paused,
    Reported,
    Sampling,
    Stop,
    Tick,
    Train,
    TrialFailed,
    WorkersChanged,
)

#: Trials in flight for each worker: with fewer, workers wait for trials at the end of a round.
TRIALS_PER_WORKER = 4


@dataclass(slots=True)
class Progress:
    """The state of a search that draws trials one after another."""

    context: Context = field(default_factory=lambda: Context(n_workers=1))
    n_concurrent: int = 0
    n_asked: int = 0
    n_awaited: int = 0
    exhausted: bool = False
    finished: bool = False
    live: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class FullTraining:
    """Draw trials and train each for the same number of epochs.

    Parameters
    ----------
    max_epochs
        Epochs of each trial.
    n_trials
        How many trials to draw; for a grid, None draws until the space is exhausted.
    n_concurrent
        How many of them train at once; None for four a worker.
    """

    max_epochs: int
    n_trials: int | None = None
    n_concurrent: int | None = None
    state: Progress = field(default_factory=Progress, init=False, repr=False, compare=False)

    sampling: Sampling = field(default="study", init=False, repr=False)
    trials_per_worker: ClassVar[int] = TRIALS_PER_WORKER

    def __post_init__(self) -> None:
        counts = {"max_epochs": self.max_epochs, "n_trials": self.n_trials}
        if self.sampling == "grid" and self.n_trials is None:
            del counts["n_trials"]  # no other space has an end of its own
        check_counts(**counts, n_concurrent=self.n_concurrent)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        self.state.context = context
        self._staff(context.n_workers)
        return self._refill()

    def handle(self, event: Event) -> list[Decision]:
        """Train what was asked for; draw another trial for each that ended."""
        state = self.state
        match event:
            case Asked(trials, exhausted):
                state.live.update(trials)
                state.exhausted |= exhausted
                state.n_awaited = 0 if exhausted else state.n_awaited - len(trials)
                train: list[Decision] = [Train(trial, self._n_epochs(trial)) for trial in trials]
                return train or self._refill()
            case Reported(trial):
                stop = self._judge(event)
                if stop is None:
                    return []
                state.live.discard(trial)
                return [stop, *self._refill()]
            case TrialFailed(trial):
                state.live.discard(trial)
                return self._refill()
            case WorkersChanged(n_workers):
                self._staff(n_workers)
                return self._refill()
            case DeadlineReached():
                state.finished = True
                return stop_all(state.live)
            case Paused() | Tick():
                return []

    def _n_epochs(self, trial: int) -> int:
        # Of a whole trial; for a queue of jobs each has its own.
        return self.max_epochs

    def _judge(self, report: Reported) -> Stop | None:
        # Whether the trial ends here; a search that gives trials up early has more to say.
        if report.epoch < self._n_epochs(report.trial):
            return None
        return Stop(report.trial, "trained to the end", "complete")

    def _staff(self, n_workers: int) -> None:
        self.state.n_concurrent = self.n_concurrent or self.trials_per_worker * max(n_workers, 1)

    def _refill(self) -> list[Decision]:
        state = self.state
        if state.finished:
            return []
        room = state.n_concurrent - len(state.live) - state.n_awaited
        if self.n_trials is not None:
            room = min(room, self.n_trials - state.n_asked)
        if room > 0 and not state.exhausted:
            state.n_asked += room
            state.n_awaited += room
            return [Ask(room, self.sampling)]
        state.finished = not state.live and not state.n_awaited
        return [Finish()] if state.finished else []


def check_counts(*, n_concurrent: int | None = None, **counts: Any) -> None:
    """Refuse what is not a whole number of 1 or more; an `n_concurrent` of None is a default.

    Raises
    ------
    SearchError
        If one of them is none.
    """
    if n_concurrent is not None:
        counts["n_concurrent"] = n_concurrent
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise SearchError(f"{name} must be a whole number of 1 or more, got {value!r}")
    if n_concurrent is not None and n_concurrent > counts.get("n_trials", n_concurrent):
        warnings.warn(
            f"n_concurrent is {n_concurrent}, but n_trials is {counts['n_trials']}: no more than "
            "these will train at once",
            stacklevel=4,
        )


def stop_all(trials: Iterable[int]) -> list[Decision]:
    """End a search whose time is over."""
    return [*(Stop(trial, "the time is over") for trial in sorted(trials)), Finish()]
