"""ASHA: successive halving that waits for nobody."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from dagsel.checks import choice
from dagsel.errors import SearchError
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
from dagsel.flows.rungs import check_rungs, prune_at, rung_epochs

Mode: TypeAlias = Literal["promotion", "stopping"]
Semantics: TypeAlias = Literal["determined", "ray", "syne"]
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

    @property
    def room(self) -> int:
        """Places that are free."""
        return self.n_places - len(self.training) - self.drawing.n_awaited


@dataclass
class ASHA(Flow):
    """Decide about each trial when it reaches a rung, by what has reached the rung so far.

    The rungs are at ``min_epochs · reduction_factor**k`` epochs and at `max_epochs`. Failed trials
    leave no result at the rung they were heading for. Ties go to the trial with the lower number.

    With ``mode="promotion"`` a trial pauses at each rung. Whenever a place is free, an unpromoted
    member of the top ⌊n/η⌋ of the n trials that have reached a rung is promoted, from the highest
    rung that has one; only if there is none, a new trial starts. At the end of the search, if
    nothing has reached `max_epochs` (too few trials, or failures), the best paused trial of the
    highest rung is promoted, so that at least one trial completes.

    With ``mode="stopping"`` a trial trains on at once or is stopped. `semantics` says which of the
    public readings of that rule is meant, for the nth trial at a rung:

    - ``"determined"`` (Determined's ASHA): it goes on if it is in the top max(1, ⌊n/η⌋) of the n.
    - ``"ray"`` (Ray Tune's AsyncHyperBandScheduler): it goes on if it is no worse than the 1/η
      quantile, linearly interpolated, of the n - 1 trials before it, without values that are not
      finite.
    - ``"syne"`` (Syne Tune's AsynchronousSuccessiveHalving from 0.14 on): it goes on if at most n/η
      of the n are better.

    Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020, Algorithm 2, which
    is the promotion mode.

    Parameters
    ----------
    max_epochs
        Epochs of a trial that reaches the last rung.
    n_trials
        How many trials to draw.
    min_epochs
        Epochs up to the first rung.
    reduction_factor
        η: about one of so many trials goes on.
    mode
        Whether trials pause at a rung or go on at once.
    semantics
        The stopping rule; only for ``mode="stopping"``.
    n_concurrent
        How many of them train at once; None for four a worker.

    Raises
    ------
    SearchError
        If a number is not whole, or too small, or `min_epochs` is above `max_epochs`, or a stopping
        rule is named in promotion mode.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Reported
    >>> flow = ASHA(max_epochs=9, n_trials=32, n_concurrent=3)
    >>> flow.start(Context(n_workers=1))
    [Ask(n=3, sampling='study')]
    >>> flow.handle(Asked(trials=(0, 1, 2)))[0]
    Train(trial=0, epochs=1)
    >>> for trial, loss in enumerate([0.5, 0.4]):
    ...     print(flow.handle(Reported(trial, 1, loss, {"loss": loss}, seconds=1.0)))
    [Ask(n=1, sampling='study')]
    [Ask(n=1, sampling='study')]
    >>> flow.handle(Reported(2, 1, 0.6, {"loss": 0.6}, seconds=1.0))
    [Train(trial=1, epochs=2)]
    """

    max_epochs: int
    n_trials: int
    min_epochs: int = 1
    reduction_factor: int = 3
    mode: Mode = "promotion"
    semantics: Semantics = "determined"
    n_concurrent: int | None = None
    state: AshaState = field(default_factory=AshaState, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rungs(self.min_epochs, self.max_epochs, self.reduction_factor)
        choice("mode", self.mode, get_args(Mode))
        choice("semantics", self.semantics, get_args(Semantics))
        if self.mode == "promotion" and self.semantics != "determined":
            raise SearchError(
                f"semantics={self.semantics!r} is a stopping rule, and nothing stops in promotion "
                'mode; add mode="stopping" or leave it out'
            )
        check_counts(n_trials=self.n_trials, n_concurrent=self.n_concurrent)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(self.max_epochs)

    @property
    def rungs(self) -> tuple[int, ...]:
        """Epochs of each rung, the lowest first."""
        return rung_epochs(self.min_epochs, self.max_epochs, self.reduction_factor)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        state = self.state
        state.drawing.context = context
        state.n_places = n_places(self.n_concurrent, context.n_workers)
        state.rungs = [RungRecord() for _ in self.rungs[:-1]]
        return self._fill()

    def handle(self, event: Event) -> list[Decision]:
        """Judge what has reached a rung, and fill the places that are free."""
        state, judged = self.state, list[Decision]()
        if state.drawing.finished:
            return []
        match event:
            case Asked(trials):
                state.drawing.receive(event)
                state.new += trials
            case Reported(trial, epoch, value) if epoch >= state.training.get(trial, math.inf):
                epochs = state.training.pop(trial)
                judged = self._judge(trial, epochs, state.drawing.context.loss(value))
            case TrialFailed(trial):
                self._forget(trial)
            case WorkersChanged(n_workers):
                state.n_places = n_places(self.n_concurrent, n_workers)
            case DeadlineReached():
                state.drawing.finished = True
                paused = [trial for record in state.rungs for _, trial in record.paused]
                return stop_all([*state.training, *state.new, *paused])
            case _:
                return []
        return judged + self._fill()

    def _judge(self, trial: int, epochs: int, loss: float) -> list[Decision]:
        """Decide about a trial that has just reached a rung."""
        state = self.state
        if epochs == self.rungs[-1]:
            state.n_complete += 1
            return [Stop(trial, f"trained to the last rung, {epochs} epochs", "complete")]
        rung = self.rungs.index(epochs)
        record, result = state.rungs[rung], (loss, trial)
        if self.mode == "promotion":
            insort(record.results, result)
            insort(record.paused, result)
            return []
        goes_on = _RULES[self.semantics](record.results, result, self.reduction_factor)
        insort(record.results, result)
        if goes_on:
            return [self._train(trial, rung + 1)]
        best = f"1/{self.reduction_factor} of {len(record.results)}"
        return [prune_at(rung, trial, loss, best, state.drawing.context)]

    def _fill(self) -> list[Decision]:
        """Fill the free places, or end the search."""
        state, decisions = self.state, list[Decision]()
        while state.room > 0 and (train := self._next()):
            decisions.append(train)
        decisions += state.drawing.ask(state.room, n_trials=self.n_trials)
        if state.training or state.drawing.n_awaited:
            return decisions
        paused = [rung for rung, record in enumerate(state.rungs) if record.paused]
        if paused and not state.n_complete:
            return [*decisions, self._promote(paused[-1])]
        state.drawing.finished = True
        return [*decisions, *self._prune_paused(), Finish()]

    def _next(self) -> Train | None:
        """Promote from the highest rung that has a trial to promote; else start a new one."""
        state = self.state
        for rung, record in reversed([*enumerate(state.rungs)]):
            n_top = len(record.results) // self.reduction_factor
            if record.paused and bisect_left(record.results, record.paused[0]) < n_top:
                return self._promote(rung)
        return self._train(state.new.pop(0), 0) if state.new else None

    def _promote(self, rung: int) -> Train:
        _, trial = self.state.rungs[rung].paused.pop(0)
        return self._train(trial, rung + 1)

    def _train(self, trial: int, rung: int) -> Train:
        """Train a trial from the rung below up to a rung."""
        done, until = (0, *self.rungs)[rung : rung + 2]
        self.state.training[trial] = until
        return Train(trial, until - done)

    def _prune_paused(self) -> Iterator[Stop]:
        for rung, record in enumerate(self.state.rungs):
            n = len(record.results)
            best = f"{max(1, n // self.reduction_factor)} of {n}"
            for loss, trial in record.paused:
                yield prune_at(rung, trial, loss, best, self.state.drawing.context)
            record.paused = []

    def _forget(self, trial: int) -> None:
        """Forget a trial that failed; at rungs that it has passed its results stay."""
        state = self.state
        if state.training.pop(trial, None) is not None:
            return
        state.new = [other for other in state.new if other != trial]
        for record in state.rungs:
            record.paused = [result for result in record.paused if result[1] != trial]


def _determined(before: list[Result], new: Result, eta: int) -> bool:
    return bisect_left(before, new) < max(1, (len(before) + 1) // eta)


def _ray(before: list[Result], new: Result, eta: int) -> bool:
    n = bisect_left(before, (math.inf, -1))
    if not n:
        return True
    below, rest = divmod(n - 1, eta)  # where the 1/η quantile lies
    cutoff = before[below][0]
    if rest:
        cutoff += (before[below + 1][0] - cutoff) * rest / eta
    return new[0] <= cutoff


def _syne(before: list[Result], new: Result, eta: int) -> bool:
    return bisect_left(before, (new[0], -1)) * eta <= len(before) + 1


_RULES = {"determined": _determined, "ray": _ray, "syne": _syne}
