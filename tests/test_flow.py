"""Decisions, events and states survive JSON, whatever the floats; what is none of them is refused.

A context's loss ranks what is not finite last, in both directions. What lacks a part of a flow is
refused by each call that takes a flow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dagsel
from dagsel.errors import SearchError
from dagsel.flow import (
    DECISIONS,
    EVENTS,
    Ask,
    Asked,
    Clone,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Reported,
    Stop,
    Train,
    Traits,
    TrialFailed,
    WorkersChanged,
    load_state,
    save_state,
)
from dagsel.flows import Grid
from dagsel.simulation import PowerLaw, SimulatedCluster, simulate
from dagsel.testing.synthetic import SyntheticWorkload

naturals = st.integers(0, 2**40)
numbers = st.floats()
configs = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=4,
    ),
    max_size=3,
)
decisions: st.SearchStrategy[Decision] = st.one_of(
    st.builds(Ask, naturals, st.sampled_from(["study", "random", "grid"])),
    st.builds(Train, naturals, naturals, numbers),
    st.builds(Stop, naturals, st.text(), st.sampled_from(["complete", "pruned"])),
    st.builds(Clone, naturals, naturals, configs),
    st.just(Finish()),
)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        Asked,
        st.lists(naturals).map(tuple),
        st.booleans(),
        st.lists(configs, max_size=3).map(tuple),
    ),
    st.builds(
        Reported,
        naturals,
        naturals,
        numbers,
        st.dictionaries(st.text(), numbers),
        numbers,
        st.booleans(),
    ),
    st.builds(TrialFailed, naturals, st.text()),
    st.builds(WorkersChanged, naturals),
    st.builds(DeadlineReached, numbers),
)


def same(first: Any, second: Any) -> bool:
    """Compare by text: NaN is NaN, and every float is written to the bit."""
    return type(first) is type(second) and repr(first) == repr(second)


@given(decisions)
def test_a_decision_comes_back(decision: Decision) -> None:
    assert same(DECISIONS.decode(json.loads(json.dumps(DECISIONS.encode(decision)))), decision)


@given(events)
def test_an_event_comes_back(event: Event) -> None:
    assert same(EVENTS.decode(json.loads(json.dumps(EVENTS.encode(event)))), event)


@given(decisions, events)
def test_a_decision_is_no_event(decision: Decision, event: Event) -> None:
    with pytest.raises(ValueError, match="is none of"):
        EVENTS.decode(DECISIONS.encode(decision))
    with pytest.raises(ValueError, match="is none of"):
        DECISIONS.decode(EVENTS.encode(event))


@pytest.mark.parametrize("decode", [DECISIONS.decode, EVENTS.decode])
@pytest.mark.parametrize(
    "bad",
    [
        None,
        3,
        "Finish",
        [],
        [["is", "Finish"]],
        {},
        {"is": None},
        {"is": ["Finish"]},
        {"is": "Flow"},
        {"is": "Finish", "why": "x"},
        {"is": "Train", "trial": 1},
        {"is": "Train", "trial": "1", "epochs": 2},
        {"is": "Train", "trial": True, "epochs": 2},
        {"is": "Stop", "trial": 1, "reason": "x", "outcome": "failed"},
        {"is": "Asked", "trials": 3},
        {"is": "Asked", "trials": [1], "configs": [3]},
        {"is": "Clone", "source": 1, "target": 2, "config": [[1, 2, 3]]},
        {"is": "Reported", "trial": 1, "epoch": 1, "value": None, "metrics": {}, "seconds": 1},
    ],
    ids=str,
)
def test_what_is_neither_is_refused(decode: Any, bad: Any) -> None:
    with pytest.raises(ValueError):
        decode(bad)


def test_a_state_is_given_to_another_flow() -> None:
    flow, other = Grid(max_epochs=2), Grid(max_epochs=2)
    flow.start(Context(n_workers=1))
    flow.handle(Asked((0, 1, 2, 3)))
    load_state(other, json.loads(json.dumps(save_state(flow))))
    assert other.state == flow.state
    assert other.state.epochs is not flow.state.epochs
    with pytest.raises(ValueError, match="has no rungs"):
        load_state(other, {"rungs": []})


@given(st.floats(allow_nan=False, allow_infinity=False), numbers)
def test_a_finite_value_has_the_smaller_loss(finite: float, value: float) -> None:
    for direction, sign in (("minimize", 1.0), ("maximize", -1.0)):
        context = Context(1, direction)  # type: ignore[arg-type]
        assert context.loss(finite) == sign * finite
        assert context.loss(value) == (sign * value if math.isfinite(value) else math.inf)
        assert context.loss(finite) < context.loss(math.nan)


def space(trial: Any) -> dict[str, float]:
    return {"x": trial.suggest_float("x", 0, 1)}


CALLS: dict[str, Callable[[Any], Any]] = {
    "optimize": lambda flow: dagsel.optimize(
        optuna.create_study(),
        SyntheticWorkload(),
        "memory://none.zarr",
        space=space,
        flow=flow,
        metric="value",
    ),
    "simulate": lambda flow: simulate(flow, PowerLaw(1.0), SimulatedCluster(2), space=space),
    "preview": lambda flow: dagsel.preview(flow, epoch_seconds=1.0, n_workers=2),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("missing", ["traits", "fresh", "state", "handle"])
def test_a_flow_without_a_member_is_refused_by_its_name(call: str, missing: str) -> None:
    """A class that looks like a flow but does not inherit `Flow` has no defaults."""
    members = {name: getattr(Grid, name) for name in ("fresh", "start", "handle")}
    whole = {**members, "traits": Traits(), "state": None, "max_epochs": 1, "sampling": "grid"}
    likeness = type("Likeness", (), {name: it for name, it in whole.items() if name != missing})
    with pytest.raises(SearchError, match=f"Likeness has no {missing}: .*inherit dagsel.flow.Flow"):
        CALLS[call](likeness())


@pytest.mark.parametrize("call", CALLS)
def test_traits_of_another_type_are_refused(call: str) -> None:
    class Boasts(Grid):
        traits = {"max_epochs": 3}  # type: ignore[assignment]  # noqa: RUF012

    with pytest.raises(SearchError, match=r"Boasts.traits must be dagsel.flow.Traits, got {'max_e"):
        CALLS[call](Boasts(max_epochs=3))
    assert (Grid(3).traits.max_epochs, Grid(3).traits.sampling) == (3, "grid")
