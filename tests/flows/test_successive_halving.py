"""Each rung keeps its best, whatever the order, the failures and the ties; bad input is refused."""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Direction,
    Finish,
    Reported,
    Stop,
    Train,
    WorkersChanged,
)
from dagsel.flows import SuccessiveHalving
from dagsel.flows.rungs import Rounding, rung_epochs, rung_sizes
from dagsel.testing import FlowSuite


class TestFloor(FlowSuite):
    n_concurrent = 3

    def make_flow(self) -> SuccessiveHalving:
        return SuccessiveHalving(max_epochs=9, n_trials=10, n_concurrent=3)


class TestCeil(FlowSuite):
    direction: Direction = "maximize"

    def make_flow(self) -> SuccessiveHalving:
        return SuccessiveHalving(7, 11, min_epochs=2, reduction_factor=2, rounding="ceil")


class TestOneRung(FlowSuite):
    n_concurrent = 1

    def make_flow(self) -> SuccessiveHalving:
        return SuccessiveHalving(max_epochs=2, n_trials=4, min_epochs=2, n_concurrent=1)


@settings(deadline=None)
@given(
    n_trials=st.integers(1, 20),
    max_epochs=st.integers(1, 12),
    reduction_factor=st.integers(2, 4),
    rounding=st.sampled_from(["floor", "ceil"]),
    n_points=st.none() | st.integers(1, 20),
    direction=st.sampled_from(["minimize", "maximize"]),
    data=st.data(),
)
def test_the_best_of_each_rung_go_on_and_failures_count_as_the_worst(
    play: Callable[..., Any],
    n_trials: int,
    max_epochs: int,
    reduction_factor: int,
    rounding: Rounding,
    n_points: int | None,
    direction: Direction,
    data: st.DataObject,
) -> None:
    n = min(n_trials, n_points or n_trials)
    rungs = rung_epochs(1, max_epochs, reduction_factor)
    sizes = rung_sizes(n, len(rungs), reduction_factor, rounding)
    some = st.none() | st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf, -math.inf])
    table = data.draw(st.lists(st.lists(some, min_size=n, max_size=n), min_size=5, max_size=5))
    context = Context(n_workers=1, direction=direction)

    def rank(rung: int, trial: int) -> tuple[float, int]:
        value = table[rung][trial]
        assert value is not None
        return context.loss(value), trial

    expected: dict[int, tuple[str, int]] = {}
    members, before = list(range(n)), 0
    for rung, (until, size) in enumerate(zip(rungs, sizes, strict=True)):
        expected |= dict.fromkeys(members[size:], ("pruned", before))
        failed = [trial for trial in members[:size] if table[rung][trial] is None]
        expected |= dict.fromkeys(failed, ("failed", before))
        left = [trial for trial in members[:size] if trial not in failed]
        members, before = sorted(left, key=lambda trial: rank(rung, trial)), until
    expected |= dict.fromkeys(members, ("complete", max_epochs))

    played = play(
        SuccessiveHalving(max_epochs, n_trials, 1, reduction_factor, rounding),
        lambda trial, epoch: table[bisect_left(rungs, epoch)][trial],
        context=context,
        n_points=n_points,
        pick=lambda training: data.draw(st.sampled_from(training)),
    )
    assert {t: (end, played.epochs[t]) for t, end in played.ended.items()} == expected
    assert played.most_training <= 4


def test_a_reason_says_what_the_trial_missed(play: Callable[..., Any]) -> None:
    flow = SuccessiveHalving(max_epochs=9, n_trials=9)
    played = play(flow, lambda trial, epoch: math.nan if trial == 8 else trial / 10)
    assert played.reasons[2] == "rung 2: 0.2 is not among the best 1 of 3"
    assert played.reasons[3] == "rung 1: 0.3 is not among the best 3 of 9"
    assert played.reasons[8] == "rung 1: no finite, feasible value is not among the best 3 of 9"
    assert played.ended[0] == "complete"


def test_more_workers_make_room_and_fewer_take_nothing_away() -> None:
    flow = SuccessiveHalving(max_epochs=3, n_trials=30)
    assert flow.start(Context(n_workers=1)) == [Ask(4, "study")]
    flow.handle(Asked((0, 1, 2, 3)))
    assert flow.handle(WorkersChanged(2)) == [Ask(4, "study")]
    assert flow.handle(WorkersChanged(1)) == []
    # What was asked for while there was room waits until there is some again.
    assert flow.handle(Asked((4, 5, 6, 7))) == []
    assert flow.handle(Reported(0, 1, 0.5, {}, 1.0)) == [Train(4, 1)]
    fixed = SuccessiveHalving(max_epochs=3, n_trials=30, n_concurrent=2)
    assert fixed.start(Context(n_workers=9)) == [Ask(2, "study")]
    assert fixed.handle(WorkersChanged(20)) == []


def test_a_deadline_stops_what_is_live_and_leaves_what_is_complete() -> None:
    flow = SuccessiveHalving(max_epochs=3, n_trials=4, reduction_factor=2, n_concurrent=4)
    flow.start(Context(n_workers=1))
    flow.handle(Asked((0, 1, 2, 3)))
    for trial in range(4):
        flow.handle(Reported(trial, 1, trial / 10, {}, 1.0))
    flow.handle(Reported(0, 2, 0.0, {}, 1.0))
    flow.handle(Reported(1, 2, 0.0, {}, 1.0))
    stop, finish = flow.handle(DeadlineReached(9.0))
    assert isinstance(stop, Stop)
    assert (stop.trial, stop.outcome, finish) == (0, "pruned", Finish())
    assert flow.handle(Reported(0, 3, 0.0, {}, 9.1)) == []


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"max_epochs": 0}, "max_epochs must be a whole number of 1 or more, got 0"),
        ({"max_epochs": 9.0}, "max_epochs must be a whole number"),
        ({"n_trials": 0}, "n_trials must be a whole number of 1 or more, got 0"),
        ({"n_trials": "9"}, "n_trials must be a whole number"),
        ({"min_epochs": 10}, "min_epochs=10 is above max_epochs=9; lower"),
        ({"reduction_factor": 1}, "reduction_factor must be 2 or more, got 1"),
        ({"reduction_factor": 2.5}, "reduction_factor must be a whole number"),
        ({"rounding": "up"}, "rounding must be one of 'floor', 'ceil', got 'up'"),
        ({"n_concurrent": 0}, "n_concurrent must be a whole number"),
    ],
)
def test_bad_input_is_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(SearchError, match=text):
        SuccessiveHalving(**{"max_epochs": 9, "n_trials": 9} | bad)


def test_more_concurrency_than_trials_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match="n_concurrent is 10, but n_trials is 9") as warned:
        SuccessiveHalving(max_epochs=9, n_trials=9, n_concurrent=10)
    assert warned[0].filename == __file__
