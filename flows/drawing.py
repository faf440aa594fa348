"""What searches hold that draw trials one after another: the count of them, and common checks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dagsel.checks import whole
from dagsel.flow import Ask, Asked, Context, Decision, Finish, Sampling, Stop

#: Trials in flight for each worker: with fewer, workers wait for trials at the end of a round.
TRIALS_PER_WORKER = 4


@dataclass(slots=True)
class Drawing:
    """How many trials a search has asked for, and whether there are more.

    Examples
    --------
    >>> drawing = Drawing()
    >>> drawing.ask(4, n_trials=6), drawing.ask(4, n_trials=6), drawing.ask(4, n_trials=6)
    ([Ask(n=4, sampling='study')], [Ask(n=2, sampling='study')], [])
    >>> drawing.receive(Asked((0, 1, 2, 3)))
    >>> drawing.n_awaited
    2
    """

    context: Context = field(default_factory=lambda: Context(n_workers=1))
    n_asked: int = 0
    n_awaited: int = 0  # asked for, and not here yet
    exhausted: bool = False  # the space has no more
    finished: bool = False

    def ask(
        self, room: int, *, n_trials: int | None = None, sampling: Sampling = "study"
    ) -> list[Decision]:
        """Ask for as many trials as there is room for, but for no more than `n_trials` in all."""
        n = room if n_trials is None else min(room, n_trials - self.n_asked)
        if n <= 0 or self.exhausted:
            return []
        self.n_asked += n
        self.n_awaited += n
        return [Ask(n, sampling)]

    def receive(self, asked: Asked) -> None:
        """Count trials that have come; after the last one of the space none is awaited."""
        self.exhausted |= asked.exhausted
        self.n_awaited = 0 if asked.exhausted else max(0, self.n_awaited - len(asked.trials))

    def go_on(self, n_trials: int) -> int:
        """Go on after the end; return how many trials are drawn in all, with so many more."""
        self.n_asked -= self.n_awaited  # what was not answered then comes no more
        self.n_awaited, self.finished = 0, False
        return self.n_asked + n_trials


def n_places(
    n_concurrent: int | None, n_workers: int, trials_per_worker: int = TRIALS_PER_WORKER
) -> int:
    """Return how many trials may train at once.

    Examples
    --------
    >>> n_places(None, 2), n_places(None, 0), n_places(3, 2)
    (8, 4, 3)
    """
    return n_concurrent or trials_per_worker * max(1, n_workers)


def check_counts(*, n_concurrent: int | None = None, **counts: Any) -> None:
    """Raise a `SearchError` if one is no whole number of 1 or more; `n_concurrent` may be None."""
    if n_concurrent is not None:
        counts["n_concurrent"] = n_concurrent
    for name, value in counts.items():
        whole(name, value)
    if n_concurrent is not None and n_concurrent > counts.get("n_trials", n_concurrent):
        warnings.warn(
            f"n_concurrent is {n_concurrent}, but n_trials is {counts['n_trials']}: no more than "
            "these will train at once",
            stacklevel=5,
        )


def stop_all(trials: Iterable[int]) -> list[Decision]:
    """Stop all live trials and finish, because the time is over."""
    return [*(Stop(trial, "the time or the budget is over") for trial in sorted(trials)), Finish()]
