"""Cerebro's approximate scheduler: vector rearrangement.

Nakandala et al. 2020, Cerebro, section 5.2, which names the method (Fiala 1983, Woeginger 2018) and
its condition, and leaves out its steps. These here follow from Steinitz' lemma and give that
condition. With p workers, the longest unit T and the largest load of a worker L:

1. Times are stretched, to T at most, until every worker has the load L.
2. Trials are put in an order in which the loads of two workers never differ by more than (p − 1)·T.
3. Each worker follows that order in a circle. It begins so far ahead in it that it comes to a trial
   at least p·T after the worker before it has.

On the circle a trial's next visit begins when the one before is over, if L ≥ (p² + p − 1)·T. Else
the beginnings are spread evenly, and a worker takes the next trial of its order that is idle. As no
worker then waits for a trial that it could train, the plan is at most (p − 1)·T longer than the
bound: while the last worker waits, its last trial trains on one of the p − 1 others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from dagsel.history.makespans import Times

from .open_shop import Plan, Visit, greedy, plan_of

Array = NDArray[np.float64]


def is_optimal(times: Times) -> bool:
    """Return whether the condition holds under which the scheduler meets the bound.

    Examples
    --------
    >>> is_optimal([[1.0, 1.0]] * 5), is_optimal([[1.0, 1.0]] * 4)
    (True, False)
    """
    table = np.asarray(times, dtype=np.float64)
    p = table.shape[1]
    return bool(table.sum(axis=0).max() >= (p * p + p - 1) * table.max() * (1 - 1e-12))


def balanced_order(table: Array) -> list[int]:
    """Return an order of the rows in which no two columns' sums ever differ by much.

    Where the columns have equal sums, the sums over the first rows differ by at most the number of
    columns less 1, times the largest difference in a row (Steinitz; the proof by linear programs is
    of Grinberg and Sevastyanov, 1980).
    """
    n, p = table.shape
    vectors = (table[:, 1:] - table[:, :1]) / max(float(table.max()), 1e-300)
    rows, last = list(range(n)), list[int]()
    while len(rows) >= p:  # p − 1 dimensions: any order of so many rows will do
        k = len(rows)
        conditions = np.vstack([vectors[rows].T, np.ones(k)])
        values = np.append(np.zeros(p - 1), k - p)
        found = linprog(np.zeros(k), A_eq=conditions, b_eq=values, bounds=(0, 1), method="highs-ds")
        # A vertex of what is possible: at least one weight is 0, and its row comes last.
        last.append(rows.pop(int(np.argmin(found.x))))
    return rows + last[::-1]


def approximate(times: Times) -> Plan:
    """Plan a round by vector rearrangement.

    The plan is at most (p − 1)·T longer than the bound, and no longer where `is_optimal`.

    Parameters
    ----------
    times
        Seconds of each trial on each worker, shape ``(n_trials, n_workers)``.

    Examples
    --------
    >>> approximate([[1.0, 1.0]] * 5).makespan
    5.0
    """
    table = np.asarray(times, dtype=np.float64)
    n, p = table.shape
    load, longest = float(table.sum(axis=0).max()), float(table.max())
    room = longest - table
    share = (load - table.sum(axis=0)) / np.maximum(room.sum(axis=0), 1e-300)
    stretched = table + room * share
    order = balanced_order(stretched)
    begins = np.vstack([np.zeros(p), np.cumsum(stretched[order], axis=0)[:-1]])
    optimal = is_optimal(table)
    first, shift = [0], 0.0
    for worker in range(1, p):
        ahead = shift + p * longest if optimal else worker * load / p
        column = begins[:, worker]
        first.append(max(0, int(np.searchsorted(column, load - ahead + 1e-9 * load, "right")) - 1))
        shift = load - float(column[first[-1]])
    queues = [[order[(start + k) % n] for k in range(n)] for start in first]
    if not optimal:
        return greedy(table, queues)
    visits = []
    for worker, queue in enumerate(queues):
        at = 0.0
        for trial in queue:
            visits.append(Visit(trial, worker, at, at + float(table[trial, worker])))
            at += float(stretched[trial, worker])
    return plan_of(table, visits)
