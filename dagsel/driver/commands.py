"""What the user commands: whether it can be done, and what it means then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dagsel.checks import whole
from dagsel.driver.clock import RunClock
from dagsel.driver.inbox import Inbox, Order
from dagsel.driver.protocols import Engine
from dagsel.driver.recovery import StoredStates
from dagsel.errors import SearchError
from dagsel.flow import Traits
from dagsel.history.live import live_trial
from dagsel.history.record import Record
from dagsel.history.tariff import Tariff
from dagsel.history.trial import TrialRecord
from dagsel.messages import Turn
from dagsel.steering import (
    AddTrial,
    CloneTrial,
    Commanded,
    ExtendLimits,
    FinishSearch,
    PauseTrial,
    ResumeTrial,
    ScaleCluster,
    SetLimits,
    StopTrial,
    UserCommand,
)
from dagsel.study import StudyDriver


@dataclass(slots=True)
class Commands:
    """Takes commands from an inbox, one at a time. One that cannot be done changes nothing."""

    inbox: Inbox
    engine: Engine  # where units run
    record: Record  # what has happened
    study: StudyDriver  # knows the space
    traits: Traits  # of the flow
    stored: StoredStates  # the states of trials
    clock: RunClock  # what the run has taken, and its limits
    tariff: Tariff  # what workers cost
    check: Callable[[Any], None]  # raises if nothing can be trained with a configuration
    _current: Order | None = None  # is being performed

    def next(self, seconds: float) -> Turn | None:
        """Return the next command that can be done, now after so many seconds; None if none is.

        A callback that has stopped the study has commanded the end.
        """
        if self.study.stopped and not self.record.finished:
            self.inbox.post(Order(FinishSearch()))
        while (order := self.inbox.next()) is not None:
            if order.id in self.record.commands:  # it was given twice
                order.answer.set_result(self.record.added.get(order.id))
                continue
            try:
                command = self._understood(order.command)
            except Exception as error:  # noqa: BLE001 - space and workload may raise anything
                order.refuse(error)
                continue
            self._current = order
            return Turn(Commanded(command, order.id, seconds), ())
        return None

    def done(self) -> None:
        """Answer the last command: it is in the journal."""
        assert self._current is not None
        self._current.answer.set_result(self.record.added.get(self._current.id))

    def _understood(self, command: UserCommand) -> UserCommand:
        if self.record.finished:
            raise SearchError("the search has ended, so it takes no command")
        match command:
            case StopTrial(trial):
                live_trial(self.record, trial, "stopped")
            case PauseTrial(trial):
                if live_trial(self.record, trial, "paused").paused_by_user:
                    raise SearchError(f"trial {trial} is paused already; resume it, or leave it")
            case ResumeTrial(trial):
                if not live_trial(self.record, trial, "resumed").paused_by_user:
                    raise SearchError(
                        f"trial {trial} was not paused by a command, so there is nothing to resume"
                    )
            case CloneTrial(trial, changes):
                return self._clone(live_trial(self.record, trial, "cloned"), changes)
            case ScaleCluster(n_workers):
                self._scale(n_workers)
            case ExtendLimits(deadline_s, budget):
                return self._limits(deadline_s, budget)
            case AddTrial(params):
                fixed, config = self.study.complete_params(params)
                self.check(config)
                return AddTrial(fixed, self._n_epochs)
        return command

    def _clone(self, source: TrialRecord, changes: Mapping[str, Any]) -> AddTrial:
        if not source.epochs:
            raise SearchError(
                f"trial {source.number} has not ended an epoch yet, so there is no state to clone: "
                "wait for its first epoch, or add a trial"
            )
        fixed, config = self.study.complete_params(changes, over=source.params_now)
        self.check(config)
        self.stored.check_clone(source, config)
        return AddTrial(fixed, max(1, self._n_epochs - len(source.epochs)), source.number)

    def _scale(self, n_workers: int) -> None:
        whole("n_workers", n_workers)
        self._check_unplanned("number of workers")
        if why := self.engine.why_fixed:
            raise SearchError(f"the cluster keeps its {self.engine.n_workers} workers: {why}")
        most = self.engine.capacity.most_in_nodes
        if most is not None and n_workers > most:
            raise SearchError(
                f"{n_workers} workers are more than the cluster can have: {most}; "
                "max_cluster_workers= of the call may have said so"
            )

    def _limits(self, deadline_s: float | None, budget: float | str | None) -> SetLimits:
        if deadline_s is None and budget is None:
            raise SearchError(
                "say what the search may take from now on: deadline=, budget=, or both"
            )
        self._check_unplanned("deadline" if budget is None else "budget")
        return self.tariff.limits(self.clock.limits, self.clock.taken, deadline_s, budget)

    def _check_unplanned(self, what: str) -> None:
        """Raise a `SearchError` if the search procedure has planned with limits of its own."""
        if self.traits.deadline_s is not None or self.traits.budget is not None:
            raise SearchError(
                f"the {what} cannot be changed while the search runs: its procedure has planned "
                "stages and workers by a deadline and a budget of its own; begin another search"
            )

    @property
    def _n_epochs(self) -> int:
        """Epochs of the longest trial: as planned, or so far."""
        so_far = (trial.n_decided for trial in self.record.trials.values())
        return self.traits.max_epochs or max(so_far, default=1) or 1
