"""Plans of a round: n trials, p workers, each trial on each worker once (open shop).

The planner is the dispatcher's rule (`dagsel.dispatch.list_scheduler.ListScheduler`) in virtual
time, repeated with other targets, weights and random skips. A run binds its units late, because
under noise a plan made beforehand loses to that; plans are references to compare with.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from dagsel.dispatch.list_scheduler import ListScheduler
from dagsel.history.makespans import Times

from .bounds import lower_bound


@dataclass(frozen=True, slots=True)
class Visit:
    """One unit of a plan."""

    trial: int
    worker: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Which trial is when on which worker.

    Parameters
    ----------
    visits
        In the order of their starts.
    makespan
        When the last one ends.
    bound
        No plan ends earlier than this.
    """

    visits: tuple[Visit, ...]
    makespan: float
    bound: float

    @property
    def gap(self) -> float:
        """Makespan over bound."""
        return self.makespan / self.bound if self.bound else 1.0

    def check(self, times: Times) -> None:
        """Raise ``AssertionError`` unless the plan is one of `times`."""
        table = np.asarray(times, dtype=np.float64)
        slack = 1e-9 * max(1.0, self.makespan)
        seen = {(visit.trial, visit.worker) for visit in self.visits}
        assert len(seen) == len(self.visits) == table.size, "each trial visits each worker once"
        for visit in self.visits:
            took = visit.end - visit.start
            assert abs(took - table[visit.trial, visit.worker]) <= slack, f"wrong time: {visit}"
        for axis in ("trial", "worker"):
            rows = sorted(self.visits, key=lambda v: (getattr(v, axis), v.start, v.end))
            for before, after in pairwise(rows):
                if getattr(before, axis) == getattr(after, axis):
                    assert after.start >= before.end - slack, f"two at once: {before}, {after}"


def dispatch_once(
    times: Sequence[Sequence[float]],
    *,
    target: float,
    weights: Sequence[float] | None = None,
    skips: Callable[[], bool] | None = None,
    give_up_at: float = inf,
) -> list[Visit] | None:
    """One pass of the rule in virtual time; None when it ends no earlier than `give_up_at`."""
    n_trials, n_workers = len(times), len(times[0])
    scheduler = _Planner(times, weights or [1.0] * n_trials, skips)
    scheduler.target = target
    everything = (1 << n_workers) - 1
    for worker in range(n_workers):
        scheduler.held[worker] = 1 << worker
        scheduler.load[worker] = sum(row[worker] for row in times)
        scheduler.free_at[worker] = 0.0
    for trial, row in enumerate(times):
        scheduler.rem[trial] = sum(row)
        scheduler.enter(trial, everything, weight=scheduler.weights[trial])
    return _run(scheduler, times, n_trials * n_workers, give_up_at)


class _Planner(ListScheduler[int]):
    """The rule with exact times, in which a worker may skip idle trials that it needs."""

    def __init__(
        self,
        times: Sequence[Sequence[float]],
        weights: Sequence[float],
        skips: Callable[[], bool] | None,
    ) -> None:
        super().__init__(lambda trial, worker: times[trial][worker], stay=0.0)
        self.weights = weights
        self.skips = skips
        self._asked = 0  # shards of the worker for which a trial is picked

    def pick(self, worker: int, now: float, *, blocked: int = 0) -> tuple[int, int] | None:
        self._asked = self.held[worker]
        if self.skips is not None:
            self.holders_changed()  # also those that skipped all trials are asked again
        return super().pick(worker, now, blocked=blocked)

    @property
    def idle(self) -> Iterator[int]:
        for trial in super().idle:
            if self.skips is None or not self.need[trial] & self._asked or not self.skips():
                yield trial


