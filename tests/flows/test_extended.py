"""A search that has finished goes on with its best, draws as many more as asked, and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Ended,
    Event,
    Extended,
    Finish,
    Flow,
    Reported,
    Stop,
    Train,
    WorkersChanged,
)
from dagsel.flows import (
    ASHA,
    PBT,
    SEER,
    EarlyStopping,
    Grid,
    Hermes,
    Hyperband,
    HyperSched,
    JobQueue,
    Lookahead,
    MedianStopping,
    OptunaPruner,
    RandomSearch,
    SamplerSearch,
    SuccessiveHalving,
)
from dagsel.flows.rungs import rung_epochs

VALUES = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=12)


class Trainer:
    """Trains what a flow decides: trial n has the nth value after each epoch."""

    def __init__(self, flow: Flow, values: list[float], n_workers: int = 2) -> None:
        self.flow, self.values, self.n_drawn = flow, values, 0
        self.done: dict[int, int] = {}
        self.stopped: list[Stop] = []
        self.most = 0
        self.run(flow.start(Context(n_workers)))

    def value(self, trial: int) -> float:
        return self.values[trial % len(self.values)]

    def run(self, decisions: list[Decision]) -> None:
        due: dict[int, int] = {}
        while Finish() not in decisions:
            decisions = self.next(decisions, due)
        assert decisions[-1] == Finish()
        self.stopped += [decision for decision in decisions if isinstance(decision, Stop)]
        assert not due.keys() - {stop.trial for stop in self.stopped}

    def next(self, decisions: list[Decision], due: dict[int, int]) -> list[Decision]:
        for decision in decisions:
            match decision:
                case Train(trial, epochs):
                    due[trial] = due.get(trial, 0) + epochs
                case Stop(trial):
                    due.pop(trial, None)
        asks = [decision.n for decision in decisions if isinstance(decision, Ask)]
        self.stopped += [decision for decision in decisions if isinstance(decision, Stop)]
        self.most = max(self.most, len(due))
        if asks:
            new = tuple(range(self.n_drawn, self.n_drawn + sum(asks)))
            self.n_drawn += len(new)
            return self.flow.handle(Asked(new))
        trial = min(due)
        self.done[trial] = self.done.get(trial, 0) + 1
        due[trial] -= 1
        if not due[trial]:
            del due[trial]
        return self.flow.handle(Reported(trial, self.done[trial], self.value(trial), {}, 1.0))

    def extend(self, n_trials: int = 0, max_epochs: int | None = None, n_best: int = 0) -> None:
        self.run(self.flow.handle(Extended(n_trials, max_epochs, n_best, self.ended)))

    @property
    def ended(self) -> tuple[Ended, ...]:
        ranked = sorted(self.done, key=lambda trial: (self.value(trial), trial))
        return tuple(Ended(trial, self.done[trial], self.value(trial)) for trial in ranked)


SEARCHES: dict[str, Callable[..., Any]] = {
    "random": RandomSearch,
    "sampler": SamplerSearch,
    "grid": Grid,
    "pruner": OptunaPruner,
    "early": lambda *given, **how: EarlyStopping(RandomSearch(*given, **how), patience=99),
}


@pytest.mark.parametrize("name", SEARCHES)
@given(
    values=VALUES,
    n_trials=st.integers(1, 6),
    epochs=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    more=st.integers(0, 5),
    n_best=st.integers(0, 8),
    n_concurrent=st.integers(1, 3),
)
def test_the_best_train_to_the_new_end_and_as_many_more_are_drawn(
    name: str,
    values: list[float],
    n_trials: int,
    epochs: tuple[int, int],
    more: int,
    n_best: int,
    n_concurrent: int,
) -> None:
    before, most = epochs[0], sum(epochs)
    places = min(n_concurrent, n_trials)
    world = Trainer(SEARCHES[name](before, n_trials, n_concurrent=places), values)
    best = [it.trial for it in world.ended[:n_best]]
    world.extend(more, most, n_best)
    assert world.n_drawn == n_trials + more
    new = range(n_trials, n_trials + more)
    assert world.done == {
        trial: most if trial in best or trial in new else before for trial in range(n_trials + more)
    }
    assert world.most <= places
    assert world.flow.traits.max_epochs == most
    world.extend(1)  # and once more, with the epochs that it has now
    assert world.done[n_trials + more] == most


@given(values=VALUES, n_trials=st.integers(1, 12), eta=st.integers(2, 3), more=st.integers(1, 9))
def test_asha_promotes_from_what_was_its_last_rung(
    values: list[float], n_trials: int, eta: int, more: int
) -> None:
    """The best 1/η of those that had come so far, and at least one."""
    world = Trainer(ASHA(3, n_trials, reduction_factor=eta), values)
    reached = [it.trial for it in world.ended if it.epochs == 3]
    world.extend(0, 3 + more)
    first = min(3 * eta, 3 + more)
    passed = [trial for trial, n in world.done.items() if n >= first]
    assert sorted(passed) == sorted(reached[: max(1, len(reached) // eta)])
    assert max(world.done.values()) == 3 + more
    rungs = (*rung_epochs(1, 3, eta), *rung_epochs(first, 3 + more, eta))
    assert set(world.done.values()) <= set(rungs)


@given(values=VALUES, n_trials=st.integers(2, 9), more=st.integers(1, 9))
def test_more_trials_let_asha_promote_those_that_were_left_behind(
    values: list[float], n_trials: int, more: int
) -> None:
    """Of all that reached a rung, those of before too, the best 1/η were promoted, at the least."""
    world = Trainer(ASHA(4, n_trials, reduction_factor=2), values)
    world.extend(more)
    assert world.n_drawn == n_trials + more
    at_least = [it.trial for it in world.ended][: (n_trials + more) // 2]
    assert all(world.done[trial] >= 2 for trial in at_least)
    ended = [stop.trial for stop in world.stopped]
    assert len(set(ended)) == n_trials + more


@given(values=VALUES, eta=st.integers(2, 3))
def test_asha_that_stops_trials_judges_those_that_had_completed_as_they_come(
    values: list[float], eta: int
) -> None:
    world = Trainer(ASHA(2, 8, reduction_factor=eta, mode="stopping"), values)
    reached = sorted(trial for trial, n in world.done.items() if n == 2)
    before = list[tuple[float, int]]()
    goes_on = []
    for trial in reached:
        result = (world.value(trial), trial)
        if sum(other < result for other in before) < max(1, (len(before) + 1) // eta):
            goes_on.append(trial)
        before.append(result)
    world.extend(0, 4)
    assert sorted(trial for trial, n in world.done.items() if n > 2) == goes_on


def test_a_median_is_taken_over_the_trials_of_before() -> None:
    world = Trainer(MedianStopping(2, 4, min_trials=3), [1.0, 1.0, 1.0, 1.0, 9.0])
    world.extend(1, 4)
    assert world.done == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1}


def test_what_a_deadline_cut_off_is_drawn_no_more_and_trained_on_if_it_is_among_the_best() -> None:
    flow = RandomSearch(max_epochs=4, n_trials=9, n_concurrent=2)
    flow.start(Context(1))
    flow.handle(Asked((0, 1)))
    flow.handle(Reported(1, 1, 0.5, {}, 1.0))
    flow.handle(DeadlineReached(2.0))
    decided = flow.handle(Extended(1, 4, 1, (Ended(1, 1, 0.5),)))
    assert decided == [Train(1, 3), Ask(1, "random")]
    events: list[Event] = [Asked((2,)), Reported(1, 4, 0.5, {}, 3.0), WorkersChanged(5)]
    decided = [decision for event in events for decision in flow.handle(event)]
    assert decided == [Train(2, 4), Stop(1, "trained to the end", "complete")]


def test_what_a_limit_left_waiting_in_an_extension_is_not_trained_in_the_next_one() -> None:
    flow = RandomSearch(max_epochs=1, n_trials=2, n_concurrent=1)
    flow.start(Context(1))
    for trial in (0, 1):
        flow.handle(Asked((trial,)))
        flow.handle(Reported(trial, 1, 0.5, {}, 1.0))
    ended = (Ended(0, 1, 0.5), Ended(1, 1, 0.5))
    assert flow.handle(Extended(0, 3, 2, ended)) == [Train(0, 2)]
    flow.handle(DeadlineReached(2.0))
    assert flow.handle(Extended(1, None, 0, ended)) == [Ask(1, "random")]


def test_asha_sends_those_on_that_a_deadline_caught_between_two_rungs() -> None:
    flow = ASHA(max_epochs=9, n_trials=4, n_concurrent=4)
    flow.start(Context(1))
    flow.handle(Asked((0, 1, 2, 3)))
    for trial in range(4):
        flow.handle(Reported(trial, 1, float(trial), {}, 1.0))
    flow.handle(Reported(0, 2, 0.0, {}, 2.0))
    flow.handle(DeadlineReached(3.0))
    ended = (Ended(0, 2, 0.0), *(Ended(trial, 1, float(trial)) for trial in (1, 2, 3)))
    assert flow.handle(Extended(0, 9, 0, ended)) == [Train(0, 1)]


def test_what_a_limit_left_waiting_in_an_extension_of_asha_trains_on_once_in_the_next() -> None:
    flow = ASHA(max_epochs=9, n_trials=5, min_epochs=3)
    flow.start(Context(2))
    flow.handle(Asked((0, 1, 2, 3, 4)))
    for trial in range(5):
        flow.handle(Reported(trial, 2, 0.5, {}, 1.0))
    flow.handle(WorkersChanged(1))  # for four trials
    flow.handle(DeadlineReached(2.0))
    ended = tuple(Ended(trial, 2, 0.5) for trial in range(5))
    assert flow.handle(Extended(1, None, 0, ended)) == [Train(trial, 1) for trial in range(4)]
    flow.handle(DeadlineReached(3.0))
    assert flow.handle(Extended(1, None, 0, ended)) == [Train(trial, 1) for trial in (4, 0, 1, 2)]
    assert flow.handle(Reported(4, 3, 0.5, {}, 4.0)) == [Train(3, 1)]
    assert flow.handle(Reported(0, 3, 0.5, {}, 5.0)) == [Ask(1)]


def test_asha_that_stops_trials_sends_one_on_that_had_just_passed_a_rung() -> None:
    flow = ASHA(max_epochs=9, n_trials=1, n_concurrent=1, mode="stopping")
    flow.start(Context(1))
    flow.handle(Asked((0,)))
    assert flow.handle(Reported(0, 1, 0.5, {}, 1.0)) == [Train(0, 2)]
    flow.handle(DeadlineReached(2.0))
    assert flow.handle(Extended(1, None, 0, (Ended(0, 1, 0.5),))) == [Train(0, 2)]


def test_a_trial_that_got_no_better_trains_on_no_more() -> None:
    world = Trainer(EarlyStopping(RandomSearch(4, 3), patience=2), [1.0])
    assert world.done == {0: 3, 1: 3, 2: 3}
    decided = world.flow.handle(Extended(1, 9, 3, world.ended))
    assert decided == [Ask(1, "random")]


CANNOT: list[Flow] = [
    PBT(3, 4, {"x": [0.0]}),
    Hyperband(9),
    SuccessiveHalving(9, 9),
    Hermes(3, 5),
    JobQueue(3),
    SEER("10 min", "60 worker-minutes"),
    HyperSched("10 min", "60 worker-minutes"),
    Lookahead("10 min", "60 worker-minutes"),
]


@pytest.mark.parametrize("flow", CANNOT, ids=lambda flow: type(flow).__name__)
def test_those_that_cannot_go_on_say_so(flow: Flow) -> None:
    assert flow.traits.extends == ()
