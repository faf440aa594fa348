"""The dispatcher: events in, instructions out; a pure state machine.

It binds each ready unit to a worker and a shard that the worker holds, late, by what is true at
that moment. A thin shell inside Dask's scheduler feeds it (`dagsel.execution.scheduler_plugin`), a
simulator drives the same object in virtual time (`dagsel.planning.virtual`). It knows no clock: the
shell passes the time with the events, and wakes it at `Dispatcher.wake_at` with a `Tick`.

Its state is a `dagsel.planning.board.Board`. Here each event is taken in; then all that acts on the
board has its turn: `dagsel.planning.moves` places shards, `dagsel.planning.gangs` and
`dagsel.planning.seating` bind units, `dagsel.planning.terms` and `dagsel.planning.strikes` watch
trials and units. Which unit a worker gets is decided by `dagsel.planning.rule.Shop`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import assert_never

from dagsel.planning import invariants
from dagsel.planning.board import Board
from dagsel.planning.config import DispatchConfig
from dagsel.planning.events import (
    CheckAdded,
    DrainRequested,
    Event,
    GangBroke,
    HorizonSet,
    Instruction,
    PriorityChanged,
    RoundAdded,
    ShardFailed,
    ShardLoaded,
    Tick,
    TrialAllowed,
    TrialHeld,
    TrialStopped,
    UnitDone,
    UnitFailed,
    UnitLost,
    UnitReady,
    UnitReturned,
    UnitStarted,
    Worker,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.planning.gangs import Gangs
from dagsel.planning.holdings import Seated
from dagsel.planning.ledger import Trial
from dagsel.planning.moves import Moves
from dagsel.planning.retire import Candidate, choose
from dagsel.planning.rounds import Chain, Unit
from dagsel.planning.rule import bits
from dagsel.planning.seating import Seating
from dagsel.planning.strikes import culprit, fail, raised, strike, watch_clock
from dagsel.planning.terms import allow, hold, spend, tell_rests

__all__ = ["DispatchConfig", "Dispatcher"]


class Dispatcher:
    """Binds ready units to workers and shards.

    Parameters
    ----------
    config
        What it is told once.

    Attributes
    ----------
    tally
        Counts.

    Examples
    --------
    >>> from dagsel.planning.rounds import Round
    >>> dispatcher = Dispatcher(DispatchConfig(n_shards=1))
    >>> round_ = Round(0, (Chain(trial=7, epochs=range(1, 2), n_shards=1),))
    >>> dispatcher.handle(RoundAdded(round_), WorkerAdded("a"), now_s=0.0)
    [LoadShard(worker='a', shard=0)]
    >>> unit = Unit("train", 7, 1, 0)
    >>> dispatcher.handle(ShardLoaded("a", 0), UnitReady(unit), now_s=1.0)
    [Bind(unit=Unit(kind='train', trial=7, epoch=1, position=0), worker='a', shard=0)]
    """

    def __init__(self, config: DispatchConfig) -> None:
        self.config = config
        self.board = board = Board(config)
        self.tally, self.trials, self.bindings = board.tally, board.trials, board.bindings
        self.holdings, self.times, self.shop = board.holdings, board.times, board.shop
        self.moves = Moves(board)
        self.gangs = Gangs(board)
        self.seating = Seating(board, self.gangs)

    # ---- events

    def handle(self, *events: Event, now_s: float) -> list[Instruction]:
        """Take in all events, then decide.

        Parameters
        ----------
        *events
            What has happened since the last call, in order. Give together what came together:
            nothing is decided in between.
        now_s
            The time; never less than before.

        Returns
        -------
        instructions
            What to do, in order.

        Raises
        ------
        ValueError
            A chain's number of shards is not the run's, or an epoch is added twice.
        """
        self.board.now = now_s
        self.board.out = []
        for event in events:
            self._take(event)
        self._settle()
        return self.board.out

    @property
    def wake_at(self) -> float | None:
        """When the shell shall send a `Tick`; None when only events matter."""
        return self.board.wake_at

    def knows(self, worker: Worker) -> bool:
        """Whether the worker was added and not removed."""
        return worker in self.holdings.workers

    def worker_of(self, unit: Unit) -> Worker | None:
        """Worker that the unit is bound to; None when it is bound to none."""
        binding = self.bindings.get(unit)
        return None if binding is None else binding.worker

    def holds(self, worker: Worker, shard: int) -> bool:
        """Whether the worker holds the shard."""
        seat = self.holdings.workers.get(worker)
        return seat is not None and bool(seat.held >> shard & 1)

    def home(self, trial: int) -> Worker | None:
        """Worker that made the trial's newest state; None when there is none."""
        return self.shop.home.get(trial)

    @property
    def n_staying(self) -> int:
        """Workers that are there and were not told to go."""
        return sum(not seat.draining for seat in self.holdings.workers.values())

    def cheapest(
        self,
        n: int,
        *,
        but: Collection[Worker] = (),
        nodes: Mapping[Worker, str] = MappingProxyType({}),
    ) -> tuple[Worker, ...]:
        """Choose at most n workers whose loss costs least, besides those that go anyway.

        `nodes` says with what a worker is billed; others are billed alone.
        """
        seats = [s for s in self.holdings.workers.values() if s.worker not in but]
        there = [
            Candidate(s.worker, bool(s.bound), frozenset(bits(s.held)), nodes.get(s.worker))
            for s in seats
            if not s.draining
        ]
        return choose(there, n)

    def visits_before(self, unit: Unit) -> tuple[int, ...]:
        """Shards that the trial has visited in the unit's epoch before it, in order."""
        trial = self.trials.get(unit.trial)
        if unit.kind != "train" or trial is None:
            return ()
        visited = trial.epochs[unit.epoch].visited
        return tuple(shard for shard in visited[: unit.position] if shard is not None)

    def _take(self, event: Event) -> None:
        match event:
            case UnitReady(unit):
                self._on_ready(unit)
            case UnitStarted(unit, worker):
                self._on_started(unit, worker)
            case UnitDone():
                self._on_done(event)
            case RoundAdded(round_):
                for chain in round_.chains:
                    self._add_chain(chain)
            case UnitReturned(unit, shard, seconds):
                spend(self.board, unit, seconds)
                self._on_returned(unit, shard, seconds)
            case UnitLost(unit):  # its record stays: it visits the same shard again
                self.board.clear_strikes(unit)
            case UnitFailed():
                raised(self.board, event)
            case GangBroke(unit, reason):
                strike(self.board, unit, f"the gang of {unit} broke: {reason}")
            case WorkerAdded():
                self._on_worker_added(event)
            case WorkerRemoved():
                self._on_worker_removed(event)
            case DrainRequested(worker):
                self.moves.drain(worker)
            case ShardLoaded(worker, shard):
                self.moves.loaded(worker, shard)
            case ShardFailed(worker, shard, reason):
                self.moves.loaded(worker, shard, reason)
            case TrialStopped(trial):
                self.board.forget(trial)
            case TrialAllowed(gang=gang, seconds=seconds):
                allow(self.board, event)
                if gang > 1 or seconds is not None:
                    self.moves.spread()
            case TrialHeld():
                hold(self.board, event)
            case CheckAdded(trial, number):
                if trial not in self.board.stopped:
                    self.board.checks[trial, number] = (1 << self.config.n_shards) - 1
            case HorizonSet(at_s):
                self.board.horizon = at_s
            case PriorityChanged(trial, priority):
                self.shop.priority[trial] = priority
                if trial in self.trials:
                    self.board.requeue(self.trials[trial])
            case Tick():
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
            self.shop.rem[chain.trial] = 0.0
            self.board.stopped.discard(chain.trial)
            for unit in self.bindings:  # a unit of its former life may not have stopped yet
                if unit.kind == "train" and unit.trial == chain.trial:
                    trial.active = unit
        trial.add(chain)
        self.moves.has_begun = True
        self.times.add_trial(chain.trial, chain.cost)
        self.board.accounts.is_stale = True
        for unit in self.board.early.pop(chain.trial, ()):
            self._on_ready(unit)

    def _on_ready(self, unit: Unit) -> None:
        trial = self.trials.get(unit.trial)
        if unit in self.bindings:
            self.board.give_back(unit)
        if unit.kind == "check":
            if (unit.trial, unit.epoch) in self.board.checks:
                self.board.add_evaluation(unit)
            return
        if trial is None or unit.epoch not in trial.epochs:
            if unit.trial not in self.board.stopped:  # its round is on its way
                self.board.early.setdefault(unit.trial, []).append(unit)
            return
        if unit.kind == "evaluate":
            self.board.add_evaluation(unit)
        elif unit not in trial.ready:
            trial.ready.append(unit)
            trial.ready.sort()
            self.board.requeue(trial)

    def _on_started(self, unit: Unit, worker: Worker) -> None:
        binding = self.bindings.get(unit)
        if binding is None or binding.worker != worker:
            return
        seat = self.holdings.workers[worker]
        if seat.bound[0] != unit:
            self.bindings[seat.bound[0]].began_s = None
            seat.bound.reverse()
        binding.started, binding.began_s = True, self.board.now
        self.board.time_seat(seat)

    def _on_done(self, event: UnitDone) -> None:
        unit, binding = event.unit, self.board.release(event.unit)
        spend(self.board, unit, event.seconds)
        self.board.clear_strikes(unit)
        self.board.failures.pop(unit, None)
        if unit.kind == "check":
            self.board.checked(unit)
            return
        trial = self.trials.get(unit.trial)
        if trial is None or unit.epoch not in trial.epochs:
            return
        epoch = trial.epochs[unit.epoch]
        worker = binding.worker if binding is not None else None
        if unit.kind == "evaluate":
            epoch.unscored &= ~(1 << unit.position)
            trial.close(unit.epoch)
            self.board.drop_evaluation(unit)
            if worker is not None:
                self.times.observe_evaluation(unit.trial, worker, event.shard, event.seconds)
                self.board.accounts.unit_done(worker)
            return
        repeat = trial.is_repeat(unit)
        self.board.drop_training(trial, unit)
        was_cut = trial.partial.pop(unit, None) is not None  # what its last piece took says little
        if not trial.record(unit, event.shard):
            fail(self.board, unit.trial, f"{unit} visited shard {event.shard} for the second time")
            return
        if binding is not None and binding.shard != event.shard:
            self.board.accounts.is_stale = True
        trial.close(unit.epoch)
        if worker is not None:
            self.shop.move_home(unit.trial, worker)
            epoch.trained_on = worker
            if binding is not None and binding.members and event.seconds and not was_cut:
                self.board.learn_gang(unit, len(binding.workers), event.seconds)
            elif binding is not None and not (repeat or was_cut or binding.members):
                self._learn(unit, worker, event)
        self.board.requeue(trial)

    def _learn(self, unit: Unit, worker: Worker, event: UnitDone) -> None:
        was_known = self.times.known
        self.times.observe(unit.trial, worker, event.shard, event.seconds)
        if self.times.known != was_known:
            self.board.accounts.is_stale = True
        self.board.accounts.unit_done(worker)
        if self.config.rebalance:
            self.moves.watch_drift(worker)

    def _on_returned(self, unit: Unit, shard: int | None, seconds: float) -> None:
        binding = self.bindings.get(unit)
        if binding is not None and shard is not None and unit.trial in self.trials:
            self.shop.move_home(unit.trial, binding.worker)  # its state waits in memory there
        self.board.give_back(unit)
        if unit.kind == "check":
            self.board.drop_evaluation(unit)
            return
        trial = self.trials.get(unit.trial)
        if unit.trial in self.board.early and unit in self.board.early[unit.trial]:
            self.board.early[unit.trial].remove(unit)
        if trial is None or unit.epoch not in trial.epochs:
            return
        if unit.kind == "evaluate":
            self.board.drop_evaluation(unit)
            return
        self.board.drop_training(trial, unit)
        if shard is not None and not trial.is_repeat(unit):
            trial.partial[unit] = shard
            if seconds:  # it has got on: whoever was lost before, it was not for what it did there
                self.board.clear_strikes(unit)

    def _on_worker_added(self, event: WorkerAdded) -> None:
        if event.worker in self.holdings.workers:
            self._on_worker_removed(WorkerRemoved(event.worker, expected=True))
        held = sum(1 << shard for shard in event.shards)
        seat = Seated(
            event.worker, event.max_shards, held=held, placed_speed=event.speed, node=event.node
        )
        self.holdings.workers[event.worker] = seat
        self.times.add_worker(event.worker, event.speed)
        self.shop.held[event.worker] = held
        self.shop.speed[event.worker] = event.speed
        self.shop.load[event.worker] = 0.0
        self.shop.free_at[event.worker] = self.board.now
        self.moves.members_changed = True

    def _on_worker_removed(self, event: WorkerRemoved) -> None:
        seat = self.holdings.workers.get(event.worker)
        if seat is None:
            return
        suspect = culprit(self.board, seat, expected=event.expected)
        for unit in list(seat.bound):
            binding = self.bindings[unit]
            if binding.worker == event.worker:
                self.board.give_back(unit)
            else:  # its leader finds out
                binding.lost += (event.worker,)
        del self.holdings.workers[event.worker]
        self.times.forget_worker(event.worker)
        self.shop.remove_worker(event.worker)
        self.moves.members_changed = True
        if suspect is not None:
            reason = f"its worker {event.worker} was lost while {suspect} ran"
            strike(self.board, suspect, reason)

    # ---- decisions

    def _settle(self) -> None:
        board = self.board
        board.wake_at = None
        self.moves.settle()
        if board.accounts.is_stale:
            board.recount()
        self.gangs.settle()
        self.seating.settle()
        tell_rests(board)
        watch_clock(board)
        self.moves.watch_drains()
        self.moves.watch_homeless()

    def check(self) -> None:
        """Raise ``AssertionError`` with a clear sentence if an invariant does not hold."""
        invariants.check(self.board)
        if not self.moves.members_changed:
            invariants.check_homes(self.board)
