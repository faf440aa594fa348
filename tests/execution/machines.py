"""Clusters of machines that come late, never, or are taken back; and what their provider notes.

A machine runs one worker. The provider bills it from its request to its release.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeAlias

from chaos_roles import start, work
from distributed import SpecCluster, Status
from distributed.deploy.spec import ProcessInterface
from distributed.scheduler import Scheduler

from dagsel.execution.cluster import close

#: How a machine is taken back.
Loss: TypeAlias = Literal["notice", "no notice"]
SCHEDULER = {"cls": Scheduler, "options": {"dashboard_address": "127.0.0.1:0", "port": 0}}


@dataclass
class Rental:
    """What a machine is billed for, by the clock on the wall."""

    asked: float
    released: float = math.inf

    def release(self) -> None:
        """Note that it is over."""
        self.released = min(self.released, time.time())

    def cost(self, begin: float, end: float) -> float:
        """Seconds between two moments in which it was asked for and not released."""
        return max(0.0, min(self.released, end) - max(self.asked, begin))


@dataclass
class Provider:
    """Starts machines, and notes when.

    The first ones, `n_at_once`, come at once. Of the others `n_coming` come after `delay_s`. A
    cluster that `waits` is told of a machine only when it has come, as a `LocalCluster` is.
    """

    folder: Path
    delay_s: float = 0.0
    n_coming: float = math.inf
    waits: bool = False
    n_at_once: int = 1
    scheduler: Any = None
    rentals: list[Rental] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)

    def delay_of(self, number: int) -> float:
        """Seconds until a machine has come; infinity for never."""
        if number < self.n_at_once:
            return 0.0
        return self.delay_s if number < self.n_at_once + self.n_coming else math.inf

    def cost(self, begin: float, end: float = math.inf) -> float:
        """Return the machine-seconds between two moments."""
        return sum(rental.cost(begin, end) for rental in self.rentals)

    def n_rented(self, since: float, until: float) -> int:
        """How many machines were rented all the time between two moments."""
        return sum(rental.asked <= since and until < rental.released for rental in self.rentals)

    @contextmanager
    def losing(self, how: Loss, *, every_s: float, seed: int) -> Iterator[list[Machine]]:
        """Take a machine back again and again, once all those asked for have come."""
        chance, lost, is_over = random.Random(seed), list[Machine](), threading.Event()

        def lose() -> None:
            while not is_over.wait(every_s):
                while not (there := self.there(lost)):
                    if is_over.wait(0.05):
                        return
                lost.append(chance.choice(there))
                lost[-1].lose(how)

        thread = threading.Thread(target=lose)
        thread.start()
        try:
            yield lost
        finally:
            is_over.set()
            thread.join()

    def there(self, lost: list[Machine]) -> list[Machine]:
        """All machines that are rented, if each has come and none is on its way out."""
        rented = [machine for machine in list(self.machines) if machine.status == Status.running]
        return rented if all(m.has_come and m not in lost for m in rented) else []


class Machine(ProcessInterface):
    """A machine of a provider: rented at once, its worker comes when it has started."""

    def __init__(self, scheduler: str, name: Any, provider: Provider) -> None:
        super().__init__(scheduler, name)
        self.scheduler, self.name, self.provider = scheduler, str(name), provider
        self.process: BaseProcess | None = None
        self.delay_s = provider.delay_of(len(provider.machines))
        self.rental = Rental(time.time())
        provider.rentals.append(self.rental)
        provider.machines.append(self)

    @property
    def has_come(self) -> bool:
        """Whether its worker is there."""
        known = self.provider.scheduler.workers.values()
        return any(worker.name == self.name for worker in known)

    async def start(self) -> None:
        """Have the machine started; wait for it if the provider says so."""
        self.life = asyncio.ensure_future(self._live())
        while self.provider.waits and not (self.has_come or self.life.done()):
            await asyncio.sleep(0.02)
        await super().start()

    async def _live(self) -> None:
        try:
            await asyncio.sleep(min(self.delay_s, 1e6))
            log = self.provider.folder / "workers.log"
            folder = str(self.provider.folder)
            self.process = start(work, log, self.scheduler, self.name, folder, False)
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(self.process.sentinel, ended.set)
            await ended.wait()
        finally:
            self.rental.release()
            self.status = Status.closed

    async def close(self) -> None:
        """Give the machine back; its worker has left, or has not come."""
        if self.process is None:
            self.life.cancel()
        else:
            self.process.kill()
        with suppress(asyncio.CancelledError):
            await self.life
        await super().close()

    def lose(self, how: Loss) -> None:
        """Have the machine taken back, with notice or without."""
        assert self.process is not None
        (self.process.terminate if how == "notice" else self.process.kill)()


@contextmanager
def cluster_of(provider: Provider) -> Iterator[SpecCluster]:
    """Give a cluster of one machine; none is left afterwards."""
    worker = {"cls": Machine, "options": {"provider": provider}}
    cluster: Any = SpecCluster(scheduler=SCHEDULER, worker=worker, silence_logs=50)
    provider.scheduler = cluster.scheduler
    try:
        cluster.scale(1)
        cluster.wait_for_workers(1, timeout=60)
        yield cluster
    finally:
        close(cluster)
        assert all(machine.status == Status.closed for machine in provider.machines)
