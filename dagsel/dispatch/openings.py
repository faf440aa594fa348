"""When workers may get a unit behind the one that they run."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from math import inf

from dagsel.dispatch.events import Worker
from dagsel.dispatch.trials import Binding
from dagsel.dispatch.units import Unit
from dagsel.dispatch.workers import KnownWorker, WorkerTable

DEPTH = 2  # units on a worker: one that runs, one that waits
MOST = 4  # moments that are kept for each worker, most of them out of date
FEW = 64  # so many more may always be kept


class Openings:
    """The moments from which workers may get another unit, the next one first.

    A worker has one while it runs one unit: shortly before that is expected to end.

    Parameters
    ----------
    workers, bindings
        Those of the dispatcher.
    free_at
        When each worker's last unit is expected to end.
    """

    def __init__(
        self,
        workers: WorkerTable,
        bindings: Mapping[Unit, Binding],
        free_at: Mapping[Worker, float],
    ) -> None:
        self._workers, self._bindings, self._free_at = workers, bindings, free_at
        self._agenda: list[tuple[float, int, Worker]] = []  # some are out of date
        self._open: dict[Worker, KnownWorker] = {}

    def note(self, host: KnownWorker) -> None:
        """Note that a worker's units, or their expected ends, have changed."""
        opens = self._opens(host)
        if opens < inf:
            heappush(self._agenda, (opens, host.number, host.worker))

    def tidy(self) -> None:
        """Forget the moments that are out of date, once they are many.

        They go one by one where a unit waits. While none does, each unit leaves one.
        """
        if len(self._agenda) > MOST * len(self._workers) + FEW:
            hosts = self._workers.values()
            agenda = [(self._opens(host), host.number, host.worker) for host in hosts]
            self._agenda = [opening for opening in agenda if opening[0] < inf]
            heapify(self._agenda)

    def open_at(self, now: float) -> list[KnownWorker]:
        """Return the workers that are open, in the order in which they came."""
        while self._agenda and self._agenda[0][0] <= now:
            _, number, worker = heappop(self._agenda)
            host = self._workers.get(worker)
            if host is not None and host.number == number:
                self._open[worker] = host
        self._open = {
            worker: host
            for worker, host in self._open.items()
            if self._workers.get(worker) is host and self._opens(host) <= now
        }
        return sorted(self._open.values(), key=lambda host: host.number)

    def next_at(self) -> float:
        """Return when the next worker that is not open opens; infinity if none does."""
        agenda = self._agenda
        while agenda:
            opens, number, worker = agenda[0]
            host = self._workers.get(worker)
            if host is not None and host.number == number and self._opens(host) == opens:
                return opens
            heappop(agenda)
        return inf

    def check(self, now: float) -> None:
        """Raise ``AssertionError`` if what is kept is not what it comes to if counted anew."""
        opens = {host.worker: self._opens(host) for host in self._workers.values()}
        open_now = [host.worker for host in self.open_at(now)]
        assert open_now == [worker for worker in self._workers if opens[worker] <= now], (
            f"{open_now} are open, and {opens} were to be"
        )
        next_at = min((at for at in opens.values() if at > now), default=inf)
        assert self.next_at() == next_at, f"the next opening is at {next_at}"

    def _opens(self, host: KnownWorker) -> float:
        if host.draining or not 0 < len(host.bound) < DEPTH:
            return inf
        ahead_s = self._bindings[host.bound[-1]].ahead_s
        return self._free_at[host.worker] - ahead_s if ahead_s else inf
