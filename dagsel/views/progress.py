"""What is shown while a search runs: a table, a line, or lines of a log."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress

from rich.console import Console

from dagsel.console import Progress, is_notebook
from dagsel.dispatch.description import WorkerNow
from dagsel.history.record import Record
from dagsel.views.displays import Display, choose
from dagsel.views.facts import Facts
from dagsel.views.snapshot import Snapshot

logger = logging.getLogger("dagsel")

#: What is shown is made anew after this time at the earliest,
REFRESH_S = 0.5
#: and after so many times the processor's time that it took.
SPARING = 150
#: Units per second are averaged over this time.
_WINDOW_S = 10.0


class Terminal(Console):
    """A console whose reader may go: rich would end the program then."""

    def on_broken_pipe(self) -> None:
        """Have the writer know."""
        raise BrokenPipeError("nobody reads it")


class SearchProgress:
    """Shows how a search stands.

    Parameters
    ----------
    metric
        What the search is about, of several metrics the first.
    how
        ``"table"``, ``"line"``, ``"log"`` or False for nothing. ``"auto"`` is a table in a terminal
        or a notebook, and a log elsewhere.
    ended
        Trials that an earlier session has ended: they are no news.
    console
        Where to; by default standard error.
    facts
        What the record does not hold.
    """

    def __init__(
        self,
        metric: str,
        how: Progress = "auto",
        *,
        ended: Collection[int] = (),
        console: Console | None = None,
        facts: Facts | None = None,
    ) -> None:
        self._metric = metric
        self._facts = facts or Facts()
        console = console or Terminal(stderr=True, force_jupyter=is_notebook() or None)
        self._display = choose(how, console, ended, self._facts.steer, self._facts.folder)
        self._window: deque[tuple[float, int]] = deque()
        self._due = 0.0
        self._cost_s = 0.0  # what the last one has cost
        self._last: Record | None = None

    def __enter__(self) -> SearchProgress:
        self._show(lambda display: display.start())
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._display is not None:
            self._facts.workers = tuple  # the search has none any more
            last = self._last
            self._show(
                lambda display: display.stop(None if last is None else self._snapshot(last), error)
            )

    def update(self, record: Record) -> None:
        """Show what the search has done, unless that was a moment ago."""
        if self._display is None:
            return
        self._last, now = record, time.monotonic()
        if now >= self._due:
            began = time.thread_time()  # other threads of the process may hold this one up
            self._show(lambda display: display.show(self._snapshot(record)))
            before, self._cost_s = self._cost_s, time.thread_time() - began
            # One that was dear once, as the first one that imports what it needs, is let pass.
            self._due = now + max(REFRESH_S, SPARING * min(before, self._cost_s))

    def _show(self, show: Callable[[Display], None]) -> None:
        """Show something; show nothing any more if that fails, as at the end of a pipe."""
        display = self._display
        if display is None:
            return
        try:
            show(display)
        except Exception as error:  # noqa: BLE001 - what shows a search must never end it
            self._display = None
            logger.warning(
                "the search goes on, and its progress is shown no longer: %s: %s",
                type(error).__name__, error,
            )  # fmt: skip
            with suppress(Exception):
                display.stop(None, error)  # a terminal gets its cursor back

    def follow(self, workers: Callable[[], tuple[WorkerNow, ...]], dashboard: str) -> None:
        """Show from now on what the workers do, and where Dask's dashboard is.

        The scheduler is asked what they do, so nobody asks it where that is not shown.
        """
        self._facts.dashboard = dashboard
        if self._display is not None and self._display.shows_workers:
            self._facts.workers = workers

    def _snapshot(self, record: Record) -> Snapshot:
        rate = self._rate(len(record.units), time.monotonic())
        return Snapshot.of(record, self._metric, rate, self._facts)

    def _rate(self, n_units: int, now: float) -> float:
        while self._window and now - self._window[0][0] >= _WINDOW_S:
            self._window.popleft()
        self._window.append((now, n_units))
        then, before = self._window[0]
        return (n_units - before) / (now - then) if now > then else 0.0
