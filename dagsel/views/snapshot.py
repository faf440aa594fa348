"""What people are shown of a running search: counts, trials, the best so far, the time it may take.

A `Snapshot` is taken of the record; terminals, notebooks and logs show the same one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dagsel.console import shown_config
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.views.words import clock, counted, from_to, seconds_left

#: So many of the last units say how long the next ones take.
LAST_UNITS = 128
#: How trials stand, in the order in which they are counted out.
STATES = ("training", "paused", "complete", "pruned", "failed")


@dataclass(frozen=True, slots=True)
class TrialRow:
    """How a trial stands."""

    number: int
    state: str  # one of `STATES`
    n_epochs: int
    n_decided: int  # epochs that it was given to train
    value: float | None  # the (first) metric of the state that it is worth; None before there is
    curve: tuple[float, ...]  # the metric after each epoch
    config: str
    reason: str  # why it has ended

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("training", "paused")

    @classmethod
    def of(cls, trial: TrialRecord) -> TrialRow:
        """Return how a trial stands."""
        rests = trial.is_paused or trial.is_held
        live_state = "paused" if rests else "training"
        return cls(
            trial.number,
            live_state if trial.is_live else trial.state,
            len(trial.epochs),
            trial.n_decided if trial.is_live else len(trial.epochs),
            trial.value,
            tuple(epoch.value for epoch in trial.epochs),
            shown_config(trial.config),
            trial.reason,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How a search stands."""

    seconds: float  # since it began
    metric: str
    n_epochs: int
    n_decided: int  # epochs that were decided to be trained, those that are over among them
    n_workers: int
    units_per_second: float
    worker_seconds: float
    rows: tuple[TrialRow, ...]  # those that live first, the best first
    best: TrialRow | None
    best_after: float  # epochs after which it was that
    n_front: int | None  # trials of the Pareto front, if there are several metrics
    left_s: tuple[float, float] | None  # how long the decided epochs may take; None if unknown

    @classmethod
    def of(cls, record: Record, metric: str, units_per_second: float) -> Snapshot:
        """Return how a search stands."""
        leading = record.leading
        rows = sorted((TrialRow.of(trial) for trial in record.trials.values()), key=_order(record))
        return cls(
            record.seconds,
            metric,
            record.n_epochs,
            record.n_epochs_decided,
            record.n_workers,
            units_per_second,
            record.worker_seconds,
            tuple(rows),
            None if leading is None else TrialRow.of(leading),
            leading.kept.epochs if leading is not None and leading.kept is not None else 0,
            len(record.top) if record.goals else None,
            seconds_left(
                record.units[-LAST_UNITS:],
                record.n_epochs_decided - record.n_epochs,
                n_shards=record.n_shards,
                n_workers=record.n_workers,
            ),
        )

    @property
    def head(self) -> list[str]:
        """What is said above the trials: how far it is, who is there, and the best so far."""
        far = f"{clock(self.seconds)} · {self.n_epochs} of {self.n_decided} epochs"
        if self.left_s is not None:
            far += f" · {from_to(*self.left_s)} for the rest of them"
        counts = Counter(row.state for row in self.rows)
        there = [f"{counts[state]} {state}" for state in STATES if counts[state]]
        there += [counted(self.n_workers, "worker"), f"{self.units_per_second:.1f} units/s"]
        best = [] if self.best is None else [f"best {self.told(self.best, self.best_after)}"]
        if self.n_front is not None:
            best = [f"{self.n_front} trials on the Pareto front"]
        return [far, " · ".join(there), *best]

    def told(self, row: TrialRow, after: float) -> str:
        """Return the value of a trial and its configuration."""
        value = "none" if row.value is None else f"{row.value:.4g}"
        text = f"{self.metric} {value}: trial {row.number} after {counted(after, 'epoch')}"
        return f"{text} · {row.config}" if row.config else text


def _order(record: Record) -> Callable[[TrialRow], tuple[int, bool, float, int]]:
    def key(row: TrialRow) -> tuple[int, bool, float, int]:
        loss = math.inf if row.value is None else record.loss(row.value)
        return (
            (2 if row.state == "failed" else not row.is_live),
            row.value is None,
            loss,
            row.number,
        )

    return key
