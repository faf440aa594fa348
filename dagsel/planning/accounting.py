"""How much work is left: fills the rule's `Shop` from ledger, holdings and estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dagsel.planning.costs import UnitTimes
from dagsel.planning.events import Worker
from dagsel.planning.holdings import Holdings
from dagsel.planning.ledger import Trial
from dagsel.planning.rounds import Unit
from dagsel.planning.rule import Shop, bits

SHIFT = 0.05  # relative change of a pace or of the scale that makes the sums worth a new count


@dataclass(slots=True)
class Binding:
    """A unit on a worker.

    Attributes
    ----------
    seconds
        Expected duration.
    ahead_s
        So long before its end its worker may get another unit.
    began_s
        When it became the first of its worker's units; None while another runs there.
    started
        Whether the worker said that it runs.
    preempted_s
        When it was told to stop; None if it was not.
    timed_out
        Whether it was told so because of its time limit.
    members
        The other workers of its gang.
    lost
        Those of them that have gone since, even if one of that address has come back.
    """

    unit: Unit
    worker: Worker
    shard: int
    seconds: float
    ahead_s: float
    began_s: float | None = None
    started: bool = False
    preempted_s: float | None = None
    timed_out: bool = False
    members: tuple[Worker, ...] = ()
    lost: tuple[Worker, ...] = ()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers that it was bound to."""
        return (self.worker, *self.members)

    @property
    def there(self) -> tuple[Worker, ...]:
        """All workers that it is on."""
        return (self.worker, *(member for member in self.members if member not in self.lost))


class Accounts:
    """Counts the work that is left, and knows when the count is out of date.

    Between counts the rule itself subtracts what begins; estimates that move, rounds that are
    added and shards that move make a new count necessary.
    """

    def __init__(self, shop: Shop[Worker], times: UnitTimes, holdings: Holdings) -> None:
        self.shop = shop
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
        shop, times, workers = self.shop, self.times, self.holdings.workers
        self._counted = {worker: times.unit_s * pace for worker, pace in times.pace.items()}
        effort = self._efforts()
        whole = sum(effort)
        demand = [0.0] * len(effort)
        rem_after: dict[int, float] = {}
        for trial in trials.values():
            cost = times.cost[trial.number]
            rem_after[trial.number] = self._count_trial(trial, cost, effort, whole, demand)
        for worker, seat in workers.items():
            shop.speed[worker] = 1.0 / times.pace[worker]
            shop.load[worker] = 0.0
            seconds = times.unit_s * times.pace[worker]
            for shard in bits(seat.held):
                n_holders = sum(1 for _ in self.holdings.holders(shard)) if shop.replicated else 1
                shop.load[worker] += seconds * demand[shard] / n_holders
        shop.demand = dict(enumerate(demand))
        target = now_s
        for number, rem in rem_after.items():
            shop.rem[number] = rem
            target = max(target, now_s + rem)
        for worker, load in shop.load.items():
            target = max(target, max(now_s, shop.free_at[worker]) + load)
        shop.target = target

    def _efforts(self) -> list[float]:
        """Seconds a unit of cost 1 takes with each shard, on its average holder."""
        times, workers = self.times, self.holdings.workers
        paces: list[list[float]] = [[] for _ in range(self.holdings.n_shards)]
        for worker, seat in workers.items():
            for shard in bits(seat.held):
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
