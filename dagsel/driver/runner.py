"""Performs a flow's decisions and tells the flow what came of them.

In each turn the events that came in are put to the flow, events and decisions are written to the
journal together, and only then are the decisions performed. So after an interruption the journal
says all that was decided, and the next session performs again what may not have been performed.

Time and cost are in `clock`, the allowances of trials in `trial_limits`, states in `recovery`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dagsel.codec import plain_part
from dagsel.dispatch.events import FailRun, RestartWorker, ShardLoaded, TrialRests, UnitTrains
from dagsel.dispatch.units import Unit
from dagsel.driver.clock import RunClock
from dagsel.driver.commands import Commands
from dagsel.driver.entry_log import log_entry
from dagsel.driver.first_epoch import FirstEpoch
from dagsel.driver.idle_workers import IdleWorkers
from dagsel.driver.inbox import Inbox
from dagsel.driver.mending import Mending
from dagsel.driver.protocols import Engine, EntryLog, States
from dagsel.driver.recovery import Continuation, Orders, StoredStates
from dagsel.driver.rounds import Rounds
from dagsel.driver.scoring import Pool, Scores
from dagsel.driver.trial_limits import TrialLimits
from dagsel.driver.troubles import Troubles, end_by
from dagsel.errors import AllTrialsFailedError, TooLittleTimeError
from dagsel.flow import (
    Add,
    Ask,
    Asked,
    Clone,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Flow,
    Pause,
    Paused,
    Reported,
    Scale,
    Stop,
    Tick,
    Train,
    TrialFailed,
    WorkersChanged,
    save_state,
)
from dagsel.flow.events import as_heard
from dagsel.history.record import Record
from dagsel.history.tariff import Tariff
from dagsel.history.trial import TrialRecord
from dagsel.messages import (
    ENTRIES,
    Entry,
    FlowState,
    Message,
    Note,
    PieceRecord,
    SessionBegun,
    TooLittleTime,
    TrialReport,
    Turn,
    UnitRecord,
    WorkerRefused,
)
from dagsel.steering import Commanded, PauseTrial, ResumeTrial, SetLimits
from dagsel.study import StudyDriver
from dagsel.workloads.raised import raised

#: After so many turns, and half as many as before, the journal gets the flow's state for a resume.
TURNS_PER_SNAPSHOT = 500

logger = logging.getLogger("dagsel")


@dataclass(slots=True)
class Runner:
    """One search on one engine."""

    flow: Flow  # the search procedure; it has begun if the record has a context
    study: StudyDriver  # where trials come from and are told
    engine: Engine  # where units run, entered
    states: States  # where states are stored
    journal: EntryLog  # where what happens is written
    record: Record  # what has happened: empty, or what an earlier session has left
    metric: str  # name of the metric that the search is about; of several the first one
    seed: int = 0  # seed of the run
    about: str | None = None  # checksum of the run's settings, to stand in the journal
    # Raises an error if nothing can be trained with a configuration.
    check: Callable[[Any], None] = lambda config: None
    # Raises an error if so many workers cannot train a configuration together.
    check_gang: Callable[[Any, int], None] = lambda config, size: None
    # Turns a state of one configuration into one of another (`Clone`).
    adapt: Callable[[bytes, Any, Any], bytes] = lambda blob, config, new: blob
    pool: Pool | None = None  # makes metrics of what all validation shards have kept
    orders: Orders = lambda trial, epoch: None  # returns the orders of visits
    # Whether training with a configuration follows the metric of the epoch before.
    follows: Callable[[Any], bool] = lambda config: False
    foreseen: Sequence[float] | None = None  # metrics that it follows instead, by epoch
    # Bytes that a unit takes, as far as it is known, if its samples are halved so often.
    needs: Callable[[Any, int], int | None] = lambda config, halvings: None
    idle_workers: IdleWorkers = field(default_factory=IdleWorkers)  # on how many few trials train
    deadline_s: float | None = None  # when to end, in seconds since the run began; None: never
    budget_s: float | None = None  # what the workers may cost, in worker-seconds; None for no limit
    budget_money: float | None = None  # and in money, if they differ in their price
    observe: Callable[[Record], Any] = lambda record: None  # called whenever it has changed
    lead_s: float = 0.0  # seconds that this session has taken before: they count
    inbox: Inbox = field(default_factory=Inbox)  # what the user commands
    tariff: Tariff = field(default_factory=Tariff)  # by which new limits are read
    _entries: list[Entry] = field(default_factory=list)  # not written yet
    _events: deque[Turn] = field(default_factory=deque)  # nothing is decided on them yet
    _n_turns: int = 0
    _n_kept: int = 0  # of which the journal has the flow's state
    _n_passes: int = 0  # what is put to the flow before anything is performed is one pass
    _configs: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # of trials just drawn
    _clock: RunClock = field(init=False)
    _limits: TrialLimits = field(init=False)
    _stored: StoredStates = field(init=False)
    _rounds: Rounds = field(init=False)
    _mending: Mending = field(init=False)
    _troubles: Troubles = field(init=False)
    _first_epoch: FirstEpoch = field(init=False)
    _commands: Commands = field(init=False)

    def __post_init__(self) -> None:
        limits = (self.deadline_s, self.budget_s, self.budget_money)
        scores_parts = self.flow.traits.scores_parts
        clock = self._clock = RunClock(self.engine, *limits, scores_parts=scores_parts)
        metrics = tuple(goal.metric for goal in self.record.goals) or (self.metric,)
        scores = Scores(self.states, metrics, self.pool, self.record.validates)
        self._stored = StoredStates(self.states, self.record, self.adapt, scores)
        how = (self.orders, self.follows, self.foreseen, self.needs)
        self._rounds = Rounds(self.engine, self.record, self._note, *how)
        self._limits = TrialLimits(self.engine, self.record, clock, self.idle_workers, scores)
        parts = (self.engine, self.record, self._stored, self._rounds, self._limits)
        self._mending = Mending(*parts, self._note, self._write, self._fail)
        self._troubles = Troubles(self.record)
        self._first_epoch = FirstEpoch(self.record, clock, self._limits)
        about = (self.record, self.study, self.flow.traits, self._stored, clock, self.tariff)
        self._commands = Commands(self.inbox, self.engine, *about, self.check)

    def run(self) -> None:
        """Search until the flow has finished.

        Raises
        ------
        ClusterError
            If the run cannot go on.
        SearchError
            If the flow decides what cannot be done.
        AllTrialsFailedError
            If all trials fail in one way before any was scored.
        TooLittleTimeError
            If not one epoch can end within deadline and budget.
        """
        self._clock.begin(self.record, self.lead_s)
        self._note(SessionBegun(self.engine.wall() - self.lead_s, self.record.seconds, self.about))
        self._clock.tell()
        if self.record.context is None:
            self._begin()
        elif not self._clock.are_over:
            self._go_on()
        self._turn()
        self._use_idle_workers()
        while not self.record.finished:
            self._clock.tell()
            timeout_s = 0.0 if self.study.stopped else self._limits.patience_s(self.record.wake_at)
            if not [*map(self._hear, self.engine.messages(timeout_s=timeout_s))]:
                self._troubles.check_stall(self._clock.seconds, self.engine)
            self._watch()
            self._turn()
            self._obey()
            self._troubles.warn_of_rest()
            self._use_idle_workers()
            self.engine.check_alive()
            self.observe(self.record)

    # ---- how a session begins

    def _begin(self) -> None:
        engine, clock, record = self.engine, self._clock, self.record
        taken = (engine.capacity, clock.seconds, clock.worker_seconds)
        known = (self.flow.traits.uses_pruner, record.goals, record.n_shards)
        context = Context(engine.n_workers, record.direction, self.seed, *taken, *known)
        decisions = self.flow.start(context)
        self._take(Turn(None, (), context=context), decisions)
        self._do(decisions)

    def _go_on(self) -> None:
        """Do what an earlier session has decided and may not have done."""
        self._write()  # what it does may be interrupted, and has taken time
        live = [trial for trial in self.record.trials.values() if trial.is_live]
        for trial in live:
            self._stored.keep_scored(trial)
            self._limits.tell(trial)
        plans = [plan for trial in live if (plan := self._mending.plan(trial)) is not None]
        self._stored.drop_ended()  # a clone may have needed them until here
        self._rounds.send(plans)
        for ask, _ in tuple(self.record.awaited):  # first: a clone's source may end by a report
            self._ask(ask)
        for trial in live:
            self._report_if_complete(trial)
        if self.record.wanted is not None:
            self.engine.scale(self.record.wanted)

    # ---- turns

    def _turn(self) -> None:
        """Put what has happened to the flow, write it down, do what was decided."""
        while self._events or self._entries:
            steps: list[Decision | Event] = []
            self._n_passes += bool(self._events)
            while self._events:
                turn = self._events.popleft()
                event = turn.event
                if event is None or self._is_stale(event):
                    continue
                decisions = self.flow.handle(as_heard(event, self._is_infeasible))
                self._take(turn, decisions)
                self._troubles.warn_of(event)
                match event:
                    case Asked(trials):
                        self._welcome(trials)
                    case Reported(trial):  # its next epoch may have ended in the same moment
                        self._report_if_complete(self.record.trials[trial])
                steps += [event, *decisions]
            self._do(steps)
        self._end_if_hopeless()

    def _end_if_hopeless(self) -> None:
        """End the run if its trials fail in one way and none has trained, or none can in time."""
        if (verdict := self._troubles.verdict or self._first_epoch.look()) is None:
            return
        self._note(verdict)
        self._do([])
        if isinstance(verdict, Note):
            return
        self._end_all()
        if isinstance(verdict, TooLittleTime):
            raise TooLittleTimeError(verdict.text)
        raise AllTrialsFailedError(verdict.text) from self._troubles.cause

    def _is_infeasible(self, trial: int) -> bool:
        return not self.record.trials[trial].is_feasible

    def _is_stale(self, event: Event) -> bool:
        match event:
            case Paused() if self._limits.is_outdated(event):
                return True  # it was told something else in this very turn
            case Reported(trial) | Paused(trial) | TrialFailed(trial):
                return not self.record.trials[trial].is_live
            case Tick(seconds):  # it may have said in this very turn that it wants to sleep longer
                return self.record.finished or seconds < (self.record.wake_at or 0.0)
            case _:
                return self.record.finished

    def _take(self, turn: Turn, decisions: Sequence[Decision]) -> None:
        self._limits.check_gangs(decisions)
        decided = tuple(decisions)
        self._note(self._clock.timed_turn(turn, decisions=decided, pass_=self._n_passes))
        self._n_turns += 1
        # The state grows with the turns: kept after ever more, it takes time in proportion to them.
        if self._n_turns - self._n_kept >= max(TURNS_PER_SNAPSHOT, self._n_kept // 2):
            self._note(FlowState(save_state(self.flow)))
            self._n_kept = self._n_turns

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._note(Note(text))

    def _note(self, entry: Entry) -> None:
        # A flow's own values are taken in as a resumed run reads them.
        if isinstance(entry, Turn) and not ENTRIES.is_read_back(entry):
            entry = ENTRIES.decode(ENTRIES.encode(entry))
        self._entries.append(entry)
        self.record.add(entry)
        log_entry(entry)

    def _write(self) -> None:
        self.journal.append(self._entries)
        self._entries = []

    def _welcome(self, trials: Iterable[int]) -> None:
        for trial in trials:
            self.record.configure({trial: (config := self._configs.pop(trial))})
            try:
                self.check(config)
            except Exception as error:  # noqa: BLE001 - the trial's own code raised it
                self._troubles.fails(error)
                told = raised(error, by_check=True)
                self._put(Turn(TrialFailed(trial, told.reason), (), raised=told))

    # ---- what was decided

    def _do(self, steps: Sequence[Decision | Event]) -> None:
        """Perform decisions, once they are written down."""
        self._write()
        trains: dict[int, Train] = {}
        due: list[Continuation] = []
        for step in steps:
            match step:
                case Reported(trial, epoch):
                    self.engine.release(trial, epoch)
                    self._stored.reported(trial, epoch)
                    due.append(self._rounds.due(self.record.trials[trial]))
                case Ask() | Add() if not self.record.finished:  # by what was decided after it
                    self._ask(step)
                case Train(trial, epochs) if self.record.trials[trial].is_live:
                    epochs += trains[trial].epochs if trial in trains else 0
                    trains[trial] = replace(step, epochs=epochs)
                case Pause(trial):
                    self._train(trains.pop(trial, None))
                    self._limits.hold(self.record.trials[trial])
                case Commanded(PauseTrial(trial) | ResumeTrial(trial)):
                    self._limits.tell(self.record.trials[trial])
                case Commanded(SetLimits() as limits):
                    self._clock.set(limits)
                case Scale(n_workers):
                    self.engine.scale(n_workers)
                case Stop(trial) | TrialFailed(trial):
                    self._end(trial)
                case Clone(_, target):
                    if reason := self._stored.adopt(self.record.trials[target]):
                        self._fail(target, reason)
                case Finish():
                    self._end_all()
        self._train(*trains.values(), due=due)
        self._stored.drop_ends()  # a clone may need them until here

    def _ask(self, ask: Ask | Add) -> None:
        if self._clock.are_over and self.record.trials:
            return  # each of them may fail at once, and another one be asked for
        configs, exhausted = self.study.draw(ask)
        self._configs |= configs
        if exhausted and isinstance(ask, Ask) and ask.sampling != "grid" and len(configs) < ask.n:
            self._warn(self.study.why_no_more())
        params = {trial: self.study.params(trial) for trial in configs}
        infeasible = tuple(filter(self.study.is_infeasible, configs))
        asked = Asked(tuple(configs), exhausted, tuple(map(plain_part, configs.values())))
        attrs = {trial: its for trial in configs if (its := self.study.attrs(trial))} or None
        self._events.append(Turn(asked, (), params=params, infeasible=infeasible, attrs=attrs))

    def _train(self, *trains: Train | None, due: Iterable[Continuation] = ()) -> None:
        plans = [*due]
        for train in trains:
            if train is None:
                continue
            trial = self.record.trials[train.trial]
            if reason := self._limits.why_no_gang(trial, self.check_gang):
                self._fail(trial.number, reason)
                continue
            self._stored.keep_scored(trial)
            self._limits.tell(trial)
            if not self.study.is_live(trial.number):  # it had ended when the search was extended
                self.study.reopen(trial.number)
                plans += [plan] if (plan := self._mending.plan(trial)) is not None else []
            elif train.epochs:
                plans.append(self._rounds.more(trial, train.epochs))
        self._rounds.send(plans)

    def _use_idle_workers(self) -> None:
        """Train few trials on several workers each, or release some; note which."""
        for note in self._limits.use_idle_workers():
            self._note(Note(note))

    def _end_all(self) -> None:
        for trial in self.study.live:
            self._end(trial)

    def _end(self, number: int) -> None:
        """Tell the study how a trial has ended, and forget what is not needed of it."""
        trial = self.record.trials[number]
        self.engine.stop(number)
        self._rounds.forget(number)
        self._limits.forget(number)
        match trial.state:
            case "complete":
                self.study.complete(number, *trial.values)
            case "pruned":
                self.study.prune(number)
            case "failed":
                self.study.fail(number, trial.reason, trial.traceback)
        self._stored.ended(number)

    # ---- what comes in

    def _obey(self) -> None:
        """Do what the user has commanded, one command after the other."""
        while (command := self._commands.next(self._clock.seconds)) is not None:
            self._put(command)
            self._turn()
            self._commands.done()

    def _watch(self) -> None:
        """Tell the flow of workers and of the time."""
        if self.engine.n_workers not in (0, self.record.n_workers):
            self._tell(WorkersChanged(self.engine.n_workers, self._clock.seconds))
        wake_at, clock = self.record.wake_at, self._clock
        if wake_at is not None and clock.seconds >= wake_at and not clock.are_over:
            self._tell(Tick(clock.seconds))
        if clock.are_over:
            self._tell(DeadlineReached(clock.seconds))
            self._turn()
            if not self.record.finished:
                self._take(Turn(None, ()), [Finish()])
                self._do([Finish()])

    def _hear(self, message: Message) -> None:
        match message:
            case UnitRecord():
                self._unit_done(message)
            case PieceRecord():
                self._note(self._clock.timed(message))
            case TrialRests(trial, number):
                self._rests(self.record.trials[trial], number)
            case UnitTrains(unit):
                self._troubles.begins(unit.trial)
            case TrialReport():
                self._failed(message)
            case ShardLoaded() | Note():
                self._note(message)
            case WorkerRefused(_, reason) | RestartWorker(_, reason):
                self._warn(reason)
            case FailRun() as failure:
                end_by(failure)

    def _unit_done(self, done: UnitRecord) -> None:
        self._note(self._clock.timed(done))
        unit = done.unit
        trial = self.record.trials[unit.trial]
        if unit.kind == "check":
            self._put(self._limits.checked(done))
            return
        self._mending.ask_again(done)
        self._report_if_complete(trial)
        end = (trial.number, *self._stored.end_of(trial))
        if self._rounds.repairs(unit.trial) and unit == Unit("train", *end):
            self._rounds.repaired(trial)

    def _rests(self, trial: TrialRecord, number: int) -> None:
        """Tell the flow of a trial that has come to rest, once its state is scored."""
        if self._limits.is_awaited(trial, number):
            self._report_if_complete(trial)
            self._put(self._limits.rests(trial))

    def _report_if_complete(self, trial: TrialRecord) -> None:
        epoch = len(trial.epochs) + 1
        tally = trial.tallies.get(epoch)
        if tally is None or not (tally.is_complete if self.record.validates else tally.is_trained):
            return  # the trial has ended, or there is more to come
        if self._is_reported(trial.number, epoch):
            return
        score = self._stored.scores.of(tally, f"epoch {epoch}", trial.number, epoch)
        if score.why_not:
            self._put(Turn(TrialFailed(trial.number, score.why_not), (), raised=score.raised))
            return
        values = self.record.values(score.value, score.metrics)
        self.study.report(trial.number, epoch, *values)
        prune = self.flow.traits.uses_pruner and self.study.should_prune(trial.number)
        switches = tuple(trial.switches[trial.n_switches_told :])
        told = (score.value, score.metrics, self._clock.seconds, prune, switches)
        self._tell(Reported(trial.number, epoch, *told))

    def _is_reported(self, trial: int, epoch: int) -> bool:
        told = (turn.event for turn in self._events if isinstance(turn.event, Reported))
        return any((event.trial, event.epoch) == (trial, epoch) for event in told)

    def _fail(self, trial: int, reason: str) -> None:
        self._tell(TrialFailed(trial, reason))

    def _tell(self, event: Event) -> None:
        """Put an event to the flow in the next turn."""
        self._put(Turn(event, ()))

    def _put(self, turn: Turn | None) -> None:
        if turn is not None:
            self._events.append(turn)

    def _failed(self, report: TrialReport) -> None:
        trial = self.record.trials[report.trial]
        if not trial.is_live:
            return
        fails = self._mending.unless_it_goes_on(report)
        if fails is None:
            return
        report = fails
        if report.raised is not None and not self.record.has_scored:
            self._troubles.fails(self.engine.raised(trial.number))
        failed = TrialFailed(trial.number, report.reason)
        self._put(Turn(failed, (), traceback=report.traceback, raised=report.raised))
