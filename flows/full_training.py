"""What grid and random search share: every trial trains to the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    Decision,
    Event,
    Finish,
    Reported,
    Sampling,
    Stop,
    Train,
    TrialFailed,
)

#: Trials in flight for each worker: with fewer, workers wait for trials at the end of a round.
TRIALS_PER_WORKER = 4


@dataclass(slots=True)
class Progress:
    """The state of a search that trains every trial to the end."""

    n_asked: int = 0
    n_awaited: int = 0
    exhausted: bool = False
    live: set[int] = field(default_factory=set)
    n_concurrent: int = 0


@dataclass(frozen=True)
class FullTraining:
    """Draw trials and train each for the same number of epochs.

    Parameters
    ----------
    max_epochs
        Epochs of each trial.
    n_trials
        How many trials to draw; None draws until the space is exhausted.
    n_concurrent
        How many of them train at once; None for four a worker.
    """

    max_epochs: int
    n_trials: int | None = None
    n_concurrent: int | None = None
    state: Progress = field(default_factory=Progress, init=False, repr=False, compare=False)

    sampling: Sampling = field(default="study", init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("max_epochs", "n_trials", "n_concurrent"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise SearchError(f"{name} must be a whole number of 1 or more, got {value!r}")

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        self.state.n_concurrent = self.n_concurrent or TRIALS_PER_WORKER * context.n_workers
        return self._refill()

    def handle(self, event: Event) -> list[Decision]:
        """Train what was asked for; draw another trial for each that ended."""
        match event:
            case Asked(trials, exhausted):
                self.state.live.update(trials)
                self.state.exhausted |= exhausted
                self.state.n_awaited = 0 if exhausted else self.state.n_awaited - len(trials)
                train: list[Decision] = [Train(trial, self.max_epochs) for trial in trials]
                return train or self._refill()
            case Reported(trial, epoch) if epoch >= self.max_epochs:
                self.state.live.discard(trial)
                return [Stop(trial, "trained to the end", "complete"), *self._refill()]
            case TrialFailed(trial):
                self.state.live.discard(trial)
                return self._refill()
            case _:
                return []

    def _refill(self) -> list[Decision]:
        state = self.state
        room = state.n_concurrent - len(state.live) - state.n_awaited
        if self.n_trials is not None:
            room = min(room, self.n_trials - state.n_asked)
        if room > 0 and not state.exhausted:
            state.n_asked += room
            state.n_awaited += room
            return [Ask(room, self.sampling)]
        return [] if state.live or state.n_awaited else [Finish()]
