"""How much work is left: fills the `ListScheduler` from trials, workers and estimated times."""

from __future__ import annotations

from collections.abc import Mapping

from dagsel.dispatch.events import Worker
from dagsel.dispatch.list_scheduler import ListScheduler, bits
from dagsel.dispatch.trials import Trial
from dagsel.dispatch.unit_times import UnitTimes
from dagsel.dispatch.workers import WorkerTable

SHIFT = 0.05  # relative change of a worker's unit time from which the work is counted anew


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
        self._n_trials = 0
        self._counted: dict[Worker, float] = {}

    def unit_done(self, worker: Worker) -> None:
        """Check whether a new count is due after a unit of the worker."""
        self._n_done += 1
        if self._n_done * 4 < self._n_trials and len(self._counted) > 0:
            return
        pace = self.times.pace.get(worker)
        before = self._counted.get(worker)
        if pace is not None and (
            before is None or abs(self.times.unit_s * pace / before - 1.0) > SHIFT
        ):
            self.is_stale = True

    def recount(self, trials: Mapping[int, Trial], now_s: float) -> None:
        """Count anew, and set the target to the lower bound of what is left."""
        self.is_stale, self._n_done = False, 0
        self._n_trials = sum(1 for trial in trials.values() if trial.open)
        scheduler, times = self.list_scheduler, self.times
        self._counted = {worker: times.unit_s * pace for worker, pace in times.pace.items()}
        effort, n_holders = self._efforts()
        whole = sum(effort)
        demand = [0.0] * len(effort)
        target = now_s
        for number, trial in trials.items():
            rem = self._count_trial(trial, times.cost[number], effort, whole, demand)
            scheduler.rem[number] = rem
            target = max(target, now_s + rem)
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
            if number == active and trial.active_shard is not None:
                left &= ~(1 << trial.active_shard)
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
