"""Plays the cluster for the runner: the same dispatcher, workers that are a model, virtual time.

The model is `dagsel.planning.virtual.VirtualCluster`, a heap of what will happen. A library for
simulation would add a dependency and a process for each worker, and no more: the dispatcher's
events are all that ever happens here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any, TypeAlias

from dagsel.errors import NoWorkersError, SearchError, TrainingError
from dagsel.flow import Reported, TrialFailed, WorkersChanged
from dagsel.planning.dispatch import DispatchConfig, Dispatcher
from dagsel.planning.events import PriorityChanged, TrialStopped, WorkerAdded, WorkerRemoved
from dagsel.planning.rounds import Round, Unit
from dagsel.planning.virtual import Ran, VirtualCluster
from dagsel.simulation.cluster import SimulatedCluster, worker_name
from dagsel.simulation.curves import Config, Curves
from dagsel.simulation.order import Batch

Message: TypeAlias = dict[str, Any]


class VirtualEngine:
    """An engine for `dagsel.execution.runner.Runner` in virtual time.

    Parameters
    ----------
    curves
        What trials do, and what they cost.
    cluster
        What the workers are like.
    metric
        Name of the metric.
    order
        What the flow was told in another run: it is told the same in the same order, each epoch
        being kept back until those before it are trained.
    until_s
        The last moment that may be reached.
    """

    def __init__(
        self,
        curves: Curves,
        cluster: SimulatedCluster,
        metric: str,
        *,
        order: tuple[Batch, ...] = (),
        until_s: float = inf,
    ) -> None:
        self._curves = curves
        self._metric = metric
        self._n_shards = cluster.n_shards
        self._order = deque(order)
        self._until_s = until_s
        self._configs: dict[int, Config] = {}
        self._unit_s: dict[int, float] = {}
        self._scored: dict[tuple[int, int], list[Ran]] = {}  # epochs, as far as they are scored
        self._complete: dict[tuple[int, int], None] = {}  # epochs that the runner shall hear of
        self._heard: list[Message] = []
        self._n_read = [0, 0]  # how many units and loads of the model's outcome
        self._n_failed = 0
        self._speeds = cluster.worker_speeds
        self._is_over = False
        self._is_news = False  # whether the runner has something to act on
        self._told_workers = cluster.n_workers  # what the flow is told of workers in a kept order
        self._keeps_order = bool(order)
        self._model = VirtualCluster(
            Dispatcher(DispatchConfig(cluster.n_shards, cluster.copies)),
            self._seconds,
            load_seconds=cluster.load_s,
            hop_seconds=cluster.hop_s,
        )
        self._model.add_workers(dict.fromkeys(self._speeds, 1.0))
        for number, (time_s, speed) in enumerate(cluster.additions, cluster.n_workers):
            self._speeds[worker_name(number)] = speed
            self._model.at(time_s + cluster.startup_s, WorkerAdded(worker_name(number)))
        for time_s, number in cluster.failures:
            self._model.at(time_s, WorkerRemoved(worker_name(number)))
        self._model.step()

    def _seconds(self, unit: Unit, worker: str, shard: int) -> float:
        share = self._curves.evaluation_share if unit.kind == "evaluate" else 1.0
        return share * self._unit_s[unit.trial] / self._speeds[worker]

    # ---- what the runner asks for

    @property
    def n_workers(self) -> int:
        """Workers that are there."""
        return self._told_workers if self._keeps_order else len(self._model.workers)

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

    def release(self, trial: int, epoch: int) -> None:
        """Do nothing: in virtual time no result is kept."""

    def prioritize(self, trial: int, priority: float) -> None:
        """Serve trials of a higher priority first."""
        self._model.at(self.now(), PriorityChanged(trial, priority))

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
        if not self._is_over:
            return
        if not self._model.workers:
            raise NoWorkersError("all simulated workers have died, and none was to come")
        if self._order:
            told = ", ".join(map(str, self._order[0]))
            raise SearchError(
                f"the recorded run was told {told}, and here that does not come: the flow, its "
                "seed or the trials are others"
            )
        raise SearchError(f"after {self.now():g} s no trial trains, and the flow does not finish")

    def messages(self, *, timeout_s: float) -> Iterator[Message]:
        """Give what the next epoch that ends brings, and what was before; waiting takes no time."""
        self._is_news = False
        self._release()
        while not self._is_news:
            if not self._model.step(self._until_s):
                self._is_over = self._until_s == inf
                self._model.now_s = self.now() if self._is_over else self._until_s
                break
            self._read()
            self._release()
        heard, self._heard = self._heard, []
        yield from heard

    # ---- what happens

    def _read(self) -> None:
        """Read what is new in the model's outcome."""
        outcome = self._model.outcome
        n_units, n_loads = self._n_read
        self._n_read = [len(outcome.timeline), len(outcome.loaded)]
        for worker, shard in outcome.loaded[n_loads:]:
            self._heard.append({"op": "loaded", "worker": worker, "shard": shard})
        for ran in outcome.timeline[n_units:]:
            if ran.unit.kind == "evaluate":
                self._score(ran)
                continue
            # What no curve tells, no record holds: a mean over no samples.
            self._heard.append(_done(ran, n_samples=0, loss=0.0, state_bytes=0))
            if ran.unit.position == self._n_shards - 1 and not self._curves.evaluation_share:
                for shard in range(self._n_shards):
                    self._score(_scored_at_once(ran, shard))
        for trial in list(outcome.failed)[self._n_failed :]:
            self._n_failed += 1
            self._fail(trial, outcome.failed[trial])

    def _score(self, ran: Ran) -> None:
        epoch = (ran.unit.trial, ran.unit.epoch)
        scored = self._scored.setdefault(epoch, [])
        scored.append(ran)
        if len(scored) == self._n_shards:
            self._complete[epoch] = None

    def _release(self) -> None:
        """Let the runner hear of the epochs whose turn it is."""
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
        scored = self._scored.pop((trial, epoch))
        try:
            value = self._curves.value(self._configs[trial], epoch, trial=trial)
        except TrainingError as error:
            self._fail(trial, str(error))
            return
        self._is_news = True
        for ran in scored:
            # One shard tells the value: a mean over all would have other bits.
            is_first = ran.unit.position == 0
            metrics = {self._metric: value} if is_first else {}
            self._heard.append(_done(ran, n_samples=int(is_first), metrics=metrics))

    def _fail(self, trial: int, reason: str) -> None:
        self._is_news = True
        if trial < 0:  # the model's word for the run
            self._heard.append({"op": "fatal", "reason": reason})
            return
        self._heard.append({"op": "failed", "trial": trial, "reason": reason, "traceback": ""})


def _scored_at_once(ran: Ran, shard: int) -> Ran:
    unit = Unit("evaluate", ran.unit.trial, ran.unit.epoch, shard)
    return Ran(unit, ran.worker, shard, ran.stop_s, ran.stop_s, hop=False)


def _done(ran: Ran, **result: Any) -> Message:
    return {
        "op": "done",
        "unit": list(ran.unit),
        "worker": ran.worker,
        "shard": ran.shard,
        "start": ran.start_s,
        "stop": ran.stop_s,
        "hop": ran.hop,
        "recovered": False,
        **result,
    }
