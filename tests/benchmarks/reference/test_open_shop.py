"""Bounds and plans; a quick part of the bars (all of them: ``tests/benchmarks/dispatch.py``)."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.history.makespans import round_bound
from tests.benchmarks.papers.cerebro import instances
from tests.dispatch.families import (
    FIGURE_5,
    careless,
    dispatch,
    het,
    taillard,
    times_of,
    whole_trials,
)

from .approximate import approximate, balanced_order, is_optimal
from .bounds import lower_bound
from .exact import SolverMissingError, milp, solve
from .open_shop import plan, randomized

TABLES = st.integers(1, 7).flatmap(
    lambda p: st.lists(
        st.lists(st.floats(0.1, 9.0), min_size=p, max_size=p), min_size=1, max_size=9
    )
)


@given(TABLES, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_plan_visits_all_once_and_is_no_shorter_than_its_bound(table: Any, seed: int) -> None:
    for made in (plan(table, seed=seed, tries=4), randomized(table, seed=seed)):
        made.check(table)
        assert made.makespan >= made.bound * (1 - 1e-12)
        assert made.makespan == max(visit.end for visit in made.visits)


@st.composite
def long_tables(draw: st.DrawFn) -> Any:
    """Draw rounds of so many trials that the approximate scheduler's condition often holds."""
    p = draw(st.integers(1, 4))
    n = draw(st.integers(1, 2 * (p * p + p)))
    seed, low = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.05, 0.6, 1.0]))
    return np.random.default_rng(seed).uniform(low, 1.0, (n, p))


@given(st.one_of(TABLES.map(np.array), long_tables()))
@settings(max_examples=60, deadline=None)
def test_an_approximate_plan_keeps_the_papers_bounds(table: Any) -> None:
    made = approximate(table)
    made.check(table)
    assert made.makespan >= made.bound * (1 - 1e-12)
    longest = made.bound + (table.shape[1] - 1) * table.max()
    assert made.makespan <= longest * (1 + 1e-9)
    if is_optimal(table):
        assert made.makespan == pytest.approx(table.sum(axis=0).max())


@given(long_tables())
@settings(max_examples=40, deadline=None)
def test_in_a_balanced_order_no_two_workers_loads_ever_differ_by_much(table: Any) -> None:
    loads = table.sum(axis=0)
    table = table * loads.min() / loads  # all workers have the same load
    order = balanced_order(table)
    assert sorted(order) == list(range(len(table)))
    begun = np.cumsum(table[order], axis=0)
    widest = float(np.ptp(begun, axis=1).max())
    assert widest <= (table.shape[1] - 1) * table.max() * (1 + 1e-9) + 1e-9


def test_the_condition_of_the_approximate_scheduler_is_the_papers() -> None:
    """L ≥ (p² + p − 1)·T, for p = 2 five units of T."""
    assert [is_optimal(np.ones((n, 2))) for n in (4, 5)] == [False, True]
    assert [is_optimal(np.ones((n, 8))) for n in (70, 71)] == [False, True]


@given(TABLES)
@settings(max_examples=15, deadline=None)
def test_an_exact_plan_is_no_longer_than_the_planners(table: Any) -> None:
    pytest.importorskip("ortools")
    times = np.round(table)
    times[times == 0] = 1.0
    found = solve(times, limit_s=2.0)
    found.plan.check(times)
    assert found.plan.bound <= found.plan.makespan <= plan(times).makespan
    if found.is_optimal:
        assert found.plan.bound == found.plan.makespan


def test_exact_plans_are_those_of_the_papers_program() -> None:
    pytest.importorskip("ortools")
    for times in instances():
        found = solve(times, limit_s=30.0)
        assert found.is_optimal
        assert milp(times, limit_s=120.0) == pytest.approx(found.plan.makespan)
        assert approximate(times).makespan >= found.plan.makespan - 1e-9


@pytest.mark.parametrize("n_workers", [8, 16])
@pytest.mark.parametrize("n_trials", [4, 5, 7, 8, 10, 12, 16, 17, 20, 24, 33, 256])
def test_equal_times_are_planned_at_the_bound(n_trials: int, n_workers: int) -> None:
    assert plan(np.ones((n_trials, n_workers))).gap == 1.0


@pytest.mark.parametrize(
    ("family", "n_trials", "n_workers", "bar"),
    [
        ("het", 16, 8, 1.002),
        ("hetC", 16, 8, 1.002),
        ("hetC", 24, 8, 1.005),
        ("hetC", 256, 16, 1.001),
        ("eq", 10, 8, 1.02),
    ],
)
def test_planner_keeps_its_bars(family: str, n_trials: int, n_workers: int, bar: float) -> None:
    seeds = range(10 if n_trials < 30 else 2)
    gaps = [plan(times_of(family, n_trials, n_workers, s), seed=s).gap for s in seeds]
    assert np.mean(gaps) <= bar


