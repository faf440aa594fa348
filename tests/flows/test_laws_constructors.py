"""Laws of the constructors of flows: what they take, and when two flows are alike."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import numpy as np
import pytest

import dagsel.flows
import dagsel.flows.baselines
from dagsel.errors import SearchError
from dagsel.flow import Asked, Context, DeadlineReached, Finish, Flow, Tick, WorkersChanged
from dagsel.flows import ASHA, SEER, HyperSched, Lookahead, Marble, Range
from dagsel.flows.baselines import ElasticGrid, ElasticHyperband, MarginalGain, Optimus
from dagsel.planning.scaling import Scaling

FLOWS = [
    found
    for room in (dagsel.flows, dagsel.flows.baselines)
    for found in (getattr(room, name) for name in room.__all__)
    if isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, "handle")
]
ARGUMENTS: dict[str, Any] = {
    "deadline": "10 min",
    "budget": "80 worker-minutes",
    "max_epochs": 4,
    "n_trials": 4,
    "mutations": {"lr": Range(0.001, 1.0)},
    "flow": ASHA(max_epochs=4, n_trials=4),
}
PROFILE = {"scaling": {"a": Scaling({1: 1.0, 2: 1.8})}}
SCALING: dict[Any, Any] = dict.fromkeys((Marble, MarginalGain, Optimus), PROFILE)


def documented(flow: type[Flow]) -> list[str]:
    """The names in the section on parameters of the first docstring that has one."""
    text = next(base.__doc__ for base in flow.__mro__ if "Parameters\n" in (base.__doc__ or ""))
    section = re.split(r"\n\n? *(?:Raises|Examples|Notes|Returns)\n", inspect.cleandoc(text or ""))[
        0
    ]
    lines = section.split("Parameters\n")[1].splitlines()[1:]
    return [name.strip() for line in lines if line[:1].strip() for name in line.split(",")]


def made(flow: type[Flow], **changes: Any) -> Flow:
    parameters = inspect.signature(flow).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty]
    return flow(**{name: ARGUMENTS[name] for name in needed} | SCALING.get(flow, {}) | changes)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_a_flow_takes_what_its_docstring_names_and_nothing_else(flow: type[Flow]) -> None:
    assert sorted(inspect.signature(flow).parameters) == sorted(documented(flow))


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_a_flow_that_has_begun_equals_one_that_has_not(flow: type[Flow]) -> None:
    begun, fresh = made(flow), made(flow)
    assert begun == fresh
    begun.start(Context(n_workers=2))
    assert begun == fresh
    assert repr(begun) == repr(fresh)


@pytest.mark.parametrize("flow", [SEER, HyperSched, ElasticHyperband])
@pytest.mark.parametrize("factor", [1, 0, -2, 1.5, True, "3"])
def test_a_reduction_factor_that_reduces_nothing_is_refused(flow: Any, factor: Any) -> None:
    with pytest.raises(SearchError, match="reduction_factor"):
        flow("10 min", "80 worker-minutes", reduction_factor=factor)


WRONG = (None, "3", 2.5, 0, -1, True, float("nan"), [3], object)
WHOLE = [
    (flow, name)
    for flow in FLOWS
    for name, one in inspect.signature(flow).parameters.items()
    if not inspect.isabstract(flow) and re.match(r"int\b", one.annotation)
]


@pytest.mark.parametrize(
    ("flow", "name"), WHOLE, ids=lambda it: it if isinstance(it, str) else it.__name__
)
def test_a_count_is_a_whole_number_also_one_of_numpy(flow: Any, name: str) -> None:
    parameter = inspect.signature(flow).parameters[name]
    for value in WRONG:
        if value is not None or "None" not in parameter.annotation:
            with pytest.raises(SearchError, match=name):
                made(flow, **{name: value})
    assert made(flow, **{name: np.int64(4)}) == made(flow, **{name: 4})


AROUND = [
    flow
    for flow in FLOWS
    if "flow" in inspect.signature(flow).parameters and not inspect.isabstract(flow)
]


@pytest.mark.parametrize("flow", AROUND, ids=lambda flow: flow.__name__)
@pytest.mark.parametrize("inner", [None, "ASHA", ASHA])
def test_what_is_no_search_has_no_search_around_it(flow: Any, inner: Any) -> None:
    with pytest.raises(SearchError, match=f"{flow.__name__} goes around a search"):
        flow(inner, **SCALING.get(flow, {}))


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_what_may_be_given_without_its_name_is_what_comes_first(flow: type[Flow]) -> None:
    """A parameter that some search takes by name alone, no search takes by its place later on."""
    parameters = list(inspect.signature(flow).parameters.values())
    kinds = [one.kind is inspect.Parameter.KEYWORD_ONLY for one in parameters]
    assert kinds == sorted(kinds)
    by_name = {"quantum", "aging", "migrate", "by", "epochs_by", "switch_s", "interval_s"}
    by_name |= {"price_per_worker_hour", "normalize", "growth", "milestones", "min_stage"}
    for one, is_by_name in zip(parameters, kinds, strict=True):
        assert is_by_name or one.name not in by_name


@pytest.mark.parametrize("flow", [SEER, HyperSched, Lookahead, ElasticHyperband, ElasticGrid])
def test_a_search_that_is_over_decides_nothing_any_more(flow: type[Flow]) -> None:
    over = made(flow)
    over.start(Context(n_workers=2))
    assert Finish() in over.handle(DeadlineReached(600.0))
    for event in (WorkersChanged(3), DeadlineReached(601.0), Asked((0, 1)), Tick(602.0)):
        assert over.handle(event) == []
