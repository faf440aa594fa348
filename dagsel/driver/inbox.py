"""Commands on their way to the driver, from other threads and from signal handlers."""

from __future__ import annotations

import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field

from dagsel.errors import SearchCancelledError, SearchError
from dagsel.steering import UserCommand

_HERE = threading.local()


@dataclass(frozen=True, slots=True)
class Order:
    """A command that waits for the driver."""

    command: UserCommand
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    # The number of the trial that came of it, if one did, once it stands in the journal; or why it
    # was refused.
    answer: Future[int | None] = field(default_factory=Future)

    def refuse(self, error: BaseException) -> None:
        """Answer that nothing comes of it, unless it is answered."""
        with suppress(InvalidStateError):
            self.answer.set_exception(error)


class Inbox(AbstractContextManager["Inbox"]):
    """Commands in their order. It takes no lock, so a signal handler may post as well.

    At the end of a ``with`` block it is closed, with the block's error if it has one.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None  # has the driver look here
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._taken: Order | None = None  # the last one
        self._is_cancelled = False
        self._why_closed: BaseException | None = None

    def post(self, order: Order) -> Future[int | None]:
        """Put a command in; return its answer."""
        self._orders.put(order)
        if self._why_closed is not None:
            self.close(self._why_closed)
        self.wake()
        return order.answer

    def cancel(self) -> None:
        """Have the driver end at once."""
        self._is_cancelled = True
        self.wake()

    def next(self) -> Order | None:
        """Return the next command, None if there is none; raise if the search was cancelled."""
        if self._is_cancelled:
            raise SearchCancelledError("the search was cancelled")
        self._taken = None
        with suppress(queue.Empty):
            self._taken = self._orders.get_nowait()
        return self._taken

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Refuse all commands from now on: the search has ended, by an error or without one."""
        self._why_closed = error or SearchError("the search has ended, so it takes no command")
        if self._taken is not None:
            self._taken.refuse(self._why_closed)
        with suppress(queue.Empty):
            while True:
                self._orders.get_nowait().refuse(self._why_closed)


@contextmanager
def driving(url: str, inbox: Inbox) -> Iterator[None]:
    """Note that this thread drives the run in a folder, for as long as the ``with`` block lasts."""
    place = _place(url)
    _HERE.inboxes = {**getattr(_HERE, "inboxes", {}), place: inbox}
    try:
        yield
    finally:
        _HERE.inboxes = {at: it for at, it in _HERE.inboxes.items() if at != place}


def driven_here(url: str) -> Inbox | None:
    """Return the inbox of the run in a folder if this thread drives it, as in a callback.

    Whoever waits there for what the driver does waits for itself.
    """
    inbox: Inbox | None = getattr(_HERE, "inboxes", {}).get(_place(url))
    return inbox


def _place(url: str) -> str:
    """Return a folder's URL, or the one path of all that lead to it."""
    return url if "://" in url else os.path.realpath(url)