def test_planner_beats_randomized() -> None:
    times = [times_of("hetC", 24, 8, seed) for seed in range(5)]
    planned = np.mean([plan(table).gap for table in times])
    assert planned <= 0.9 * np.mean(
        [randomized(table, seed=k).gap for table in times for k in (0, 1)]
    )


def test_figure_5() -> None:
    assert whole_trials(FIGURE_5) == 9.0
    assert careless(FIGURE_5) == 9.0
    assert plan(FIGURE_5).makespan == 7.0


def test_taillards_first_instance_is_regenerated() -> None:
    times, _ = taillard(4, 0)
    assert times.tolist() == [[34, 2, 54, 61], [15, 89, 70, 9], [38, 19, 28, 87], [95, 7, 34, 29]]


@pytest.mark.parametrize(("size", "bar"), [(4, 3.0), (5, 6.0), (7, 4.0), (10, 2.0)])
def test_planner_on_taillards_instances(size: int, bar: float) -> None:
    gaps = []
    for index in range(10):
        times, optimum = taillard(size, index)
        gaps.append(100 * (plan(times, seed=index).makespan / optimum - 1))
        assert gaps[-1] >= 0.0
    assert np.mean(gaps) <= bar


@pytest.mark.parametrize("size", [4, 5, 7, 10])
def test_exact_plans_of_taillards_instances_are_optimal(size: int) -> None:
    pytest.importorskip("ortools")
    times, optimum = taillard(size, 8)
    found = solve(times, limit_s=60.0)
    found.plan.check(times)
    assert found.is_optimal
    assert found.plan.makespan == optimum == found.plan.bound


def test_without_ortools_the_error_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(SolverMissingError, match="pip install ortools"):
        solve([[1.0]])


@pytest.mark.parametrize(
    ("family", "sigma", "bar"), [("het", 0.2, 1.01), ("hetC", 0.2, 1.03), ("hetC", 0.5, 1.03)]
)
def test_dispatcher_keeps_its_bars_under_noise(family: str, sigma: float, bar: float) -> None:
    gaps = []
    for seed in range(10):
        costs, speeds = het(16, 8, seed)
        if family == "hetC":
            costs, speeds = times_of("hetC", 16, 8, seed)[:, 0], np.ones(8)
        outcome, work = dispatch(
            costs, speeds, 8, sigma=sigma, seed=seed, holders=[[j] for j in range(8)]
        )
        gaps.append(outcome.makespan_s / lower_bound(work / speeds))
    assert np.mean(gaps) <= bar


@pytest.mark.parametrize(("replicas", "bar"), [(2, 0.64), (3, 0.56)])
def test_replicas_keep_their_bars(replicas: int, bar: float) -> None:
    costs, speeds = het(64, 16, 0)
    held = [[(k + j) % 16 for j in range(replicas)] for k in range(16)]
    outcome, work = dispatch(costs, speeds, 16, holders=held, replicas=replicas)
    assert outcome.makespan_s <= bar * lower_bound(work / speeds)
    holders = [{k for k in range(16) if shard in held[k]} for shard in range(16)]
    assert outcome.makespan_s >= round_bound(work, speeds, holders)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_bound_with_holders_is_the_best_over_sets_of_shards(data: st.DataObject) -> None:
    """Against brute force: no set of shards takes longer on all of its holders together."""
    p, s, n = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 3)),
    )
    speeds = data.draw(st.lists(st.floats(0.5, 4.0), min_size=p, max_size=p))
    holders = [data.draw(st.sets(st.integers(0, p - 1), min_size=1)) for _ in range(s)]
    work = [data.draw(st.lists(st.floats(0.1, 5.0), min_size=s, max_size=s)) for _ in range(n)]
    table = np.array(work)
    best = max(
        sum(table[i, k] / max(speeds[j] for j in holders[k]) for k in range(s)) for i in range(n)
    )
    for mask in range(1, 1 << s):
        chosen = [k for k in range(s) if mask >> k & 1]
        able = set().union(*(holders[k] for k in chosen))
        best = max(best, table[:, chosen].sum() / sum(speeds[j] for j in able))
    assert round_bound(work, speeds, holders) == pytest.approx(best)


def test_one_holder_each_gives_the_open_shop_bound() -> None:
    costs, speeds = het(16, 8, 3)
    work = np.repeat(costs[:, None], 8, axis=1)
    holders = [{j} for j in range(8)]
    assert round_bound(work, speeds, holders) == pytest.approx(lower_bound(work / speeds))
