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
    """Hears what a search does; inherit it and override the methods of interest.

    The methods are called one after the other, in a thread of the observer's own: a slow one delays
    no trial. An observer that raises an error is dropped with a warning, and the search goes on. So
    is one that takes in nothing for 90 s after the end of the search.

    When a search goes on in another process (`dagsel.resume`, `Run.extend`), all that happened
    before is sent once more from the beginning, so that nothing is missing if a process was killed.
    If you have kept it, skip it: trials and epochs have numbers, and `is_past` says what was
    before.

    Examples
    --------
    >>> class Best(Observer):
    ...     best = 0.0
    ...
    ...     def check(self):
    ...         print("can work")
    ...
    ...     def search_began(self, search):
    ...         print(f"maximizing {search.metric} in {search.run_dir}")
    ...
    ...     def trial_began(self, trial):
    ...         print(f"trial {trial.trial}: {dict(trial.params)}")
    ...
    ...     def epoch_ended(self, epoch):
    ...         self.best = max(self.best, epoch.value)
    ...
    ...     def trial_ended(self, trial):
    ...         print(f"trial {trial.trial} is {trial.state}")
    ...
    ...     def search_ended(self, search):
    ...         print(f"the best is {self.best}")
    >>> observer = Best()
    >>> observer.check()
    can work
    >>> observer.search_began(SearchBegan("3f9a", "digits", "accuracy", "maximize", "runs/1"))
    maximizing accuracy in runs/1
    >>> observer.trial_began(TrialBegan(3, {"lr": 0.1}))
    trial 3: {'lr': 0.1}
    >>> observer.epoch_ended(EpochEnded(3, 1, 0.91, {"accuracy": 0.91}, 0.4, 12.0, 1.7e9))
    >>> observer.trial_ended(TrialEnded(3, "complete", 0.91, 1, "trained to the end"))
    trial 3 is complete
    >>> observer.search_ended(SearchEnded(3, 0.91, 1, 1, 12.0, 12.0))
    the best is 0.91
    """

    def check(self) -> None:
        """Raise an error if it cannot work here, before anything is trained."""

    def search_began(self, search: SearchBegan) -> None:
        """Note that a search begins or goes on.

        Parameters
        ----------
        search
            Which search.
        """

    def trial_began(self, trial: TrialBegan) -> None:
        """Note that a trial begins.

        Parameters
        ----------
        trial
            Which trial.
        """

    def epoch_ended(self, epoch: EpochEnded) -> None:
        """Note that a trial has ended an epoch.

        Parameters
        ----------
        epoch
            Its metrics and times.
        """

    def trial_ended(self, trial: TrialEnded) -> None:
        """Note that a trial has ended; one of a search that is extended may end once more.

        Parameters
        ----------
        trial
            How it has ended.
        """

    def search_ended(self, search: SearchEnded) -> None:
        """Note that the search has ended; nothing more comes.

        Parameters
        ----------
        search
            The best trial and what was spent.
        """


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
