"""The seam between search procedures and the engine: events in, decisions out.

A *flow* is a search procedure: a frozen configuration and an explicit state. It decides which
trials start, which train on and which stop, and touches nothing else: no Dask, no Optuna, no clock,
no file, no global random state. Whoever runs it (`dagsel.execution.runner` on a cluster) performs
its decisions and tells it what came of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

Sampling: TypeAlias = Literal["study", "random", "grid"]


@dataclass(frozen=True, slots=True)
class Context:
    """What a flow may know before it starts.

    Parameters
    ----------
    n_workers
        Workers at the start of the run.
    """

    n_workers: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Draw new trials; answered by `Asked`.

    Parameters
    ----------
    n
        How many.
    sampling
        Who draws: the study's own sampler, a uniform one, or the next points of the grid.
    """

    n: int
    sampling: Sampling = "study"


@dataclass(frozen=True, slots=True)
class Train:
    """Train a trial for more epochs; each is answered by `Reported`, or all by `TrialFailed`.

    ``Train`` decisions that stand together become one round and one graph.

    Parameters
    ----------
    trial
        Number of the trial.
    epochs
        How many more.
    priority
        Trials of a higher priority are served first.
    """

    trial: int
    epochs: int
    priority: float = 0.0


@dataclass(frozen=True, slots=True)
class Stop:
    """End a trial for good.

    Parameters
    ----------
    trial
        Number of the trial.
    reason
        Kept in the record of the run.
    outcome
        ``"complete"`` if its last value counts as the trial's value, ``"pruned"`` if it was ended
        early.
    """

    trial: int
    reason: str
    outcome: Literal["complete", "pruned"] = "pruned"


@dataclass(frozen=True, slots=True)
class Finish:
    """End the search."""


@dataclass(frozen=True, slots=True)
class Asked:
    """New trials are there.

    Parameters
    ----------
    trials
        Their numbers; fewer than asked for when the space is exhausted.
    exhausted
        Whether no further trial can be drawn.
    """

    trials: tuple[int, ...]
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    """A trial has ended an epoch.

    Parameters
    ----------
    trial
        Number of the trial.
    epoch
        From 1.
    value
        The metric that the search is about.
    metrics
        All validation metrics of the epoch.
    seconds
        Time since the run began.
    """

    trial: int
    epoch: int
    value: float
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class TrialFailed:
    """A trial has failed and trains no more.

    Parameters
    ----------
    trial
        Number of the trial.
    reason
        The error's first line.
    """

    trial: int
    reason: str


Decision: TypeAlias = Ask | Train | Stop | Finish
Event: TypeAlias = Asked | Reported | TrialFailed


@runtime_checkable
class Flow(Protocol):
    """A search procedure.

    Its configuration is frozen; what it learns stands in a state of its own. Each run works on a
    deep copy, so that one flow may serve many runs.
    """

    def start(self, context: Context) -> list[Decision]:
        """Begin a search."""
        ...

    def handle(self, event: Event) -> list[Decision]:
        """Answer what has happened."""
        ...
