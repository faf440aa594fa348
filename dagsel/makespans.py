"""How long each round took, against what no schedule can beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd

from dagsel.planning.bounds import round_bound
from dagsel.record import Record, UnitRecord


def makespans(record: Record) -> pd.DataFrame:
    """Give a row for each round: how long it took, against the bound of its units' times.

    The bound (`dagsel.planning.bounds.round_bound`) is what no schedule can beat with the workers
    that held its shards. What other rounds did meanwhile counts against a round.
    """
    by_epoch: dict[tuple[int, int], list[UnitRecord]] = {}
    for unit in record.units:
        if unit.unit.kind != "check":  # it is of no round: it scores a trial that is paused
            by_epoch.setdefault((unit.unit.trial, unit.unit.epoch), []).append(unit)
    rows = []
    for round_ in record.rounds:
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
