"""On what terms trials train, as the engine is told, and what is heard of those that rest.

The driver's side of `dagsel.dispatch.rests`: there the terms are kept, here they are given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import TypeAlias

from dagsel.codec import Json
from dagsel.dispatch.units import Unit
from dagsel.driver.clock import RunClock
from dagsel.driver.idle_workers import IdleWorkers
from dagsel.driver.protocols import Engine, Message
from dagsel.flow import Event, Paused, TrialFailed
from dagsel.history.record import Record
from dagsel.history.tally import EpochTally
from dagsel.history.trial import TrialRecord

#: What is put to the flow, and what else is written down of it.
Happening: TypeAlias = tuple[Event, Mapping[str, Json]]


@dataclass(slots=True)
class TrialLimits:
    """The terms of a run's trials.

    What a trial is told has a number; an answer with an earlier number is no answer.

    Parameters
    ----------
    engine
        What is told of them.
    record
        What has happened.
    limits
        What time it is.
    crews
        How few trials are trained on many workers.
    metric
        Name of the metric that the search is about.
    """

    engine: Engine
    record: Record
    limits: RunClock
    crews: IdleWorkers
    metric: str
    _numbers: dict[int, int] = field(default_factory=dict)  # by trial: of its last terms
    _priorities: dict[int, float] = field(default_factory=dict)  # other than 0
    _checks: dict[int, EpochTally] = field(default_factory=dict)  # of trials that are paused
    _told: dict[int, int] = field(default_factory=dict)  # by trial: as of which word it paused

    # ---- what the engine is told

    def tell(self, trial: TrialRecord) -> None:
        """Tell the engine on what terms a trial trains, unless they are what it takes for granted.

        To be said before its units are sent: the first one shall begin on these terms.
        """
        if trial.is_held:
            self.hold(trial)
            return
        gang = trial.gang if trial.gang > 1 else self.crews.gang_of(trial.number)
        if trial.number in self._numbers or (gang, trial.seconds_left) != (1, None):
            number = self._next(trial.number)
            self.engine.allow(trial.number, gang, trial.seconds_left, number)

    def hold(self, trial: TrialRecord) -> None:
        """Let a trial rest."""
        if trial.is_live:
            self.engine.hold(trial.number, self._next(trial.number))

    def renew(self, trial: TrialRecord) -> None:
        """Tell the engine again what it has forgotten of a trial that it was to stop."""
        self.prioritize(trial.number, self._priorities.pop(trial.number, 0.0))
        if not trial.is_held:
            self.tell(trial)

    def prioritize(self, trial: int, priority: float) -> None:
        """Let a trial be served before those of a lower priority."""
        if priority != self._priorities.get(trial, 0.0):
            self._priorities[trial] = priority
            self.engine.prioritize(trial, priority)

    def forget(self, trial: int) -> None:
        """Forget the terms of a trial that has ended."""
        for by_trial in (self._numbers, self._priorities, self._checks):
            by_trial.pop(trial, None)

    def _next(self, trial: int) -> int:
        self._checks.pop(trial, None)
        self._numbers[trial] = self._numbers.get(trial, 0) + 1
        return self._numbers[trial]

    # ---- what is heard of trials that rest

    def is_awaited(self, trial: TrialRecord, number: int) -> bool:
        """Whether a trial that has come to rest was told so last, and somebody waits for it."""
        if not trial.is_live or self._numbers.get(trial.number) != number:
            return False  # it was told something else meanwhile
        return trial.pausing is not None or (trial.has_work and not trial.is_held)

    def rests(self, trial: TrialRecord) -> Happening | None:
        """Say what the flow is to hear of a trial that rests; None while its state is scored."""
        place = trial.place(self.record.n_shards)
        if trial.pausing is None or not trial.pausing.evaluate or place is None:
            return self._paused(trial, None, {})
        if trial.progress(self.record.n_shards) == len(trial.epochs):
            return self._paused(trial, trial.epochs[-1].value, trial.epochs[-1].metrics)
        number = trial.number
        self._checks[number] = EpochTally(self.record.n_shards)
        self.engine.check(number, self._numbers[number], place, {number: trial.config})
        return None

    def checked(self, unit: Unit, message: Message) -> Happening | None:
        """Take in a score of a trial that rests; when it was the last one, the flow is to hear."""
        tally = self._checks.get(unit.trial)
        if tally is None or unit.epoch != self._numbers.get(unit.trial):
            return None  # the trial goes on, or has ended
        tally.add(unit, message)
        if len(tally.scored) != self.record.n_shards:
            return None
        del self._checks[unit.trial]
        metrics = tally.metrics
        return self._paused(self.record.trials[unit.trial], metrics[self.metric], metrics)

    def is_outdated(self, event: Paused) -> bool:
        """Whether a trial was told something else since it paused."""
        return self.record.trials[event.trial].n_told != self._told.get(event.trial)

    def _paused(
        self, trial: TrialRecord, value: float | None, metrics: Mapping[str, float]
    ) -> Happening:
        reached = trial.progress(self.record.n_shards)
        if value is not None and math.isnan(value):
            reason = f"DivergedError: {self.metric} is NaN after {reached:.2f} epochs"
            return TrialFailed(trial.number, reason), {}
        self._told[trial.number] = trial.n_told
        told = (trial.trained_s, trial.losses, value, metrics)
        event = Paused(trial.number, reached, self.limits.seconds, *told)
        place = trial.place(self.record.n_shards)
        return event, {} if place is None else {"place": list(astuple(place))}
