"""Figures of a study that Optuna draws."""

from __future__ import annotations

import warnings
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from dagsel.errors import SearchError


def parallel_plot(study: optuna.Study, params: list[str] | None, metric: str) -> Any:
    """Draw parameters beside values; of several metrics the first one."""
    from optuna.visualization import plot_parallel_coordinate

    return plot_parallel_coordinate(study, params, **_target(study), target_name=metric)


def importance_plot(study: optuna.Study, params: list[str] | None, metric: str) -> Any:
    """Draw how much each parameter matters; of several metrics for the first one.

    Raises
    ------
    SearchError
        If the trials do not tell.
    """
    from optuna.visualization import plot_param_importances

    how = {**_target(study, lower_is_better=True), "target_name": metric}
    try:
        if not any(trial.state == TrialState.COMPLETE for trial in study.get_trials(False)):
            raise ValueError("none of them is complete")  # Optuna would draw an empty figure
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The number of trials is too small")
            warnings.filterwarnings("ignore", ".* to achieve low `target` values")  # as it is told
            return plot_param_importances(study, params=params, **how)
    except (ValueError, RuntimeError, UserWarning) as error:
        raise SearchError(
            f"how much the parameters matter cannot be told from the study's trials yet ({error}); "
            "try again when more have ended"
        ) from error


def _target(study: optuna.Study, *, lower_is_better: bool = False) -> dict[str, Any]:
    """Return what Optuna goes by in a study of several metrics, which it may take for a loss."""
    if len(study.directions) == 1:
        return {}
    maximizes = study.directions[0] == StudyDirection.MAXIMIZE
    sign = -1 if lower_is_better and maximizes else 1
    return {"target": lambda trial: sign * trial.values[0]}
