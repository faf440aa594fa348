"""Choices that have no form in JSON are drawn, told, and found again by another process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import dagsel
from dagsel.errors import SearchError
from dagsel.flows import Grid, RandomSearch, SamplerSearch
from dagsel.study import StudyDriver
from dagsel.study.labels import labels
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize


class Relu:
    """A class that a configuration holds."""


CHOICES: Any = [Relu, len, (1, 2), "text", None, 3]


@pytest.fixture(autouse=True)
def optuna_warns_of_persistent_storages() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Choices for a categorical distribution")
        yield


def space(trial: optuna.Trial) -> dict[str, Any]:
    act = trial.suggest_categorical("act", CHOICES)
    return {"act": act, "x": trial.suggest_int("x", 0, 9)}


def all_of_it(trial: optuna.Trial) -> dict[str, Any]:
    space(trial)
    return trial.params


def value(config: Any, epoch: int) -> float:
    """No two are equal: of equal ones Optuna's study in memory has the first that ended."""
    return CHOICES.index(config["act"]) + config["x"] / 100 + epoch / 10_000


@given(st.lists(st.sampled_from([*CHOICES, max, "len", "Relu", "3"]), max_size=8))
def test_each_choice_has_a_label_of_its_own(choices: list[Any]) -> None:
    told = labels(choices)
    assert json.loads(json.dumps(told)) == told
    for label, choice in zip(told, choices, strict=True):
        if choice is None or isinstance(choice, str | int):
            assert label == choice
        else:
            assert told.count(label) == 1


@pytest.mark.parametrize(
    "flow",
    [
        RandomSearch(max_epochs=2, n_trials=8),
        SamplerSearch(max_epochs=2, n_trials=8),
        Grid(max_epochs=1),
    ],
    ids=lambda flow: type(flow).__name__,
)
def test_a_search_draws_them_and_its_tables_name_them(
    flow: Any, optimize: Optimize, client: Client, run_dir: str
) -> None:
    study = optuna.create_study(direction="maximize")
    run = optimize(
        flow, study=study, space=space, workload=SyntheticWorkload(value=value), client=client
    )
    shown = dict(zip(labels(CHOICES), CHOICES, strict=True))
    for number, trial in run.record.trials.items():
        assert shown[trial.params["act"]] == study.trials[number].params["act"]
        assert trial.config["act"] == study.trials[number].params["act"]
        assert trial.value == value(trial.config, len(trial.epochs))
    assert dagsel.load(run_dir).leaderboard().equals(run.leaderboard())
    again = dagsel.resume(run_dir, client, workload=run.given_workload, space=space)
    configs = {number: trial.config for number, trial in run.record.trials.items()}
    assert {number: trial.config for number, trial in again.record.trials.items()} == configs
    assert again.study.best_trial.params == study.best_trial.params


LAYERS: list[Any] = [(8,), (8, 8)]


def by_a_grid() -> optuna.samplers.BaseSampler:
    return optuna.samplers.GridSampler({"layers": LAYERS})


def fixed_in_part() -> optuna.samplers.BaseSampler:
    return optuna.samplers.PartialFixedSampler(
        {"layers": LAYERS[1]}, optuna.samplers.RandomSampler()
    )


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.filterwarnings("ignore:layers contains:UserWarning")
@pytest.mark.parametrize("make", [by_a_grid, fixed_in_part])
def test_a_sampler_with_choices_of_its_own_is_told_their_names(make: Any) -> None:
    study = optuna.create_study(sampler=make())
    layers = lambda trial: {"n": trial.suggest_categorical("layers", LAYERS)}  # noqa: E731
    told = r"none of the names '\(8,\)', '\(8, 8\)' .*give it these names"
    with pytest.raises(SearchError, match=told):
        StudyDriver(study, layers, "loss").ask(2, "study")


def test_numbers_of_numpy_are_numbers() -> None:
    study = optuna.create_study()
    study.enqueue_trial({"width": 32})
    space = lambda trial: {"w": trial.suggest_categorical("width", np.array([16, 32]))}  # noqa: E731
    driver = StudyDriver(study, space, "loss")
    configs, _ = driver.ask(4, "study")
    assert {type(config["w"]) for config in configs.values()} == {np.int64}
    assert {driver.params(number)["width"] for number in configs} == {16, 32}
    assert driver.params(0)["width"] == 32
    assert all(type(driver.params(number)["width"]) is int for number in configs)


@pytest.mark.parametrize("draw", [space, all_of_it])
@pytest.mark.parametrize("is_stored", [False, True])
def test_samplers_and_storages_that_write_json_get_names_and_the_space_the_choices(
    draw: Any, is_stored: bool, optimize: Optimize, client: Client, run_dir: str, tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path}/study.db" if is_stored else None
    sampler = optuna.samplers.TPESampler(
        multivariate=True, constant_liar=True, n_startup_trials=3, seed=0
    )
    study = optuna.create_study(
        study_name="named", storage=storage, direction="maximize", sampler=sampler
    )
    study.enqueue_trial({"act": "Relu" if is_stored else Relu})
    study.enqueue_trial({"act": "(1, 2)"})
    flow = SamplerSearch(max_epochs=1, n_trials=12)
    workload = SyntheticWorkload(value=value)
    run = optimize(flow, study=study, space=draw, workload=workload, client=client)
    acts = [trial.config["act"] for trial in run.record.trials.values()]
    assert acts[:2] == [Relu, (1, 2)]
    assert set(acts) <= set(CHOICES)
    shown = dict(zip(labels(CHOICES), CHOICES, strict=True))
    for number, trial in run.record.trials.items():
        kept = study.trials[number].params["act"]
        assert (shown[kept] if is_stored else kept) == trial.config["act"]
    again = dagsel.resume(
        run_dir, client, workload=workload, study=study if is_stored else None, space=draw
    )
    assert [trial.config["act"] for trial in again.record.trials.values()] == acts
    assert again.study.best_params == study.best_params
