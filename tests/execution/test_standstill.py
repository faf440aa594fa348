"""A search ends where nothing can happen any more, after the time for that, and never before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.description import WorkerNow
from dagsel.dispatch.units import Unit
from dagsel.errors import NoWorkersError, WorkerMemoryError
from dagsel.execution.standstill import Standstill

TIMEOUT_S = 10.0
UNIT = Unit("train", 7, 3, 0)
WORKERS = st.builds(
    WorkerNow,
    st.sampled_from("abc"),
    unit=st.sampled_from([None, UNIT]),
    n_loading=st.integers(0, 1),
    is_paused=st.booleans(),
)
PAUSED, IDLE = (WorkerNow("a", is_paused=True, unit=unit) for unit in (UNIT, None))
#: Beside a paused worker, one that is idle, and two that get on.
OTHERS = st.sampled_from([WorkerNow("b"), WorkerNow("b", n_loading=1), WorkerNow("b", unit=UNIT)])
LOOKS = st.tuples(
    st.floats(0.1, 2 * TIMEOUT_S),  # seconds since the last look
    st.booleans() | st.just(False),  # whether a unit has ended just before
    st.just({"a", "b"}) | st.sets(st.sampled_from("abc")),  # who is there
    st.tuples(st.sampled_from([PAUSED, IDLE]), OTHERS).map(list)
    | st.lists(WORKERS, unique_by=lambda it: it.worker),  # what was last heard of whom
)


@given(st.lists(LOOKS))
def test_it_ends_once_nothing_could_have_happened_at_all_looks_for_so_long(
    looks: list[tuple[float, bool, set[str], list[WorkerNow]]],
) -> None:
    now, good = 0.0, 0.0  # when something could last have happened
    standstill = Standstill(TIMEOUT_S, now)
    for seconds, has_ended, workers, described in looks:
        now += seconds
        if has_ended:
            standstill.end(now)
            good = now
        there = [it for it in described if it.worker in workers]
        pauses = {it.is_paused for it in there if it.unit is not None or it.n_loading > 0}
        if workers and pauses != {True}:
            good = now
        if now - good <= TIMEOUT_S:
            standstill.check(now, workers, described)
            continue
        kind = WorkerMemoryError if workers else NoWorkersError
        with pytest.raises(kind, match="go on with dagsel.resume"):
            standstill.check(now, workers, described)
        return


def test_it_asks_while_nothing_happens_and_not_at_each_look() -> None:
    standstill = Standstill(TIMEOUT_S, 0.0)
    asked = [second for second in range(10) if standstill.wants_to_know(float(second))]
    assert asked == [0, 2, 4, 6, 8]
    standstill.end(9.0)
    assert not standstill.wants_to_know(10.0)
    assert standstill.wants_to_know(11.0)
