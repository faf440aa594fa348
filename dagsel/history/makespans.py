"""How long each round took, against what no schedule can beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dagsel.history.course import RoundRecord
from dagsel.history.record import Record
from dagsel.history.tables import frame
from dagsel.messages import UnitRecord

if TYPE_CHECKING:
    import pandas as pd


def makespans(record: Record) -> pd.DataFrame:
    """Return a row for each round: how long it took, against the bound of its units' times.

    The bound (`dagsel.history.makespans.round_bound`) is what no schedule can beat with the workers
    that held its shards. What other rounds did meanwhile counts against a round.
    """
    rounds: dict[tuple[int, int], list[RoundRecord]] = {}
    for round_ in record.rounds:
        for epoch in round_.epochs:
            rounds.setdefault(epoch, []).append(round_)
    by_round: dict[int, list[UnitRecord]] = {}
    for unit in record.units:
        # One that scores a paused trial is of no round. An epoch that was interrupted is of two.
        if unit.unit.kind != "check" and (sent := rounds.get((unit.unit.trial, unit.unit.epoch))):
            begun = [round_ for round_ in sent if round_.start <= unit.start] or sent[:1]
            by_round.setdefault(begun[-1].number, []).append(unit)
    rows = []
    for round_ in record.rounds:
        if units := by_round.get(round_.number):
            makespan = max(unit.stop for unit in units) - round_.start
            bound = bound_of(units)
            ratio = makespan / bound if bound > 0 else math.nan  # all were found in the store
            rows.append((round_.number, len(units), makespan, bound, ratio))
    return frame(rows, ["round", "units", "makespan", "bound", "ratio"])


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
            on.setdefault(unit.worker, []).append(unit.trains_seconds)
    ratios: dict[str, list[float]] = {unit.worker: [] for unit in units}
    for on in seconds.values():
        means = {worker: sum(times) / len(times) for worker, times in on.items()}
        overall = sum(means.values()) / len(means)
        for worker, mean in means.items():
            ratios[worker].append(overall / mean if mean > 0 else 1.0)
    return {worker: median(found) if found else 1.0 for worker, found in ratios.items()}


Times: TypeAlias = Sequence[Sequence[float]] | NDArray[np.float64]


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
    return max(chain, _fractional(table.sum(axis=0), np.asarray(speeds), holders))


def _fractional(
    demand: NDArray[np.float64],
    speeds: NDArray[np.float64],
    holders: Sequence[AbstractSet[int]],
) -> float:
    """Shortest time in which the holders of each shard can share its work, as a linear program."""
    from scipy.optimize import linprog

    pairs = [(shard, worker) for shard, who in enumerate(holders) for worker in who]
    shard_of, worker_of = np.array(pairs).T
    columns = np.arange(len(pairs))
    shared = np.zeros((len(demand), len(pairs) + 1))  # the last variable is the time
    shared[shard_of, columns] = 1.0
    taken = np.zeros((len(speeds), len(pairs) + 1))
    taken[worker_of, columns] = 1.0
    taken[:, -1] = -speeds
    scale = float(demand.max()) or 1.0
    cost = np.append(np.zeros(len(pairs)), 1.0)
    found = linprog(cost, taken, np.zeros(len(speeds)), shared, demand / scale, method="highs-ds")
    return scale * float(found.fun)
