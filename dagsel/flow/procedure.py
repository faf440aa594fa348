"""A search procedure: what it knows, what it says of itself, and its methods."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

from dagsel.checks import short_traceback
from dagsel.codec import LATER, Json, from_json, to_json
from dagsel.flow.decisions import Decision, Sampling
from dagsel.flow.events import Event, Reported
from dagsel.planning.brackets import StagePlan
from dagsel.planning.budget import Budget
from dagsel.planning.capacity import ClusterCapacity, Plan

Direction: TypeAlias = Literal["minimize", "maximize"]
#: Which of a trial's scored states is its model, and whose value its own.
Keep: TypeAlias = Literal["best", "last"]


@dataclass(frozen=True, slots=True)
class Goal:
    """One of several metrics that a search is about, and whether smaller or larger is better."""

    metric: str
    direction: Direction

    def loss(self, value: float) -> float:
        """Return a value that is better when smaller."""
        return value if self.direction == "minimize" else -value


@dataclass(frozen=True, slots=True)
class Context:
    """What a flow knows when it starts.

    Parameters
    ----------
    n_workers, direction
        Workers at the start, and whether smaller or larger values of the metric are better.
    seed
        Seed of the run; a flow makes its random numbers from it and from its state.
    capacity
        What the cluster can have.
    seconds, worker_seconds
        What the run has taken so far: the start of the cluster counts.
    prunes_last
        Whether a pruner may end a trial after its last epoch, as in a script of Optuna's; in runs
        of before such a trial was complete.
    goals
        The metrics, if the search is about several: `direction` is that of the first one. Empty if
        it is about one.
    n_shards
        Training shards of the data set: an epoch of a trial is so many units, one after another.
    """

    n_workers: int
    direction: Direction = "minimize"
    seed: int = 0
    capacity: ClusterCapacity = field(default=ClusterCapacity(), metadata={LATER: True})
    seconds: float = field(default=0.0, metadata={LATER: True})
    worker_seconds: float = field(default=0.0, metadata={LATER: True})
    prunes_last: bool = field(default=False, metadata={LATER: True})
    goals: tuple[Goal, ...] = field(default=(), metadata={LATER: True})
    n_shards: int = field(default=1, metadata={LATER: True})

    def loss(self, value: float) -> float:
        """Return a value that is better when smaller; NaN and infinities become the worst.

        Examples
        --------
        >>> Context(n_workers=1, direction="maximize").loss(0.9)
        -0.9
        >>> Context(n_workers=1).loss(float("-inf"))
        inf
        """
        if not math.isfinite(value):
            return math.inf
        return value if self.direction == "minimize" else -value

    def losses(self, report: Reported) -> tuple[float, ...]:
        """Return the `loss` of each metric that the search is about.

        Examples
        --------
        >>> goals = (Goal("f1", "maximize"), Goal("ms", "minimize"))
        >>> report = Reported(0, 1, 0.9, {"f1": 0.9, "ms": 25.0, "loss": 0.5}, seconds=1.0)
        >>> Context(n_workers=1, direction="maximize", goals=goals).losses(report)
        (-0.9, 25.0)
        """
        if not self.goals:
            return (self.loss(report.value),)
        values = ((goal, report.metrics[goal.metric]) for goal in self.goals)
        return tuple(goal.loss(v) if math.isfinite(v) else math.inf for goal, v in values)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a flow says of itself before it starts.

    Parameters
    ----------
    max_epochs
        Epochs of the longest trial; None if it is not known.
    sampling
        Who draws the trials; with ``"grid"`` the space has to be finite.
    uses_pruner, pruner
        Whether it reads `Reported.prune`, and the Optuna pruner that is asked; None for the
        study's own.
    deadline_s, budget
        How long the search may last, and what its workers may cost; None for no limit.
    plan
        Its stages, if they are fixed beforehand.
    reads_configs
        What it reads in configurations or changes in them, as the rest of a sentence that begins
        with "the flow"; empty if nothing.
    scores_parts
        Whether it has trials scored in the middle of an epoch, and so needs none to end.
    takes_several
        Whether it can search for several metrics at once (`Context.goals`): it does not rank trials
        by `Reported.value`.
    extends
        What it takes of an `Extended`: ``"n_trials"``, ``"max_epochs"``, ``"n_best"``. If nothing,
        it cannot go on once it has finished.
    n_trials
        How many trials it draws in all, as far as it knows now; None if it does not.
    """

    max_epochs: int | None = None
    sampling: Sampling = "study"
    uses_pruner: bool = False
    pruner: Any = None
    deadline_s: float | None = None
    budget: Budget | None = None
    plan: StagePlan | None = None
    reads_configs: str = ""
    scores_parts: bool = False
    takes_several: bool = False
    extends: tuple[str, ...] = ()
    n_trials: int | None = None


@runtime_checkable
class Flow(Protocol):
    """A search procedure: a dataclass of its configuration that inherits this class.

    What it learns stands in `state`, a dataclass of annotated builtins (numbers, strings, lists,
    tuples, sets, mappings, dataclasses of these), so that it can be written as JSON and read again.
    The state changes with each event. It belongs to one run: each run takes a `fresh` flow.
    `dagsel.testing.FlowSuite` checks a flow of your own.

    Attributes
    ----------
    state
        What the flow has learnt: a field with ``init=False, repr=False, compare=False``.
    """

    state: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the traceback of a wrong argument short."""
        super().__init_subclass__(**options)
        own: Any = cls.__dict__.get("__post_init__")
        if own is not None:
            cls.__post_init__ = short_traceback(own)  # type: ignore[attr-defined]

    @property
    def traits(self) -> Traits:
        """What the flow says of itself; the defaults of `Traits` if it says nothing."""
        return Traits()

    def workers_to_begin(self, context: Context) -> int | None:
        """Return how many workers it wants first; None for those that are there.

        It is asked before anything is started, of a cluster that can grow. Raises a `SearchError`
        if nothing can be trained within its limits there.
        """
        return None

    def plan_for(self, context: Context) -> Plan | None:
        """Return the stages on such a cluster, if they are known beforehand; raise as above."""
        return None

    def fresh(self) -> Self:
        """Return a flow of the same configuration in its initial state."""
        return replace(self)  # type: ignore[type-var]  # subclasses are dataclasses

    @abstractmethod
    def start(self, context: Context) -> list[Decision]:
        """Begin a search."""

    @abstractmethod
    def handle(self, event: Event) -> list[Decision]:
        """Return what to do about an event."""


def save_state(flow: Flow) -> Json:
    """Return a flow's state as JSON."""
    return to_json(flow.state)


def load_state(flow: Flow, value: Json) -> None:
    """Set the state that `save_state` returned for a flow of the same configuration."""
    flow.state = from_json(type(flow.state), value)
