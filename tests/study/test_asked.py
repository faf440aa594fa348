"""A run goes on with the sampler and the pruner that it began with, or says that it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.pruners import MedianPruner, NopPruner, PatientPruner, ThresholdPruner
from optuna.samplers import CmaEsSampler, NSGAIISampler, PartialFixedSampler, TPESampler

from dagsel.errors import SearchError
from dagsel.flow import Traits
from dagsel.study.asked import asked_of, check_asked

pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:`constraints_func`:FutureWarning"),
]

ASKS = Traits(sampling="study", uses_pruner=True)


def limit(trial: Any) -> tuple[float]:
    return (trial.params["x"] - 0.5,)


def study(sampler: Any = None, pruner: Any = None) -> optuna.Study:
    return optuna.create_study(sampler=sampler, pruner=pruner)


SAMPLERS = {
    "its number of first trials": lambda: TPESampler(n_startup_trials=20),
    "its constraints": lambda: TPESampler(constraints_func=limit),
    "another one": lambda: NSGAIISampler(population_size=7),
    "one around another": lambda: PartialFixedSampler({"x": 1}, TPESampler(n_startup_trials=3)),
}
PRUNERS = {
    "its warm-up": lambda: MedianPruner(n_warmup_steps=3),
    "another one": NopPruner,
    "one around another": lambda: PatientPruner(ThresholdPruner(lower=0.1), patience=2),
}
ROLES = [
    *(("sampler", make) for make in SAMPLERS.values()),
    *(("pruner", make) for make in PRUNERS.values()),
]


@pytest.mark.parametrize(("role", "make"), ROLES, ids=[*SAMPLERS, *PRUNERS])
def test_optunas_own_does_not_stand_for_another(role: str, make: Any) -> None:
    began = asked_of(study(**{role: make()}), ASKS)
    check_asked(study(**{role: make()}), began)
    with pytest.raises(SearchError, match=rf"the {role} of the run.*keep no {role}; give study="):
        check_asked(study(), began)


def test_seeds_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    check_asked(study(TPESampler(seed=2)), asked_of(study(TPESampler(seed=1)), ASKS))
    check_asked(study(), asked_of(study(TPESampler(seed=1)), ASKS))
    assert not caplog.records


@pytest.mark.parametrize("make", [TPESampler, lambda: PartialFixedSampler({"k": 1}, TPESampler())])
def test_what_a_sampler_notes_as_it_draws_does_not_count(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the run began on a study that had drawn, or is told to go on with one that has."""
    used, fresh = study(make()), study(make())
    used.optimize(lambda t: t.suggest_float("x", 0, 1) + t.suggest_int("k", 0, 1), n_trials=12)
    for one, other in [(used, fresh), (fresh, used)]:
        check_asked(other, asked_of(one, ASKS))
    assert not caplog.records


def test_another_one_of_the_users_is_told(caplog: pytest.LogCaptureFixture) -> None:
    began = asked_of(study(TPESampler(n_startup_trials=20)), ASKS)
    with caplog.at_level(logging.WARNING, "dagsel"):
        check_asked(study(TPESampler(n_startup_trials=30)), began)
    told = "was TPESampler(n_startup_trials=20), and is TPESampler(n_startup_trials=30)"
    assert told in caplog.text


def test_what_is_not_asked_may_be_any() -> None:
    own = study(TPESampler(n_startup_trials=20), NopPruner())
    assert asked_of(own, Traits(sampling="random")) == {}
    assert asked_of(own, Traits(sampling="grid", uses_pruner=True, pruner=NopPruner())) == {}
    assert asked_of(own, Traits(sampling="random", uses_pruner=True)) == {
        "pruner": {"": "NopPruner"}
    }


def test_each_of_optunas_can_be_described() -> None:
    for sampler in (CmaEsSampler, optuna.samplers.GPSampler, optuna.samplers.QMCSampler):
        assert asked_of(study(sampler()), ASKS)["sampler"][""] == sampler.__name__
