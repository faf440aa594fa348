"""The dispatcher's state, and the steps that change it: bind, release, give back, forget.

What is true is in `DispatchState.trials` (what was visited, what is ready), ``holdings`` (who holds
and runs what), ``bindings`` (which unit is where) and ``evaluations`` (which are ready). The rule's
``list_scheduler`` holds nothing that could not be counted anew from these and the unit-time model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf

from dagsel.dispatch.config import DispatchConfig, DispatchCounts
from dagsel.dispatch.events import Bind, Instruction, Preempt, Worker
from dagsel.dispatch.list_scheduler import ListScheduler, bits
from dagsel.dispatch.remaining_work import RemainingWork
from dagsel.dispatch.trials import FREE, Allowance, Binding, Trial
from dagsel.dispatch.unit_times import UnitTimes
from dagsel.dispatch.units import Unit
from dagsel.dispatch.workers import Holdings, KnownWorker

# A binding that is made early is made with less knowledge. At 10% of a unit before its end it costs
# 1.5% of the makespan (hetC 16×8); where the end is not known, 1% however late it is made, since
# then half of the units are believed to end long before they do. Telling a worker costs less than
# that of all but short units.
LOOKAHEAD_SHARE = 0.04  # of the unit's time,
LOOKAHEAD_OVERHEADS = 4.0  # but no less than so many times `overhead_s`
SHORT_UNIT = 60.0  # times `overhead_s`: a unit that short is looked behind even if its end is vague
ROUNDING_S = 1e-6  # sums of times may be so far off
MOST_LOOKED_AT = 32  # waiting evaluations of a shard


class DispatchState:
    """The dispatcher's state.

    Parameters
    ----------
    config
        What the dispatcher is told once.

    Attributes
    ----------
    now, out, wake_at
        Of the present call: the time, the instructions so far, and when to be called again even
        if nothing happens.
    trials, bindings, holdings, evaluations
        See above; `evaluations` has one ordered set a shard, `n_evaluations` is their size.
    stopped
        Trials that are over.
    strikes, failures
        Of each unit how often a worker was lost, or a time limit passed, and an exception raised.
    n_strikes, struck_at
        Strikes of all units so far; how many there had been when a unit got its first one.
    early
        Units that were ready before their round was added.
    terms
        On what terms trials train, where something was said of it.
    checks
        Of each check the bit mask of validation shards that are not scored.
    coming_to_rest
        Trials that are held and of which it was not said yet that they rest.
    gangs
        Trials that have a unit to bind to several workers.
    last_gang
        The workers of a trial's last gang.
    horizon
        No training unit begins that is expected to end after it.
    """

    def __init__(self, config: DispatchConfig) -> None:
        self.config = config
        self.now = 0.0
        self.out: list[Instruction] = []
        self.wake_at: float | None = None
        self.trials: dict[int, Trial] = {}
        self.bindings: dict[Unit, Binding] = {}
        self.holdings = Holdings(config.n_shards, config.replicas)
        self.evaluations: list[dict[Unit, None]] = [{} for _ in range(config.n_shards)]
        self.n_evaluations = 0
        self.stopped: set[int] = set()
        self.strikes: dict[Unit, int] = {}
        self.n_strikes = 0
        self.struck_at: dict[Unit, int] = {}
        self.failures: dict[Unit, int] = {}
        self.early: dict[int, list[Unit]] = {}
        self.terms: dict[int, Allowance] = {}
        self.checks: dict[tuple[int, int], int] = {}
        self.coming_to_rest: dict[int, None] = {}
        self.gangs: dict[int, None] = {}
        self.last_gang: dict[int, tuple[Worker, ...]] = {}
        self.horizon = inf
        self._gang_s: dict[tuple[int, int], float] = {}  # of trial and gang the last unit's seconds
        self.tally = DispatchCounts()
        self.times = UnitTimes(config.n_shards, config.shard_weights)
        self.list_scheduler: ListScheduler[Worker] = ListScheduler(self._estimate)
        self.work_left = RemainingWork(self.list_scheduler, self.times, self.holdings)

    def wake(self, at: float) -> None:
        """Ask to be called again at that time, or sooner."""
        if self.now < at < inf and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at

    def recount(self) -> None:
        """Count the work that is left anew."""
        self.work_left.recount(self.trials, self.now)
        for host in self.holdings.workers.values():
            if host.bound:
                self.time_host(host)
        for trial in self.trials.values():
            self.requeue(trial)

    def add_evaluation(self, unit: Unit) -> None:
        """Note that the evaluating unit is ready."""
        if unit not in self.evaluations[unit.position]:
            self.evaluations[unit.position][unit] = None
            self.n_evaluations += 1

    def drop_evaluation(self, unit: Unit) -> None:
        """Note that the evaluating unit is no longer ready."""
        if unit in self.evaluations[unit.position]:
            del self.evaluations[unit.position][unit]
            self.n_evaluations -= 1

    def checked(self, unit: Unit) -> None:
        """Note that a validation shard of a check is scored."""
        self.drop_evaluation(unit)
        check = (unit.trial, unit.epoch)
        if check in self.checks:
            self.checks[check] &= ~(1 << unit.position)
            if not self.checks[check]:
                del self.checks[check]

    def drop_training(self, trial: Trial, unit: Unit) -> None:
        """Note that the training unit is no longer ready."""
        if unit in trial.ready:
            trial.ready.remove(unit)
            if trial.active is None:
                self.list_scheduler.leave(unit.trial)
                self.requeue(trial)

    def bind(
        self, unit: Unit, host: KnownWorker, shard: int, members: Sequence[KnownWorker] = ()
    ) -> None:
        """Bind a ready unit to a worker, behind its running unit if it has one, or to a gang."""
        worker, ahead = host.worker, bool(host.bound)
        start = max(self.now, self.list_scheduler.free_at[worker]) if ahead else self.now
        trial = self.trials[unit.trial]
        home = self.list_scheduler.home.get(unit.trial)
        gang = tuple(member.worker for member in members)
        seconds_left = None
        if unit.kind == "train":
            seconds = 0.0
            if not trial.is_repeat(unit):
                seconds = self.unit_seconds(unit, worker, shard, 1 + len(gang))
                seconds_left = self.terms.get(unit.trial, FREE).seconds_left
            self.gangs.pop(unit.trial, None)
            if gang:
                self.last_gang[unit.trial] = (worker, *gang)
            trial.ready.remove(unit)
            trial.active, trial.active_shard = unit, shard
            need_next = trial.need_after(unit, shard)
            self.list_scheduler.start(unit.trial, worker, start, seconds, need_next)
            if gang:  # what is left is counted in seconds of one worker
                left = self.list_scheduler.rem[unit.trial] - seconds * len(gang)
                self.list_scheduler.rem[unit.trial] = max(0.0, left)
            self.list_scheduler.demand[shard] = self.list_scheduler.demand.get(shard, 0.0) - (
                self.times.cost[unit.trial] * self.times.weights[shard] if seconds else 0.0
            )
            self.tally.stays += home == worker
            self.tally.hops += home is not None and home != worker
        else:
            seconds = self.unit_seconds(unit, worker, shard)
            self.drop_evaluation(unit)
            self.list_scheduler.free_at[worker] = start + seconds
            self.list_scheduler.load[worker] = max(0.0, self.list_scheduler.load[worker] - seconds)
            self.tally.evaluation_hops += not self._is_home(unit, worker)
        self.tally.bound += 1
        self.tally.looked_ahead += ahead
        for other in (host, *members):
            other.bound.append(unit)
            self.list_scheduler.free_at[other.worker] = start + seconds
        began = None if ahead else self.now
        # Behind a gang nothing waits: its next unit needs all its workers at once.
        ahead_s = 0.0 if gang else self._ahead_s(seconds)
        self.bindings[unit] = Binding(unit, worker, shard, seconds, ahead_s, began, members=gang)
        self.out.append(Bind(unit, worker, shard, gang, seconds_left))

    def unit_seconds(self, unit: Unit, worker: Worker, shard: int, gang: int = 1) -> float:
        """Give the time that a unit is expected to take."""
        if unit.kind != "train":
            return self.times.evaluation_seconds(unit.trial, worker, shard)
        if gang > 1 and (unit.trial, gang) in self._gang_s:
            return self._gang_s[unit.trial, gang]
        return self.times.seconds(unit.trial, worker, shard) / gang

    def fits(self, unit: Unit, worker: Worker, shard: int, start: float, gang: int = 1) -> bool:
        """Whether a training unit is expected to end before the horizon."""
        if self.horizon == inf:
            return True
        return start + self.unit_seconds(unit, worker, shard, gang) <= self.horizon + ROUNDING_S

    def learn_gang(self, unit: Unit, gang: int, seconds: float) -> None:
        """Note how long a gang's unit took."""
        self._gang_s[unit.trial, gang] = seconds

    def release(self, unit: Unit) -> Binding | None:
        """Take the unit off its worker."""
        binding = self.bindings.pop(unit, None)
        if binding is None:
            return None
        for worker in binding.there:
            host = self.holdings.workers[worker]
            host.bound.remove(unit)
            if host.bound and self.bindings[host.bound[0]].began_s is None:
                self.bindings[host.bound[0]].began_s = self.now
            self.time_host(host)
        trial = self.trials.get(unit.trial)
        if trial is not None and trial.active == unit:
            trial.active = trial.active_shard = None
            self.list_scheduler.leave(unit.trial)
        return binding

    def give_back(self, unit: Unit) -> None:
        """Take the unit, undone, off its worker."""
        binding = self.release(unit)
        trial = self.trials.get(unit.trial)
        if binding is None or trial is None:
            return
        if unit.kind == "train":
            self.list_scheduler.give_back(unit.trial, binding.worker, binding.seconds)
            self.requeue(trial)
        self.work_left.is_stale = True

    def time_host(self, host: KnownWorker) -> None:
        """Expect the host's units to end at the times that follow from what is known now."""
        end = self.now
        for unit in host.bound:
            binding = self.bindings[unit]
            began = end if binding.began_s is None else binding.began_s
            end = max(self.now, began + binding.seconds)
            if unit.kind == "train":
                self.list_scheduler.retime(unit.trial, end)
        self.list_scheduler.free_at[host.worker] = end

    def strike(self, unit: Unit) -> tuple[int, int]:
        """Give a unit a strike.

        Returns
        -------
        own, others
            Its own strikes, and those of other units since its first one.
        """
        self.struck_at.setdefault(unit, self.n_strikes)
        self.n_strikes += 1
        own = self.strikes[unit] = self.strikes.get(unit, 0) + 1
        return own, self.n_strikes - self.struck_at[unit] - own

    def clear_strikes(self, unit: Unit) -> None:
        """Forget a unit's strikes: it was done after all."""
        self.strikes.pop(unit, None)
        self.struck_at.pop(unit, None)

    def requeue(self, trial: Trial) -> None:
        """Put the trial among the idle ones if it has a unit to bind."""
        terms = self.terms.get(trial.number, FREE)
        self.gangs.pop(trial.number, None)
        if trial.ready and trial.is_repeat(trial.ready[0]):
            terms = FREE  # its result is in the store, and somebody waits for it
        if trial.active is None and (terms.held or terms.gang > 1):
            self.list_scheduler.leave(trial.number)
            if trial.ready and not terms.held:
                self.gangs[trial.number] = None
        elif trial.active is None and trial.ready:
            self.list_scheduler.weight[trial.number] = self.times.optimism(trial.number)
            self.list_scheduler.enter(trial.number, trial.need(trial.ready[0]))

    def preempt(self, unit: Unit) -> None:
        """Stop a bound unit at its next batch."""
        binding = self.bindings[unit]
        if binding.preempted_s is None:
            binding.preempted_s = self.now
            self.out.append(Preempt(unit, binding.worker))

    def forget(self, number: int) -> None:
        """Let a trial train no more."""
        trial = self.trials.pop(number, None)
        self.stopped.add(number)
        self.early.pop(number, None)
        self.last_gang.pop(number, None)
        for by_trial in (self.terms, self.coming_to_rest, self.gangs):
            by_trial.pop(number, None)
        self.list_scheduler.forget(number)
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
        for timed in [key for key in self._gang_s if key[0] == number]:
            del self._gang_s[timed]
        for table in (self.strikes, self.struck_at, self.failures):
            for unit in [unit for unit in table if unit.trial == number]:
                del table[unit]
        self.times.forget_trial(number)
        self.work_left.is_stale = True

    def pick_evaluation(self, host: KnownWorker, blocked: int) -> Unit | None:
        """Find an evaluating unit for the host, of a state that is there if there is one."""
        choice: Unit | None = None
        best = (-inf, False)
        for shard in bits(host.held & ~blocked):
            for unit in islice(self.evaluations[shard], MOST_LOOKED_AT):
                is_home = self._is_home(unit, host.worker)
                rank = (self.list_scheduler.priority.get(unit.trial, 0.0), is_home)
                if rank > best:
                    choice, best = unit, rank
                if is_home:
                    break
        return choice

    def _is_home(self, unit: Unit, worker: Worker) -> bool:
        """Whether an evaluating unit's state is on the worker; that of a check is in the store."""
        if unit.kind == "check":
            return self.list_scheduler.home.get(unit.trial) == worker
        return self.trials[unit.trial].epochs[unit.epoch].trained_on == worker

    def _ahead_s(self, seconds: float) -> float:
        """How long before its end a unit's worker may get another; 0 for never."""
        overhead_s = self.config.overhead_s
        share = max(LOOKAHEAD_OVERHEADS * overhead_s, LOOKAHEAD_SHARE * seconds)
        ahead_s = min(self.config.lookahead_s, share)
        is_vague = self.times.noise * seconds > ahead_s
        return 0.0 if is_vague and seconds > SHORT_UNIT * overhead_s else ahead_s

    def _estimate(self, trial: int, worker: Worker, shard: int) -> float:
        ready = self.trials[trial].ready
        if ready and self.trials[trial].is_repeat(ready[0]):
            return 0.0
        return self.times.seconds(trial, worker, shard)
