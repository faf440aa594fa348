"""The cluster of a run: the user's, or one on this machine that is started and closed again."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import dask.config
import dask.system
from distributed import Client, LocalCluster
from distributed.system import MEMORY_LIMIT

from dagsel.checks import short_traceback, shown
from dagsel.errors import ClusterError, NoWorkersError
from dagsel.execution import fork_server
from dagsel.execution.answers import told_if_slow
from dagsel.execution.connecting import check_answers, connected
from dagsel.execution.held_shards import shards_that_fit
from dagsel.execution.main_guard import check_main_guard
from dagsel.execution.process import GPU_RESOURCE, QUIET, check_gpus_here, gpus_seen
from dagsel.execution.quiet_servers import QuietNanny, look_seldom, seldom
from dagsel.execution.run_spec import RESOURCE, RunSpec
from dagsel.execution.spec_cluster import add_workers, end_workers
from dagsel.planning.capacity import ClusterCapacity
from dagsel.storage import ShardedDataset

__all__ = [
    "LOCAL_STARTUP_S",
    "Client",
    "WorkerLimit",
    "capacity_here",
    "check_cluster",
    "close",
    "connect",
    "dashboard_of",
    "limit_here",
    "limit_of_gpus",
    "local_cluster",
    "own_since",
    "own_until",
    "warm_up",
    "why_fewer_copies",
    "why_no_room",
    "workers_of",
]

logger = logging.getLogger("dagsel")

#: Seconds from the request for a worker process on this machine to its first unit, with PyTorch
#: imported in it: 1.7 to 2.8 were measured on two cores, by what else ran on them.
LOCAL_STARTUP_S = 2.5
#: So often it is seen whether workers have come.
_LOOK_S = 0.02
_ADDRESS = re.compile(r"(?!https?:)[a-z+-]+://.+|[^\s/]+:[0-9]+")  # http:// is a dashboard's
_TO_SCHEDULER = {"client": "scheduler.address", "cluster": "scheduler_address"}
_OPTIONS: dict[str, Any] = {
    "threads_per_worker": 2,
    "host": "127.0.0.1",
    "dashboard_address": "127.0.0.1:0",
    # Nobody is told where it is, and its start takes 0.4 s. Without an address it would have :8787.
    "scheduler_kwargs": {"dashboard": False},
    "silence_logs": logging.ERROR,
}


@dataclass(frozen=True, slots=True)
class WorkerLimit:
    """How many workers a cluster can have.

    Parameters
    ----------
    most
        Workers that there can be; None if nobody knows.
    reason
        Why there cannot be more; empty if there can be where it is asked for.
    is_fixed
        Whether there cannot be fewer either.
    """

    most: int | None = None
    reason: str = ""
    is_fixed: bool = False

    def capacity(
        self,
        max_cluster_workers: int | None,
        startup_s: float,
        node_size: int = 1,
        *,
        bills_requests: bool = True,
    ) -> ClusterCapacity:
        """Return what the cluster can have if the user bounds it.

        Raises a `ClusterError` if that contradicts what it can have.

        Examples
        --------
        >>> limit_of_gpus(2).capacity(3, startup_s=1.0)  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        ...
        dagsel.errors.ClusterError: there cannot be max_cluster_workers=3: there are 2 GPUs here;
        give max_cluster_workers=2, or leave it out
        >>> limit_of_gpus(2).capacity(None, startup_s=1.0)
        ClusterCapacity(most_workers=2, startup_s=1.0, node_size=1, bills_requests=True)
        """
        n = max_cluster_workers
        if n is None:
            return ClusterCapacity(self.most, startup_s, node_size, bills_requests)
        is_too_many = self.most is not None and self.reason and n > self.most
        if is_too_many or (self.is_fixed and n != (self.most or n)):
            raise ClusterError(
                f"there cannot be max_cluster_workers={n}: {self.reason}; give "
                f"max_cluster_workers={self.most}, or leave it out"
            )
        if n < node_size and not self.is_fixed:
            raise ClusterError(
                f"there cannot be max_cluster_workers={n}: {node_size} workers come together in "
                f"one job; give max_cluster_workers={node_size}, or start smaller jobs"
            )
        return ClusterCapacity(n, startup_s, node_size, bills_requests)


def limit_here(options: Mapping[str, Any], *, at_least: int = 1) -> WorkerLimit:
    """Return how many workers this machine has cores for.

    `options` are those of a worker of a `LocalCluster`. One with the resource `RESOURCE` trains in
    one thread, and its other threads read.
    """
    threads = 1 if RESOURCE in (options.get("resources") or {}) else options.get("nthreads", 1)
    return WorkerLimit(max(at_least, 1, dask.system.CPU_COUNT // max(1, threads or 1)))


def limit_of_gpus(n_gpus: int) -> WorkerLimit:
    """Return how many workers there can be with so many GPUs, one for each worker."""
    return WorkerLimit(n_gpus, f"there {'is 1 GPU' if n_gpus == 1 else f'are {n_gpus} GPUs'} here")


def capacity_here(
    kind: str | None, max_cluster_workers: int | None = None, startup_s: float | None = None
) -> ClusterCapacity:
    """Return what a cluster can have that `connect` starts on this machine.

    Parameters
    ----------
    kind
        None for the CPUs, or ``"cuda"`` for the GPUs.
    max_cluster_workers
        Workers that it may have, over all trials; None for one a core, or one a GPU.
    startup_s
        Seconds that a worker takes to start; None for `LOCAL_STARTUP_S`.

    Raises
    ------
    ClusterError
        If there are fewer GPUs than workers are asked for, or none.
    """
    if kind == "cuda":
        check_gpus_here()
        limit = limit_of_gpus(gpus_seen())
    else:
        limit = limit_here({"resources": {RESOURCE: 1}})
    return limit.capacity(max_cluster_workers, LOCAL_STARTUP_S if startup_s is None else startup_s)


def threads_here(most_workers: int | None) -> int:
    """Return how many threads each CPU worker of ours may train with: the cores over the workers.

    One, if ``OMP_NUM_THREADS`` says how many: then that holds.
    """
    if fork_server.is_users("OMP_NUM_THREADS"):
        return 1
    n_cores = int(dask.system.CPU_COUNT)
    return max(1, n_cores // (most_workers or n_cores))


def dashboard_of(client: Client) -> str:
    """Return the address of Dask's dashboard; empty if the scheduler has none."""
    if "dashboard" not in client.scheduler_info(n_workers=0).get("services", {}):
        return ""
    # A scheduler without a dashboard has a web server of that name all the same.
    here = getattr(client.cluster, "scheduler", None)
    is_here, serves = hasattr(here, "http_application"), True
    with suppress(Exception):  # a scheduler that lacks dagsel cannot be asked
        serves = _serves(here) if is_here else client.run_on_scheduler(_serves)
    return str(client.dashboard_link or "") if serves else ""


