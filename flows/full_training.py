"""What searches share that train a trial to its end or give it up, and then draw another one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dagsel.flow import (
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Extended,
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
    max_epochs: int | None = None  # of each trial; None if each has its own number
    drawing: Drawing = field(default_factory=Drawing)
    n_places: int = 0
    epochs: dict[int, int] = field(default_factory=dict)  # of each live trial, in all
    # Trials that had ended and are to train on, each with the epochs that it has.
    waiting: list[tuple[int, int]] = field(default_factory=list)

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
            case Extended():
                return self.extend(event)
            case _:
                return []

    def end(self, stop: Stop) -> list[Decision]:
        """Stop a trial and draw another one."""
        self.epochs.pop(stop.trial, None)
        return [stop, *self._refill()]

    def extend(self, more: Extended) -> list[Decision]:
        """Draw more trials, and train the best of those that there are to the new end."""
        self.n_trials = self.drawing.go_on(more.n_trials)
        self.epochs.clear()
        self.waiting = []
        if more.max_epochs is not None:
            self.max_epochs = most = more.max_epochs
            best = more.ended[: more.n_best]
            self.waiting = [(it.trial, it.epochs) for it in best if it.epochs < most]
        return self._refill()

    def _resize(self, n_workers: int) -> list[Decision]:
        self.n_places = n_places(self.n_concurrent, n_workers, self.trials_per_worker)
        return self._refill()

    def _refill(self) -> list[Decision]:
        drawing = self.drawing
        if drawing.finished:
            return []
        room = self.n_places - len(self.epochs) - drawing.n_awaited
        trains: list[Decision] = [self._train_on() for _ in self.waiting[: max(0, room)]]
        left = room - len(trains)
        decided = [*trains, *drawing.ask(left, n_trials=self.n_trials, sampling=self.sampling)]
        drawing.finished = not self.epochs and not drawing.n_awaited
        return [*decided, Finish()] if drawing.finished else decided

    def _train_on(self) -> Train:
        trial, done = self.waiting.pop(0)
        assert self.max_epochs is not None
        self.epochs[trial] = self.max_epochs
        return Train(trial, self.max_epochs - done)


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
        self.state = self.begins()

    def begins(self) -> Trainings:
        """Return the state that a run begins with."""
        limits = (self.n_trials, self.n_concurrent, self.sampling, self.trials_per_worker)
        return Trainings(*limits, self.max_epochs)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        extends = ("n_trials", "max_epochs", "n_best")
        most, several = self.state.max_epochs, self.takes_several
        traits = Traits(most, self.sampling, takes_several=several, extends=extends)
        return replace(traits, n_trials=self.state.n_trials)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        return self.state.start(context)

    def handle(self, event: Event) -> list[Decision]:
        """Train what was asked for; draw another trial for each that ended."""
        if isinstance(event, Asked):
            most = self.state.max_epochs
            assert most is not None
            return self.state.train(event, dict.fromkeys(event.trials, most))
        return self.state.handle(event)
