"""Timed batches on real workers, for scaling profiles.

Nothing of the engine is used: each rank is a task on a worker of its own. The leader opens the
gang and says where it is; only then are the others sent there.
"""

from __future__ import annotations

import contextlib
import queue
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import cloudpickle
import numpy as np
from distributed import Client, Future, wait

from dagsel.errors import ClusterError, GangBrokenError, NoWorkersError, SearchError, WorkloadError
from dagsel.execution.compatibility import check_versions, pack_workload
from dagsel.execution.timed_rank import Rank, make_ready, time_rank
from dagsel.storage import ShardedDataset
from dagsel.workloads.base import Config, Workload
from dagsel.workloads.gang.gang import gang_workload

#: So long the other ranks have to say why a gang broke.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class TimingPlan:
    """What to time.

    Parameters
    ----------
    gangs
        Numbers of workers, 1 first; None for 1, 2, 4 and so on, up to the cluster's workers.
    n_batches
        Batches that are timed.
    warmup
        Batches before these.
    """

    gangs: tuple[int, ...] | None
    n_batches: int
    warmup: int

    def __post_init__(self) -> None:
        gangs: tuple[Any, ...] = self.gangs or ()
        for n in gangs:
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise SearchError(f"gangs must be whole numbers of 1 or more, got {n!r}")
        for name in ("n_batches", "warmup"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SearchError(f"{name} must be a whole number of 1 or more, got {value!r}")

    @property
    def n_boundaries(self) -> int:
        """Batch boundaries that a timed visit needs: the first batch ends at the first of them."""
        return self.warmup + self.n_batches

    def on(self, n_workers: int) -> tuple[int, ...]:
        """Give the numbers to measure on a cluster of so many workers.

        Examples
        --------
        >>> TimingPlan(None, 1, 1).on(6)
        (1, 2, 4)
        """
        if self.gangs is None:
            return tuple(2**k for k in range(n_workers.bit_length()))
        if max(self.gangs) > n_workers:
            raise ClusterError(
                f"a gang of {max(self.gangs)} needs as many workers and the cluster has "
                f"{n_workers}: add workers or leave the number out of gangs"
            )
        return tuple(sorted(set(self.gangs)))


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured on one number of workers.

    Parameters
    ----------
    n_workers
        How many trained together.
    batch_s
        Seconds of a batch, the median.
    batch_samples
        Samples in a batch, all ranks' together.
    memory_bytes
        The most that training took on one of them besides the shard.
    device
        What they trained on.
    """

    n_workers: int
    batch_s: float
    batch_samples: float
    memory_bytes: int
    device: str


class GangTimer:
    """Makes workers ready and times gangs on them.

    Parameters
    ----------
    client
        A client of the cluster.
    workload, config, data
        What is trained.
    plan
        What to time.

    Raises
    ------
    ClusterError
        If the cluster is too small, or a worker is lost.
    WorkloadError
        If the workload cannot train on several workers.
    """

    def __init__(
        self,
        client: Client,
        workload: Workload,
        config: Config,
        data: ShardedDataset,
        plan: TimingPlan,
    ) -> None:
        self._client, self._plan = client, plan
        addresses = list(client.scheduler_info(n_workers=-1)["workers"])
        if not addresses:
            raise NoWorkersError("the cluster has no workers: add some and profile again")
        self.gangs = plan.on(len(addresses))
        if max(self.gangs) > 1:
            _check_gangs(workload, config, max(self.gangs))
        check_versions(client)
        self._workers = few_hosts_first(addresses)[: max(self.gangs)]
        self._task = (pack_workload(workload), bytes(cloudpickle.dumps(dict(config))))
        self._data = data
        self._ready: dict[str, Future[Any]] = {}
        self._topic = f"dagsel-timing-{uuid.uuid4().hex[:8]}"
        self._opened: queue.Queue[dict[str, Any]] = queue.Queue()

    def __enter__(self) -> GangTimer:
        self._client.subscribe_topic(self._topic, lambda event: self._opened.put(event[1]))
        try:
            plan = self._plan
            for worker in self._workers:
                self._ready[worker] = self._submit(
                    worker, make_ready, *self._task, self._data, plan.warmup, plan.n_boundaries
                )
            self._wait(list(self._ready.values()))
            if len(self._workers) > 1:  # what a process does in its first gang alone is not timed
                self._train(len(self._workers), plan.warmup + 1)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._client.unsubscribe_topic(self._topic)
        self._client.cancel(list(self._ready.values()))
        self._ready.clear()

    def measure(self, n: int) -> Measured:
        """Time batches on n workers."""
        ranks = self._train(n, self._plan.n_boundaries)
        skipped = self._plan.warmup - 1  # the first batch ends at the first boundary
        times = np.diff(ranks[0].boundaries)[skipped:]
        if not len(times):
            raise WorkloadError(
                f"a pass over a shard has too few batches to be timed after {self._plan.warmup} "
                "for warming up: give a smaller batch, fewer shards or a smaller warmup"
            )
        memory = max(rank.memory_bytes for rank in ranks)
        first = ranks[0]
        return Measured(n, float(np.median(times)), first.batch_samples, memory, first.device)

    def _train(self, n: int, n_boundaries: int) -> list[Rank]:
        workers, name = self._workers[:n], uuid.uuid4().hex

        def start(rank: int, place: tuple[str, int] | None) -> Future[Any]:
            about = (self._topic, name, rank, n, place, n_boundaries)
            ready = self._ready[workers[rank]]
            return self._submit(workers[rank], time_rank, *self._task, ready, about)

        futures = [start(0, None)]
        try:
            if n > 1:
                place = self._place(name, futures[0])
                futures += [start(rank, place) for rank in range(1, n)]
            return self._wait(futures)
        finally:
            self._client.cancel(futures)

    def _submit(self, worker: str, task: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._client.submit(
            task, *args, workers=[worker], allow_other_workers=False, pure=False
        )

    def _place(self, name: str, leader: Future[Any]) -> tuple[str, int]:
        """Wait until the leader says where its store is."""
        while True:
            with contextlib.suppress(queue.Empty):
                message = self._opened.get(timeout=0.2)
                if message["name"] == name:
                    return message["host"], message["port"]
            if leader.status == "error":
                self._fail([leader])
            self._check_workers([leader])

    def _wait(self, futures: Sequence[Future[Any]]) -> list[Any]:
        pending = list(futures)
        while pending:
            with contextlib.suppress(TimeoutError), self._client.as_current():
                wait(pending, timeout=1.0, return_when="FIRST_COMPLETED")
            if any(future.status == "error" for future in futures):
                self._fail(futures)
            pending = [future for future in pending if not future.done()]
            self._check_workers(pending)
        return [future.result() for future in futures]

    def _fail(self, futures: Sequence[Future[Any]]) -> None:
        """Raise what made a gang fail: the ranks that it failed under only say that it broke."""
        deadline = time.monotonic() + _GRACE_S
        while True:
            self._check_workers(futures)
            failed = [future for future in futures if future.status == "error"]
            causes = [f for f in failed if not isinstance(f.exception(), GangBrokenError)]
            late = time.monotonic() > deadline or all(future.done() for future in futures)
            if causes or late:
                (causes or failed)[0].result()
            time.sleep(0.05)

    def _check_workers(self, pending: Sequence[Future[Any]]) -> None:
        if pending:
            here = self._client.scheduler_info(n_workers=-1)["workers"]
            gone = [worker for worker in self._workers if worker not in here]
            if gone:
                raise ClusterError(f"worker {gone[0]} was lost while it trained; profile again")


def few_hosts_first(addresses: Sequence[str]) -> list[str]:
    """Order workers so that the first few of them lie on few hosts.

    Examples
    --------
    >>> few_hosts_first(["tcp://a:1", "tcp://b:1", "tcp://b:2"])
    ['tcp://b:1', 'tcp://b:2', 'tcp://a:1']
    """
    by_host: defaultdict[str, list[str]] = defaultdict(list)
    for address in sorted(addresses):
        by_host[address.rpartition(":")[0]].append(address)
    groups = sorted(by_host.values(), key=len, reverse=True)
    return [address for group in groups for address in group]


def _check_gangs(workload: Workload, config: Config, n_workers: int) -> None:
    gang_workload(workload, instead="give gangs=(1,)").validate_gang(config, n_workers)
