"""Pruners that would never act are found before anything runs."""

from __future__ import annotations

from typing import Any

from optuna.pruners import (
    HyperbandPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
    WilcoxonPruner,
)

from dagsel.errors import SearchError


def first_step(pruner: Any) -> int:
    """Give the first step at which a pruner can act; 0 if that is not known.

    Examples
    --------
    >>> first_step(SuccessiveHalvingPruner(min_resource=2, min_early_stopping_rate=1))
    8
    """
    match pruner:
        case PercentilePruner() | ThresholdPruner():  # MedianPruner is a PercentilePruner
            return pruner._n_warmup_steps
        case SuccessiveHalvingPruner():
            rung: int = pruner._reduction_factor**pruner._min_early_stopping_rate
            return (pruner._min_resource or 1) * rung
        case HyperbandPruner():
            return pruner._min_resource
        case WilcoxonPruner():
            return max(2, pruner._n_startup_steps)
        case PatientPruner():
            return max(pruner._patience + 2, first_step(pruner._wrapped_pruner))
    return 0


def check_pruner(pruner: Any, max_epochs: int) -> None:
    """Check that a pruner can end a trial before its last epoch.

    Raises
    ------
    SearchError
        If it cannot.
    """
    first = first_step(pruner)
    if first >= max(max_epochs, 2):
        raise SearchError(
            f"{type(pruner).__name__} ends no trial before step {first}, and a trial has "
            f"{max_epochs} epochs, one step each; lower its warm-up or resource to less than that"
        )
