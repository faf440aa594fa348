"""What a run has done, as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from dagsel.dispatch.units import Unit
from dagsel.history.record import Record
from dagsel.messages import UnitRecord


def metrics(record: Record) -> pd.DataFrame:
    """Return a row for each trial, epoch, split and metric."""
    rows = [
        (trial.number, epoch.epoch, split, name, value, epoch.seconds)
        for trial in record.trials.values()
        for epoch in trial.epochs
        for split, name, value in [
            ("train", "loss", epoch.train_loss),
            *(("validation", name, value) for name, value in epoch.metrics.items()),
        ]
    ]
    return pd.DataFrame(rows, columns=["trial", "epoch", "split", "name", "value", "seconds"])


def leaderboard(record: Record, metric: str) -> pd.DataFrame:
    """Return a row for each trial that was scored and did not fail, best first."""
    columns = ["trial", metric, "epoch", "state"]
    rows: list[dict[str, Any]] = []
    is_constrained = not all(trial.is_feasible for trial in record.trials.values())
    for trial in record.ranked():
        assert trial.kept is not None
        known = (trial.number, trial.kept.value, trial.kept.epochs, trial.state)
        feasible = {"feasible": trial.is_feasible} if is_constrained else {}
        rows.append({**dict(zip(columns, known, strict=True)), **feasible, **trial.params})
    return pd.DataFrame(rows, columns=None if rows else columns)


def trials(record: Record) -> pd.DataFrame:
    """Return a row for each trial; its parameters are columns, ``param_lr`` for ``lr``."""
    columns = ["trial", "state", "value", "epochs", "reason", "warning"]
    rows: list[dict[str, Any]] = []
    for t in record.trials.values():
        known = (t.number, t.state, t.value, len(t.epochs), t.reason, t.warning)
        params = {f"param_{name}": value for name, value in t.params.items()}
        rows.append(dict(zip(columns, known, strict=True)) | params)
    return pd.DataFrame(rows, columns=None if rows else columns)


def timeline(record: Record) -> pd.DataFrame:
    """Return a row for each visit: of a unit that was done more than once, how it counts."""
    kept: dict[Unit, UnitRecord] = {}
    for done in record.units:
        before = kept.get(done.unit)
        if before is not None and not done.recovered:
            del kept[done.unit]  # the new one comes last
        kept[done.unit] = done if before is None else _merged(before, done)
    rows = [
        (*u.unit, u.shard, u.worker, u.start, u.stop, u.hop, u.recovered is True, u.save_seconds,
         u.gang, u.attempts, u.lost_seconds)
        for u in kept.values()
    ]  # fmt: skip
    columns = ["kind", "trial", "epoch", "position", "shard", "worker", "start", "stop"]
    columns += ["hop", "recovered", "save_seconds", "gang", "attempts", "lost_seconds"]
    return pd.DataFrame(rows, columns=columns)


def _merged(before: UnitRecord, after: UnitRecord) -> UnitRecord:
    """Make one record of a visit from two: the last one that trained or scored counts."""
    lost_s = before.lost_seconds + after.lost_seconds
    if not (before.recovered or after.recovered):
        lost_s += before.stop - before.start
    kept = before if after.recovered else after
    return replace(kept, attempts=before.attempts + after.attempts, lost_seconds=lost_s)
