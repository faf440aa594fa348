"""A search that another process drives: looked at, and steered through its folder."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dagsel.arguments import checked
from dagsel.checks import short_traceback, shown
from dagsel.console import Progress, span
from dagsel.errors import SearchError, WorkloadError
from dagsel.history.result import Run
from dagsel.history.settings import Settings
from dagsel.listening import COMMANDS
from dagsel.loading import read
from dagsel.planning.budget import to_seconds
from dagsel.steerable import READ_PAUSE, Steerable
from dagsel.steering import UserCommand
from dagsel.storage import RunDir
from dagsel.storage.files import Url
from dagsel.study import Space
from dagsel.views.facts import Facts
from dagsel.views.progress import REFRESH_S, SearchProgress
from dagsel.workloads.base import Workload

if TYPE_CHECKING:
    from dagsel.study import Study

logger = logging.getLogger("dagsel")

#: How often an answer and the end of the search are looked for.
_LOOK_S = 0.1


@short_traceback
def attach(
    run_dir: Url,
    *,
    token: str | None = None,
    workload: Workload | None = None,
    space: Space | None = None,
    study: Study | str | None = None,
) -> Attached:
    """Look at a search that another process drives, and steer it, by its run's folder.

    Parameters
    ----------
    run_dir
        The run's folder: what `Search.run_dir` and the first line of a search's output name.
    token
        What lets you steer it: ``token`` in the folder's ``control.json``. None to read it there,
        when a command is given; the file is readable to who began the search alone.
    workload, space, study
        As for `dagsel.load`.

    Returns
    -------
    Attached
        Its ``result`` is read anew each time; its commands are those of a `Search`.

    Raises
    ------
    RunDirError
        If ``run_dir`` holds no run, is damaged, or was written by a newer dagsel.

    Examples
    --------
    In one process ``dagsel.optimize(..., run_dir="run")`` trains. In another one:

    >>> search = dagsel.attach("run")  # doctest: +SKIP
    >>> search.result.record.n_live  # doctest: +SKIP
    4
    >>> search.stop(3)  # doctest: +SKIP
    """
    if token is not None and not isinstance(token, str):
        raise SearchError(f'token must be the text of "token" in control.json, got {shown(token)}')
    attached = Attached(run_dir, token, {"workload": workload, "space": space, "study": study})
    attached._folder.about()  # raises if it is none
    return attached


class Attached(Steerable):
    """A search that another process drives. `dagsel.attach` returns it.

    A command returns when it is written to the run's journal, as one of a `Search`. If the driver
    is killed before it has answered, the command stays in the folder. It is performed once, if
    `dagsel.resume` goes on. In a callback of the search itself a command returns at once, as that
    of a `Search`.

    Attributes
    ----------
    run_dir
        The run's folder.

    Examples
    --------
    In one process ``dagsel.optimize(..., run_dir="run")`` trains. In another one:

    >>> search = dagsel.attach("run")  # doctest: +SKIP
    >>> search.is_running, search.driver  # doctest: +SKIP
    (True, 'pid 4711 of ada on node-1 since 2026-03-01T10:12:45+00:00')
    >>> search.stop(3)  # doctest: +SKIP
    >>> run = search.watch()  # or search.wait(), which shows nothing  # doctest: +SKIP
    """

    def __init__(self, run_dir: Url, token: str | None, opened_with: dict[str, Any]) -> None:
        folder: RunDir = checked(run_dir=run_dir).run_dir
        self._folder, self._token, self._given = folder, token, opened_with
        self._url = run_dir
        self._is_warned = False
        self.run_dir = folder.url

    def __repr__(self) -> str:
        about = "goes on" if self.is_running else "nobody drives it now"
        return f"<dagsel.Attached to {self.run_dir}: {about}>"

    @property
    def is_running(self) -> bool:
        """Whether a driver is at work; one on another machine that died counts for a minute."""
        return self._folder.driver is not None

    @property
    def driver(self) -> str:
        """Who drives it: process, user, machine, since when; empty if nobody does."""
        return str(self._folder.driver or "")

    @property
    def result(self) -> Run:
        """The run so far, read anew each time."""
        run, why_no_study = read(self._url, **self._given)
        if why_no_study and not self._is_warned:  # it is read again and again
            self._is_warned = True
            logger.warning("the run is opened without its study: %s", why_no_study)
        return run

    @short_traceback
    def watch(self, progress: Progress = "auto") -> Run:
        """Show how the search stands until nobody drives it any more.

        What workers do at the moment only its driver knows.

        Parameters
        ----------
        progress
            As for `dagsel.optimize`.

        Returns
        -------
        Run
            As `wait` does.
        """
        self._check_not_here("watch")
        progress = checked(progress=progress).progress
        run = self.result
        ended = [number for number, trial in run.record.trials.items() if not trial.is_live]
        facts = Facts.read(Settings.from_json(self._folder.about(), self.run_dir))
        with SearchProgress(run.metric, progress, ended=ended, facts=facts) as shown:
            shown.update(run.record)
            while self.is_running:
                began = time.monotonic()
                run = self.result
                shown.update(run.record)
                time.sleep(max(REFRESH_S, READ_PAUSE * (time.monotonic() - began)))
            run = self.result
            shown.update(run.record)
        return run

    @short_traceback
    def wait(
        self,
        timeout: float | str | timedelta | None = None,
        *,
        until: Callable[[Run], object] | None = None,
    ) -> Run:
        """Wait until nobody drives the search any more: it has ended, or its driver is gone.

        Parameters
        ----------
        timeout, until
            As of `Search.wait`.

        Returns
        -------
        Run
            ``run.record.finished`` says whether it has ended.

        Raises
        ------
        TimeoutError
            If it has not ended by then, and `until` is not true.
        SearchError
            If a callback of the search calls it, as it does in `watch`.
        """
        self._check_not_here("wait")
        timeout_s = math.inf if timeout is None else to_seconds("timeout", timeout)
        ends = time.monotonic() + timeout_s
        look = self._looks_for(until, _LOOK_S)
        while self.is_running:
            if (run := look()) is not None:
                return run
            if time.monotonic() >= ends:
                raise TimeoutError(f"the search goes on after {span(timeout_s)}; wait longer")
            time.sleep(_LOOK_S)
        return self.result

    @property
    def _goes_on(self) -> bool:
        return not read(self._url)[0].record.finished

    @short_traceback
    def _command(self, command: UserCommand) -> int | None:
        control = self._folder.control
        token = self._token
        if self.is_running and token is None:
            token = control.token()
        if not self.is_running or token is None:
            raise SearchError(self._why_none())
        try:
            id_ = control.post(COMMANDS.encode(command), token)
        except (TypeError, ValueError):
            raise SearchError(
                f"{command} cannot be written as JSON, so only the process that drives the search "
                "can take it: give numbers, texts and truth values"
            ) from None
        told, goes_on = control.take_answer(id_), True
        while told is None and goes_on:
            time.sleep(_LOOK_S)
            goes_on = self.is_running
            told = control.take_answer(id_)
        if told is None and control.withdraw(id_, token):
            record = read(self._url)[0].record
            if id_ in record.commands:  # it could not be answered
                return record.added.get(id_)
            raise SearchError(
                f"the search in {self.run_dir} ended before it took the command, so nothing was "
                "done; give it again when dagsel.resume or Run.extend goes on"
            )
        if told is None:
            raise SearchError(
                f"the driver of {self.run_dir} was gone before it answered; the command is kept, "
                "and is performed once when dagsel.resume goes on with the search"
            )
        if "error" in told:
            kind = WorkloadError if told["error"] == WorkloadError.__name__ else SearchError
            raise kind(str(told.get("text")))
        trial = told.get("trial")
        return trial if isinstance(trial, int) else None

    def _why_none(self) -> str:
        record = read(self._url)[0].record
        if record.finished and not record.interrupted:
            return "the search has ended, so it takes no command"
        if self.is_running:
            return f"the search in {self.run_dir} does not listen yet, or not any more; try again"
        return (
            f"nobody drives the search in {self.run_dir} now, so none performs a command: "
            "dagsel.resume goes on with it"
        )
