"""Trials that the user has enqueued: take one, write what was drawn for it, or why it cannot be."""

from __future__ import annotations

import logging

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from dagsel.study.checks import RejectedError
from dagsel.study.resume import REASON
from dagsel.study.sampler import CLAIM, RUN

logger = logging.getLogger("dagsel")


def claim(study: optuna.Study, trial: FrozenTrial, run: str) -> bool:
    """Take a trial for a run; return False if another process was faster."""
    storage, trial_id = study._storage, trial._trial_id
    # Marked first: wherever the driver is interrupted, `StudyDriver.fail_live` finds it. Another
    # run may mark it, too. SQLite may let both begin it; the last to name itself has it.
    try:
        storage.set_trial_system_attr(trial_id, CLAIM + run, True)
        if storage.set_trial_state_values(trial_id, TrialState.RUNNING):
            storage.set_trial_user_attr(trial_id, RUN, run)
            return bool(storage.get_trial(trial_id).user_attrs[RUN] == run)
        storage.set_trial_system_attr(trial_id, CLAIM + run, False)
    except UpdateFinishedTrialError:
        pass
    return False


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
