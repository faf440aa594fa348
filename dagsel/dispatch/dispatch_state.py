"""The dispatcher's configuration and state, and the steps that change it.

The facts are in `DispatchState.trials` (what was visited, what is ready), ``workers`` (who holds
and runs what), ``bindings`` (which unit is where) and ``evaluations`` (which are ready). All that
``list_scheduler`` holds can be counted anew from these and ``times``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from math import inf, sqrt

from dagsel.dispatch.events import Bind, Instruction, Preempt, Worker
from dagsel.dispatch.list_scheduler import ROUNDING_S, ListScheduler, bits
from dagsel.dispatch.openings import Openings
from dagsel.dispatch.remaining_work import RemainingWork
from dagsel.dispatch.rooms import Rooms
from dagsel.dispatch.suspicion import Suspect
from dagsel.dispatch.trials import FREE, Allowance, Binding, Trial
from dagsel.dispatch.unit_times import UnitTimes
from dagsel.dispatch.units import Unit
from dagsel.dispatch.workers import KnownWorker, WorkerTable

# To bind a worker's next unit early is to bind it with less knowledge. At 10% of a unit before its
# end that costs 1.5% of the makespan (hetC 16×8). Where the end is not known it costs 1% however
# late, since half of the units are then expected to end long before they do. Telling a worker of a
# unit costs less than that, unless units are short.
LOOKAHEAD_SHARE = 0.04  # of the unit's time,
LOOKAHEAD_OVERHEADS = 4.0  # but no less than so many times `overhead_s`
SHORT_UNIT = (
    60.0  # times `overhead_s`: behind so short a unit one is bound even if its end is vague
)
# Where a worker has all shards and there are trials for all workers, one that is bound early is
# missed nowhere. Behind longer tasks the time to tell is not worth it.
PLENTY_SHARE = 0.5  # of the task's time
PLENTY_UNIT = 300.0  # times `overhead_s`: the longest task
MOST_LOOKED_AT = 32  # waiting evaluations of a shard
GUIDED_SHARE = 0.25  # of the work left for a worker: one task takes no more while trials wait


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """What the dispatcher is told once."""

    n_shards: int
    # Copies of each shard, on distinct workers; None: as many as the workers have `copy_room` for.
    replicas: int | None = 1
    # A trial fails after so many passed time limits or broken gangs of one unit, and no sooner than
    # after so many lost workers (`dagsel.dispatch.suspicion`).
    max_strikes: int = 3
    unit_timeout_s: float | None = None  # time limit of a unit
    grace_s: float = 10.0  # after its limit a unit has so long to stop, or its worker is restarted
    # how long at most before the expected end of its running unit a worker may get the next one
    lookahead_s: float = 0.1
    # The time that it takes to tell a worker of a unit. Behind units that are long in comparison
    # nothing is bound early if the trial may stay on its worker.
    overhead_s: float = 0.003
    # A trial's next visits of an epoch become one task, if they take no longer, and an epoch is
    # scored with the unit that ends it, likewise: to tell a worker of each unit and to hear of it
    # costs milliseconds. A task begins no unit after so long, whatever was expected of the first
    # ones: that and a unit may be lost with its worker.
    at_once_s: float = 0.5
    capacity_timeout_s: float = 60.0  # a shard may have no worker for so long, or a gang too few
    room_timeout_s: float = 60.0  # no worker may have room for a trial for so long
    shard_bytes: int = 0  # that a shard in a worker's memory takes; it is not counted if 0
    rebalance: bool = True  # shards follow measured speeds; else each worker gets as many

    def __post_init__(self) -> None:
        for name in ("n_shards", "replicas", "max_strikes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")


class DispatchState:
    """The dispatcher's state."""

    def __init__(self, config: DispatchConfig) -> None:
        self.config = config
        self.now = 0.0
        self.out: list[Instruction] = []  # of the present call
        self.wake_at: float | None = None
        self.trials: dict[int, Trial] = {}
        # Those with units that are not done or are ready, and perhaps others. A long search has
        # thousands that are paused, and is not to look at them whenever work is counted.
        self.busy: dict[int, Trial] = {}
        self.bindings: dict[Unit, Binding] = {}
        self.cut: set[int] = set()  # trials that were stopped inside a shard, and perhaps others
        self.workers = WorkerTable(config.n_shards, config.replicas)
        # Ready evaluating units: for each shard an ordered set.
        self.evaluations: list[dict[Unit, None]] = [{} for _ in range(config.n_shards)]
        self.n_evaluations = 0
        self.stopped: set[int] = set()
        self.strikes: dict[Unit, int] = {}  # how often it took too long, or its gang broke
        self.suspects: dict[Unit, Suspect] = {}  # units under which workers were lost
        self.worker_s = 0.0  # seconds of all workers so far
        self.n_lost = 0  # workers that were lost so far, and were not to go
        self.early: dict[int, list[Unit]] = {}  # ready before their round was added
        self.allowances: dict[int, Allowance] = {}
        self.checks: dict[tuple[int, int], int] = {}  # bit masks of shards that are not scored
        self.coming_to_rest: dict[int, None] = {}  # trials without a `TrialRests` yet
        self.gangs: dict[int, None] = {}  # trials that have a unit to bind to several workers
        self.last_gang: dict[int, tuple[Worker, ...]] = {}  # by trial
        self.horizon = inf  # no training unit starts that is expected to run beyond it
        self.gang_s: dict[tuple[int, int], float] = {}  # by trial and gang: its last unit's time
        self.times = UnitTimes()
        self.rooms = Rooms()
        self.list_scheduler: ListScheduler[Worker] = ListScheduler(self._estimate)
        self.list_scheduler.barred = self.rooms.by_worker
        self.openings = Openings(self.workers, self.bindings, self.list_scheduler.free_at)
        self.work_left = RemainingWork(self.list_scheduler, self.times, self.workers)

    def advance(self, now_s: float) -> None:
        """Set the clock."""
        self.worker_s += len(self.workers) * (now_s - self.now)
        self.now = now_s

    def wake(self, at: float) -> None:
        """Ask to be called again at that time, or sooner."""
        if self.now < at < inf and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at

    def recount(self) -> None:
        """Count the remaining work anew."""
        scheduler = self.list_scheduler
        self.work_left.recount(self.busy, self.now)
        self.busy = {number: trial for number, trial in self.busy.items() if trial.is_busy}
        self.workers.rank(self.ranks)
        for host in self.workers.values():
            if host.bound:
                self.time_worker(host)
        waiting = [trial for trial in self.busy.values() if trial.ready and trial.active is None]
        again: dict[int, tuple[int, float]] = {}
        for trial in waiting:
            number = trial.number
            if self.suspects or number in self.allowances or not scheduler.is_idle(number):
                self.requeue(trial)
            else:
                again[number] = trial.need(trial.ready[0]), self.times.optimism(number)
        scheduler.enter_again(again)

    def check(self) -> None:
        """Raise ``AssertionError`` if what is kept is not what it comes to if counted anew."""
        self.list_scheduler.check()
        self.openings.check(self.now)
        is_counted = bool(self.trials) and not self.work_left.is_stale
        self.workers.check(self.ranks if is_counted else None)
        busy = {number for number, trial in self.trials.items() if trial.is_busy}
        assert busy <= self.busy.keys() <= self.trials.keys(), "a busy trial is not counted as one"

    @property
    def ranks(self) -> Mapping[Worker, float]:
        """Of the workers that wait for a unit the one with the highest rank is asked first."""
        scheduler = self.list_scheduler
        return scheduler.speed if scheduler.replicated else scheduler.load

    # ---- what is ready

    def add_evaluation(self, unit: Unit) -> None:
        """Note that the evaluating unit is ready."""
        if self.is_held(unit):
            self.suspects[unit].is_ready = True
        elif unit not in self.evaluations[unit.position]:
            self.evaluations[unit.position][unit] = None
            self.n_evaluations += 1

    def drop_evaluation(self, unit: Unit) -> None:
        """Note that the evaluating unit is no longer ready."""
        if unit in self.suspects:
            self.suspects[unit].is_ready = False
        if unit in self.evaluations[unit.position]:
            del self.evaluations[unit.position][unit]
            self.n_evaluations -= 1

    def drop_training(self, trial: Trial, unit: Unit) -> None:
        """Note that the training unit is no longer ready."""
        if unit in trial.early:
            trial.early.remove(unit)
        if unit in trial.ready:
            trial.ready.remove(unit)
            if trial.active is None:
                self.list_scheduler.leave(unit.trial)
                self.requeue(trial)

    def requeue(self, trial: Trial) -> None:
        """Put the trial among the idle ones, or those that wait for a gang, if a unit is ready."""
        allowance = self.allowances.get(trial.number, FREE)
        self.gangs.pop(trial.number, None)
        if trial.ready and trial.is_repeat(trial.ready[0]):
            allowance = FREE  # its result is in the store, and other units wait for it
        is_held = allowance.held or (bool(trial.ready) and self.is_held(trial.ready[0]))
        if trial.active is None and (is_held or allowance.gang > 1):
            self.list_scheduler.leave(trial.number)
            if trial.ready and not is_held:
                self.gangs[trial.number] = None
        elif trial.active is None and trial.ready:
            weight = self.times.optimism(trial.number)
            self.list_scheduler.enter(trial.number, trial.need(trial.ready[0]), weight=weight)

    def is_held(self, unit: Unit) -> bool:
        """Whether the unit has to wait since workers were lost under it."""
        return unit in self.suspects and self.suspects[unit].waits_until is not None

    # ---- which units are bound

    def bind(
        self, unit: Unit, host: KnownWorker, shard: int, members: Sequence[KnownWorker] = ()
    ) -> None:
        """Bind a ready unit to a worker, behind its running unit if it has one, or to a gang."""
        worker, ahead, scheduler = host.worker, bool(host.bound), self.list_scheduler
        start = max(self.now, scheduler.free_at[worker]) if ahead else self.now
        trial = self.trials[unit.trial]
        assert self.rooms.fits(unit.trial, worker), f"{unit} does not fit into the room of {worker}"
        gang = tuple(member.worker for member in members)
        seconds_left, scoring_s = None, 0.0
        then, scores = tuple[int, ...](), tuple[int, ...]()
        alone = False
        if unit.kind == "train":
            seconds, alone = 0.0, trial.ran_out(unit)
            if not trial.is_repeat(unit):
                seconds = self.unit_seconds(unit, worker, 1 + len(gang))
                seconds_left = self.allowances.get(unit.trial, FREE).seconds_left
                is_doubtful = unit in self.suspects or unit in self.strikes or alone
                if not (gang or is_doubtful) and seconds_left is None:
                    then = self._visits_with(unit, host, shard, start, seconds)
                    scores, scoring_s = self._scores_with(unit, host, {shard, *then})
                    seconds *= 1 + len(then)
            self.gangs.pop(unit.trial, None)
            if gang:
                self.last_gang[unit.trial] = (worker, *gang)
            trial.ready.remove(unit)
            trial.active, trial.visiting = unit, sum(1 << visit for visit in (shard, *then))
            need_next = trial.need_after(unit, shard, *then)
            scheduler.start(unit.trial, worker, start, seconds, need_next, scoring_s=scoring_s)
            if gang:  # remaining work is counted in seconds of one worker
                left = scheduler.rem[unit.trial] - seconds * len(gang)
                scheduler.rem[unit.trial] = max(0.0, left)
            cost = self.times.cost(unit.trial) if seconds else 0.0
            for visit in (shard, *then):
                scheduler.demand[visit] = scheduler.demand.get(visit, 0.0) - cost
        else:
            alone = unit.kind == "evaluate" and trial.ran_out(unit._replace(position=0))
            seconds = self.unit_seconds(unit, worker)
            self.drop_evaluation(unit)
            scheduler.load[worker] = max(0.0, scheduler.load[worker] - seconds)
        seconds += scoring_s
        for other in (host, *members):
            self.workers.bind(unit, other)
            scheduler.free_at[other.worker] = start + seconds
        began = None if ahead else self.now
        # Nothing is bound behind a gang: its next unit needs all its workers at once.
        ahead_s, in_plenty = 0.0, False
        if not (gang or alone):
            in_plenty = self.has_plenty(host, seconds)
            ahead_s = self._ahead_s(seconds, 1 + len(then), in_plenty=in_plenty)
        self.bindings[unit] = Binding(
            unit, worker, shard, seconds, ahead_s, in_plenty, began,
            members=gang, then=then, scores=scores,
        )  # fmt: skip
        for other in (host, *members):
            self.openings.note(other)
        suspect = self.suspects.get(unit)
        if suspect is not None:
            suspect.gang, suspect.broke = set(), None
        is_suspect = suspect is not None
        about = (seconds_left, is_suspect, scores, then, alone)
        self.out.append(Bind(unit, worker, shard, gang, *about))

    def _visits_with(
        self, unit: Unit, host: KnownWorker, shard: int, start: float, seconds: float
    ) -> tuple[int, ...]:
        """Return the shards that a worker is to visit after a unit in the same task.

        While other trials wait, a task takes at most a share of the work that is left for the
        worker, so that at the end of a round all workers end together (guided self-scheduling,
        Polychronopoulos and Kuck, 1987).
        """
        trial, scheduler = self.trials[unit.trial], self.list_scheduler
        is_timed = self.config.unit_timeout_s is not None
        if not self.times.known or seconds <= 0.0 or is_timed or unit in trial.partial:
            return ()
        most_s = min(self.config.at_once_s, self.horizon - start + ROUNDING_S)
        if any(number != unit.trial for number in islice(scheduler.idle, 2)):
            most_s = min(most_s, GUIDED_SHARE * scheduler.load[host.worker])
        visits = trial.visits_after(unit, shard, host.held)
        return tuple(islice(visits, max(0, int(most_s / seconds) - 1)))

    def _scores_with(
        self, unit: Unit, host: KnownWorker, visits: Set[int]
    ) -> tuple[tuple[int, ...], float]:
        """Return the shards that a worker is to score after visits, and the expected seconds.

        There are none if that takes long, or if another worker is idle: the trial goes on sooner if
        that one scores.
        """
        epoch = self.trials[unit.trial].epochs[unit.epoch]
        if any(it.kind != "train" for it in epoch.chain.ran_out):
            return (), 0.0
        scores = epoch.unscored
        if epoch.left != sum(1 << shard for shard in visits) or not scores or scores & ~host.held:
            return (), 0.0
        each_s = self.times.ratio * self.times.seconds(unit.trial, host.worker)
        scoring_s = scores.bit_count() * each_s
        is_short = self.times.known and scoring_s <= self.config.at_once_s
        idle = islice(self.workers.unbound, 2)
        if not is_short or any(other is not host for other in idle):
            return (), 0.0
        return tuple(bits(scores)), scoring_s

    def release(self, unit: Unit) -> Binding | None:
        """Take the unit off its worker."""
        binding = self.bindings.pop(unit, None)
        if binding is None:
            return None
        self.stop_clock(binding)
        for worker in binding.there:
            host = self.workers[worker]
            self.workers.release(unit, host, self.ranks.get(worker, 0.0))
            if host.bound and self.bindings[host.bound[0]].began_s is None:
                self.bindings[host.bound[0]].began_s = self.now
            self.time_worker(host)
        trial = self.trials.get(unit.trial)
        if trial is not None and trial.active == unit:
            trial.active, trial.visiting = None, 0
            self.list_scheduler.leave(unit.trial)
        return binding

    def give_back(self, unit: Unit) -> None:
        """Take the unit off its worker; it is not done."""
        binding = self.release(unit)
        trial = self.trials.get(unit.trial)
        if binding is None or trial is None:
            return
        if unit.kind == "train":
            self.list_scheduler.give_back(unit.trial, binding.worker, binding.seconds)
            self.requeue(trial)
        self.work_left.is_stale = True

    def preempt(self, unit: Unit) -> None:
        """Stop a bound unit at its next batch."""
        binding = self.bindings[unit]
        if binding.preempted_s is None:
            binding.preempted_s = self.now
            self.out.append(Preempt(unit, binding.worker))

    def forget(self, number: int) -> None:
        """End a trial: drop its waiting units, preempt its running ones."""
        trial = self.trials.pop(number, None)
        self.busy.pop(number, None)
        self.stopped.add(number)
        self.early.pop(number, None)
        self.last_gang.pop(number, None)
        for by_trial in (self.allowances, self.coming_to_rest, self.gangs):
            by_trial.pop(number, None)
        self.list_scheduler.forget(number)
        self.rooms.forget(number)
        if trial is None:
            return
        for unit in self.bindings:
            if unit.trial == number:
                self.preempt(unit)
        for waiting in self.evaluations:
            for unit in [unit for unit in waiting if unit.trial == number]:
                self.drop_evaluation(unit)
        for check in [check for check in self.checks if check[0] == number]:
            del self.checks[check]
        for timed in [key for key in self.gang_s if key[0] == number]:
            del self.gang_s[timed]
        for struck in (self.strikes, self.suspects):
            for unit in [unit for unit in struck if unit.trial == number]:
                self.clear_strikes(unit)
        self.times.forget_trial(number)
        self.work_left.is_stale |= bool(trial.open)

    def clear_strikes(self, unit: Unit) -> None:
        """Forget a unit's strikes."""
        self.strikes.pop(unit, None)
        self.suspects.pop(unit, None)

    def stop_clock(self, binding: Binding) -> float:
        """Note that the unit has trained until now; return for how many seconds of workers."""
        if binding.trains_s is None:
            return 0.0
        own_s = (self.now - binding.trains_s) * len(binding.workers)
        binding.trains_s = None
        if binding.unit in self.suspects:
            self.suspects[binding.unit].own_s += own_s
        return own_s

    # ---- how long units take

    def unit_seconds(self, unit: Unit, worker: Worker, gang: int = 1) -> float:
        """Return how long a unit is expected to take."""
        if unit.kind != "train":
            return self.times.ratio * self.times.seconds(unit.trial, worker)
        if gang > 1 and (unit.trial, gang) in self.gang_s:
            return self.gang_s[unit.trial, gang]
        return self.times.seconds(unit.trial, worker) / gang

    def fits(self, unit: Unit, worker: Worker, start: float, gang: int = 1) -> bool:
        """Whether a training unit is expected to end, or to stop at a batch, before the horizon."""
        if self.horizon == inf:
            return True
        seconds = self.unit_seconds(unit, worker, gang)
        left_s = self.allowances.get(unit.trial, FREE).seconds_left
        return start + (seconds if left_s is None else min(seconds, left_s)) <= (
            self.horizon + ROUNDING_S
        )

    def time_worker(self, host: KnownWorker) -> None:
        """Update when the worker's units are expected to end."""
        end = self.now
        for unit in host.bound:
            binding = self.bindings[unit]
            began = end if binding.began_s is None else binding.began_s
            end = end if binding.stores else max(self.now, began + binding.seconds)
            if unit.kind == "train":
                self.list_scheduler.retime(unit.trial, self.now if binding.stores else end)
        self.list_scheduler.free_at[host.worker] = end
        self.openings.note(host)

    def has_plenty(self, host: KnownWorker, seconds: float) -> bool:
        """Whether there are trials for all workers to take behind tasks that take so long."""
        return (
            seconds <= PLENTY_UNIT * self.config.overhead_s
            and host.held == (1 << self.config.n_shards) - 1
            and self.list_scheduler.n_idle >= len(self.workers)
        )

    def _ahead_s(self, seconds: float, n_visits: int, *, in_plenty: bool) -> float:
        """Return how long before a task's end its worker may get another; 0 for never."""
        overhead_s = self.config.overhead_s
        share = (PLENTY_SHARE if in_plenty else LOOKAHEAD_SHARE) * seconds
        ahead_s = min(self.config.lookahead_s, max(LOOKAHEAD_OVERHEADS * overhead_s, share))
        if in_plenty:
            return ahead_s
        error_s = self.times.noise * seconds / sqrt(n_visits)  # those of several cancel in part
        is_vague = error_s > ahead_s
        return 0.0 if is_vague and seconds > SHORT_UNIT * overhead_s else ahead_s

    def _estimate(self, trial: int, worker: Worker) -> float:
        ready = self.trials[trial].ready
        if ready and self.trials[trial].is_repeat(ready[0]):
            return 0.0
        return self.times.seconds(trial, worker)

    # ---- which evaluation is next

    def pick_evaluation(self, host: KnownWorker, blocked: int) -> Unit | None:
        """Choose an evaluating unit for the worker: of a state that it has, if there is one."""
        choice: Unit | None = None
        best, barred = (-inf, False), self.rooms.barred(host.worker)
        for shard in bits(host.held & ~blocked):
            waiting: Iterable[Unit] = self.evaluations[shard]
            if barred:
                waiting = (unit for unit in waiting if unit.trial not in barred)
            for unit in islice(waiting, MOST_LOOKED_AT):
                is_home = self._is_home(unit, host.worker)
                rank = (self.list_scheduler.priority.get(unit.trial, 0.0), is_home)
                if rank > best:
                    choice, best = unit, rank
                if is_home:
                    break
        return choice

    def _is_home(self, unit: Unit, worker: Worker) -> bool:
        """Whether the worker has the state; the state of a check is in the store."""
        if unit.kind == "check":
            return self.list_scheduler.home.get(unit.trial) == worker
        return self.trials[unit.trial].epochs[unit.epoch].trained_on == worker
