"""SamplerSearch: one trial a worker in flight, the study's own sampler, each trial to the end."""

import pytest

from dagsel.errors import SearchError
from dagsel.flow import Ask, Asked, Context, Reported, Stop, Train, WorkersChanged
from dagsel.flows import SamplerSearch
from dagsel.testing import FlowSuite


class TestSamplerSearch(FlowSuite):
    n_concurrent = 3

    def make_flow(self) -> SamplerSearch:
        return SamplerSearch(max_epochs=3, n_trials=9, n_concurrent=3)


class TestSamplerSearchWithDefaults(FlowSuite):
    n_concurrent = 4  # one a worker, and the suite has two to four

    def make_flow(self) -> SamplerSearch:
        return SamplerSearch(2, 11)


def test_as_many_trials_are_in_flight_as_there_are_workers() -> None:
    flow = SamplerSearch(max_epochs=2, n_trials=10)
    assert flow.start(Context(n_workers=3)) == [Ask(3, "study")]
    assert flow.handle(Asked((0, 1, 2))) == [Train(0, 2), Train(1, 2), Train(2, 2)]
    assert flow.handle(WorkersChanged(5)) == [Ask(2, "study")]
    assert flow.handle(Asked((3, 4))) == [Train(3, 2), Train(4, 2)]
    assert flow.handle(WorkersChanged(4)) == []
    end = Stop(1, "trained to the end", "complete")
    assert flow.handle(Reported(1, 2, 0.5, {}, 1.0)) == [end]
    end = Stop(0, "trained to the end", "complete")
    assert flow.handle(Reported(0, 2, 0.5, {}, 1.0)) == [end, Ask(1, "study")]


def test_no_search_without_an_end() -> None:
    with pytest.raises(SearchError, match="n_trials must be a whole number of 1 or more, got None"):
        SamplerSearch(max_epochs=2, n_trials=None)  # type: ignore[arg-type]
    with pytest.raises(SearchError, match="SamplerSearch needs n_trials: write n_trials=20"):
        SamplerSearch(max_epochs=2)  # type: ignore[call-arg]
