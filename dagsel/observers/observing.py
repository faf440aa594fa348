"""Tells observers, each in a thread of its own, so that none keeps the search waiting."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Iterable, Sequence

from dagsel.errors import SearchCancelledError
from dagsel.history.record import Record
from dagsel.observers.base import Observer, tell
from dagsel.observers.events import SearchBegan, Told
from dagsel.observers.feed import Feed, ending
from dagsel.storage.urls import hide

logger = logging.getLogger("dagsel")

#: The record is read anew after this time at the earliest,
READ_S = 0.25
#: and after so many times the time that it took.
SPARING = 200
#: The search ends once observers have taken in all. It says after a moment that it waits for one,
SAY_S = 2.0
#: and lets it go if it takes in nothing for longer than W&B waits for its own process,
STUCK_S = 90.0
#: or has not taken in all so long after the user has left at once: `dagsel.resume` tells it again.
LEAVE_S = 10.0
#: An observer that is so many behind is let go; what was before the search went on does not count.
MOST_WAITING = 100_000


class Observing:
    """Reads the record of a search and tells observers what is new.

    Parameters
    ----------
    observers
        Who is told.
    began
        What they are told first.
    record
        What was done before; it is told next.
    """

    def __init__(self, observers: Sequence[Observer], began: SearchBegan, record: Record) -> None:
        self._feed = Feed(is_past=True)
        self._due = 0.0
        self._last = record
        past = [began, *self._feed.news(record)]
        self._posts = [_Post(observer, past) for observer in observers]
        self._feed.is_past = False

    def __enter__(self) -> Observing:
        for post in self._posts:
            post.begin()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._tell([*self._feed.news(self._last), ending(self._last, error)])
        self._tell([None])
        ended = time.monotonic()
        leaves = isinstance(error, KeyboardInterrupt | SearchCancelledError)
        until = ended + LEAVE_S if leaves else math.inf
        for post in self._posts:
            post.join(ended, until)

    def update(self, record: Record) -> None:
        """Tell what the search has done, unless that was a moment ago."""
        if not self._posts:
            return
        self._last, now = record, time.monotonic()
        if now >= self._due:
            self._tell(self._feed.news(record))
            self._due = now + max(READ_S, SPARING * (time.monotonic() - now))

    def _tell(self, news: Iterable[Told | None]) -> None:
        for told in news:
            for post in self._posts:
                post.put(told)


class _Post:
    """An observer, its thread, and what waits for it: first the past, of any length."""

    def __init__(self, observer: Observer, past: Sequence[Told]) -> None:
        self._observer, self._name = observer, type(observer).__name__
        self._news: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
        for told in past:
            self._news.put(told)
        self._most_waiting = MOST_WAITING + len(past)
        self._is_gone = False
        self._taken_at = time.monotonic()  # when it was last done with a message
        name = f"dagsel-observer-{self._name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def put(self, told: Told | None) -> None:
        if self._is_gone:
            return
        if self._news.qsize() >= self._most_waiting:
            self._let_go(f"it is more than {MOST_WAITING:,} messages behind")
            return
        self._news.put(told)

    def join(self, ended: float, until: float) -> None:
        """Wait for it as long as it gets on; the search ended at `ended`."""
        if self._waits:
            self._thread.join(max(0.0, min(until, ended + SAY_S) - time.monotonic()))
        if self._waits:
            logger.warning("the search has ended, and waits for the observer %s", self._name)
        while self._waits:
            left_s = min(until, max(ended, self._taken_at) + STUCK_S) - time.monotonic()
            if left_s <= 0:
                n_left = self._news.qsize()  # without the one that it is at, but with the None
                self._let_go(f"it has not taken in all: {n_left} messages are left")
                return
            self._thread.join(left_s)

    @property
    def _waits(self) -> bool:
        return self._thread.is_alive() and not self._is_gone

    def _run(self) -> None:
        while (told := self._news.get()) is not None and not self._is_gone:
            try:
                tell(self._observer, told)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code may raise anything
                why = hide(str(error), self._observer._url_secrets)
                self._let_go(f"{type(error).__name__}: {why}")
            self._taken_at = time.monotonic()

    def _let_go(self, why: str) -> None:
        if not self._is_gone:
            self._is_gone = True
            logger.warning("the observer %s is told no more: %s", self._name, why)
