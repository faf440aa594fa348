"""How a trial goes on from its stored states: after an interruption, or instead of failing.

A trial does not fail at once if a stored state cannot be read: it goes on from an earlier one. And
a unit that has run out of memory is tried once more, alone, with half the samples at once. That is
written to the journal before it is sent, with epoch and position: a resumed or repeated run cuts
its batches from the same unit on.

Evaluations that run cannot be stopped. If one is to be done in another way, and Dask gives it to
the worker where it still runs in the old way, that worker goes on with it. So what comes of the old
way, a result or an error, does not count, and the evaluation is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dagsel.driver.protocols import Engine
from dagsel.driver.recovery import Continuation, StoredStates, reconcile
from dagsel.driver.rounds import Rounds
from dagsel.driver.trial_limits import TrialLimits
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.messages import BestLost, Entry, PartFound, StatesFound, TrialReport, UnitRecord
from dagsel.workloads.memory import why_it_fails
from dagsel.workloads.raised import RanOut


@dataclass(slots=True)
class Mending:
    """Has trials go on from what the store holds of them."""

    engine: Engine  # where they are trained
    record: Record  # what has happened
    stored: StoredStates
    rounds: Rounds
    limits: TrialLimits
    note: Callable[[Entry], None]  # writes to the journal, some time
    write: Callable[[], None]  # writes what was noted, now
    fail: Callable[[int, str], None]  # has a trial fail

    def plan(self, trial: TrialRecord) -> Continuation | None:
        """Plan what is left of a trial from what the store holds of it; None if it fails."""
        if reason := self.stored.adopt_again(trial):
            self.fail(trial.number, reason)
        states = self.stored.look_up(trial)
        self.note(StatesFound(trial.number, tuple(states)))
        newest = states[-1] if states else None
        self.stored.go_on_from(trial, newest)
        plan = reconcile(trial, self.record.n_shards, newest)
        if plan is None:
            reason = "CheckpointCorruptError: none of its stored states can be read"
            self.fail(trial.number, reason)
            return None
        if self.stored.is_kept_lost(trial):
            self.note(BestLost(trial.number))
        plan, share = self.stored.find_partial(plan)
        if share and plan.epochs.start > len(trial.epochs):
            self.note(PartFound(trial.number, share))
        return self.rounds.anew(plan)

    def unless_it_goes_on(self, report: TrialReport) -> TrialReport | None:
        """Have a trial that a unit has failed go on, if it can; else return why it fails."""
        trial = self.record.trials[report.trial]
        lost = ("CheckpointCorruptError", "CheckpointNotFoundError")
        if report.reason.startswith(lost) and self.stored.is_news(trial):
            self._go_on(trial)
            return None
        raised = report.raised
        if raised is None or raised.ran_out is None:
            return report
        told = as_noted(raised.ran_out)
        before = trial.had_run_out(told.unit)
        if told.unit.kind != "check":
            if told.halved is not None and told.halved < trial.n_halvings(told.unit):
                self._go_on(trial)
                return None
            if before is None:
                self.note(told)
                self.write()
                self.stored.drop_part(told.unit)
                self._go_on(trial)
                return None
        reason = why_it_fails(before, raised.ran_out)
        raised = replace(raised, message=reason)
        return replace(report, reason=raised.reason, raised=raised)

    def ask_again(self, done: UnitRecord) -> None:
        """Have an evaluation done again of which a result came that does not count."""
        trial = self.record.trials[done.unit.trial]
        is_awaited = trial.is_live and done.unit.epoch > len(trial.epochs)
        if is_awaited and not trial.counts(done):
            self._go_on(trial)

    def _go_on(self, trial: TrialRecord) -> None:
        self.engine.stop(trial.number)
        plan = self.plan(trial)
        if plan is not None:
            self.limits.renew(trial)
            self.rounds.send([plan])
            if trial.is_held:  # a trial that was stopped is held once it has units again
                self.limits.hold(trial)


def as_noted(told: RanOut) -> RanOut:
    """Return what is noted of a unit: of an epoch's evaluation, which is done again, the first one.

    Examples
    --------
    >>> from dagsel.dispatch.units import Unit
    >>> as_noted(RanOut(Unit("evaluate", 7, 2, 3), "w", "MemoryError")).unit
    Unit(kind='evaluate', trial=7, epoch=2, position=0)
    """
    if told.unit.kind != "evaluate":
        return told
    return replace(told, unit=told.unit._replace(position=0))
