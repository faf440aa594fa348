"""The progress line of a running search, in a terminal or a notebook."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dagsel.history.record import Record

#: The line is written again after this time at the earliest.
_REFRESH_S = 0.1
#: Units per second are averaged over this time.
_WINDOW_S = 10.0


class SearchProgress:
    """Shows epochs done, trials alive, the best value of the metric and units per second.

    Nothing is shown if the console is neither a terminal nor a notebook.
    """

    def __init__(self, metric: str, *, console: Console | None = None) -> None:
        self._metric = metric
        self._console = console or Console(stderr=True)
        live = self._console.is_terminal or self._console.is_jupyter
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            console=self._console,
            disable=not live,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("starting the workers", total=None)
        self._window: deque[tuple[float, int]] = deque()
        self._due = 0.0
        self._last: Record | None = None

    def __enter__(self) -> SearchProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._last is not None:
            self._show(self._last, time.monotonic())
        self._progress.stop()

    def update(self, record: Record) -> None:
        """Show what the search has done."""
        if self._progress.disable:
            return
        self._last, now = record, time.monotonic()
        if now >= self._due:
            self._due = now + _REFRESH_S
            self._show(record, now)

    def _show(self, record: Record, now: float) -> None:
        self._progress.update(
            self._task,
            description=describe(record, self._metric, self._rate(len(record.units), now)),
            completed=record.n_epochs,
            total=record.n_epochs_decided or None,
        )

    def _rate(self, n_units: int, now: float) -> float:
        while self._window and now - self._window[0][0] >= _WINDOW_S:
            self._window.popleft()
        self._window.append((now, n_units))
        then, before = self._window[0]
        return (n_units - before) / (now - then) if now > then else 0.0


def describe(record: Record, metric: str, units_per_second: float) -> str:
    """Return the text of the line."""
    parts = [f"{record.n_epochs} epochs", f"{record.n_live} trials alive"]
    if record.failures:
        parts.append(f"{len(record.failures)} failed")
    if record.leading is not None:
        parts.append(f"best {metric} {record.leading.value:.4g}")
    if record.goals:
        parts.append(f"{len(record.top)} on the Pareto front")
    return " · ".join([*parts, f"{units_per_second:.1f} units/s"])