def _serves(dask_scheduler: Any) -> bool:
    return bool(dask_scheduler.http_application.applications)


def own_until(cluster: Any) -> float | None:
    """Return when the processes of a cluster of ours had ended; None if they have not."""
    return cluster.ended_at if isinstance(cluster, fork_server.OwnCluster) else None


def own_since(cluster: Any) -> float | None:
    """Return when `connect` began to start a cluster; None if somebody else has started it."""
    return cluster.began_at if isinstance(cluster, fork_server.OwnCluster) else None


@short_traceback
def check_cluster(client: Any = None, cluster: Any = None, *, starts: bool = True) -> None:
    """Raise a `ClusterError` unless `connect` can take what a call was given.

    `starts` says whether it may have to start workers of its own.
    """
    if client is None and cluster in (None, "cuda"):
        if starts:
            check_main_guard()
            _check_no_daemon()
        return
    if client is not None and cluster == "cuda":
        raise ClusterError('cluster="cuda" starts a cluster of its own: give no client with it')
    if isinstance(cluster, Client):
        raise ClusterError("cluster is a Dask client; write client= in place of cluster=")
    for name, value in (("client", client), ("cluster", cluster)):
        if value is not None:
            _check_open(name, value)
    if isinstance(client, Client) and hasattr(cluster, "scheduler_address"):
        ours = client.scheduler_info(n_workers=0)["id"]  # it may have several addresses
        if (getattr(cluster, "scheduler_info", None) or {}).get("id", ours) != ours:
            raise ClusterError("client is not connected to what cluster= is; give one of the two")


