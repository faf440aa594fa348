"""What people are shown of a running search: counts, trials, the best so far, the time it may take.

A `Snapshot` is taken of the record; terminals, notebooks and logs show the same one.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from dagsel.console import counted, shown_config
from dagsel.dispatch.description import WorkerNow
from dagsel.history.live import config_kept
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.views.facts import Facts, Gauge
from dagsel.views.words import clock, from_to, seconds_left

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
    # The (first) metric of the state that it is worth; None before there is, and of a workload
    # without a loss that is refitted.
    value: float | None
    curve: tuple[float, ...]  # the metric after each epoch
    settings: Mapping[str, Any]  # its configuration
    reason: str  # why it has ended, in one line, and where its workload has raised
    progress: float  # how far it has trained, in epochs
    is_paused_by_user: bool  # whether a command has paused it, so that one can resume it
    params: Mapping[str, Any]  # what the space has suggested for it

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("training", "paused")

    @property
    def config(self) -> str:
        """Its configuration as a short text."""
        return shown_config(self.settings)

    @classmethod
    def of(cls, trial: TrialRecord, record: Record, *, is_best: bool = False) -> TrialRow:
        """Return how a trial stands: with its parameters of now, or those of the best value."""
        is_now = trial.is_live and not is_best
        epochs = len(trial.epochs)
        return cls(
            trial.number,
            _state(trial),
            epochs,
            trial.n_decided if trial.is_live else epochs,
            _value(trial),
            tuple(epoch.value for epoch in trial.epochs),
            trial.config if is_now else config_kept(record, trial),
            trial.why_short,
            trial.progress(record.n_shards) if trial.is_live else epochs,
            trial.paused_by_user,
            trial.params_now if is_now else trial.params_kept,
        )


def _state(trial: TrialRecord) -> str:
    if not trial.is_live:
        return trial.state
    rests = trial.is_paused or trial.is_held or trial.paused_by_user
    return "paused" if rests else "training"


def _value(trial: TrialRecord) -> float | None:
    return None if trial.value is None or math.isnan(trial.value) else trial.value


@dataclass(frozen=True, slots=True)
class Rows(Sequence[TrialRow]):
    """How trials stand. A row is made when it is read: of thousands a view shows a few."""

    trials: Sequence[TrialRecord]
    record: Record

    def __len__(self) -> int:
        return len(self.trials)

    @overload
    def __getitem__(self, at: int) -> TrialRow: ...
    @overload
    def __getitem__(self, at: slice) -> list[TrialRow]: ...
    def __getitem__(self, at: int | slice) -> TrialRow | list[TrialRow]:
        if isinstance(at, slice):
            return [TrialRow.of(trial, self.record) for trial in self.trials[at]]
        return TrialRow.of(self.trials[at], self.record)

    @property
    def ended(self) -> dict[int, int]:
        """At which place each trial is that has ended, by its number."""
        return {it.number: at for at, it in enumerate(self.trials) if not it.is_live}

    def params_of(self, number: int) -> Mapping[str, Any]:
        """Return the parameters of a trial; nothing if there is none of this number."""
        trial = self.record.trials.get(number)
        return {} if trial is None else TrialRow.of(trial, self.record).params


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
    rows: Rows  # those that live first, the best first
    counts: Mapping[str, int]  # trials of each state that there is, in the order of `STATES`
    best: TrialRow | None
    best_after: float  # epochs after which it was that
    n_front: int | None  # trials of the Pareto front, if there are several metrics
    left_s: tuple[float, float] | None  # how long the decided epochs may take; None if unknown
    n_total: int | None  # trials that there will be; None if nobody knows
    gauges: tuple[Gauge, ...]  # what is used, and what is left of deadline and budget
    workers: tuple[WorkerNow, ...]  # empty where nobody says what they do
    dashboard: str  # address of Dask's dashboard; empty if there is none
    is_over: bool  # whether it has ended, and no resume goes on with it
    is_driven: bool = True  # whether somebody drives it; else nothing trains

    @classmethod
    def of(
        cls, record: Record, metric: str, units_per_second: float, facts: Facts | None = None
    ) -> Snapshot:
        """Return how a search stands; without `facts` only what the record holds."""
        facts = facts or Facts()
        leading = record.leading
        best = None if leading is None else TrialRow.of(leading, record, is_best=True)
        rows = Rows(sorted(record.trials.values(), key=_order(record)), record)
        counts = Counter(map(_state, rows.trials))
        return cls(
            record.seconds,
            metric,
            record.n_epochs,
            record.n_epochs_decided,
            record.n_workers,
            units_per_second,
            record.worker_seconds,
            rows,
            {state: counts[state] for state in STATES if counts[state]},
            None if best is None or best.value is None else best,
            leading.kept.epochs if leading is not None and leading.kept is not None else 0,
            len(record.top) if record.goals else None,
            seconds_left(
                record.units[-LAST_UNITS:],
                record.n_epochs_decided - record.n_epochs,
                n_shards=record.n_shards,
                n_workers=record.n_workers,
            ),
            facts.total(record),
            facts.gauges(record),
            tuple(sorted(facts.workers(), key=lambda now: _natural(now.name))),
            facts.dashboard,
            record.finished and not record.interrupted,
        )

    @property
    def head(self) -> list[str]:
        """What is said above the trials: how far it is, who is there, limits, and the best."""
        far = f"{clock(self.seconds)} · {self.far}"
        limited = " · ".join(str(gauge) for gauge in self.gauges if gauge.limit or gauge.is_money)
        return [far, self.there, *([limited] if limited else []), *self.best_told]

    @property
    def far(self) -> str:
        """How far it is: epochs, trials that have ended if it is known of how many, time left."""
        parts = [f"{self.n_epochs} of {self.n_decided} epochs"]
        if self.n_total is not None:
            parts.append(f"{self.n_ended} of {counted(self.n_total, 'trial')} ended")
        if self.left_s is not None:
            parts.append(f"{from_to(*self.left_s)} for the rest of the epochs")
        return " · ".join(parts)

    @property
    def there(self) -> str:
        """Trials by their state, workers, and how fast they are."""
        there = [f"{n} {state}" for state, n in self.counts.items()]
        if self.is_driven:
            there += [counted(self.n_workers, "worker"), f"{self.units_per_second:.1f} units/s"]
        return " · ".join(there)

    @property
    def best_told(self) -> list[str]:
        """The best so far in a line, if there is one."""
        if self.n_front is not None:
            return [f"{counted(self.n_front, 'trial')} on the Pareto front"]
        return [] if self.best is None else [f"best {self.told(self.best, self.best_after)}"]

    @property
    def n_ended(self) -> int:
        """Trials that have ended."""
        return len(self.rows) - self.n_live

    @property
    def n_live(self) -> int:
        """Trials that have not ended."""
        return self.counts.get("training", 0) + self.counts.get("paused", 0)

    def told(self, row: TrialRow, after: float) -> str:
        """Return the value of a trial and its configuration."""
        value = "none" if row.value is None else f"{row.value:.4g}"
        text = f"{self.metric} {value}: trial {row.number} after {counted(after, 'epoch')}"
        return f"{text} · {row.config}" if row.config else text


def _natural(name: str) -> tuple[int, str]:
    """Sort numbers as numbers."""
    return (int(name), "") if name.isdigit() else (sys.maxsize, name)


def _order(record: Record) -> Callable[[TrialRecord], tuple[int, bool, float, int]]:
    def key(trial: TrialRecord) -> tuple[int, bool, float, int]:
        """Return a key by which live trials come first, the best first of them."""
        value = _value(trial)
        loss = math.inf if value is None else record.loss(value)
        group = 2 if trial.state == "failed" else int(not trial.is_live)
        return group, value is None, loss, trial.number

    return key
