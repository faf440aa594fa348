"""What procedures say of arguments that others call otherwise, of missing and of doubled ones."""

from __future__ import annotations

import functools
import inspect
import pickle
import re
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
import pytest

import dagsel.flows
from dagsel.errors import SearchError
from dagsel.flow import Context, Decision, Event, Flow
from dagsel.flow.argument_names import NAMES, NEEDED, SEARCH_NAMES, elsewhere
from dagsel.flows import ASHA, PBT, EarlyStopping, Hyperband, MedianStopping, RandomSearch

from .test_laws_constructors import FLOWS, SCALING, made

CONCRETE = [flow for flow in FLOWS if not inspect.isabstract(flow)]
OF_A_SEARCH = inspect.signature(dagsel.optimize).parameters
#: What a hint may name.
AROUND = {
    "dagsel": dagsel,
    "optuna": optuna,
    "flow": ASHA(max_epochs=9, n_trials=20),
    "study": optuna.create_study(),
}


def needed(flow: type[Flow]) -> list[str]:
    parameters = inspect.signature(flow).parameters.values()
    return [one.name for one in parameters if one.default is one.empty]


def arguments(flow: type[Flow]) -> dict[str, Any]:
    return {name: eval(NEEDED[name], dict(AROUND)) for name in needed(flow)} | SCALING.get(flow, {})


def check_hint(flow: type[Flow], told: str) -> None:
    """Write what a hint says, and see that it is taken."""
    if told.endswith("; leave it out"):
        return
    found = re.search(r"write (.+?)(, (which|the|before) .*| for .*)?$", told)
    assert found, told
    is_of_a_search = told.endswith(" for dagsel.optimize")
    argument = re.fullmatch(r"(\w+)=(.*)", found[1])
    if argument is None:
        eval(found[1], dict(AROUND))
        return
    name, value = argument.groups()
    assert name in (OF_A_SEARCH if is_of_a_search else inspect.signature(flow).parameters)
    if value:
        made_of_it = eval(value, dict(AROUND))
        if not is_of_a_search:
            flow(**{**arguments(flow), name: made_of_it})


@pytest.mark.parametrize("flow", CONCRETE, ids=lambda flow: flow.__name__)
def test_each_hint_can_be_written(flow: type[Flow]) -> None:
    known = inspect.signature(flow).parameters
    told = elsewhere(known)
    for name in told.keys() - known.keys():
        with pytest.raises(SearchError) as caught:
            flow(**{**arguments(flow), name: 1})
        assert str(caught.value) == f"{flow.__name__} takes no {name}: {told[name]}"
        assert len(str(caught.value)) < 200
    for text in {told[name] for name in told.keys() - known.keys()}:
        check_hint(flow, text)


def test_each_name_is_a_parameter_of_a_procedure_or_of_a_search() -> None:
    parameters = [inspect.signature(flow).parameters for flow in CONCRETE]
    assert NAMES.keys() <= {name for names in parameters for name in names}
    assert SEARCH_NAMES.keys() <= OF_A_SEARCH.keys()


SEER, JobQueue = dagsel.flows.SEER, dagsel.flows.JobQueue
TOLD: list[tuple[Any, dict[str, Any], str]] = [
    (PBT, {"population_size": 4}, "PBT takes no population_size: write n_trials=$"),
    (ASHA, {"max_t": 9}, "ASHA takes no max_t: write max_epochs=$"),
    (ASHA, {"brackets": 2}, r"write dagsel\.flows\.Hyperband\(max_epochs=9\), which has them$"),
    (ASHA, {"patience": 5}, r"write dagsel\.flows\.EarlyStopping\(flow, patience=5, min_delta="),
    (ASHA, {"deadline": "10 min"}, "no deadline: write deadline= for dagsel.optimize$"),
    (ASHA, {"grace_period": 1}, "write min_epochs=$"),
    (MedianStopping, {"grace_period": 1}, "write grace_epochs=$"),
    (RandomSearch, {"grace_period": 1}, r"write dagsel\.flows\.ASHA\(.*, which takes it$"),
    (Hyperband, {"R": 9, "eta": 3}, "no R: write max_epochs=; and no eta: write reduction_fact"),
    (Hyperband, {"n_brackets": 3}, "max_epochs, min_epochs and reduction_factor say how many; le"),
    (SEER, {"n_trials": 9}, "deadline and budget say how many; leave it out$"),
    (SEER, {"timeout": 60}, "SEER takes no timeout: write deadline=$"),
    (EarlyStopping, {"max_epochs": 9}, r"write flow=dagsel\.flows\.ASHA\(.*, which takes it$"),
    (EarlyStopping, {"monitor": "val_loss"}, "write metric= for dagsel.optimize$"),
    (JobQueue, {"epochs": 9}, r"says its own; write dagsel\.flows\.Grid\(max_epochs=9"),
    (dagsel.flows.Grid, {"param_grid": {}}, "write space= for dagsel.optimize$"),
    (Hyperband, {"mode": "max"}, r"no mode: write study=optuna\.create_study\(direction="),
]  # fmt: skip


