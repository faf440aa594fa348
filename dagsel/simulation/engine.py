"""Plays the cluster for the runner: the same dispatcher, workers that are a model, virtual time.

The model is `dagsel.simulation.virtual_cluster.VirtualCluster`, a heap of what will happen. A
library for simulation would add a dependency and a process for each worker, and no more: the
dispatcher's events are all that ever happens here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from itertools import zip_longest
from math import inf
from typing import Any, TypeVar

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    CheckAdded,
    DrainRequested,
    FailRun,
    HorizonSet,
    PriorityChanged,
    ShardLoaded,
    TrialAllowed,
    TrialHeld,
    TrialStopped,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.units import Round, Unit
from dagsel.errors import NoWorkersError, SearchError, TrainingError
from dagsel.flow import Reported, TrialFailed, WorkersChanged
from dagsel.messages import Message, PieceRecord, StatePlace, TrialReport, UnitRecord
from dagsel.planning.bill import Bill
from dagsel.planning.capacity import ClusterCapacity
from dagsel.planning.hiring import share_out
from dagsel.planning.pools import most_of
from dagsel.simulation.cluster import SimulatedCluster, worker_name
from dagsel.simulation.curves import Config, Curves, Loses, Scales
from dagsel.simulation.machines import Ran
from dagsel.simulation.order import Batch
from dagsel.simulation.virtual_cluster import VirtualCluster

#: If so many workers are taken back before a unit ends, none will ever end.
MOST_IN_VAIN = 1000

Work = TypeVar("Work", UnitRecord, PieceRecord)

_NONE: Mapping[str, float] = {}  # the metrics of a shard that tells none


class VirtualEngine:
    """An engine for `dagsel.driver.runner.Runner` in virtual time.

    Parameters
    ----------
    curves
        What trials do, and what they cost.
    cluster
        What the workers are like.
    metrics
        Curves of each metric by its name.
    order
        What the flow was told in another run: it is told the same in the same order, each epoch
        being kept back until those before it are trained.
    seed
        Draws when workers are taken back.
    """

    stall_s = inf  # `check_alive` knows when nothing will happen again

    def __init__(
        self,
        curves: Curves,
        cluster: SimulatedCluster,
        metrics: Mapping[str, Curves],
        *,
        order: tuple[Batch, ...] = (),
        seed: int = 0,
    ) -> None:
        self._curves = curves
        self._cluster = cluster
        self._seed = seed
        self._metrics = metrics
        self._n_shards = cluster.n_shards
        self._order = deque(order)
        self._can_scale = cluster.max_workers is not None
        self._most = cluster.n_workers + len(cluster.additions)
        if cluster.max_workers is not None:
            self._most = min(cluster.max_workers, most_of(cluster.workers) or cluster.max_workers)
        self._configs: dict[int, Config] = {}
        self._unit_s: dict[int, float] = {}
        self._scored: dict[tuple[int, int], list[Ran]] = {}  # epochs, as far as they are scored
        self._complete: dict[tuple[int, int], None] = {}  # epochs that the runner shall hear of
        self._heard: list[Message] = []
        self._reached: dict[int, float] = {}  # how far each trial has trained, in epochs
        self._shares_time: set[int] = set()  # trials whose losses the flow is told
        self._speeds, self._startup_s = cluster.worker_speeds, cluster.startup_s
        self._is_over = self._has_reported = False
        self._is_news = False  # whether the runner has something to act on
        self._told_workers = cluster.n_workers  # what the flow is told of workers in a kept order
        self._keeps_order = bool(order)
        self._model = VirtualCluster(
            Dispatcher(DispatchConfig(cluster.n_shards, cluster.copies)),
            self._seconds,
            load_seconds=cluster.load_s,
            hop_seconds=cluster.hop_s,
            speedup=self._speedup,
            batches=self._batches,
            switch_seconds=cluster.switch_s,
        )
        # The search begins when the first workers are there; they were asked for before.
        prices = {pool.name: pool.cost.per_hour for pool in cluster.workers}
        self._bill = Bill(at=-cluster.startup_s, prices=prices)
        self._replaces = self._can_scale or cluster.interruptions_per_hour > 0.0
        self._pool: dict[str, str] = {}  # of each worker
        self._n_wanted = cluster.n_workers
        self._n_in_vain = 0  # workers that were lost since a unit has ended
        self._there: list[str] = []
        self._n_changes = 0  # of the workers that are there
        self._n_staying = (-1, -1, 0)  # after so many changes, with so many leaving
        # When workers that were asked for will come.
        self._coming = dict.fromkeys(self._speeds, 0.0)
        self._leaving: set[str] = set()
        self._model.add_workers(dict.fromkeys(self._speeds, 1.0))
        self._choose_pools(list(self._speeds), 0.0)
        self._ask(cluster.n_workers, at=-cluster.startup_s)
        added = [(worker_name(k), *it) for k, it in enumerate(cluster.additions, cluster.n_workers)]
        for worker, time_s, speed in added:
            self._speeds[worker] = speed
            self._model.at(time_s)  # its request: from then on it is billed
            self._model.at(time_s + cluster.startup_s, WorkerAdded(worker))
        self._requests = deque(sorted((time_s, worker) for worker, time_s, _ in added))
        self._n_named = len(self._speeds)
        for time_s, number in cluster.failures:
            self._model.at(time_s, WorkerRemoved(worker_name(number)))
        self._model.step()
        self._count_workers()

    def _batches(self, unit: Unit) -> int | None:
        if not isinstance(self._curves, Loses):
            return None
        return max(1, round(self._curves.n_batches / self._n_shards))

    def _speedup(self, unit: Unit, gang: int) -> float:
        if not isinstance(self._curves, Scales):
            return float(gang)
        return self._curves.speedup(self._configs[unit.trial], gang)

    def _seconds(self, unit: Unit, worker: str, shard: int) -> float:
        share = 1.0 if unit.kind == "train" else self._curves.evaluation_share
        return share * self._unit_s[unit.trial] / self._speeds[worker]

    @property
    def bill(self) -> Bill:
        """What the workers have cost so far."""
        self._count_workers()
        return self._bill

    # ---- what the runner asks for

    @property
    def n_workers(self) -> int:
        """Workers that are there."""
        if self._keeps_order:
            return self._told_workers
        now = (self._model.n_changes, len(self._leaving))
        if self._n_staying[:2] != now:
            self._n_staying = (*now, len(set(self._model.workers) - self._leaving))
        return self._n_staying[2]

    def now(self) -> float:
        """Seconds since the beginning, in virtual time."""
        return self._model.now_s

    def wall(self) -> float:
        """Seconds since the beginning, in virtual time."""
        return self._model.now_s

    def submit(self, round_: Round, configs: Mapping[int, Mapping[str, Any]]) -> None:
        """Add a round now."""
        for trial, config in configs.items():
            self._configs[trial] = config
            self._unit_s[trial] = self._curves.seconds(config, trial=trial) / self._n_shards
        if not self._curves.evaluation_share:
            chains = tuple(replace(chain, evaluate=False) for chain in round_.chains)
            round_ = Round(round_.number, chains)
        self._model.add_round(round_, self.now())

    def stop(self, trial: int) -> None:
        """Withdraw a trial now."""
        if trial in self._configs:
            self._model.at(self.now(), TrialStopped(trial))
        for epoch in [epoch for epoch in self._complete if epoch[0] == trial]:
            del self._complete[epoch]

    def raised(self, trial: int) -> None:
        """Return None: no code of a workload runs."""

    def release(self, trial: int, epoch: int) -> None:
        """Do nothing: in virtual time no result is kept."""

    def tell(self, command: TrialAllowed | TrialHeld | PriorityChanged) -> None:
        """Change what a trial may do."""
        if not isinstance(command, PriorityChanged):
            self._shares_time.add(command.trial)
        self._model.at(self.now(), command)

    @property
    def most_workers(self) -> int | None:
        """Workers that there can ever be."""
        return self._most

    @property
    def why_fixed(self) -> str:
        """Why the number of workers cannot be changed; empty if it can."""
        return "" if self._can_scale else "SimulatedCluster(max_workers=) is not given"

    @property
    def capacity(self) -> ClusterCapacity:
        """What the cluster can have."""
        return ClusterCapacity(self.most_workers, self._startup_s)

    def limit(self, at: float) -> None:
        """Begin no unit that is expected to end after this moment."""
        self._model.at(self.now(), HorizonSet(at))

    def check(
        self,
        trial: int,
        number: int,
        place: StatePlace,
        configs: Mapping[int, Mapping[str, Any]],
        *,
        halvings: int = 0,
    ) -> None:
        """Score a trial where it rests."""
        if self._curves.evaluation_share:
            self._model.at(self.now(), CheckAdded(trial, number))
            return
        for shard in range(self._n_shards):
            unit, now = Unit("check", trial, number, shard), self.now()
            self._tell_check(
                Ran(unit, self._there[0] if self._there else "", shard, now, now, False)
            )

    def scale(self, n_workers: int) -> None:
        """Scale the cluster, if it can be scaled."""
        if self._can_scale:
            self._resize(max(1, min(n_workers, self._most)))

    def _resize(self, n_workers: int) -> None:
        self._n_wanted = n_workers
        staying = [w for w in self._model.workers if w not in self._leaving]
        self._coming = {w: at for w, at in self._coming.items() if w not in self._model.workers}
        n_more = max(0, n_workers - len(staying) - len(self._coming))
        new = [worker_name(self._n_named + k) for k in range(n_more)]
        self._n_named += n_more
        comes_at = self.now() + self._startup_s
        self._choose_pools(new, comes_at)
        for worker in new:
            self._speeds[worker] = 1.0
            self._coming[worker] = comes_at
            self._model.at(comes_at, WorkerAdded(worker))
        n_over = len(staying) + len(self._coming) - n_workers
        prices = {w: self._bill.prices.get(pool, 0.0) for w, pool in self._pool.items()}
        while n_over > 0 and self._coming:  # what has not come need not come
            worker = max(reversed(self._coming), key=lambda w: prices[w])
            self._model.at(self._coming.pop(worker), WorkerRemoved(worker, expected=True))
            n_over -= 1
        for worker in self._model.dispatcher.cheapest(n_over, but=self._leaving, prices=prices):
            self._leaving.add(worker)
            self._model.at(self.now(), DrainRequested(worker))
        self._ask(n_workers, at=self.now())

    def _choose_pools(self, workers: list[str], comes_at: float) -> None:
        """Choose the pools of new workers, and when each is taken back."""
        pools = self._cluster.workers
        hired = {*self._model.workers, *self._coming} - self._leaving
        there = Counter(self._pool[worker] for worker in hired if worker in self._pool)
        starts = share_out(pools, len(workers), there=there)
        names = [name for name, n in starts.items() for _ in range(n)]
        names = names or [pools[0].name if pools else ""]
        for worker, name in zip_longest(workers, names[: len(workers)], fillvalue=names[-1]):
            self._pool[worker] = name
            lifetime_s = self._cluster.lifetime_s(worker, name, self._seed)
            self._model.take_back(worker, comes_at + lifetime_s, notice_s=self._cluster.notice_s)

    def _ask(self, n_workers: int, *, at: float) -> None:
        """Write on the bill who was asked for; with pools, who stays or is to come."""
        if not self._cluster.workers:
            self._bill = self._bill.ask(n_workers, at=at)
            return
        asked = {*self._model.workers, *self._coming} - self._leaving
        self._bill = self._bill.ask(Counter(self._pool[worker] for worker in asked), at=at)

    def check_alive(self) -> None:
        """Raise an error if nothing will ever happen again.

        Raises
        ------
        SearchError
            If the flow waits for what it has not decided, or decides otherwise than in the run
            whose order is kept.
        NoWorkersError
            If all workers have died, and none will come.
        """
        if self._n_in_vain > MOST_IN_VAIN:
            raise SearchError(
                f"{self._n_in_vain} workers were taken back and no unit has ended since; at "
                f"{self._cluster.interruptions_per_hour:g} an hour nothing is trained, so lower it"
            )
        if not self._is_over:
            return
        if not self._model.workers:
            raise NoWorkersError("all simulated workers have failed: give some more by additions=")
        if self._order:
            told = ", ".join(map(str, self._order[0]))
            raise SearchError(
                f"the recorded run was told {told}, and here that does not come; give the flow, "
                "the seed and the space of that run"
            )
        raise SearchError(
            f"after {self.now():g} s no trial trains: let the flow start one or finish"
        )

    def messages(self, *, timeout_s: float) -> Iterator[Message]:
        """Yield what happens until an epoch ends; waiting takes no time."""
        until_s = self.now() + timeout_s
        self._is_news = bool(self._heard)
        self._release()
        while not self._is_news:
            if not self._model.step(until_s):
                self._is_over = until_s == inf
                self._model.now_s = self.now() if self._is_over else until_s
                break
            self._read()
            self._release()
        heard, self._heard = self._heard, []
        yield from heard

    # ---- what happens

    def _read(self) -> None:
        """Read what is new in the model."""
        new = self._model.take_outcome()
        self._n_in_vain += len(new.noticed)
        self._leaving.update(new.noticed)
        if new.timeline:
            self._n_in_vain = 0
        self._count_workers()
        if new.noticed:  # another one is asked for at once
            for worker in set(new.noticed) & set(self._there):
                self._bill = self._bill.notice(worker, at=self.now())
            self._resize(self._n_wanted)
        self._heard += [ShardLoaded(*loaded) for loaded in new.loaded]
        self._heard += [self._trained(PieceRecord, ran) for ran in new.pieces]
        for ran in new.timeline:
            if ran.unit.kind == "check":
                self._tell_check(ran)
                continue
            if ran.unit.kind == "evaluate":
                self._score(ran)
                continue
            # What no curve tells, no record holds: a mean over no samples.
            self._heard.append(self._trained(UnitRecord, ran, n_samples=0, loss=0.0))
            if ran.unit.position == self._n_shards - 1 and not self._curves.evaluation_share:
                for shard in range(self._n_shards):
                    self._score(_scored_at_once(ran, shard))
        # Before an epoch has ended the runner looks whether one can.
        is_first = not self._has_reported and bool(new.timeline or new.pieces)
        self._is_news |= bool(new.rests) or is_first
        self._heard += new.rests
        for trial, reason in new.failed.items():
            self._fail(trial, reason)

    def _count_workers(self) -> None:
        """Write who came and who left on the bill."""
        while self._requests and self._requests[0][0] <= self.now():
            time_s, worker = self._requests.popleft()
            self._n_wanted, self._is_news = self._n_wanted + 1, True  # a budget ends earlier
            self._coming[worker] = time_s + self._startup_s
            self._choose_pools([worker], self._coming[worker])
            self._ask(self._bill.asked + 1, at=time_s)
        if self._n_changes == self._model.n_changes:
            return
        self._n_changes, there = self._model.n_changes, self._model.workers
        for worker in set(self._there) - set(there):
            self._bill = self._bill.leave(worker, at=self.now())
            if not self._replaces:  # nobody asks for another one in its place
                self._n_wanted -= 1
                self._ask(self._bill.asked - 1, at=self.now())
        for worker in set(there) - set(self._there):
            self._coming.pop(worker, None)
            self._bill = self._bill.join(worker, at=self.now(), pool=self._pool[worker])
        lost = set(self._there) - set(there) - self._leaving
        self._there = there
        self._is_news = True
        if lost and self._replaces:  # such a cluster replaces what it loses
            self._resize(self._n_wanted)
        elif self._cluster.workers:
            self._ask(self._n_wanted, at=self.now())

    def _trained(self, kind: type[Work], ran: Ran, **more: Any) -> Work:
        """Say what a training unit has come to that is over, or was stopped."""
        trial = ran.unit.trial
        before = self._reached.get(trial, 0.0)
        after = ran.unit.epoch - 1 + (ran.unit.position + ran.done) / self._n_shards
        self._reached[trial] = after
        losses = None
        if trial in self._shares_time and isinstance(self._curves, Loses):
            losses = astuple(self._curves.losses(self._configs[trial], before, after, trial=trial))
        return _work(kind, ran, recovered=False, losses=losses, **more)

    def _tell_check(self, ran: Ran) -> None:
        """Tell the value of a trial that is paused."""
        trial = ran.unit.trial
        metrics: Mapping[str, float] = _NONE
        if ran.unit.position == 0:  # as in `_report`
            try:
                metrics = self._values(trial, self._reached[trial])
            except TrainingError as error:
                self._fail(trial, str(error))
                return
        self._is_news = True
        self._heard.append(_scored(ran, metrics))

    def _values(self, trial: int, epoch: float) -> dict[str, float]:
        config, curves = self._configs[trial], self._metrics
        return {name: one.value(config, epoch, trial=trial) for name, one in curves.items()}

    def _score(self, ran: Ran) -> None:
        epoch = (ran.unit.trial, ran.unit.epoch)
        scored = self._scored.setdefault(epoch, [])
        scored.append(ran)
        if len(scored) == self._n_shards:
            self._complete[epoch] = None

    def _release(self) -> None:
        """Report the epochs whose turn it is."""
        if not self._order:
            for done in list(self._complete):
                self._report(*done)
            return
        reports = [event for event in self._order[0] if isinstance(event, Reported)]
        if all((event.trial, event.epoch) in self._complete for event in reports):
            for event in self._order.popleft():
                match event:
                    case Reported(trial, epoch):
                        self._report(trial, epoch)
                    case TrialFailed(trial, reason):
                        self._fail(trial, reason)
                    case WorkersChanged(n_workers):
                        self._told_workers, self._is_news = n_workers, True

    def _report(self, trial: int, epoch: int) -> None:
        del self._complete[trial, epoch]
        self._has_reported = True
        scored = self._scored.pop((trial, epoch))
        try:
            values = self._values(trial, epoch)
        except TrainingError as error:
            self._fail(trial, str(error))
            return
        self._is_news = True
        for ran in scored:
            # One shard tells the value: a mean over all would have other bits.
            self._heard.append(_scored(ran, values if ran.unit.position == 0 else _NONE))

    def _fail(self, trial: int, reason: str) -> None:
        self._is_news = True
        if trial < 0:  # the model's word for the run
            self._heard.append(FailRun(reason))
            return
        self._heard.append(TrialReport(trial, reason))


def _scored_at_once(ran: Ran, shard: int) -> Ran:
    unit = Unit("evaluate", ran.unit.trial, ran.unit.epoch, shard)
    return Ran(unit, ran.worker, shard, ran.stop_s, ran.stop_s, hop=False)


def _scored(ran: Ran, metrics: Mapping[str, float]) -> UnitRecord:
    return _work(UnitRecord, ran, n_samples=len(metrics), metrics=metrics)


def _work(kind: type[Work], ran: Ran, **more: Any) -> Work:
    return kind(
        ran.unit,
        ran.worker,
        ran.shard,
        ran.start_s,
        ran.stop_s,
        ran.hop,
        members=ran.members,
        share=ran.done,
        ready_seconds=ran.waits_s,
        **more,
    )
