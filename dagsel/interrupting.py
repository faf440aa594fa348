"""Ctrl-C ends a search in order; a second one leaves at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dagsel.driver.inbox import Inbox, Order
from dagsel.steering import FinishSearch

logger = logging.getLogger("dagsel")


@contextmanager
def interruptible(goes_on: str, inbox: Inbox | None = None) -> Iterator[Inbox]:
    """Take Ctrl-C as the command to finish, for as long as the ``with`` block lasts.

    A second Ctrl-C raises `KeyboardInterrupt`. Signals come to the main thread alone, and a handler
    of the user's own is left as it is. That of dask-jobqueue is not: whoever imports it has it, and
    it ends the process.

    Parameters
    ----------
    goes_on
        The call that goes on with the run, for the message.
    inbox
        Where the command is put; None for a new one, which is returned.
    """
    inbox = inbox or Inbox()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    is_jobqueues = str(getattr(before, "__module__", "")).startswith("dask_jobqueue.")
    if not is_main or not (before is signal.default_int_handler or is_jobqueues):
        yield inbox
        return

    def finish(number: int, frame: Any) -> None:
        """Have the search end at the next batch; a second Ctrl-C leaves at once."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logger.warning(
            "Ctrl-C: the search ends at the next batch and returns what it has. Press it again to "
            "leave at once. Either way %s goes on with it",
            goes_on,
        )
        inbox.post(Order(FinishSearch(resumable=True)))

    signal.signal(signal.SIGINT, finish)
    try:
        yield inbox
    finally:
        signal.signal(signal.SIGINT, before)
