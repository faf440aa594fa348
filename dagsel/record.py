"""What a run has done: trials, epochs and units, as they became known."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import pandas as pd

from dagsel.planning.bounds import round_bound
from dagsel.planning.rounds import Unit


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """What an epoch of a trial came to.

    Parameters
    ----------
    epoch
        From 1.
    metrics
        Mean of each validation metric.
    train_loss
        Mean training loss.
    seconds
        Since the run began.
    """

    epoch: int
    metrics: Mapping[str, float]
    train_loss: float
    seconds: float


@dataclass(slots=True)
class TrialRecord:
    """What became of a trial."""

    number: int
    config: Mapping[str, Any]
    params: Mapping[str, Any]
    state: Literal["running", "complete", "pruned", "failed"] = "running"
    reason: str = ""
    traceback: str = ""
    epochs: list[EpochRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """One unit as it ran.

    Parameters
    ----------
    unit
        Which one.
    worker
        Address of the worker.
    shard
        The shard it visited.
    start, stop
        Seconds since the epoch, by the worker's clock.
    hop
        Whether the state came from another worker.
    recovered
        Whether a stored result was found instead of training again.
    state_bytes
        Size of the state that it gave; 0 for an evaluating unit.
    """

    unit: Unit
    worker: str
    shard: int
    start: float
    stop: float
    hop: bool
    recovered: bool
    state_bytes: int

    @classmethod
    def from_message(cls, unit: Unit, message: Mapping[str, Any]) -> UnitRecord:
        """Read the engine's message of a unit that is done."""
        return cls(
            unit,
            message["worker"],
            message["shard"],
            message["start"],
            message["stop"],
            message["hop"],
            message.get("recovered", False),
            message.get("state_bytes", 0),
        )


@dataclass(frozen=True, slots=True)
class Best:
    """The best completed trial so far, and where its state is."""

    trial: int
    epoch: int
    position: int
    value: float


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """Chains that were decided together.

    Parameters
    ----------
    number
        Number of the round in its run.
    epochs
        Trials and their epochs that are in it.
    start
        When it was sent: seconds since the epoch, by the driver's clock.
    """

    number: int
    epochs: frozenset[tuple[int, int]]
    start: float


@dataclass(slots=True)
class Record:
    """All that a run has done.

    Parameters
    ----------
    run
        Identifier of the run.
    started
        Monotonic time at which it began.
    """

    run: str
    started: float = field(default_factory=time.monotonic)
    trials: dict[int, TrialRecord] = field(default_factory=dict)
    units: list[UnitRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    loads: list[tuple[str, int]] = field(default_factory=list)  # worker and shard
    best: Best | None = None
    n_epochs_decided: int = 0
    notes: list[str] = field(default_factory=list)

    def add_trial(self, number: int, config: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        """Begin the record of a trial."""
        self.trials[number] = TrialRecord(number, config, params)

    def end_trial(
        self,
        number: int,
        state: Literal["complete", "pruned", "failed"],
        reason: str,
        traceback: str = "",
    ) -> None:
        """End the record of a trial."""
        trial = self.trials[number]
        trial.state, trial.reason, trial.traceback = state, reason, traceback

    @property
    def n_live(self) -> int:
        """Trials that are neither complete nor pruned nor failed."""
        return sum(trial.state == "running" for trial in self.trials.values())

    @property
    def n_epochs(self) -> int:
        """Epochs that trials have ended."""
        return sum(len(trial.epochs) for trial in self.trials.values())

    @property
    def failures(self) -> list[TrialRecord]:
        """Trials that have failed."""
        return [trial for trial in self.trials.values() if trial.state == "failed"]

    def metrics(self) -> pd.DataFrame:
        """Give a row for each trial, epoch, split and metric."""
        rows = [
            (trial.number, epoch.epoch, split, name, value, epoch.seconds)
            for trial in self.trials.values()
            for epoch in trial.epochs
            for split, name, value in [
                ("train", "loss", epoch.train_loss),
                *(("validation", name, value) for name, value in epoch.metrics.items()),
            ]
        ]
        return pd.DataFrame(rows, columns=["trial", "epoch", "split", "name", "value", "seconds"])

    def timeline(self) -> pd.DataFrame:
        """Give a row for each unit that ran, in the order in which they ended."""
        rows = [
            (*unit.unit, unit.shard, unit.worker, unit.start, unit.stop, unit.hop, unit.recovered)
            for unit in self.units
        ]
        columns = ["kind", "trial", "epoch", "position", "shard", "worker", "start", "stop"]
        return pd.DataFrame(rows, columns=[*columns, "hop", "recovered"])

    def makespans(self) -> pd.DataFrame:
        """Give a row for each round: how long it took, against the bound of its units' times.

        The bound (`dagsel.planning.bounds.round_bound`) is what no schedule can beat with the
        workers that held its shards. What other rounds did meanwhile counts against a round.
        """
        by_epoch: dict[tuple[int, int], list[UnitRecord]] = {}
        for unit in self.units:
            by_epoch.setdefault((unit.unit.trial, unit.unit.epoch), []).append(unit)
        rows = []
        for round_ in self.rounds:
            units = [unit for epoch in round_.epochs for unit in by_epoch.get(epoch, ())]
            if units:
                makespan = max(unit.stop for unit in units) - round_.start
                bound = bound_of(units)
                ratio = makespan / bound if bound > 0 else math.nan  # all were found in the store
                rows.append((round_.number, len(units), makespan, bound, ratio))
        return pd.DataFrame(rows, columns=["round", "units", "makespan", "bound", "ratio"])


def bound_of(units: Sequence[UnitRecord]) -> float:
    """Bound in seconds of the makespan of units, from the times that they took.

    Parameters
    ----------
    units
        At least one.
    """
    ran = [unit for unit in units if not unit.recovered]
    workers = sorted({unit.worker for unit in ran})
    speeds = relative_speeds(ran)
    holders: dict[int, set[int]] = {}
    for unit in ran:
        holders.setdefault(unit.shard, set()).add(workers.index(unit.worker))
    shards = sorted(holders)
    rows: dict[tuple[Any, ...], list[float]] = {}
    for unit in ran:
        # Training units of a trial are a chain; each evaluating unit stands alone.
        chain = unit.unit[:2] if unit.unit.kind == "train" else tuple(unit.unit)
        row = rows.setdefault(chain, [0.0] * len(shards))
        row[shards.index(unit.shard)] += (unit.stop - unit.start) * speeds[unit.worker]
    in_order = [holders[shard] for shard in shards]
    return round_bound(list(rows.values()), [speeds[worker] for worker in workers], in_order)


def relative_speeds(units: Sequence[UnitRecord]) -> dict[str, float]:
    """Estimate how fast each worker is, 1 on average: from trials that trained on several."""
    seconds: dict[int, dict[str, list[float]]] = {}
    for unit in units:
        if unit.unit.kind == "train":
            on = seconds.setdefault(unit.unit.trial, {})
            on.setdefault(unit.worker, []).append(unit.stop - unit.start)
    ratios: dict[str, list[float]] = {unit.worker: [] for unit in units}
    for on in seconds.values():
        means = {worker: sum(times) / len(times) for worker, times in on.items()}
        overall = sum(means.values()) / len(means)
        for worker, mean in means.items():
            ratios[worker].append(overall / mean if mean > 0 else 1.0)
    return {worker: median(found) if found else 1.0 for worker, found in ratios.items()}
