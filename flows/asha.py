"""ASHA: successive halving that waits for nobody."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from dagsel.errors import SearchError
from dagsel.flow import Context, Decision, Finish, Stop, Train
from dagsel.flows.rung_search import RungSearch, RungState, check_choice
from dagsel.flows.rungs import rung_epochs

Mode: TypeAlias = Literal["promotion", "stopping"]
Semantics: TypeAlias = Literal["determined", "ray", "syne"]
Result: TypeAlias = tuple[float, int]  # loss and trial: sorted, it is the rank in a rung


@dataclass(slots=True)
class RungRecord:
    """What has reached a rung: all of it, and what pauses there; both sorted, the best first."""

    results: list[Result] = field(default_factory=list)
    paused: list[Result] = field(default_factory=list)


@dataclass(slots=True)
class AshaState(RungState):
    """The state of ASHA."""

    rungs: list[RungRecord] = field(default_factory=list)  # all but the last
    new: list[int] = field(default_factory=list)
    n_complete: int = 0


@dataclass
class ASHA(RungSearch):
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

    def _check(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("semantics", self.semantics, get_args(Semantics))
        if self.mode == "promotion" and self.semantics != "determined":
            raise SearchError(
                f"semantics={self.semantics!r} is a stopping rule, and nothing stops in promotion "
                'mode; add mode="stopping" or leave it out'
            )

    @property
    def rungs(self) -> tuple[int, ...]:
        """Epochs of each rung, the lowest first."""
        return rung_epochs(self.min_epochs, self.max_epochs, self.reduction_factor)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        self.state.rungs = [RungRecord() for _ in self.rungs[:-1]]
        return super().start(context)

    def _n_trials(self) -> int:
        return self.n_trials

    def _admit(self, trials: tuple[int, ...]) -> None:
        self.state.new += trials

    def _judge(self, trial: int, epochs: int, loss: float) -> list[Decision]:
        rungs = self.rungs
        if epochs == rungs[-1]:
            self.state.n_complete += 1
            return [Stop(trial, f"trained to the last rung, {epochs} epochs", "complete")]
        rung = rungs.index(epochs)
        record, result = self.state.rungs[rung], (loss, trial)
        if self.mode == "promotion":
            insort(record.results, result)
            insort(record.paused, result)
            return []
        goes_on = _RULES[self.semantics](record.results, result, self.reduction_factor)
        insort(record.results, result)
        if goes_on:
            return [self._train(trial, done=epochs, until=rungs[rung + 1])]
        best = f"1/{self.reduction_factor} of {len(record.results)}"
        return [Stop(trial, self._miss(rung, loss, best), "pruned")]

    def _lose(self, trial: int, *, trained: bool) -> None:
        if trained:
            return
        self.state.new = [other for other in self.state.new if other != trial]
        for record in self.state.rungs:
            record.paused = [result for result in record.paused if result[1] != trial]

    def _live(self) -> set[int]:
        paused = {trial for record in self.state.rungs for _, trial in record.paused}
        return {*self.state.training, *self.state.new, *paused}

    def _advance(self) -> list[Decision]:
        state = self.state
        decisions: list[Decision] = []
        while self._room() > 0 and (train := self._promote() or self._begin()):
            decisions.append(train)
        decisions += self._ask()
        if state.training or state.n_awaited:
            return decisions
        if not state.n_complete:
            for rung in reversed(range(len(state.rungs))):
                if state.rungs[rung].paused:
                    return [*decisions, self._raise_best(rung)]
        return [*decisions, *self._end()]

    def _promote(self) -> Train | None:
        for rung in reversed(range(len(self.state.rungs))):
            record = self.state.rungs[rung]
            n_top = len(record.results) // self.reduction_factor
            if record.paused and bisect_left(record.results, record.paused[0]) < n_top:
                return self._raise_best(rung)
        return None

    def _raise_best(self, rung: int) -> Train:
        _, trial = self.state.rungs[rung].paused.pop(0)
        return self._train(trial, done=self.rungs[rung], until=self.rungs[rung + 1])

    def _begin(self) -> Train | None:
        if not self.state.new:
            return None
        return self._train(self.state.new.pop(0), done=0, until=self.rungs[0])

    def _end(self) -> list[Decision]:
        decisions: list[Decision] = []
        for rung, record in enumerate(self.state.rungs):
            n = len(record.results)
            best = f"{max(1, n // self.reduction_factor)} of {n}"
            for loss, trial in record.paused:
                decisions.append(Stop(trial, self._miss(rung, loss, best), "pruned"))
            record.paused = []
        self.state.finished = True
        return [*decisions, Finish()]


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
