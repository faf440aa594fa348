"""How much work is left: fills the `ListScheduler` from trials, workers and estimated times."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagsel.dispatch.events import Worker
from dagsel.dispatch.list_scheduler import ListScheduler, bits
from dagsel.dispatch.trials import Trial
from dagsel.dispatch.unit_times import UnitTimes
from dagsel.dispatch.workers import WorkerTable

#: Relative change of a worker's unit time, or of a typical trial's cost, from which the work is
#: counted anew.
SHIFT = 0.05
#: All work is counted anew when one in so many trials has got another chain since the last count.
FEW = 16


class RemainingWork:
    """Counts the work that is left, and knows when the count is out of date.

    Between counts the list scheduler itself subtracts what starts. A new count is due when
    estimates change, rounds are added or shards move.
    """

    def __init__(
        self, list_scheduler: ListScheduler[Worker], times: UnitTimes, workers: WorkerTable
    ) -> None:
        self.list_scheduler = list_scheduler
        self.times = times
        self.workers = workers
        self.is_stale = True
        self._n_done = 0
        self._n_added = 0
        self._n_trials = 0
        self._counted: dict[Worker, float] = {}
        self._typical_cost = times.typical_cost
        self._effort: list[float] = []  # by shard
        self._n_holders: list[int] = []
        # When workers were grouped, as a number of changes; -1: not since the last count.
        self._grouped = -1
        self._masks: list[int] = []  # bit masks of the shards that some of them hold
        self._mask_of = np.empty(0, int)  # by worker: which one
        self._seconds = np.empty(0)  # by worker: of a unit of cost 1

    def task_done(self, worker: Worker) -> None:
        """Check whether a new count is due after a task of the worker."""
        self._n_done += 1
        if self._n_done * 4 < self._n_trials and len(self._counted) > 0:
            return
        times = self.times
        pace = times.pace.get(worker)
        if pace is not None and (
            _has_shifted(times.unit_s * pace, self._counted.get(worker))
            or _has_shifted(times.typical_cost, self._typical_cost)
        ):
            self.is_stale = True

    def chain_added(self, trial: Trial, now_s: float, *, was_open: bool) -> None:
        """Count a trial's new epochs, unless all is to be counted anew.

        `was_open` says whether it had units left before, which are counted already.
        """
        self._n_added += 1
        self.is_stale |= was_open or self._n_added * FEW > self._n_trials
        if self.is_stale:
            return
        scheduler, demand = self.list_scheduler, [0.0] * len(self._effort)
        cost, whole = self.times.cost(trial.number), sum(self._effort)
        rem = scheduler.rem[trial.number] = self._count_trial(
            trial, cost, self._effort, whole, demand
        )
        scheduler.target = max(scheduler.target, now_s + rem)
        for shard, work in enumerate(demand):
            scheduler.demand[shard] = scheduler.demand.get(shard, 0.0) + work
        self._add_loads(demand, now_s)

    def _add_loads(self, demand: list[float], now_s: float) -> None:
        """Share new work out among the workers that hold its shards."""
        scheduler, load = self.list_scheduler, self.list_scheduler.load
        if self._grouped != load.n_changes:
            self._group()
        parts = [
            sum(
                demand[shard] / (self._n_holders[shard] if scheduler.replicated else 1)
                for shard in bits(held)
            )
            for held in self._masks
        ]
        loads = load.numbers
        loads += self._seconds * np.array(parts)[self._mask_of]
        ends = np.maximum(scheduler.free_at.numbers, now_s) + loads
        scheduler.target = float(ends.max(initial=scheduler.target))
        if not scheduler.replicated:  # else they are asked in the order of their speeds
            self.workers.rank(scheduler.load)

    def _group(self) -> None:
        """Note which workers hold the same shards: until the next count they get the same work."""
        scheduler = self.list_scheduler
        workers = list(scheduler.load)
        assert workers == list(scheduler.free_at), "the workers of two tables are in another order"
        held = [scheduler.held[worker] for worker in workers]
        masks = {mask: at for at, mask in enumerate(dict.fromkeys(held))}
        self._grouped, self._masks = scheduler.load.n_changes, list(masks)
        self._mask_of = np.array([masks[mask] for mask in held], int)
        self._seconds = np.array([self._counted.get(worker, 0.0) for worker in workers])

    def recount(self, trials: Mapping[int, Trial], now_s: float) -> None:
        """Count anew, and set the target to the lower bound of what is left."""
        self.is_stale, self._n_done, self._n_added = False, 0, 0
        self._grouped = -1
        self._n_trials = sum(1 for trial in trials.values() if trial.open)
        scheduler, times = self.list_scheduler, self.times
        self._typical_cost = times.typical_cost
        self._counted = {worker: times.unit_s * pace for worker, pace in times.pace.items()}
        effort, n_holders = self._effort, self._n_holders = self._efforts()
        whole = sum(effort)
        demand = [0.0] * len(effort)
        target = now_s
        for number, trial in trials.items():
            rem = 0.0
            if trial.open:
                rem = self._count_trial(trial, times.cost(number), effort, whole, demand)
                target = max(target, now_s + rem)
            scheduler.rem[number] = rem
        for worker, host in self.workers.items():
            scheduler.speed[worker] = 1.0 / times.pace[worker]
            seconds, load = self._counted[worker], 0.0
            for shard in bits(host.held):
                load += seconds * demand[shard] / (n_holders[shard] if scheduler.replicated else 1)
            scheduler.load[worker] = load
            target = max(target, max(now_s, scheduler.free_at[worker]) + load)
        scheduler.demand = dict(enumerate(demand))
        scheduler.target = target
        scheduler.recounted()

    def _efforts(self) -> tuple[list[float], list[int]]:
        """By shard: seconds of a unit of cost 1 on its average holder, and how many hold it."""
        times = self.times
        paces: list[list[float]] = [[] for _ in range(self.workers.n_shards)]
        for worker, host in self.workers.items():
            for shard in bits(host.held):
                paces[shard].append(times.pace[worker])
        typical = sum(times.pace.values()) / len(times.pace) if times.pace else 1.0
        means = (sum(row) / len(row) if row else typical for row in paces)
        return [times.unit_s * pace for pace in means], [len(row) for row in paces]

    def _count_trial(
        self, trial: Trial, cost: float, effort: list[float], whole: float, demand: list[float]
    ) -> float:
        """Return the remaining seconds of the trial; add its work to the shards' demand."""
        ratio = self.times.ratio
        everything = (1 << len(effort)) - 1
        remaining = 0.0
        n_whole = n_unscored = 0
        active = None
        if trial.active is not None and not (
            trial.active.epoch in trial.epochs and trial.is_repeat(trial.active)
        ):
            active = trial.active.epoch
        for number, epoch in trial.open.items():
            left = epoch.left
            if number == active:
                left &= ~trial.visiting
            if left == everything:
                n_whole += 1
            else:
                for shard in bits(left):
                    remaining += effort[shard]
                    demand[shard] += cost
            if epoch.unscored == everything:
                n_unscored += 1
            else:
                for shard in bits(epoch.unscored):
                    demand[shard] += ratio * cost
        passes = n_whole + ratio * n_unscored
        if passes:
            for shard in range(len(demand)):
                demand[shard] += passes * cost
        return cost * (remaining + n_whole * whole)


def _has_shifted(now: float, before: float | None) -> bool:
    return before is None or abs(now / before - 1.0) > SHIFT
