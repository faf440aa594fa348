"""Trials that the user has enqueued: take one, write what was drawn for it, or why it cannot be."""

from __future__ import annotations

import logging
import time
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from dagsel.study.checks import RejectedError
from dagsel.study.resume import REASON
from dagsel.study.sampler import CLAIM, RUN

logger = logging.getLogger("dagsel")

#: Mark of a run that has begun a trial, where others have marked it, too.
_BEGUN = "begun"
#: So long it waits until these have begun the trial, or given it up; one of them may be dead.
_PATIENCE_S, _LOOK_S = 2.0, 0.01


def claim(study: optuna.Study, trial: FrozenTrial, run: str) -> bool:
    """Take a trial for a run; return False if another process was faster."""
    storage, trial_id = study._storage, trial._trial_id
    # Marked first: wherever the driver is interrupted, `StudyDriver.fail_live` finds it.
    try:
        storage.set_trial_system_attr(trial_id, CLAIM + run, True)
        has_begun = storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        if has_begun and _has_it(study, trial_id, run):
            storage.set_trial_user_attr(trial_id, RUN, run)
            return True
        storage.set_trial_system_attr(trial_id, CLAIM + run, False)
    except UpdateFinishedTrialError:
        pass
    return False


def _has_it(study: optuna.Study, trial_id: int, run: str) -> bool:
    """Whether a trial that a run has begun is this run's.

    SQLite may let several begin it: each looks before another has written. All of them had marked
    it before the first one began it, so each sees the others' marks. The first by name has it.
    """
    storage, ends_at = study._storage, time.monotonic() + _PATIENCE_S
    if _marks(storage.get_trial(trial_id)).keys() == {run}:
        return True
    storage.set_trial_system_attr(trial_id, CLAIM + run, _BEGUN)
    while True:
        found = storage.get_trial(trial_id)
        marks = _marks(found)
        begun = [rival for rival, mark in marks.items() if mark == _BEGUN]
        if found.user_attrs.get(RUN) in marks:  # it has waited for this one in vain
            return False
        if len(begun) == len(marks) or time.monotonic() > ends_at:
            return run == min(begun)
        time.sleep(_LOOK_S)


def _marks(trial: FrozenTrial) -> dict[str, Any]:
    """Return the marks of the runs that want a trial and have not given it up."""
    marks = {key: mark for key, mark in trial.system_attrs.items() if key.startswith(CLAIM)}
    return {key.removeprefix(CLAIM): mark for key, mark in marks.items() if mark}


def fixed_params(trial: FrozenTrial) -> dict[str, object]:
    """Return the parameters that a trial was enqueued with."""
    return dict(trial.system_attrs.get("fixed_params", {}))


def fill_in(study: optuna.Study, trial: FrozenTrial, drawn: FrozenTrial) -> FrozenTrial:
    """Write to the study what was drawn for a trial; return the trial as the study has it."""
    if unknown := [name for name in fixed_params(trial) if name not in drawn.params]:
        logger.warning(
            "trial %d was enqueued with %s, which the space did not suggest; it suggested %s",
            trial.number,
            ", ".join(unknown),
            ", ".join(drawn.params),
        )
    storage, trial_id = study._storage, trial._trial_id
    for name, distribution in drawn.distributions.items():
        value = distribution.to_internal_repr(drawn.params[name])
        storage.set_trial_param(trial_id, name, value, distribution)
    for key, note in drawn.user_attrs.items():
        storage.set_trial_user_attr(trial_id, key, note)
    for key, note in drawn.system_attrs.items():
        storage.set_trial_system_attr(trial_id, key, note)
    return storage.get_trial(trial_id)


def end_as_rejected(study: optuna.Study, trial: FrozenTrial, error: RejectedError) -> None:
    """Tell that the space does not want a trial; to Optuna it was pruned."""
    logger.warning("trial %d was enqueued, and is not trained: %s", trial.number, error)
    study._storage.set_trial_user_attr(trial._trial_id, REASON, str(error))
    study._storage.set_trial_state_values(trial._trial_id, TrialState.PRUNED)
