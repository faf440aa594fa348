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
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dagsel.codec import Json, to_json
from dagsel.errors import ClusterError
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
    Reported,
    Stop,
    Train,
    TrialFailed,
    WorkersChanged,
    encode,
    save_state,
)
from dagsel.planning.rounds import Chain, Round, Unit
from dagsel.record import Entry, Record, TrialRecord
from dagsel.storage.room import wait_for_room
from dagsel.study import StudyDriver

#: How often the runner looks up while nothing happens, so that Ctrl-C is heard.
POLL_S = 0.5
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
    adapt
        Turns a state of one configuration into one of another (`Clone`).
    orders
        Fixes the orders of visits.
    deadline_s
        When to end, in seconds since the run began; None for no limit.
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
    adapt: Callable[[bytes, Any, Any], bytes] = lambda blob, config, new: blob
    orders: Orders = late
    deadline_s: float | None = None
    observe: Observer = lambda record: None
    _entries: list[Entry] = field(default_factory=list)
    _events: deque[tuple[Event, Mapping[str, Json]]] = field(default_factory=deque)
    _began: float = 0.0  # what the clock would have shown at the run's beginning
    _n_turns: int = 0
    _n_passes: int = 0  # what is put to the flow before anything is performed is one pass
    _configs: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # of trials just drawn
    _mended_from: dict[int, object] = field(default_factory=dict)  # the state then, by trial
    _repairs: dict[int, list[Plan]] = field(default_factory=dict)  # by trial: what waits for one
    _kept: int | None = None  # the best trial, whose states stay though it has ended

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
        seconds = self.record.seconds
        self._note({"is": "session", "at": self.engine.wall(), "seconds": seconds})
        if self.record.context is None:
            self._begin()
        elif not self._is_late():
            self._go_on()
        self._turn()
        while not self.record.finished:
            for message in self.engine.messages(timeout_s=self._patience_s()):
                self._hear(message)
            self._watch()
            self._turn()
            self.engine.check_alive()
            self.observe(self.record)

    @property
    def seconds(self) -> float:
        """Time since the run began, without the time that it lay dead."""
        return self.engine.now() - self._began

    def _is_late(self) -> bool:
        return self.deadline_s is not None and self.seconds >= self.deadline_s

    def _patience_s(self) -> float:
        if self.deadline_s is None:
            return POLL_S
        return min(POLL_S, max(0.0, self.deadline_s - self.seconds))

    # ---- how a session begins

    def _begin(self) -> None:
        context = Context(self.engine.n_workers, self.record.direction, self.seed)
        decisions = self.flow.start(context)
        self._take(decisions, {"context": to_json(context)})
        self._do(decisions)

    def _go_on(self) -> None:
        """Do what an earlier session has decided and may not have done."""
        live = [trial for trial in self.record.trials.values() if trial.is_live]
        self._kept = None if self.record.best is None else self.record.best.trial
        for number in self.record.trials.keys() - {trial.number for trial in live} - {self._kept}:
            self.states.drop(number)
        self._submit([plan for trial in live if (plan := self._mend(trial)) is not None])
        for trial in live:
            self._report_if_complete(trial)
        for ask in tuple(self.record.awaited):
            self._ask(ask)

    def _mend(self, trial: TrialRecord) -> Plan | None:
        """Plan what is left of a trial from what the store holds of it."""
        self._adopt_again(trial)
        states = self._stored(trial)
        self._note({"is": "stored", "trial": trial.number, "states": states})
        plan = reconcile(trial, self.record.n_shards, states[-1] if states else None)
        if plan is None:
            reason = "CheckpointCorruptError: none of its stored states can be read"
            self._events.append((TrialFailed(trial.number, reason), {}))
        elif trial.is_paused and plan.epochs:  # its last state is damaged, and made anew
            self._repairs[trial.number] = []
        return plan

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
            case Reported(trial) | TrialFailed(trial):
                return not self.record.trials[trial].is_live
            case _:
                return self.record.finished

    def _take(self, decisions: Sequence[Decision], about: Mapping[str, Json]) -> None:
        encoded = [encode(decision) for decision in decisions]
        turn = {"is": "turn", "pass": self._n_passes, "seconds": self.seconds}
        self._note({**turn, **about, "decisions": encoded})
        self._n_turns += 1
        if self._n_turns % TURNS_PER_SNAPSHOT == 0:
            self._note({"is": "flow", "state": save_state(self.flow)})

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
                case Train(trial, epochs, priority) if self.record.trials[trial].is_live:
                    epochs += trains[trial].epochs if trial in trains else 0
                    trains[trial] = Train(trial, epochs, priority)
                case Stop(trial) | TrialFailed(trial):
                    self._end(trial)
                case Clone(_, target):
                    self._adopt(self.record.trials[target])
                case Finish():
                    for trial in self.study.live:
                        self._end(trial)
        self._train(trains.values())
        for trial, epoch in outdated:
            if epoch:
                self.states.delete(trial, epoch, self.record.n_shards - 1)

    def _ask(self, ask: Ask) -> None:
        configs, exhausted = self.study.ask(ask.n, ask.sampling)
        self._configs |= configs
        params = [[trial, self.study.params(trial)] for trial in configs]
        told = tuple(_json_part(config) for config in configs.values())
        self._events.append((Asked(tuple(configs), exhausted, told), {"params": params}))

    def _train(self, trains: Iterable[Train]) -> None:
        plans: list[Plan] = []
        for train in trains:
            last = self.record.trials[train.trial].n_decided
            plan = Plan(train.trial, range(last - train.epochs + 1, last + 1))
            self._repairs.get(train.trial, plans).append(plan)
        self._submit(plans)
        for train in trains:
            if train.priority:
                self.engine.prioritize(train.trial, train.priority)

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
        self._repairs.pop(number, None)
        match trial.state:
            case "complete":
                self.study.complete(number, trial.epochs[-1].value)
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
            case "failed":
                self._failed(message)
            case "loaded":
                self._note({"is": "load", "worker": message["worker"], "shard": message["shard"]})
            case "refused" | "restarted" | "note":
                self._note({"is": "note", "text": message["reason"]})
            case "fatal":
                raise ClusterError(message["reason"])

    def _unit_done(self, message: Message) -> None:
        entry = {key: value for key, value in message.items() if key not in ("op", "visits")}
        self._note({"is": "unit", **entry})
        unit = Unit(*message["unit"])
        trial = self.record.trials[unit.trial]
        self._report_if_complete(trial)
        repair = Unit("train", trial.number, *self._end_of(trial))
        if trial.number in self._repairs and unit == repair:
            self.engine.release(trial.number, unit.epoch)
            self._submit(self._repairs.pop(trial.number))

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


def _json_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what has no form in JSON."""
    return {k: v for k, v in config.items() if v is None or isinstance(v, bool | int | float | str)}
