"""What a run has done, as tables."""

from __future__ import annotations

from typing import Any

import pandas as pd

from dagsel.history.record import Record


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
    """Return a row for each unit that ran, in the order in which they ended."""
    rows = [
        (*u.unit, u.shard, u.worker, u.start, u.stop, u.hop, u.recovered is True, u.save_seconds)
        for u in record.units
    ]
    columns = ["kind", "trial", "epoch", "position", "shard", "worker", "start", "stop"]
    frame = pd.DataFrame(rows, columns=[*columns, "hop", "recovered", "save_seconds"])
    return frame.assign(gang=[unit.gang for unit in record.units])
