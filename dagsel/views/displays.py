"""Where a search is shown: in a terminal, in a notebook, in a log."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, Protocol
from weakref import WeakSet

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from dagsel.console import Progress, counted, printable, span
from dagsel.views.facts import Steer
from dagsel.views.notebook import LiveView, has_widgets
from dagsel.views.snapshot import Snapshot, TrialRow
from dagsel.views.table import notebook_table, terminal_lines
from dagsel.views.words import clock

#: A log has a line on the whole search so often.
LOG_EVERY_S = 60.0
#: The first line comes so soon; the time between two doubles until it is that above.
FIRST_LOG_S = 5.0
_STARTING = "starting the workers"
#: What lives in the terminal, one at a time: two would draw over each other.
_living: WeakSet[_Living] = WeakSet()
_choosing = threading.Lock()


class Display(Protocol):
    """Shows snapshots of a search."""

    @property
    def shows_workers(self) -> bool:
        """Whether it says what each worker does."""

    def start(self) -> None:
        """Show that workers are started."""

    def show(self, snapshot: Snapshot) -> None:
        """Show how the search stands."""

    def stop(self, snapshot: Snapshot | None, error: BaseException | None) -> None:
        """Show how it stood at the end, and leave the screen to others."""


def choose(
    how: Progress,
    console: Console,
    ended: Collection[int] = (),
    steer: Steer | None = None,
    folder: str = "",
) -> Display | None:
    """Return what shows a search; None for nothing.

    Of the `ended` trials a log has no line; it begins with the run's folder. `steer` takes the
    commands of a view that has buttons. Where another search lives in the terminal, it is a log.
    """
    if how == "auto":
        how = "table" if console.is_jupyter or _can_move(console) else "log"
    if how == "table" and console.is_jupyter:
        return LiveView(steer) if has_widgets() else InNotebook()
    if how in ("table", "line"):
        with _choosing:
            if not _living:
                kind = InTerminal if how == "table" else OneLine
                lives = kind(console)
                _living.add(lives)
                return lives
        how = "log"
    return InLog(console, ended, folder) if how == "log" else None


def _can_move(console: Console) -> bool:
    """Whether the cursor can move; rich takes a file for a terminal where FORCE_COLOR is set."""
    try:
        return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
    except (AttributeError, ValueError):  # some other object, or closed
        return False


class _Living(ABC):
    """What lives in a terminal, and leaves it to another one at its end."""

    @abstractmethod
    def show(self, snapshot: Snapshot) -> None:
        """Show how the search stands."""

    @abstractmethod
    def _end(self) -> None:
        """Stop to live."""

    def stop(self, snapshot: Snapshot | None, error: BaseException | None) -> None:
        """Show how it stood at the end."""
        try:
            if snapshot is not None:
                self.show(snapshot)
            self._end()
        finally:
            _living.discard(self)


class InTerminal(_Living):
    """A table that lives in a terminal."""

    shows_workers = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._link = _Link(console)
        self._live = Live(_STARTING, console=console, auto_refresh=False)

    def start(self) -> None:
        """Show that workers are started."""
        self._live.start(refresh=True)

    def show(self, snapshot: Snapshot) -> None:
        """Show how the search stands."""
        self._link.show(snapshot)
        text = "\n".join(terminal_lines(snapshot, height=self._console.height))
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _end(self) -> None:
        self._live.stop()


class InNotebook:
    """A table that lives below a cell of a notebook; it needs no widgets."""

    shows_workers = True

    def __init__(self) -> None:
        self._handle: Any = None

    def start(self) -> None:
        """Show that workers are started."""
        from IPython.display import HTML, display

        self._handle = display(HTML(_STARTING), display_id=True)  # type: ignore[no-untyped-call]

    def show(self, snapshot: Snapshot) -> None:
        """Show how the search stands."""
        from IPython.display import HTML

        if self._handle is not None:
            self._handle.update(HTML(notebook_table(snapshot)))  # type: ignore[no-untyped-call]

    def stop(self, snapshot: Snapshot | None, error: BaseException | None) -> None:
        """Show how it stood at the end."""
        if snapshot is not None:
            self.show(snapshot)


class _Link:
    """Shows once where Dask's dashboard is, above what lives in a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_shown = False

    def show(self, snapshot: Snapshot) -> None:
        """Show it, if there is one and it was not shown."""
        if snapshot.dashboard and not self._is_shown:
            self._is_shown = True
            self._console.print(Text(dashboard_told(snapshot)), soft_wrap=True)


