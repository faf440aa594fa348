"""How much work is left: fills the rule's `ListScheduler` from ledger, holdings and estimates."""

from __future__ import annotations

from collections.abc import Mapping

from dagsel.dispatch.events import Worker
from dagsel.dispatch.list_scheduler import ListScheduler, bits
from dagsel.dispatch.trials import Trial
from dagsel.dispatch.unit_times import UnitTimes
from dagsel.dispatch.workers import Holdings

SHIFT = 0.05  # relative change of a pace or of the scale that makes the sums worth a new count


class RemainingWork:
    """Counts the work that is left, and knows when the count is out of date.

    Between counts the rule itself subtracts what begins; estimates that move, rounds that are
    added and shards that move make a new count necessary.
    """

    def __init__(
        self, list_scheduler: ListScheduler[Worker], times: UnitTimes, holdings: Holdings
    ) -> None:
        self.list_scheduler = list_scheduler
        self.times = times
        self.holdings = holdings
        self.is_stale = True
        self._n_done = 0
        self._n_trials = 0
        self._counted: dict[Worker, float] = {}

    def unit_done(self, worker: Worker) -> None:
        """See whether what was learned from a unit of the worker asks for a new count."""
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
        """Count anew, and set the target to the bound of what is left."""
        self.is_stale, self._n_done = False, 0
        self._n_trials = sum(1 for trial in trials.values() if trial.open)
        list_scheduler, times, workers = self.list_scheduler, self.times, self.holdings.workers
        self._counted = {worker: times.unit_s * pace for worker, pace in times.pace.items()}
        effort = self._efforts()
        whole = sum(effort)
        demand = [0.0] * len(effort)
        rem_after: dict[int, float] = {}
        for trial in trials.values():
            cost = times.cost[trial.number]
            rem_after[trial.number] = self._count_trial(trial, cost, effort, whole, demand)
        for worker, host in workers.items():
            list_scheduler.speed[worker] = 1.0 / times.pace[worker]
            list_scheduler.load[worker] = 0.0
            seconds = times.unit_s * times.pace[worker]
            for shard in bits(host.held):
                n_holders = (
                    sum(1 for _ in self.holdings.holders(shard)) if list_scheduler.replicated else 1
                )
                list_scheduler.load[worker] += seconds * demand[shard] / n_holders
        list_scheduler.demand = dict(enumerate(demand))
        target = now_s
        for number, rem in rem_after.items():
            list_scheduler.rem[number] = rem
            target = max(target, now_s + rem)
        for worker, load in list_scheduler.load.items():
            target = max(target, max(now_s, list_scheduler.free_at[worker]) + load)
        list_scheduler.target = target

    def _efforts(self) -> list[float]:
        """Seconds a unit of cost 1 takes with each shard, on its average holder."""
        times, workers = self.times, self.holdings.workers
        paces: list[list[float]] = [[] for _ in range(self.holdings.n_shards)]
        for worker, host in workers.items():
            for shard in bits(host.held):
                paces[shard].append(times.pace[worker])
        typical = sum(times.pace.values()) / len(times.pace) if times.pace else 1.0
        return [
            times.unit_s * times.weights[shard] * (sum(row) / len(row) if row else typical)
            for shard, row in enumerate(paces)
        ]

    def _count_trial(
        self, trial: Trial, cost: float, effort: list[float], whole: float, demand: list[float]
    ) -> float:
        """Remaining seconds of the trial; adds its work to the shards' demand."""
        weights, ratio = self.times.weights, self.times.ratio
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
                    demand[shard] += cost * weights[shard]
            if epoch.unscored == everything:
                n_unscored += 1
            else:
                for shard in bits(epoch.unscored):
                    demand[shard] += ratio * cost * weights[shard]
        passes = n_whole + ratio * n_unscored
        if passes:
            for shard, weight in enumerate(weights):
                demand[shard] += passes * cost * weight
        return cost * (remaining + n_whole * whole)
