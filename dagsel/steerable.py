"""What steers a search: the commands that a user gives, whoever carries them to the driver."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dagsel.checks import named_arguments, short_traceback, whole
from dagsel.driver.inbox import Order, driven_here
from dagsel.errors import SearchError
from dagsel.flow.argument_names import NAMES
from dagsel.history import attribute_names
from dagsel.planning.budget import to_seconds
from dagsel.steering import (
    AddTrial,
    CloneTrial,
    ExtendLimits,
    FinishSearch,
    PauseTrial,
    ResumeTrial,
    ScaleCluster,
    StopTrial,
    UserCommand,
)

if TYPE_CHECKING:
    from dagsel.history.result import Run

logger = logging.getLogger("dagsel")

#: A run is read again after so many times as long as reading it has taken.
READ_PAUSE = 10
#: As many if somebody waits for what it says.
_WAIT_PAUSE = 2
#: What `extend` is given once a search has ended.
_LATER = dict.fromkeys(
    ("max_epochs", *NAMES["max_epochs"], "n_trials", *NAMES["n_trials"]),
    "when the search has ended, write run.extend(n_trials=20, max_epochs=20)",
)


class Steerable(ABC):
    """A search that takes commands.

    In a callback, which the search itself calls, a command returns at once and is performed when
    the callback has returned. If it cannot be performed, that is said in the log.
    """

    run_dir: str

    @property
    @abstractmethod
    def result(self) -> Run:
        """What the search has come to until now."""

    if not TYPE_CHECKING:  # else any attribute would be right

        def __getattr__(self, name: str) -> Any:
            from dagsel.history.result import Run

            of_a_run = {*dir(Run), *(field.name for field in fields(Run))}
            there = {each: f"result.{each}" for each in of_a_run if not each.startswith("_")}
            return attribute_names.refuse(self, name, attribute_names.SEARCH | there)

    def _looks_for(
        self, until: Callable[[Run], object] | None, least_s: float
    ) -> Callable[[], Run | None]:
        """Return a function that reads the run and returns it if a condition holds, else None.

        It reads no more often than every `least_s`, and never without a condition.
        """
        looks_at = 0.0

        def look() -> Run | None:
            nonlocal looks_at
            began = time.monotonic()
            if until is None or began < looks_at:
                return None
            run = self.result
            if until(run):
                return run
            ended = time.monotonic()
            looks_at = ended + max(least_s, _WAIT_PAUSE * (ended - began))
            return None

        return look

    def stop(self, trial: int) -> None:
        """End a trial at its next batch. It is pruned, or complete if it is the best of all.

        The search goes on as if the trial had failed: most draw another one instead.

        Parameters
        ----------
        trial
            Its number.

        Raises
        ------
        SearchError
            If it has ended, or there is none of this number; nothing changes.
        """
        self._give(StopTrial(_number(trial)))

    def pause(self, trial: int) -> None:
        """Pause a trial at its next batch until it is resumed; its state is kept.

        To the search procedure it is a slow trial. So the search ends only when the trial is
        resumed or stopped, at a deadline, or by `finish`.

        Parameters
        ----------
        trial
            Its number.

        Raises
        ------
        SearchError
            As in `stop`; or it is paused already.
        """
        self._give(PauseTrial(_number(trial)))

    def resume(self, trial: int) -> None:
        """Let a trial go on that was paused, at the sample where it stopped.

        Parameters
        ----------
        trial
            Its number.

        Raises
        ------
        SearchError
            As in `stop`; or `pause` has not paused it.
        """
        self._give(ResumeTrial(_number(trial)))

    def clone(self, trial: int, /, **changes: Any) -> int:
        """Train a copy of a trial, with some other parameters.

        It goes on from the weights and the optimizer's state that the trial had after its last
        epoch, and trains as many epochs as that one had left, one at least. The search procedure
        does not stop it early. The trial itself goes on.

        Parameters
        ----------
        trial
            Number of a trial that has not ended, and has ended an epoch.
        **changes
            Parameters of the space, by name: ``clone(3, lr=1e-3)``.

        Returns
        -------
        int
            The number of the new trial.

        Raises
        ------
        SearchError
            As in `stop`; or a parameter is none of the space's, is missing, or is outside of it.
        WorkloadError
            If the state cannot go on with them, as they make another model.

        Examples
        --------
        >>> search.clone(3, lr=1e-3)  # doctest: +SKIP
        8
        """
        return self._new(CloneTrial(_number(trial), changes))

    def add(self, params: dict[str, Any]) -> int:
        """Train a configuration of your own to the end; the search procedure does not stop it.

        Parameters
        ----------
        params
            All parameters that the space suggests, by name: ``add({"lr": 0.01, "width": 64})``.

        Returns
        -------
        int
            The number of the new trial.

        Raises
        ------
        SearchError
            If a parameter is missing, is none of the space's, or is outside of it.
        """
        if not isinstance(params, dict):
            raise SearchError(f'params must be a dict such as {{"lr": 0.01}}, got {params!r}')
        return self._new(AddTrial(params))

    def scale(self, n_workers: int) -> None:
        """Set the number of workers from now on; one that is lost is replaced.

        Workers that leave first finish what they run. From now on the search leaves idle workers
        alone, whatever ``small_population`` says.

        Parameters
        ----------
        n_workers
            How many, at least one.

        Raises
        ------
        SearchError
            If the cluster cannot be scaled or cannot have so many, or the search procedure plans
            its workers itself (`SEER`, `HyperSched`, `Lookahead`).

        Examples
        --------
        >>> search.scale(16)  # doctest: +SKIP
        """
        self._give(ScaleCluster(whole("n_workers", n_workers, least=1)))

    @named_arguments("Search.extend", _LATER, error=SearchError)
    def extend(
        self,
        *,
        deadline: float | str | timedelta | None = None,
        budget: float | str | None = None,
    ) -> None:
        """Give the search another deadline or budget, a later or an earlier one.

        More trials and epochs are given to a search that has ended, by `Run.extend`.

        Parameters
        ----------
        deadline
            When the search ends with what it has, counted from now on: seconds, or a text such as
            ``"10 min"``; None to keep the present one.
        budget
            What all workers may cost from now on, as for `dagsel.optimize`; None likewise.

        Raises
        ------
        SearchError
            If one cannot be read, or is money and no price is known; if the search procedure has
            planned with limits of its own.
        """
        left_s = None if deadline is None else to_seconds("deadline", deadline)
        self._give(ExtendLimits(left_s, budget))

    def finish(self) -> None:
        """End the search at the next batch, with the best so far; `wait` returns the run."""
        self._give(FinishSearch())

    def _give(self, command: UserCommand) -> int | None:
        inbox = driven_here(self.run_dir)
        if inbox is None:
            return self._command(command)
        if isinstance(command, AddTrial | CloneTrial):
            raise SearchError(
                "add and clone return the number of the new trial, which is drawn when the "
                "callback has returned: call them in another thread"
            )

        def tell(done: Future[int | None]) -> None:
            """Say why it is not performed, if not because the search has ended meanwhile."""
            if (error := done.exception()) is not None and self._goes_on:
                logger.warning("%s of a callback is not performed: %s", command, error)

        inbox.post(Order(command)).add_done_callback(tell)
        return None

    def _check_not_here(self, call: str) -> None:
        """Raise if this thread would wait for itself."""
        if driven_here(self.run_dir) is not None:
            raise SearchError(
                f"{call}() in a callback would wait for the callback itself; read search.result "
                "there"
            )

    @property
    @abstractmethod
    def _goes_on(self) -> bool:
        """Whether the search has not finished."""

    @abstractmethod
    def _command(self, command: UserCommand) -> int | None:
        """Give a command; return the number of the trial that came of it, if one did."""

    def _new(self, command: UserCommand) -> int:
        number = self._give(command)
        if number is None:
            raise SearchError("the search ended before the trial was drawn; Run.extend draws more")
        return number


@short_traceback
def answer(future: Future[int | None]) -> int | None:
    """Wait for what came of a command."""
    return future.result()


def _number(trial: int) -> int:
    return whole("trial", trial, least=0)
