"""What searches share that train a trial to its end or give it up, and then draw another one."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    Reported,
    Sampling,
    Stop,
    Train,
    Traits,
    TrialFailed,
    WorkersChanged,
)
from dagsel.flows.drawing import TRIALS_PER_WORKER, Drawing, check_counts, n_places, stop_all


@dataclass(slots=True)
class Trainings:
    """The trials that train, and the places for others."""

    n_trials: int | None = None  # to draw in all; None: until the space is exhausted
    n_concurrent: int | None = None
    sampling: Sampling = "study"
    trials_per_worker: int = TRIALS_PER_WORKER
    drawing: Drawing = field(default_factory=Drawing)
    n_places: int = 0
    epochs: dict[int, int] = field(default_factory=dict)  # of each live trial, in all

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        self.drawing.context = context
        return self._resize(context.n_workers)

    def train(self, asked: Asked, epochs: Mapping[int, int]) -> list[Decision]:
        """Train each new trial for its own number of epochs."""
        self.drawing.receive(asked)
        self.epochs.update(epochs)
        train: list[Decision] = [Train(trial, n) for trial, n in epochs.items()]
        return train or self._refill()

    def handle(self, event: Event) -> list[Decision]:
        """Answer all events but `Asked`: draw another trial for each that ended."""
        match event:
            case Reported(trial, epoch) if epoch >= self.epochs.get(trial, math.inf):
                return self.end(Stop(trial, "trained to the end", "complete"))
            case TrialFailed(trial):
                self.epochs.pop(trial, None)
                return self._refill()
            case WorkersChanged(n_workers):
                return self._resize(n_workers)
            case DeadlineReached():
                self.drawing.finished = True
                return stop_all(self.epochs)
            case _:
                return []

    def end(self, stop: Stop) -> list[Decision]:
        """Stop a trial and draw another one."""
        self.epochs.pop(stop.trial, None)
        return [stop, *self._refill()]

    def _resize(self, n_workers: int) -> list[Decision]:
        self.n_places = n_places(self.n_concurrent, n_workers, self.trials_per_worker)
        return self._refill()

    def _refill(self) -> list[Decision]:
        drawing = self.drawing
        if drawing.finished:
            return []
        room = self.n_places - len(self.epochs) - drawing.n_awaited
        if asks := drawing.ask(room, n_trials=self.n_trials, sampling=self.sampling):
            return asks
        drawing.finished = not self.epochs and not drawing.n_awaited
        return [Finish()] if drawing.finished else []


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
    state: Trainings = field(init=False, repr=False, compare=False)

    sampling: ClassVar[Sampling] = "study"
    trials_per_worker: ClassVar[int] = TRIALS_PER_WORKER
    takes_several: ClassVar[bool] = True

    def __post_init__(self) -> None:
        counts = {"max_epochs": self.max_epochs, "n_trials": self.n_trials}
        if self.sampling == "grid" and self.n_trials is None:
            del counts["n_trials"]  # no other space has an end of its own
        check_counts(**counts, n_concurrent=self.n_concurrent)
        limits = (self.n_trials, self.n_concurrent)
        self.state = Trainings(*limits, self.sampling, self.trials_per_worker)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(self.max_epochs, self.sampling, takes_several=self.takes_several)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        return self.state.start(context)

    def handle(self, event: Event) -> list[Decision]:
        """Train what was asked for; draw another trial for each that ended."""
        if isinstance(event, Asked):
            return self.state.train(event, dict.fromkeys(event.trials, self.max_epochs))
        return self.state.handle(event)
