"""A flow that decides again what a recorded run has decided, when the same has happened."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dagsel.codec import Json
from dagsel.flow import (
    Add,
    Ask,
    Asked,
    Clone,
    Context,
    Decision,
    Event,
    Extended,
    Finish,
    Flow,
    Outcome,
    Pause,
    Reported,
    Scale,
    Stop,
    Train,
    TrialFailed,
    Wake,
)
from dagsel.history.record import Record
from dagsel.messages import ENTRIES, Turn


def differences(then: Record, now: Record) -> list[str]:
    """Say in what a run that was repeated has other results.

    Of a run that was interrupted, the repetition ends the trials that lived: its best is its own.
    """
    found = [
        difference
        for trial in then.trials.values()
        for difference in trial.differences(now.trials.get(trial.number))
    ]
    only_now = sorted(now.trials.keys() - then.trials.keys())
    found += [f"trial {trial}: only the repeated run has it" for trial in only_now]
    best, again = (None if it.best is None else it.best.trial for it in (then, now))
    if best != again and not any(trial.is_live for trial in then.trials.values()):
        found.append(f"trial {best} was the best then, trial {again} is now")
    return found


def drawn(turns: Iterable[Turn]) -> Turn:
    """Return one turn in which all trials of a run are drawn, as they were in several.

    Examples
    --------
    >>> one = Turn(Asked((0,), configs=({"lr": 0.1},)), (), params={0: {"lr": 0.1}})
    >>> drawn([one, replace(one, event=Asked((1,)), infeasible=(1,))]).event
    Asked(trials=(0, 1), exhausted=False, configs=({'lr': 0.1}, {}))
    """
    trials, infeasible = list[int](), list[int]()
    configs, params, attrs = list[Mapping[str, Any]](), dict[int, Any](), dict[int, Any]()
    for turn in turns:
        if isinstance(turn.event, Asked):
            trials += turn.event.trials
            configs += turn.event.configs or [{} for _ in turn.event.trials]
            infeasible += turn.infeasible
            params |= turn.params or {}
            attrs |= turn.attrs or {}
    asked = Asked(tuple(trials), configs=tuple(configs))
    told: dict[str, Any] = {"params": params, "attrs": attrs or None}
    return Turn(asked, (), seconds=0.0, infeasible=tuple(infeasible), **told)


def read_turns(entries: Iterable[Json]) -> tuple[Turn, ...]:
    """Read the turns of a journal."""
    turns = (ENTRIES.decode(entry) for entry in entries if entry["is"] == "turn")
    return tuple(turn for turn in turns if isinstance(turn, Turn))


@dataclass(slots=True)
class ScriptState:
    """How far a script has got."""

    n_played: int = 0  # turns that are over
    # Trials and epochs that have come in.
    reported: set[tuple[int, int]] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)  # trials that were stopped or have failed
    # Of each trial the epochs that it was given to train, then and now.
    decided: dict[int, int] = field(default_factory=dict)
    granted: dict[int, int] = field(default_factory=dict)
    astray: str = ""  # a trial that failed now and did not then, or later, and why
    n_workers: int = 1  # workers that are there now


@dataclass
class Script(Flow):
    """Repeats a run's decisions in their order; its trials are there from the start.

    A trial trains the epochs that it had reported then, not those that were decided and never came
    to an end. Of a search that was extended the ends before that are left out. Pauses, time limits
    and the cluster's size are left out: of what a whole epoch of one worker learns they change
    nothing. A gang is no larger than the cluster is now.

    Parameters
    ----------
    turns
        What the run has decided, on what.

    Examples
    --------
    >>> turns = (
    ...     Turn(None, (Train(0, 1), Train(1, 1))),
    ...     Turn(Reported(1, 1, 0.5, {}, 0.0), (Stop(1, "rung 1"),)),
    ...     Turn(Reported(0, 1, 0.7, {}, 0.0), (Stop(0, "the end", "complete"), Finish())),
    ... )
    >>> script = Script(turns)
    >>> script.start(Context(n_workers=1))
    [Train(trial=0, epochs=1), Train(trial=1, epochs=1)]
    >>> script.handle(Reported(0, 1, 0.7, {}, 0.0))  # then, trial 1 was first
    []
    >>> len(script.handle(Reported(1, 1, 0.5, {}, 0.0)))
    3
    """

    turns: tuple[Turn, ...]
    state: ScriptState = field(default_factory=ScriptState, init=False, repr=False, compare=False)

    @cached_property
    def _reported(self) -> dict[int, int]:
        events = [turn.event for turn in self.turns if isinstance(turn.event, Reported)]
        return {event.trial: event.epoch for event in events}

    @cached_property
    def _clones(self) -> dict[int, list[tuple[int, int]]]:
        """Of each trial that was cloned, in which turns, and how many epochs it had ended."""
        found, n_epochs = dict[int, list[tuple[int, int]]](), dict[int, int]()
        for number, turn in enumerate(self.turns, start=1):
            if isinstance(turn.event, Reported):
                n_epochs[turn.event.trial] = turn.event.epoch
            for decision in turn.decisions:
                if isinstance(decision, Clone):
                    place = (number, n_epochs.get(decision.source, 0))
                    found.setdefault(decision.source, []).append(place)
        return found

    @cached_property
    def _last_trains(self) -> dict[int, int]:
        """Of each trial the last turn that let it train, which may be after it has ended."""
        return {
            decision.trial: number
            for number, turn in enumerate(self.turns, start=1)
            for decision in turn.decisions
            if isinstance(decision, Train)
        }

    @cached_property
    def _n_before(self) -> int:
        """How many turns there were before the search was last extended."""
        extended = [n for n, turn in enumerate(self.turns) if isinstance(turn.event, Extended)]
        return max(extended, default=0)

    def start(self, context: Context) -> list[Decision]:
        """Decide what was decided before anything was reported."""
        self.state.n_workers = max(1, context.n_workers)
        return self._advance()

    def handle(self, event: Event) -> list[Decision]:
        """Decide what was decided once all this had happened."""
        match event:
            case Reported(trial, epoch):
                self.state.reported.add((trial, epoch))
            case TrialFailed(trial, reason):
                n_then = self._reported.get(trial, 0)
                is_early = n_then > 0 and (trial, n_then) not in self.state.reported
                if is_early or not any(
                    isinstance(turn.event, TrialFailed) and turn.event.trial == trial
                    for turn in self.turns
                ):
                    self.state.astray = f"trial {trial} failed: {reason}"
                    return [Finish()]
                self.state.ended.add(trial)
        return self._advance()

    def _advance(self) -> list[Decision]:
        state, decided = self.state, list[Decision]()
        while state.n_played < len(self.turns):
            turn = self.turns[state.n_played]
            match turn.event:
                case Reported(trial, epoch) if (trial, epoch) not in state.reported:
                    return decided
                case TrialFailed(trial, reason) if self._ends(trial):
                    told = f"the recorded run's failed: {reason}"
                    decided.append(Stop(trial, told, self._outcome(trial)))
                    state.ended.add(trial)
            state.n_played += 1
            for decision in turn.decisions:
                decided += self._again(decision)
        return decided if Finish() in decided else [*decided, Finish()]

    def _ends(self, trial: int) -> bool:
        """Whether a trial that stops or fails in this turn is live, and trained on no more then."""
        trained_on = self._last_trains.get(trial, 0) > self.state.n_played
        return not trained_on and trial not in self.state.ended

    def _outcome(self, trial: int) -> Outcome:
        """How a trial had ended before an extension in which it failed: it keeps that result."""
        turns = reversed(self.turns[: self.state.n_played])
        stops = (it for turn in turns for it in turn.decisions if isinstance(it, Stop))
        return next((it.outcome for it in stops if it.trial == trial), "pruned")

    def _train(self, decision: Train) -> list[Decision]:
        """Train a trial as far as it was trained then, but not past the state that is cloned."""
        trial, state = decision.trial, self.state
        granted, ahead = state.granted.get(trial, 0), self._clones.get(trial, [])
        until = min([n for turn, n in ahead if turn > state.n_played], default=math.inf)
        until = min(state.decided.get(trial, 0), self._reported.get(trial, 0), until)
        state.granted[trial] = max(granted, int(until))
        n_done = sum((trial, epoch) in state.reported for epoch in range(1, granted + 1))
        if state.granted[trial] <= n_done:
            return []
        epochs, gang = state.granted[trial] - granted, min(decision.gang, state.n_workers)
        return [replace(decision, epochs=epochs, seconds=None, gang=gang)]

    def _again(self, decision: Decision) -> list[Decision]:
        match decision:
            case Ask() | Add():  # all trials are there
                return []
            case Pause() | Scale() | Wake():  # of what a trial learns they change nothing
                return []
            case Train(trial) | Clone(_, trial) if trial in self.state.ended:
                return []
            case Train(trial, epochs):
                self.state.decided[trial] = self.state.decided.get(trial, 0) + epochs
                return self._train(decision)
            case Clone(source) if source not in self.state.ended:  # it may train on from here
                return [decision, *self._train(Train(source, 0))]
            case Stop(trial):
                if not self._ends(trial):
                    return []
                self.state.ended.add(trial)
            case Finish() if self.state.n_played <= self._n_before:
                return []
        return [decision]
