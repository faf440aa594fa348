"""Random and grid search: every trial to the end, never too many at once, always an end."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    Decision,
    Event,
    Finish,
    Flow,
    Reported,
    Stop,
    Train,
    TrialFailed,
)
from dagsel.flows import Grid, RandomSearch


class World:
    """Performs decisions with trials that end in any order, some of them badly."""

    def __init__(self, flow: Flow, n_points: int | None) -> None:
        self.flow, self.n_points = flow, n_points
        self.n_drawn = 0
        self.live: dict[int, int] = {}  # trial: epochs left
        self.ended: dict[int, str] = {}
        self.finished = False
        self.most_live = 0

    def perform(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert not self.finished
            match decision:
                case Ask(n, _):
                    left = n if self.n_points is None else min(n, self.n_points - self.n_drawn)
                    trials = tuple(range(self.n_drawn, self.n_drawn + left))
                    self.n_drawn += left
                    self.live |= dict.fromkeys(trials, 0)
                    self.most_live = max(self.most_live, len(self.live))
                    exhausted = self.n_points is not None and self.n_drawn == self.n_points
                    self.perform(self.flow.handle(Asked(trials, exhausted)))
                case Train(trial, epochs):
                    self.live[trial] += epochs
                case Stop(trial, _, outcome):
                    del self.live[trial]
                    self.ended[trial] = outcome
                case Finish():
                    self.finished = True

    def step(self, trial: int, *, fails: bool, max_epochs: int) -> None:
        event: Event
        if fails:
            del self.live[trial]
            self.ended[trial] = "failed"
            event = TrialFailed(trial, "it broke")
        else:
            self.live[trial] -= 1
            epoch = max_epochs - self.live[trial]
            event = Reported(trial, epoch, 0.5, {"accuracy": 0.5}, seconds=1.0)
        self.perform(self.flow.handle(event))


@given(
    max_epochs=st.integers(1, 4),
    n_trials=st.integers(1, 12),
    n_concurrent=st.none() | st.integers(1, 6),
    n_points=st.none() | st.integers(1, 15),
    data=st.data(),
)
def test_every_trial_trains_to_the_end_and_the_search_ends(
    max_epochs: int,
    n_trials: int,
    n_concurrent: int | None,
    n_points: int | None,
    data: st.DataObject,
) -> None:
    flow = RandomSearch(max_epochs, n_trials=n_trials, n_concurrent=n_concurrent)
    world = World(flow, n_points)
    world.perform(flow.start(Context(n_workers=2)))
    while not world.finished:
        trial = data.draw(st.sampled_from(sorted(world.live)))
        world.step(trial, fails=data.draw(st.integers(0, 9)) == 0, max_epochs=max_epochs)
    assert world.live == {}
    assert len(world.ended) == min(n_trials, n_points or n_trials)
    assert world.most_live <= (n_concurrent or 8)
    assert set(world.ended.values()) <= {"complete", "failed"}


def test_a_flow_serves_two_runs() -> None:
    flow = RandomSearch(max_epochs=1, n_trials=2)
    first, second = replace(flow), replace(flow)
    assert first.start(Context(1)) == second.start(Context(1)) == [Ask(2, "random")]
    assert flow == first


def test_a_grid_goes_on_until_the_space_is_exhausted() -> None:
    flow = Grid(max_epochs=1, n_concurrent=2)
    world = World(flow, n_points=5)
    world.perform(flow.start(Context(n_workers=1)))
    while not world.finished:
        world.step(min(world.live), fails=False, max_epochs=1)
    assert world.ended == dict.fromkeys(range(5), "complete")


@pytest.mark.parametrize("bad", [{"max_epochs": 0}, {"max_epochs": 2, "n_trials": -1}])
def test_numbers_below_one_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(SearchError, match=r"must be a whole number of 1 or more"):
        RandomSearch(**bad)
