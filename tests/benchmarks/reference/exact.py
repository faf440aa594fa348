"""Exact plans with CP-SAT (OR-Tools): for small rounds, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dagsel.errors import DagselError
from dagsel.history.makespans import Times

from .bounds import lower_bound
from .open_shop import Plan, Visit, plan

GRID = 100_000  # CP-SAT counts in integers: times that are not are scaled to so many steps a bound


class SolverMissingError(DagselError, ImportError):
    """OR-Tools is not installed."""


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """A plan, and what the solver can say of it.

    Parameters
    ----------
    plan
        The best plan found; its bound is the best that was proved.
    is_optimal
        Whether no plan is shorter; with times that are not integers, none by more than one part
        in `GRID` a unit.
    """

    plan: Plan
    is_optimal: bool


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise SolverMissingError("exact plans need OR-Tools: pip install ortools") from error
    return cp_model


def solve(
    times: Times,
    *,
    limit_s: float = 60.0,
    n_threads: int = 1,
    start: Plan | None = None,
    limit: float | None = None,
    seed: int = 0,
) -> ExactPlan:
    """Plan a round exactly: two families of no-overlap constraints, trials and workers.

    Parameters
    ----------
    times
        Seconds of each trial on each worker, shape ``(n_trials, n_workers)``.
    limit_s
        Time limit; when it is over the best plan so far is returned.
    n_threads
        Threads of the solver. One gives the same plan each time, if the limit is not reached.
    start
        Plan to begin with; the planner's by default.
    limit
        Limit of the solver's own count of its work, about seconds, which is the same each time.
    seed
        Of the solver's random choices.

    Raises
    ------
    SolverMissingError
        OR-Tools is not installed.
    """
    cp_model = _solver()
    table = np.asarray(times, dtype=np.float64)
    start = plan(table) if start is None else start
    bound = lower_bound(table)
    if start.makespan <= bound * (1.0 + 1e-12):
        return ExactPlan(start, True)
    is_integer = bool(np.all(table == np.round(table)))
    step = 1.0 if is_integer else bound / GRID
    steps = np.ceil(table / step - 1e-9).astype(np.int64)
    model, starts = _model(cp_model, steps, _horizon(start, steps))
    for visit, first in _pack(start, steps):
        model.add_hint(starts[visit.trial, visit.worker], first)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = n_threads
    solver.parameters.random_seed = seed
    if limit is not None:
        solver.parameters.max_deterministic_time = limit
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactPlan(start, False)
    order = sorted(starts, key=lambda key: (solver.value(starts[key]), int(steps[key])))
    found = _left_shift(order, table)
    proved = max(bound, solver.best_objective_bound * step) if is_integer else bound
    best = found if found.makespan <= start.makespan else start
    best = Plan(best.visits, best.makespan, min(proved, best.makespan))
    return ExactPlan(best, status == cp_model.OPTIMAL)


def _horizon(start: Plan, steps: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    return max(
        (first + int(steps[v.trial, v.worker]) for v, first in _pack(start, steps)), default=0
    )


def _pack(start: Plan, steps: np.ndarray[Any, np.dtype[np.int64]]) -> list[tuple[Visit, int]]:
    """Put the plan's order into whole steps."""
    trial_free = [0] * steps.shape[0]
    worker_free = [0] * steps.shape[1]
    packed = []
    for visit in start.visits:
        first = max(trial_free[visit.trial], worker_free[visit.worker])
        end = first + int(steps[visit.trial, visit.worker])
        trial_free[visit.trial] = worker_free[visit.worker] = end
        packed.append((visit, first))
    return packed


def _model(
    cp_model: Any, steps: np.ndarray[Any, np.dtype[np.int64]], horizon: int
) -> tuple[Any, dict[tuple[int, int], Any]]:
    model = cp_model.CpModel()
    n_trials, n_workers = steps.shape
    end = model.new_int_var(0, horizon, "makespan")
    starts: dict[tuple[int, int], Any] = {}
    intervals: dict[tuple[int, int], Any] = {}
    for i in range(n_trials):
        for j in range(n_workers):
            took = int(steps[i, j])
            first = starts[i, j] = model.new_int_var(0, horizon - took, "")
            intervals[i, j] = model.new_fixed_size_interval_var(first, took, "")
            model.add(first + took <= end)
    for i in range(n_trials):
        model.add_no_overlap([intervals[i, j] for j in range(n_workers)])
    for j in range(n_workers):
        model.add_no_overlap([intervals[i, j] for i in range(n_trials)])
    model.add(end >= int(max(steps.sum(axis=0).max(), steps.sum(axis=1).max())))
    model.minimize(end)
    return model, starts


def _left_shift(order: list[tuple[int, int]], table: np.ndarray[Any, np.dtype[np.float64]]) -> Plan:
    trial_free = [0.0] * table.shape[0]
    worker_free = [0.0] * table.shape[1]
    visits = []
    for i, j in order:
        first = max(trial_free[i], worker_free[j])
        trial_free[i] = worker_free[j] = end = first + float(table[i, j])
        visits.append(Visit(i, j, first, end))
    visits.sort(key=lambda visit: (visit.start, visit.worker))
    return Plan(tuple(visits), max(worker_free), lower_bound(table))


def milp(times: Times, *, limit_s: float = 60.0) -> float | None:
    """Return the makespan of Cerebro's mixed integer linear program, solved by SCIP.

    Nakandala et al. 2020, Cerebro, section 5.1, equations 1 and 2; the first two conditions are
    read as of one configuration. None if it is not solved in time. For a dozen units.
    """
    try:
        from ortools.linear_solver import pywraplp
    except ImportError as error:
        raise SolverMissingError("exact plans need OR-Tools: pip install ortools") from error
    T = np.asarray(times, dtype=np.float64)
    n, p = T.shape
    solver = pywraplp.Solver.CreateSolver("SCIP")
    V = float(T.sum())
    C = solver.NumVar(0.0, V, "C")
    X = [[solver.NumVar(0.0, V, f"X{i},{j}") for j in range(p)] for i in range(n)]

    def apart(one: tuple[int, int], other: tuple[int, int]) -> None:
        """Have one unit end before the other begins, either way round."""
        (a, b), (c, d) = one, other
        is_first = solver.BoolVar(f"{one} before {other}")
        solver.Add(X[a][b] >= X[c][d] + T[c, d] - V * is_first)
        solver.Add(X[c][d] >= X[a][b] + T[a, b] - V * (1 - is_first))

    for i in range(n):
        for j in range(p):
            solver.Add(X[i][j] + T[i, j] <= C)
            for later in range(j + 1, p):
                apart((i, j), (i, later))  # one trial: Y
            for other in range(i + 1, n):
                apart((i, j), (other, j))  # one worker: Z
    solver.Minimize(C)
    solver.SetTimeLimit(int(1000 * limit_s))
    return float(C.solution_value()) if solver.Solve() == solver.OPTIMAL else None
