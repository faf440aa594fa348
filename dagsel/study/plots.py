"""Figures of a study that Optuna draws."""

from __future__ import annotations

import warnings
from typing import Any

import optuna

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

    how = {**_target(study), "target_name": metric}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The number of trials is too small")
            return plot_param_importances(study, params=params, **how)
    except (ValueError, RuntimeError, UserWarning) as error:
        raise SearchError(
            f"how much the parameters matter cannot be told from the study's trials yet ({error}); "
            "try again when more have ended"
        ) from error


def _target(study: optuna.Study) -> dict[str, Any]:
    return {"target": lambda trial: trial.values[0]} if len(study.directions) > 1 else {}
