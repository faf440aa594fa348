"""A flow that can be steered: it answers the user's commands, around a flow that knows of none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dagsel.checks import shown
from dagsel.errors import SearchError
from dagsel.flow import (
    DECISIONS,
    Add,
    Ask,
    Asked,
    Clone,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Extended,
    Finish,
    Paused,
    Reported,
    Scale,
    Stop,
    Train,
    TrialFailed,
)
from dagsel.flows.wrapper import Wrapper
from dagsel.steering import (
    AddTrial,
    Commanded,
    FinishSearch,
    ScaleCluster,
    StopTrial,
    UserCommand,
)

BY_USER, ENDED_BY_USER = "stopped by the user", "the search was ended by the user"
_OVER = "the time or the budget is over"


@dataclass(frozen=True, slots=True)
class Added:
    """A trial that the user wants, and that is not drawn yet."""

    epochs: int  # how long it trains
    source: int | None  # the trial from whose state it begins


@dataclass(slots=True)
class UsersTrials:
    """The trials that the user has added."""

    epochs: dict[int, int] = field(default_factory=dict)  # by live trial: how long it trains
    # What is drawn next: for the user, or None for the inner flow.
    awaited: list[Added | None] = field(default_factory=list)
    has_finished: bool = False  # whether the inner flow has, and only these trials are left


@dataclass
class Steered(Wrapper):
    """A search around another one, which does what the user commands.

    The inner search hears of a trial that the user stops as of one that has failed. It does not
    hear of the trials that the user adds: these train to their end and are compared at the end
    only. If it finishes before them, the search goes on until they end.

    Examples
    --------
    >>> from dagsel.flows import RandomSearch
    >>> flow = Steered(RandomSearch(max_epochs=3, n_trials=1))
    >>> flow.start(Context(n_workers=1))
    [Ask(n=1, sampling='random')]
    >>> flow.handle(Asked((0,)))
    [Train(trial=0, epochs=3)]
    >>> flow.handle(Commanded(AddTrial({"lr": 0.1}, epochs=3), "a", seconds=1.0))
    [Add(params={'lr': 0.1})]
    >>> flow.handle(Asked((1,)))
    [Train(trial=1, epochs=3)]
    >>> flow.handle(Commanded(StopTrial(0), "b", seconds=2.0))
    [Stop(trial=0, reason='stopped by the user', outcome='pruned')]
    >>> flow.handle(Commanded(StopTrial(1), "c", seconds=3.0))[1:]
    [Finish()]
    """

    own: UsersTrials = field(default_factory=UsersTrials, init=False, repr=False, compare=False)

    def start(self, context: Context) -> list[Decision]:
        """Begin the inner search."""
        return self._without_end(self.flow.start(context), "start")

    def handle(self, event: Event) -> list[Decision]:
        """Do what is commanded, train the user's trials, and pass on all that is not theirs."""
        own = self.own
        match event:
            case Commanded(command, _, seconds):
                return self._obey(command, seconds)
            case DeadlineReached(seconds):
                return self._end(seconds)
            case Asked(trials) if own.awaited and (added := own.awaited.pop(0)) is not None:
                own.epochs[trials[0]] = added.epochs
                train = Train(trials[0], added.epochs)
                begins = [] if added.source is None else [Clone(added.source, trials[0], {})]
                return [*begins, train]
            case Reported(trial, epoch) if trial in own.epochs:
                if epoch < own.epochs[trial]:
                    return []
                return self._ended(trial, Stop(trial, "trained to the end", "complete"))
            case TrialFailed(trial) if trial in own.epochs:
                return self._ended(trial)
            case Paused(trial) if trial in own.epochs:
                return []
            case Extended():  # what was asked for and is not drawn is not drawn any more
                self.own = UsersTrials()
        return self._pass(event)

    def _obey(self, command: UserCommand, seconds: float) -> list[Decision]:
        match command:
            case StopTrial(trial):
                stop = Stop(trial, BY_USER)
                if trial in self.own.epochs:
                    return self._ended(trial, stop)
                return [stop, *self._pass(TrialFailed(trial, BY_USER))]
            case AddTrial(params, epochs, source):
                assert epochs is not None
                self.own.awaited.append(Added(epochs, source))
                return [Add(params)]
            case ScaleCluster(n_workers):
                return [Scale(n_workers)]
            case FinishSearch():
                stops = [_by_user(it) for it in self._end(seconds) if it != Finish()]
                return [*stops, Finish()]
            case _:  # the driver lets trials rest and go on, and ends in time, by itself
                return []

    def _ended(self, trial: int, *stop: Decision) -> list[Decision]:
        """Take in that a trial of the user's ends, and with the last one the search if it can."""
        del self.own.epochs[trial]
        is_over = self.own.has_finished and not self._has_trials
        return [*stop, Finish()] if is_over else [*stop]

    def _end(self, seconds: float) -> list[Decision]:
        stops: list[Decision] = [Stop(trial, _OVER) for trial in self.own.epochs]
        self.own.epochs.clear()
        is_over = [Finish()] if self.own.has_finished else None
        if is_over:
            return [*stops, *is_over]
        event = DeadlineReached(seconds)
        return [*stops, *self._checked(self.flow.handle(event), event)]

    def _pass(self, event: Event) -> list[Decision]:
        if self.own.has_finished:
            return []
        return self._without_end(self.flow.handle(event), event)

    def _checked(self, decisions: Any, to: Event | str) -> Sequence[Decision]:
        """Return the answer of the inner search; raise a `SearchError` if it cannot be one.

        The fields of decisions are looked at where the procedure is not dagsel's own.
        """
        call = f"handle({type(to).__name__})" if isinstance(to, Event) else f"{to}(context)"
        asked = f"{type(self.flow).__name__}.{call}"
        is_list = isinstance(decisions, list | tuple)
        wrong = [it for it in decisions if not isinstance(it, Decision)] if is_list else [decisions]
        if wrong:
            raise SearchError(
                f"{asked} must return a list of decisions, such as "
                f"[Train(trial, epochs)], [Finish()] or [], got {shown(wrong[0])}"
                f"{' in it' if is_list else ''}"
            )
        answer: Sequence[Decision] = decisions
        if not type(self.flow).__module__.startswith("dagsel."):
            for it in answer:
                if why := _why_wrong(it):
                    raise SearchError(f"{asked} returns {it!r}, which cannot be decided: {why}")
        return answer

    def _without_end(self, decisions: Any, to: Event | str) -> list[Decision]:
        """Note what the inner search asks for; leave out its end while trials of the user train."""
        decisions = self._checked(decisions, to)
        self.own.awaited += [None for decision in decisions if isinstance(decision, Ask | Add)]
        if Finish() not in decisions or not self._has_trials:
            return [*decisions]
        self.own.has_finished = True
        return [decision for decision in decisions if decision != Finish()]

    @property
    def _has_trials(self) -> bool:
        return bool(self.own.epochs) or any(self.own.awaited)


def _by_user(decision: Decision) -> Decision:
    """Return a decision at a deadline as one at a command: it is not the time that is over."""
    if isinstance(decision, Stop) and decision.reason == _OVER:
        return replace(decision, reason=ENDED_BY_USER)
    return decision


def _why_wrong(decision: Decision) -> str:
    """Say why the journal could not hold a decision, or it makes no sense; empty if it can."""
    try:
        DECISIONS.decode(DECISIONS.encode(decision))
    except ValueError as error:
        return str(error)
    takes_away = isinstance(decision, Train) and decision.epochs < 0
    return "epochs are 0 or more" if takes_away else ""
