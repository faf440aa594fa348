"""What searches share that judge each trial when it reaches a rung, and wait for nobody."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

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
from dagsel.flows.drawing import Drawing, n_places, stop_all
from dagsel.flows.rungs import prune_at, rung_epochs
from dagsel.flows.wrapper import EndedWell

Result: TypeAlias = tuple[float, int]  # loss and trial: sorted, it is the rank in a rung


@dataclass(slots=True)
class RungRecord:
    """What has reached a rung: all of it, and what pauses there; both sorted, the best first."""

    results: list[Result] = field(default_factory=list)
    paused: list[Result] = field(default_factory=list)


@dataclass(slots=True)
class AshaState:
    """The state of ASHA."""

    drawing: Drawing = field(default_factory=Drawing)
    n_places: int = 0
    rungs: list[RungRecord] = field(default_factory=list)  # all but the last
    new: list[int] = field(default_factory=list)
    training: dict[int, int] = field(default_factory=dict)  # trial: epochs at its next rung
    n_complete: int = 0
    n_trials: int = 0  # to draw in all
    ladder: tuple[int, ...] = ()  # epochs of each rung
    # Of trials that had ended when the search was extended: all, until they train on; and those
    # that were on their way to a rung, with their epochs.
    ended: set[int] = field(default_factory=set)
    halted: list[tuple[int, int]] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Places that are free."""
        return self.n_places - len(self.training) - self.drawing.n_awaited

    def extend(self, n_trials: int, max_epochs: int, reduction_factor: int) -> None:
        """Draw more trials; add rungs above the last one, as far apart as the others."""
        self.n_trials = self.drawing.go_on(n_trials)
        self.training, self.new = {}, []
        *_, last = self.ladder
        if max_epochs > last:
            first = min(last * reduction_factor, max_epochs)
            above = rung_epochs(first, max_epochs, reduction_factor)
            self.ladder = (*self.ladder, *above)
            self.rungs += [RungRecord() for _ in above]
            self.n_complete = 0


class AsynchronousHalving(Flow):
    """A search on rungs: whenever a place is free, a paused trial is promoted, or a new one begins.

    A subclass is a dataclass with these fields. It says in `judge` what becomes of a trial that has
    just reached a rung.
    """

    max_epochs: int
    n_trials: int
    min_epochs: int
    reduction_factor: int
    n_concurrent: int | None
    state: Any  # an `AshaState`

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        state = self.state
        most = state.ladder[-1] if state.ladder else self.max_epochs
        return Traits(most, n_trials=state.n_trials or self.n_trials)

    @property
    def rungs(self) -> tuple[int, ...]:
        """Epochs of each rung, the lowest first, as the search begins."""
        return rung_epochs(self.min_epochs, self.max_epochs, self.reduction_factor)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        state: AshaState = self.state
        state.drawing.context = context
        state.n_places = n_places(self.n_concurrent, context.n_workers)
        state.ladder, state.n_trials = self.rungs, self.n_trials
        state.rungs = [RungRecord() for _ in self.rungs[:-1]]
        return self.fill()

    def handle(self, event: Event) -> list[Decision]:
        """Judge what has reached a rung, and fill the places that are free."""
        state: AshaState = self.state
        judged = list[Decision]()
        if state.drawing.finished:
            return []
        match event:
            case Asked(trials):
                state.drawing.receive(event)
                state.new += trials
            case Reported(trial, epoch) if epoch >= state.training.get(trial, math.inf):
                judged = self._reached(event, state.training.pop(trial))
            case TrialFailed(trial):
                self._forget(trial)
                state.n_complete += isinstance(event, EndedWell)
            case WorkersChanged(n_workers):
                state.n_places = n_places(self.n_concurrent, n_workers)
            case DeadlineReached():
                state.drawing.finished = True
                paused = {trial for record in state.rungs for _, trial in record.paused}
                return stop_all([*state.training, *state.new, *(paused - state.ended)])
            case _:
                return []
        return judged + self.fill()

    def _reached(self, report: Reported, epochs: int) -> list[Decision]:
        if epochs < self.state.ladder[-1]:
            return self.judge(report, epochs)
        self.state.n_complete += 1
        return [Stop(report.trial, f"trained to the last rung, {epochs} epochs", "complete")]

    @abstractmethod
    def judge(self, report: Reported, epochs: int) -> list[Decision]:
        """Decide about a trial that has just reached the rung of so many epochs, not the last."""

    def why_pruned(self, rung: int, result: Result) -> Stop:
        """Stop a trial that was not promoted from a rung; the lowest one has the number 0."""
        n = len(self.state.rungs[rung].results)
        best = f"{max(1, n // self.reduction_factor)} of {n}"
        return prune_at(rung, result[1], result[0], best, self.state.drawing.context)

    def fill(self) -> list[Decision]:
        """Fill the free places, or end the search."""
        state: AshaState = self.state
        decisions = list[Decision]()
        while state.room > 0 and (train := self._next()):
            decisions.append(train)
        decisions += state.drawing.ask(state.room, n_trials=state.n_trials)
        if state.training or state.drawing.n_awaited:
            return decisions
        paused = [rung for rung, record in enumerate(state.rungs) if record.paused]
        if paused and not state.n_complete:
            return [*decisions, self._promote(paused[-1])]
        state.drawing.finished = True
        return [*decisions, *self._prune_paused(), Finish()]

    def _next(self) -> Train | None:
        """Promote from the highest rung that has a trial to promote; else start a new one."""
        state: AshaState = self.state
        if state.halted:
            trial, done = state.halted.pop(0)
            return self.train(trial, bisect_right(state.ladder, done), done)
        for rung, record in reversed([*enumerate(state.rungs)]):
            n_top = len(record.results) // self.reduction_factor
            if record.paused and bisect_left(record.results, record.paused[0]) < n_top:
                return self._promote(rung)
        return self.train(state.new.pop(0), 0) if state.new else None

    def _promote(self, rung: int) -> Train:
        _, trial = self.state.rungs[rung].paused.pop(0)
        return self.train(trial, rung + 1)

    def train(self, trial: int, rung: int, done: int | None = None) -> Train:
        """Train a trial up to a rung, from the rung below or from the epochs that it has."""
        below, until = (0, *self.state.ladder)[rung : rung + 2]
        self.state.training[trial] = until
        self.state.ended.discard(trial)
        return Train(trial, until - (below if done is None else done))

    def _prune_paused(self) -> Iterator[Stop]:
        for rung, record in enumerate(self.state.rungs):
            for result in record.paused:
                if result[1] not in self.state.ended:
                    yield self.why_pruned(rung, result)
            record.paused = []

    def _forget(self, trial: int) -> None:
        """Forget a trial that failed; at rungs that it has passed its results stay."""
        state = self.state
        if state.training.pop(trial, None) is not None:
            return
        state.new = [other for other in state.new if other != trial]
        for record in state.rungs:
            record.paused = [result for result in record.paused if result[1] != trial]
