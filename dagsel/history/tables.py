"""What a run has done, as tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from dagsel.dispatch.units import Unit
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.messages import UnitRecord
from dagsel.planning.pareto import layers

if TYPE_CHECKING:
    import pandas as pd


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
    return frame(rows, ["trial", "epoch", "split", "name", "value", "seconds"])


def ranked(record: Record) -> list[TrialRecord]:
    """List the trials that were scored and did not fail, best first, infeasible ones last.

    Of several metrics the front comes first, then the front of the others, and so on; in each of
    them the first metric decides.
    """
    scored = [t for t in record.trials.values() if t.values and t.state != "failed"]
    if not record.goals:
        return sorted(scored, key=lambda trial: _place(record, trial))
    found = list[TrialRecord]()
    for is_feasible in (True, False):
        group = [trial for trial in scored if trial.is_feasible == is_feasible]
        for layer in layers([record.losses(trial) for trial in group]):
            members = [group[i] for i in layer]
            found += sorted(members, key=lambda trial: (record.losses(trial), trial.number))
    return found


def _place(record: Record, trial: TrialRecord) -> tuple[bool, bool, float, bool, int]:
    is_behind = record.keep == "last" and trial.state == "pruned"
    loss, is_copy = record.loss(trial.value or 0.0), trial.worth_is_copied
    return not trial.is_feasible, is_behind, loss, is_copy, trial.number


def pareto(record: Record) -> pd.DataFrame:
    """Return a row for each trial of the Pareto front of several metrics."""
    trials = [record.trials[best.trial] for best in record.top]
    front = sorted(trials, key=lambda trial: (record.losses(trial), trial.number))
    return _board(record, "", front).drop(columns="front")


def leaderboard(record: Record, metric: str) -> pd.DataFrame:
    """Return a row for each trial that was scored and did not fail, best first.

    A parameter called as another column is ``param_`` and its name.
    """
    return _board(record, metric, ranked(record))


def _board(record: Record, metric: str, trials: Sequence[TrialRecord]) -> pd.DataFrame:
    metrics = [goal.metric for goal in record.goals]
    columns = ["trial", *(metrics or [metric]), "epoch", "state", *(["front"] if metrics else [])]
    rows: list[dict[str, Any]] = []
    is_constrained = not all(trial.is_feasible for trial in record.trials.values())
    front = {best.trial for best in record.top}
    for trial in trials:
        assert trial.kept is not None
        known = [trial.number, *trial.values, trial.kept.epochs, trial.state]
        known += [trial.number in front] if metrics else []
        row = dict(zip(columns, known, strict=True))
        row |= {"feasible": trial.is_feasible} if is_constrained else {}
        params = trial.params_kept.items()
        rows.append(row | {f"param_{name}" if name in row else name: v for name, v in params})
    return frame(rows, None if rows else columns)


def trials(record: Record) -> pd.DataFrame:
    """Return a row for each trial; its parameters are columns, ``param_lr`` for ``lr``."""
    metrics = [goal.metric for goal in record.goals]
    columns = ["trial", "state", *(metrics or ["value"]), "epochs", "reason", "warning"]
    rows: list[dict[str, Any]] = []
    for t in record.trials.values():
        values = t.values or [None] * (len(metrics) or 1)
        known = (t.number, t.state, *values, len(t.epochs), t.reason, t.warning)
        params = {f"param_{name}": value for name, value in t.params.items()}
        rows.append(dict(zip(columns, known, strict=True)) | params)
    return frame(rows, None if rows else columns)


def timeline(record: Record) -> pd.DataFrame:
    """Return a row for each visit: of a unit that was done more than once, how it counts."""
    kept: dict[Unit, UnitRecord] = {}
    for done in _all_visits(record):
        before = kept.get(done.unit)
        if not done.worker and before is not None and before.shard == done.shard:
            continue  # its result was heard, too
        if before is not None and not done.recovered:
            del kept[done.unit]  # the new one comes last
        is_first = before is None or not before.worker or not done.worker
        kept[done.unit] = done if before is None or is_first else _merged(before, done)
    rows = [
        (*u.unit, u.shard, u.worker or None, u.start, u.stop, u.hop, u.recovered is True,
         u.save_seconds, u.gang, u.attempts, u.lost_seconds)
        for u in kept.values()
    ]  # fmt: skip
    columns = ["kind", "trial", "epoch", "position", "shard", "worker", "start", "stop"]
    columns += ["hop", "recovered", "save_seconds", "gang", "attempts", "lost_seconds"]
    return frame(rows, columns)


def _all_visits(record: Record) -> Iterator[UnitRecord]:
    """Yield the units that were done and those whose stored states were found, in order.

    Of the latter the worker is not known and empty: the driver ended before it heard of them.
    """
    found = deque(record.found)
    for n_before, done in enumerate(chain(record.units, [None])):
        while found and found[0][1] <= n_before:
            at, _, of = found.popleft()
            for state in of.states:
                for position, shard in enumerate(state.visits):
                    unit = Unit("train", of.trial, state.epoch, position)
                    yield UnitRecord(unit, "", shard, at, at, hop=False, recovered=True)
        if done is not None:
            yield done


def _merged(before: UnitRecord, after: UnitRecord) -> UnitRecord:
    """Make one record of a visit from two: the last one that trained or scored counts."""
    lost_s = before.lost_seconds + after.lost_seconds
    if not (before.recovered or after.recovered):
        lost_s += before.stop - before.start
    kept = before if after.recovered else after
    return replace(kept, attempts=before.attempts + after.attempts, lost_seconds=lost_s)


def frame(rows: Sequence[Any], columns: list[str] | None) -> pd.DataFrame:
    """Return rows as a table."""
    import pandas as pd  # takes half a second, which a search does not need

    return pd.DataFrame(rows, columns=columns)
