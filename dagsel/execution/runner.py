"""Performs a flow's decisions and tells the flow what came of them.

What happens is first an entry of the journal and then true: in each turn the events that came in
are put to the flow, events and decisions are written to the journal together, and only then are the
decisions performed. So a process that dies leaves a journal that says all that was decided, and the
one that goes on performs again what may not have been performed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import inf
from typing import Any, TypeAlias

from dagsel.codec import Json, to_json
from dagsel.errors import CheckpointError, ClusterError, SearchError
from dagsel.execution.crews import Crews
from dagsel.execution.reconcile import Plan, reconcile
from dagsel.execution.seams import Engine, Journal, Message, States
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
from dagsel.planning.rounds import Begun, Chain, Round, Unit
from dagsel.record import Entry, Record
from dagsel.storage.room import wait_for_room
from dagsel.study import StudyDriver
from dagsel.tally import EpochTally
from dagsel.trial_record import TrialRecord

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
    journal: Journal
    record: Record
    metric: str
    seed: int = 0
    check: Callable[[Any], None] = lambda config: None
    check_gang: Callable[[Any, int], None] = lambda config, size: None
    adapt: Callable[[bytes, Any, Any], bytes] = lambda blob, config, new: blob
    orders: Orders = late
    crews: Crews = field(default_factory=Crews)
    deadline_s: float | None = None
    budget_s: float | None = None
    observe: Observer = lambda record: None
    _entries: list[Entry] = field(default_factory=list)
    _events: deque[tuple[Event, Mapping[str, Json]]] = field(default_factory=deque)
    _began: float = 0.0  # what the clock would have shown at the run's beginning
    _cost_before: float = 0.0  # worker-seconds of earlier sessions
    _limit: float = inf  # the end that the engine was told, by its clock
    _n_turns: int = 0
    _n_passes: int = 0  # what is put to the flow before anything is performed is one pass
    _configs: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # of trials just drawn
    _mended_from: dict[int, object] = field(default_factory=dict)  # the state then, by trial
    _repairs: dict[int, list[Plan]] = field(default_factory=dict)  # by trial: what waits for one
    _kept: int | None = None  # the best trial, whose states stay though it has ended
    _terms: dict[int, int] = field(default_factory=dict)  # by trial: number of its last terms
    _told: dict[int, int] = field(default_factory=dict)  # by trial: as of which word it paused
    _priorities: dict[int, float] = field(default_factory=dict)  # other than 0
    _checks: dict[int, EpochTally] = field(default_factory=dict)  # of trials that are paused

    def run(self) -> None:
        """Search until the flow has finished.

        Raises
        ------
        ClusterError
            If the run cannot go on.
        SearchError
            If the flow decides what cannot be done.
        """
        self._began = self.engine.now() - self.record.seconds
        self._cost_before = self.record.worker_seconds
        seconds = self.record.seconds
        self._note({"is": "session", "at": self.engine.wall(), "seconds": seconds})
        self._tell_limit()
        if self.record.context is None:
            self._begin()
        elif not self._is_late():
            self._go_on()
        self._turn()
        self._man()
        while not self.record.finished:
            self._tell_limit()
            for message in self.engine.messages(timeout_s=self._patience_s()):
                self._hear(message)
            self._watch()
            self._turn()
            self._man()
            self.engine.check_alive()
            self.observe(self.record)

    @property
    def seconds(self) -> float:
        """Time since the run began, without the time that it lay dead."""
        return self.engine.now() - self._began

    @property
    def worker_seconds(self) -> float:
        """What the workers have cost since the run began."""
        return self._cost_before + self.engine.bill.worker_seconds(self.engine.now())

    @property
    def _end_s(self) -> float:
        """When the run's time or its budget is over, in seconds since it began."""
        ends = [] if self.deadline_s is None else [self.deadline_s]
        if self.budget_s is not None:
            bill = self.engine.bill
            ends.append(bill.runs_out_at(self.budget_s - self._cost_before) - self._began)
        return min(ends, default=inf)

    def _is_late(self) -> bool:
        return self.seconds >= self._end_s

    def _patience_s(self) -> float:
        """How long to wait for a message: until the end, or until the flow wants to be woken."""
        wake_at = inf if self.record.wake_at is None else self.record.wake_at
        return max(0.0, min(self._end_s, wake_at) - self.seconds)

    def _tell_limit(self) -> None:
        limit = self._began + self._end_s
        if limit != self._limit:
            self._limit = limit
            self.engine.limit(limit)

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
            self._tell_terms(trial)
        self._kept = None if self.record.best is None else self.record.best.trial
        for number in self.record.trials.keys() - {trial.number for trial in live} - {self._kept}:
            self.states.drop(number)
        self._submit([plan for trial in live if (plan := self._mend(trial)) is not None])
        for trial in live:
            self._report_if_complete(trial)
        for ask in tuple(self.record.awaited):
            self._ask(ask)
        if self.record.wanted is not None:
            self.engine.scale(self.record.wanted)

    def _mend(self, trial: TrialRecord) -> Plan | None:
        """Plan what is left of a trial from what the store holds of it."""
        self._adopt_again(trial)
        states = self._stored(trial)
        self._note({"is": "stored", "trial": trial.number, "states": states})
        plan = reconcile(trial, self.record.n_shards, states[-1] if states else None)
        if plan is None:
            reason = "CheckpointCorruptError: none of its stored states can be read"
            self._events.append((TrialFailed(trial.number, reason), {}))
            return None
        if trial.is_paused and plan.epochs:  # its last state is damaged, and made anew
            self._repairs[trial.number] = []
        return self._find_partial(plan)

    def _find_partial(self, plan: Plan) -> Plan:
        """Let a unit that was stopped in the middle go on there, if its state is in the store."""
        first = plan.begun[0] if plan.begun else Begun()
        if not plan.epochs or len(first.visits) == self.record.n_shards:
            return plan
        place = (plan.trial, plan.epochs.start, len(first.visits))
        try:
            _, meta = self.states.load(*place, partial=True)
        except CheckpointError:
            return plan
        if tuple(meta["visits"][:-1]) != first.visits:
            return plan
        return replace(plan, begun=(replace(first, partial=meta["shard"]), *plan.begun[1:]))

    def _stored(self, trial: TrialRecord) -> list[dict[str, Json]]:
        """Look up a trial's newest state, and the ends of its unreported epochs before that."""
        found = self.states.load_latest(trial.number)
        if found is None:
            return []
        newest, _, meta = found
        states = [{**meta, "epoch": newest[0], "position": newest[1]}]
        for epoch in reversed(range(len(trial.epochs) + 1, newest[0])):
            end = (epoch, self.record.n_shards - 1)
            before = self.states.load_latest(trial.number, end)
            if before is not None and before[0] == end:
                states.insert(0, {**before[2], "epoch": end[0], "position": end[1]})
        return states

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
            case Paused(trial) if self.record.trials[trial].n_told != self._told.get(trial):
                return True  # it was told something else in this very turn
            case Reported(trial) | Paused(trial) | TrialFailed(trial):
                return not self.record.trials[trial].is_live
            case _:
                return self.record.finished

    def _take(self, decisions: Sequence[Decision], about: Mapping[str, Json]) -> None:
        self._check_gangs(decisions)
        encoded = [encode(decision) for decision in decisions]
        turn = {"is": "turn", "pass": self._n_passes, "seconds": self.seconds}
        turn["worker_seconds"] = self.worker_seconds
        self._note({**turn, **about, "decisions": encoded})
        self._n_turns += 1
        if self._n_turns % TURNS_PER_SNAPSHOT == 0:
            self._note({"is": "flow", "state": save_state(self.flow)})

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
                failed = TrialFailed(trial, f"{type(error).__name__}: {error}")
                self._events.append((failed, {}))

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
                case Ask():
                    self._ask(step)
                case Train(trial, epochs) if self.record.trials[trial].is_live:
                    epochs += trains[trial].epochs if trial in trains else 0
                    trains[trial] = replace(step, epochs=epochs)
                case Pause(trial):
                    self._train(trains.pop(trial, None))
                    self._hold(trial)
                case Scale(n_workers):
                    self.engine.scale(n_workers)
                case Stop(trial) | TrialFailed(trial):
                    self._end(trial)
                case Clone(_, target):
                    self._adopt(self.record.trials[target])
                case Finish():
                    for trial in self.study.live:
                        self._end(trial)
        self._train(*trains.values())
        for trial, epoch in outdated:
            if epoch:
                self.states.delete(trial, epoch, self.record.n_shards - 1)

    def _ask(self, ask: Ask) -> None:
        configs, exhausted = self.study.ask(ask.n, ask.sampling)
        self._configs |= configs
        params = [[trial, self.study.params(trial)] for trial in configs]
        told = tuple(_json_part(config) for config in configs.values())
        self._events.append((Asked(tuple(configs), exhausted, told), {"params": params}))

    def _train(self, *trains: Train | None) -> None:
        plans: list[Plan] = []
        for train in trains:
            if train is None:
                continue
            trial = self.record.trials[train.trial]
            if not self._is_shared(trial):
                continue
            self._tell_terms(trial)
            if train.priority != self._priorities.get(trial.number, 0.0):
                self._priorities[trial.number] = train.priority
                self.engine.prioritize(trial.number, train.priority)
            if train.epochs:
                last = trial.n_decided
                plan = Plan(trial.number, range(last - train.epochs + 1, last + 1))
                self._repairs.get(trial.number, plans).append(plan)
        self._submit(plans)

    def _man(self) -> None:
        """Share the workers among few trials, or let some go; never in silence."""
        for change in self.crews.settle(self.record, self.engine.n_workers, self.seconds):
            if change.note:
                self._note({"is": "note", "text": change.note})
            for number in change.trials:
                self._tell_terms(self.record.trials[number])
            if change.n_workers is not None:
                self.engine.scale(change.n_workers)

    def _is_shared(self, trial: TrialRecord) -> bool:
        """Whether its gang can train a trial; if not, it fails before it has begun."""
        if trial.gang > 1:
            try:
                self.check_gang(trial.config, trial.gang)
            except Exception as error:  # noqa: BLE001 - the workload's own code may raise anything
                failed = TrialFailed(trial.number, f"{type(error).__name__}: {error}")
                self._events.append((failed, {}))
                return False
        return True

    def _tell_terms(self, trial: TrialRecord) -> None:
        """Tell the engine on what terms a trial trains, unless they are what it takes for granted.

        Said before its units are sent: the first one shall begin on these terms.
        """
        if trial.is_held:
            self._hold(trial.number)
            return
        gang = trial.gang if trial.gang > 1 else self.crews.gang_of(trial.number)
        if trial.number in self._terms or (gang, trial.seconds_left) != (1, None):
            number = self._next_terms(trial.number)
            self.engine.allow(trial.number, gang, trial.seconds_left, number)

    def _hold(self, trial: int) -> None:
        if self.record.trials[trial].is_live:
            self.engine.hold(trial, self._next_terms(trial))

    def _next_terms(self, trial: int) -> int:
        self._checks.pop(trial, None)
        self._terms[trial] = self._terms.get(trial, 0) + 1
        return self._terms[trial]

    def _submit(self, plans: Sequence[Plan]) -> None:
        chains = tuple(self._chain(plan) for plan in plans if plan.epochs)
        if not chains:
            return
        number = len(self.record.rounds) + 1
        epochs = [[chain.trial, chain.epochs.start, chain.epochs.stop] for chain in chains]
        self._note({"is": "round", "number": number, "start": self.engine.wall(), "epochs": epochs})
        configs = {chain.trial: self.record.trials[chain.trial].config for chain in chains}
        self.engine.submit(Round(number, chains), configs)

    def _chain(self, plan: Plan) -> Chain:
        order = tuple(
            # What was scored was scored after these visits in this order.
            self.orders(plan.trial, epoch) or self.record.order(plan.trial, epoch)
            for epoch in plan.epochs
        )
        n_shards = self.record.n_shards
        return Chain(plan.trial, plan.epochs, n_shards, order=order, begun=plan.begun)

    def _end(self, number: int) -> None:
        """Tell the study how a trial has ended, and forget what is not needed of it."""
        trial, best = self.record.trials[number], self.record.best
        self.engine.stop(number)
        for by_trial in (self._repairs, self._terms, self._priorities, self._checks):
            by_trial.pop(number, None)
        match trial.state:
            case "complete":
                assert trial.value is not None
                self.study.complete(number, trial.value)
            case "pruned":
                self.study.prune(number)
            case "failed":
                self.study.fail(number, trial.reason, trial.traceback)
        kept = None if best is None else best.trial
        for ended in (number, self._kept):
            if ended is not None and ended != kept:
                self.states.drop(ended)
        self._kept = kept

    def _adopt(self, trial: TrialRecord) -> None:
        """Give a trial the state of the one that it goes on from."""
        adoption, n_shards = trial.adoptions[-1], self.record.n_shards
        place = (adoption.source_epoch, n_shards - 1)
        found = self.states.load_latest(adoption.source, place)
        if found is None or found[0] != place:
            reason = f"the state of trial {adoption.source} that it was to go on from is lost"
            self._events.append((TrialFailed(trial.number, reason), {}))
            return
        _, blob, meta = found
        try:
            adapted = self.adapt(blob, self.record.trials[adoption.source].config, trial.config)
        except Exception as error:  # noqa: BLE001 - the workload's own code may raise anything
            failed = TrialFailed(trial.number, f"{type(error).__name__}: {error}")
            self._events.append((failed, {}))
            return
        kept = {name: value for name, value in meta.items() if name != "digest"}
        meta = {**kept, "adoptions": len(trial.adoptions)}
        goal = (trial.number, *self._end_of(trial))
        wait_for_room(lambda: self.states.save(*goal, adapted, meta), "the state of a clone")

    def _end_of(self, trial: TrialRecord) -> tuple[int, int]:
        """Give epoch and position of the last unit that a trial has reported."""
        return len(trial.epochs), self.record.n_shards - 1

    def _adopt_again(self, trial: TrialRecord) -> None:
        """Make up for a driver that died between deciding and adopting."""
        if trial.adoptions and trial.adoptions[-1].after == len(trial.epochs):
            found = self.states.load_latest(trial.number)
            is_old = found is None or found[0] <= self._end_of(trial)
            if is_old and (found is None or found[2].get("adoptions") != len(trial.adoptions)):
                self._adopt(trial)

    # ---- what comes in

    def _watch(self) -> None:
        """Tell the flow of workers and of the time."""
        if self.engine.n_workers not in (0, self.record.n_workers):
            self._events.append((WorkersChanged(self.engine.n_workers), {}))
        wake_at = self.record.wake_at
        if wake_at is not None and self.seconds >= wake_at and not self._is_late():
            self._events.append((Tick(self.seconds), {}))
        if self._is_late():
            self._events.append((DeadlineReached(self.seconds), {}))
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
                self._note({"is": "piece", **piece})
            case "rests":
                self._rests(message["trial"], message["number"])
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
        self._note({"is": "unit", **entry})
        unit = Unit(*message["unit"])
        trial = self.record.trials[unit.trial]
        if unit.kind == "check":
            self._checked(unit, message)
            return
        self._report_if_complete(trial)
        repair = Unit("train", trial.number, *self._end_of(trial))
        if trial.number in self._repairs and unit == repair:
            self.engine.release(trial.number, unit.epoch)
            self._submit(self._repairs.pop(trial.number))

    def _rests(self, number: int, terms: int) -> None:
        """Tell the flow of a trial that has come to rest, once its state is scored."""
        trial = self.record.trials[number]
        if not trial.is_live or self._terms.get(number) != terms:
            return  # it was told something else meanwhile
        if trial.pausing is None and (trial.is_held or not trial.has_work):
            return  # nobody waits for it
        self._report_if_complete(trial)
        place = trial.place(self.record.n_shards)
        if trial.pausing is None or not trial.pausing.evaluate or place is None:
            self._paused(trial, None, {})
        elif trial.progress(self.record.n_shards) == len(trial.epochs):
            self._paused(trial, trial.epochs[-1].value, trial.epochs[-1].metrics)
        else:
            self._checks[number] = EpochTally(self.record.n_shards)
            self.engine.check(number, terms, place, {number: trial.config})

    def _checked(self, unit: Unit, message: Message) -> None:
        tally = self._checks.get(unit.trial)
        if tally is None or unit.epoch != self._terms.get(unit.trial):
            return  # the trial goes on, or has ended
        tally.add(unit, message)
        if len(tally.scored) == self.record.n_shards:
            del self._checks[unit.trial]
            metrics = tally.metrics
            self._paused(self.record.trials[unit.trial], metrics[self.metric], metrics)

    def _paused(
        self, trial: TrialRecord, value: float | None, metrics: Mapping[str, float]
    ) -> None:
        if value is not None and math.isnan(value):
            reached = trial.progress(self.record.n_shards)
            reason = f"DivergedError: {self.metric} is NaN after {reached:.2f} epochs"
            self._events.append((TrialFailed(trial.number, reason), {}))
            return
        self._told[trial.number] = trial.n_told
        told = (trial.trained_s, trial.losses, value, metrics)
        reached = trial.progress(self.record.n_shards)
        event = Paused(trial.number, reached, self.seconds, *told)
        place = trial.place(self.record.n_shards)
        self._events.append((event, {} if place is None else {"place": list(astuple(place))}))

    def _report_if_complete(self, trial: TrialRecord) -> None:
        epoch = len(trial.epochs) + 1
        tally = trial.tallies.get(epoch)
        if tally is None or not tally.is_complete or self._is_reported(trial.number, epoch):
            return  # the trial has ended, or there is more to come
        value, metrics = tally.metrics[self.metric], tally.metrics
        if math.isnan(value):
            reason = f"DivergedError: {self.metric} is NaN after epoch {epoch}"
            self._events.append((TrialFailed(trial.number, reason), {}))
            return
        self.study.report(trial.number, epoch, value)
        prune = hasattr(self.flow, "pruner") and self.study.should_prune(trial.number)
        event = Reported(trial.number, epoch, value, metrics, self.seconds, prune)
        self._events.append((event, {}))

    def _is_reported(self, trial: int, epoch: int) -> bool:
        return any(
            isinstance(event, Reported) and (event.trial, event.epoch) == (trial, epoch)
            for event, _ in self._events
        )

    def _failed(self, message: Message) -> None:
        trial = self.record.trials[message["trial"]]
        if not trial.is_live:
            return
        if message["reason"].startswith("CheckpointCorruptError") and self._may_mend(trial):
            self.engine.stop(trial.number)
            plan = self._mend(trial)
            self._submit([] if plan is None else [plan])
            return
        failed = TrialFailed(trial.number, message["reason"])
        self._events.append((failed, {"traceback": message["traceback"]}))

    def _may_mend(self, trial: TrialRecord) -> bool:
        """Whether a trial would go on from another state than when its state was last unreadable.

        A state may be what was saved, and still nothing that the workload can read.
        """
        newest = [(s["epoch"], s["position"], s["digest"]) for s in self._stored(trial)[-1:]]
        is_new = self._mended_from.get(trial.number) != newest
        self._mended_from[trial.number] = newest
        return is_new


#: Of what the engine tells of a unit the parts that the journal does not keep.
_UNKEPT = ("op", "visits")


def _json_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what has no form in JSON."""
    return {k: v for k, v in config.items() if v is None or isinstance(v, bool | int | float | str)}
