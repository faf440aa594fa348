"""What searches share that are given a deadline and a budget: arguments, checks, and their end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from dagsel.errors import SearchError
from dagsel.flow import Context, Decision, Finish, Flow, Stop, Traits, WorkersChanged
from dagsel.flows.drawing import Drawing, check_counts
from dagsel.planning.budget import Budget, read_budget, to_seconds
from dagsel.planning.nodes import nodes_for
from dagsel.planning.scaling import Scaling, ScalingModel, UniversalScaling

#: Epochs that a trial is given ahead, so that none waits for the answer to its last report.
EPOCHS_AHEAD = 2
#: Share of the deadline that is kept free for the last pause; without it the deadline would come
#: before the last evaluation.
LAST_PAUSE = 0.001


@dataclass
class BudgetedFlow(Flow):
    """A search that is given a deadline and a budget, and may be given the last epoch of a trial.

    Parameters
    ----------
    deadline
        Seconds from the beginning of the run, or text such as ``"10 min"``.
    budget
        Worker-seconds, or text such as ``"40 worker-minutes"`` or ``"12.50 USD"``.
    max_epochs
        Epochs of a trial at most; None for as many as there is time for.
    price_per_worker_hour
        What a budget in money is divided by.
    """

    deadline: float | str
    budget: float | str
    _: KW_ONLY
    max_epochs: int | None = None
    price_per_worker_hour: str | float | None = None
    deadline_s: float = field(init=False, repr=False, compare=False)
    cost: Budget = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_staged(max_epochs=self.max_epochs)
        self.deadline_s = to_seconds("deadline", self.deadline)
        self.cost = read_budget(self.budget, self.price_per_worker_hour)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(
            self.max_epochs, deadline_s=self.deadline_s, budget=self.cost, scores_parts=True
        )


@dataclass(slots=True)
class BudgetedState(Drawing):
    """What a search holds that draws trials on, and pauses all of them to score them."""

    n_workers: int = 0  # that are there
    seconds: float = 0.0
    best: tuple[float, int] | None = None  # loss and trial, of those that are complete
    pausing: set[int] = field(default_factory=set)
    paused_at: float = 0.0  # when they were told to
    pause_s: float | None = None  # how long a pause and its evaluation took

    def complete(self, trial: int, loss: float, epochs: int) -> Stop:
        """Stop a trial that has trained to its last epoch; remember it if it is the best."""
        self.best = min((loss, trial), self.best or (loss, trial))
        return Stop(trial, f"trained to the end, {epochs} epochs", "complete")

    def end(
        self, trials: Iterable[int], scored: Iterable[tuple[float, int]], reason: str
    ) -> list[Decision]:
        """End the search; `scored` has loss and number of the live trials that have a score."""
        self.finished = True
        _, best = min([*scored, *([self.best] if self.best else [])], default=(0.0, None))
        return end_all(trials, best, reason)


class Spending(Protocol):
    """The state of a search that counts what its workers cost."""

    context: Context
    n_workers: int  # that are there
    n_wanted: int  # that were asked for
    seconds: float  # when that was known
    n_billed: int  # the most that cost something since then
    spent: float  # worker-seconds until then


def n_billed(state: Spending) -> int:
    """Return how many workers cost something: those of jobs that wait in a queue do not."""
    capacity = state.context.capacity
    if capacity.bills_requests:
        return state.n_wanted
    return nodes_for(state.n_workers, capacity.node_size)


def note_workers(state: Spending, event: WorkersChanged) -> None:
    """Note how many workers are there; the start of a job costs as much as that of the first."""
    before, context = n_billed(state), state.context
    state.n_workers = event.n_workers
    if not context.capacity.bills_requests:
        if event.seconds is not None:
            state.spent += state.n_billed * (event.seconds - state.seconds)
            state.seconds, state.n_billed = event.seconds, 0
        there = nodes_for(context.n_workers, context.capacity.node_size)
        start_s = context.worker_seconds / max(1, there)
        state.spent += max(0, n_billed(state) - before) * start_s
        state.n_billed = max(state.n_billed, n_billed(state))


def end_all(trials: Iterable[int], best: int | None, reason: str) -> list[Decision]:
    """End a search; what its best trial has trained counts as complete.

    Examples
    --------
    >>> end_all([4, 2], 2, "it is over")[1:]
    [Stop(trial=2, reason='it is over; it is the best', outcome='complete'), Finish()]
    """
    stops = [
        Stop(trial, f"{reason}; it is the best", "complete")
        if trial == best
        else Stop(trial, reason)
        for trial in trials
    ]
    return [*stops, Finish()]


def check_staged(**counts: Any) -> None:
    """Check counts of 1 or more, and factors of 2 or more; of three None is the default.

    Raises
    ------
    SearchError
        Naming the wrong value.
    """
    for name in ("max_epochs", "max_workers_per_trial", "n_trials"):
        if counts.get(name, 1) is None:
            del counts[name]
    check_counts(**counts)
    for name in counts.keys() & {"reduction_factor", "parallelism_factor"}:
        if counts[name] < 2:
            raise SearchError(f"{name} must be 2 or more, got {counts[name]!r}")


def check_scaling(scaling: ScalingModel | None) -> None:
    """Raise a `SearchError` if it is no scaling; None is a default."""
    if not isinstance(scaling, Scaling | UniversalScaling | None):
        raise SearchError(
            f"scaling must be a Scaling or a UniversalScaling, got {scaling!r}; write "
            "Scaling({2: 1.8, 4: 3.1})"
        )
