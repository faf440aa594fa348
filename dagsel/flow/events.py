"""What a search procedure hears of: events, to which it answers with decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, get_args

from dagsel.codec import Tagged
from dagsel.planning.losses import Losses
from dagsel.steering import Commanded, Extended


@dataclass(frozen=True, slots=True)
class Asked:
    """New trials are drawn.

    Parameters
    ----------
    trials
        Their numbers; fewer than asked for when the space is exhausted.
    exhausted
        Whether no further trial can be drawn.
    configs
        The configuration of each, in the same order, without values that have no form in JSON (a
        function, a class).

    Examples
    --------
    >>> Asked(trials=(0, 1)).exhausted
    False
    """

    trials: tuple[int, ...]
    exhausted: bool = False
    configs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Reported:
    """A trial has ended an epoch.

    Parameters
    ----------
    trial, epoch
        Number of the trial; number of the epoch, from 1.
    value, metrics
        The metric that the search is about, of several the first one; and all validation metrics of
        the epoch.
    seconds
        Time since the run began, without the time between a crash and its resume.
    prune
        Whether the pruner would end the trial here, if `Traits.uses_pruner`.
    switches
        Seconds without training that each change of its number of workers in the middle of a shard
        has cost since its last report.

    Examples
    --------
    >>> report = Reported(3, 1, 0.91, {"accuracy": 0.91}, seconds=12.5)
    >>> report.trial, report.epoch, report.value
    (3, 1, 0.91)
    """

    trial: int
    epoch: int
    value: float
    metrics: Mapping[str, float]
    seconds: float
    prune: bool = False
    switches: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Paused:
    """A trial is suspended, by `Pause` or because the seconds of its `Train` are over.

    Parameters
    ----------
    trial
        Number of the trial.
    epochs
        How far it has trained: 2.25 is a quarter of the third epoch's shards.
    seconds
        As in `Reported`.
    trained_s, losses
        Seconds and losses of its training since its last `Train`.
    value, metrics
        As in `Reported`, if its state was evaluated.

    Examples
    --------
    >>> Paused(3, epochs=2.25, seconds=60.0).value is None  # it was not evaluated
    True
    """

    trial: int
    epochs: float
    seconds: float
    trained_s: float = 0.0
    losses: Losses = field(default_factory=Losses)
    value: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialFailed:
    """A trial has failed and trains no more.

    Parameters
    ----------
    trial
        Number of the trial.
    reason
        The first line of its error.

    Examples
    --------
    >>> TrialFailed(3, "ValueError: no such layer")
    TrialFailed(trial=3, reason='ValueError: no such layer')
    """

    trial: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """Workers have come or gone.

    Parameters
    ----------
    n_workers
        How many are there now.
    seconds
        Time since the run began; None in runs of older versions.

    Examples
    --------
    >>> WorkersChanged(7, seconds=12.5).n_workers
    7
    """

    n_workers: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of a `Wake` has come.

    Parameters
    ----------
    seconds
        Time since the run began.

    Examples
    --------
    >>> Tick(60.0)
    Tick(seconds=60.0)
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The deadline has come, or the user has stopped the study: stop the trials and finish.

    No other decision is allowed now.

    Parameters
    ----------
    seconds
        Time since the run began.

    Examples
    --------
    >>> DeadlineReached(3600.0)
    DeadlineReached(seconds=3600.0)
    """

    seconds: float


Event: TypeAlias = (
    Asked
    | Reported
    | Paused
    | TrialFailed
    | WorkersChanged
    | Tick
    | DeadlineReached
    | Extended
    | Commanded
)

EVENTS: Tagged[Event] = Tagged(*get_args(Event))


def as_heard(event: Event, is_infeasible: Callable[[int], bool]) -> Event:
    """Return an event as a flow hears it: a trial that breaks a constraint is worth nothing.

    Parameters
    ----------
    event
        What has happened.
    is_infeasible
        Whether the trial of a number breaks a constraint. Its values become NaN, so that it ranks
        behind all others.

    Examples
    --------
    >>> as_heard(Reported(3, 1, 0.91, {"accuracy": 0.91}, seconds=12.5), {3}.__contains__).value
    nan
    """
    match event:
        case Reported(trial) | Paused(trial) if event.value is not None and is_infeasible(trial):
            return replace(event, value=math.nan, metrics=dict.fromkeys(event.metrics, math.nan))
    return event
