"""Lets a worker that is told to end store what its unit has trained.

Clouds announce that they take a machine back, and batch systems that a job's time is over, by
SIGTERM. Dask's worker dies of it at once, or is closed by its nanny while its unit trains on.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distributed import Status, Worker

#: Dask's nanny kills a worker 8 s after it was told to end; what follows must fit as well.
PATIENCE_S = 6.0


class Farewell:
    """Stops a worker's unit at its next batch before the worker closes.

    Parameters
    ----------
    worker
        The worker.
    stop_all
        Tells running units to stop at their next batch.
    is_idle
        Whether none runs any more.
    tell
        Tells the dispatcher.
    """

    def __init__(
        self,
        worker: Worker,
        stop_all: Callable[[], None],
        is_idle: Callable[[], bool],
        tell: Callable[..., None],
    ) -> None:
        self._worker = worker
        self._stop_all, self._is_idle, self._tell = stop_all, is_idle, tell
        self._has_begun = self._has_ended = False
        self._before: Any = None
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:  # not so for workers that are threads of the driver
            self._before = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._stop_all()
            self._worker.loop.add_callback_from_signal(self._leave)

    async def _leave(self) -> None:
        self._tell("leaving")
        self._stop_all()  # a unit may have begun since the signal
        await self._quiet(float("inf"))
        await self._dismiss_nanny()
        await self._worker.close_gracefully(reason="SIGTERM")

    async def _dismiss_nanny(self) -> None:
        # A closing worker tells its nanny that none shall come after it, but may be cut off before
        # it can. Told now, the nanny has gone when the cluster is asked for another one.
        address: Any = self._worker.nanny
        if address:
            with suppress(OSError):
                async with self._worker.rpc(address) as nanny:
                    await nanny.close_gracefully(reason="SIGTERM")

    async def end(self) -> None:
        """Give the process its handler back; wait for the running unit if the worker closes."""
        self._has_ended = True
        is_ours = signal.getsignal(signal.SIGTERM) == self._on_signal  # not a later run's
        if self._listens and is_ours and not self._has_begun:
            signal.signal(signal.SIGTERM, self._lasting())
        if self._worker.status in (Status.closing, Status.closing_gracefully):
            await self._quiet(PATIENCE_S)

    def _lasting(self) -> Any:
        """Give the handler of before that is of no run that has ended meanwhile."""
        before = self._before
        while isinstance(owner := getattr(before, "__self__", None), Farewell) and owner._has_ended:
            before = owner._before
        return before

    async def _quiet(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not self._is_idle() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
