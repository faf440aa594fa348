"""What searches share that draw a trial, train it to the end or give it up, and draw another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dagsel.flow import (
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Flow,
    Paused,
    Reported,
    Sampling,
    Stop,
    Tick,
    Train,
    Traits,
    TrialFailed,
    WorkersChanged,
)
from dagsel.flows.drawing import TRIALS_PER_WORKER, Drawing, check_counts, stop_all


@dataclass(slots=True)
class FullTrainingState(Drawing):
    """The state of a search that trains what it draws to the end."""

    n_concurrent: int = 0
    live: set[int] = field(default_factory=set)


@dataclass
class FullTraining(Flow):
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
    state: FullTrainingState = field(
        default_factory=FullTrainingState, init=False, repr=False, compare=False
    )

    sampling: Sampling = field(default="study", init=False, repr=False)
    trials_per_worker: ClassVar[int] = TRIALS_PER_WORKER

    def __post_init__(self) -> None:
        counts = {"max_epochs": self.max_epochs, "n_trials": self.n_trials}
        if self.sampling == "grid" and self.n_trials is None:
            del counts["n_trials"]  # no other space has an end of its own
        check_counts(**counts, n_concurrent=self.n_concurrent)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(self.max_epochs, self.sampling)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        self.state.context = context
        self._staff(context.n_workers)
        return self._refill()

    def handle(self, event: Event) -> list[Decision]:
        """Train what was asked for; draw another trial for each that ended."""
        state = self.state
        match event:
            case Asked(trials):
                state.receive(event)
                state.live.update(trials)
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
        if asks := state.ask(room, n_trials=self.n_trials, sampling=self.sampling):
            return asks
        state.finished = not state.live and not state.n_awaited
        return [Finish()] if state.finished else []
