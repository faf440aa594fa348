"""What observers are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class SearchBegan:
    """A search begins, or goes on in another process.

    Parameters
    ----------
    run, study
        The run's identifier, which stays the same when it goes on, and the name of its study.
    metric, direction
        The metric that it is about, of several the first one; and which values are better.
    run_dir
        Its folder.
    goes_on
        Whether it had begun before. Then all that happened before is sent once more.

    Examples
    --------
    >>> search = SearchBegan("3f9a", "digits", "accuracy", "maximize", run_dir="runs/1")
    >>> search.metric, search.goes_on
    ('accuracy', False)
    """

    run: str
    study: str
    metric: str
    direction: str
    run_dir: str
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class TrialBegan:
    """A trial begins.

    Parameters
    ----------
    trial
        Its number.
    params
        The parameters that were drawn for it; labels stand for those that have no form in JSON.
    is_past
        Whether that was in an earlier process, before the search was resumed or extended.

    Examples
    --------
    >>> TrialBegan(3, {"lr": 0.1}).params["lr"]
    0.1
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
        Number of the trial; number of the epoch, from 1. No two events have the same pair.
    value, metrics
        The metric of the search; and all validation metrics.
    train_loss
        Mean training loss.
    seconds, at
        Seconds since the run began; and since 1970.
    is_past
        As in `TrialBegan`.
    params
        The parameters that the epoch was trained with. Some searches, such as `dagsel.flows.PBT`,
        change those that were drawn.

    Examples
    --------
    >>> metrics, params = {"accuracy": 0.91}, {"lr": 0.1}
    >>> epoch = EpochEnded(3, 1, 0.91, metrics, 0.4, seconds=12.0, at=1.7e9, params=params)
    >>> epoch.trial, epoch.epoch, epoch.value
    (3, 1, 0.91)
    """

    trial: int
    epoch: int
    value: float
    metrics: Mapping[str, float]
    train_loss: float
    seconds: float
    at: float
    is_past: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial has ended.

    Parameters
    ----------
    trial, state
        Number of the trial; ``"complete"``, ``"pruned"`` or ``"failed"``.
    value, epochs
        Its value, None if it was not scored; and how many epochs it has ended.
    reason
        Why it has ended.
    is_past
        As in `TrialBegan`.

    Examples
    --------
    >>> TrialEnded(3, "pruned", 0.91, epochs=1, reason="rung 1").state
    'pruned'
    """

    trial: int
    state: str
    value: float | None
    epochs: int
    reason: str
    is_past: bool = False


@dataclass(frozen=True, slots=True)
class SearchEnded:
    """A search has ended, or its process stops working on it.

    Parameters
    ----------
    best_trial, best_value
        The best trial and its value; None if there is none.
    n_trials, n_epochs
        How many trials there were, and how many epochs they have ended.
    seconds, worker_seconds
        Time that it has taken; and the sum over all workers.
    error
        The error that has interrupted it; empty if there was none.

    Examples
    --------
    >>> SearchEnded(3, 0.91, n_trials=8, n_epochs=24, seconds=9.0, worker_seconds=36.0).error
    ''
    """

    best_trial: int | None
    best_value: float | None
    n_trials: int
    n_epochs: int
    seconds: float
    worker_seconds: float
    error: str = ""


Told: TypeAlias = SearchBegan | TrialBegan | EpochEnded | TrialEnded | SearchEnded
