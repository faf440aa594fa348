"""Calls to a cluster that do not wait for ever, or in silence, for one that does not answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from distributed import Client

T = TypeVar("T")

#: What takes longer than this is told of.
TELL_AFTER_S = 2.0
#: So long may a worker take to say that it is there.
_ANSWER_S = 2.0

logger = logging.getLogger("dagsel")


@contextmanager
def told_if_slow(waiting: Callable[[], str]) -> Iterator[None]:
    """Log what is waited for, if it takes longer than `TELL_AFTER_S`."""
    notice = threading.Timer(TELL_AFTER_S, lambda: logger.warning("%s", waiting()))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what a call returns; raise a `TimeoutError` if it takes longer than so many seconds.

    It may go on in a thread of its own.

    Examples
    --------
    >>> within(10.0, lambda: 3)
    3
    >>> within(0.01, threading.Event().wait)
    Traceback (most recent call last):
    ...
    TimeoutError: no answer within 0.01 s
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised below
            raised.append(error)

    thread = threading.Thread(target=run, name="dagsel-asks", daemon=True)
    thread.start()
    thread.join(min(seconds, threading.TIMEOUT_MAX))
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return returned[0]


def why_silent(strangers: Iterable[str]) -> str:
    """Say what it means that workers do not answer at the end, some of which never joined the run.

    Examples
    --------
    >>> why_silent(["tcp://10.0.0.1:4000"])
    'worker tcp://10.0.0.1:4000 never joined the search: its log says why, as a missing dagsel'
    """
    if there := ", ".join(sorted(strangers)):
        return f"worker {there} never joined the search: its log says why, as a missing dagsel"
    return "a worker does not answer, and is left with what it has of the run"


def silent_workers(client: Client, workers: Iterable[str]) -> list[str]:
    """Return the workers that do not answer, as they are frozen or hold Python's lock."""
    answers: dict[str, Any] = {}

    def ask(worker: str) -> None:
        with suppress(Exception):  # the client may be closed before there is an answer
            answers.update(client.run(int, workers=[worker], on_error="return"))

    threads = {it: threading.Thread(target=ask, args=(it,), daemon=True) for it in workers}
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(_ANSWER_S)
    return [worker for worker in threads if worker not in answers]
