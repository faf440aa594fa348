"""The world in which FlowSuite plays: what may happen to a flow there does happen."""

from __future__ import annotations

import random

import pytest

from dagsel.flow import Context, Paused, Train, TrialFailed
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
