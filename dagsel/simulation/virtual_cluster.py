"""A model cluster in virtual time that drives a `Dispatcher`.

It answers each instruction with the events that a real cluster would send, after the times that it
is given. Workers may join, die and be drained.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from math import ceil, floor, inf

from dagsel.dispatch.dispatcher import Dispatcher
from dagsel.dispatch.events import (
    Bind,
    CheckAdded,
    DispatchEvent,
    Drained,
    DrainRequested,
    DropShard,
    FailRun,
    FailTrial,
    Instruction,
    LoadShard,
    Preempt,
    RestartWorker,
    RoundAdded,
    ShardLoaded,
    TimerFired,
    TrialRests,
    UnitDone,
    UnitReady,
    UnitReturned,
    UnitStarted,
    UnitTrains,
    Worker,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.simulation.machines import Machine, Ran, Running, VirtualOutcome

UnitSeconds = Callable[[Unit, Worker, int], float]
Speedup = Callable[[Unit, int], float]


class VirtualCluster:
    """Workers that take time for units and loads.

    `seconds` is the true time of a unit, called once at each start of it; `hop_seconds` the time to
    move a state, `switch_seconds` that to go on with a stopped unit, if another trial has trained
    on the worker since, or with a gang of another size. A unit can be stopped between two of its
    `batches`; None: at once. `watch` is called with every list of instructions.

    Examples
    --------
    >>> from dagsel.dispatch.dispatcher import DispatchConfig
    >>> cluster = VirtualCluster(Dispatcher(DispatchConfig(n_shards=2)), lambda u, w, s: 1.0)
    >>> cluster.add_workers({"a": 1.0, "b": 1.0})
    >>> cluster.add_round(Round(0, (Chain(0, range(1, 2), 2, evaluate=False),)))
    >>> cluster.run().makespan_s
    2.0
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        seconds: UnitSeconds,
        *,
        load_seconds: float = 0.0,
        hop_seconds: float = 0.0,
        speedup: Speedup = lambda unit, gang: float(gang),
        batches: Callable[[Unit], int | None] = lambda unit: None,
        switch_seconds: float = 0.0,
        watch: Callable[[list[Instruction]], None] = lambda instructions: None,
    ) -> None:
        self.dispatcher = dispatcher
        self.outcome = VirtualOutcome()
        self.now_s = 0.0
        self._seconds = seconds
        self._load_seconds = load_seconds
        self._hop_seconds = hop_seconds
        self._speedup = speedup
        self._batches = batches
        self._switch_seconds = switch_seconds
        self._watch = watch
        self._agenda: list[tuple[float, int, Callable[[], list[DispatchEvent]]]] = []
        self._n_planned = 0
        self._machines: dict[Worker, Machine] = {}
        self.n_changes = 0  # how often a worker has come or gone
        self._part: dict[Unit, float] = {}  # how much is done of units that were stopped
        self._gang_of: dict[int, int] = {}  # size of the last gang of each trial
        self._chains: dict[tuple[int, int], Chain] = {}  # by trial and epoch
        self._state_at: dict[tuple[int, int], Worker] = {}  # who made the epoch's newest state
        self._trained: set[tuple[int, int]] = set()  # epochs
        self._gone: set[int] = set()  # trials that were stopped or have failed

    # ---- what happens from outside

    def at(self, time_s: float, *events: DispatchEvent) -> None:
        """Plan events for a time: rounds, workers that join, die or are to be drained."""
        self._plan(time_s, lambda: [out for event in events for out in self._enter(event)])

    def add_workers(
        self,
        speeds: Mapping[Worker, float],
        *,
        shards: Mapping[Worker, Iterable[int]] | None = None,
    ) -> None:
        """Add workers at the start, with the shards that they hold."""
        held = shards or {}
        added = (WorkerAdded(w, frozenset(held.get(w, ())), speed) for w, speed in speeds.items())
        self.at(0.0, *added)

    def add_round(self, round_: Round, time_s: float = 0.0) -> None:
        """Add a round at a time."""
        self.at(time_s, RoundAdded(round_))

    def take_back(self, worker: Worker, time_s: float, *, notice_s: float) -> None:
        """Plan that a worker is lost, and is told so some seconds before.

        It stops its unit at the next batch, if that ends before.
        """
        self._plan(time_s, lambda: self._notice(worker, notice_s))

    def run(self) -> VirtualOutcome:
        """Run until nothing happens any more."""
        while self._agenda and self.step():
            pass
        return self.outcome

    def take_outcome(self) -> VirtualOutcome:
        """Return what has happened since the last call."""
        outcome, self.outcome = self.outcome, VirtualOutcome()
        return outcome

    def step(self, until_s: float = inf) -> bool:
        """Go to the next moment at which something happens, if it is not after `until_s`.

        Returns
        -------
        bool
            Whether something happened.
        """
        soonest = self._agenda[0][0] if self._agenda else inf
        wake_at = self.dispatcher.wake_at
        is_timer = wake_at is not None and wake_at < soonest
        moment = wake_at if wake_at is not None and is_timer else soonest
        if moment == inf or moment > until_s:
            return False
        self.now_s = moment
        events: list[DispatchEvent] = [TimerFired()] if is_timer else []
        while self._agenda and self._agenda[0][0] <= self.now_s:
            events.extend(heapq.heappop(self._agenda)[2]())
        if events:
            instructions = self.dispatcher.handle(*events, now_s=self.now_s)
            self._watch(instructions)
            for instruction in instructions:
                self._perform(instruction)
        return True

    @property
    def workers(self) -> list[Worker]:
        """The workers that are there."""
        return list(self._machines)

    def _plan(self, time_s: float, step: Callable[[], list[DispatchEvent]]) -> None:
        if time_s < inf:
            heapq.heappush(self._agenda, (time_s, self._n_planned, step))
            self._n_planned += 1

    def _enter(self, event: DispatchEvent) -> list[DispatchEvent]:
        match event:
            case RoundAdded(round_):
                return [event, *self._open(round_)]
            case CheckAdded(trial, number):
                shards = range(self.dispatcher.config.n_shards)
                return [event, *(UnitReady(Unit("check", trial, number, s)) for s in shards)]
            case WorkerAdded(worker, shards):
                self._machines[worker] = Machine(set(shards))
                self.n_changes += 1
            case WorkerRemoved(worker, expected):
                return self._kill(worker, expected=expected)
            case DrainRequested(worker) if worker not in self._machines:
                return []
            case _:
                pass
        return [event]

    def _open(self, round_: Round) -> list[DispatchEvent]:
        ready: list[DispatchEvent] = []
        for chain in round_.chains:
            assert not chain.begun, "a model cluster has no store to go on from"
            self._chains |= {(chain.trial, epoch): chain for epoch in chain.epochs}
            first = chain.epochs.start
            before = (chain.trial, first - 1)
            if before not in self._chains or before in self._trained:
                ready.append(UnitReady(Unit("train", chain.trial, first, 0)))
        return ready

    def _kill(self, worker: Worker, *, expected: bool) -> list[DispatchEvent]:
        machine = self._machines.pop(worker, None)
        if machine is None:
            return []
        self.n_changes += 1
        ready = [UnitReady(b.unit) for b in machine.queue if b.unit.trial not in self._gone]
        broken = [bind for bind in self._bound() if worker in bind.members]
        back = [event for bind in broken for event in self._take_back(bind, is_whole=False)]
        return [WorkerRemoved(worker, expected), *ready, *back]

    def _notice(self, worker: Worker, notice_s: float) -> list[DispatchEvent]:
        if worker not in self._machines:
            return []
        self.outcome.noticed.append(worker)
        if notice_s <= 0.0:
            return self._kill(worker, expected=False)
        self._plan(self.now_s + notice_s, lambda: self._kill(worker, expected=False))
        for bind in [bind for bind in self._bound() if worker in (bind.worker, *bind.members)]:
            stop_s = self._batch_end(bind.worker, bind.unit, self.now_s)
            if stop_s < self.now_s + notice_s:
                self._plan_to_stop(bind, stop_s)
        return [DrainRequested(worker)]

    def _plan_to_stop(self, bind: Bind, stop_s: float) -> None:
        self._plan(stop_s, lambda: self._preempted(bind.unit, bind.worker))

    def _bound(self) -> Iterable[Bind]:
        return (bind for machine in self._machines.values() for bind in machine.queue)

    # ---- what the dispatcher asks for

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Bind(unit, worker, shard, members):
                for place in (worker, *members):
                    assert shard in self._machines[place].held, f"{place} has no {shard} for {unit}"
                busy = [member for member in members if self._machines[member].queue]
                assert not busy, f"{busy} are busy and cannot join the gang of {unit}"
                self._machines[worker].queue.append(instruction)
                if len(self._machines[worker].queue) == 1:
                    self._start(worker)
            case LoadShard(worker, shard):
                self._plan(self.now_s + self._load_seconds, lambda: self._loaded(worker, shard))
            case DropShard(worker, shard):
                users = [b.unit for b in self._bound() if worker in (b.worker, *b.members)
                         and shard in (b.shard, *b.then)]  # fmt: skip
                assert not users, f"{worker} drops {shard}, which {users} need"
                self._machines[worker].held.discard(shard)
            case Preempt(unit, worker):
                stop_s = self._batch_end(worker, unit, self.now_s)
                self._plan(stop_s, lambda: self._preempted(unit, worker))
            case TrialRests():
                self.outcome.rests.append(instruction)
            case FailTrial(trial, reason):
                self._gone.add(trial)
                self.outcome.failed[trial] = reason
            case FailRun(reason):
                self.outcome.failed[-1] = reason
            case RestartWorker(worker):
                self._plan(self.now_s, lambda: self._kill(worker, expected=False))
            case Drained(worker):
                self._plan(self.now_s, lambda: self._kill(worker, expected=True))

    def _loaded(self, worker: Worker, shard: int) -> list[DispatchEvent]:
        if worker not in self._machines:
            return []
        self._machines[worker].held.add(shard)
        self.outcome.loaded.append((worker, shard))
        return [ShardLoaded(worker, shard)]

    def _preempted(self, unit: Unit, worker: Worker) -> list[DispatchEvent]:
        self._gone.update({unit.trial} - self.dispatcher.trials.keys())
        machine = self._machines.get(worker)
        bind = next((b for b in machine.queue if b.unit == unit), None) if machine else None
        if bind is None or machine is None:
            return []
        running = machine.running
        if running is not None and running.bind is bind and running.trained_at_s is not None:
            return self._ended(running)
        return self._take_back(bind, is_whole=True)

    def _batch_end(self, worker: Worker, unit: Unit, at_s: float) -> float:
        """Return when the batch ends that a unit runs at a time; infinity if it is the last one."""
        machine, n_batches = self._machines.get(worker), self._batches(unit)
        running = machine.running if machine else None
        if running is None or running.bind.unit != unit or unit.kind != "train" or not n_batches:
            return at_s
        if running.trained_at_s is not None:
            return at_s
        unit = running.unit
        begins_s, trains_s = running.start_s + running.waits_s, running.trains_s
        before = self._part.get(unit, 0.0)
        done = before + (1.0 - before) * max(0.0, at_s - begins_s) / trains_s if trains_s else 1.0
        n_done = max(ceil(done * n_batches - 1e-6), floor(before * n_batches + 1e-6) + 1)
        share = (n_done / n_batches - before) / (1.0 - before)
        return max(at_s, begins_s + share * trains_s) if share < 1.0 else inf

    def _take_back(self, bind: Bind, *, is_whole: bool) -> list[DispatchEvent]:
        """Take a unit off its worker; what it has trained is kept if its gang is whole."""
        unit, shard, machine = bind.unit, bind.shard, self._machines[bind.worker]
        running = machine.running
        machine.queue.remove(bind)
        trained_s = 0.0
        back: list[DispatchEvent] = []
        if running is not None and running.bind is bind:
            machine.running = None
            unit, shard = running.unit, running.shard
            back = self._tell_done(running.visits) if running.visits else []
            trained_s = self._cut(running) if is_whole else 0.0
            if machine.queue:
                self._start(bind.worker)
        kept = shard if unit in self._part else None
        back.append(UnitReturned(unit, kept, trained_s))
        return back if unit.trial in self._gone else [*back, UnitReady(unit)]

    def _tell_done(
        self, visits: tuple[Ran, ...], scored: Sequence[Ran] = ()
    ) -> list[DispatchEvent]:
        """Note that units were done by one task; return what the dispatcher is told."""
        self.outcome.timeline += [*visits, *scored]
        for ran in visits:
            self._part.pop(ran.unit, None)
            self._note_trained(ran)
        (unit, _, shard, *_), *then = visits
        took_s, *then_s = (ran.stop_s - ran.start_s - ran.waits_s for ran in visits)
        return [
            UnitDone(
                unit,
                took_s,
                shard,
                tuple((ran.shard, ran.stop_s - ran.start_s) for ran in scored),
                tuple((ran.shard, seconds) for ran, seconds in zip(then, then_s, strict=True)),
            )
        ]

    def _cut(self, running: Running) -> float:
        """Keep what a unit has trained until now; return its seconds."""
        unit, trains_s = running.unit, running.trains_s
        trained_s = min(trains_s, self.now_s - running.start_s - running.waits_s)
        if unit.kind != "train" or trained_s <= 0.0 or trains_s <= 0.0:
            return 0.0
        before = self._part.get(unit, 0.0)
        self._part[unit] = before + (1.0 - before) * trained_s / trains_s
        piece = running.until(self.now_s, self._part[unit])
        self._note_trained(piece)
        self.outcome.pieces.append(piece)
        return trained_s

    def _note_trained(self, ran: Ran) -> None:
        self._gang_of[ran.unit.trial] = 1 + len(ran.members)
        self._state_at[ran.unit.trial, ran.unit.epoch] = ran.worker

    # ---- units

    def _start(self, worker: Worker) -> None:
        machine = self._machines[worker]
        bind = machine.queue[0]
        unit, gang = bind.unit, 1 + len(bind.members)
        took = self._seconds(unit, worker, bind.shard) * (1.0 - self._part.get(unit, 0.0))
        if gang > 1:
            took /= self._speedup(unit, gang)
        moved = self._source(unit) not in (None, worker)
        waits_s = self._hop_seconds if moved else 0.0
        if unit.kind == "train":
            is_warm = gang == 1 and machine.trained == unit.trial
            is_switch = unit in self._part and not is_warm
            is_switch |= self._gang_of.get(unit.trial, gang) != gang
            waits_s += self._switch_seconds if is_switch else 0.0
            for place in (worker, *bind.members):
                self._machines[place].trained = unit.trial
        begun = (unit, bind.shard, self.now_s, waits_s + took, waits_s, moved)
        running = machine.running = Running(bind, *begun)
        plan = partial(self._plan_for, running)
        plan(self.now_s, lambda: [UnitStarted(unit, worker), UnitTrains(unit, worker)])
        if unit.kind == "train" and bind.seconds is not None and bind.seconds < took:
            stop_s = self._batch_end(worker, unit, self.now_s + waits_s + bind.seconds)
            plan(stop_s, lambda: self._preempted(unit, worker))
        plan(self.now_s + waits_s + took, lambda: self._finished(running))

    def _source(self, unit: Unit) -> Worker | None:
        """Return the worker that has the state; None for the store."""
        if unit.kind == "check":
            return None
        place = self._state_at.get((unit.trial, unit.epoch))
        if place is None and unit.kind == "train":
            return self._state_at.get((unit.trial, unit.epoch - 1))
        return place

    def _plan_for(
        self, running: Running, time_s: float, step: Callable[[], list[DispatchEvent]]
    ) -> None:
        """Plan a step for when a unit will have run until then."""

        def if_it_runs() -> list[DispatchEvent]:
            there = self._machines.get(running.bind.worker)
            return step() if there is not None and there.running is running else []

        self._plan(time_s, if_it_runs)

    def _finished(self, running: Running) -> list[DispatchEvent]:
        bind = running.bind
        running.visits += (running.until(self.now_s),)
        is_whole = len(running.visits) == 1 + len(bind.then)
        is_late = self.now_s - running.visits[0].start_s >= self.dispatcher.config.at_once_s
        if not (is_whole or is_late):
            self._go_on(running)
            return []
        if not (is_whole and bind.scores):
            return self._ended(running)
        running.trained_at_s = self.now_s
        running.scoring_s = tuple(
            self._seconds(bind.unit._replace(kind="evaluate", position=shard), bind.worker, shard)
            for shard in bind.scores
        )
        ends_s = self.now_s + sum(running.scoring_s)
        self._plan_for(running, ends_s, lambda: self._ended(running))
        return []

    def _go_on(self, running: Running) -> None:
        """Begin the next unit of a task."""
        bind, n_done = running.bind, len(running.visits)
        running.unit = bind.unit._replace(position=bind.unit.position + n_done)
        running.shard = bind.then[n_done - 1]
        took_s = self._seconds(running.unit, bind.worker, running.shard)
        running.start_s, running.takes_s = self.now_s, took_s
        running.waits_s, running.hop = 0.0, False
        self._plan_for(running, self.now_s + took_s, lambda: self._finished(running))

    def _ended(self, running: Running) -> list[DispatchEvent]:
        machine = self._machines[running.bind.worker]
        machine.queue.pop(0)
        machine.running = None
        if machine.queue:
            self._start(running.bind.worker)
        unit, scored = running.unit, running.scored(self.now_s)
        if unit.kind != "train":
            self.outcome.timeline += running.visits
            return [UnitDone(unit, running.trains_s, running.shard)]
        done = self._tell_done(running.visits, scored)
        return done + self._followers(unit, {ran.unit for ran in scored})

    def _followers(self, unit: Unit, scored: Set[Unit]) -> list[DispatchEvent]:
        chain = self._chains[unit.trial, unit.epoch]
        is_last = unit.position + 1 == chain.n_shards
        if is_last:
            self._trained.add((unit.trial, unit.epoch))
        if unit.trial in self._gone:
            return []
        if not is_last:
            return [UnitReady(unit._replace(position=unit.position + 1))]
        left = (each for each in chain.evaluations(unit.epoch) if each not in scored)
        ready: list[DispatchEvent] = [UnitReady(each) for each in left]
        if (unit.trial, unit.epoch + 1) in self._chains:
            ready.append(UnitReady(Unit("train", unit.trial, unit.epoch + 1, 0)))
        return ready
