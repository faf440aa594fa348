"""Successive halving: train many trials a little, keep the best, train these for longer.

Hyperband runs several such brackets side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args

from dagsel.checks import choice
from dagsel.flow import (
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Flow,
    Reported,
    Stop,
    Train,
    Traits,
    TrialFailed,
    WorkersChanged,
)
from dagsel.flows.drawing import Drawing, check_counts, n_places, stop_all
from dagsel.flows.rungs import (
    Bracket,
    Rounding,
    Rung,
    check_rungs,
    prune_at,
    rung_epochs,
    rung_sizes,
)


@dataclass(slots=True)
class BracketState:
    """A bracket, and what has happened on its present rung."""

    n_trials: int
    epochs: list[int]  # of each rung
    n_entered: int = 0
    rung: int = 0
    n_members: int = 0
    waiting: list[int] = field(default_factory=list)
    results: list[tuple[float, int]] = field(default_factory=list)  # loss and trial: paused


@dataclass(slots=True)
class SynchronousBrackets:
    """The state of a search with brackets side by side; the first brackets get places first.

    A rung is halved when all its trials have reached it or failed. New trials are drawn only when
    no trial waits for a place.
    """

    reduction_factor: int = 3
    rounding: Rounding = "floor"
    n_concurrent: int | None = None
    drawing: Drawing = field(default_factory=Drawing)
    n_places: int = 0
    brackets: list[BracketState] = field(default_factory=list)
    bracket_of: dict[int, int] = field(default_factory=dict)  # of each live trial
    training: dict[int, int] = field(default_factory=dict)  # trial: epochs at its next rung

    def start(self, context: Context, brackets: tuple[Bracket, ...]) -> list[Decision]:
        """Ask for the first trials."""
        self.drawing.context = context
        self.n_places = n_places(self.n_concurrent, context.n_workers)
        for rungs in brackets:
            epochs = [rung.epochs for rung in rungs]
            self.brackets.append(BracketState(rungs[0].n_trials, epochs))
        return self._fill()

    def handle(self, event: Event) -> list[Decision]:
        """Judge rungs that are full, and fill the places that are free."""
        if self.drawing.finished:
            return []
        ended: list[Decision] = []
        match event:
            case Asked(trials):
                self.drawing.receive(event)
                for trial in trials:
                    self._enter(trial)
            case Reported(trial, epoch, value) if epoch >= self.training.get(trial, math.inf):
                ended = self._reach(trial, self.drawing.context.loss(value))
            case TrialFailed(trial) if trial in self.bracket_of:
                self._forget(trial)
            case WorkersChanged(n_workers):
                self.n_places = n_places(self.n_concurrent, n_workers)
            case DeadlineReached():
                self.drawing.finished = True
                return stop_all(self.bracket_of)
            case _:
                return []
        return ended + self._fill()

    def _enter(self, trial: int) -> None:
        """Put a new trial in the first bracket that is not full; it waits for a place."""
        brackets = enumerate(self.brackets)
        index = next(i for i, bracket in brackets if bracket.n_entered < bracket.n_trials)
        bracket = self.brackets[index]
        bracket.n_entered += 1
        bracket.n_members += 1
        bracket.waiting.append(trial)
        self.bracket_of[trial] = index

    def _reach(self, trial: int, loss: float) -> list[Decision]:
        """Pause a trial that has reached its rung; at the last rung it is complete."""
        epochs = self.training.pop(trial)
        bracket = self.brackets[self.bracket_of[trial]]
        if bracket.rung < len(bracket.epochs) - 1:
            bracket.results.append((loss, trial))
            return []
        del self.bracket_of[trial]
        return [Stop(trial, f"trained to the last rung, {epochs} epochs", "complete")]

    def _fill(self) -> list[Decision]:
        """Halve the rungs that are full, give the free places to trials, or end the search."""
        decisions: list[Decision] = []
        trains = {self.bracket_of[trial] for trial in self.training}
        for index, bracket in enumerate(self.brackets):
            all_entered = self.drawing.exhausted or bracket.n_entered == bracket.n_trials
            if all_entered and bracket.results and not bracket.waiting and index not in trains:
                decisions += self._halve(bracket)
            done, until = (0, *bracket.epochs)[bracket.rung : bracket.rung + 2]
            while bracket.waiting and self._room > 0:
                trial = bracket.waiting.pop(0)
                self.training[trial] = until
                decisions.append(Train(trial, until - done))
        n_trials = sum(bracket.n_trials for bracket in self.brackets)
        decisions += self.drawing.ask(self._room, n_trials=n_trials)
        if not self.bracket_of and not self.drawing.n_awaited:
            self.drawing.finished = True
            decisions.append(Finish())
        return decisions

    def _halve(self, bracket: BracketState) -> list[Decision]:
        """Keep the best of a rung and stop the others; failed trials count as the worst."""
        rule = (self.reduction_factor, self.rounding)
        n_kept = rung_sizes(bracket.n_entered, len(bracket.epochs), *rule)[bracket.rung + 1]
        ranked = sorted(bracket.results)
        best = f"{n_kept} of {bracket.n_members}"
        stops: list[Decision] = []
        for loss, trial in ranked[n_kept:]:
            stops.append(prune_at(bracket.rung, trial, loss, best, self.drawing.context))
            del self.bracket_of[trial]
        bracket.waiting = [trial for _, trial in ranked[:n_kept]]
        bracket.n_members = len(bracket.waiting)
        bracket.results = []
        bracket.rung += 1
        return stops

    @property
    def _room(self) -> int:
        return self.n_places - len(self.training) - self.drawing.n_awaited

    def _forget(self, trial: int) -> None:
        self.training.pop(trial, None)
        bracket = self.brackets[self.bracket_of.pop(trial)]
        bracket.waiting = [other for other in bracket.waiting if other != trial]
        bracket.results = [result for result in bracket.results if result[1] != trial]


@dataclass
class SuccessiveHalving(Flow):
    """Train all trials up to a rung, keep the best of them, and so on up to the last rung.

    A rung is a number of epochs at which trials are compared. The rungs are at ``min_epochs ·
    reduction_factor**k`` epochs and at `max_epochs`. A trial that reaches a rung pauses until all
    others are there; one that fails counts as the worst. At least one trial goes on. Ties go to the
    trial with the lower number.

    Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization,
    AISTATS 2016.

    Parameters
    ----------
    max_epochs
        Epochs of a trial that reaches the last rung.
    n_trials
        How many trials to draw.
    min_epochs
        Epochs up to the first rung.
    reduction_factor
        η: one trial in η goes on.
    rounding
        ``"floor"`` keeps ⌊n/η⌋ trials, as the paper does; ``"ceil"`` keeps ⌈n/η⌉, as Ray and Syne
        Tune do.
    n_concurrent
        How many of them train at once; None for four a worker.

    Raises
    ------
    SearchError
        If one of them is no whole number, or too small, or `min_epochs` is above `max_epochs`.

    Examples
    --------
    A search in virtual time:

    >>> import dagsel
    >>> from dagsel.simulation import PowerLaw, SimulatedCluster
    >>> run = dagsel.simulate(
    ...     SuccessiveHalving(max_epochs=9, n_trials=9),
    ...     PowerLaw(),
    ...     SimulatedCluster(n_workers=4),
    ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
    ... )
    >>> sorted(len(trial.epochs) for trial in run.record.trials.values())
    [1, 1, 1, 1, 1, 1, 3, 3, 9]

    Step by step:

    >>> from dagsel.flow import Asked, Context, Reported
    >>> flow = SuccessiveHalving(max_epochs=3, n_trials=3)
    >>> flow.start(Context(n_workers=1))
    [Ask(n=3, sampling='study')]
    >>> decisions = flow.handle(Asked(trials=(0, 1, 2)))
    >>> for trial, loss in enumerate([0.3, 0.1, 0.2]):
    ...     decisions = flow.handle(Reported(trial, 1, loss, {"loss": loss}, seconds=1.0))
    >>> for decision in decisions:
    ...     print(decision)
    Stop(trial=2, reason='rung 1: 0.2 is not among the best 1 of 3', outcome='pruned')
    Stop(trial=0, reason='rung 1: 0.3 is not among the best 1 of 3', outcome='pruned')
    Train(trial=1, epochs=2)
    """

    max_epochs: int
    n_trials: int
    min_epochs: int = 1
    reduction_factor: int = 3
    rounding: Rounding = "floor"
    n_concurrent: int | None = None
    state: SynchronousBrackets = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rungs(self.min_epochs, self.max_epochs, self.reduction_factor)
        choice("rounding", self.rounding, get_args(Rounding))
        check_counts(n_trials=self.n_trials, n_concurrent=self.n_concurrent)
        self.state = SynchronousBrackets(self.reduction_factor, self.rounding, self.n_concurrent)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(self.max_epochs, n_trials=self.n_trials)

    @property
    def brackets(self) -> tuple[Bracket, ...]:
        """The one bracket."""
        epochs = rung_epochs(self.min_epochs, self.max_epochs, self.reduction_factor)
        sizes = rung_sizes(self.n_trials, len(epochs), self.reduction_factor, self.rounding)
        return (tuple(Rung(n, until) for n, until in zip(sizes, epochs, strict=True)),)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        return self.state.start(context, self.brackets)

    def handle(self, event: Event) -> list[Decision]:
        """Judge the rung when it is full, and fill the places that are free."""
        return self.state.handle(event)
