"""Laws of where a run and a trial stand: the end of the search, points of a drawing, places."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagsel.dispatch.units import Unit
from dagsel.flow import Paused, Train
from dagsel.history.course import LEAST_S, Course, Moment
from dagsel.history.tally import EpochTally
from dagsel.history.trial import TrialRecord
from dagsel.messages import PieceRecord, StatePlace, UnitRecord

BUSY = settings(deadline=None)
steps = st.lists(st.tuples(st.floats(0, 50), st.integers(0, 9)), min_size=1, max_size=8)


def course(told: list[tuple[float, int]], *, is_over: bool = False) -> Course:
    seconds = list(accumulate(step for step, _ in told))
    costs = accumulate(step * n for step, n in told)
    moments = [Moment(at, cost, 1) for at, cost in zip(seconds, costs, strict=True)]
    if is_over:
        moments[-1] = Moment(moments[-1].seconds, moments[-1].worker_seconds, 0, mark="end")
    return Course(moments)


@BUSY
@given(steps, st.booleans())
def test_a_search_ends_with_the_last_moment_before_the_release(
    told: list[tuple[float, int]], is_over: bool
) -> None:
    made = course(told, is_over=is_over)
    before = [moment for moment in made.moments if moment.mark != "end"] or [made.end]
    assert made.search_end is before[-1]


@BUSY
@given(steps, st.floats(0, 100), st.floats(0.5, 100))
def test_no_two_points_of_a_drawing_are_closer_than_can_be_read(
    told: list[tuple[float, int]], start: float, lasts: float
) -> None:
    points = course(told).costs(start, start + lasts)
    assert (points[0][0], points[-1][0]) == (start, start + lasts)
    assert all(after - before >= LEAST_S - 1e-9 for (before, _), (after, _) in pairwise(points))


@BUSY
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(1, 5000),
)
def test_a_run_that_began_later_has_the_same_drawing(
    told: list[tuple[int, int]], later_s: int
) -> None:
    made = course([(step / 16, n) for step, n in told])
    moved = [replace(m, seconds=m.seconds + later_s) for m in made.moments]
    first, last = made.begin, made.end.seconds
    points = Course(moved).costs(first + later_s, last + later_s)
    assert [(at - later_s, cost) for at, cost in points] == made.costs(first, last)
    assert len(points) <= 1002


@BUSY
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6))
@example([(0, 40)] * 3)
def test_no_more_workers_are_drawn_than_there_were_where_a_start_is_billed_later(
    jobs: list[tuple[int, int]],
) -> None:
    """A job has begun to cost some time before its worker has come."""

    def cost(at: int) -> float:
        return sum(float(at - start) for start, took in jobs if start + took <= at)

    n_there = [sum(start + took <= at for start, took in jobs) for at in range(101)]
    told = Course([Moment(float(at), cost(at), n) for at, n in enumerate(n_there)])
    bars = told.bars()
    assert max(n for _, _, n in bars) <= 2 * len(jobs)
    assert sum(lasts * n for _, lasts, n in bars) <= told.end.worker_seconds
    if all(job == (0, 40) for job in jobs):
        assert bars == [(float(at), 1.0, float(len(jobs))) for at in range(100)]


@pytest.mark.parametrize("n_billed", [1, 2, 3, 8])
def test_workers_that_share_a_process_are_drawn_as_they_are_billed(n_billed: int) -> None:
    """The flow is told of one worker."""
    told = Course([Moment(float(at), float(n_billed * at), 1) for at in range(9)])
    assert [n for _, _, n in told.bars()] == [n_billed] * 8


ABOUT: dict[str, Any] = {"worker": "a", "shard": 0, "start": 0.0, "stop": 1.0, "hop": False}


@BUSY
@given(st.integers(0, 3), st.integers(1, 4), st.data())
def test_the_place_of_the_newest_state_is_as_far_as_the_trial_has_trained(
    n_epochs: int, n_shards: int, data: st.DataObject
) -> None:
    n_units = data.draw(st.integers(0, n_shards - 1))
    record = TrialRecord(0, {}, {})
    record.allow(Train(0, n_epochs + 1))
    for epoch in range(1, n_epochs + 2):
        tally = record.tallies[epoch] = EpochTally(n_shards)
        for position in range(n_shards if epoch <= n_epochs else n_units):
            about = {**ABOUT, "shard": position}
            tally.add(UnitRecord(Unit("train", 0, epoch, position), **about, n_samples=1))
    place = record.place(n_shards)
    assert record.progress(n_shards) == n_epochs + n_units / n_shards
    if place is None:
        assert n_epochs == n_units == 0
    else:
        assert place.epoch - 1 + (place.position + 1) / n_shards == record.progress(n_shards)


@BUSY
@given(st.lists(st.booleans(), min_size=1, max_size=5), st.booleans())
def test_a_trial_that_rests_is_held_until_it_may_train_and_a_rest_is_no_switch(
    told: list[bool], is_scored: bool
) -> None:
    record = TrialRecord(0, {}, {})
    for rests in told:
        if rests:
            value = {"value": 0.5, "metrics": {"loss": 0.5}} if is_scored else {"value": None}
            values = (0.5,) if is_scored else ()
            record.rest(Paused(0, 0.5, 2.0, **value), StatePlace(1, 0), values)
        else:
            record.allow(Train(0, 1))
        assert record.is_held is rests
        record.spend(PieceRecord(Unit("train", 0, 1, 0), **ABOUT, share=0.5))
        assert (record.cut is None) is rests