class OneLine(_Living):
    """One line that lives in a terminal."""

    shows_workers = False

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
        )
        self._link = _Link(console)
        self._progress = RichProgress(*columns, console=console, refresh_per_second=4)
        self._task = self._progress.add_task(_STARTING, total=None)

    def start(self) -> None:
        """Show that workers are started."""
        self._progress.start()

    def show(self, snapshot: Snapshot) -> None:
        """Show how the search stands."""
        self._link.show(snapshot)
        self._progress.update(
            self._task,
            description=line(snapshot),
            completed=snapshot.n_epochs,
            total=snapshot.n_decided or None,
        )

    def _end(self) -> None:
        self._progress.stop()


class InLog:
    """Plain lines: one for each trial that has ended, some on all of them, and what came out."""

    shows_workers = False

    def __init__(self, console: Console, ended: Collection[int], folder: str = "") -> None:
        self._console, self._folder = console, folder
        self._ended = set(ended)
        self._due: float | None = None
        self._pause_s = FIRST_LOG_S
        self._has_link = False

    def start(self) -> None:
        """Show nothing yet."""

    def show(self, snapshot: Snapshot) -> None:
        """Write a line on each trial that has ended since, and one on all if it is due."""
        if self._folder:
            self._write(snapshot.seconds, f"the run is in {self._folder}")
            self._folder = ""
        if snapshot.dashboard and not self._has_link:
            self._has_link = True
            self._write(snapshot.seconds, dashboard_told(snapshot))
        ended = snapshot.rows.ended
        for number in sorted(ended.keys() - self._ended):
            self._write(snapshot.seconds, _end_of(snapshot.rows[ended[number]], snapshot.metric))
        self._ended = set(ended)
        if self._due is None:
            self._due = snapshot.seconds + self._pause_s
        if snapshot.seconds >= self._due:
            self._pause_s = min(2 * self._pause_s, LOG_EVERY_S)
            self._due = snapshot.seconds + self._pause_s
            _, *rest = snapshot.head
            self._write(snapshot.seconds, " · ".join([snapshot.far, *rest]))

    def stop(self, snapshot: Snapshot | None, error: BaseException | None) -> None:
        """Write what came out."""
        if snapshot is None:
            return
        self.show(snapshot)
        how = "has ended" if snapshot.is_over else "was interrupted"
        if error is not None:
            how = f"was interrupted by {type(error).__name__}"
        trials = f"{counted(len(snapshot.rows), 'trial')}, {counted(snapshot.n_epochs, 'epoch')}"
        cost = f"{span(snapshot.worker_seconds)} of workers' time"
        cost += "".join(f", {gauge.used}" for gauge in snapshot.gauges if gauge.is_money)
        told = [f"the search {how}: {trials}, {cost}", *snapshot.best_told]
        self._write(snapshot.seconds, " · ".join(told))

    def _write(self, seconds: float, text: str) -> None:
        # Above what lives in the terminal, which stands in for standard error.
        file = sys.stderr if self._console.stderr else self._console.file
        print(f"dagsel {clock(seconds)} · {printable(text)}", file=file, flush=True)


def _end_of(row: TrialRow, metric: str) -> str:
    parts = [f"trial {row.number} {row.state} after {counted(row.n_epochs, 'epoch')}"]
    if row.value is not None:
        parts.append(f"{metric} {row.value:.4g}")
    if row.state == "failed":
        parts.append(row.reason)
    return " · ".join([*parts, *([row.config] if row.config else [])])


def dashboard_told(snapshot: Snapshot) -> str:
    """Say where Dask's dashboard is."""
    return printable(f"Dask's dashboard: {snapshot.dashboard}")


def line(snapshot: Snapshot) -> str:
    """Return the text of the one line."""
    parts = [f"{snapshot.n_epochs} epochs", f"{snapshot.n_live} trials alive"]
    if n_failed := snapshot.counts.get("failed"):
        parts.append(f"{n_failed} failed")
    if snapshot.best is not None:
        parts.append(f"best {snapshot.metric} {snapshot.best.value:.4g}")
    if snapshot.n_front is not None:
        parts.append(f"{snapshot.n_front} on the Pareto front")
    return printable(" · ".join([*parts, f"{snapshot.units_per_second:.1f} units/s"]))
