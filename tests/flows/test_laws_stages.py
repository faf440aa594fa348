"""Laws of the first stage of an elastic search, and of when it ends."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.flow import Ask, Asked, Context, Paused, Tick, Wake, WorkersChanged
from dagsel.flows import SEER
from dagsel.flows.seer import min_stage_of
from dagsel.flows.stages import FIRST_PAUSE
from dagsel.planning.capacity import ClusterCapacity, Limits

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


@BUSY
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=2, max_size=2),
)
def test_a_pause_begins_as_early_as_it_takes_long_with_the_trials_that_there_are_now(
    n_workers: int, pauses: list[tuple[int, int]]
) -> None:
    """Two pauses measure what an epoch takes, with a trial for each worker; then more trials come.

    What workers do for the first time takes longer: the second one counts. In a pause some workers
    may be away.
    """
    flow = SEER(6400, 6400 * n_workers)
    flow.start(Context(n_workers, capacity=ClusterCapacity(most_workers=n_workers)))
    first = tuple(range(n_workers))
    flow.handle(Asked(first))
    last_s, of_a_trial_s, trained = 0.0, 0.0, 0.0
    for took_s, n_away in pauses:
        n_there = max(1, n_workers - n_away)
        flow.handle(WorkersChanged(n_there))
        assert flow.state.measures_at is not None
        begins_s, trained = flow.state.measures_at, trained + 8.0
        flow.handle(Tick(begins_s))
        for trial in first:
            decisions = flow.handle(Paused(trial, trained, begins_s + took_s, value=trial / 100))
        last_s, of_a_trial_s = took_s, took_s * n_there / n_workers
    flow.handle(WorkersChanged(n_workers))
    n_trials = sum(flow.stage.n_trials)
    assert sum(d.n for d in decisions if isinstance(d, Ask)) == n_trials - n_workers
    told = flow.handle(Asked(tuple(range(n_workers, n_trials)))) if n_trials > n_workers else []
    *_, wake = [d for d in [*decisions, *told] if isinstance(d, Wake)]
    lasts_s = max(last_s, of_a_trial_s * n_trials / flow.stage.n_workers)
    assert wake.seconds == pytest.approx(max(flow.state.seconds, flow.now.ends[0] - lasts_s))
