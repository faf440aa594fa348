"""The dispatcher: events in, instructions out; a pure state machine.

It binds each ready unit to a worker and a shard that the worker holds, late, by what is true at
that moment. A thin shell inside Dask's scheduler feeds it (`dagsel.execution.scheduler_plugin`), a
simulator drives the same object in virtual time (`dagsel.planning.virtual`). It knows no clock: the
shell passes the time with the events, and wakes it at `Dispatcher.wake_at` with a `Tick`.

The state is in three places: `Dispatcher.trials` (what was visited, what is ready), ``holdings``
(who holds and runs what) and ``bindings`` (which unit is where). The rule's `Shop` and the unit-time
model hold nothing that could not be counted anew from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import assert_never

from dagsel.planning.accounting import Accounts, Binding
from dagsel.planning.costs import UnitTimes
from dagsel.planning.events import (
    Bind,
    Drained,
    DrainRequested,
    Event,
    FailRun,
    FailTrial,
    Instruction,
    Preempt,
    PriorityChanged,
    RestartWorker,
    RoundAdded,
    ShardFailed,
    ShardLoaded,
    Tick,
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
from dagsel.planning.holdings import DRIFT, Holdings, Seated
from dagsel.planning.ledger import Trial
from dagsel.planning.rounds import Chain, Unit
from dagsel.planning.rule import Shop, bits

LONG_UNIT = 20.0  # times `overhead_s`: a unit that long need not be bound ahead of a stay
# A binding that is made early is made with less knowledge: at 10% of a unit before its end it costs
# 1.5% of the makespan (hetC 16×8), more than it hides where units are long.
LOOKAHEAD_SHARE = 0.04  # of the unit's time,
LOOKAHEAD_OVERHEADS = 4.0  # but no less than so many times `overhead_s`


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """What the dispatcher is told once.

    Parameters
    ----------
    n_shards
        Number of training shards, and of validation shards.
    replicas
        Copies of each shard, on distinct workers.
    max_strikes
        So many workers may be lost, or time limits be passed, while a unit runs before its trial
        fails.
    max_failures
        So many exceptions of a unit fail its trial.
    unit_timeout_s
        Time limit of a unit; None for none.
    grace_s
        So long after it was told to stop a unit past its limit has its worker restarted.
    lookahead_s
        A worker whose running unit is expected to end within this time may get its next one; less
        where units are short enough that a tenth of this hides what it costs to tell a worker.
    overhead_s
        What it costs to tell a worker of a unit; long units are not bound ahead when that would
        move a state that may stay.
    capacity_timeout_s
        So long a shard may be without a place before the run fails.
    rebalance
        Whether shards follow the workers' measured speeds; if not, each worker gets as many as
        the others.
    shard_weights
        Relative work of each shard; equal by default.
    """

    n_shards: int
    replicas: int = 1
    max_strikes: int = 3
    max_failures: int = 1
    unit_timeout_s: float | None = None
    grace_s: float = 10.0
    lookahead_s: float = 0.1
    overhead_s: float = 0.003
    capacity_timeout_s: float = 60.0
    rebalance: bool = True
    shard_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("n_shards", "replicas", "max_strikes", "max_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.shard_weights is not None and len(self.shard_weights) != self.n_shards:
            raise ValueError(
                f"{len(self.shard_weights)} shard_weights were given for {self.n_shards} shards"
            )


@dataclass(slots=True)
class Tally:
    """Counts of what the dispatcher has done.

    Attributes
    ----------
    bound, looked_ahead
        Units bound, and those of them bound behind a running one.
    hops, stays
        Training units whose trial's state had to move, and those whose state was there.
    evaluation_hops
        Evaluating units to which the state had to move.
    """

    bound: int = 0
    looked_ahead: int = 0
    hops: int = 0
    stays: int = 0
    evaluation_hops: int = 0


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
        self.tally = Tally()
        self.trials: dict[int, Trial] = {}
        self.bindings: dict[Unit, Binding] = {}
        self.holdings = Holdings(config.n_shards, config.replicas)
        self.times = UnitTimes(config.n_shards, config.shard_weights)
        self.shop: Shop[Worker] = Shop(self._estimate)
        self._accounts = Accounts(self.shop, self.times, self.holdings)
        self._evaluations: list[dict[Unit, None]] = [{} for _ in range(config.n_shards)]
        self._n_evaluations = 0
        self._stopped: set[int] = set()
        self._strikes: dict[Unit, int] = {}
        self._failures: dict[Unit, int] = {}
        self._early: dict[int, list[Unit]] = {}
        self._moving = False
        self._has_begun = False  # shards are placed once there is a round
        self._members_changed = False
        self._homes_changed = False
        self._homeless_since: float | None = None
        self._has_failed = False
        self._now = 0.0
        self._out: list[Instruction] = []

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
        self._now = now_s
        self._out = []
        for event in events:
            self._take(event)
        self._settle()
        return self._out

    def knows(self, worker: Worker) -> bool:
        """Whether the worker was added and not removed."""
        return worker in self.holdings.workers

    def worker_of(self, unit: Unit) -> Worker | None:
        """Worker that the unit is bound to; None when it is bound to none."""
        binding = self.bindings.get(unit)
        return None if binding is None else binding.worker

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
            case UnitReturned(unit, shard):
                self._on_returned(unit, shard)
            case UnitLost(unit):
                self._strikes.pop(unit, None)  # its record stays: it visits the same shard again
            case UnitFailed():
                self._on_failed(event)
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
                self._forget(trial)
            case PriorityChanged(trial, priority):
                self.shop.priority[trial] = priority
                if trial in self.trials:
                    self._requeue(self.trials[trial])
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
            self._stopped.discard(chain.trial)
            for unit in self.bindings:  # a unit of its former life may not have stopped yet
                if unit.kind == "train" and unit.trial == chain.trial:
                    trial.active = unit
        trial.add(chain)
        self._has_begun = True
        self.times.add_trial(chain.trial, chain.cost)
        self._accounts.is_stale = True
        for unit in self._early.pop(chain.trial, ()):
            self._on_ready(unit)

    def _on_ready(self, unit: Unit) -> None:
        trial = self.trials.get(unit.trial)
        if unit in self.bindings:
            self._give_back(unit)
        if trial is None or unit.epoch not in trial.epochs:
            if unit.trial not in self._stopped:  # its round is on its way
                self._early.setdefault(unit.trial, []).append(unit)
            return
        if unit.kind == "evaluate":
            if unit not in self._evaluations[unit.position]:
                self._evaluations[unit.position][unit] = None
                self._n_evaluations += 1
        elif unit not in trial.ready:
            trial.ready.append(unit)
            trial.ready.sort()
            self._requeue(trial)

    def _on_started(self, unit: Unit, worker: Worker) -> None:
        binding = self.bindings.get(unit)
        if binding is None or binding.worker != worker:
            return
        seat = self.holdings.workers[worker]
        if seat.bound[0] != unit:
            self.bindings[seat.bound[0]].began_s = None
            seat.bound.reverse()
        binding.started, binding.began_s = True, self._now
        self._time_seat(seat)

    def _on_done(self, event: UnitDone) -> None:
        unit, binding = event.unit, self._release(event.unit)
        self._strikes.pop(unit, None)
        self._failures.pop(unit, None)
        trial = self.trials.get(unit.trial)
        if trial is None or unit.epoch not in trial.epochs:
            return
        epoch = trial.epochs[unit.epoch]
        worker = binding.worker if binding is not None else None
        if unit.kind == "evaluate":
            self._evaluation_done(trial, unit)
            if worker is not None:
                self.times.observe_evaluation(unit.trial, worker, event.shard, event.seconds)
                self._accounts.unit_done(worker)
            return
        repeat = trial.is_repeat(unit)
        if unit in trial.ready:
            trial.ready.remove(unit)
            if trial.active is None:
                self.shop.leave(unit.trial)
        trial.partial.pop(unit, None)
        if not trial.record(unit, event.shard):
            self._fail(unit.trial, f"{unit} visited shard {event.shard} for the second time")
            return
        if binding is not None and binding.shard != event.shard:
            self._accounts.is_stale = True
        trial.close(unit.epoch)
        if worker is not None:
            self.shop.move_home(unit.trial, worker)
            epoch.trained_on = worker
            if not repeat:
                self._learn(unit, worker, event)
        self._requeue(trial)

    def _learn(self, unit: Unit, worker: Worker, event: UnitDone) -> None:
        was_known = self.times.known
        self.times.observe(unit.trial, worker, event.shard, event.seconds)
        if self.times.known != was_known:
            self._accounts.is_stale = True
        self._accounts.unit_done(worker)
        if self.config.rebalance:
            self._watch_drift(worker)

    def _watch_drift(self, worker: Worker) -> None:
        """Place the shards anew when a measured speed has clearly left the one it was placed by."""
        seat = self.holdings.workers[worker]
        speed = 1.0 / self.times.pace[worker]
        sure = self.times.n_observed[worker] >= 3
        if sure and abs(speed / seat.placed_speed - 1.0) > DRIFT + 2 * self.times.speed_error(worker):
            speeds = self._speeds()
            if not self._moving and self.holdings.drifted(speeds):
                self.holdings.replace(speeds)
                self._moving = True

    def _evaluation_done(self, trial: Trial, unit: Unit) -> None:
        trial.epochs[unit.epoch].unscored &= ~(1 << unit.position)
        trial.close(unit.epoch)
        if self._evaluations[unit.position].pop(unit, unit) is None:
            self._n_evaluations -= 1

    def _on_returned(self, unit: Unit, shard: int | None) -> None:
        self._give_back(unit)
        trial = self.trials.get(unit.trial)
        if unit.trial in self._early and unit in self._early[unit.trial]:
            self._early[unit.trial].remove(unit)
        if trial is None or unit.epoch not in trial.epochs:
            return
        if unit.kind == "evaluate":
            if self._evaluations[unit.position].pop(unit, unit) is None:
                self._n_evaluations -= 1
            return
        if unit in trial.ready:
            trial.ready.remove(unit)
            if trial.active is None:
                self.shop.leave(unit.trial)
                self._requeue(trial)
        if shard is not None and not trial.is_repeat(unit):
            trial.partial[unit] = shard

    def _on_failed(self, event: UnitFailed) -> None:
        self._give_back(event.unit)
        if event.unit.trial not in self.trials:
            return
        count = self._failures[event.unit] = self._failures.get(event.unit, 0) + 1
        if count >= self.config.max_failures:
            self._fail(event.unit.trial, event.reason)

    def _on_worker_added(self, event: WorkerAdded) -> None:
        if event.worker in self.holdings.workers:
            self._on_worker_removed(WorkerRemoved(event.worker, expected=True))
        held = sum(1 << shard for shard in event.shards)
        seat = Seated(event.worker, event.max_shards, held=held, placed_speed=event.speed)
        self.holdings.workers[event.worker] = seat
        self.times.add_worker(event.worker, event.speed)
        self.shop.held[event.worker] = held
        self.shop.speed[event.worker] = event.speed
        self.shop.load[event.worker] = 0.0
        self.shop.free_at[event.worker] = self._now
        self._members_changed = True

    def _on_worker_removed(self, event: WorkerRemoved) -> None:
        seat = self.holdings.workers.get(event.worker)
        if seat is None:
            return
        culprit = next((u for u in seat.bound if self.bindings[u].started), None)
        if culprit is None and seat.bound:
            culprit = seat.bound[0]
        if culprit is not None and (event.expected or self.bindings[culprit].timed_out):
            culprit = None  # asked for, or struck when its time was over
        for unit in list(seat.bound):
            self._give_back(unit)
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
        self._accounts.is_stale = True

    # ---- bindings

    def _bind(self, unit: Unit, seat: Seated, shard: int) -> None:
        worker, ahead = seat.worker, bool(seat.bound)
        start = max(self._now, self.shop.free_at[worker]) if ahead else self._now
        trial = self.trials[unit.trial]
        home = self.shop.home.get(unit.trial)
        if unit.kind == "train":
            seconds = 0.0 if trial.is_repeat(unit) else self._unit_seconds(unit, worker, shard)
            trial.ready.remove(unit)
            trial.active, trial.active_shard = unit, shard
            need_next = trial.need_after(unit, shard)
            self.shop.start(unit.trial, worker, start, seconds, need_next)
            self.shop.demand[shard] = self.shop.demand.get(shard, 0.0) - (
                self.times.cost[unit.trial] * self.times.weights[shard] if seconds else 0.0
            )
            self.tally.stays += home == worker
            self.tally.hops += home is not None and home != worker
        else:
            seconds = self._unit_seconds(unit, worker, shard)
            del self._evaluations[shard][unit]
            self._n_evaluations -= 1
            self.shop.free_at[worker] = start + seconds
            self.tally.evaluation_hops += trial.epochs[unit.epoch].trained_on != worker
        self.tally.bound += 1
        self.tally.looked_ahead += ahead
        seat.bound.append(unit)
        began = None if ahead else self._now
        self.bindings[unit] = Binding(
            unit, worker, shard, seconds, self._ahead_s(seconds), began
        )
        self._out.append(Bind(unit, worker, shard))

    def _unit_seconds(self, unit: Unit, worker: Worker, shard: int) -> float:
        if unit.kind == "evaluate":
            return self.times.evaluation_seconds(unit.trial, worker, shard)
        return self.times.seconds(unit.trial, worker, shard)

    def _release(self, unit: Unit) -> Binding | None:
        """Take the unit off its worker."""
        binding = self.bindings.pop(unit, None)
        if binding is None:
            return None
        seat = self.holdings.workers[binding.worker]
        seat.bound.remove(unit)
        if seat.bound and self.bindings[seat.bound[0]].began_s is None:
            self.bindings[seat.bound[0]].began_s = self._now
        self._time_seat(seat)
        trial = self.trials.get(unit.trial)
        if trial is not None and trial.active == unit:
            trial.active = trial.active_shard = None
            self.shop.leave(unit.trial)
        return binding

    def _give_back(self, unit: Unit) -> None:
        """Take the unit, undone, off its worker."""
        binding = self._release(unit)
        trial = self.trials.get(unit.trial)
        if binding is None or trial is None:
            return
        if unit.kind == "train":
            self.shop.give_back(unit.trial, binding.worker, binding.seconds)
            self._requeue(trial)
        self._accounts.is_stale = True

    def _time_seat(self, seat: Seated) -> None:
        """Expect the seat's units to end at the times that follow from what is known now."""
        end = self._now
        for unit in seat.bound:
            binding = self.bindings[unit]
            began = end if binding.began_s is None else binding.began_s
            end = max(self._now, began + binding.seconds)
            if unit.kind == "train":
                self.shop.retime(unit.trial, end)
        self.shop.free_at[seat.worker] = end

    def _requeue(self, trial: Trial) -> None:
        """Put the trial among the idle ones if it has a unit to bind."""
        if trial.active is None and trial.ready:
            self.shop.enter(trial.number, trial.need(trial.ready[0]))

    def _forget(self, number: int) -> None:
        """The trial trains no more."""
        trial = self.trials.pop(number, None)
        self._stopped.add(number)
        self._early.pop(number, None)
        self.shop.forget(number)
        if trial is None:
            return
        for unit, binding in self.bindings.items():
            if unit.trial == number and binding.preempted_s is None:
                binding.preempted_s = self._now
                self._out.append(Preempt(unit, binding.worker))
        for waiting in self._evaluations:
            for unit in [unit for unit in waiting if unit.trial == number]:
                del waiting[unit]
                self._n_evaluations -= 1
        for table in (self._strikes, self._failures):
            for unit in [unit for unit in table if unit.trial == number]:
                del table[unit]
        self.times.forget_trial(number)
        self._accounts.is_stale = True

    def _fail(self, trial: int, reason: str) -> None:
        self._out.append(FailTrial(trial, reason))
        self._forget(trial)

    def _strike(self, unit: Unit, reason: str) -> None:
        if unit.trial not in self.trials:
            return
        count = self._strikes[unit] = self._strikes.get(unit, 0) + 1
        if count >= self.config.max_strikes:
            self._fail(unit.trial, f"{reason} ({count} strikes)")

    # ---- decisions

    def _settle(self) -> None:
        self.wake_at = None
        if self._members_changed and self._has_begun:
            self._members_changed = False
            self.holdings.replace(self._speeds())
            self._moving = self._homes_changed = True
        if self._moving:
            self._move_shards()
        if self._accounts.is_stale:
            self._recount()
        self._bind_idle()
        if self.times.known:
            self._look_ahead()
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
        self._out.extend(self.holdings.moves(in_use))
        for worker, seat in self.holdings.workers.items():
            offered = 0 if seat.draining else seat.held
            if self.shop.held[worker] != offered:
                self.shop.held[worker] = offered
                self._accounts.is_stale = True
        self.shop.holders_changed()
        self._moving = any(
            seat.held != seat.wanted for seat in self.holdings.workers.values() if not seat.draining
        )

    def _recount(self) -> None:
        self._accounts.recount(self.trials, self.bindings, self._now)
        for trial in self.trials.values():
            self._requeue(trial)

    def _bind_idle(self) -> None:
        if not self._n_evaluations and next(self.shop.idle, None) is None:
            return
        seats = [s for s in self.holdings.workers.values() if not s.bound and not s.draining]
        rank = self.shop.speed if self.shop.replicated else self.shop.load
        for seat in sorted(seats, key=lambda s: -rank[s.worker]):
            if self._n_evaluations or not self.shop.is_dry(seat.worker):
                self._serve(seat, self._now, blocked=0)

    def _serve(self, seat: Seated, start: float, *, blocked: int) -> None:
        """Bind a unit to the seat, an evaluating one first."""
        unit = self._pick_evaluation(seat, blocked) if self._n_evaluations else None
        if unit is not None:
            self._bind(unit, seat, unit.position)
            return
        taken = self.shop.pick(seat.worker, start, blocked=blocked)
        if taken is not None:
            trial, shard = taken
            self._bind(self.trials[trial].ready[0], seat, shard)
        elif self.shop.wait_until < inf:
            self._wake(self.shop.wait_until)

    def _pick_evaluation(self, seat: Seated, blocked: int) -> Unit | None:
        """An evaluating unit that the seat can run, of a state that is there if there is one."""
        choice: Unit | None = None
        best = (-inf, False)
        for shard in bits(seat.held & ~blocked):
            for unit in self._evaluations[shard]:
                is_home = self.trials[unit.trial].epochs[unit.epoch].trained_on == seat.worker
                rank = (self.shop.priority.get(unit.trial, 0.0), is_home)
                if rank > best:
                    choice, best = unit, rank
                if is_home:
                    break
        return choice

    def _look_ahead(self) -> None:
        """Bind behind units that are about to end what no idle worker could run now."""
        if not self._n_evaluations and next(self.shop.idle, None) is None:
            return
        blocked = 0
        for seat in self.holdings.workers.values():
            if not (seat.bound or seat.draining or self.shop.is_dry(seat.worker)):
                blocked |= seat.held
        for seat in self.holdings.workers.values():
            if not 0 < len(seat.bound) < self.depth or seat.draining:
                continue
            binding = self.bindings[seat.bound[-1]]
            end = self.shop.free_at[seat.worker]
            if end - self._now > binding.ahead_s:
                self._wake(end - binding.ahead_s)
            elif self._may_bind_behind(binding, seat):
                self._serve(seat, end, blocked=blocked)

    def _ahead_s(self, seconds: float) -> float:
        least = LOOKAHEAD_OVERHEADS * self.config.overhead_s
        return min(self.config.lookahead_s, max(least, LOOKAHEAD_SHARE * seconds))

    def _may_bind_behind(self, binding: Binding, seat: Seated) -> bool:
        if binding.began_s is None or binding.preempted_s is not None:
            return False
        if self._now > binding.began_s + binding.seconds + binding.ahead_s:
            return False  # overdue: who knows when it ends
        if binding.unit.kind == "train" and binding.unit.trial in self.trials:
            long = binding.seconds >= LONG_UNIT * self.config.overhead_s
            return not (long and self.shop.would_stay(binding.unit.trial, seat.worker))
        return True

    def _wake(self, at: float) -> None:
        if at > self._now and (self.wake_at is None or at < self.wake_at):
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
                if self._now < binding.began_s + limit:
                    self._wake(binding.began_s + limit)
                    continue
                binding.preempted_s, binding.timed_out = self._now, True
                self._out.append(Preempt(binding.unit, binding.worker))
                self._strike(binding.unit, f"{binding.unit} ran longer than {limit:g} s")
            seat = self.holdings.workers[binding.worker]
            overdue_s = binding.preempted_s + self.config.grace_s
            if self._now < overdue_s:
                self._wake(overdue_s)
            elif not seat.restarting:
                seat.restarting = True
                reason = f"{binding.unit} was told to stop {self.config.grace_s:g} s ago and runs on"
                self._out.append(RestartWorker(binding.worker, reason))

    def _watch_drains(self) -> None:
        for seat in self.holdings.workers.values():
            if seat.draining and not seat.drained and self.holdings.drain_is_over(seat):
                seat.drained = True
                self._out.append(Drained(seat.worker))

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
            self._homeless_since = self._now
        overdue_s = self._homeless_since + self.config.capacity_timeout_s
        refused = any(all(shard in seat.refused for seat in stay) for shard in homeless)
        if (refused or self._now >= overdue_s) and not self._has_failed:
            self._has_failed = True
            self._out.append(FailRun(self.holdings.shortage(homeless)))
        elif not self._has_failed:
            self._wake(overdue_s)

    def _estimate(self, trial: int, worker: Worker, shard: int) -> float:
        ready = self.trials[trial].ready
        if ready and self.trials[trial].is_repeat(ready[0]):
            return 0.0
        return self.times.seconds(trial, worker, shard)

    # ---- invariants

    def check(self) -> None:
        """Raise ``AssertionError`` with a clear sentence if an invariant does not hold."""
        self.holdings.check()
        for trial in self.trials.values():
            trial.check()
        self._check_exclusivity()
        self._check_isolation()
        for binding in self.bindings.values():
            self._check_binding(binding)
        for waiting in self._evaluations:
            assert not waiting.keys() & self.bindings.keys(), "an evaluation is ready and bound"
        n_waiting = sum(len(waiting) for waiting in self._evaluations)
        assert n_waiting == self._n_evaluations, "the number of waiting evaluations is wrong"
        self._check_homes()

    def _check_exclusivity(self) -> None:
        placed = [unit for seat in self.holdings.workers.values() for unit in seat.bound]
        assert sorted(placed) == sorted(self.bindings), "workers and bindings disagree"
        for seat in self.holdings.workers.values():
            assert len(seat.bound) <= 2, f"exclusivity: {seat.worker} has {len(seat.bound)} units"
            running = [unit for unit in seat.bound if self.bindings[unit].started]
            assert len(running) <= 1, f"exclusivity: {seat.worker} runs {running} at once"

    def _check_isolation(self) -> None:
        active: dict[int, Unit] = {}
        for unit in self.bindings:
            if unit.kind == "train":
                other = active.setdefault(unit.trial, unit)
                assert other is unit, f"isolation: {unit} and {other} are bound at once"
        for trial in self.trials.values():
            assert trial.active == active.get(trial.number), (
                f"isolation: trial {trial.number} says that {trial.active} is bound, "
                f"but {active.get(trial.number)} is"
            )
            assert trial.active not in trial.ready, f"{trial.active} is ready and bound"

    def _check_binding(self, binding: Binding) -> None:
        unit, shard = binding.unit, binding.shard
        seat = self.holdings.workers.get(binding.worker)
        assert seat is not None, f"{unit} is bound to {binding.worker}, which is gone"
        assert seat.held >> shard & 1, f"{binding.worker} does not hold shard {shard} of {unit}"
        trial = self.trials.get(unit.trial)
        if trial is None or unit.epoch not in trial.epochs:
            assert binding.preempted_s is not None, f"{unit} is nobody's, but runs"
            return
        if unit.kind == "evaluate":
            assert shard == unit.position, f"{unit} is bound to shard {shard}"
            return
        recorded = trial.recorded(unit)
        if recorded is None:
            recorded = trial.epochs[unit.epoch].chain.fixed_shard(unit)
        assert recorded is None or recorded == shard, (
            f"completeness: {unit} belongs to shard {recorded}, but is bound to {shard}"
        )
        if not trial.is_repeat(unit):
            assert trial.epochs[unit.epoch].left >> shard & 1, (
                f"completeness: {unit} is bound to shard {shard}, which the trial has visited"
            )

    def _check_homes(self) -> None:
        """Each shard that may be held is held, on its way, or waits for room."""
        if self._members_changed or not self.trials:
            return
        stay = [seat for seat in self.holdings.workers.values() if not seat.draining]
        room = sum(
            self.config.n_shards if seat.max_shards is None else seat.max_shards for seat in stay
        )
        if not stay or room < self.config.n_shards or any(seat.refused for seat in stay):
            return
        homeless = self.holdings.homeless()
        assert not homeless, f"shards {homeless} are nowhere, and nobody loads them"
