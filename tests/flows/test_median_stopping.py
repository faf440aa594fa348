"""The median stopping rule: a trial ends early where Vizier's rule says so, and nowhere else."""

from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import Asked, Context, Direction, Reported, Stop
from dagsel.flows import MedianStopping, median_stopping
from dagsel.testing import FlowSuite


class TestMedianStopping(FlowSuite):
    n_concurrent = 5

    def make_flow(self) -> MedianStopping:
        return MedianStopping(max_epochs=4, n_trials=12, min_trials=2, n_concurrent=5)


def begin(flow: MedianStopping, direction: Direction = "maximize") -> None:
    flow.start(Context(n_workers=8, direction=direction))
    flow.handle(Asked(tuple(range(flow.n_trials))))


def report(flow: MedianStopping, trial: int, epoch: int, value: float) -> bool:
    answer = flow.handle(Reported(trial, epoch, value, {}, 1.0))
    return any(isinstance(decision, Stop) and decision.trial == trial for decision in answer)


def test_ray_s_example() -> None:
    # The reward of one trial grows by 100 an epoch, that of the other stays at 450.
    flow = MedianStopping(max_epochs=99, n_trials=2, min_trials=1)
    begin(flow)
    assert not any(report(flow, 0, epoch, 100.0 * epoch) for epoch in range(1, 12))
    stops = (epoch for epoch in range(1, 12) if report(flow, 1, epoch, 450.0))
    assert next(stops) == 9  # 100 to 900 have the mean 500


def test_grace_and_few_trials_protect() -> None:
    flow = MedianStopping(max_epochs=9, n_trials=4, grace_epochs=3, min_trials=2)
    begin(flow, "minimize")
    for epoch in (1, 2, 3, 4):
        assert not report(flow, 0, epoch, 0.0)
    for epoch in (1, 2, 3):
        assert not report(flow, 1, epoch, 1.0)
    assert [report(flow, 2, epoch, 9.0) for epoch in (1, 2, 3)] == [False, False, True]


def test_a_trial_is_compared_with_those_that_came_so_far() -> None:
    flow = MedianStopping(max_epochs=3, n_trials=3, min_trials=1)
    begin(flow, "minimize")
    report(flow, 0, 1, 5.0)
    report(flow, 1, 1, 0.0)
    assert not report(flow, 0, 2, 5.0)
    assert not report(flow, 2, 1, 2.0)  # the median of 5 and 0 is 2.5
    assert not report(flow, 2, 2, 4.0)  # the best counts, not the last
    assert not report(flow, 1, 2, 9.0)


@given(st.lists(st.lists(st.integers(-5, 5), min_size=6, max_size=6), min_size=2, max_size=6))
def test_against_the_rule_as_it_is_written(curves: list[list[int]]) -> None:
    n, n_epochs = len(curves), 6
    flow = MedianStopping(n_epochs, n_trials=n, grace_epochs=2, min_trials=2)
    begin(flow)
    reached = dict.fromkeys(range(n), 0)
    stopped: set[int] = set()
    for epoch in range(1, n_epochs):
        for trial, curve in enumerate(curves):
            if trial in stopped:
                continue
            reached[trial] = epoch
            others = [
                fmean(curves[other][:epoch])
                for other in range(n)
                if other != trial and reached[other] >= epoch
            ]
            ends = epoch >= 2 and len(others) >= 2 and max(curve[:epoch]) < median(others)
            assert report(flow, trial, epoch, curve[epoch - 1]) == ends
            stopped |= {trial} if ends else set()


def test_a_report_takes_one_mean_however_many_trials_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[list[float]] = []

    def mean(values: list[float]) -> float:
        taken.append(values)
        return fmean(values)

    monkeypatch.setattr(median_stopping, "fmean", mean)
    flow = MedianStopping(max_epochs=3, n_trials=50)
    begin(flow)
    for trial in range(50):
        report(flow, trial, 1, float(trial))
    assert len(taken) == 50


@pytest.mark.parametrize("name", ["grace_epochs", "min_trials", "n_trials"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(SearchError, match=f"{name} must be a whole number"):
        MedianStopping(**{"max_epochs": 3, "n_trials": 3, name: 0})
