"""The driver's ear for commands that other processes lay into the run's folder."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from dagsel.codec import Tagged
from dagsel.driver.inbox import Inbox, Order
from dagsel.errors import DagselError
from dagsel.steering import (
    AddTrial,
    CloneTrial,
    ExtendLimits,
    FinishSearch,
    PauseTrial,
    ResumeTrial,
    ScaleCluster,
    StopTrial,
    UserCommand,
)
from dagsel.storage.runs.control import Control, Letter

logger = logging.getLogger("dagsel")

#: What another process may command.
COMMANDS: Tagged[UserCommand] = Tagged(
    StopTrial,
    PauseTrial,
    ResumeTrial,
    CloneTrial,
    AddTrial,
    ScaleCluster,
    ExtendLimits,
    FinishSearch,
)
#: How often the folder is looked at: each look at an object store is a request that is paid for.
LOOK_S, LOOK_AT_STORE_S = 0.2, 2.0


class Listener(AbstractContextManager["Listener"]):
    """Carries commands from a run's folder to the inbox of its driver, and answers them there.

    A folder that cannot be written or read ends no search: nobody can steer it from outside then,
    which is logged.
    """

    def __init__(self, control: Control, inbox: Inbox) -> None:
        self._control, self._inbox = control, inbox
        self._is_over = threading.Event()
        self._waiting: dict[str, Future[int | None]] = {}
        self._token = ""
        self._has_complained = False
        self._thread = threading.Thread(target=self._listen, name="dagsel-listener", daemon=True)

    def __enter__(self) -> Listener:
        try:
            self._token = self._control.open()
        except (DagselError, OSError) as error:
            logger.warning("dagsel.attach cannot steer this search: %s", error)
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Answer what is left, once the inbox takes no more commands."""
        if self._token:
            self._is_over.set()
            self._thread.join()
            self._look()
            try:
                self._control.close()
            except OSError as error:
                self._complain(error)

    def _listen(self) -> None:
        while not self._is_over.wait(LOOK_S if self._control.is_local else LOOK_AT_STORE_S):
            self._look()

    def _look(self) -> None:
        try:
            for letter in self._control.letters(self._token):
                if letter.id not in self._waiting:
                    self._take(letter)
            for id_ in [id_ for id_, future in self._waiting.items() if future.done()]:
                self._control.answer(id_, _told(self._waiting[id_]))
                del self._waiting[id_]
        except (DagselError, OSError) as error:  # it may be there again at the next look
            self._complain(error)

    def _take(self, letter: Letter) -> None:
        why_not = letter.why_not
        if not why_not:
            try:
                command = COMMANDS.decode(letter.command)
            except (ValueError, RecursionError) as error:
                why_not = str(error)
        if why_not:
            logger.warning("a command from outside is not taken: %s", why_not)
            self._waiting[letter.id] = Future()
            self._waiting[letter.id].set_exception(DagselError(why_not))
        else:
            self._waiting[letter.id] = self._inbox.post(Order(command, letter.id))

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            logger.warning("commands from outside cannot be read now: %s", error)
            self._has_complained = True


def _told(future: Future[int | None]) -> dict[str, Any]:
    error = future.exception()
    if error is not None:
        return {"error": type(error).__name__, "text": str(error)}
    return {"trial": future.result()}
