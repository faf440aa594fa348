"""Uniform draws look at no trial, and so no trial is prepared for them; nothing else changes."""

from __future__ import annotations

import optuna
import pytest
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from dagsel.study.sampler import SamplerStudy


@pytest.mark.parametrize("kind", [RandomSampler, TPESampler])
def test_a_trial_that_waits_for_someone_else_is_not_begun(kind: type[BaseSampler]) -> None:
    study = optuna.create_study()
    study.enqueue_trial({"x": 0.5})
    view = SamplerStudy(study, "run")
    view.extend(study.get_trials(deepcopy=False))
    assert view.draw(kind()).number == 1


def test_a_sampler_that_looks_sees_what_came_in_between() -> None:
    study = optuna.create_study()
    view = SamplerStudy(study, "run")
    uniform, other = RandomSampler(seed=0), TPESampler(seed=0)
    for number in range(3):
        trial = view.draw(uniform)
        trial.suggest_float("x", 0.0, 1.0)
        view.keep(trial)
        view.report(number, 1, 10.0 * number)
    seen = view.draw(other).study.get_trials(deepcopy=False)[:3]
    assert [trial.values for trial in seen] == [[0.0], [10.0], [20.0]]
