"""What an observer is, and which are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagsel.checks import short_traceback, shown
from dagsel.errors import SearchError
from dagsel.observers.events import (
    EpochEnded,
    SearchBegan,
    SearchEnded,
    Told,
    TrialBegan,
    TrialEnded,
)


class Observer:
    """Is told what a search does; override what is of interest.

    The methods are called one after the other, in a thread of the observer's own: one that takes
    long delays no trial. An observer that raises is let go with a warning, and the search goes on;
    so is one that has not taken in all within 10 s after the end of the search.

    When a search goes on in another process (`dagsel.resume`, `Run.extend`), all that happened
    before is told again from the beginning, so that nothing is missing if a process was killed.
    Who has kept it skips it: a trial and an epoch are told by their numbers, and `is_past` says
    what was before.

    Examples
    --------
    >>> class Best(Observer):
    ...     def epoch_ended(self, epoch):
    ...         print(f"trial {epoch.trial}, epoch {epoch.epoch}: {epoch.value:.2f}")
    >>> Best().epoch_ended(EpochEnded(3, 1, 0.91, {"accuracy": 0.91}, 0.4, 12.0, 1.7e9))
    trial 3, epoch 1: 0.91
    """

    def check(self) -> None:
        """Raise an error if it cannot work here, before anything is trained."""

    def search_began(self, search: SearchBegan) -> None:
        """Take in that a search begins or goes on."""

    def trial_began(self, trial: TrialBegan) -> None:
        """Take in that there is a trial."""

    def epoch_ended(self, epoch: EpochEnded) -> None:
        """Take in what an epoch came to."""

    def trial_ended(self, trial: TrialEnded) -> None:
        """Take in how a trial has ended; one of a search that is extended may end once more."""

    def search_ended(self, search: SearchEnded) -> None:
        """Take in that nothing more comes."""


@short_traceback
def check_observers(observers: Any) -> tuple[Observer, ...]:
    """Return observers as a tuple, each of which can work here.

    Raises
    ------
    SearchError
        If something is no observer, or what it needs is not installed.

    Examples
    --------
    >>> check_observers("csv")
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: observers must be a list such as [CSV("epochs.csv")], got 'csv'
    """
    if isinstance(observers, str | Observer) or not isinstance(observers, Sequence):
        raise SearchError(
            f'observers must be a list such as [CSV("epochs.csv")], got {shown(observers)}'
        )
    for observer in observers:
        if isinstance(observer, type):
            raise SearchError(
                f"observers has the class {observer.__name__}: make an object of it, as in "
                f"{observer.__name__}(...)"
            )
        if not isinstance(observer, Observer):
            raise SearchError(
                f"observers has {shown(observer)}, which is none: let its class inherit "
                "dagsel.observers.Observer"
            )
        observer.check()
    return tuple(observers)


def tell(observer: Observer, told: Told) -> None:
    """Call the observer's method for what is told."""
    match told:
        case SearchBegan():
            observer.search_began(told)
        case TrialBegan():
            observer.trial_began(told)
        case EpochEnded():
            observer.epoch_ended(told)
        case TrialEnded():
            observer.trial_ended(told)
        case SearchEnded():
            observer.search_ended(told)
