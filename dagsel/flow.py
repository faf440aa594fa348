"""Search procedures and the engine: events go to a flow, decisions come from it.

A *flow* is a search procedure: a configuration, and a state that belongs to one run. It decides
which trials start, which train on and which stop. It uses no Dask, no Optuna, no clock, no file and
no global random numbers. The driver (`dagsel.driver.runner`) performs its decisions, on a cluster
or in virtual time, and tells it what happened.

A trial is *live* from `Asked` to `Stop` or `TrialFailed`. A live trial that has no epoch to train,
or was suspended by `Pause` or by the end of its ``Train(seconds=)``, is *paused*: only its state is
kept, in the store. The next `Train` resumes it on any workers, at the sample where it stopped, as
if it had never paused.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, Self, TypeAlias, get_args, runtime_checkable

from dagsel.checks import short_traceback
from dagsel.codec import LATER, Json, Tagged, from_json, to_json
from dagsel.planning.brackets import StagePlan
from dagsel.planning.budget import Budget
from dagsel.planning.capacity import ClusterCapacity, Plan
from dagsel.planning.losses import Losses as Losses
from dagsel.steering import Commanded as Commanded
from dagsel.steering import Ended as Ended
from dagsel.steering import Extended as Extended

Sampling: TypeAlias = Literal["study", "random", "grid"]
Direction: TypeAlias = Literal["minimize", "maximize"]
#: Which of a trial's scored states is its model, and whose value its own.
Keep: TypeAlias = Literal["best", "last"]
Outcome: TypeAlias = Literal["complete", "pruned"]


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
class Add:
    """Create a trial with these parameters; answered by `Asked`. Labels stand for some values."""

    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Train:
    """Train a trial for more epochs; each is answered by `Reported`, or all by `TrialFailed`.

    ``Train`` decisions of one answer become one round and one graph.

    Parameters
    ----------
    trial
        Number of the trial.
    epochs
        How many more; 0 to go on with those that it was given before.
    priority
        Trials of a higher priority train first.
    gang
        Workers that train it together, each on its part of every batch. The global batch is the
        same for any number. A trial that is training with another number stops at its next batch
        and goes on with this one.
    seconds
        Suspend it after so many seconds of training, at a batch boundary; answered by `Paused`
        unless its epochs end before. None for no limit.
    """

    trial: int
    epochs: int
    priority: float = 0.0
    gang: int = 1
    seconds: float | None = None

    def __repr__(self) -> str:
        default = Train(self.trial, self.epochs)
        rest = (f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name))
        told = "".join(f", {name}={getattr(self, name)!r}" for name in rest)
        return f"Train(trial={self.trial}, epochs={self.epochs}{told})"


@dataclass(frozen=True, slots=True)
class Pause:
    """Suspend a trial at its next batch boundary; answered by `Paused`, or by `TrialFailed`.

    Epochs that end before are reported as always. With `evaluate` the state at which the trial
    stops is scored.
    """

    trial: int
    evaluate: bool = False


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
        ``"complete"`` if it has come as far as it should, ``"pruned"`` if it ends early. A pruned
        trial that is the best of all is complete too, unless ``keep="last"``.
    """

    trial: int
    reason: str
    outcome: Outcome = "pruned"


@dataclass(frozen=True, slots=True)
class Clone:
    """Replace a trial's state by a copy of another one's, and change its configuration.

    The source must have reported. The target must be paused and stays paused; it keeps its number
    and its count of epochs, and if that is 0, its own configuration lies under `config`.

    Parameters
    ----------
    source
        Its model and optimizer state are copied, as of its last reported epoch.
    target
        The trial that loses its own state.
    config
        The target's configuration from its next epoch on, over that of the source. Values must have
        a form in JSON.
    """

    source: int
    target: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """Make the cluster have `n_workers` from now on; `WorkersChanged` tells what comes of it."""

    n_workers: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a `Tick` at so many seconds of the run; a later decision replaces an earlier one."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Finish:
    """End the search; trials that are still live are pruned."""


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
    """A trial has failed and trains no more; `reason` is the error's first line."""

    trial: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """Workers have come or gone; `n_workers` are there now."""

    n_workers: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of a `Wake` has come; `seconds` are those since the run began."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The time is over, or the user has stopped the study: the flow stops trials and finishes.

    It can decide nothing else. `seconds` are as in `Tick`.
    """

    seconds: float


Decision: TypeAlias = Ask | Add | Train | Pause | Stop | Clone | Scale | Wake | Plan | Finish
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

DECISIONS: Tagged[Decision] = Tagged(*get_args(Decision))
EVENTS: Tagged[Event] = Tagged(*get_args(Event))


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
