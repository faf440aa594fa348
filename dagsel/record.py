"""What a run has done: trials, epochs and units, as they became known."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd

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
    best: Best | None = None
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
