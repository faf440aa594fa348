"""The cluster of a run: the user's, or one on this machine that is started and closed again."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dask.system import CPU_COUNT
from distributed import Client, LocalCluster

from dagsel.dispatch.placement import shards_that_fit
from dagsel.errors import ClusterError
from dagsel.execution.process import GPU_RESOURCE, check_gpus_here, gpus_seen
from dagsel.execution.run_spec import RESOURCE
from dagsel.storage import ShardedDataset

__all__ = ["Client", "close", "connect", "local_cluster", "why_no_room", "workers_of"]

logger = logging.getLogger("dagsel")

_OPTIONS: dict[str, Any] = {
    "threads_per_worker": 2,
    "host": "127.0.0.1",
    "dashboard_address": "127.0.0.1:0",
    "silence_logs": logging.ERROR,
}


@contextmanager
def connect(client: Any = None, cluster: Any = None) -> Iterator[Client]:
    """Open a client for a run.

    A client, the address of a scheduler, or a cluster object of Dask is used and left as it was.
    With neither, a cluster is started on this machine, one worker process a core, and closed at the
    end; with ``cluster="cuda"`` likewise, one a GPU. Raises a `ClusterError` if there is no
    scheduler at the address, no GPU or dask-cuda, or no main guard in the script.
    """
    if client is not None and cluster == "cuda":
        raise ClusterError('cluster="cuda" starts a cluster of its own: give no client with it')
    if isinstance(client, Client):
        if client.asynchronous:
            raise ClusterError("dagsel needs a synchronous client: Client(asynchronous=False)")
        yield client
    elif client is None and cluster in (None, "cuda"):
        here = local_cluster() if cluster is None else cuda_cluster()
        try:
            with Client(here, set_as_default=False) as own:
                yield own
        finally:
            close(here)
    else:
        address = client if client is not None else cluster
        try:
            own = Client(address, set_as_default=False)
        except (OSError, TypeError, ValueError) as error:
            raise ClusterError(f"no scheduler at {address}: {error}") from error
        with own:
            try:
                yield own
            finally:
                if own.status == "connecting":  # its end would be logged with a traceback
                    with _silent("distributed.client"):
                        own.close()


@contextmanager
def _silent(name: str) -> Iterator[None]:
    theirs = logging.getLogger(name)
    level = theirs.level
    theirs.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        theirs.setLevel(level)


def close(cluster: LocalCluster, *, timeout_s: float = 20.0) -> None:
    """Close a cluster of ours; return after this time at the latest.

    A `LocalCluster` that is closed while a nanny restarts a lost worker may wait forever; its
    processes are daemons and end with this one.
    """
    try:
        cluster.close(timeout=timeout_s)
    except TimeoutError:
        logger.warning("the cluster did not close within %g s", timeout_s)


def local_cluster(n_workers: int | None = None) -> LocalCluster:
    """Start a cluster for training on the CPUs of this machine, by default one worker a core.

    Each worker trains one unit at a time in one thread, and has a second thread to read shards.
    """
    _check_main_guard()
    if gpus_seen():
        logger.warning('the workers train on the CPU; cluster="cuda" starts one for each GPU')
    # If they saw the GPUs, all of them would train on the first one.
    return LocalCluster(
        n_workers=n_workers or CPU_COUNT,
        resources={RESOURCE: 1},
        env={"CUDA_VISIBLE_DEVICES": ""},
        **_OPTIONS,
    )


def cuda_cluster() -> LocalCluster:
    """Start a cluster with one worker for each GPU of this machine.

    Its workers have the resource ``GPU=1``, which dask-cuda does not set by itself. Raises a
    `ClusterError` if dask-cuda is not installed, or there is no GPU.
    """
    _check_main_guard()
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise ClusterError(
            f'cluster="cuda" needs dask-cuda: pip install dagsel[cuda]  ({error})'
        ) from error
    check_gpus_here()
    cluster: LocalCluster = LocalCUDACluster(resources={RESOURCE: 1, GPU_RESOURCE: 1}, **_OPTIONS)
    return cluster


def _check_main_guard() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ClusterError(
            "dagsel makes worker processes, which import your script again: put the call of "
            'dagsel.optimize under  if __name__ == "__main__":'
        )


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """Return what the scheduler knows of each worker, by address.

    `Client.scheduler_info` may return no workers at all: every two seconds the client replaces what
    it has asked for by an answer without them.
    """
    scheduler: Any = client.scheduler
    found: dict[str, dict[str, Any]] = client.sync(scheduler.identity, n_workers=-1)["workers"]
    return found


def why_no_room(client: Client, data: ShardedDataset, *, share: float) -> str:
    """Say why some worker cannot hold all shards, as each worker of a gang does; empty if all can.

    `share` is the part of a worker's memory limit that shards may take.
    """
    largest = max(size.nbytes for size in data.shard_sizes)
    limits = [about["memory_limit"] for about in workers_of(client).values()]
    rooms = [shards_that_fit(limit, largest, share=share) for limit in limits]
    least = min((room for room in rooms if room is not None), default=data.n_shards)
    if least >= data.n_shards:
        return ""
    return (
        f"memory lets a worker hold {least} of {data.n_shards} shards, and each worker of a gang "
        "holds all of them"
    )
