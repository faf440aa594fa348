"""Random and grid search: every trial to the end, never too many at once, always an end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Finish,
    Stop,
    Train,
    TrialFailed,
    WorkersChanged,
)
from dagsel.flows import Grid, RandomSearch
from dagsel.testing import FlowSuite
from dagsel.testing.world import Tape, World


class TestRandomSearch(FlowSuite):
    n_concurrent = 4

    def make_flow(self) -> RandomSearch:
        return RandomSearch(max_epochs=3, n_trials=9, n_concurrent=4)


class TestGrid(FlowSuite):
    n_points = 11

    def make_flow(self) -> Grid:
        return Grid(max_epochs=2)  # four trials a worker, however many there are


@pytest.mark.filterwarnings("ignore:n_concurrent is")
@given(
    max_epochs=st.integers(1, 4),
    n_trials=st.none() | st.integers(1, 12),
    n_concurrent=st.none() | st.integers(1, 6),
    n_points=st.integers(1, 15),
    choices=st.binary(min_size=20, max_size=60),
)
def test_every_trial_trains_to_the_end(
    max_epochs: int,
    n_trials: int | None,
    n_concurrent: int | None,
    n_points: int,
    choices: bytes,
) -> None:
    flow = Grid(max_epochs, n_trials=n_trials, n_concurrent=n_concurrent)
    world = World(flow, Context(n_workers=2), Tape(choices), lambda trial: {}, n_points)
    world.run()
    stops = [d for step in world.steps for d in step.decisions if isinstance(d, Stop)]
    failed = [step for step in world.steps if isinstance(step.event, TrialFailed)]
    assert world.live == {}
    assert len(world.ended) == len(stops) + len(failed) == min(n_trials or n_points, n_points)
    assert {stop.outcome for stop in stops} <= {"complete"}
    assert world.most_training <= (n_concurrent or len(world.ended))


def test_four_trials_a_worker_train_at_once() -> None:
    flow = RandomSearch(max_epochs=2, n_trials=20)
    assert flow.start(Context(n_workers=1)) == [Ask(4, "random")]
    assert flow.handle(Asked((0, 1, 2, 3))) == [Train(trial, 2) for trial in range(4)]
    assert flow.handle(WorkersChanged(2)) == [Ask(4, "random")]
    assert flow.handle(WorkersChanged(1)) == []
    own = RandomSearch(max_epochs=2, n_trials=20, n_concurrent=3)
    assert own.start(Context(n_workers=1)) == [Ask(3, "random")]
    assert own.handle(WorkersChanged(9)) == []


def test_a_search_whose_workers_are_gone_is_not_over() -> None:
    flow = RandomSearch(max_epochs=2, n_trials=9)
    flow.start(Context(n_workers=1))
    flow.handle(Asked((0, 1, 2, 3)))
    assert flow.handle(WorkersChanged(0)) == []
    answers = [flow.handle(TrialFailed(trial, "it broke")) for trial in range(4)]
    assert answers == 4 * [[Ask(1, "random")]]


def test_at_the_deadline_live_trials_are_pruned() -> None:
    flow = RandomSearch(max_epochs=2, n_trials=9, n_concurrent=2)
    flow.start(Context(n_workers=1))
    flow.handle(Asked((8, 3)))
    pruned = [Stop(trial, "the time or the budget is over", "pruned") for trial in (3, 8)]
    assert flow.handle(DeadlineReached(60.0)) == [*pruned, Finish()]
    assert flow.handle(TrialFailed(3, "it broke")) == flow.handle(WorkersChanged(9)) == []


def test_more_at_once_than_there_are_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="n_concurrent is 5, but n_trials is 4") as warned:
        RandomSearch(max_epochs=2, n_trials=4, n_concurrent=5)
    assert warned[0].filename == __file__


@pytest.mark.parametrize("bad", [{"max_epochs": 0}, {"max_epochs": 2, "n_trials": -1}])
def test_numbers_below_one_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(SearchError, match=r"must be a whole number of 1 or more"):
        RandomSearch(**bad)
