"""The dispatcher: events in, instructions out; a pure state machine.

It binds each ready unit to a worker and a shard that the worker holds, late, by what is true at
that moment. A thin shell inside Dask's scheduler feeds it (`dagsel.execution.scheduler_plugin`), a
simulator drives the same object in virtual time (`dagsel.planning.virtual`). It knows no clock: the
shell passes the time with the events, and wakes it at `Dispatcher.wake_at` with a `Tick`.

Its state is a `dagsel.planning.board.Board`; which unit a worker gets is decided by
`dagsel.planning.rule.Shop`.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import assert_never

from dagsel.planning import invariants
from dagsel.planning.accounting import Binding
from dagsel.planning.board import Board
from dagsel.planning.config import DispatchConfig
from dagsel.planning.events import (
    CheckAdded,
    Drained,
    DrainRequested,
    Event,
    FailRun,
    FailTrial,
    GangBroke,
    HorizonSet,
    Instruction,
    Preempt,
    PriorityChanged,
    RestartWorker,
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
from dagsel.planning.holdings import DRIFT, WATCH_S, Seated
from dagsel.planning.ledger import Trial
from dagsel.planning.retire import Candidate, choose
from dagsel.planning.rounds import Chain, Unit
from dagsel.planning.rule import bits
from dagsel.planning.terms import allow, hold, spend, tell_rests

__all__ = ["DispatchConfig", "Dispatcher"]

MOST_STRIKES = 2  # times `max_strikes`, however many strikes other units get meanwhile
EVERYWHERE = 1 << 30  # replicas: as many as there are workers
LONG_UNIT = 20.0  # times `overhead_s`: a unit that long need not be bound ahead of a stay


class Dispatcher:
    """Binds ready units to workers and shards.

    Parameters
    ----------
    config
        What it is told once.

    Attributes
    ----------
    wake_at
        When the shell shall send a `Tick`; None when only events matter.
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
        self.depth = 2  # units on a worker: one that runs, one that waits
        self.wake_at: float | None = None
        self.board = board = Board(config)
        self.tally, self.trials, self.bindings = board.tally, board.trials, board.bindings
        self.holdings, self.times, self.shop = board.holdings, board.times, board.shop
        self.gangs = Gangs(board)
        self._moving = False
        self._has_begun = False  # shards are placed once there is a round
        self._members_changed = False
        self._homes_changed = False
        self._homeless_since: float | None = None
        self._has_failed = False

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

    def cheapest(self, n: int, *, but: Collection[Worker] = ()) -> tuple[Worker, ...]:
        """Choose at most n workers whose loss costs least, besides those that go anyway."""
        seats = [s for s in self.holdings.workers.values() if s.worker not in but]
        there = [
            Candidate(s.worker, bool(s.bound), frozenset(bits(s.held)))
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
                self._on_failed(event)
            case GangBroke(unit, reason):
                self._strike(unit, f"the gang of {unit} broke: {reason}")
            case WorkerAdded():
                self._on_worker_added(event)
            case WorkerRemoved():
                self._on_worker_removed(event)
            case DrainRequested(worker):
                if worker in self.holdings.workers:
                    self.holdings.workers[worker].draining = True
                    self._members_changed = True
            case ShardLoaded(worker, shard):
                self._on_shard(worker, shard, None)
            case ShardFailed(worker, shard, reason):
                self._on_shard(worker, shard, reason)
            case TrialStopped(trial):
                self.board.forget(trial)
            case TrialAllowed(gang=gang, seconds=seconds):
                allow(self.board, event)
                if gang > 1 or seconds is not None:
                    self._spread()
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

    def _spread(self) -> None:
        """Let every worker hold every shard, as far as memory allows: for gangs and quanta.

        Whoever trains a gang's unit holds its shard, and who is free together is not known before.
        A trial that was stopped inside a shard goes on there: with one holder it would wait for
        that worker while another one idles.
        """
        if self.holdings.replicas != EVERYWHERE:
            self.holdings.replicas = EVERYWHERE
            self._members_changed = True

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
        self._has_begun = True
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
            self._fail(unit.trial, f"{unit} visited shard {event.shard} for the second time")
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
            self._watch_drift(worker)

    def _watch_drift(self, worker: Worker) -> None:
        """Place the shards anew when a measured speed has clearly left the one it was placed by."""
        seat = self.holdings.workers[worker]
        drift = abs(1.0 / self.times.pace[worker] / seat.placed_speed - 1.0)
        sure = self.times.n_observed[worker] >= 3 and self.times.observed_s[worker] >= WATCH_S
        if sure and drift > max(DRIFT, 3.0 * self.times.speed_error(worker)):
            speeds = self._speeds()
            if not self._moving and self.holdings.drifted(speeds):
                self.holdings.replace(speeds)
                self._moving = True

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

    def _on_failed(self, event: UnitFailed) -> None:
        self.board.give_back(event.unit)
        if event.unit.trial not in self.trials:
            return
        count = self.board.failures[event.unit] = self.board.failures.get(event.unit, 0) + 1
        if count >= self.config.max_failures:
            self._fail(event.unit.trial, event.reason)

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
        self._members_changed = True

    def _on_worker_removed(self, event: WorkerRemoved) -> None:
        seat = self.holdings.workers.get(event.worker)
        if seat is None:
            return
        led = [u for u in seat.bound if self.bindings[u].worker == event.worker]
        culprit = next((u for u in led if self.bindings[u].started), None)
        if culprit is None and led:
            culprit = led[0]
        if culprit is not None and (event.expected or self.bindings[culprit].timed_out):
            culprit = None  # asked for, or struck when its time was over
        for unit in list(seat.bound):
            if self.bindings[unit].worker == event.worker:  # else its leader finds out
                self.board.give_back(unit)
        del self.holdings.workers[event.worker]
        self.times.forget_worker(event.worker)
        self.shop.remove_worker(event.worker)
        self._members_changed = True
        if culprit is not None:
            self._strike(culprit, f"its worker {event.worker} was lost while {culprit} ran")

    def _on_shard(self, worker: Worker, shard: int, refusal: str | None) -> None:
        seat = self.holdings.workers.get(worker)
        if seat is None:
            return
        self._homes_changed = True
        seat.loading &= ~(1 << shard)
        if refusal is None:
            seat.held |= 1 << shard
            self._moving = True
        else:
            seat.refused[shard] = refusal
            self._members_changed = True
        self.board.accounts.is_stale = True

    def _fail(self, trial: int, reason: str) -> None:
        self.board.out.append(FailTrial(trial, reason))
        self.board.forget(trial)

    def _strike(self, unit: Unit, reason: str) -> None:
        if unit.trial not in self.trials:
            return
        own, others = self.board.strike(unit)
        # Where workers die under other units too, a unit may have been unlucky.
        limit = min(self.config.max_strikes + others, MOST_STRIKES * self.config.max_strikes)
        if own >= limit:
            self._fail(unit.trial, f"{reason} ({own} strikes)")

    # ---- decisions

    def _settle(self) -> None:
        self.wake_at = None
        if self._members_changed and self._has_begun:
            self._members_changed = False
            self.holdings.replace(self._speeds())
            self._moving = self._homes_changed = True
        if self._moving:
            self._move_shards()
        if self.board.accounts.is_stale:
            self.board.recount()
        if self.board.gangs or self.gangs.reserved or self.gangs.stuck:
            self.gangs.serve()
            self._watch_gangs()
        self._bind_idle()
        if self.times.known:
            self._look_ahead()
        tell_rests(self.board)
        self._watch_clock()
        self._watch_drains()
        self._watch_homeless()

    def _speeds(self) -> dict[Worker, float]:
        if not self.config.rebalance:
            return dict.fromkeys(self.times.pace, 1.0)
        return {worker: 1.0 / pace for worker, pace in self.times.pace.items()}

    def _move_shards(self) -> None:
        in_use: dict[Worker, int] = {}
        for binding in self.bindings.values():
            in_use[binding.worker] = in_use.get(binding.worker, 0) | 1 << binding.shard
        self.board.out.extend(self.holdings.moves(in_use))
        for worker, seat in self.holdings.workers.items():
            offered = 0 if seat.draining else seat.held
            if self.shop.held[worker] != offered:
                self.shop.held[worker] = offered
                self.board.accounts.is_stale = True
        self.shop.holders_changed()
        self._moving = any(
            seat.held != seat.wanted for seat in self.holdings.workers.values() if not seat.draining
        )

    def _bind_idle(self) -> None:
        if not self.board.n_evaluations and next(self.shop.idle, None) is None:
            return
        seats = [s for s in self.holdings.workers.values() if not s.bound and not s.draining]
        rank = self.shop.speed if self.shop.replicated else self.shop.load
        first = self._warm_homes() if len(seats) > 1 else ()
        for seat in sorted(seats, key=lambda s: (s.worker not in first, -rank[s.worker])):
            if self.board.n_evaluations or not self.shop.is_dry(seat.worker):
                self._serve(seat, self.board.now, blocked=0)

    def _warm_homes(self) -> set[Worker | None]:
        """Workers that keep the state of an idle trial which was stopped inside a shard."""
        cut = (trial for trial in self.shop.idle if self.trials[trial].partial)
        return {self.shop.home.get(trial) for trial in cut}

    def _serve(self, seat: Seated, start: float, *, blocked: int) -> None:
        """Bind a unit to the seat, an evaluating one first."""
        unit = self.board.pick_evaluation(seat, blocked) if self.board.n_evaluations else None
        if unit is not None:
            self.board.bind(unit, seat, unit.position)
            return
        if seat.worker in self.gangs.reserved:
            return
        taken = self.shop.pick(seat.worker, start, blocked=blocked)
        if taken is not None:
            trial, shard = taken
            unit = self.trials[trial].ready[0]
            if self.board.fits(unit, seat.worker, shard, start):
                self.board.bind(unit, seat, shard)
        elif self.shop.wait_until < inf:
            self._wake(self.shop.wait_until)

    def _look_ahead(self) -> None:
        """Bind behind units that are about to end what no idle worker could run now."""
        if not self.board.n_evaluations and next(self.shop.idle, None) is None:
            return
        now, free_at, blocked, soonest = self.board.now, self.shop.free_at, 0, inf
        near: list[tuple[Seated, Binding]] = []
        for worker, seat in self.holdings.workers.items():
            if seat.draining:
                continue
            if not seat.bound:
                blocked |= 0 if self.shop.is_dry(worker) else seat.held
            elif len(seat.bound) < self.depth:
                binding = self.bindings[seat.bound[-1]]
                opens = free_at[worker] - binding.ahead_s
                if not binding.ahead_s:
                    continue
                if opens <= now:
                    near.append((seat, binding))
                elif opens < soonest:
                    soonest = opens
        self._wake(soonest)
        for seat, binding in near:
            if self._may_bind_behind(binding, seat):
                self._serve(seat, free_at[seat.worker], blocked=blocked)

    def _may_bind_behind(self, binding: Binding, seat: Seated) -> bool:
        if binding.began_s is None or binding.preempted_s is not None:
            return False
        if self.board.now > binding.began_s + binding.seconds + binding.ahead_s:
            return False  # overdue: who knows when it ends
        if binding.unit.kind == "train" and binding.unit.trial in self.trials:
            long = binding.seconds >= LONG_UNIT * self.config.overhead_s
            return not (long and self.shop.would_stay(binding.unit.trial, seat.worker))
        return True

    def _wake(self, at: float) -> None:
        if self.board.now < at < inf and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at

    # ---- what time brings

    def _watch_clock(self) -> None:
        """Stop units past their limit; restart the workers of those that do not heed."""
        limit = self.config.unit_timeout_s
        if limit is None:
            return
        for binding in list(self.bindings.values()):
            if binding.began_s is None:
                continue
            if binding.preempted_s is None:
                if self.board.now < binding.began_s + limit:
                    self._wake(binding.began_s + limit)
                    continue
                binding.preempted_s, binding.timed_out = self.board.now, True
                self.board.out.append(Preempt(binding.unit, binding.worker))
                self._strike(binding.unit, f"{binding.unit} ran longer than {limit:g} s")
            seat = self.holdings.workers[binding.worker]
            overdue_s = binding.preempted_s + self.config.grace_s
            if self.board.now < overdue_s:
                self._wake(overdue_s)
            elif not seat.restarting:
                seat.restarting = True
                reason = (
                    f"{binding.unit} was told to stop {self.config.grace_s:g} s ago and runs on"
                )
                self.board.out.append(RestartWorker(binding.worker, reason))

    def _watch_drains(self) -> None:
        for seat in self.holdings.workers.values():
            if seat.draining and not seat.drained and self.holdings.drain_is_over(seat):
                seat.drained = True
                self.board.out.append(Drained(seat.worker))

    def _watch_gangs(self) -> None:
        for number, since in list(self.gangs.stuck.items()):
            overdue_s = since + self.config.capacity_timeout_s
            if self.board.now < overdue_s:
                self._wake(overdue_s)
            else:
                self._fail(number, self.gangs.shortage(number))

    def _watch_homeless(self) -> None:
        if not self._homes_changed and self._homeless_since is None:
            return
        self._homes_changed = False
        stay = [seat for seat in self.holdings.workers.values() if not seat.draining]
        homeless = self.holdings.homeless() if stay and self.trials else []
        if not homeless:
            self._homeless_since = None
            return
        if self._homeless_since is None:
            self._homeless_since = self.board.now
        overdue_s = self._homeless_since + self.config.capacity_timeout_s
        refused = any(all(shard in seat.refused for seat in stay) for shard in homeless)
        if (refused or self.board.now >= overdue_s) and not self._has_failed:
            self._has_failed = True
            self.board.out.append(FailRun(self.holdings.shortage(homeless)))
        elif not self._has_failed:
            self._wake(overdue_s)

    def check(self) -> None:
        """Raise ``AssertionError`` with a clear sentence if an invariant does not hold."""
        invariants.check(self.board)
        if not self._members_changed:
            invariants.check_homes(self.board)
