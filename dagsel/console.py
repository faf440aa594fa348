"""Tables, and progress of work that takes longer than two seconds, in terminals and notebooks."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Sequence
from html import escape
from typing import Any

_PATIENCE_S = 2.0


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with right-aligned columns.

    Examples
    --------
    >>> text_table([("n", "speed"), ("10", "1.5")])
    ['  n  speed', ' 10    1.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" " + "  ".join(map(str.rjust, row, widths)) for row in rows]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML; its first row is the head.

    Examples
    --------
    >>> html_table([("n", "speed"), ("10", "1.5")])
    '<table><tr><th>n</th><th>speed</th></tr><tr><td>10</td><td>1.5</td></tr></table>'
    """
    head, *body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = [head.replace("td>", "th>"), *body]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def is_watched() -> bool:
    """Whether standard error is a terminal or this is a Jupyter kernel."""
    stream = sys.stderr
    return "ipykernel" in sys.modules or (stream is not None and stream.isatty())


class ProgressBar(contextlib.AbstractContextManager["ProgressBar"]):
    """Shows how many bytes of a total are done.

    Examples
    --------
    >>> with ProgressBar(100, "writing") as progress:
    ...     progress.advance(60)
    ...     progress.done
    60
    """

    def __init__(self, total: int, description: str) -> None:
        self.total, self.description, self.done = total, description, 0
        self._shown_from = time.monotonic() + _PATIENCE_S if is_watched() else float("inf")
        self._bar: Any = None
        self._task: Any = None

    def advance(self, n_bytes: int) -> None:
        """Count bytes as done."""
        self.done += n_bytes
        if self._bar is None and time.monotonic() > self._shown_from:
            self._show()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)

    def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self.description, total=self.total)
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class Waiting(contextlib.AbstractContextManager["Waiting"]):
    """Shows a line with a spinner while the block runs.

    Examples
    --------
    >>> with Waiting("measuring") as waiting:
    ...     waiting.say("measuring 2 of 4")
    """

    def __init__(self, text: str) -> None:
        from rich.console import Console

        self._status: Any = Console(stderr=True).status(text)
        self._timer = threading.Timer(_PATIENCE_S, self._status.start)
        self._timer.daemon = True

    def say(self, text: str) -> None:
        """Change the line."""
        self._status.update(text)

    def __enter__(self) -> Waiting:
        if is_watched():
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()  # it may be starting the line at this moment
        self._status.stop()


def readable_size(n_bytes: float) -> str:
    """Return a number of bytes as text for people.

    Examples
    --------
    >>> readable_size(999), readable_size(1_234_000), readable_size(5e12)
    ('999 B', '1.2 MB', '5.0 TB')
    """
    if n_bytes < 1000:
        return f"{n_bytes:.0f} B"
    power = min(4, int(math.log10(n_bytes)) // 3)
    return f"{n_bytes / 1000**power:,.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
