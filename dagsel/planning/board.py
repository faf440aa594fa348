"""The dispatcher's state, and the steps that change it: bind, release, give back, forget.

What is true is in `Board.trials` (what was visited, what is ready), ``holdings`` (who holds and
runs what), ``bindings`` (which unit is where) and ``evaluations`` (which are ready). The rule's
``shop`` holds nothing that could not be counted anew from these and the unit-time model.
"""

from __future__ import annotations

from itertools import islice
from math import inf

from dagsel.planning.accounting import Accounts, Binding
from dagsel.planning.config import DispatchConfig, Tally
from dagsel.planning.costs import UnitTimes
from dagsel.planning.events import Bind, Instruction, Preempt, Worker
from dagsel.planning.holdings import Holdings, Seated
from dagsel.planning.ledger import Trial
from dagsel.planning.rounds import Unit
from dagsel.planning.rule import Shop, bits

# A binding that is made early is made with less knowledge. At 10% of a unit before its end it costs
# 1.5% of the makespan (hetC 16×8); where the end is not known, 1% however late it is made, since
# then half of the units are believed to end long before they do. Telling a worker costs less than
# that of all but short units.
LOOKAHEAD_SHARE = 0.04  # of the unit's time,
LOOKAHEAD_OVERHEADS = 4.0  # but no less than so many times `overhead_s`
SHORT_UNIT = 60.0  # times `overhead_s`: a unit that short is looked behind even if its end is vague
MOST_LOOKED_AT = 32  # waiting evaluations of a shard


class Board:
    """The dispatcher's state.

    Parameters
    ----------
    config
        What the dispatcher is told once.

    Attributes
    ----------
    now, out
        The time, and the instructions so far, of the present call.
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
    """

    def __init__(self, config: DispatchConfig) -> None:
        self.config = config
        self.now = 0.0
        self.out: list[Instruction] = []
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
        self.tally = Tally()
        self.times = UnitTimes(config.n_shards, config.shard_weights)
        self.shop: Shop[Worker] = Shop(self._estimate)
        self.accounts = Accounts(self.shop, self.times, self.holdings)

    def recount(self) -> None:
        """Count the work that is left anew."""
        self.accounts.recount(self.trials, self.now)
        for seat in self.holdings.workers.values():
            if seat.bound:
                self.time_seat(seat)
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

    def drop_training(self, trial: Trial, unit: Unit) -> None:
        """Note that the training unit is no longer ready."""
        if unit in trial.ready:
            trial.ready.remove(unit)
            if trial.active is None:
                self.shop.leave(unit.trial)
                self.requeue(trial)

    def bind(self, unit: Unit, seat: Seated, shard: int) -> None:
        """Bind a ready unit to a worker, behind its running unit if it has one."""
        worker, ahead = seat.worker, bool(seat.bound)
        start = max(self.now, self.shop.free_at[worker]) if ahead else self.now
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
            self.drop_evaluation(unit)
            self.shop.free_at[worker] = start + seconds
            self.shop.load[worker] = max(0.0, self.shop.load[worker] - seconds)
            self.tally.evaluation_hops += trial.epochs[unit.epoch].trained_on != worker
        self.tally.bound += 1
        self.tally.looked_ahead += ahead
        seat.bound.append(unit)
        began = None if ahead else self.now
        self.bindings[unit] = Binding(unit, worker, shard, seconds, self._ahead_s(seconds), began)
        self.out.append(Bind(unit, worker, shard))

    def _unit_seconds(self, unit: Unit, worker: Worker, shard: int) -> float:
        if unit.kind == "evaluate":
            return self.times.evaluation_seconds(unit.trial, worker, shard)
        return self.times.seconds(unit.trial, worker, shard)

    def release(self, unit: Unit) -> Binding | None:
        """Take the unit off its worker."""
        binding = self.bindings.pop(unit, None)
        if binding is None:
            return None
        seat = self.holdings.workers[binding.worker]
        seat.bound.remove(unit)
        if seat.bound and self.bindings[seat.bound[0]].began_s is None:
            self.bindings[seat.bound[0]].began_s = self.now
        self.time_seat(seat)
        trial = self.trials.get(unit.trial)
        if trial is not None and trial.active == unit:
            trial.active = trial.active_shard = None
            self.shop.leave(unit.trial)
        return binding

    def give_back(self, unit: Unit) -> None:
        """Take the unit, undone, off its worker."""
        binding = self.release(unit)
        trial = self.trials.get(unit.trial)
        if binding is None or trial is None:
            return
        if unit.kind == "train":
            self.shop.give_back(unit.trial, binding.worker, binding.seconds)
            self.requeue(trial)
        self.accounts.is_stale = True

    def time_seat(self, seat: Seated) -> None:
        """Expect the seat's units to end at the times that follow from what is known now."""
        end = self.now
        for unit in seat.bound:
            binding = self.bindings[unit]
            began = end if binding.began_s is None else binding.began_s
            end = max(self.now, began + binding.seconds)
            if unit.kind == "train":
                self.shop.retime(unit.trial, end)
        self.shop.free_at[seat.worker] = end

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
        if trial.active is None and trial.ready:
            self.shop.weight[trial.number] = self.times.optimism(trial.number)
            self.shop.enter(trial.number, trial.need(trial.ready[0]))

    def forget(self, number: int) -> None:
        """Let a trial train no more."""
        trial = self.trials.pop(number, None)
        self.stopped.add(number)
        self.early.pop(number, None)
        self.shop.forget(number)
        if trial is None:
            return
        for unit, binding in self.bindings.items():
            if unit.trial == number and binding.preempted_s is None:
                binding.preempted_s = self.now
                self.out.append(Preempt(unit, binding.worker))
        for waiting in self.evaluations:
            for unit in [unit for unit in waiting if unit.trial == number]:
                self.drop_evaluation(unit)
        for table in (self.strikes, self.struck_at, self.failures):
            for unit in [unit for unit in table if unit.trial == number]:
                del table[unit]
        self.times.forget_trial(number)
        self.accounts.is_stale = True

    def pick_evaluation(self, seat: Seated, blocked: int) -> Unit | None:
        """Find an evaluating unit for the seat, of a state that is there if there is one."""
        choice: Unit | None = None
        best = (-inf, False)
        for shard in bits(seat.held & ~blocked):
            for unit in islice(self.evaluations[shard], MOST_LOOKED_AT):
                is_home = self.trials[unit.trial].epochs[unit.epoch].trained_on == seat.worker
                rank = (self.shop.priority.get(unit.trial, 0.0), is_home)
                if rank > best:
                    choice, best = unit, rank
                if is_home:
                    break
        return choice

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
