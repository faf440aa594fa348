"""What observers are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class SearchBegan:
    """A search begins, or goes on in another process.

    Parameters
    ----------
    run, study
        The run's identifier, which stays the same when it goes on, and the name of its study.
    metric, direction
        What it is about, of several metrics the first one; and which values are better.
    run_dir
        Its folder.
    goes_on
        Whether it had begun before. Then all that happened is told again: who has kept it skips it.
    """

    run: str
    study: str
    metric: str
    direction: str
    run_dir: str
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class TrialBegan:
    """A trial is there.

    Parameters
    ----------
    trial
        Its number.
    params
        Its parameters; labels stand for those that have no form in JSON.
    is_past
        Whether that was before the process began that tells of it.
    """

    trial: int
    params: Mapping[str, Any]
    is_past: bool = False


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """A trial has ended an epoch.

    Parameters
    ----------
    trial, epoch
        Its number; the number of the epoch, from 1. Together they tell it from all others.
    value, metrics
        The metric of the search; and all validation metrics.
    train_loss
        Mean training loss.
    seconds, at
        Time since the run began; and since 1970.
    is_past
        As in `TrialBegan`.
    """

    trial: int
    epoch: int
    value: float
    metrics: Mapping[str, float]
    train_loss: float
    seconds: float
    at: float
    is_past: bool = False


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial has ended.

    Parameters
    ----------
    trial, state
        Its number; ``"complete"``, ``"pruned"`` or ``"failed"``.
    value, epochs
        What it is worth, None if it was not scored; and how many epochs it has ended.
    reason
        Why it has ended.
    is_past
        As in `TrialBegan`.
    """

    trial: int
    state: str
    value: float | None
    epochs: int
    reason: str
    is_past: bool = False


@dataclass(frozen=True, slots=True)
class SearchEnded:
    """A search has ended, or its process leaves it.

    Parameters
    ----------
    best_trial, best_value
        The best trial and its value; None if there is none.
    n_trials, n_epochs
        Trials and epochs.
    seconds, worker_seconds
        What it has taken.
    error
        The error that has interrupted it; empty if there was none.
    """

    best_trial: int | None
    best_value: float | None
    n_trials: int
    n_epochs: int
    seconds: float
    worker_seconds: float
    error: str = ""


Told: TypeAlias = SearchBegan | TrialBegan | EpochEnded | TrialEnded | SearchEnded
