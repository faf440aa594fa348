"""A progress bar for what takes longer than two seconds, where someone can see it."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

_PATIENCE_S = 2.0


def is_watched() -> bool:
    """Whether standard error is a terminal or this is a Jupyter kernel."""
    stream = sys.stderr
    return "ipykernel" in sys.modules or (stream is not None and stream.isatty())


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Bytes done of a total.

    Parameters
    ----------
    total
        Bytes to do.
    description
        What is done.

    Examples
    --------
    >>> with Progress(100, "writing") as progress:
    ...     progress.advance(60)
    ...     progress.done
    60
    """

    def __init__(self, total: int, description: str) -> None:
        self.total, self.description, self.done = total, description, 0
        self._begin = time.monotonic()
        self._watched = is_watched()
        self._bar: Any = None
        self._task: Any = None

    def advance(self, n_bytes: int) -> None:
        """Count bytes as done."""
        self.done += n_bytes
        if self._bar is None and self._watched and self._is_late():
            self._show()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)

    def _is_late(self) -> bool:
        return time.monotonic() - self._begin > _PATIENCE_S

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
