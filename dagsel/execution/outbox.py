"""What the driver sends the scheduler: each turn's together.

A message costs the scheduler, the client and the network some half a millisecond, whatever is in
it, and an answer is as much again. So commands ask for no answer, and what one turn of the driver
tells, sends and gives up leaves the client's event loop in one step, in which Dask makes it one
message.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from distributed import Future

from dagsel.execution.connection import Connection
from dagsel.execution.run_spec import CHANNEL, Key
from dagsel.messages import COMMANDS, Command

#: What is only given up may wait so long for something that goes out.
PATIENCE_S = 0.2

#: In the place of an epoch of a trial: its check.
CHECK = 0


class _Step(NamedTuple):
    do: Callable[[], bool | None]  # says whether it has given up something
    gives_up: bool = False


@dataclass(slots=True)
class Outbox:
    """Commands and tasks of a run, which go to the scheduler in the order they were put in."""

    connection: Connection
    run: str
    wake: Callable[[], None]  # has the driver look up
    _waiting: list[_Step] = field(default_factory=list)
    _due_at: float = math.inf  # when that goes out, by `time.monotonic`
    # Only the event loop changes what it still has to do, and what is waited for of each trial.
    _leaving: deque[_Step] = field(default_factory=deque)
    _pauses: bool = False  # until the loop's next turn
    _futures: dict[int, dict[int, list[Future[Any]]]] = field(default_factory=dict)
    _error: BaseException | None = None  # that sending has raised

    def tell(self, command: Command) -> None:
        """Tell the dispatcher something."""
        told = {"op": CHANNEL, "run": self.run, "command": COMMANDS.to_text(command)}
        self._put(_Step(partial(self.connection.client._send_to_scheduler, told)))

    def send(self, graph: Any, wanted: Mapping[int, Mapping[int, Sequence[Key]]]) -> None:
        """Send tasks, and keep alive what is wanted of each trial."""
        self._put(_Step(partial(self._send, graph, wanted)))

    def give_up(self, trial: int, *epochs: int) -> None:
        """Wait no more for these epochs of a trial, or for all of it."""
        self._put(_Step(partial(self._give_up, trial, epochs), gives_up=True), PATIENCE_S)

    def raised(self, trial: int) -> BaseException | None:
        """Return the error of a trial's task that has failed."""
        for future in chain.from_iterable(list(self._futures.get(trial, {}).values())):
            if future.status == "error":
                error: BaseException = future.exception()
                return error
        return None

    def flush(self) -> float:
        """Hand over what waits, unless it may wait longer; return for how many seconds it may.

        Raises
        ------
        ClusterError
            If the connection broke.
        Exception
            What sending has raised before, such as of a configuration that cannot be pickled.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        left_s = self._due_at - time.monotonic()
        if left_s > 0:
            return left_s
        self.connection.check()
        waiting, self._waiting, self._due_at = self._waiting, [], math.inf
        self._in_loop(partial(self._hand_over, waiting))
        return math.inf

    def clear(self) -> None:
        """Wait for nothing any more."""
        self._waiting, self._due_at = [], math.inf
        self._in_loop(self._futures.clear)

    def _put(self, step: _Step, patience_s: float = 0.0) -> None:
        self._waiting.append(step)
        self._due_at = min(self._due_at, time.monotonic() + patience_s)

    def _in_loop(self, do: Callable[[], None]) -> None:
        """Do something in the thread that each of its steps would wake up else."""
        loop = self.connection.client.loop
        if loop is not None:
            loop.add_callback(do)

    # What follows runs in the client's event loop.

    def _hand_over(self, waiting: Sequence[_Step]) -> None:
        self._leaving.extend(waiting)
        if not self._pauses:
            self._leave()

    def _leave(self) -> None:
        self._pauses = False
        try:
            while self._leaving and not (self._pauses and not self._leaving[0].gives_up):
                step = self._leaving.popleft()
                self._pauses |= bool(step.do())
        except BaseException as error:  # noqa: BLE001 - the driver raises it
            self._leaving.clear()
            self._error = error
            self.wake()
        if self._pauses:
            # Dask gives up in its next turn; a task that is sent anew must be a new one.
            self._in_loop(self._leave)

    def _send(self, graph: Any, wanted: Mapping[int, Mapping[int, Sequence[Key]]]) -> None:
        keys = [key for epochs in wanted.values() for keys in epochs.values() for key in keys]
        futures = dict(zip(keys, self.connection.client.get(graph, keys, sync=False), strict=True))
        for trial, epochs in wanted.items():
            there = self._futures.setdefault(trial, {})
            for epoch, of_epoch in epochs.items():
                there.setdefault(epoch, []).extend(futures[key] for key in of_epoch)

    def _give_up(self, trial: int, epochs: Sequence[int]) -> bool:
        if not epochs:
            return bool(self._futures.pop(trial, None))
        there = self._futures.get(trial, {})
        gone = [there.pop(epoch, None) for epoch in epochs]
        return any(gone)
