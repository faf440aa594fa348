"""What a run was called with is read back as it was, and another flow or part is refused."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import optuna
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from optuna.samplers import CmaEsSampler, NSGAIISampler

import dagsel.flows
from dagsel.errors import RunDirError, SearchError
from dagsel.flow import Context, Decision, Event, Flow, Goal, Traits
from dagsel.flows import ASHA, PBT, ByConvergence, EarlyStopping, Grid, RandomSearch, Range
from dagsel.history.settings import _FORMER_NAMES, Settings, _own_flows, flow_config, flow_name
from dagsel.study.asked import asked_of

SETTINGS = Settings(
    study="s", home=None, sampler="TPESampler", sampler_seed=2**40, direction="maximize",
    metric="accuracy", seed=3, flow="Grid", flow_config={}, data="/d.zarr", data_digest="ab",
    n_shards=4, workload={"class": "a.B", "loss": "f"}, deadline_s=1.5,
)  # fmt: skip
GOALS = (Goal("a", "maximize"), Goal("b", "minimize"))
FLOWS: list[Any] = [
    RandomSearch(max_epochs=2, n_trials=5),
    Grid(max_epochs=1),
    ASHA(max_epochs=9, n_trials=6, mode="stopping", semantics="syne"),
    PBT(max_epochs=3, n_trials=4, mutations={"lr": Range(0.1, 1.0, log=True), "n": [1, 2]}),
]


def asked(sampler: Any = None) -> dict[str, dict[str, str]]:
    study = optuna.create_study(sampler=sampler)
    return asked_of(study, Traits(sampling="study", uses_pruner=True))


@dataclass(frozen=True)
class Mine(Flow):
    """A flow of a user."""

    rungs: tuple[int, ...] = (1, 3)
    state: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def start(self, context: Context) -> list[Decision]:
        return []

    def handle(self, event: Event) -> list[Decision]:
        return []


def test_settings_survive_a_file() -> None:
    text = json.dumps(SETTINGS.to_json() | {"run": "3f9a"})
    assert Settings.from_json(json.loads(text), "/r") == SETTINGS


@pytest.mark.parametrize("change", [{"n_shards": "4"}, {"surprise": 1}, {"direction": "up"}])
def test_a_damaged_one_is_refused_with_its_name(change: dict[str, Any]) -> None:
    version = re.escape(SETTINGS.dagsel)
    with pytest.raises(
        RunDirError, match=rf"^/r/run.json cannot be read: .*; dagsel {version} wrote it: install"
    ):
        Settings.from_json(SETTINGS.to_json() | change, "/r")


@pytest.mark.parametrize("flow", FLOWS, ids=flow_name)
def test_a_flow_of_dagsel_is_made_again_from_its_file(flow: Any) -> None:
    flow.start(Context(2))  # what it has learnt is none of its configuration
    config = json.loads(json.dumps(flow_config(flow)))
    settings = replace(SETTINGS, flow=flow_name(flow), flow_config=config)
    again: Any = settings.make_flow(None)
    assert again == flow
    assert again.state == flow.fresh().state != flow.state
    assert settings.make_flow(flow) == flow
    assert flow_name(flow) in dagsel.flows.__all__


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({}, ""),
        ({"flow": "mine.Flow"}, ", flow=..."),
        ({"home": "sqlite:////d/s.db", "asked": asked()}, ""),
        ({"home": "journal:///d/s.log", "asked": asked(CmaEsSampler())}, ", study=..."),
        ({"asked": asked(NSGAIISampler())}, ", study=..."),
        ({"goals": GOALS, "asked": asked(NSGAIISampler())}, ""),
        ({"home": "postgresql://me:***@host/s"}, ", study=..."),
        ({"home": "none://GrpcStorageProxy"}, ", study=..."),
    ],
)
def test_the_call_that_goes_on_names_all_that_it_needs(change: dict[str, Any], more: str) -> None:
    flow = {"flow": "RandomSearch", "flow_config": flow_config(FLOWS[0])}
    call = replace(SETTINGS, **(flow | change)).resume_call("run")
    assert call == f"dagsel.resume('run', workload=..., space=...{more})"


def test_another_flow_is_refused() -> None:
    settings = replace(SETTINGS, flow="RandomSearch", flow_config=flow_config(FLOWS[0]))
    for other in (RandomSearch(max_epochs=2, n_trials=6), FLOWS[1]):
        with pytest.raises(SearchError, match=r"flow= is \w+ with .* began with RandomSearch"):
            settings.make_flow(other)


def test_a_flow_that_is_not_dagsels_must_be_given() -> None:
    mine: Any = Mine()
    settings = replace(SETTINGS, flow=flow_name(mine), flow_config=flow_config(mine))
    assert settings.flow == f"{__name__}.Mine"
    assert settings.make_flow(mine) == mine
    for name in (settings.flow, "os.system", "flow_name"):
        with pytest.raises(SearchError, match="give the same one with flow="):
            replace(settings, flow=name).make_flow(None)
    with pytest.raises(SearchError, match="give the same one with flow="):
        replace(settings, flow="Grid", flow_config=None).make_flow(None)


@pytest.mark.parametrize(
    ("flow", "holds"),
    [
        (FLOWS[0], True),
        (Mine(), False),
        (EarlyStopping(FLOWS[0], patience=2), True),
        (EarlyStopping(cast(Any, Mine()), patience=2), False),
    ],
)
def test_the_folder_knows_whether_it_holds_the_flow(flow: Any, holds: bool) -> None:
    settings = replace(SETTINGS, flow=flow_name(flow), flow_config=flow_config(flow))
    assert settings.holds_flow == holds
    with contextlib.nullcontext() if holds else pytest.raises(SearchError, match="with flow="):
        settings.make_flow(None)


def test_what_has_no_form_in_json_is_no_configuration() -> None:
    assert flow_config(object()) is None
    assert flow_config(replace(Mine(), rungs=(object(),))) is None  # type: ignore[arg-type]


def test_other_data_and_another_workload_are_refused_and_named() -> None:
    SETTINGS.check_data("ab", "/elsewhere.zarr")
    with pytest.raises(RunDirError, match=r"/e.zarr is not the data set .* \(/d.zarr, .*ab; here"):
        SETTINGS.check_data("cd", "/e.zarr")
    SETTINGS.check_workload({"class": "a.B", "loss": "f"})
    with pytest.raises(RunDirError, match=r": 'loss' was f and is g$"):
        SETTINGS.check_workload({"class": "a.B", "loss": "g"})


def test_a_run_gets_a_flow_of_its_own() -> None:
    flow = ASHA(max_epochs=9, n_trials=4)
    settings = replace(SETTINGS, flow=flow_name(flow), flow_config=flow_config(flow))
    made = settings.make_flow(flow)
    made.start(Context(n_workers=1))
    assert made.state != flow.state


def test_the_priority_of_an_older_run_is_a_flow_around_its_flow() -> None:
    flow = ASHA(max_epochs=9, n_trials=4)
    about = replace(SETTINGS, flow=flow_name(flow), flow_config=flow_config(flow)).to_json()
    settings = Settings.from_json({**about, "run": "3f9a", "priority": "convergence"}, "/r")
    assert settings.make_flow(None) == ByConvergence(flow)
    settings = Settings.from_json({**about, "run": "3f9a", "priority": "flow"}, "/r")
    assert settings.make_flow(None) == flow


WHOLE = {"max_epochs": 3, "n_trials": 9, "n_concurrent": None}
TIMES = {"quantum": "10 s", "max_trials_per_worker": 4, "migrate": True, "aging": None}
FORMER: dict[str, dict[str, Any]] = {  # as dagsel 0.1 wrote them
    "HyperOpt": WHOLE,
    "Lsf": {"flow": {"flow": "HyperOpt", "config": WHOLE}},
    "Slaq": {"max_epochs": 3, "n_trials": 9, **TIMES},
    "Fifo": {"max_epochs": 3, "n_trials": 9},
}


@pytest.mark.parametrize("name", FORMER)
def test_a_flow_is_made_from_the_name_that_it_once_had(name: str) -> None:
    about = replace(SETTINGS, flow=name, flow_config=FORMER[name]).to_json()
    flow: Any = Settings.from_json(about, "/r").make_flow(None)
    assert type(flow).__name__.upper() in (name.upper(), "SAMPLERSEARCH")
    settings = replace(SETTINGS, flow=flow_name(flow), flow_config=flow_config(flow))
    assert settings.make_flow(None) == flow
    inside = {"flow": {"flow": name, "config": FORMER[name]}}
    config = {"flow": {"flow": "ByConvergence", "config": inside}}
    about = replace(SETTINGS, flow="ByConvergence", flow_config=config).to_json()
    settings = Settings.from_json(about, "/r")
    assert settings.make_flow(None) == ByConvergence(ByConvergence(flow))
    assert settings.make_flow(ByConvergence(ByConvergence(flow))) == settings.make_flow(None)
    settings = Settings.from_json({**about, "run": "3f9a", "priority": "convergence"}, "/r")
    assert settings.make_flow(None) == ByConvergence(ByConvergence(ByConvergence(flow)))


def test_every_former_name_is_tried() -> None:
    assert FORMER.keys() == _FORMER_NAMES.keys()


#: What was done to the configuration of a PBT around which ByConvergence goes, and what is named.
DAMAGE: dict[str, tuple[Any, str]] = {
    "a key that is none": ({"populatoin": 3}, "'populatoin' is no argument of PBT"),
    "a text for a number": ({"n_trials": "4"}, r"'n_trials' is '4' \(expected int"),
    "a number that cannot be": ({"n_trials": 1}, "population needs four members or more"),
    "a share above one": ({"quantile": 7.0}, "quantile must be above 0"),
    "no mutations": ({"mutations": []}, "mutations is empty"),
    "mutations that are none": ({"mutations": {"lr": 3}}, "'mutations' is "),
    "None": ({"max_epochs": None}, "'max_epochs' is None"),
}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in another"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_flow_is_refused_with_file_flow_and_field(name: str, inside: bool) -> None:
    change, text = DAMAGE[name]
    config = json.loads(json.dumps(flow_config(FLOWS[3]))) | change
    flow = "PBT"
    if inside:
        flow, config = "ByConvergence", {"flow": {"flow": "PBT", "config": config}}
    settings = replace(SETTINGS, flow=flow, flow_config=config)
    with pytest.raises(RunDirError, match=rf"^/r/run.json: flow_config makes no {flow}: .*{text}"):
        settings.make_flow(None, "/r")


@pytest.mark.parametrize("config", [3, [], "x", {"flow": 3}, {"flow": {"flow": "PBT"}}, {}])
def test_a_wrapper_without_its_flow_is_refused(config: Any) -> None:
    settings = replace(SETTINGS, flow="ByConvergence", flow_config=config)
    with pytest.raises(RunDirError, match="flow_config makes no ByConvergence: .*restore the file"):
        settings.make_flow(None, "/r")


def test_only_a_flow_is_made() -> None:
    settings = replace(SETTINGS, flow="Range", flow_config={"low": 0.0, "high": 1.0})
    with pytest.raises(SearchError, match="cannot hold this Range"):
        settings.make_flow(None)


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings_of_hypothesis(deadline=None)
@given(st.sampled_from(sorted(_own_flows())), json_values, st.data())
def test_any_configuration_makes_a_flow_or_is_refused(name: str, value: Any, data: Any) -> None:
    known = [f.name for f in fields(_own_flows()[name]) if f.init]  # type: ignore[arg-type]
    config = data.draw(st.just(value) | st.dictionaries(st.sampled_from(known), json_values))
    settings = replace(SETTINGS, flow=name, flow_config=config)
    try:
        flow = settings.make_flow(None, "/r")
    except (RunDirError, SearchError) as error:
        assert name in str(error)  # noqa: PT017 - either is right
    else:
        assert flow_name(flow) == name