def _check_no_daemon() -> None:
    if multiprocessing.current_process().daemon:
        raise ClusterError(
            "this process is a daemon, as those of multiprocessing.Pool and of Dask's workers are, "
            "and may start no workers: take a concurrent.futures.ProcessPoolExecutor, or give a "
            "client"
        )


def warm_up(client: Any, cluster: Any) -> None:
    """Begin what a cluster of ours takes longest for, if `connect` is to start one."""
    if client is None and cluster in (None, "cuda"):
        fork_server.begin()


def _check_open(name: str, value: Any) -> None:
    if isinstance(value, str):
        if not _ADDRESS.fullmatch(value):
            raise ClusterError(
                f"{name}={value!r} is no address of a scheduler, as tcp://host:8786 is; leave it "
                'out for workers on this machine, or give cluster="cuda" for its GPUs'
            )
        return
    if isinstance(value, type) or not (
        isinstance(value, Client) or hasattr(value, "scheduler_address")
    ):
        n = f"n_workers={value}" if isinstance(value, int) else "n_workers=2"
        raise ClusterError(
            f"{name} must be a Dask client, a cluster or a scheduler's address, got "
            f"{shown(value)}; write client=distributed.Client({n}, threads_per_worker=2), or leave "
            "it out"
        )
    if getattr(value, "asynchronous", False):
        raise ClusterError(
            f"the {name} is asynchronous, and a search waits until it ends; in async code write "
            f"await asyncio.to_thread(dagsel.optimize, ..., client={name}.{_TO_SCHEDULER[name]})"
        )
    of_client = getattr(value, "cluster", None) if isinstance(value, Client) else None
    for what, part in ((f"the {name}", value), (f"the cluster of the {name}", of_client)):
        if _is_closed(part):
            raise ClusterError(
                f"{what} is closed; make a new one before the search, and close it after the search"
            )


def _is_closed(part: Any) -> bool:
    status = getattr(part, "status", None)
    return getattr(status, "name", status) in ("closed", "closing")


@contextmanager
def connect(
    client: Any = None,
    cluster: Any = None,
    *,
    n_workers: int | None = None,
    most_workers: int | None = None,
    within_s: float = math.inf,
) -> Iterator[Client]:
    """Open a client for a run.

    A client, the address of a scheduler, or a cluster object of Dask is used and left as it was.
    With neither, a cluster is started on this machine, and closed at the end; with
    ``cluster="cuda"`` likewise. It begins with `n_workers`, by default one a core, or one a GPU;
    it is waited for a scheduler's answer, or for CPU workers, so many seconds. Raises a
    `ClusterError` if no scheduler answers, there is no GPU or dask-cuda, or no worker comes.
    """
    if isinstance(client, Client):
        check_answers(client, within_s)
        yield client
    elif client is None and cluster in (None, "cuda"):
        began = time.monotonic()
        if cluster is None:
            here = local_cluster(n_workers, most_workers=most_workers, within_s=within_s)
        else:
            here = cuda_cluster(n_workers)
        here.began_at = began
        try:
            with Client(here, set_as_default=False) as own:
                yield own
        finally:
            close(here)
    else:
        with connected(client if client is not None else cluster, within_s) as own:
            yield own


def close(cluster: Any, *, timeout_s: float = 3.0) -> None:
    """Close a cluster of ours; wait for it so long at most, once its processes have ended.

    A `LocalCluster` waits for workers that are still starting, before it closes them. It may wait
    forever while a nanny restarts a lost worker; the processes are daemons and end with this one.
    """
    try:
        with told_if_slow(lambda: "the worker processes on this machine have not ended yet"):
            end_workers(cluster)
            cluster.ended_at = time.monotonic()
            cluster.close(timeout=timeout_s)
    except TimeoutError:
        logger.warning("a worker was still starting; it is closed in the background")


