"""The world in which FlowSuite plays: what may happen to a flow there does happen."""

from __future__ import annotations

import random

import pytest

from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Extended,
    Paused,
    Reported,
    Tick,
    Train,
    TrialFailed,
    WorkersChanged,
)
from dagsel.flows import RandomSearch
from dagsel.flows.baselines import MarginalGain
from dagsel.planning.scaling import Scaling
from dagsel.testing.world import Tape, World
from tests.flows.test_suite_bites import Halving, InTurn


def worlds(flow: type[Halving | InTurn]) -> list[World]:
    """Play a hundred times."""
    played = []
    for seed in range(100):
        tape = Tape(random.Random(seed).randbytes(120))
        played.append(World(flow(), Context(n_workers=2), tape, lambda trial: {}))
        played[-1].run()
    return played


def failures(world: World) -> set[str]:
    """What the trials that failed were doing."""
    rests, begun, found = set[int](), set[int](), set[str]()
    for step in world.steps:
        match step.event:
            case Paused(trial):
                rests.add(trial)
            case TrialFailed(trial) if trial in rests:
                found.add("rests")
            case TrialFailed(trial):
                found.add("trains" if trial in begun else "is new")
        for decision in step.decisions:
            if isinstance(decision, Train):
                rests.discard(decision.trial)
                begun.add(decision.trial)
    return found


@pytest.mark.parametrize(
    ("flow", "whens"), [(Halving, {"trains"}), (InTurn, {"rests", "trains", "is new"})]
)
def test_a_trial_may_fail_whatever_it_does(flow: type[Halving | InTurn], whens: set[str]) -> None:
    assert set().union(*map(failures, worlds(flow))) == whens


def meanwhile(world: World) -> set[type]:
    """Return what was told between an `Ask` and its answer."""
    found, asks = set[type](), 0
    for step in world.steps:
        if isinstance(step.event, Asked):
            asks -= 1
        elif asks:
            found.add(type(step.event))
        asks += sum(isinstance(decision, Ask) for decision in step.decisions)
    return found


def test_what_happens_together_with_what_led_to_an_ask_is_told_before_its_answer() -> None:
    found = set[type]()
    for seed in range(99):
        search = RandomSearch(max_epochs=2, n_trials=9, n_concurrent=3)
        flow = MarginalGain(search, {"a": Scaling({2: 1.8})}, interval_s=5.0)
        tape = Tape(random.Random(seed).randbytes(120))
        world = World(flow, Context(3), tape, lambda trial: {"architecture": "a"}, deadline=seed)
        world.run()
        found |= meanwhile(world)
        assert isinstance(world.steps[1].event, Asked), "the first one is answered at once"
    assert found == {DeadlineReached, Reported, Tick, TrialFailed, WorkersChanged}


def test_a_limit_may_end_a_search_that_was_extended() -> None:
    world = World(
        RandomSearch(max_epochs=1, n_trials=2), Context(n_workers=2), Tape(bytes(40)), lambda _: {}
    )
    world.run()
    world.extend(0, 3, 2, deadline=2)
    *_, extended, first, second, last = [step.event for step in world.steps]
    assert isinstance(extended, Extended)
    assert isinstance(first, Reported)
    assert isinstance(second, Reported)
    assert isinstance(last, DeadlineReached)
