"""The dispatcher: events in, instructions out; a pure state machine.

It binds each ready unit to a worker, and to a shard that the worker holds, as late as possible. The
caller passes the time with the events, and calls again at `Dispatcher.wake_at` with a `TimerFired`.

`Dispatcher.handle` first updates the `DispatchState` by each event. Then `shard_moves` places
shards, `gangs` and `assignment` bind units, `rests` and `strikes` watch trials and units.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil
from types import MappingProxyType
from typing import assert_never

from dagsel.dispatch import invariants
from dagsel.dispatch.assignment import Assigner
from dagsel.dispatch.dispatch_state import DispatchConfig, DispatchState
from dagsel.dispatch.downscaling import Releasable, choose
from dagsel.dispatch.events import (
    CheckAdded,
    DispatchEvent,
    DrainRequested,
    GangBroke,
    HorizonSet,
    Instruction,
    MemoryFilled,
    PriorityChanged,
    RoundAdded,
    ShardFailed,
    ShardLoaded,
    TimerFired,
    TrialAllowed,
    TrialHeld,
    TrialStopped,
    UnitDone,
    UnitFailed,
    UnitLost,
    UnitReady,
    UnitReturned,
    UnitStarted,
    UnitTrains,
    Worker,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.gangs import Gangs
from dagsel.dispatch.list_scheduler import bits
from dagsel.dispatch.rests import allow, hold, spend, tell_rests
from dagsel.dispatch.shard_moves import ShardMoves
from dagsel.dispatch.strikes import begin, fail, gang_broke, judge, watch_time_limits, worker_lost
from dagsel.dispatch.trials import FREE, Trial
from dagsel.dispatch.units import Chain, Unit, units_after
from dagsel.dispatch.workers import KnownWorker

__all__ = ["DispatchConfig", "Dispatcher"]


class Dispatcher:
    """Binds ready units to workers and shards.

    Examples
    --------
    >>> from dagsel.dispatch.units import Round
    >>> dispatcher = Dispatcher(DispatchConfig(n_shards=1))
    >>> round_ = Round(0, (Chain(trial=7, epochs=range(1, 2), n_shards=1),))
    >>> dispatcher.handle(RoundAdded(round_), WorkerAdded("a"), now_s=0.0)
    [LoadShard(worker='a', shard=0)]
    >>> unit = Unit("train", 7, 1, 0)
    >>> dispatcher.handle(ShardLoaded("a", 0), UnitReady(unit), now_s=1.0)
    [Bind(unit=Unit(kind='train', trial=7, ...), worker='a', shard=0, members=(), ...)]
    """

    def __init__(self, config: DispatchConfig) -> None:
        self.config = config
        self.state = state = DispatchState(config)
        self.trials, self.bindings, self.workers = state.trials, state.bindings, state.workers
        self.times, self.list_scheduler = state.times, state.list_scheduler
        self.moves = ShardMoves(state)
        self.gangs = Gangs(state)
        self.assigner = Assigner(state, self.gangs)

    # ---- events

    def handle(self, *events: DispatchEvent, now_s: float) -> list[Instruction]:
        """Take in what has happened since the last call, in order; return what to do, in order.

        Pass events that came together in one call: nothing is decided in between. `now_s` is never
        less than before.

        Raises
        ------
        ValueError
            If a chain's number of shards is not the run's, or an epoch is added twice.
        """
        self.state.advance(now_s)
        self.state.out = []
        for event in events:
            self._take(event)
        self._settle()
        return self.state.out

    @property
    def wake_at(self) -> float | None:
        """When to send a `TimerFired`; None if only other events matter."""
        return self.state.wake_at

    def knows(self, worker: Worker) -> bool:
        """Whether the worker was added and not removed."""
        return worker in self.workers

    def worker_of(self, unit: Unit) -> Worker | None:
        """Return the worker that the unit is bound to; None if there is none."""
        binding = self.bindings.get(unit)
        return None if binding is None else binding.worker

    def trial_on(self, worker: Worker) -> tuple[int, tuple[int, int | None] | None] | None:
        """Return the trial that a worker runs; with how many bytes, of how many, it has filled it.

        A unit that is bound there and does not train has filled nothing: another run's may have.
        """
        host = self.workers.get(worker)
        if host is None or not host.bound:
            return None
        trains = [unit for unit in host.bound if self.bindings[unit].trains_s is not None]
        return (trains or host.bound)[0].trial, host.filled if trains else None

    def holds(self, worker: Worker, shard: int) -> bool:
        """Whether the worker holds the shard."""
        return worker in self.workers and self.workers[worker].holds(shard)

    def home(self, trial: int) -> Worker | None:
        """Return the worker that made the trial's newest state; None if there is none."""
        return self.list_scheduler.home.get(trial)

    @property
    def n_staying(self) -> int:
        """Number of workers that were not told to go."""
        return len(self.workers.staying)

    def usable(self, within_s: float) -> int:
        """Return how many workers are busy for so long with what is left.

        A trial trains on one at a time, or on its gang, which needs all of its workers at once.
        """
        n_workers, largest, work_s = 0, 0, 0.0
        for number, trial in self.state.busy.items():
            allowance = self.state.allowances.get(number, FREE)
            if allowance.held or not trial.open:
                continue
            n_workers, largest = n_workers + allowance.gang, max(largest, allowance.gang)
            epochs, ratio = trial.open.values(), self.times.ratio
            n_units = sum(it.left.bit_count() + ratio * it.unscored.bit_count() for it in epochs)
            took_s = self.state.gang_s.get((number, allowance.gang))
            if took_s is not None:
                work_s += allowance.gang * took_s * n_units
            elif self.times.known:
                work_s += self.times.cost(number) * self.times.unit_s * n_units
        return max(largest, min(n_workers, ceil(work_s / within_s)))

    def cheapest(
        self,
        n: int,
        *,
        but: Collection[Worker] = (),
        nodes: Mapping[Worker, str] = MappingProxyType({}),
        prices: Mapping[Worker, float] = MappingProxyType({}),
    ) -> tuple[Worker, ...]:
        """Choose at most n workers whose loss costs least, besides those that go anyway.

        `nodes` has the node that a worker is billed with; other workers are billed alone.
        """
        there = [
            Releasable(
                s.worker,
                bool(s.bound),
                frozenset(bits(s.held)),
                nodes.get(s.worker),
                prices.get(s.worker, 0.0),
            )
            for s in self.workers.staying
            if s.worker not in but
        ]
        return choose(there, n)

    def visits_before(self, unit: Unit) -> tuple[int, ...]:
        """Return the shards that the trial visited in the epoch before the unit, in order."""
        trial = self.trials.get(unit.trial)
        if unit.kind != "train" or trial is None:
            return ()
        visited = trial.epochs[unit.epoch].visited
        return tuple(shard for shard in visited[: unit.position] if shard is not None)

    def _take(self, event: DispatchEvent) -> None:
        match event:
            case UnitReady(unit):
                self._on_unit_ready(unit)
            case UnitStarted(unit, worker):
                self._on_unit_started(unit, worker)
            case UnitTrains(unit, worker):
                self._on_unit_trains(unit, worker)
            case UnitDone():
                self._on_unit_done(event)
            case RoundAdded(round_):
                for chain in round_.chains:
                    self._add_chain(chain)
            case UnitReturned(unit, shard, seconds):
                spend(self.state, unit, seconds)
                self._on_unit_returned(unit, shard, seconds)
            case UnitLost(unit):  # its visit stays noted: it visits the same shard again
                self.state.clear_strikes(unit)
            case UnitFailed(unit, _, reason):
                self.state.give_back(unit)
                if unit.trial in self.trials:
                    fail(self.state, unit.trial, reason)
            case GangBroke(unit, reason):
                gang_broke(self.state, unit, reason)
            case WorkerAdded():
                self._on_worker_added(event)
            case WorkerRemoved():
                self._on_worker_removed(event)
            case MemoryFilled(worker, n_bytes, limit):
                if worker in self.workers:
                    self.workers[worker].filled = (n_bytes, limit)
            case DrainRequested(worker, unfit):
                self.moves.drain(worker, unfit)
            case ShardLoaded(worker, shard):
                self.moves.loaded(worker, shard)
            case ShardFailed(worker, shard, reason):
                self.moves.loaded(worker, shard, reason)
            case TrialStopped(trial):
                self.state.forget(trial)
            case TrialAllowed(gang=gang, seconds=seconds):
                allow(self.state, event)
                if gang > 1 or seconds is not None:
                    self.moves.spread()
            case TrialHeld():
                hold(self.state, event)
            case CheckAdded(trial, number):
                if trial not in self.state.stopped:
                    self.state.checks[trial, number] = (1 << self.config.n_shards) - 1
            case HorizonSet(at_s):
                self.state.horizon = at_s
            case PriorityChanged(trial, priority):
                self.list_scheduler.priority[trial] = priority
                if trial in self.trials:
                    self.state.requeue(self.trials[trial])
            case TimerFired():
                pass
            case _:
                assert_never(event)

    def _add_chain(self, chain: Chain) -> None:
        if chain.n_shards != self.config.n_shards:
            raise ValueError(
                f"trial {chain.trial}: {chain.n_shards} shards, the run has {self.config.n_shards}"
            )
        trial = self.trials.get(chain.trial)
        if trial is None:
            trial = self.trials[chain.trial] = Trial(chain.trial)
            self.list_scheduler.rem[chain.trial] = 0.0
            if chain.trial in self.state.stopped:
                self.state.stopped.remove(chain.trial)
                for unit in self.bindings:  # one from before it was stopped may still run
                    if unit.kind == "train" and unit.trial == chain.trial:
                        trial.active = unit
        was_open = bool(trial.open)
        self.state.busy[chain.trial] = trial
        trial.add(chain)
        if trial.partial:
            self.state.cut.add(chain.trial)
        self.moves.has_begun = True
        self.moves.make_room(chain.trial, chain.memory_bytes)
        self.times.add_trial(chain.trial)
        self.state.work_left.chain_added(trial, self.state.now, was_open=was_open)
        for unit in self.state.early.pop(chain.trial, ()):
            self._on_unit_ready(unit)

    def _on_unit_ready(self, unit: Unit) -> None:
        trial = self.trials.get(unit.trial)
        if unit in self.bindings:
            self.state.give_back(unit)
        if unit.kind == "check":
            if (unit.trial, unit.epoch) in self.state.checks:
                self.state.add_evaluation(unit)
            return
        if trial is None or unit.epoch not in trial.epochs:
            if unit.trial not in self.state.stopped:  # its round is on its way
                self.state.early.setdefault(unit.trial, []).append(unit)
            return
        if unit.kind == "evaluate":
            self.state.add_evaluation(unit)
        elif unit not in trial.ready:
            self.state.busy[unit.trial] = trial
            trial.note_ready(unit)
            self.state.requeue(trial)

    def _on_unit_started(self, unit: Unit, worker: Worker) -> None:
        binding = self.bindings.get(unit)
        if binding is None or binding.worker != worker:
            return
        host = self.workers[worker]
        if host.bound[0] != unit:
            other = self.bindings[host.bound[0]]
            other.began_s, other.stores = None, other.started
            self.state.stop_clock(other)
            host.bound.reverse()
        binding.started, binding.began_s = True, self.state.now
        self.state.time_worker(host)
        if unit.kind != "train":
            begin(self.state, binding)

    def _on_unit_trains(self, unit: Unit, worker: Worker) -> None:
        binding = self.bindings.get(unit)
        if binding is None or binding.worker != worker:
            return
        if not binding.started:
            self._on_unit_started(unit, worker)
        begin(self.state, binding)

    def _on_unit_done(self, event: UnitDone) -> None:
        unit, binding = event.unit, self.state.release(event.unit)
        spend(self.state, unit, event.seconds + sum(seconds for _, seconds in event.then))
        self.state.clear_strikes(unit)
        if unit.kind == "check":
            self.state.drop_evaluation(unit)
            check, checks = (unit.trial, unit.epoch), self.state.checks
            if check in checks:
                checks[check] &= ~(1 << unit.position)
                if not checks[check]:
                    del checks[check]
            return
        trial = self.trials.get(unit.trial)
        if trial is None or unit.epoch not in trial.epochs:
            return
        epoch = trial.epochs[unit.epoch]
        worker = binding.worker if binding is not None else None
        if unit.kind == "evaluate":
            epoch.unscored &= ~(1 << unit.position)
            trial.close(unit.epoch)
            self.state.drop_evaluation(unit)
            if worker is not None:
                self.times.observe_evaluation(unit.trial, worker, event.seconds)
                self.state.work_left.task_done(worker)
            return
        repeat = trial.is_repeat(unit)
        self.state.drop_training(trial, unit)
        was_cut = trial.partial.pop(unit, None) is not None  # its time is that of the last piece
        following = units_after(unit, epoch.chain.n_shards)
        visits = zip((unit, *following), (event.shard, *(s for s, _ in event.then)), strict=False)
        for visitor, shard in visits:
            if not trial.record(visitor, shard):
                fail(self.state, unit.trial, f"{visitor} visited shard {shard} for the second time")
                return
        if binding is not None and binding.visits != (event.shard, *(s for s, _ in event.then)):
            self.state.work_left.is_stale = True
        for shard, seconds in event.scored:
            epoch.unscored &= ~(1 << shard)
            if worker is not None:
                self.times.observe_evaluation(unit.trial, worker, seconds)
        trial.close(unit.epoch)
        if worker is not None:
            self.list_scheduler.home[unit.trial] = worker
            epoch.trained_on = worker
            if binding is not None and binding.members and event.seconds and not was_cut:
                self.state.gang_s[unit.trial, len(binding.workers)] = event.seconds
            elif binding is not None and not (repeat or was_cut or binding.members):
                self._learn(event, worker)
        trial.note_done()
        self.state.requeue(trial)

    def _learn(self, done: UnitDone, worker: Worker) -> None:
        was_known = self.times.known
        unit_seconds = (done.seconds, *(seconds for _, seconds in done.then))
        self.times.observe(done.unit.trial, worker, unit_seconds)
        if self.times.known != was_known:
            self.state.work_left.is_stale = True
        self.state.work_left.task_done(worker)
        if self.config.rebalance:
            self.moves.watch_drift(worker)

    def _on_unit_returned(self, unit: Unit, shard: int | None, seconds: float) -> None:
        binding = self.bindings.get(unit)
        if binding is not None and shard is not None and unit.trial in self.trials:
            # Its state stays in that worker's memory.
            self.list_scheduler.home[unit.trial] = binding.worker
        self.state.give_back(unit)
        if unit.kind == "check":
            self.state.drop_evaluation(unit)
            return
        trial = self.trials.get(unit.trial)
        if unit.trial in self.state.early and unit in self.state.early[unit.trial]:
            self.state.early[unit.trial].remove(unit)
        if trial is None or unit.epoch not in trial.epochs:
            return
        if unit.kind == "evaluate":
            self.state.drop_evaluation(unit)
            return
        self.state.drop_training(trial, unit)
        if shard is not None and not trial.is_repeat(unit):
            trial.partial[unit] = shard
            self.state.cut.add(unit.trial)
            if seconds:  # it has made progress, so it was not the cause of its strikes
                self.state.clear_strikes(unit)

    def _on_worker_added(self, event: WorkerAdded) -> None:
        if event.worker in self.workers:
            self._on_worker_removed(WorkerRemoved(event.worker, expected=True))
        held = sum(1 << shard for shard in event.shards)
        host = KnownWorker(
            event.worker,
            event.max_shards,
            held=held,
            placed_speed=event.speed,
            node=event.node,
            process=event.process,
            copy_room=event.copy_room,
            room=event.room,
            shard_room=event.shard_room,
        )
        self.state.rooms.set_room(event.worker, host.room_beside(self.config.shard_bytes))
        self.times.add_worker(event.worker, event.speed)
        self.list_scheduler.held[event.worker] = held
        self.list_scheduler.speed[event.worker] = event.speed
        self.list_scheduler.load[event.worker] = 0.0
        self.list_scheduler.free_at[event.worker] = self.state.now
        self.workers.add(host, self.state.ranks[event.worker])
        self.moves.workers_changed = True

    def _on_worker_removed(self, event: WorkerRemoved) -> None:
        host = self.workers.get(event.worker)
        if host is None:
            return
        # One that drains may go when it is idle; one that was told to end, and did not in time, has
        # been killed under its unit.
        if not event.expected and (host.bound or not host.draining):
            worker_lost(self.state, host)
        for unit in list(host.bound):
            binding = self.bindings[unit]
            if binding.worker == event.worker:
                self.state.give_back(unit)
            else:  # its leader will report it
                binding.lost += (event.worker,)
        self.workers.remove(event.worker)
        self.times.forget_worker(event.worker)
        self.list_scheduler.remove_worker(event.worker)
        self.state.rooms.remove_worker(event.worker)
        self.moves.workers_changed = True

    # ---- decisions

    def _settle(self) -> None:
        state = self.state
        state.wake_at = None
        self.moves.settle()
        if state.work_left.is_stale:
            state.recount()
        judge(state)
        self.moves.watch_rooms()
        self.gangs.settle()
        self.assigner.settle()
        tell_rests(state)
        watch_time_limits(state)
        self.moves.watch_drains()
        self.moves.watch_missing()
        self.moves.watch_unfit()

    def check(self) -> None:
        """Raise ``AssertionError`` with a clear sentence if an invariant does not hold."""
        invariants.check(self.state)
        if not self.moves.workers_changed:
            invariants.check_no_shard_is_missing(self.state)