def local_cluster(
    n_workers: int | None = None, *, most_workers: int | None = None, within_s: float = math.inf
) -> fork_server.OwnCluster:
    """Start a cluster for training on the CPUs of this machine, by default one worker a core.

    Each worker trains one unit at a time in one thread, and has a second one to read and store.
    As many as there may be at most share the memory. They are waited for so many seconds; on a busy
    machine some may come later. Raises a `ClusterError` if none has come by then.
    """
    if gpus_seen():
        logger.warning('the workers train on the CPU; cluster="cuda" starts one for each GPU')
    n_workers = n_workers or dask.system.CPU_COUNT
    # If they saw the GPUs, all of them would train on the first one.
    with fork_server.deaf_to_interrupts():
        cluster = fork_server.OwnCluster(
            n_workers=0,
            memory_limit=MEMORY_LIMIT // max(n_workers, most_workers or 0),
            resources={RESOURCE: 1},
            # A fork server has the environment that there was when it began.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", QUIET: "1"},
            config=seldom(),
            worker_class=QuietNanny,
            **_OPTIONS,
        )
    try:
        look_seldom(cluster.scheduler)
        _start_workers(cluster, n_workers, within_s)
    except BaseException:
        close(cluster)
        raise
    return cluster


def _start_workers(cluster: LocalCluster, n_workers: int, within_s: float) -> None:
    """Start worker processes and wait for them. `LocalCluster` itself would wait forever."""
    ends_at, failures = time.monotonic() + within_s, list[str]()
    scheduler: Any = cluster.scheduler
    add_workers(cluster, n_workers, failures.append)
    while len(scheduler.workers) < n_workers and time.monotonic() < ends_at:
        if failures:
            raise ClusterError(
                f"a worker process on this machine did not start: {failures[0]}; dagsel doctor "
                "shows what this machine lacks"
            )
        time.sleep(_LOOK_S)
    if not scheduler.workers:
        raise NoWorkersError(
            f"no worker process on this machine has started within {within_s:.3g} s: give a later "
            "deadline, or start workers beforehand"
        )


def cuda_cluster(n_workers: int | None = None) -> fork_server.OwnCluster:
    """Start a cluster of workers with a GPU each, by default one for each GPU of this machine.

    Its workers have the resource ``GPU=1``, which dask-cuda does not set by itself. Raises a
    `ClusterError` if dask-cuda is not installed, or there is no GPU.
    """
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise ClusterError(
            f'cluster="cuda" needs dask-cuda: pip install dagsel[cuda]  ({error})'
        ) from error
    check_gpus_here()

    class OwnCUDACluster(fork_server.OwnCluster, LocalCUDACluster):  # type: ignore[misc]
        def new_worker_spec(self) -> Any:
            spec = super().new_worker_spec()  # type: ignore[no-untyped-call]
            for each in spec.values():
                own = each["options"].get("env", {})
                # A fork server has the environment that there was when it began.
                each["options"]["env"] = {**os.environ, **own, QUIET: "1"}
            return spec

    options = _OPTIONS if n_workers is None else {**_OPTIONS, "n_workers": n_workers}
    with fork_server.deaf_to_interrupts():
        return OwnCUDACluster(resources={RESOURCE: 1, GPU_RESOURCE: 1}, **options)


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
    least = min(_rooms(client, data, share), default=data.n_shards)
    if least >= data.n_shards:
        return ""
    return (
        f"memory lets a worker hold {least} of {data.n_shards} shards, and each worker of a gang "
        "holds all of them"
    )


def why_fewer_copies(client: Client, spec: RunSpec, replicas: int | Literal["auto"]) -> str:
    """Say why the workers that are there cannot hold so many copies in memory; empty if they can.

    What does not fit is on their disks, unless the run holds shards in memory alone.
    """
    if spec.hold != "memory" or replicas == "auto":
        return ""
    rooms = _rooms(client, spec.data, spec.shard_share)
    wanted = spec.data.n_shards * min(replicas, len(rooms))
    if sum(rooms) >= wanted:
        return ""
    return (
        f"replicas={replicas} asks {len(rooms)} workers to hold {wanted} shards, and their memory "
        f"holds {sum(rooms)}: as many are held; give workers more memory, lower replicas, or leave "
        "hold= out"
    )


def _rooms(client: Client, data: ShardedDataset, share: float) -> list[int]:
    """Return how many of the data set's shards fit into the memory of each worker."""
    largest, all_ = max(size.nbytes for size in data.shard_sizes), data.n_shards
    limits = [about["memory_limit"] for about in workers_of(client).values()]
    rooms = [shards_that_fit(limit, largest, share=share) for limit in limits]
    return [all_ if room is None else min(all_, room) for room in rooms]
