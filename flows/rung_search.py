"""What all searches with rungs share: draw trials, keep to the concurrency, hear of results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dagsel.errors import SearchError
from dagsel.flow import (
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Flow,
    Reported,
    Train,
    Traits,
    TrialFailed,
    WorkersChanged,
)
from dagsel.flows.drawing import TRIALS_PER_WORKER, Drawing, check_counts, stop_all


@dataclass(slots=True)
class RungState(Drawing):
    """What every search with rungs has to remember."""

    n_concurrent: int = 0
    training: dict[int, int] = field(default_factory=dict)  # trial: epochs of its next rung


class RungSearch(Flow):
    """What searches with rungs share: draw trials, keep to the concurrency, hear of results.

    A subclass is a dataclass with the fields below. It says what becomes of a trial that
    stands on a rung or is lost, and what to do with free places.
    """

    max_epochs: int
    min_epochs: int
    reduction_factor: int
    n_concurrent: int | None
    state: Any

    def __post_init__(self) -> None:
        counts = {"min_epochs": self.min_epochs, "max_epochs": self.max_epochs}
        check_counts(**counts, reduction_factor=self.reduction_factor)
        if self.reduction_factor < 2:
            raise SearchError(
                f"reduction_factor must be 2 or more, got {self.reduction_factor}: with 1 every "
                "trial would train to the end"
            )
        if self.min_epochs > self.max_epochs:
            raise SearchError(
                f"min_epochs={self.min_epochs} is above max_epochs={self.max_epochs}; "
                "lower the first or raise the second"
            )
        self._check()
        check_counts(n_trials=self._n_trials(), n_concurrent=self.n_concurrent)

    def _check(self) -> None:
        """Refuse what is wrong with a subclass's own fields."""

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(self.max_epochs)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        self.state.context = context
        self.state.n_concurrent = self._places(context.n_workers)
        return self._advance()

    def handle(self, event: Event) -> list[Decision]:
        """Judge what has reached a rung, and fill the places that are free."""
        state: RungState = self.state
        if state.finished:
            return []
        decisions: list[Decision] = []
        match event:
            case Asked(trials):
                state.receive(event)
                self._admit(trials)
            case Reported(trial, epoch, value) if epoch >= state.training.get(trial, math.inf):
                epochs = state.training.pop(trial)
                decisions = self._judge(trial, epochs, state.context.loss(value))
            case TrialFailed(trial):
                self._lose(trial, trained=state.training.pop(trial, None) is not None)
            case WorkersChanged(n_workers):
                state.n_concurrent = self._places(n_workers)
            case DeadlineReached():
                state.finished = True
                return stop_all(self._live())
            case _:
                return []
        return [*decisions, *self._advance()]

    def _places(self, n_workers: int) -> int:
        return self.n_concurrent or TRIALS_PER_WORKER * max(1, n_workers)

    def _room(self) -> int:
        state: RungState = self.state
        return state.n_concurrent - len(state.training) - state.n_awaited

    def _ask(self) -> list[Decision]:
        state: RungState = self.state
        return state.ask(self._room(), n_trials=self._n_trials())

    def _train(self, trial: int, *, done: int, until: int) -> Train:
        self.state.training[trial] = until
        return Train(trial, until - done)

    def _miss(self, rung: int, loss: float, best: str) -> str:
        """Say why a trial is out; the lowest rung is rung 1."""
        value = f"{self.state.context.loss(loss):.6g}" if loss < math.inf else "no finite value"
        return f"rung {rung + 1}: {value} is not among the best {best}"

    def _n_trials(self) -> int:
        """How many trials the whole search draws."""
        raise NotImplementedError

    def _admit(self, trials: tuple[int, ...]) -> None:
        """Take new trials in."""
        raise NotImplementedError

    def _judge(self, trial: int, epochs: int, loss: float) -> list[Decision]:
        """Decide about a trial that has just reached a rung."""
        raise NotImplementedError

    def _lose(self, trial: int, *, trained: bool) -> None:
        """Forget a trial that failed, while it trained or before it could."""
        raise NotImplementedError

    def _live(self) -> set[int]:
        """All trials that are neither stopped nor failed."""
        raise NotImplementedError

    def _advance(self) -> list[Decision]:
        """Fill the free places, or finish."""
        raise NotImplementedError


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuse what is none of the known words.

    Raises
    ------
    SearchError
        Naming them.
    """
    if value not in known:
        raise SearchError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
