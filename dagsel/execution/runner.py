"""Performs a flow's decisions on a cluster and tells the flow what came of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, assert_never

from dagsel.errors import ClusterError, SearchError
from dagsel.execution.engine import Engine, Message
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    Decision,
    Event,
    Finish,
    Flow,
    Reported,
    Stop,
    Train,
    TrialFailed,
)
from dagsel.planning.rounds import Chain, Round, Unit
from dagsel.record import Best, EpochRecord, Record, RoundRecord, UnitRecord
from dagsel.storage import CheckpointStore
from dagsel.study import StudyDriver

#: How often the runner looks up while nothing happens, so that Ctrl-C is heard.
_POLL_S = 0.5

Observer: TypeAlias = Callable[[Record], None]


@dataclass(slots=True)
class EpochTally:
    """What is known so far of one epoch of a trial."""

    n_shards: int
    trained: int = 0
    evaluated: int = 0
    loss: float = 0.0
    n_trained: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    n_evaluated: int = 0

    def add(self, unit: Unit, message: Message) -> None:
        """Add a unit's result, weighted by its samples."""
        n_samples = message["n_samples"]
        if unit.kind == "train":
            self.trained += 1
            self.n_trained += n_samples
            self.loss += n_samples * message["loss"]  # NaN where the workload has no loss
        else:
            self.evaluated += 1
            self.n_evaluated += n_samples
            for name, value in message["metrics"].items():
                self.sums[name] = self.sums.get(name, 0.0) + n_samples * value

    @property
    def complete(self) -> bool:
        """Whether all units of the epoch are in."""
        return self.trained == self.evaluated == self.n_shards

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of each validation metric over all validation samples."""
        return {name: total / max(self.n_evaluated, 1) for name, total in self.sums.items()}

    @property
    def train_loss(self) -> float:
        """Mean training loss over all training samples."""
        return self.loss / max(self.n_trained, 1)


@dataclass(slots=True)
class Runner:
    """One search on one cluster.

    Parameters
    ----------
    flow
        The search procedure.
    study
        Where trials come from and are told.
    engine
        The run's side of the cluster, entered.
    store
        Where states are stored.
    n_shards
        Training shards of the data set.
    record
        Filled while the search runs.
    check
        Raises an error if nothing can be trained with a configuration.
    observe
        Called with the record whenever something has changed.
    """

    flow: Flow
    study: StudyDriver
    engine: Engine
    store: CheckpointStore
    n_shards: int
    record: Record
    check: Callable[[Any], None]
    observe: Observer = lambda record: None
    _epochs: dict[int, int] = field(default_factory=dict)  # live trial: epochs decided so far
    _seen: dict[int, set[Unit]] = field(default_factory=dict)
    _tallies: dict[tuple[int, int], EpochTally] = field(default_factory=dict)
    _n_rounds: int = 0
    _finished: bool = False

    def run(self) -> None:
        """Search until the flow has finished.

        Raises
        ------
        ClusterError
            If the run cannot go on.
        """
        self._perform(self.flow.start(Context(n_workers=len(self.engine.workers))))
        while not self._finished:
            for message in self.engine.messages(timeout_s=_POLL_S):
                self._hear(message)
            self.engine.check_alive()
            self.observe(self.record)

    def _perform(self, decisions: Iterable[Decision]) -> None:
        waiting = list(decisions)
        trains: list[Train] = []
        while waiting:
            decision = waiting.pop(0)
            match decision:
                case Ask():
                    waiting += self._ask(decision)
                case Train():
                    trains.append(decision)
                case Stop():
                    self._stop(decision)
                case Finish():
                    self._finished = True
                case _:
                    assert_never(decision)
        if trains:
            self._train(trains)

    def _tell(self, event: Event) -> None:
        self._perform(self.flow.handle(event))

    def _ask(self, ask: Ask) -> list[Decision]:
        configs, exhausted = self.study.ask(ask.n, ask.sampling)
        decisions: list[Decision] = []
        for trial, config in configs.items():
            self.record.add_trial(trial, config, self.study.params(trial))
            self._epochs[trial] = 0
            self._seen[trial] = set()
        decisions += self.flow.handle(Asked(tuple(configs), exhausted))
        for trial, config in configs.items():
            try:
                self.check(config)
            except Exception as error:  # noqa: BLE001 - the trial's own code raised it
                self._fail(trial, f"{type(error).__name__}: {error}")
        return [d for d in decisions if not isinstance(d, Train) or d.trial in self._epochs]

    def _train(self, trains: list[Train]) -> None:
        chains = []
        for train in trains:
            done = self._epochs[train.trial]
            epochs = range(done + 1, done + 1 + train.epochs)
            self._epochs[train.trial] += train.epochs
            self.record.n_epochs_decided += train.epochs
            chains.append(Chain(train.trial, epochs, self.n_shards))
        self._n_rounds += 1
        pairs = frozenset((chain.trial, epoch) for chain in chains for epoch in chain.epochs)
        self.record.rounds.append(RoundRecord(self._n_rounds, pairs, time.time()))
        configs = {train.trial: self.record.trials[train.trial].config for train in trains}
        self.engine.submit(Round(self._n_rounds, tuple(chains)), configs)
        for train in trains:
            if train.priority:
                self.engine.prioritize(train.trial, train.priority)

    def _stop(self, stop: Stop) -> None:
        trial = stop.trial
        if trial not in self._epochs:
            raise SearchError(f"the flow stops trial {trial}, which is not live")
        record = self.record.trials[trial]
        epoch = len(record.epochs)
        self._withdraw(trial)
        if stop.outcome == "pruned" or not record.epochs:
            self.study.prune(trial)
            self.record.end_trial(trial, "pruned", stop.reason)
            self.store.drop(trial)
            return
        value = record.epochs[-1].metrics[self.study.metric]
        self.study.complete(trial, value)
        self.record.end_trial(trial, "complete", stop.reason)
        best = self.record.best
        if self.study.is_better(value, best.value if best else None):
            self.record.best = Best(trial, epoch, self.n_shards - 1, value)
            if best is not None:
                self.store.drop(best.trial)
        else:
            self.store.drop(trial)

    def _fail(self, trial: int, reason: str, traceback: str = "") -> None:
        if trial not in self._epochs:
            return
        self._withdraw(trial)
        self.study.fail(trial, reason, traceback)
        self.record.end_trial(trial, "failed", reason, traceback)
        self.store.drop(trial)
        self._tell(TrialFailed(trial, reason))

    def _withdraw(self, trial: int) -> None:
        del self._epochs[trial]
        del self._seen[trial]
        self.engine.stop(trial)

    def _hear(self, message: Message) -> None:
        match message["op"]:
            case "done":
                self._unit_done(Unit(*message["unit"]), message)
            case "failed":
                self._fail(message["trial"], message["reason"], message["traceback"])
            case "loaded":
                self.record.loads.append((message["worker"], message["shard"]))
            case "joined":
                self.engine.workers.add(message["worker"])
            case "left":
                self.engine.workers.discard(message["worker"])
            case "refused" | "restarted":
                self.record.notes.append(message["reason"])
            case "fatal":
                raise ClusterError(message["reason"])

    def _unit_done(self, unit: Unit, message: Message) -> None:
        self.record.units.append(UnitRecord.from_message(unit, message))
        if unit.trial not in self._epochs or unit in self._seen[unit.trial]:
            return  # withdrawn, or done before and found again after a worker was lost
        self._seen[unit.trial].add(unit)
        place = (unit.trial, unit.epoch)
        tally = self._tallies.setdefault(place, EpochTally(self.n_shards))
        tally.add(unit, message)
        if tally.complete:
            del self._tallies[place]
            self._epoch_done(unit, tally)

    def _epoch_done(self, unit: Unit, tally: EpochTally) -> None:
        trial, epoch, metrics = unit.trial, unit.epoch, tally.metrics
        seconds = time.monotonic() - self.record.started
        self.record.trials[trial].epochs.append(
            EpochRecord(epoch, metrics, tally.train_loss, seconds)
        )
        if epoch > 1:
            self.store.delete(trial, epoch - 1, self.n_shards - 1)
        value = metrics[self.study.metric]
        if math.isnan(value):
            reason = f"DivergedError: {self.study.metric} is NaN after epoch {epoch}"
            self._fail(trial, reason)
            return
        self.study.report(trial, epoch, value)
        self._tell(Reported(trial, epoch, value, metrics, seconds))
