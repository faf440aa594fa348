"""What an observer is, and which are refused."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

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

logger = logging.getLogger("dagsel")

#: The observers of each search that runs in this process.
_HELD: dict[int, list[Observer]] = {}
_HOLDING = threading.Lock()


class Observer:
    """Hears what a search does; inherit it and override the methods of interest.

    The methods are called one after the other, in a thread of the observer's own: a slow one delays
    no trial. An observer that raises an error is dropped with a warning, and the search goes on. So
    is one that takes in nothing for 90 s after the end of the search.

    When a search goes on in another process (`dagsel.resume`, `Run.extend`), all that happened
    before is sent once more from the beginning, so that nothing is missing if a process was killed.
    If you have kept it, skip it: trials and epochs have numbers, and `is_past` says what was
    before.

    Searches that run at once need an object each: one that is given to two hears both, in two
    threads, and what it hears does not say which of them it is of.

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

    #: Whether it mixes up two searches that run at once; None if that is unknown.
    _is_of_one_search: ClassVar[bool | None] = None
    #: What its errors must not show when they are logged.
    _url_secrets: Collection[str] = ()

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
    """Return observers as a tuple, each of which can work here, and each once.

    Raises
    ------
    SearchError
        If something is no observer, or what it needs is not installed, or a tracker is that of
        another search that runs.

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
        _is_held(observer)
        observer.check()
    return tuple({id(observer): observer for observer in observers}.values())


@contextlib.contextmanager
def hold_observers(observers: Sequence[Observer]) -> Iterator[None]:
    """Hold the observers of a search until it has ended.

    Raises
    ------
    SearchError
        If another search holds one that cannot serve both.
    """
    mine = list(observers)
    with _HOLDING:
        shared = [observer for observer in mine if _is_held(observer)]
        _HELD[id(mine)] = mine
    for name in [type(it).__name__ for it in shared if it._is_of_one_search is None]:
        logger.warning(
            "the observer %s hears two searches at once, in two threads; make one for each, unless "
            "it keeps nothing of them",
            name,
        )
    try:
        yield
    finally:
        del _HELD[id(mine)]


def _is_held(observer: Observer) -> bool:
    """Whether a search holds it; raise an error if it can serve no other one."""
    if all(observer is not other for held in [*_HELD.values()] for other in held):
        return False
    if observer._is_of_one_search:
        name = type(observer).__name__
        raise SearchError(
            f"observers has the {name} of another search that has not ended: make one for each "
            f"search, as in {name}(...)"
        )
    return True


class ChangedParams:
    """Finds the parameters that a search changes while a trial trains, as those of `PBT`.

    Trackers keep one set of parameters for a trial, those that were drawn. Numbers that differ from
    them are written for each epoch, from the first one that does.

    Examples
    --------
    >>> changed = ChangedParams()
    >>> changed.began(TrialBegan(3, {"lr": 0.1, "width": 64}))
    >>> about = {"train_loss": 0.4, "seconds": 12.0, "at": 1.7e9}
    >>> for lr in (0.1, 0.2, 0.1):
    ...     params = {"lr": lr, "width": 64}
    ...     print(changed.numbers(EpochEnded(3, 1, 0.91, {}, **about, params=params)))
    {}
    {'params/lr': 0.2}
    {'params/lr': 0.1}
    """

    def __init__(self) -> None:
        self._drawn: dict[int, Mapping[str, Any]] = {}  # by trial
        self._names: dict[int, set[str]] = {}  # of those that differ, by trial

    def began(self, trial: TrialBegan) -> None:
        """Note what was drawn for a trial."""
        self._drawn[trial.trial], self._names[trial.trial] = trial.params, set()

    def numbers(self, epoch: EpochEnded) -> dict[str, float]:
        """Return the numbers to write for an epoch, by ``params/NAME``."""
        drawn, params = self._drawn.get(epoch.trial, {}), epoch.params
        names = self._names.setdefault(epoch.trial, set())
        names |= {name for name, value in params.items() if value != drawn.get(name)}
        numbers = {name: params[name] for name in sorted(names & params.keys())}
        return {f"params/{k}": float(v) for k, v in numbers.items() if isinstance(v, int | float)}


def metrics_beside(epoch: EpochEnded, others: Collection[str]) -> dict[str, float]:
    """Return the validation metrics of an epoch by the names that they have beside others.

    One that is called as one of the others is ``validation_`` and its name.

    Examples
    --------
    >>> metrics = {"accuracy": 0.91, "train_loss": 0.6}
    >>> epoch = EpochEnded(3, 1, 0.91, metrics, 0.4, seconds=12.0, at=1.7e9)
    >>> metrics_beside(epoch, ["train_loss"])
    {'accuracy': 0.91, 'validation_train_loss': 0.6}
    """
    return {
        f"validation_{name}" if name in others else name: value
        for name, value in epoch.metrics.items()
    }


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