def _run(
    scheduler: _Planner,
    times: Sequence[Sequence[float]],
    n_units: int,
    give_up_at: float,
) -> list[Visit] | None:
    visits: list[Visit] = []
    now, free = 0.0, set(scheduler.held)
    ends: list[tuple[float, int, int]] = []  # when, trial (-1: a held worker wakes), worker
    load, need = scheduler.load, scheduler.need
    left = dict.fromkeys(scheduler.held, len(times))
    while True:
        for worker in sorted(free, key=load.__getitem__, reverse=True):
            taken = scheduler.pick(worker, now)
            if taken is None:
                if scheduler.wait_until < inf:
                    heapq.heappush(ends, (scheduler.wait_until, -1, worker))
                continue
            trial = taken[0]
            took = times[trial][worker]
            end = now + took
            if end >= give_up_at:
                return None
            scheduler.start(trial, worker, now, took, need[trial] & ~(1 << worker))
            free.discard(worker)
            left[worker] -= 1
            heapq.heappush(ends, (end, trial, worker))
            visits.append(Visit(trial, worker, now, end))
        if len(visits) == n_units:
            return visits
        if not ends:  # all that was idle has been skipped at random
            scheduler.skips = None
            scheduler.holders_changed()  # workers that skipped all trials may still need them
            continue
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            _, trial, worker = heapq.heappop(ends)
            if trial < 0:
                continue
            if left[worker]:
                free.add(worker)
            if need[trial]:
                scheduler.enter(trial, need[trial], weight=scheduler.weights[trial])
            else:
                scheduler.leave(trial)


