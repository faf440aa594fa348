"""ASHA: successive halving that waits for nobody."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from dagsel.checks import choice
from dagsel.errors import SearchError
from dagsel.flow import Decision, Event, Extended, Reported, Traits
from dagsel.flows.asynchronous_halving import (
    AshaState,
    AsynchronousHalving,
    Result,
    RungRecord,
)
from dagsel.flows.drawing import check_counts
from dagsel.flows.rungs import check_rungs, prune_at

Mode: TypeAlias = Literal["promotion", "stopping"]
Semantics: TypeAlias = Literal["determined", "ray", "syne"]


@dataclass
class ASHA(AsynchronousHalving):
    """Decide about each trial when it reaches a rung; no trial waits for the others.

    A rung is a number of epochs at which trials are compared. The rungs are at
    ``min_epochs · reduction_factor**k`` epochs and at `max_epochs`. A failed trial has no result at
    the rung that it would have reached next. Ties go to the trial with the lower number.

    With ``mode="promotion"`` a trial pauses at each rung. When a place is free, the search looks
    for paused trials among the top ⌊n/η⌋ of the n trials that have reached a rung. The one at the
    highest rung trains on. If there is none, a new trial starts. At the end it may be that nothing
    has reached `max_epochs`, because of too few trials or failures. Then the best paused trial of
    the highest rung trains on, so that at least one trial completes.

    With ``mode="stopping"`` a trial trains on at once or is stopped. There are three public
    readings of that rule. `semantics` names one. For the nth trial at a rung:

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
        η: about one trial in η goes on.
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
    A search in virtual time:

    >>> import dagsel
    >>> from dagsel.simulation import PowerLaw, SimulatedCluster
    >>> run = dagsel.simulate(
    ...     ASHA(max_epochs=9, n_trials=27),
    ...     PowerLaw(),
    ...     SimulatedCluster(n_workers=4),
    ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
    ... )
    >>> run.seconds < 27 * 9 * 60 / 4  # most trials stop before their ninth epoch
    True

    Step by step:

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
        if self.mode in ("max", "min"):
            raise SearchError(
                f"mode={self.mode!r} is a direction, and the study has it: write "
                f'study=optuna.create_study(direction="{self.mode}imize") for dagsel.optimize'
            )
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
        return replace(super().traits, extends=("n_trials", "max_epochs"))

    def handle(self, event: Event) -> list[Decision]:
        """Judge what has reached a rung, and fill the places that are free."""
        return self._extend(event) if isinstance(event, Extended) else super().handle(event)

    def judge(self, report: Reported, epochs: int) -> list[Decision]:
        """Pause a trial at a rung; or let it go on or stop it, by the stopping rule."""
        rung, trial = self.state.ladder.index(epochs), report.trial
        loss = self.state.drawing.context.loss(report.value)
        record, result = self.state.rungs[rung], (loss, trial)
        if self.mode == "promotion":
            insort(record.results, result)
            insort(record.paused, result)
            return []
        goes_on = _RULES[self.semantics](record.results, result, self.reduction_factor)
        insort(record.results, result)
        if goes_on:
            return [self.train(trial, rung + 1)]
        best = f"1/{self.reduction_factor} of {len(record.results)}"
        return [prune_at(rung, trial, loss, best, self.state.drawing.context)]

    def _extend(self, more: Extended) -> list[Decision]:
        """Go on as if the ended trials had paused at their rungs, those on their way first."""
        state, last = self.state, self.state.ladder[-1]
        # Those that a limit has cut off: they still waited to train on, or trained.
        waiting, cut = {trial for trial, _ in state.halted}, {*state.training}
        state.extend(more.n_trials, more.max_epochs or last, self.reduction_factor)
        state.ended = {it.trial for it in more.ended}
        at = dict(zip(state.ladder, state.rungs, strict=False))  # all but the last
        for record in state.rungs:
            record.paused = []
        for it in sorted(more.ended, key=lambda it: it.trial):
            result = (state.drawing.context.loss(it.value), it.trial)
            has_passed = self.mode == "stopping" and it.trial in cut
            if it.trial in waiting:
                continue
            if it.epochs not in state.ladder or has_passed:
                state.halted.append((it.trial, it.epochs))
            elif it.epochs == last and last in at:  # it had completed
                self._reach(at[last], result, it.epochs)
            elif it.epochs in at and self.mode == "promotion":
                record = at[it.epochs]
                if result in record.results:
                    insort(record.paused, result)
        return self.fill()

    def _reach(self, record: RungRecord, result: Result, epochs: int) -> None:
        """Take in a trial that had completed, at a rung that is the last one no more."""
        if self.mode == "promotion":
            insort(record.paused, result)
        elif _RULES[self.semantics](record.results, result, self.reduction_factor):
            self.state.halted.append((result[1], epochs))
        insort(record.results, result)


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
