"""MO-ASHA: what no other trial of a rung beats goes on; with one metric it is ASHA."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import Ask, Asked, Context, Direction, Finish, Goal, Reported, Stop, Train
from dagsel.flows import ASHA, MOASHA
from dagsel.testing import FlowSuite
from dagsel.testing.world import Tape, World, replay

GOALS = (Goal("f1", "maximize"), Goal("ms", "minimize"))


class TestMOASHA(FlowSuite):
    n_concurrent = 4
    goals = GOALS

    def make_flow(self) -> MOASHA:
        return MOASHA(max_epochs=9, n_trials=12, n_concurrent=4)


class TestMOASHAOfOneMetric(FlowSuite):
    direction = "maximize"

    def make_flow(self) -> MOASHA:
        return MOASHA(max_epochs=5, n_trials=10, reduction_factor=2)


def bare(decisions: Any) -> list[Any]:
    return [(d.trial, d.outcome) if isinstance(d, Stop) else d for d in decisions]


@given(
    st.binary(min_size=40, max_size=200),
    st.sampled_from(["minimize", "maximize"]),
    st.sampled_from([(9, 3), (5, 2)]),
)
def test_with_one_metric_it_decides_as_asha(
    choices: bytes, direction: Direction, rungs: tuple[int, int]
) -> None:
    numbers: dict[str, Any] = {"max_epochs": rungs[0], "reduction_factor": rungs[1]}
    context = Context(n_workers=2, direction=direction)
    tape = Tape(choices)
    world = World(ASHA(n_trials=12, **numbers), context, tape, lambda trial: {}, None, None)
    world.run()
    for step, decisions in replay(MOASHA(n_trials=12, **numbers), context, world.steps):
        assert bare(decisions) == bare(step.decisions)


numbers = st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5, math.inf, -math.inf, math.nan])


def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=15))
def test_what_goes_on_is_beaten_by_nothing_that_does_not(values: list[tuple[float, float]]) -> None:
    n = len(values)
    flow = MOASHA(max_epochs=3, n_trials=n, n_concurrent=n)
    assert flow.start(Context(n_workers=1, direction="maximize", goals=GOALS)) == [Ask(n)]
    flow.handle(Asked(tuple(range(n))))
    promoted: list[int] = []
    for trial, (f1, ms) in enumerate(values):
        decided = flow.handle(Reported(trial, 1, f1, {"f1": f1, "ms": ms, "x": 1.0}, 1.0))
        promoted += [d.trial for d in decided if isinstance(d, Train)]
        there = [math.inf if not math.isfinite(v) else v for v in (-f1, ms)]
        values[trial] = (there[0], there[1])
        left = [t for t in range(trial + 1) if t not in promoted]
        for train in decided:
            if isinstance(train, Train):
                assert not any(beats(values[t], values[train.trial]) for t in left)
                better = [t for t in range(trial + 1) if beats(values[t], values[train.trial])]
                assert len(better) < (trial + 1) // 3
                is_finite = all(map(math.isfinite, values[train.trial]))
                assert is_finite or not any(all(map(math.isfinite, values[t])) for t in left)


def test_what_lies_apart_goes_on_first() -> None:
    flow = MOASHA(max_epochs=3, n_trials=6, n_concurrent=6)
    flow.start(Context(n_workers=1, goals=(Goal("a", "minimize"), Goal("b", "minimize"))))
    flow.handle(Asked(tuple(range(6))))
    values = [(0.2, 8.0), (0.1, 9.0), (0.3, 7.0), (0.9, 1.0), (0.5, 9.5), (0.95, 9.9)]
    told: list[Any] = []
    for trial, (a, b) in enumerate(values):
        told += flow.handle(Reported(trial, 1, a, {"a": a, "b": b}, 1.0))
    assert told == [Train(1, 2), Train(3, 2)]  # the ends of the front, 3 is not next to 1


def test_what_is_pruned_is_told_its_place() -> None:
    flow = MOASHA(max_epochs=3, n_trials=3, n_concurrent=3)
    flow.start(Context(n_workers=1, goals=GOALS, direction="maximize"))
    flow.handle(Asked((0, 1, 2)))
    for trial, f1 in enumerate((0.5, 0.9, 0.7)):
        flow.handle(Reported(trial, 1, f1, {"f1": f1, "ms": 1.0}, 1.0))
    assert flow.handle(Reported(1, 3, 0.9, {"f1": 0.9, "ms": 1.0}, 1.0)) == [
        Stop(1, "trained to the last rung, 3 epochs", "complete"),
        Stop(2, "rung 1: place 2 is not among the best 1 of 3"),
        Stop(0, "rung 1: place 3 is not among the best 1 of 3"),
        Finish(),
    ]


@pytest.mark.parametrize("bad", [{"min_epochs": 10}, {"reduction_factor": 1}, {"n_trials": 0}])
def test_what_makes_no_rungs_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(SearchError, match=next(iter(bad))):
        MOASHA(**{"max_epochs": 9, "n_trials": 9, **bad})
