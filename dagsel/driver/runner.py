"""Performs a flow's decisions and tells the flow what came of them.

What happens is first an entry of the journal and then true: in each turn the events that came in
are put to the flow, events and decisions are written to the journal together, and only then are the
decisions performed. So a process that dies leaves a journal that says all that was decided, and the
one that goes on performs again what may not have been performed.

What needs no turn to be right is next to it: time and cost in `dagsel.driver.clock`, the terms
of trials in `dagsel.driver.trial_limits`, their states in `dagsel.driver.recovery`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from dagsel.codec import Json, to_json
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.driver.clock import RunClock
from dagsel.driver.idle_workers import IdleWorkers
from dagsel.driver.protocols import Engine, EntryLog, Message, States
from dagsel.driver.recovery import Continuation, StoredStates, reconcile
from dagsel.driver.trial_limits import Happening, TrialLimits
from dagsel.errors import ClusterError, SearchError
from dagsel.flow import (
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
    encode,
    save_state,
)
from dagsel.history.record import Entry, Record
from dagsel.history.trial import TrialRecord
from dagsel.study import StudyDriver

#: After so many turns the journal gets the flow's state, so that a resume repeats no more of them.
TURNS_PER_SNAPSHOT = 500

Observer: TypeAlias = Callable[[Record], None]
#: Of a trial and an epoch the order of its visits; None binds them late.
Orders: TypeAlias = Callable[[int, int], "tuple[int, ...] | None"]


def late(trial: int, epoch: int) -> None:
    """Leave the order of visits to the dispatcher."""


@dataclass(slots=True)
class Runner:
    """One search on one engine.

    Parameters
    ----------
    flow
        The search procedure. It has begun if the record has a context.
    study
        Where trials come from and are told.
    engine
        Where units run, entered.
    states
        Where states are stored.
    journal
        Where what happens is written.
    record
        What has happened: empty, or what an earlier session has left.
    metric
        Name of the metric that the search is about.
    seed
        Seed of the run.
    check
        Raises an error if nothing can be trained with a configuration.
    check_gang
        Raises an error if so many workers cannot train a configuration together.
    adapt
        Turns a state of one configuration into one of another (`Clone`).
    orders
        Fixes the orders of visits.
    crews
        How few trials are trained on many workers.
    deadline_s
        When to end, in seconds since the run began; None for no limit.
    budget_s
        What the workers may cost, in worker-seconds; None for no limit.
    observe
        Called with the record whenever something has changed.
    """

    flow: Flow
    study: StudyDriver
    engine: Engine
    states: States
    journal: EntryLog
    record: Record
    metric: str
    seed: int = 0
    check: Callable[[Any], None] = lambda config: None
    check_gang: Callable[[Any, int], None] = lambda config, size: None
    adapt: Callable[[bytes, Any, Any], bytes] = lambda blob, config, new: blob
    orders: Orders = late
    crews: IdleWorkers = field(default_factory=IdleWorkers)
    deadline_s: float | None = None
    budget_s: float | None = None
    observe: Observer = lambda record: None
    _entries: list[Entry] = field(default_factory=list)
    _events: deque[Happening] = field(default_factory=deque)
    _n_turns: int = 0
    _n_passes: int = 0  # what is put to the flow before anything is performed is one pass
    _configs: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # of trials just drawn
    _repairs: dict[int, list[Continuation]] = field(
        default_factory=dict
    )  # by trial: what waits for one
    _limits: RunClock = field(init=False)
    _terms: TrialLimits = field(init=False)
    _stored: StoredStates = field(init=False)

    def __post_init__(self) -> None:
        self._limits = RunClock(self.engine, self.deadline_s, self.budget_s)
        self._terms = TrialLimits(self.engine, self.record, self._limits, self.crews, self.metric)
        self._stored = StoredStates(self.states, self.record, self.adapt)

    def run(self) -> None:
        """Search until the flow has finished.

        Raises
        ------
        ClusterError
            If the run cannot go on.
        SearchError
            If the flow decides what cannot be done.
        """
        self._limits.begin(self.record)
        seconds = self.record.seconds
        self._note({"is": "session", "at": self.engine.wall(), "seconds": seconds})
        self._limits.tell()
        if self.record.context is None:
            self._begin()
        elif not self._limits.are_over:
            self._go_on()
        self._turn()
        self._man()
        while not self.record.finished:
            self._limits.tell()
            timeout_s = self._limits.patience_s(self.record.wake_at)
            for message in self.engine.messages(timeout_s=timeout_s):
                self._hear(message)
            self._watch()
            self._turn()
            self._man()
            self.engine.check_alive()
            self.observe(self.record)

    # ---- how a session begins

    def _begin(self) -> None:
        context = Context(self.engine.n_workers, self.record.direction, self.seed)
        decisions = self.flow.start(context)
        self._take(decisions, {"context": to_json(context)})
        self._do(decisions)

    def _go_on(self) -> None:
        """Do what an earlier session has decided and may not have done."""
        live = [trial for trial in self.record.trials.values() if trial.is_live]
        for trial in live:
            self._stored.keep_scored(trial)
            self._terms.tell(trial)
        self._stored.drop_ended()
        self._submit([plan for trial in live if (plan := self._mend(trial)) is not None])
        for trial in live:
            self._report_if_complete(trial)
        for ask in tuple(self.record.awaited):
            self._ask(ask)
        if self.record.wanted is not None:
            self.engine.scale(self.record.wanted)

    def _mend(self, trial: TrialRecord) -> Continuation | None:
        """Plan what is left of a trial from what the store holds of it."""
        if reason := self._stored.adopt_again(trial):
            self._fail(trial.number, reason)
        states = self._stored.look_up(trial)
        self._note({"is": "stored", "trial": trial.number, "states": states})
        plan = reconcile(trial, self.record.n_shards, states[-1] if states else None)
        if plan is None:
            reason = "CheckpointCorruptError: none of its stored states can be read"
            self._fail(trial.number, reason)
            return None
        if trial.is_paused and plan.epochs:  # its last state is damaged, and made anew
            self._repairs[trial.number] = []
        plan, share = self._stored.find_partial(plan)
        if share and plan.epochs.start > len(trial.epochs):
            self._note({"is": "partial", "trial": trial.number, "share": share})
        return plan

    # ---- turns

    def _turn(self) -> None:
        """Put what has happened to the flow, write it down, do what was decided."""
        while self._events or self._entries:
            steps: list[Decision | Event] = []
            self._n_passes += 1
            while self._events:
                event, about = self._events.popleft()
                if self._is_stale(event):
                    continue
                decisions = self.flow.handle(event)
                self._take(decisions, {"event": encode(event), **about})
                match event:
                    case Asked(trials):
                        self._welcome(trials)
                    case Reported(trial):  # its next epoch may have ended in the same moment
                        self._report_if_complete(self.record.trials[trial])
                steps += [event, *decisions]
            self._do(steps)

    def _is_stale(self, event: Event) -> bool:
        match event:
            case Paused() if self._terms.is_outdated(event):
                return True  # it was told something else in this very turn
            case Reported(trial) | Paused(trial) | TrialFailed(trial):
                return not self.record.trials[trial].is_live
            case _:
                return self.record.finished

    def _take(self, decisions: Sequence[Decision], about: Mapping[str, Json]) -> None:
        self._check_gangs(decisions)
        encoded = [encode(decision) for decision in decisions]
        turn = {"is": "turn", "pass": self._n_passes, **self._spent}
        self._note({**turn, **about, "decisions": encoded})
        self._n_turns += 1
        if self._n_turns % TURNS_PER_SNAPSHOT == 0:
            self._note({"is": "flow", "state": save_state(self.flow)})

    @property
    def _spent(self) -> dict[str, Json]:
        """What the run has taken so far, for a later session to go on from."""
        limits = self._limits
        return {"seconds": limits.seconds, "worker_seconds": limits.worker_seconds}

    def _check_gangs(self, decisions: Iterable[Decision]) -> None:
        n_workers = self.engine.n_workers
        trains = [decision for decision in decisions if isinstance(decision, Train)]
        wide = [train for train in trains if train.gang > max(1, n_workers)]
        most = self.engine.most_workers if wide else None  # to ask may be to ask a server
        for decision in wide:
            if most is not None and decision.gang > most:
                raise SearchError(
                    f"trial {decision.trial} is to train on {decision.gang} workers, and the "
                    f"cluster will never have more than {most}; add workers, give cluster= one "
                    "that can be scaled, or let the flow use smaller gangs"
                )

    def _note(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.record.add(entry)

    def _welcome(self, trials: Iterable[int]) -> None:
        for trial in trials:
            config = self.record.trials[trial].config = self._configs.pop(trial)
            try:
                self.check(config)
            except Exception as error:  # noqa: BLE001 - the trial's own code raised it
                self._fail(trial, f"{type(error).__name__}: {error}")

    # ---- what was decided

    def _do(self, steps: Sequence[Decision | Event]) -> None:
        """Perform decisions, once they are written down."""
        self.journal.append(self._entries)
        self._entries = []
        trains: dict[int, Train] = {}
        outdated: list[tuple[int, int]] = []  # a clone may need them until here
        for step in steps:
            match step:
                case Reported(trial, epoch):
                    self.engine.release(trial, epoch)
                    outdated.append((trial, epoch - 1))
                case Ask() if not self.record.finished:  # by what was decided after it
                    self._ask(step)
                case Train(trial, epochs) if self.record.trials[trial].is_live:
                    epochs += trains[trial].epochs if trial in trains else 0
                    trains[trial] = replace(step, epochs=epochs)
                case Pause(trial):
                    self._train(trains.pop(trial, None))
                    self._terms.hold(self.record.trials[trial])
                case Scale(n_workers):
                    self.engine.scale(n_workers)
                case Stop(trial) | TrialFailed(trial):
                    self._end(trial)
                case Clone(_, target):
                    if reason := self._stored.adopt(self.record.trials[target]):
                        self._fail(target, reason)
                case Finish():
                    for trial in self.study.live:
                        self._end(trial)
        self._train(*trains.values())
        for trial, epoch in outdated:
            if epoch:
                self._stored.drop_end(trial, epoch)

    def _ask(self, ask: Ask) -> None:
        configs, exhausted = self.study.ask(ask.n, ask.sampling)
        self._configs |= configs
        params = [[trial, self.study.params(trial)] for trial in configs]
        told = tuple(_json_part(config) for config in configs.values())
        self._events.append((Asked(tuple(configs), exhausted, told), {"params": params}))

    def _train(self, *trains: Train | None) -> None:
        plans: list[Continuation] = []
        for train in trains:
            if train is None:
                continue
            trial = self.record.trials[train.trial]
            if not self._is_shared(trial):
                continue
            self._stored.keep_scored(trial)
            self._terms.tell(trial)
            self._terms.prioritize(trial.number, train.priority)
            if train.epochs:
                last = trial.n_decided
                plan = Continuation(trial.number, range(last - train.epochs + 1, last + 1))
                self._repairs.get(trial.number, plans).append(plan)
        self._submit(plans)

    def _man(self) -> None:
        """Share the workers among few trials, or let some go; never in silence."""
        for change in self.crews.settle(self.record, self.engine.n_workers, self._limits.seconds):
            if change.note:
                self._note({"is": "note", "text": change.note})
            for number in change.trials:
                self._terms.tell(self.record.trials[number])
            if change.n_workers is not None:
                self.engine.scale(change.n_workers)

    def _is_shared(self, trial: TrialRecord) -> bool:
        """Whether its gang can train a trial; if not, it fails before it has begun."""
        if trial.gang > 1:
            try:
                self.check_gang(trial.config, trial.gang)
            except Exception as error:  # noqa: BLE001 - the workload's own code may raise anything
                self._fail(trial.number, f"{type(error).__name__}: {error}")
                return False
        return True

    def _submit(self, plans: Sequence[Continuation]) -> None:
        chains = tuple(self._chain(plan) for plan in plans if plan.epochs)
        if not chains:
            return
        number = len(self.record.rounds) + 1
        epochs = [[chain.trial, chain.epochs.start, chain.epochs.stop] for chain in chains]
        self._note({"is": "round", "number": number, "start": self.engine.wall(), "epochs": epochs})
        configs = {chain.trial: self.record.trials[chain.trial].config for chain in chains}
        self.engine.submit(Round(number, chains), configs)

    def _chain(self, plan: Continuation) -> Chain:
        order = tuple(
            # What was scored was scored after these visits in this order.
            self.orders(plan.trial, epoch) or self.record.order(plan.trial, epoch)
            for epoch in plan.epochs
        )
        n_shards = self.record.n_shards
        return Chain(plan.trial, plan.epochs, n_shards, order=order, begun=plan.begun)

    def _end(self, number: int) -> None:
        """Tell the study how a trial has ended, and forget what is not needed of it."""
        trial = self.record.trials[number]
        self.engine.stop(number)
        self._repairs.pop(number, None)
        self._terms.forget(number)
        match trial.state:
            case "complete":
                assert trial.value is not None
                self.study.complete(number, trial.value)
            case "pruned":
                self.study.prune(number)
            case "failed":
                self.study.fail(number, trial.reason, trial.traceback)
        self._stored.ended(number)

    # ---- what comes in

    def _watch(self) -> None:
        """Tell the flow of workers and of the time."""
        if self.engine.n_workers not in (0, self.record.n_workers):
            self._events.append((WorkersChanged(self.engine.n_workers), {}))
        wake_at, limits = self.record.wake_at, self._limits
        if wake_at is not None and limits.seconds >= wake_at and not limits.are_over:
            self._events.append((Tick(limits.seconds), {}))
        if limits.are_over:
            self._events.append((DeadlineReached(limits.seconds), {}))
            self._turn()
            if not self.record.finished:
                self._take([Finish()], {})
                self._do([Finish()])

    def _hear(self, message: Message) -> None:
        match message["op"]:
            case "done":
                self._unit_done(message)
            case "preempted":
                piece = {key: value for key, value in message.items() if key not in _UNKEPT}
                self._note({"is": "piece", **piece, **self._spent})
            case "rests":
                self._rests(self.record.trials[message["trial"]], message["number"])
            case "failed":
                self._failed(message)
            case "loaded":
                self._note({"is": "load", "worker": message["worker"], "shard": message["shard"]})
            case "refused" | "restarted" | "note":
                self._note({"is": "note", "text": message["reason"]})
            case "fatal":
                raise ClusterError(message["reason"])

    def _unit_done(self, message: Message) -> None:
        entry = {key: value for key, value in message.items() if key not in _UNKEPT}
        self._note({"is": "unit", **entry, **self._spent})
        unit = Unit(*message["unit"])
        trial = self.record.trials[unit.trial]
        if unit.kind == "check":
            self._put(self._terms.checked(unit, message))
            return
        self._report_if_complete(trial)
        repair = Unit("train", trial.number, *self._stored.end_of(trial))
        if trial.number in self._repairs and unit == repair:
            self.engine.release(trial.number, unit.epoch)
            self._submit(self._repairs.pop(trial.number))

    def _rests(self, trial: TrialRecord, number: int) -> None:
        """Tell the flow of a trial that has come to rest, once its state is scored."""
        if self._terms.is_awaited(trial, number):
            self._report_if_complete(trial)
            self._put(self._terms.rests(trial))

    def _report_if_complete(self, trial: TrialRecord) -> None:
        epoch = len(trial.epochs) + 1
        tally = trial.tallies.get(epoch)
        if tally is None or not tally.is_complete or self._is_reported(trial.number, epoch):
            return  # the trial has ended, or there is more to come
        value, metrics = tally.metrics[self.metric], tally.metrics
        if math.isnan(value):
            self._fail(trial.number, f"DivergedError: {self.metric} is NaN after epoch {epoch}")
            return
        self.study.report(trial.number, epoch, value)
        prune = self.flow.traits.uses_pruner and self.study.should_prune(trial.number)
        switches = tuple(trial.switches[trial.n_switches_told :])
        told = (self._limits.seconds, prune, switches)
        event = Reported(trial.number, epoch, value, metrics, *told)
        self._events.append((event, {}))

    def _is_reported(self, trial: int, epoch: int) -> bool:
        return any(
            isinstance(event, Reported) and (event.trial, event.epoch) == (trial, epoch)
            for event, _ in self._events
        )

    def _fail(self, trial: int, reason: str) -> None:
        """Let the flow hear that a trial has failed."""
        self._events.append((TrialFailed(trial, reason), {}))

    def _put(self, happening: Happening | None) -> None:
        if happening is not None:
            self._events.append(happening)

    def _failed(self, message: Message) -> None:
        trial = self.record.trials[message["trial"]]
        if not trial.is_live:
            return
        if message["reason"].startswith("CheckpointCorruptError") and self._stored.is_news(trial):
            self.engine.stop(trial.number)
            plan = self._mend(trial)
            if plan is not None:
                self._terms.renew(trial)
                self._submit([plan])
                if trial.is_held:  # none that was stopped is held before it has units again
                    self._terms.hold(trial)
            return
        failed = TrialFailed(trial.number, message["reason"])
        self._events.append((failed, {"traceback": message["traceback"]}))


#: Of what the engine tells of a unit the parts that the journal does not keep.
_UNKEPT = ("op", "visits")


def _json_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what has no form in JSON."""
    return {k: v for k, v in config.items() if v is None or isinstance(v, bool | int | float | str)}
