"""How many workers trials train on and for how long, and what is heard of those that rest.

The dispatcher keeps each trial's `dagsel.dispatch.trials.Allowance`; here the driver sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dagsel.dispatch.events import PriorityChanged, TrialAllowed, TrialHeld
from dagsel.dispatch.units import Unit
from dagsel.driver.clock import MOMENT_S, RunClock
from dagsel.driver.idle_workers import IdleWorkers
from dagsel.driver.protocols import Engine
from dagsel.driver.scoring import Scores
from dagsel.errors import SearchError
from dagsel.flow import Decision, Paused, Train, TrialFailed
from dagsel.history.record import Record
from dagsel.history.tally import EpochTally
from dagsel.history.trial import TrialRecord
from dagsel.messages import Turn, UnitRecord

#: More than any flow's priority.
FIRST = 1e9


@dataclass(slots=True)
class TrialLimits:
    """The allowances of a run's trials.

    Each allowance of a trial has a number; an answer with an earlier number is ignored.
    """

    engine: Engine  # what is told of them
    record: Record  # what has happened
    clock: RunClock  # time since the run began
    idle_workers: IdleWorkers  # how many workers few trials are trained on
    scores: Scores  # what they are scored with
    _numbers: dict[int, int] = field(default_factory=dict)  # by trial: of its last allowance
    _priorities: dict[int, float] = field(default_factory=dict)  # other than 0, as the flow says
    _first: frozenset[int] = frozenset()  # trials that are served before all others
    _checks: dict[int, EpochTally] = field(default_factory=dict)  # of trials that are paused
    _told: dict[int, int] = field(default_factory=dict)  # by trial: its `n_told` when it paused

    # ---- what the engine is told

    def tell(self, trial: TrialRecord) -> None:
        """Tell the engine a trial's priority and allowance, unless all begin with these.

        To be called before its units are sent: the first one needs it already.
        """
        if trial.priority != self._priorities.get(trial.number, 0.0):
            self._priorities[trial.number] = trial.priority
            self._tell_priority(trial.number)
        if trial.is_held or trial.paused_by_user:
            self.hold(trial)
            return
        gang = trial.gang if trial.gang > 1 else self.idle_workers.gang_of(trial.number)
        if trial.number in self._numbers or (gang, trial.seconds_left) != (1, None):
            number = self._next(trial.number)
            self.engine.tell(TrialAllowed(trial.number, gang, trial.seconds_left, number))

    def hold(self, trial: TrialRecord) -> None:
        """Suspend a trial."""
        if trial.is_live:
            self.engine.tell(TrialHeld(trial.number, self._next(trial.number)))

    def renew(self, trial: TrialRecord) -> None:
        """Tell the engine again what it has forgotten of a trial that it has stopped."""
        if trial.number in self._first or self._priorities.get(trial.number, 0.0):
            self._tell_priority(trial.number)
        if not trial.is_held:
            self.tell(trial)

    def put_first(self, trials: frozenset[int]) -> None:
        """Serve these trials before all others, and no others any more."""
        changed, self._first = self._first ^ trials, trials
        for trial in sorted(changed):
            if self.record.trials[trial].is_live:
                self._tell_priority(trial)

    def _tell_priority(self, trial: int) -> None:
        priority = self._priorities.get(trial, 0.0) + FIRST * (trial in self._first)
        self.engine.tell(PriorityChanged(trial, priority))

    def forget(self, trial: int) -> None:
        """Forget a trial that has ended."""
        for by_trial in (self._numbers, self._priorities, self._checks):
            by_trial.pop(trial, None)

    def _next(self, trial: int) -> int:
        self._checks.pop(trial, None)
        self._numbers[trial] = self._numbers.get(trial, 0) + 1
        return self._numbers[trial]

    def check_gangs(self, decisions: Iterable[Decision]) -> None:
        """Raise a `SearchError` if a trial is to train on more workers than there can be."""
        n_workers = self.engine.n_workers
        wide = [d for d in decisions if isinstance(d, Train) and d.gang > max(1, n_workers)]
        most = self.engine.most_workers if wide else None  # to ask may be to ask a server
        for train in wide:
            if most is not None and train.gang > most:
                raise SearchError(
                    f"trial {train.trial} is to train on {train.gang} workers, and the "
                    f"cluster will never have more than {most}; add workers, give cluster= one "
                    "that can be scaled, or let the flow use smaller gangs"
                )

    def patience_s(self, wake_at: float | None) -> float:
        """How long to wait for a message: as the clock says, or until idle workers are let go."""
        patience_s, decides_at = self.clock.patience_s(wake_at), self.idle_workers.decides_at
        left_s = 0.0 if decides_at is None else decides_at - self.clock.seconds
        return min(patience_s, left_s) if left_s > MOMENT_S else patience_s

    def use_idle_workers(self) -> Iterator[str]:
        """Train few trials on several workers each, or release some; yield what to say of it."""
        now = (self.engine.n_workers, self.clock.seconds)
        for change in self.idle_workers.settle(self.record, *now):
            if change.note:
                yield change.note
            for number in change.trials:
                self.tell(self.record.trials[number])
            if change.n_workers is not None:
                self.engine.scale(change.n_workers)

    def why_no_gang(self, trial: TrialRecord, check: Callable[[Any, int], None]) -> str:
        """Say why its gang cannot train a trial; empty if it can, or the trial has none."""
        if trial.gang > 1:
            try:
                check(trial.config, trial.gang)
            except Exception as error:  # noqa: BLE001 - the workload's own code may raise anything
                return f"{type(error).__name__}: {error}"
        return ""

    # ---- what is heard of trials that rest

    def is_awaited(self, trial: TrialRecord, number: int) -> bool:
        """Whether a trial rests as it was last told to, and the flow waits for it."""
        if not trial.is_live or self._numbers.get(trial.number) != number:
            return False  # it was told something else meanwhile
        is_over = trial.has_work and not trial.is_held and not trial.paused_by_user
        return trial.pausing is not None or is_over

    def rests(self, trial: TrialRecord) -> Turn | None:
        """Return what the flow is told of a trial that rests; None while its state is scored."""
        place = trial.place(self.record.n_shards)
        if trial.pausing is None or not trial.pausing.evaluate or place is None:
            return self._paused(trial, None, {})
        if trial.progress(self.record.n_shards) == len(trial.epochs):
            return self._paused(trial, trial.epochs[-1].value, trial.epochs[-1].metrics)
        number = trial.number
        self._checks[number] = EpochTally(self.record.n_shards)
        unit = Unit("evaluate", number, place.epoch, 0)
        told = (number, self._numbers[number], place, {number: trial.config})
        self.engine.check(*told, halvings=trial.n_halvings(unit))
        return None

    def checked(self, done: UnitRecord) -> Turn | None:
        """Take in a score of a trial that rests; the flow is told once all are in."""
        unit = done.unit
        tally = self._checks.get(unit.trial)
        if tally is None or unit.epoch != self._numbers.get(unit.trial):
            return None  # the trial goes on, or has ended
        tally.add(done)
        if len(tally.scored) != self.record.n_shards:
            return None
        del self._checks[unit.trial]
        trial = self.record.trials[unit.trial]
        where = f"{trial.progress(self.record.n_shards):.2f} epochs"
        score = self.scores.of(tally, where, unit.trial, unit.epoch, kind="check")
        self.scores.drop(unit.trial, unit.epoch, "check")
        if score.why_not:
            return Turn(TrialFailed(unit.trial, score.why_not), (), raised=score.raised)
        return self._paused(trial, score.value, score.metrics)

    def is_outdated(self, event: Paused) -> bool:
        """Whether a trial was told something else since it paused."""
        return self.record.trials[event.trial].n_told != self._told.get(event.trial)

    def _paused(
        self, trial: TrialRecord, value: float | None, metrics: Mapping[str, float]
    ) -> Turn:
        reached = trial.progress(self.record.n_shards)
        self._told[trial.number] = trial.n_told
        told = (trial.trained_s, trial.losses, value, metrics)
        event = Paused(trial.number, reached, self.clock.seconds, *told)
        return Turn(event, (), place=trial.place(self.record.n_shards))