def plan(times: Times, *, tries: int | None = None, seed: int = 0) -> Plan:
    """Plan a round: the rule in virtual time, with a search over targets and weights.

    Parameters
    ----------
    times
        Seconds of each trial on each worker, shape ``(n_trials, n_workers)``.
    tries
        Passes of the rule; by default more for small rounds, from 2 to 64.
    seed
        Of the search's random choices.

    Returns
    -------
    plan
        The best one found; it stops as soon as one meets the bound.

    Examples
    --------
    >>> plan([[1, 2], [2, 1]]).makespan
    3.0
    """
    table = np.asarray(times, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(f"times must have two axes, trials and workers, got {table.ndim}")
    bound = lower_bound(table)
    if table.size == 0:
        return Plan((), 0.0, bound)
    rows: list[list[float]] = table.tolist()
    n_trials, n_workers = table.shape
    if tries is None:
        tries = min(64, max(2, 200_000 // table.size))
    # A large round's pass takes long, and 0.02% is far below what any estimate is worth.
    enough = bound * (1.0 + (2e-4 if table.size >= 10_000 else 1e-9))
    rng = np.random.default_rng(seed)
    best = dispatch_once(rows, target=bound)
    assert best is not None, "a pass without a limit ends"
    makespan = max(visit.end for visit in best)
    if makespan > enough and n_trials <= 4 * n_workers:
        rotated = _rotations(rows, rng, tries, makespan, enough)
        if rotated is not None:
            best, makespan = rotated
    for _ in range(tries - 1):
        if makespan <= enough:
            break
        found = _another_pass(rows, rng, bound, makespan)
        if found is not None:
            best, makespan = found, max(visit.end for visit in found)
    return Plan(tuple(sorted(best, key=lambda v: (v.start, v.worker))), makespan, bound)


def _another_pass(
    rows: list[list[float]], rng: np.random.Generator, bound: float, makespan: float
) -> list[Visit] | None:
    u = rng.random()
    chance = 0.1 * u * u
    weights = (1.0 + 0.3 * u * rng.uniform(-1.0, 1.0, len(rows))).tolist()
    draws = iter(rng.random(64).tolist())

    def skips() -> bool:
        nonlocal draws
        draw: float | None = next(draws, None)
        if draw is None:
            draws = iter(rng.random(4096).tolist())
            draw = next(draws)
        return draw < chance

    target = bound + u * u * (makespan - bound)
    return dispatch_once(rows, target=target, weights=weights, skips=skips, give_up_at=makespan)


def _rotations(
    rows: list[list[float]],
    rng: np.random.Generator,
    tries: int,
    makespan: float,
    enough: float,
) -> tuple[list[Visit], float] | None:
    """Worker j takes trial ``at[(k + j) mod m]`` in round k; hill-climb over `at` by swaps."""
    n_trials, n_workers = len(rows), len(rows[0])
    size = max(n_trials, n_workers)
    at = [*range(n_trials), *[-1] * (size - n_trials)]
    value = _rotation_end(rows, at)
    for _ in range(4 * tries):
        if value <= enough:
            break
        a, b = (int(x) for x in rng.integers(0, size, 2))
        at[a], at[b] = at[b], at[a]
        other = _rotation_end(rows, at)
        if other <= value:
            value = other
        else:
            at[a], at[b] = at[b], at[a]
    if value >= makespan:
        return None
    visits: list[Visit] = []
    _rotation_end(rows, at, visits)
    return visits, value


def _rotation_end(
    rows: list[list[float]], at: list[int], visits: list[Visit] | None = None
) -> float:
    size, workers = len(at), range(len(rows[0]))
    trial_free = [0.0] * len(rows)
    worker_free = [0.0] * len(rows[0])
    for k in range(size):
        for worker in workers:
            trial = at[(k + worker) % size]
            if trial < 0:
                continue
            start = max(trial_free[trial], worker_free[worker])
            end = start + rows[trial][worker]
            trial_free[trial] = worker_free[worker] = end
            if visits is not None:
                visits.append(Visit(trial, worker, start, end))
    return max(worker_free)


def randomized(times: Times, *, seed: int = 0) -> Plan:
    """Cerebro's scheduler: a worker that gets free takes a random idle trial it has not seen.

    Nakandala et al. 2020, Cerebro, section 5.3, Algorithm 1; what the planner has to beat. There
    free workers are asked in the order of their numbers, here at random, and none waits WAIT_TIME.

    Examples
    --------
    >>> randomized([[1, 2], [2, 1]]).makespan >= 3.0
    True
    """
    table = np.asarray(times, dtype=np.float64)
    n_trials, n_workers = table.shape
    rng = np.random.default_rng(seed)
    return greedy(
        table,
        [list(range(n_trials)) for _ in range(n_workers)],
        turn=lambda free: [int(worker) for worker in rng.permutation(sorted(free))],
        pick=lambda choice: choice[int(rng.integers(len(choice)))],
    )


def greedy(
    table: NDArray[np.float64],
    todo: list[list[int]],
    *,
    turn: Callable[[list[int]], list[int]] = list,
    pick: Callable[[list[int]], int] = lambda choice: choice[0],
) -> Plan:
    """Let each worker that is free train one of its trials that are idle, until all are done.

    Parameters
    ----------
    table
        Seconds of each trial on each worker.
    todo
        By worker its trials, in its order; they are taken off.
    turn
        In which order the free workers are asked; by default the one that was free first.
    pick
        Which of the idle ones a worker takes; by default the first in its order.
    """
    visits: list[Visit] = []
    idle, free, now = set(range(len(table))), list(range(len(todo))), 0.0
    ends: list[tuple[float, int, int]] = []
    while True:
        for worker in turn(free):
            choice = [trial for trial in todo[worker] if trial in idle]
            if not choice:
                continue
            trial = pick(choice)
            end = now + float(table[trial, worker])
            idle.discard(trial)
            todo[worker].remove(trial)
            free.remove(worker)
            visits.append(Visit(trial, worker, now, end))
            heapq.heappush(ends, (end, worker, trial))
        if not ends:
            return plan_of(table, visits)
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            _, worker, trial = heapq.heappop(ends)
            idle.add(trial)
            if todo[worker]:
                free.append(worker)


def plan_of(table: NDArray[np.float64], visits: list[Visit]) -> Plan:
    """Return the plan of these visits."""
    visits.sort(key=lambda visit: (visit.start, visit.worker))
    makespan = max((visit.end for visit in visits), default=0.0)
    return Plan(tuple(visits), makespan, lower_bound(table))
