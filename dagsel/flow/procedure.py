"""A search procedure: what it knows, what it says of itself, and its methods."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

from dagsel.checks import refuse_elsewhere, short_traceback
from dagsel.codec import LATER, Json, from_json, to_json
from dagsel.errors import SearchError
from dagsel.flow.argument_names import NEEDED, elsewhere
from dagsel.flow.decisions import Decision, Sampling
from dagsel.flow.events import Event, Reported
from dagsel.planning.brackets import StagePlan
from dagsel.planning.budget import Budget
from dagsel.planning.capacity import ClusterCapacity, Plan

Direction: TypeAlias = Literal["minimize", "maximize"]
#: Which of a trial's scored states is its model, and whose value its own.
Keep: TypeAlias = Literal["best", "last"]
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Goal:
    """A metric of a search for several, and whether smaller or larger values are better.

    Parameters
    ----------
    metric
        Name of the metric.
    direction
        ``"minimize"`` or ``"maximize"``.

    Examples
    --------
    >>> Goal("f1", "maximize").loss(0.75)
    -0.75
    >>> Goal("ms", "minimize").loss(float("-inf"))
    inf
    """

    metric: str
    direction: Direction

    def loss(self, value: float) -> float:
        """Return a value that is better when smaller; NaN and infinities become the worst.

        Parameters
        ----------
        value
            A value of the metric.
        """
        if not math.isfinite(value):
            return math.inf
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

    Examples
    --------
    >>> context = Context(n_workers=4, direction="maximize", seed=7)
    >>> context.loss(0.9), context.losses(Reported(0, 1, 0.9, {"f1": 0.9}, seconds=1.0))
    (-0.9, (-0.9,))
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

        Parameters
        ----------
        value
            A value of the metric that the search is about.

        Examples
        --------
        >>> Context(n_workers=1, direction="maximize").loss(0.9)
        -0.9
        >>> Context(n_workers=1).loss(float("-inf"))
        inf
        """
        return Goal("", self.direction).loss(value)

    def losses(self, report: Reported) -> tuple[float, ...]:
        """Return the `loss` of each metric that the search is about.

        Parameters
        ----------
        report
            The report of an epoch.

        Examples
        --------
        >>> goals = (Goal("f1", "maximize"), Goal("ms", "minimize"))
        >>> report = Reported(0, 1, 0.9, {"f1": 0.9, "ms": 25.0, "loss": 0.5}, seconds=1.0)
        >>> Context(n_workers=1, direction="maximize", goals=goals).losses(report)
        (-0.9, 25.0)
        """
        if not self.goals:
            return (self.loss(report.value),)
        return tuple(goal.loss(report.metrics[goal.metric]) for goal in self.goals)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a search procedure says of itself before it starts.

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

    Examples
    --------
    >>> from dagsel.flows import ASHA
    >>> traits = ASHA(max_epochs=9, n_trials=27).traits
    >>> traits.max_epochs, traits.sampling, traits.takes_several
    (9, 'study', False)
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

    What it learns stands in `state`, a dataclass of numbers, strings, lists, tuples, sets, mappings
    and dataclasses of these, with annotations. So it can be written as JSON and read again. The
    state changes with each event and belongs to one run: each run takes a `fresh` flow.
    `dagsel.testing.FlowSuite` checks a flow of your own.

    Attributes
    ----------
    state
        What the flow has learnt: a field with ``init=False, repr=False, compare=False``.

    Examples
    --------
    >>> from dataclasses import dataclass, field
    >>> from dagsel.flow import Ask, Asked, DeadlineReached, Finish, Reported, Stop, Train
    >>> @dataclass
    ... class Seen:
    ...     ended: int = 0
    >>> @dataclass
    ... class OneEpoch(Flow):
    ...     # Train each of `n_trials` trials for one epoch.
    ...     n_trials: int
    ...     state: Seen = field(default_factory=Seen, init=False, repr=False, compare=False)
    ...
    ...     def start(self, context):
    ...         return [Ask(self.n_trials)]
    ...
    ...     def handle(self, event):
    ...         match event:
    ...             case Asked(trials):
    ...                 return [Train(trial, epochs=1) for trial in trials]
    ...             case Reported(trial):
    ...                 self.state.ended += 1
    ...                 done = self.state.ended == self.n_trials
    ...                 return [Stop(trial, "done", "complete"), *([Finish()] if done else [])]
    ...             case DeadlineReached():
    ...                 return [Finish()]
    ...         return []
    >>> flow = OneEpoch(n_trials=1)
    >>> flow.start(Context(n_workers=1)), flow.handle(Asked((0,)))
    ([Ask(n=1, sampling='study')], [Train(trial=0, epochs=1)])
    >>> flow.handle(Reported(0, 1, 0.5, {"loss": 0.5}, seconds=1.0))
    [Stop(trial=0, reason='done', outcome='complete'), Finish()]
    >>> flow.state, flow.fresh().state
    (Seen(ended=1), Seen(ended=0))
    """

    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse arguments that it does not take or lacks, with what to write."""
        _check_arguments(cls, args, kwargs)
        return super().__new__(cls)

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

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raise an error if it cannot search among configurations like this one.

        It is called before anything is started, with what the space draws.

        Parameters
        ----------
        config
            A configuration.

        Raises
        ------
        SearchError
            If it lacks what the procedure changes.

        Examples
        --------
        >>> from dagsel.flows import PBT
        >>> PBT(max_epochs=4, n_trials=4, mutations={"lrr": [0.1]}).check_config({"lr": 0.5})
        Traceback (most recent call last):
        ...
        dagsel.errors.SearchError: mutations names 'lrr', which a configuration lacks; it has lr
        """
        del config  # to most procedures one is as good as another

    def workers_to_begin(self, context: Context) -> int | None:
        """Return how many workers it wants first; None for those that are there.

        It is called before anything is started, for a cluster that can grow.

        Parameters
        ----------
        context
            What the cluster can have.

        Raises
        ------
        SearchError
            If nothing can be trained there within the procedure's limits.

        Examples
        --------
        >>> from dagsel.flows import RandomSearch
        >>> RandomSearch(max_epochs=3).workers_to_begin(Context(n_workers=4)) is None
        True
        """
        return None

    def plan_for(self, context: Context) -> Plan | None:
        """Return the stages on such a cluster, if they are known beforehand; else None.

        Parameters
        ----------
        context
            What the cluster can have.

        Raises
        ------
        SearchError
            If nothing can be trained there within the procedure's limits.

        Examples
        --------
        >>> from dagsel.flows import RandomSearch
        >>> RandomSearch(max_epochs=3).plan_for(Context(n_workers=4)) is None
        True
        """
        return None

    def fresh(self) -> Self:
        """Return a flow of the same configuration in its initial state."""
        return replace(self)  # type: ignore[type-var]  # subclasses are dataclasses

    @abstractmethod
    def start(self, context: Context) -> list[Decision]:
        """Begin a search: return the first decisions.

        Parameters
        ----------
        context
            What the flow may know at the start.
        """

    @abstractmethod
    def handle(self, event: Event) -> list[Decision]:
        """Return what to do about an event.

        Parameters
        ----------
        event
            What has happened.
        """


def save_state(flow: Flow) -> Json:
    """Return a flow's state as JSON.

    Parameters
    ----------
    flow
        A search procedure.

    Examples
    --------
    >>> from dagsel.flows import RandomSearch
    >>> flow = RandomSearch(max_epochs=3)
    >>> decisions = flow.start(Context(n_workers=1))
    >>> save_state(flow) != save_state(flow.fresh())
    True
    """
    return to_json(flow.state)


def load_state(flow: Flow, value: Json) -> None:
    """Set the state that `save_state` returned for a flow of the same configuration.

    Parameters
    ----------
    flow
        The flow that gets the state.
    value
        What `save_state` has returned.

    Examples
    --------
    >>> from dagsel.flows import RandomSearch
    >>> flow = RandomSearch(max_epochs=3)
    >>> decisions = flow.start(Context(n_workers=1))
    >>> other = flow.fresh()
    >>> load_state(other, save_state(flow))
    >>> other.state == flow.state
    True
    """
    flow.state = from_json(type(flow.state), value)


@short_traceback
def _check_arguments(procedure: type, args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Raise a `SearchError` for an argument that a procedure does not take or lacks.

    Nothing is said if none is given, as where a procedure is unpickled, nor if what a user has put
    around ``__init__`` may give some.
    """
    known = inspect.signature(procedure, follow_wrapped=False).parameters
    if not (args or given) or any(it.kind in _ANY for it in known.values()):
        return
    who = procedure.__name__
    refuse_elsewhere(who, given, known, elsewhere(known), error=SearchError)
    in_order, n = [name for name, it in known.items() if it.kind is not it.KEYWORD_ONLY], len(args)
    if twice := [name for name in in_order[:n] if name in given]:
        names = ", ".join(f"{name}=..." for name in in_order[: n + 1])
        raise SearchError(f"{who} got {twice[0]} twice, once by its place: write {who}({names})")
    needed = [name for name, it in known.items() if it.default is it.empty]
    if lacks := [name for name in needed if name not in (*in_order[:n], *given)]:
        lines = ", ".join(f"{name}={NEEDED.get(name, '...')}" for name in lacks)
        raise SearchError(f"{who} needs {' and '.join(lacks)}: write {lines}")
