"""A steered flow: whatever the user commands and when, its decisions are legal and it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.driver.steered import BY_USER, Steered
from dagsel.errors import SearchError
from dagsel.flow import (
    Add,
    Ask,
    Asked,
    Clone,
    Commanded,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Flow,
    Reported,
    Stop,
    Train,
    TrialFailed,
    load_state,
    save_state,
)
from dagsel.flows import ASHA, PBT, Hyperband, RandomSearch, Range
from dagsel.flows.wrapper import Wrapper
from dagsel.steering import AddTrial, FinishSearch, StopTrial, UserCommand
from dagsel.testing.flows import FlowSuite
from dagsel.testing.world import LiveTrial, Tape, World

FLOWS: dict[str, Callable[[], Flow]] = {
    "random search": lambda: RandomSearch(max_epochs=2, n_trials=5, n_concurrent=3),
    "asha": lambda: ASHA(max_epochs=4, n_trials=5, reduction_factor=2, n_concurrent=3),
    "hyperband": lambda: Hyperband(max_epochs=4, reduction_factor=2),
    "pbt": lambda: PBT(max_epochs=3, n_trials=4, mutations={"x": Range(0.0, 1.0)}),
}
TAPES = st.binary(min_size=40, max_size=240)


class TestWithoutCommands(FlowSuite):
    def make_flow(self) -> Flow:
        return Steered(RandomSearch(max_epochs=2, n_trials=5, n_concurrent=3))


@dataclass
class Heard(Wrapper):
    """Notes what the inner search is told."""

    events: list[Event] = field(default_factory=list, init=False, repr=False, compare=False)

    def handle(self, event: Event) -> list[Decision]:
        self.events.append(event)
        return self.flow.handle(event)


@dataclass(slots=True)
class Commanding(World):
    """A world in which a user gives commands at any time, as many as the tape says."""

    given: list[UserCommand] = field(default_factory=list)
    adds: list[Add] = field(default_factory=list)

    def _next(self) -> Event | None:
        # The runner takes a command when all that was asked for is drawn.
        if not self.waiting and not self.adds and self.tape.choose(4) == 3 and len(self.given) < 9:
            command = self._command()
            self.given.append(command)
            return Commanded(command, f"{len(self.given)}", self.seconds)
        if self.adds:
            self.adds.pop()
            number = 100 + len(self.given)
            self.live[number] = LiveTrial(number)
            return Asked((number,), configs=({"x": 0.5},))
        return World._next(self)

    def _command(self) -> UserCommand:
        live = sorted(self.live)
        sources = [number for number in live if self.live[number].epochs]
        match self.tape.choose(12):
            case 0:
                return FinishSearch()
            case 1 | 2 | 3 | 4 | 5 if live:
                return StopTrial(live[self.tape.choose(len(live))])
            case 6 | 7 | 8 if sources:
                source = sources[self.tape.choose(len(sources))]
                return AddTrial({"x": 0.5}, 1 + self.tape.choose(3), source)
        return AddTrial({"x": 0.5}, 1 + self.tape.choose(3))

    def _perform(self, event: Event | None, answer: list[Decision]) -> None:
        if isinstance(event, Commanded) and isinstance(event.command, FinishSearch):
            assert Finish() in answer
            for trial in self.live.values():
                trial.left = 0  # it ends whatever trains
            self.waiting.clear()
        World._perform(self, event, answer)

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Add():  # it is answered before anything else happens
                self.adds.append(decision)
            case Clone(source, target) if not self.live[target].epochs:
                assert self.live[source].epochs, f"{decision}: the source has not reported"
                assert not self.live[target].left
            case _:
                World._apply(self, decision)


def play(flow: Flow, tape: Tape) -> Commanding:
    world = Commanding(flow, Context(2), tape, lambda trial: {"x": trial % 7 / 7})
    world.run()
    return world


@pytest.mark.parametrize("name", FLOWS)
@given(choices=TAPES)
def test_a_search_ends_whatever_is_commanded_and_does_what_is(name: str, choices: bytes) -> None:
    heard = Heard(FLOWS[name]())
    world = play(Steered(heard), Tape(choices))
    for step in world.steps:
        if isinstance(step.event, Commanded) and isinstance(step.event.command, StopTrial):
            trial = step.event.command.trial
            assert step.decisions[0] == Stop(trial, BY_USER)
            is_theirs = trial >= 100
            was_told = TrialFailed(trial, BY_USER) in heard.events
            is_alone = isinstance(world.flow, Steered) and world.flow.own.has_finished
            assert not (was_told and is_theirs)
            assert was_told or is_theirs or is_alone
    added = [c for c in world.given if isinstance(c, AddTrial)]
    assert sum(isinstance(d, Add) for step in world.steps for d in step.decisions) == len(added)
    numbers = {e.trial for e in heard.events if hasattr(e, "trial")}
    assert all(number < 100 for number in numbers), "the search hears of what is not its own"


@pytest.mark.parametrize("name", FLOWS)
@given(choices=TAPES)
def test_its_state_goes_through_json_between_any_two_events(name: str, choices: bytes) -> None:
    tape = Tape(choices)
    world = play(Steered(FLOWS[name]()), tape)
    flow: Any = Steered(FLOWS[name]())
    flow.start(world.context)
    for step in world.steps[1:]:
        text = json.dumps(save_state(flow))
        flow = Steered(FLOWS[name]())
        load_state(flow, json.loads(text))
        assert step.event is not None
        assert tuple(flow.handle(step.event)) == step.decisions


def test_the_search_ends_with_the_last_trial_of_the_user() -> None:
    flow = Steered(RandomSearch(max_epochs=1, n_trials=1))
    assert flow.start(Context(1)) == [Ask(1, "random")]
    flow.handle(Asked((0,)))
    flow.handle(Commanded(AddTrial({}, 2), "a", 0.0))
    flow.handle(Asked((1,)))
    report = Reported(0, 1, 0.5, {}, 1.0)
    assert flow.handle(report) == [Stop(0, "trained to the end", "complete")]
    assert flow.handle(replace(report, trial=1)) == []
    last = flow.handle(replace(report, trial=1, epoch=2))
    assert last == [Stop(1, "trained to the end", "complete"), Finish()]


def test_a_trial_that_the_search_adds_is_not_taken_for_one_of_the_user() -> None:
    class Adds(Wrapper):
        def start(self, context: Context) -> list[Decision]:
            return [Add({"x": 0.5})]

    flow = Steered(Adds(RandomSearch(max_epochs=3, n_trials=1)))
    assert flow.start(Context(1)) == [Add({"x": 0.5})]
    flow.handle(Commanded(AddTrial({"x": 0.1}, 2), "a", 0.0))
    assert flow.handle(Asked((0,))) == [Train(0, 3)]
    assert flow.handle(Asked((1,))) == [Train(1, 2)]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "got None"),
        (Finish(), r"got Finish\(\)"),
        (["stop"], "got 'stop' in it"),
        ([Finish], "got the class Finish in it"),
    ],
)
def test_an_answer_that_is_no_list_of_decisions_is_named(answer: Any, told: str) -> None:
    class Mine(Wrapper):
        def start(self, context: Context) -> list[Decision]:
            return [] if context.n_workers == 1 else answer

        def handle(self, event: Event) -> Any:
            return answer

    flow = Steered(Mine(RandomSearch(max_epochs=1, n_trials=1)))
    words = r"must return a list of decisions, such as \[Train\(trial, epochs\)\], "
    with pytest.raises(SearchError, match=rf"^Mine\.start\(context\) {words}.*{told}$"):
        flow.start(Context(n_workers=2))
    flow.start(Context(n_workers=1))
    for event in (Asked((0,)), DeadlineReached(3.0)):
        name = type(event).__name__
        with pytest.raises(SearchError, match=rf"^Mine\.handle\({name}\) {words}.*{told}$"):
            flow.handle(event)


@pytest.mark.parametrize(
    ("decision", "told"),
    [
        (Train(0, cast(Any, 1.5)), r"epochs=1\.5.*decided: expected int, got 1\.5"),
        (Train(0, -1), "epochs=-1.*: epochs are 0 or more"),
        (Stop(0, "late", cast(Any, "great")), "'great'.*: expected .*'complete', 'pruned'"),
        (Stop(0, cast(Any, None)), "expected str, got None"),
    ],
)
def test_a_decision_that_cannot_be_is_named_with_who_made_it(decision: Any, told: str) -> None:
    class Mine(Wrapper):
        def handle(self, event: Event) -> Any:
            return [decision]

    flow = Steered(Mine(RandomSearch(max_epochs=1, n_trials=1)))
    flow.start(Context(n_workers=2))
    with pytest.raises(SearchError, match=rf"^Mine\.handle\(Asked\) returns .*{told}"):
        flow.handle(Asked((0,)))
