"""When a unit has to stop: at a batch boundary, if it was told to or has had its share."""

from __future__ import annotations

import math
import threading
import time


class ShouldStop:
    """Says at each batch boundary whether a unit has to stop there.

    Parameters
    ----------
    stop
        Set when the unit is told to stop.
    max_seconds, max_batches
        What it may take; None for no bound.
    """

    __slots__ = ("_batches_left", "_deadline", "_stop")

    def __init__(
        self, stop: threading.Event, max_seconds: float | None, max_batches: int | None
    ) -> None:
        self._stop = stop
        self._deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
        self._batches_left = math.inf if max_batches is None else max_batches

    def __call__(self) -> bool:
        """Say whether to stop; asked once a batch."""
        self._batches_left -= 1
        return self._stop.is_set() or self._batches_left <= 0 or time.monotonic() >= self._deadline
