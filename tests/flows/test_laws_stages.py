"""Laws of the first stage of an elastic search."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.flow import Ask, Context
from dagsel.flows import SEER
from dagsel.flows.seer import min_stage_of
from dagsel.flows.stages import FIRST_PAUSE
from dagsel.planning.capacity import Limits

BUSY = settings(deadline=None)


@BUSY
@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 32))
def test_the_first_stage_knows_no_budget_but_by_the_time_that_it_lasts(
    seconds: int, worker_seconds: int, n_workers: int
) -> None:
    lasts = min(Fraction(seconds), Fraction(worker_seconds, n_workers))
    ample = Limits(float(lasts), 1e9)
    found = min_stage_of(None, Limits(seconds, worker_seconds), n_workers)
    assert found == pytest.approx(min_stage_of(None, ample))
    assert lasts / 65 < found < lasts / 63


@BUSY
@given(st.integers(1, 2000), st.sampled_from([2, 3, 4]))
def test_a_first_stage_that_is_short_is_not_measured(seconds: int, factor: int) -> None:
    flow = SEER(seconds, 40 * seconds, reduction_factor=factor)
    asked = next(d.n for d in flow.start(Context(n_workers=2)) if isinstance(d, Ask))
    stage = flow.stage
    is_long = stage.seconds > 2 * FIRST_PAUSE * seconds
    assert (flow.state.measures_at is not None) is is_long
    assert asked == (min(sum(stage.n_trials), stage.n_workers) if is_long else sum(stage.n_trials))
