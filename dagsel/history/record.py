"""What a run has done: trials, epochs and units, folded from the entries of its journal.

A run writes its journal entry by entry (`dagsel.messages.ENTRIES`) and takes each one in with
`Record.add` at once; a resumed run reads the journal and takes the same entries in. What is known
of one trial is in `dagsel.history.trial`; tables of it are made in `dagsel.history.tables`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, assert_never

from dagsel.dispatch.events import ShardLoaded
from dagsel.errors import SearchError
from dagsel.flow import (
    Add,
    Ask,
    Asked,
    Clone,
    Context,
    Decision,
    Direction,
    Extended,
    Finish,
    Goal,
    Keep,
    Outcome,
    Pause,
    Paused,
    Reported,
    Scale,
    Stop,
    Tick,
    Train,
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.history.course import Mark, Moment, RoundRecord, TrainedSpan, began
from dagsel.history.packed import Packed
from dagsel.history.tally import EpochTally
from dagsel.history.trial import Best as Best
from dagsel.history.trial import EpochRecord, Scored, TrialRecord, TrialState
from dagsel.messages import (
    Abandoned,
    BestLost,
    Entry,
    FailedAlike,
    FlowState,
    Note,
    PartFound,
    PieceRecord,
    RoundSent,
    SessionBegun,
    SessionEnded,
    StatePlace,
    StatesFound,
    TooLittleTime,
    Turn,
    UnitRecord,
)
from dagsel.planning.capacity import Plan
from dagsel.planning.pareto import dominates
from dagsel.steering import Commanded, FinishSearch, PauseTrial, ResumeTrial, SetLimits, UserCommand
from dagsel.workloads.raised import RanOut


@dataclass(slots=True)
class Record:
    """All that a run has done."""

    run: str  # identifier of the run
    n_shards: int = 1  # training shards of the data set
    direction: Direction = "minimize"  # whether smaller or larger values are better
    # A trial is worth its best state, and the best of all trials is the best; or its last one, and
    # a completed trial is better than one that is not.
    keep: Keep = "best"
    top_k: int = 1  # the states of so many of the best trials stay
    # The metrics, if the search is about several; then a trial is worth its last state, and those
    # of the Pareto front stay. `direction` is that of the first one.
    goals: tuple[Goal, ...] = ()
    validates: bool = True  # whether epochs are scored; if not, an epoch's value is its loss
    trials: dict[int, TrialRecord] = field(default_factory=dict)
    units: MutableSequence[UnitRecord] = field(default_factory=Packed)
    rounds: list[RoundRecord] = field(default_factory=list)
    loads: list[tuple[str, int]] = field(default_factory=list)  # worker and shard
    # Of each trial and epoch the shard at each position.
    visited: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    # What was found in the store of unreported epochs: when, and after how many of `units`.
    found: list[tuple[float, int, StatesFound]] = field(default_factory=list)
    pieces: list[PieceRecord] = field(default_factory=list)  # of units that were stopped
    wake_at: float | None = None  # when the flow wants to be told of the time; None if it does not
    wanted: int | None = None  # how many workers the flow wants; None if it has not said
    gives_gangs: bool = False  # whether the flow has ever trained a trial on several workers
    worker_seconds: float = 0.0  # what the workers have cost until then, from request to release
    money: float | None = None  # the same in money, if the workers differ in their price
    # The best trials that have ended, best first; of several metrics the Pareto front.
    top: list[Best] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    context: Context | None = None  # what the flow was told at its start; None before
    plans: list[tuple[float, Plan]] = field(default_factory=list)  # and when each was made
    course: Packed[Moment] = field(default_factory=Packed)  # what it had taken, in order of time
    trained: Packed[TrainedSpan] = field(default_factory=Packed)  # without what was found stored
    # Not answered by `Asked`; and by which command of the user.
    awaited: deque[tuple[Ask | Add, str | None]] = field(default_factory=deque)
    added: dict[str, int] = field(default_factory=dict)  # the user's trials, by their commands
    commands: dict[str, UserCommand] = field(default_factory=dict)  # those of the user, by id
    # When each session began, and when the run would have, had it never lain dead; epoch seconds.
    sessions: list[tuple[float, float]] = field(default_factory=list)
    n_epochs_decided: int = 0
    n_workers: int = 0  # what the flow was last told of workers
    # Time since the run began when the last turn was taken, without the time that it lay dead.
    seconds: float = 0.0
    finished: bool = False
    extended: Extended | None = None  # what the search was told when it last went on after its end
    limits: SetLimits | None = None  # those that were set since the search began
    resumable: set[int] = field(default_factory=set)  # trials that had ended by then
    # Trials whose states stay, as Ctrl-C has ended the search and a resume may go on with it.
    interrupted: set[int] = field(default_factory=set)
    abandoned: str = ""  # why the run was given up, if it was
    has_scored: bool = False  # whether an epoch has ended, or a state was checked
    failed_alike: str = ""  # the error of all trials, if the run has ended by it
    too_little_time: str = ""  # why not one epoch could end in time, if the run has ended by it
    # A heap of what trials are or were worth, best first: is it infeasible, loss, is it a copy's.
    _values: list[tuple[bool, float, bool, int]] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Take in an entry of the journal."""
        match entry:
            case UnitRecord():  # first: most are that
                self._note_spent(entry)
                self._add_unit(entry)
            case SessionBegun(at, seconds):
                self.sessions.append((at, at - seconds))
                self._mark("session")
            case SessionEnded(_, seconds, worker_seconds, money):
                self.worker_seconds, self.money = worker_seconds, money
                self._mark("end", seconds)
            case Abandoned(_, reason):
                self.abandoned, self.finished, self.interrupted = reason, True, set()
                for trial in [t.number for t in self.trials.values() if t.is_live]:
                    self._end(trial, "failed", reason, has_model=True)
            case PieceRecord(unit):
                self._note_spent(entry)
                self.pieces.append(entry)
                if unit.trial in self.trials:
                    self.trials[unit.trial].spend(entry)
            case Turn(event, decisions):
                self._note_spent(entry)
                if event is not None:
                    self._hear(entry)
                self.plans += [(self.seconds, it) for it in decisions if isinstance(it, Plan)]
                if entry.context is not None:
                    self.context = entry.context
                    self.n_workers = entry.context.n_workers
                self.decide(decisions, by=event.adds if isinstance(event, Commanded) else None)
                if entry.seconds is not None:
                    kinds = {type(decision) for decision in decisions}
                    begins = {Train, Wake} <= kinds and not kinds.isdisjoint({Stop, Plan})
                    self._mark("stage" if begins else "")
            case StatesFound():
                self._add_stored(entry)
            case PartFound(trial, share):
                self.trials[trial].share = share
            case BestLost(trial):
                self._score(self.trials[trial], self._end_of(self.trials[trial]), afresh=True)
            case RoundSent(number, start, chains):
                epochs = frozenset((t, e) for t, a, b in chains for e in range(a, b))
                self.rounds.append(RoundRecord(number, epochs, start))
            case ShardLoaded(worker, shard):
                self.loads.append((worker, shard))
            case RanOut(unit):
                self.trials[unit.trial].run_out(entry)
            case Note(text):
                self.notes.append(text)
            case FailedAlike(text):
                for trial in [t.number for t in self.trials.values() if t.is_live]:
                    self._end(trial, "failed", "all trials before it failed alike")
                self.failed_alike, self.finished = text, True
            case TooLittleTime(text):
                for trial in [t.number for t in self.trials.values() if t.is_live]:
                    self._end(trial, "pruned", "there is too little time for one epoch")
                self.too_little_time, self.finished = text, True
            case FlowState():
                pass
            case _:
                assert_never(entry)

    def _add_unit(self, done: UnitRecord) -> None:
        self.units.append(done)
        unit, trial = done.unit, self.trials.get(done.unit.trial)
        self.has_scored |= unit.kind == "check"  # of an epoch there may be metrics of the whole set
        if unit.kind == "train":
            self.visited.setdefault((unit.trial, unit.epoch), {})[unit.position] = done.shard
        if trial is None or unit.kind == "check":
            return
        if unit.kind == "train":
            trial.spend(done)
            if trial.kept is not None and unit[2:] == trial.kept.place[:2]:
                trial.lacks_kept = False
        if trial.is_live and unit.epoch > len(trial.epochs) and trial.counts(done):
            trial.tallies.setdefault(unit.epoch, EpochTally(self.n_shards)).add(done)

    def _note_spent(self, entry: UnitRecord | PieceRecord | Turn) -> None:
        if entry.seconds is not None:
            self.seconds = entry.seconds
        if entry.worker_seconds is not None:
            self.worker_seconds = entry.worker_seconds
        if entry.money is not None:
            self.money = entry.money
        if entry.seconds is not None and not isinstance(entry, Turn):
            self._mark()
            if entry.unit.kind == "train" and not entry.recovered:
                self.trained.append(TrainedSpan.of(entry, began(self.sessions), entry.seconds))

    def _mark(self, mark: Mark = "", seconds: float | None = None) -> None:
        now = self.seconds if seconds is None else seconds
        last = self.course.newest  # a session goes on from there, before its workers were released
        now = max(now, last.seconds) if last else now
        moment = Moment(now, self.worker_seconds, self.n_workers, self.wanted, mark, self.money)
        if moment != last:
            self.course.append(moment)

    def _add_stored(self, found: StatesFound) -> None:
        trial = self.trials[found.trial]
        # States of epochs that were reported may be another trial's.
        news = tuple(state for state in found.states if state.epoch > len(trial.epochs))
        for state in news:
            self.visited.setdefault((trial.number, state.epoch), {}).update(enumerate(state.visits))
        now = began(self.sessions) + self.seconds
        self.found.append((now, len(self.units), replace(found, states=news)))
        trial.follow(found.states, self.n_shards)

    def _hear(self, turn: Turn) -> None:
        match turn.event:
            case Asked(trials):
                if self.awaited and (id_ := self.awaited.popleft()[1]) is not None:
                    (self.added[id_],) = trials
                params, attrs = turn.params or {}, turn.attrs or {}
                for n in trials:
                    is_feasible, its = n not in turn.infeasible, attrs.get(n, {})
                    self.trials[n] = TrialRecord(n, {}, params[n], is_feasible, attrs=its)
            case Reported(trial, epoch, value, metrics, seconds, _, switches):
                self.trials[trial].n_switches_told += len(switches)
                tally = self.trials[trial].tallies.pop(epoch, None)
                loss, digest = (tally.train_loss, tally.digest) if tally else (float("nan"), "")
                done = EpochRecord(epoch, value, metrics, loss, seconds, digest)
                self.trials[trial].epochs.append(done)
                self.has_scored = True
                self.trials[trial].last_values = self.values(value, metrics)
                self.trials[trial].last_lineage = None
                self._score(self.trials[trial], self._end_of(self.trials[trial]))
                if tally and tally.lacks_loss and math.isfinite(value):
                    self.trials[trial].warn(
                        f"the training loss of epoch {epoch} is NaN, the metric {value:.4g}: "
                        "see that the loss is reported, and a number"
                    )
            case TrialFailed(trial, reason):
                self._end(trial, "failed", reason, turn.traceback or "")
                self.trials[trial].raised = turn.raised
            case Paused() as event:
                resting = self.trials[event.trial]
                scored = resting.rest(event, turn.place, self.values(event.value, event.metrics))
                if scored is not None:
                    self._score(resting, scored)
            case WorkersChanged(n_workers):
                self.n_workers = n_workers
            case Tick():
                self.wake_at = None
            case Commanded(command, id_):
                self.commands[id_] = command
                if isinstance(command, PauseTrial | ResumeTrial):
                    self.trials[command.trial].paused_by_user = isinstance(command, PauseTrial)
                elif isinstance(command, SetLimits):
                    self.limits = command
                elif isinstance(command, FinishSearch) and command.resumable:
                    live = {trial.number for trial in self.trials.values() if trial.is_live}
                    self.interrupted = live | {best.trial for best in self.top}
            case Extended(ended=ended) as event:
                self.extended, self.limits, self.finished = event, event.limits, False
                self.resumable = {it.trial for it in ended}
                self.awaited.clear()
                self.interrupted.clear()

    def decide(self, decisions: Iterable[Decision], by: str | None = None) -> None:
        """Take in what a flow has decided; `by` is the user's command that has added a trial.

        Raises
        ------
        SearchError
            If a decision cannot be taken; nothing of it is.
        """
        for decision in decisions:
            match decision:
                case Ask() | Add():
                    self.awaited.append((decision, by))
                case Train(trial, epochs, _, gang):
                    if trial in self.resumable:
                        self._reopen(trial)
                    self._live(trial, "trains").allow(decision)
                    self.gives_gangs |= gang > 1
                    self.n_epochs_decided += epochs
                case Pause(trial):
                    live = self._live(trial, "pauses")
                    live.is_held, live.pausing, live.cut = True, decision, None
                    live.n_told += 1
                case Scale(n_workers):
                    self.wanted = n_workers
                case Wake(seconds):
                    self.wake_at = seconds
                case Stop(trial, reason, outcome):
                    self._stop(trial, reason, outcome)
                case Clone(source, target, config):
                    self._clone(source, target, config)
                case Finish():
                    for trial in [t.number for t in self.trials.values() if t.is_live]:
                        self._stop(trial, "the search has ended", "pruned")
                    self.finished = True
                    self.resumable.clear()

    def _live(self, number: int, what: str) -> TrialRecord:
        trial = self.trials.get(number)
        if trial is None or not trial.is_live:
            state = "unknown" if trial is None else trial.state
            raise SearchError(f"the flow {what} trial {number}, which is {state}")
        return trial

    def _reopen(self, number: int) -> None:
        self.resumable.remove(number)
        self.trials[number].reopen(has_kept=any(best.trial == number for best in self.top))
        self.top = [best for best in self.top if best.trial != number]

    def _clone(self, source: int, target: int, config: Mapping[str, Any]) -> None:
        origin, taker = self._live(source, "clones"), self._live(target, "clones onto")
        if not origin.epochs or not taker.is_paused:
            raise SearchError(
                f"the flow clones trial {source} onto trial {target}: the source must have "
                "reported an epoch, and the target must be paused"
            )
        taker.adopt(origin, config)
        if taker.epochs:
            self._score(taker, self._end_of(taker), afresh=True)

    def _stop(self, number: int, reason: str, outcome: Outcome) -> None:
        trial = self._live(number, "stops")
        is_complete = bool(trial.values) and (outcome == "complete" or self._is_best(trial))
        self._end(number, "complete" if is_complete else "pruned", reason)

    def _is_best(self, trial: TrialRecord) -> bool:
        """Whether no other trial is better; what is best is a result, however it ended."""
        if self.goals:
            ended = [self.losses(self.trials[best.trial]) for best in self.top]
            losses = self.losses(trial)
            return trial.is_feasible and not any(dominates(other, losses) for other in ended)
        return self.keep == "best" and self.leading is trial

    def _end(
        self,
        number: int,
        state: TrialState,
        reason: str,
        traceback: str = "",
        *,
        has_model: bool = False,  # whether one that fails may be the best so far
    ) -> None:
        trial = self.trials[number]
        if state == "failed" and trial.former is not None:  # it keeps the result that it had
            state, before = trial.former
            trial.warn(f"it failed as it trained on: {reason}")
            reason = before
        trial.state, trial.reason, trial.traceback = state, reason, traceback
        trial.tallies.clear()
        self.n_epochs_decided -= trial.n_decided - len(trial.epochs)
        if (state == "failed" and not has_model) or trial.kept is None or trial.lacks_kept:
            return
        place = trial.kept.place
        told = (trial.kept.value, state == "complete", place.is_partial, trial.copied_check)
        best = Best(number, place.epoch, place.position, *told)
        if self.goals:
            if trial.is_feasible:
                self._join_front(best)
        else:
            self.top = sorted([*self.top, best], key=self._rank, reverse=True)[: self.top_k]

    def _join_front(self, new: Best) -> None:
        """Add a trial to the Pareto front, unless one of it dominates it."""
        losses = self.losses(self.trials[new.trial])
        others = [(best, self.losses(self.trials[best.trial])) for best in self.top]
        if not any(dominates(theirs, losses) for _, theirs in others):
            self.top = [best for best, theirs in others if not dominates(losses, theirs)]
            self.top.append(new)

    @property
    def best(self) -> Best | None:
        """The best of the trials that have ended; None if there is none, or are several metrics."""
        return self.top[0] if self.top and not self.goals else None

    def _rank(self, best: Best) -> tuple[bool, bool, float, bool, int]:
        # Of equal ones the first drawn, as in Optuna, whichever ended first; a copy comes last.
        counts, trial = self.keep == "best" or best.is_complete, self.trials[best.trial]
        is_own = not trial.worth_is_copied
        return trial.is_feasible, counts, -self.loss(best.value), is_own, -best.trial

    def loss(self, value: float) -> float:
        """Return a value of the (first) metric that is better when smaller."""
        return Goal("", self.direction).loss(value)

    # ---- what trials are worth

    def _end_of(self, trial: TrialRecord) -> Scored:
        place = StatePlace(len(trial.epochs), self.n_shards - 1)
        return Scored(trial.last_values, place.epoch, place, lineage=trial.last_lineage)

    def _score(self, trial: TrialRecord, scored: Scored, *, afresh: bool = False) -> None:
        """Take in what a state of a trial is worth; `afresh`: those before it do not count."""
        is_better = trial.kept is None or self.loss(scored.value) < self.loss(trial.kept.value)
        if afresh or is_better or self.keep == "last":
            trial.kept, trial.lacks_kept = scored, False
            heappush(self._values, self._worth(trial, scored))

    def _worth(self, trial: TrialRecord, kept: Scored) -> tuple[bool, float, bool, int]:
        return not trial.is_feasible, self.loss(kept.value), kept.lineage is not None, trial.number

    def values(self, value: float | None, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return what a search is about of the metrics of a state; empty if it was not scored."""
        if value is None:
            return ()
        return tuple(metrics[goal.metric] for goal in self.goals) or (value,)

    def losses(self, trial: TrialRecord) -> tuple[float, ...]:
        """Return the losses of a scored trial of a search for several metrics."""
        return tuple(g.loss(value) for g, value in zip(self.goals, trial.values, strict=True))

    @property
    def leading(self) -> TrialRecord | None:
        """The trial that is worth most now, ended or not; None if none, and of several metrics."""
        while self._values and not self.goals:
            trial = self.trials[self._values[0][-1]]
            is_worth = trial.kept and self._worth(trial, trial.kept) == self._values[0]
            if is_worth and trial.state != "failed":
                return trial
            heappop(self._values)  # it was worth that
        return None

    def configure(self, configs: Mapping[int, Mapping[str, Any]]) -> None:
        """Set the configurations that were drawn for trials."""
        for number, config in configs.items():
            self.trials[number].drawn = self.trials[number].config = config
        for trial in [self.trials[number] for number in configs if self.trials[number].adoptions]:
            trial.config = {**self.trials[trial.lineage.root].drawn, **trial.lineage.changes}

    def order(self, trial: int, epoch: int) -> tuple[int, ...] | None:
        """Return the order of visits of an epoch; None if it was not trained to its end."""
        order = tuple(shard for _, shard in sorted(self.visited.get((trial, epoch), {}).items()))
        return order if sorted(order) == list(range(self.n_shards)) else None

    def visits(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the order of visits of each epoch that was trained to its end."""
        orders = {place: self.order(*place) for place in self.visited}
        return {place: order for place, order in orders.items() if order is not None}

    def timed(self, first: int = 0) -> list[UnitRecord]:
        """List the training units that were trained in one go, of `units` from the first one on.

        Of the others only a part of the time is known.
        """
        cut = {piece.unit for piece in self.pieces}
        return [
            done
            for done in self.units[first:]
            if done.unit.kind == "train" and not done.recovered and done.unit not in cut
        ]

    @property
    def switches(self) -> list[float]:
        """What each change of a trial's number of workers has cost, in seconds of its time."""
        return [seconds for trial in self.trials.values() for seconds in trial.switches]

    @property
    def n_live(self) -> int:
        """Trials that are neither complete nor pruned nor failed."""
        return sum(trial.is_live for trial in self.trials.values())

    @property
    def n_epochs(self) -> int:
        """Epochs that trials have ended."""
        return sum(len(trial.epochs) for trial in self.trials.values())

    @property
    def failures(self) -> list[TrialRecord]:
        """Trials that have failed."""
        return [trial for trial in self.trials.values() if trial.state == "failed"]
