"""How many workers are worth their starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.planning.capacity import STARTUP_SHARE, ClusterCapacity

TIMES = st.floats(0.1, 1e4)


@given(
    most=st.one_of(st.none(), st.integers(1, 64)),
    startup_s=TIMES,
    node_size=st.sampled_from([1, 1, 2, 8]),
    seconds=TIMES,
    worker_seconds=TIMES,
    n_there=st.integers(0, 64),
)
def test_starts_take_a_tenth_of_the_budget_or_what_uses_it_up_in_time(
    most: int | None,
    startup_s: float,
    node_size: int,
    seconds: float,
    worker_seconds: float,
    n_there: int,
) -> None:
    most = None if most is None else most * node_size
    n_there = (n_there if most is None else min(most, n_there)) // node_size * node_size
    n = ClusterCapacity(most, startup_s, node_size).affordable(seconds, worker_seconds, n_there)
    assert n is not None
    assert n >= max(1, n_there)
    assert n % node_size == 0
    assert most is None or n <= most
    n_new = n - n_there - (node_size - 1)  # but for what a whole node has over
    if n_new <= max(0, 1 - n_there):
        return
    assert n_new * startup_s <= worker_seconds / 2
    assert 2 * startup_s <= seconds
    is_cheap = n_there and n_new * startup_s <= STARTUP_SHARE * worker_seconds
    assert is_cheap or (n - node_size) * seconds < worker_seconds


@given(startup_s=TIMES, worker_seconds=TIMES)
def test_a_start_that_costs_nothing_bounds_nothing_but_time(
    startup_s: float, worker_seconds: float
) -> None:
    queue = ClusterCapacity(16, startup_s, bills_requests=False)
    assert queue.affordable(3 * startup_s, worker_seconds) == 16
    assert queue.affordable(1.5 * startup_s, worker_seconds) == 1
    queue.check(3 * startup_s, worker_seconds)


@given(most=st.one_of(st.none(), st.integers(1, 64)), n_there=st.integers(0, 64))
def test_starts_that_nobody_knows_or_pays_for_bound_nothing(most: int | None, n_there: int) -> None:
    assert ClusterCapacity(most).affordable(60.0, 120.0, n_there) == most
    assert ClusterCapacity(most, 9.0).affordable(60.0, float("inf"), n_there) == most


@given(
    startup_s=st.integers(1, 100),
    eighths=st.integers(1, 40),
    node_size=st.sampled_from([1, 2, 8]),
    n_there=st.integers(0, 8),
)
def test_none_is_asked_for_that_would_train_for_less_than_it_takes_to_come(
    startup_s: int, eighths: int, node_size: int, n_there: int
) -> None:
    seconds = startup_s * eighths / 8
    n_there *= node_size
    capacity = ClusterCapacity(startup_s=float(startup_s), node_size=node_size)
    found = capacity.affordable(seconds, 1e6 * seconds, n_there)
    if seconds < 2 * startup_s:
        assert found == max(n_there, node_size)
    else:
        assert found is not None
        assert found > max(n_there, node_size)


@pytest.mark.parametrize(("node_size", "first"), [(1, "one worker"), (4, "a job of 4 workers")])
def test_a_budget_that_pays_for_no_start_is_refused_with_what_starts(
    node_size: int, first: str
) -> None:
    capacity = ClusterCapacity(startup_s=3.0, node_size=node_size)
    with pytest.raises(SearchError, match=f"the start of {first} costs {3 * node_size} worker-sec"):
        capacity.check(60.0, 3.0 * node_size)
    capacity.check(60.0, 3.0 * node_size + 1)
