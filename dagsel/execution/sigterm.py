"""On SIGTERM a worker stores what its unit has trained, and then closes.

Clouds send SIGTERM before they take a machine back, batch systems before a job's time is over. Left
alone, Dask's worker ends at once, or its nanny closes it while the unit goes on.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from distributed import Status, Worker

from dagsel.messages import Notice, WorkerLeaves

#: Dask's nanny kills a worker 8 s after SIGTERM; what comes after the wait must fit as well.
PATIENCE_S = 6.0
#: So often it is seen whether units have stopped.
_LOOK_S = 0.01


class SigtermHandler:
    """Stops a worker's units, those of all runs, at their next batch before the worker closes."""

    def __init__(
        self,
        worker: Worker,
        stop_all: Callable[[], None],  # tells running units to stop at their next batch
        is_idle: Callable[[], bool],
        tell: Callable[[Notice], None],  # sends a message to the dispatcher
    ) -> None:
        self._worker = worker
        self._stop_all, self._is_idle, self._tell = stop_all, is_idle, tell
        self._has_begun = self._has_ended = False
        self._before: Any = None
        # Workers that are threads of the driver do not handle signals.
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if not self._has_begun:
            self._has_begun = True
            for each in self._of_all_runs():
                each._stop_all()
            self._worker.loop.add_callback_from_signal(self._leave)

    async def _leave(self) -> None:
        for each in self._of_all_runs():
            each._tell(WorkerLeaves(self._worker.address))
            each._stop_all()  # a unit may have begun since the signal
        while not all(each._is_idle() for each in self._of_all_runs()):
            await asyncio.sleep(_LOOK_S)
        # A closing worker tells its nanny not to restart it, but may be killed before it can. Told
        # now, the nanny has ended when the cluster is asked for another worker.
        address: Any = self._worker.nanny
        if address:
            with suppress(OSError):
                async with self._worker.rpc(address) as nanny:
                    await nanny.close_gracefully(reason="SIGTERM")
        await self._worker.close_gracefully(reason="SIGTERM")

    async def end(self) -> None:
        """Restore the process's handler; wait for the running unit if the worker closes."""
        self._has_ended = True
        is_ours = signal.getsignal(signal.SIGTERM) == self._on_signal  # not a later run's
        if self._listens and is_ours and not self._has_begun:
            before = self._before
            while _is_of_ended_run(before):
                before = before.__self__._before
            signal.signal(signal.SIGTERM, before)
        if self._worker.status in (Status.closing, Status.closing_gracefully):
            deadline = time.monotonic() + PATIENCE_S
            while not self._is_idle() and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK_S)

    def _of_all_runs(self) -> Iterator[SigtermHandler]:
        """Yield this handler, which gets the signal alone, and those before it whose runs go on."""
        yield self
        before = self._before
        while isinstance(other := getattr(before, "__self__", None), SigtermHandler):
            if not other._has_ended:
                yield other
            before = other._before


def _is_of_ended_run(handler: Any) -> bool:
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, SigtermHandler) and owner._has_ended
