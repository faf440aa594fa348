"""How long each round took, against what no schedule can beat."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dagsel.history.record import Record
from dagsel.messages import UnitRecord


def makespans(record: Record) -> pd.DataFrame:
    """Return a row for each round: how long it took, against the bound of its units' times.

    The bound (`dagsel.history.makespans.round_bound`) is what no schedule can beat with the workers
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


Times: TypeAlias = Sequence[Sequence[float]] | NDArray[np.float64]


def lower_bound(times: Times) -> float:
    """Largest load of a worker or chain of a trial, where each shard has one holder.

    Parameters
    ----------
    times
        Seconds of each trial on each worker, shape ``(n_trials, n_workers)``.

    Examples
    --------
    >>> lower_bound([[1, 2], [3, 1]])
    4.0
    """
    table = np.asarray(times, dtype=np.float64)
    if table.size == 0:
        return 0.0
    return float(max(table.sum(axis=0).max(), table.sum(axis=1).max()))


def round_bound(work: Times, speeds: Sequence[float], holders: Sequence[AbstractSet[int]]) -> float:
    """Bound of a round whose shards may have several holders, and workers several shards.

    The larger of two: the longest chain, each unit on its shard's fastest holder; and the time in
    which the workers could do all work if it could be cut at will among the holders of its shard.

    Parameters
    ----------
    work
        Work of each trial with each shard, over all epochs: seconds at speed 1, shape
        ``(n_trials, n_shards)``.
    speeds
        Of each worker.
    holders
        Of each shard the workers that hold it.

    Raises
    ------
    ValueError
        A shard has no holder.

    Examples
    --------
    >>> round_bound([[3.0]] * 4, speeds=[1.0, 2.0], holders=[{0, 1}])
    4.0
    """
    table = np.asarray(work, dtype=np.float64)
    if table.size == 0:
        return 0.0
    for shard, who in enumerate(holders):
        if not who:
            raise ValueError(f"shard {shard} has no holder")
    fastest = np.array([max(speeds[j] for j in who) for who in holders])
    chain = float((table / fastest).sum(axis=1).max())
    return max(chain, _fractional(table.sum(axis=0).tolist(), speeds, holders))


def _fractional(
    demand: list[float], speeds: Sequence[float], holders: Sequence[AbstractSet[int]]
) -> float:
    """Largest work over speed of any set of shards and all their holders.

    By max-flow min-cut that is the fractional optimum. Newton's method: from the set found last,
    ask whether its time suffices; if not, the minimum cut is a set that needs more.
    """
    shards = list(range(len(demand)))
    while True:
        able = set().union(*(holders[s] for s in shards))
        time = sum(demand[s] for s in shards) / sum(speeds[j] for j in able)
        tight = _cut(demand, [speed * time for speed in speeds], holders)
        if not tight:
            return time
        shards = tight


def _cut(
    demand: list[float], capacity: list[float], holders: Sequence[AbstractSet[int]]
) -> list[int]:
    """Shards whose work does not fit into the capacities; none when all fits."""
    left, room = list(demand), list(capacity)
    flow: list[dict[int, float]] = [dict.fromkeys(sorted(who), 0.0) for who in holders]
    small = 1e-9 * max(demand)
    while True:
        came_from: dict[tuple[str, int], tuple[str, int] | None] = {
            ("shard", s): None for s, rest in enumerate(left) if rest > small
        }
        queue = deque(came_from)
        end: tuple[str, int] | None = None
        while queue and end is None:
            node = kind, k = queue.popleft()
            if kind == "worker" and room[k] > small:
                end = node
            elif kind == "worker":
                steps = [("shard", s) for s, row in enumerate(flow) if row.get(k, 0.0) > small]
                queue.extend(step for step in steps if step not in came_from)
                came_from = {**dict.fromkeys(steps, node), **came_from}
            else:
                steps = [("worker", j) for j in flow[k] if ("worker", j) not in came_from]
                queue.extend(steps)
                came_from.update(dict.fromkeys(steps, node))
        if end is None:
            return sorted(k for kind, k in came_from if kind == "shard")
        _augment(end, came_from, left, room, flow)


def _augment(
    end: tuple[str, int],
    came_from: dict[tuple[str, int], tuple[str, int] | None],
    left: list[float],
    room: list[float],
    flow: list[dict[int, float]],
) -> None:
    path = [end]
    while (before := came_from[path[-1]]) is not None:
        path.append(before)
    path.reverse()  # shard, worker, shard, worker, ...
    amount = min(left[path[0][1]], room[end[1]])
    for (kind, a), (_, b) in pairwise(path):
        if kind == "worker":
            amount = min(amount, flow[b][a])
    for (kind, a), (_, b) in pairwise(path):
        if kind == "shard":
            flow[a][b] += amount
        else:
            flow[b][a] -= amount
    left[path[0][1]] -= amount
    room[end[1]] -= amount
