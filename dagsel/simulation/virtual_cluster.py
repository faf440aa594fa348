"""A model cluster in virtual time that drives a `Dispatcher`: for simulations, bars and tests.

It plays the shell and the cluster at once: it answers each instruction with the events that a real
cluster would send, after the times that it is given. Workers may come, die and be drained.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, floor, inf
from typing import NamedTuple

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
    ShardFailed,
    ShardLoaded,
    TimerFired,
    TrialRests,
    UnitDone,
    UnitReady,
    UnitReturned,
    UnitStarted,
    Worker,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.units import Chain, Round, Unit

UnitSeconds = Callable[[Unit, Worker, int], float]
Speedup = Callable[[Unit, int], float]


class Ran(NamedTuple):
    """A unit, or a piece of one, as it ran.

    Parameters
    ----------
    unit, worker, shard, start_s, stop_s
        Which one, where, with what, when.
    hop
        Whether the state had to move.
    members
        The other workers of its gang.
    done
        How much of the unit is done after it: 1 if it is over.
    waits_s
        How long after its start it began to train.
    """

    unit: Unit
    worker: Worker
    shard: int
    start_s: float
    stop_s: float
    hop: bool
    members: tuple[Worker, ...] = ()
    done: float = 1.0
    waits_s: float = 0.0


@dataclass(slots=True)
class UnitOutcome:
    """What a run in virtual time came to.

    Attributes
    ----------
    makespan_s
        When the last unit was done.
    visits
        Of each trial and epoch the shards in the order of their visits.
    n_started, n_done
        Units started and done.
    loads
        How often each worker was asked to load a shard.
    loaded
        Workers and the shards that they have loaded, in the order of time.
    failed
        Why trials failed, or (trial -1) the run.
    timeline
        The units that were done, in the order of time.
    pieces
        What was trained of units that were stopped before their end.
    rests
        Trials that came to rest, in the order of time.
    """

    makespan_s: float = 0.0
    visits: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    n_started: int = 0
    n_done: int = 0
    loads: dict[tuple[Worker, int], int] = field(default_factory=dict)
    loaded: list[tuple[Worker, int]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    timeline: list[Ran] = field(default_factory=list)
    pieces: list[Ran] = field(default_factory=list)
    rests: list[TrialRests] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    """What a worker runs first of what it was given."""

    unit: Unit
    shard: int
    members: tuple[Worker, ...]
    start_s: float
    takes_s: float  # from start to end, if nothing stops it
    waits_s: float  # of that, before it trains: the state moves
    hop: bool


class VirtualCluster:
    """Workers that take time for units and loads, and no more.

    Parameters
    ----------
    dispatcher
        What is driven.
    seconds
        True time of a unit on a worker with a shard.
    load_seconds
        Time to load a shard.
    hop_seconds
        Time to move a state to another worker.
    speedup
        How many times as fast a gang trains a unit as one worker does; linear by default.
    batches
        Into how many batches a unit falls; it is stopped between two of them. None for as many as
        it takes to stop at once.
    switch_seconds
        Time that a unit takes longer which goes on where another piece of it was stopped, or with
        another gang than its trial's unit before.
    limits
        How many shards a worker really takes, where that is less than it says.
    check
        Whether to check all invariants after every step.
    watch
        Called with every list of instructions.

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
        limits: Mapping[Worker, int] | None = None,
        check: bool = False,
        watch: Callable[[list[Instruction]], None] | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.outcome = UnitOutcome()
        self.now_s = 0.0
        self._seconds = seconds
        self._load_seconds = load_seconds
        self._hop_seconds = hop_seconds
        self._speedup = speedup
        self._batches = batches
        self._switch_seconds = switch_seconds
        self._limits = dict(limits or {})
        self._check = check
        self._watch = watch
        self._agenda: list[tuple[float, int, Callable[[], list[DispatchEvent]]]] = []
        self._n_planned = 0
        self._queues: dict[Worker, list[Bind]] = {}
        self._running: dict[Worker, _Running] = {}
        self._part: dict[Unit, float] = {}  # how much is done of units that were stopped
        self._gang_of: dict[int, int] = {}  # size of the last gang of each trial
        self._tokens: dict[Worker, int] = {}  # what a worker runs; changes when it starts or stops
        self._held: dict[Worker, set[int]] = {}
        self._made_at: dict[Unit, Worker] = {}
        self._chains: dict[tuple[int, int], Chain] = {}
        self._done: set[Unit] = set()
        self._gone: set[int] = set()  # trials that were stopped or have failed

    # ---- what happens from outside

    def at(self, time_s: float, *events: DispatchEvent) -> None:
        """Let events happen at a time: rounds, workers that come, die or are to be drained."""
        self._plan(time_s, lambda: [out for event in events for out in self._enter(event)])

    def add_workers(
        self,
        speeds: Mapping[Worker, float],
        *,
        shards: Mapping[Worker, Iterable[int]] | None = None,
    ) -> None:
        """Add workers at the start, with what they hold."""
        at = shards or {}
        self.at(
            0.0, *(WorkerAdded(w, frozenset(at.get(w, ())), speed) for w, speed in speeds.items())
        )

    def add_round(self, round_: Round, time_s: float = 0.0) -> None:
        """Add a round at a time."""
        self.at(time_s, RoundAdded(round_))

    def run(self, until_s: float = inf) -> UnitOutcome:
        """Run until nothing happens any more, or the time is over."""
        while self._agenda and self.step(until_s):
            pass
        return self.outcome

    def step(self, until_s: float = inf) -> bool:
        """Let happen all that happens at the next moment.

        Parameters
        ----------
        until_s
            The last moment that may be reached.

        Returns
        -------
        bool
            Whether there was anything to happen by then.
        """
        soonest = self._agenda[0][0] if self._agenda else inf
        wake_at = self.dispatcher.wake_at
        is_tick = wake_at is not None and wake_at < soonest
        moment = wake_at if wake_at is not None and is_tick else soonest
        if moment == inf or moment > until_s:
            return False
        self.now_s = moment
        batch: list[DispatchEvent] = [TimerFired()] if is_tick else []
        while self._agenda and self._agenda[0][0] <= self.now_s:
            batch.extend(heapq.heappop(self._agenda)[2]())
        if batch:
            self._tell(batch)
        return True

    @property
    def workers(self) -> list[Worker]:
        """The workers that are there."""
        return list(self._queues)

    def _plan(self, time_s: float, step: Callable[[], list[DispatchEvent]]) -> None:
        if time_s == inf:
            return
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
                self._queues[worker], self._held[worker] = [], set(shards)
                self._tokens[worker] = 0
            case WorkerRemoved(worker):
                return self._kill(worker, expected=event.expected)
            case DrainRequested(worker) if worker not in self._queues:
                return []
            case _:
                pass
        return [event]

    def _open(self, round_: Round) -> list[DispatchEvent]:
        ready: list[DispatchEvent] = []
        for chain in round_.chains:
            for epoch in chain.epochs:
                self._chains[chain.trial, epoch] = chain
                self.outcome.visits[chain.trial, epoch] = []
            first = Unit("train", chain.trial, chain.epochs.start, 0)
            before = (chain.trial, chain.epochs.start - 1)
            assert not chain.begun, "a model cluster has no store to go on from"
            if before not in self._chains or self._last(*before) in self._done:
                ready.append(UnitReady(first))
        return ready

    def _last(self, trial: int, epoch: int) -> Unit:
        return Unit("train", trial, epoch, self._chains[trial, epoch].n_shards - 1)

    def _kill(self, worker: Worker, *, expected: bool) -> list[DispatchEvent]:
        queue = self._queues.pop(worker, None)
        if queue is None:
            return []
        self._running.pop(worker, None)
        del self._tokens[worker], self._held[worker]
        broken = [bind for other in self._queues.values() for bind in other
                  if worker in bind.members]  # fmt: skip
        ready = [UnitReady(bind.unit) for bind in queue if bind.unit.trial not in self._gone]
        back = [event for bind in broken for event in self._take_back(bind, None)]
        return [WorkerRemoved(worker, expected), *ready, *back]

    # ---- what the dispatcher says

    def _tell(self, events: list[DispatchEvent]) -> None:
        instructions = self.dispatcher.handle(*events, now_s=self.now_s)
        if self._watch is not None:
            self._watch(instructions)
        for instruction in instructions:
            self._perform(instruction)
        if self._check:
            self.dispatcher.check()

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Bind(unit, worker, shard, members):
                for place in (worker, *members):
                    assert shard in self._held[place], f"{place} does not hold {shard} for {unit}"
                assert not any(self._queues[member] for member in members), "a member is busy"
                self._queues[worker].append(instruction)
                if len(self._queues[worker]) == 1:
                    self._start(worker)
            case LoadShard(worker, shard):
                key = (worker, shard)
                self.outcome.loads[key] = self.outcome.loads.get(key, 0) + 1
                self._plan(self.now_s + self._load_seconds, lambda: self._loaded(worker, shard))
            case DropShard(worker, shard):
                in_use = (bind.shard for queue in self._queues.values() for bind in queue
                          if worker in (bind.worker, *bind.members))  # fmt: skip
                assert shard not in in_use, "dropped in use"
                self._held[worker].discard(shard)
            case Preempt(unit, worker):
                self._plan(self._boundary(worker, unit), lambda: self._preempted(unit, worker))
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
        if worker not in self._held:
            return []
        if len(self._held[worker]) >= self._limits.get(worker, len(self._held[worker]) + 1):
            return [ShardFailed(worker, shard, "out of memory")]
        self._held[worker].add(shard)
        self.outcome.loaded.append((worker, shard))
        return [ShardLoaded(worker, shard)]

    def _preempted(self, unit: Unit, worker: Worker) -> list[DispatchEvent]:
        self._gone.update({unit.trial} - self.dispatcher.trials.keys())
        bind = next((b for b in self._queues.get(worker, []) if b.unit == unit), None)
        if bind is None:
            return []
        return self._take_back(bind, self._running.get(worker))

    def _boundary(self, worker: Worker, unit: Unit, at_s: float | None = None) -> float:
        """Give the time at which a unit that is told to stop has ended its batch."""
        at_s = self.now_s if at_s is None else at_s
        running, n_batches = self._running.get(worker), self._batches(unit)
        if running is None or running.unit != unit or unit.kind != "train" or not n_batches:
            return at_s
        begins_s, trains_s = running.start_s + running.waits_s, running.takes_s - running.waits_s
        before = self._part.get(unit, 0.0)
        done = before + (1.0 - before) * max(0.0, at_s - begins_s) / trains_s if trains_s else 1.0
        n_done = max(ceil(done * n_batches - 1e-6), floor(before * n_batches + 1e-6) + 1)
        share = (n_done / n_batches - before) / (1.0 - before)
        return max(at_s, begins_s + share * trains_s) if share < 1.0 else inf

    def _take_back(self, bind: Bind, running: _Running | None) -> list[DispatchEvent]:
        """Take a unit off its worker, with what it has trained if it runs and its gang is whole."""
        unit, worker, shard = bind.unit, bind.worker, bind.shard
        queue = self._queues[worker]
        is_first = queue[0] is bind
        queue.remove(bind)
        trained_s = 0.0
        if is_first:
            self._tokens[worker] += 1
            self._running.pop(worker, None)
            if running is not None:
                trained_s = self._cut(running, worker)
            if queue:
                self._start(worker)
        kept = shard if unit in self._part else None
        back: list[DispatchEvent] = [UnitReturned(unit, kept, trained_s)]
        return back if unit.trial in self._gone else [*back, UnitReady(unit)]

    def _cut(self, running: _Running, worker: Worker) -> float:
        """Keep what a unit has trained until now; gives its seconds."""
        unit = running.unit
        trains_s = running.takes_s - running.waits_s
        trained_s = min(trains_s, self.now_s - running.start_s - running.waits_s)
        if unit.kind != "train" or trained_s <= 0.0 or trains_s <= 0.0:
            return 0.0
        before = self._part.get(unit, 0.0)
        done = self._part[unit] = before + (1.0 - before) * trained_s / trains_s
        self._gang_of[unit.trial] = 1 + len(running.members)
        self._made_at[unit] = worker
        self.outcome.pieces.append(
            Ran(unit, worker, running.shard, running.start_s, self.now_s, running.hop,
                running.members, done, running.waits_s)
        )  # fmt: skip
        return trained_s

    def _start(self, worker: Worker) -> None:
        bind = self._queues[worker][0]
        unit, shard, gang = bind.unit, bind.shard, 1 + len(bind.members)
        token = self._tokens[worker] = self._tokens[worker] + 1
        self.outcome.n_started += 1
        took = self._seconds(unit, worker, shard) * (1.0 - self._part.get(unit, 0.0))
        if gang > 1:
            took /= self._speedup(unit, gang)
        moved = self._source(unit) not in (None, worker)
        wait = self._hop_seconds if moved else 0.0
        if unit.kind == "train":
            is_switch = unit in self._part or self._gang_of.get(unit.trial, gang) != gang
            wait += self._switch_seconds if is_switch else 0.0
        self._running[worker] = _Running(
            unit, shard, bind.members, self.now_s, wait + took, wait, moved
        )
        self._plan(self.now_s, lambda: self._started(unit, worker, token))
        if unit.kind == "train" and bind.seconds is not None and bind.seconds < took:
            stop_s = self._boundary(worker, unit, self.now_s + wait + bind.seconds)
            self._plan(stop_s, lambda: self._timed_out(unit, worker, token))
        self._plan(self.now_s + wait + took, lambda: self._finished(worker, token))

    def _timed_out(self, unit: Unit, worker: Worker, token: int) -> list[DispatchEvent]:
        return self._preempted(unit, worker) if self._tokens.get(worker) == token else []

    def _source(self, unit: Unit) -> Worker | None:
        if unit in self._part:
            return self._made_at.get(unit)
        if unit.kind == "check":
            return None
        if unit.kind == "evaluate":
            return self._made_at.get(self._last(unit.trial, unit.epoch))
        if unit.position:
            return self._made_at.get(unit._replace(position=unit.position - 1))
        if (unit.trial, unit.epoch - 1) in self._chains:
            return self._made_at.get(self._last(unit.trial, unit.epoch - 1))
        return None

    def _started(self, unit: Unit, worker: Worker, token: int) -> list[DispatchEvent]:
        if self._tokens.get(worker) != token:
            return []
        return [UnitStarted(unit, worker)]

    def _finished(self, worker: Worker, token: int) -> list[DispatchEvent]:
        if self._tokens.get(worker) != token:
            return []
        ran = self._running.pop(worker)
        unit, shard = ran.unit, ran.shard
        self._queues[worker].pop(0)
        if self._queues[worker]:
            self._start(worker)
        self._done.add(unit)
        self._made_at[unit] = worker
        self.outcome.n_done += 1
        self.outcome.makespan_s = self.now_s
        self.outcome.timeline.append(
            Ran(
                unit,
                worker,
                shard,
                ran.start_s,
                self.now_s,
                ran.hop,
                ran.members,
                waits_s=ran.waits_s,
            )
        )
        if unit.kind == "train":
            self._part.pop(unit, None)
            self._gang_of[unit.trial] = 1 + len(ran.members)
            self.outcome.visits[unit.trial, unit.epoch].append(shard)
        done: list[DispatchEvent] = [UnitDone(unit, ran.takes_s - ran.waits_s, shard)]
        return done if unit.trial in self._gone else done + self._followers(unit)

    def _followers(self, unit: Unit) -> list[DispatchEvent]:
        if unit.kind != "train":
            return []
        chain = self._chains[unit.trial, unit.epoch]
        if unit.position + 1 < chain.n_shards:
            return [UnitReady(unit._replace(position=unit.position + 1))]
        ready: list[DispatchEvent] = [UnitReady(scored) for scored in chain.evaluations(unit.epoch)]
        if (unit.trial, unit.epoch + 1) in self._chains:
            ready.append(UnitReady(Unit("train", unit.trial, unit.epoch + 1, 0)))
        return ready