@pytest.mark.parametrize(("flow", "given", "told"), TOLD)
def test_what_others_call_otherwise_is_said_with_what_to_write(
    flow: Any, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(SearchError, match=told):
        flow(**given)


def test_a_mode_that_is_a_direction_is_the_studys() -> None:
    told = (
        r'^mode=.max. is a direction, and .* study=optuna.create_study\(direction="maximize"\) for'
    )
    with pytest.raises(SearchError, match=told):
        ASHA(max_epochs=9, n_trials=20, mode="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("flow", CONCRETE, ids=lambda flow: flow.__name__)
def test_what_a_procedure_lacks_is_said_with_how_it_is_written(flow: type[Flow]) -> None:
    whole = arguments(flow)
    flow(**whole)
    for name in needed(flow):
        rest: dict[str, Any] = {key: value for key, value in whole.items() if key != name}
        if rest:
            with pytest.raises(SearchError) as caught:
                flow(**rest)
            assert str(caught.value) == (
                f"{flow.__name__} needs {name}: write {name}={NEEDED[name]}"
            )
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        flow(**whole, colour="red")


def test_an_argument_by_its_place_and_by_its_name_is_said() -> None:
    told = r"^RandomSearch got max_epochs twice, .*: write RandomSearch\(max_epochs=\.\.\., n_tria"
    with pytest.raises(SearchError, match=told):
        RandomSearch(4, max_epochs=2)  # type: ignore[misc]
    with pytest.raises(SearchError, match=r"write EarlyStopping\(flow=\.\.\., patience=\.\.\.\)$"):
        EarlyStopping(5, flow=ASHA(9, 9))  # type: ignore[misc, arg-type]


@dataclass
class OfOnesOwn(Flow):
    """A procedure whose parameters are called as others call them."""

    num_samples: int
    metric: str = "loss"
    state: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def start(self, context: Context) -> list[Decision]:
        return []

    def handle(self, event: Event) -> list[Decision]:
        return []


class Plain(RandomSearch):
    """A procedure that passes on what it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.max_t = kwargs.pop("max_t")
        super().__init__(*args, **kwargs)


def test_a_procedure_of_ones_own_has_the_names_that_it_likes() -> None:
    own = OfOnesOwn(num_samples=3, metric="f1")
    assert repr(own) == "OfOnesOwn(num_samples=3, metric='f1')"
    assert replace(own, num_samples=4) == OfOnesOwn(4, "f1")
    assert own.fresh() == own == pickle.loads(pickle.dumps(own))
    assert list(inspect.signature(OfOnesOwn).parameters) == ["num_samples", "metric"]
    assert Plain(max_t=3, max_epochs=9).max_t == 3
    with pytest.raises(SearchError, match="OfOnesOwn needs num_samples: write num_samples="):
        OfOnesOwn(metric="f1")  # type: ignore[call-arg]
    with pytest.raises(SearchError, match="OfOnesOwn takes no seed: write seed= for dagsel"):
        OfOnesOwn(3, seed=1)  # type: ignore[call-arg]


def test_what_is_put_around_a_procedure_may_give_arguments() -> None:
    class Configured(ASHA):
        @functools.wraps(ASHA.__init__)  # type: ignore[misc]
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **{"n_trials": 7, **given})

    assert Configured(max_epochs=9).n_trials == 7


@pytest.mark.parametrize("flow", CONCRETE, ids=lambda flow: flow.__name__)
def test_a_procedure_is_pickled_as_it_is(flow: type[Flow]) -> None:
    flow_made = made(flow)
    assert pickle.loads(pickle.dumps(flow_made)) == flow_made
