"""What is changed of a `SpecCluster`, in its own event loop.

`SpecCluster.scale` does not serve: it might close any worker, does not see that a job of several
workers has started, and lets Tornado log the traceback of a worker that does not start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from distributed import LocalCluster, Nanny, Status

#: Seconds that a worker process has to end by itself, on our own cluster and on somebody else's; a
#: unit's batch may hold it up.
OWN_END_S, END_S = 2.0, 4.0
#: Seconds that a cluster may take to close workers by itself before nobody waits any more.
CLOSE_TIMEOUT_S = 30.0

logger = logging.getLogger("dagsel")


def add_workers(
    cluster: Any,
    n_specs: int,
    failed: Callable[[str], None],
    new_spec: Callable[[], dict[Any, Any]] | None = None,
) -> None:
    """Add so many specifications, of which each starts a worker or a job; wait for none.

    `new_spec` returns the next one with its name, by default one of the cluster's own.

    If one does not start, `failed` is called with the reason, in another thread. What a cluster
    raises that can have no more is raised, and those start that it could add.
    """
    cluster.sync(_add_workers, cluster, n_specs, failed, new_spec or cluster.new_worker_spec)


async def _add_workers(
    cluster: Any,
    n_specs: int,
    failed: Callable[[str], None],
    new_spec: Callable[[], dict[Any, Any]],
) -> None:
    added: set[Any] = set()

    def read(going: asyncio.Future[None]) -> None:
        error = None if going.cancelled() else going.exception()
        if error is not None and added <= cluster.worker_spec.keys():  # else it was given up
            # dask-jobqueue says first how it called the batch system, with another file each time.
            *_, reason = str(error.__cause__ or error).rpartition("stderr:")
            failed(f"{type(error).__name__}: {reason.strip()}")

    try:
        for _ in range(n_specs):
            spec = new_spec()
            cluster.worker_spec.update(spec)
            added.update(spec)
    finally:
        going = asyncio.ensure_future(cluster.scale_down(()))  # which starts what is missing
        going.add_done_callback(read)


def machines_of(cluster: Any) -> list[Any]:
    """Return all that a cluster has started for a specification, and that is still known."""
    machines: list[Any] = cluster.sync(_created, cluster)
    return machines


async def _created(cluster: Any) -> list[Any]:
    return list(cluster._created)


def withdraw(cluster: Any, names: Collection[Any], *, is_ours: bool = False) -> None:
    """Take back the specifications of these names; wait a while until their workers have gone.

    Dask waits until all workers have started before it closes one, and then until it has trained.
    Processes on this machine are ended here; whatever else is to start is closed when it has.
    `is_ours` says that it is our own cluster, whose released processes are killed at once.
    """
    if names:
        cluster.sync(_withdraw, cluster, set(names), is_ours)


async def _withdraw(cluster: Any, names: set[Any], is_ours: bool) -> None:
    leaving = [worker for worker in cluster._created if getattr(worker, "name", "") in names]
    for name in names:
        cluster.worker_spec.pop(name, None)  # so that none is started again
    if is_ours:  # they have handed over what they had, and take seconds to end by themselves
        await asyncio.gather(*[_kill(nanny) for nanny in leaving])
    # First the processes: one that is closing asks its nanny, which would not listen any more.
    await _end_processes(leaving, END_S)
    going = asyncio.ensure_future(cluster.scale_down(()))  # which closes what has no specification
    going.add_done_callback(_read)
    await asyncio.wait([going], timeout=CLOSE_TIMEOUT_S)


def _read(going: asyncio.Future[None]) -> None:
    """Read the outcome, or the event loop would log that nobody did."""
    if not going.cancelled():
        logger.debug("workers were withdrawn: %s", going.exception() or "all went well")


def end_workers(cluster: LocalCluster) -> None:
    """End all worker processes of a cluster of ours within seconds; they hand nothing over."""
    if cluster.status == Status.running:
        cluster.sync(_end_workers, cluster)


async def _end_workers(cluster: LocalCluster) -> None:
    cluster.worker_spec.clear()  # so that none is started again
    await _end_processes(cluster._created, OWN_END_S)


async def _end_processes(workers: Iterable[Any], patience_s: float) -> None:
    """End those of the workers that are processes on this machine."""
    nannies = [worker for worker in workers if isinstance(worker, Nanny)]
    ends = [_end_process(nanny, patience_s) for nanny in nannies]
    await asyncio.wait([asyncio.gather(*ends, return_exceptions=True)], timeout=2 * patience_s)


async def _end_process(nanny: Nanny, patience_s: float) -> None:
    """End a worker's process: at once if it is still starting."""
    patience_ends = time.monotonic() + patience_s
    while nanny.process is None and nanny.status in (Status.init, Status.starting):
        if time.monotonic() > patience_ends:
            return  # closed now it would start nevertheless, and stay: Dask closes it when it can
        await asyncio.sleep(0.01)
    if nanny.process is not None and nanny.process.status == Status.starting:
        await _kill(nanny)  # Dask would wait until it has started
    elif nanny.status in (Status.running, Status.closing_gracefully):  # its worker closes itself
        nanny.close_gracefully()  # it starts no other one
        await nanny.kill(timeout=patience_s)
    await nanny.close(timeout=patience_s)


async def _kill(nanny: Nanny) -> None:
    process = nanny.process.process if nanny.process is not None else None
    if process is not None:
        with suppress(ValueError):  # it has ended
            await process.kill()
