"""A line that says what takes so long, shown after two seconds where someone can see it."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import Any

from rich.console import Console

from dagsel.storage.progress import is_watched

_PATIENCE_S = 2.0


class Waiting(contextlib.AbstractContextManager["Waiting"]):
    """Shows a line with a spinner while something goes on.

    Parameters
    ----------
    text
        What is done.

    Examples
    --------
    >>> with Waiting("measuring") as waiting:
    ...     waiting.say("measuring 2 of 4")
    """

    def __init__(self, text: str) -> None:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()  # it may be starting the line at this moment
        self._status.stop()
