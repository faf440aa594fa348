"""Brackets are the paper's, exact at boundaries, within deadline and budget, and the largest."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.planning.brackets import (
    Brackets,
    StagePlan,
    exactly,
    hyperband_plan,
    seer_plan,
    solve_brackets,
)
from dagsel.planning.budget import to_seconds


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    min_stage_s = draw(st.sampled_from([0.1, 0.3, 1.0, 2.0, 7.5, 60.0]))
    p_min = draw(st.integers(1, 4))
    # Whole multiples often, to hit the boundaries between the pieces.
    times = st.one_of(st.integers(1, 300), st.floats(1, 300, allow_nan=False))
    deadline_s = draw(times) * min_stage_s
    budget = draw(times) * draw(st.integers(1, 40)) * p_min * min_stage_s
    return {
        "deadline_s": max(deadline_s, min_stage_s),
        "budget": max(budget, round(p_min * min_stage_s, 9)),
        "reduction_factor": draw(st.integers(2, 5)),
        "parallelism_factor": draw(st.integers(2, 4)),
        "min_workers_per_trial": p_min,
        "max_workers_per_trial": draw(st.one_of(st.none(), st.integers(p_min, 20))),
        "min_stage_s": min_stage_s,
    }


@st.composite
def bounded(draw: st.DrawFn) -> dict[str, Any]:
    """A problem on a cluster that cannot have more than so many workers."""
    problem = draw(problems())
    node_size = draw(st.sampled_from([1, 1, 2, 4]))
    most = draw(st.integers(1, 40)) * node_size + problem["min_workers_per_trial"]
    least = -(-problem["min_workers_per_trial"] // node_size) * node_size
    problem["budget"] = max(problem["budget"], round(least * problem["min_stage_s"], 9))
    return {**problem, "most_workers": most // node_size * node_size, "node_size": node_size}


def solve(problem: dict[str, Any], mode: Any = "paper") -> tuple[Brackets, StagePlan]:
    found = solve_brackets(**problem)
    return found, seer_plan(found, problem["deadline_s"], problem["budget"], mode)


def n_stages(R: Fraction, eta: int) -> int:
    return max(1, next(k for k in range(100) if eta**k >= R))


def is_feasible(R: Fraction, problem: dict[str, Any]) -> bool:
    eta, t_min = problem["reduction_factor"], exactly(problem["min_stage_s"])
    K = n_stages(R, eta)
    stages = [t_min * R / eta ** (K - 1) * eta**k for k in range(K)]
    cost = t_min * problem["min_workers_per_trial"] * R * K
    return sum(stages) <= exactly(problem["deadline_s"]) and bool(
        cost <= exactly(problem["budget"])
    )


def test_the_worked_example() -> None:
    found = solve_brackets(10, 80, reduction_factor=2)
    assert found.resource == Fraction(40, 7)
    assert (found.n_stages, found.first_stage_s) == (3, Fraction(10, 7))
    assert (found.base_cost, found.n_full) == (Fraction(120, 7), 2)
    assert found.workers == (1, 2, 4)
    assert found.budgets == (Fraction(240, 7), Fraction(240, 7), Fraction(80, 7))
    assert found.n_trials == (8, 4, 0)
    plan = seer_plan(found, 10, 80, "paper")
    assert [stage.n_workers for stage in plan.stages] == [16, 8, 4]
    assert [stage.n_trials for stage in plan.stages] == [(8, 4, 0), (4, 2, 0), (2, 1, 0)]
    assert plan.cost == Fraction(480, 7)  # 68.57
    assert plan.seconds == 10


@given(problem=problems())
def test_no_plan_passes_the_deadline_or_the_budget(problem: dict[str, Any]) -> None:
    T, B = exactly(problem["deadline_s"]), exactly(problem["budget"])
    (_, paper), (_, fill) = solve(problem), solve(problem, "fill")
    for plan in (paper, fill):
        assert plan.seconds <= T
        assert plan.cost <= B
        assert plan.ends[-1] <= problem["deadline_s"]
        assert all(sum(stage.n_trials) >= 1 for stage in plan.stages)
    assert fill.cost >= paper.cost


@given(problem=bounded(), mode=st.sampled_from(["paper", "fill"]))
def test_no_plan_has_more_workers_than_there_can_be(problem: dict[str, Any], mode: Any) -> None:
    _, plan = solve(problem, mode)
    T, B = exactly(problem["deadline_s"]), exactly(problem["budget"])
    assert plan.seconds <= T
    assert plan.cost <= B
    for k, stage in enumerate(plan.stages):
        assert sum(stage.n_trials) >= 1
        assert 0 < stage.n_workers <= problem["most_workers"]
        assert stage.n_workers % problem["node_size"] == 0
        needed = sum(n * p for n, p in zip(stage.n_trials, plan.workers, strict=True))
        if k + 1 < len(plan.stages):  # the last one may last longer
            trained = problem["reduction_factor"] ** k * plan.stages[0].seconds
            first = (
                sum(n * p for n, p in zip(plan.stages[0].n_trials, plan.workers, strict=True)) or 1
            )
            trained *= min(1, Fraction(problem["most_workers"], first))
            # What each trial is trained is the paper's, whether they take turns or not.
            assert stage.seconds * min(problem["most_workers"], needed) == trained * needed


@given(problem=problems(), spare=st.integers(0, 5))
def test_a_bound_that_no_stage_reaches_changes_nothing(problem: dict[str, Any], spare: int) -> None:
    found, plan = solve(problem, "fill")
    widest = max(stage.n_workers for stage in plan.stages)
    # As many as the budget could ever pay for at once, and as a trial may have.
    most = max(widest, -(-exactly(problem["budget"]) // found.first_stage_s), *found.workers)
    assert solve({**problem, "most_workers": int(most) + spare}, "fill")[1] == plan


@given(problem=bounded())
def test_under_a_bound_r_is_the_largest(problem: dict[str, Any]) -> None:
    found = solve_brackets(**problem)
    T, W = exactly(problem["deadline_s"]), problem["most_workers"]
    eta, t_min = problem["reduction_factor"], exactly(problem["min_stage_s"])
    B = min(exactly(problem["budget"]), W * T)

    def fits(R: Fraction) -> bool:
        K = n_stages(R, eta)
        lengths = [t_min * R / eta**j for j in range(K)]
        in_time = sum(max(t, B / K / W) for t in lengths) <= T
        node_size = problem["node_size"]
        least = -(-problem["min_workers_per_trial"] // node_size) * node_size
        return bool(in_time and t_min * least * R * K <= B)

    assert fits(found.resource)
    for step in (Fraction(1, 10**9), Fraction(1, 100), Fraction(1)):
        assert not fits(found.resource * (1 + step))


@given(
    T=st.integers(1, 100),
    B=st.integers(1, 4000),
    most=st.one_of(st.none(), st.integers(1, 60)),
    node_size=st.sampled_from([1, 2, 4]),
)
def test_hyperband_keeps_to_what_there_can_be(
    T: int, B: int, most: int | None, node_size: int
) -> None:
    if T * node_size > B:
        return
    most = None if most is None else most * node_size
    plan = hyperband_plan(T, B, most_workers=most, node_size=node_size)
    assert plan.cost <= B
    assert plan.seconds == T
    for stage in plan.stages:
        assert stage.n_workers % node_size == 0
        assert most is None or stage.n_workers <= most


@given(problem=problems())
def test_what_is_filled_leaves_no_room(problem: dict[str, Any]) -> None:
    T, B = exactly(problem["deadline_s"]), exactly(problem["budget"])
    found, plan = solve(problem, "fill")
    n, *rest = plan.stages[0].n_trials
    assert found.plan((n + 1, *rest)).cost > B
    assert plan.seconds == T or plan.cost == B
    assert tuple(rest) == found.n_trials[1:]


@given(problem=problems(), more=st.fractions(0, 3))
def test_r_and_q_are_the_largest(problem: dict[str, Any], more: Fraction) -> None:
    found = solve_brackets(**problem)
    R, eta, nu = found.resource, problem["reduction_factor"], problem["parallelism_factor"]
    assert is_feasible(R, problem)
    assert found.n_stages == n_stages(R, eta)
    for step in (Fraction(1, 10**9), Fraction(1, 100), Fraction(1), more):
        assert not step or not is_feasible(R * (1 + step), problem)
    B, B_0 = exactly(problem["budget"]), found.base_cost
    assert found.n_full == max(q for q in range(1, 60) if q * nu ** (q - 1) <= B / B_0)


@pytest.mark.parametrize("nu", [2, 3])
@pytest.mark.parametrize("q", [2, 3, 4])
def test_a_budget_that_just_pays_for_a_full_bracket_does(q: int, nu: int) -> None:
    B = q * nu ** (q - 1)  # B_0 is 1
    assert solve_brackets(1, B, parallelism_factor=nu).n_full == q
    assert solve_brackets(1, B - 0.001, parallelism_factor=nu).n_full == q - 1


@given(problem=problems())
def test_brackets_are_as_algorithm_2_says(problem: dict[str, Any]) -> None:
    found, plan = solve(problem)
    eta, nu, p_max = (
        problem[name]
        for name in ("reduction_factor", "parallelism_factor", "max_workers_per_trial")
    )
    B, P = exactly(problem["budget"]), found.workers
    assert P[0] == problem["min_workers_per_trial"]
    assert all(a < b and b <= a * nu for a, b in pairwise(P))
    assert p_max is None or P[-1] <= p_max
    assert sum(found.budgets) == B
    for n, p, budget in zip(found.n_trials, P, found.budgets, strict=True):
        cost = found.n_stages * found.first_stage_s * p
        assert n * cost <= budget < (n + 1) * cost
    t_min = exactly(problem["min_stage_s"])
    assert t_min <= found.first_stage_s <= t_min * eta
    for k, stage in enumerate(plan.stages):
        assert stage.seconds == found.first_stage_s * eta**k
        assert stage.n_trials == tuple(n // eta**k for n in found.n_trials)


@pytest.mark.parametrize("eta", [2, 3, 4, 5])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_power_of_eta_ends_its_piece(eta: int, k: int) -> None:
    # R = η^k takes k stages exactly; with a hair less time it still does, and R is less.
    T = float(sum(eta**i for i in range(1, k + 1)))
    found = solve_brackets(T, 1e9, reduction_factor=eta)
    assert (found.resource, found.n_stages) == (eta**k, k)
    found = solve_brackets(T - 1e-9, 1e9, reduction_factor=eta)
    assert found.resource < eta**k
    assert found.n_stages == k


def test_decimals_are_read_as_they_are_written() -> None:
    # 0.3 / 0.1 is below 3 in floating point, and so is 0.9 / 0.3.
    assert solve_brackets(0.3, 0.9, reduction_factor=3, min_stage_s=0.1).resource == 3


@given(
    deadline_s=st.integers(1, 500),
    n_workers=st.integers(1, 200),
    eta=st.integers(2, 5),
    min_stage_s=st.sampled_from([0.5, 1.0]),
)
def test_hyperband_uses_what_the_budget_pays_for(
    deadline_s: int, n_workers: int, eta: int, min_stage_s: float
) -> None:
    budget = deadline_s * n_workers
    plan = hyperband_plan(deadline_s, budget, reduction_factor=eta, min_stage_s=min_stage_s)
    assert plan.seconds == deadline_s
    assert deadline_s <= plan.cost <= budget
    assert all(min(stage.n_trials) >= 1 for stage in plan.stages)
    end = Fraction()
    for i, stage in enumerate(plan.stages):
        end += stage.seconds
        assert end * eta ** (len(plan.stages) - 1 - i) == deadline_s
        assert stage.n_workers == sum(stage.n_trials)
    for before, after in pairwise(plan.stages):
        for n, m in zip(before.n_trials, after.n_trials, strict=True):
            assert m in (n, n // eta)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"deadline_s": 0.0}, "deadline must be above 0, got 0.0"),
        ({"budget": -1.0}, "budget must be above 0, got -1.0"),
        ({"budget": 1.5}, "the smallest that works is 2 worker-seconds"),
        ({"deadline_s": 0.5}, "a deadline of 0.5 s has no room for one stage of min_stage=1 s"),
        ({"max_workers_per_trial": 1}, "max_workers_per_trial=1 is below min_workers_per_trial=2"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], words: str) -> None:
    problem = {"deadline_s": 10.0, "budget": 80.0, "min_workers_per_trial": 2, **change}
    with pytest.raises(SearchError, match=words):
        solve_brackets(**problem)


def test_the_smallest_budget_works() -> None:
    found = solve_brackets(10, 2, min_workers_per_trial=2)
    assert found.resource == found.n_stages == 1
    assert found.n_trials == (1, 0)
    plan = hyperband_plan(10, 10)
    assert plan.cost == 10
    with pytest.raises(SearchError, match="the smallest that works is 10 worker-seconds"):
        hyperband_plan(10, 9.99)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10 s", 10),
        ("10min", 600),
        (" 2 H ", 7200),
        ("0.5 days", 43200),
        (7, 7),
        ("1e2 s", 100),
        ("60", 60),
        (" 1e2 ", 100),
    ],
)
def test_spans_are_read(text: float | str, seconds: float) -> None:
    assert to_seconds("deadline", text) == seconds


@pytest.mark.parametrize("bad", ["", "min", "10 parsecs", "-3 s", "1.2.3 s", None, [], "ten"])
def test_a_bad_span_is_named(bad: Any) -> None:
    with pytest.raises(SearchError, match="^deadline=.* is no time; write seconds"):
        to_seconds("deadline", bad)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "0 s", "0"])
def test_a_span_is_positive(bad: Any) -> None:
    with pytest.raises(SearchError, match="^deadline must be above 0 and finite"):
        to_seconds("deadline", bad)
