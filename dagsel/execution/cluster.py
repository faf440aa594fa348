"""The cluster of a run: the user's, or one on this machine that is made and closed again."""

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
from dagsel.execution.messages import RESOURCE
from dagsel.execution.process import GPU_RESOURCE, check_gpus_here, gpus_seen
from dagsel.storage import ShardedDataset

__all__ = ["Client", "close", "connect", "local_cluster", "why_no_room"]

logger = logging.getLogger("dagsel")


@contextmanager
def connect(client: Any = None, cluster: Any = None) -> Iterator[Client]:
    """Give a client for a run.

    Parameters
    ----------
    client
        A client, or the address of a scheduler. Used and left as it was.
    cluster
        A cluster object of Dask. Used and left as it was. ``"cuda"`` makes a cluster of this
        machine's GPUs.

    Yields
    ------
    Client
        With neither, the client of a new cluster on this machine: one worker process a core,
        listening on loopback only, closed at the end. With ``"cuda"`` likewise, one a GPU.

    Raises
    ------
    ClusterError
        If there is no scheduler at the address, a client comes with ``"cuda"``, the script lacks
        its main guard, or there is no GPU or no dask-cuda where it is needed.
    """
    if client is not None and cluster == "cuda":
        raise ClusterError('cluster="cuda" makes a cluster of its own: give no client with it')
    if isinstance(client, Client):
        if client.asynchronous:
            raise ClusterError("dagsel needs a synchronous client: Client(asynchronous=False)")
        yield client
        return
    ours = client is None and (cluster is None or cluster == "cuda")
    if not ours:
        address = client if client is not None else cluster
        try:
            own = Client(address, set_as_default=False)
        except (OSError, TypeError, ValueError) as error:
            raise ClusterError(f"no scheduler at {address}: {error}") from error
        with own:
            yield own
        return
    here = local_cluster() if cluster is None else cuda_cluster()
    try:
        with Client(here, set_as_default=False) as own:
            yield own
    finally:
        close(here)


def close(cluster: LocalCluster, *, timeout_s: float = 20.0) -> None:
    """Close a cluster of ours, at most so long.

    A `LocalCluster` that is closed while a nanny restarts a lost worker may wait for ever; its
    processes are daemons and end with this one.
    """
    try:
        cluster.close(timeout=timeout_s)
    except TimeoutError:
        logger.warning("the cluster did not close within %g s", timeout_s)


def local_cluster(n_workers: int | None = None) -> LocalCluster:
    """Make a cluster on this machine, fit for training.

    Parameters
    ----------
    n_workers
        Worker processes; None for one a core.

    Returns
    -------
    LocalCluster
        Each worker trains one unit at a time in one thread, on the CPU, and has a second thread to
        read shards.
    """
    _check_main_guard()
    if gpus_seen():
        logger.warning('the workers train on the CPU; cluster="cuda" makes one for each GPU')
    # Shown the GPUs, all of them would train on the first one.
    return LocalCluster(
        n_workers=n_workers or CPU_COUNT,
        resources={RESOURCE: 1},
        env={"CUDA_VISIBLE_DEVICES": ""},
        **_OPTIONS,
    )


def cuda_cluster() -> LocalCluster:
    """Make a cluster of this machine's GPUs: one worker for each.

    Returns
    -------
    LocalCUDACluster
        Its workers have the resource ``GPU=1``, which dask-cuda does not give by itself.

    Raises
    ------
    ClusterError
        If dask-cuda is not installed, or there is no GPU.
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


_OPTIONS: dict[str, Any] = {
    "threads_per_worker": 2,
    "host": "127.0.0.1",
    "dashboard_address": "127.0.0.1:0",
    "silence_logs": logging.ERROR,
}


def _check_main_guard() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ClusterError(
            "dagsel makes worker processes, which import your script again: put the call of "
            'dagsel.optimize under  if __name__ == "__main__":'
        )


def why_no_room(client: Client, data: ShardedDataset, *, share: float) -> str:
    """Say why not every worker can hold all shards, as those of a gang do; empty if they can.

    Parameters
    ----------
    client
        A client of the cluster.
    data
        The data set.
    share
        Share of a worker's memory limit that shards may take.
    """
    largest = max(size.nbytes for size in data.shard_sizes)
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    rooms = [shards_that_fit(about["memory_limit"], largest, share=share) for about in workers]
    least = min((room for room in rooms if room is not None), default=data.n_shards)
    if least >= data.n_shards:
        return ""
    return (
        f"memory lets a worker hold {least} of {data.n_shards} shards, and each worker of a gang "
        "holds all of them"
    )
