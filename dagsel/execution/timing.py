"""Time training batches on real workers, for scaling profiles.

The engine is not used: each rank is a task of its own on a worker of its own. Rank 0 opens the gang
and reports its address; only then are the other ranks submitted.
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
from distributed import Client, Future, get_worker
from distributed.comm.addressing import get_address_host

from dagsel.checks import short_traceback, whole
from dagsel.errors import ClusterError, GangBrokenError, NoWorkersError, WorkloadError
from dagsel.execution.allocator import give_back_memory, prepare_allocator, where_units_train
from dagsel.execution.cluster import workers_of
from dagsel.execution.compatibility import check_versions, pack_workload
from dagsel.execution.process import check_gpu_resource, gpus_seen
from dagsel.execution.raising import cuda_here, process_bytes
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.ragged import join_rows
from dagsel.workloads.base import Config, Visit, Workload, never
from dagsel.workloads.gang.gang import gang_workload, join_gang, lead_gang

#: Seconds that a gang waits for one of its ranks.
_TIMEOUT_S = 60.0
#: Seconds that the other ranks have to report why a gang broke.
_GRACE_S = 5.0
_VISIT = Visit(seed=0, trial=0, epoch=1, shard=0)


@dataclass(frozen=True, slots=True)
class Timing:
    """What was measured on one number of workers.

    Parameters
    ----------
    n_workers
        How many trained together.
    batch_s
        Seconds of a batch, the median.
    samples_per_s
        Of all of them together.
    memory_bytes
        The most that training took on one of them besides the shard: of the device's memory on a
        GPU, else of the process.

    Examples
    --------
    >>> Timing(n_workers=2, batch_s=0.01, samples_per_s=6400.0, memory_bytes=10**8).n_workers
    2
    """

    n_workers: int
    batch_s: float
    samples_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class TimingPlan:
    """What to time: how many batches, after some to warm up, on which numbers of workers."""

    gangs: tuple[int, ...] | None  # 1 among them; None for 1, 2, 4 ... up to the cluster's workers
    n_batches: int
    warmup: int

    @short_traceback
    def __post_init__(self) -> None:
        for n in self.gangs or ():
            whole("each of gangs", n)
        for name in ("n_batches", "warmup"):
            whole(name, getattr(self, name))

    def on(self, n_workers: int) -> tuple[int, ...]:
        """Return the numbers to measure on a cluster of so many workers, sorted.

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


def time_gangs(
    client: Client,
    workload: Workload,
    config: Config,
    data: ShardedDataset,
    plan: TimingPlan,
    on_begin: Callable[[int, int], None] = lambda n_workers, most: None,
) -> tuple[tuple[Timing, ...], str]:
    """Time batches on each number of workers of a plan; also return the name of the device.

    `on_begin` is called before each measurement, with its number of workers and the largest one.
    Raises a `ClusterError` if the cluster is too small or a worker is lost, and a `WorkloadError`
    if the workload cannot train on several workers or a shard has too few batches.
    """
    addresses = list(workers_of(client))
    if not addresses:
        raise NoWorkersError("the cluster has no workers: add some and profile again")
    gangs = plan.on(len(addresses))
    most = gangs[-1]
    if most > 1:
        gang_workload(workload, instead="give gangs=(1,)").validate_gang(config, most)
    check_versions(client)
    task = pack_workload(workload), bytes(cloudpickle.dumps(dict(config)))
    timer = _Timer(client, few_hosts_first(addresses)[:most], task)
    n_boundaries = plan.warmup + plan.n_batches
    with timer.listening():
        timer.make_ready(data, plan.warmup, n_boundaries)
        if most > 1:  # the first gang of a process takes longer: it is not timed
            timer.train(most, plan.warmup + 1)
        timings = []
        for n in gangs:
            on_begin(n, most)
            ranks = timer.train(n, n_boundaries)
            # The first batch ends at the first boundary.
            times = np.diff(ranks[0].boundaries)[plan.warmup - 1 :]
            if not len(times):
                raise WorkloadError(
                    f"a pass over a shard has too few batches to be timed after {plan.warmup} for "
                    "warming up: give a smaller batch, fewer shards or a smaller warmup"
                )
            batch_s, memory = float(np.median(times)), max(rank.memory_bytes for rank in ranks)
            timings.append(Timing(n, batch_s, ranks[0].batch_samples / batch_s, memory))
    return tuple(timings), ranks[0].device


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


@dataclass(slots=True)
class _Timer:
    """Submits the tasks of timed gangs and waits for them."""

    client: Client
    workers: list[str]
    task: tuple[bytes, bytes]
    topic: str = field(default_factory=lambda: f"dagsel-timing-{uuid.uuid4().hex[:8]}")
    ready: list[Future[Any]] = field(default_factory=list)
    places: dict[str, tuple[str, int]] = field(default_factory=dict)

    @contextlib.contextmanager
    def listening(self) -> Any:
        self.client.subscribe_topic(self.topic, lambda event: self.places.update([event[1]]))
        try:
            yield
        finally:
            self.client.unsubscribe_topic(self.topic)
            self.client.cancel(self.ready)

    def make_ready(self, data: ShardedDataset, warmup: int, n_boundaries: int) -> None:
        for worker in self.workers:
            self.ready.append(self._submit(worker, _make_ready, data, warmup, n_boundaries))
        self._wait(self.ready)

    def train(self, size: int, n_boundaries: int) -> list[_Rank]:
        """Train on `size` workers at once; return what each of them measured."""
        gang = uuid.uuid4().hex

        def start(rank: int, place: tuple[str, int] | None = None) -> Future[Any]:
            member = _Membership(self.topic, gang, rank, size, place)
            return self._submit(
                self.workers[rank], _time_rank, self.ready[rank], member, n_boundaries
            )

        futures = [start(0)]
        try:
            if size > 1:
                self._wait(futures, lambda: gang in self.places)
                futures += [start(rank, self.places[gang]) for rank in range(1, size)]
            self._wait(futures)
            return [future.result() for future in futures]
        finally:
            self.client.cancel(futures)

    def _submit(self, worker: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self.client.submit(
            function, self.task, *args, workers=[worker], allow_other_workers=False, pure=False
        )

    def _wait(
        self, futures: Sequence[Future[Any]], until: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until all tasks have ended or `until` holds; raise what goes wrong meanwhile."""
        late_at = math.inf
        while True:
            here = workers_of(self.client)
            for worker in self.workers:
                if worker not in here:
                    raise ClusterError(f"worker {worker} was lost while it trained; profile again")
            failed = [future for future in futures if future.status == "error"]
            have_ended = all(future.done() for future in futures)
            if failed:
                late_at = min(late_at, time.monotonic() + _GRACE_S)
                # A rank that another one failed only reports that its gang broke.
                causes = [f for f in failed if not isinstance(f.exception(), GangBrokenError)]
                if causes or have_ended or time.monotonic() > late_at:
                    (causes or failed)[0].result()
            elif have_ended or until():
                return
            time.sleep(0.05)


# ---- What runs on the workers.


@dataclass(frozen=True, slots=True)
class _Ready:
    """A prepared shard on a worker that has trained on it, and the samples of a batch."""

    shard: Any
    batch_samples: float


@dataclass(frozen=True, slots=True)
class _Membership:
    """The place of one rank in a gang: where rank 0 is, and the topic to which it reports that."""

    topic: str
    gang: str
    rank: int
    size: int
    place: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank has seen; `boundaries` are the times at which its batches ended."""

    boundaries: tuple[float, ...]
    batch_samples: float
    memory_bytes: int
    device: str


class _Boundaries:
    """Notes when each batch ends; tells training to stop after `n` of them."""

    def __init__(self, n: int) -> None:
        self.times: list[float] = []
        self._n = n

    def __call__(self) -> bool:
        cuda = cuda_here()
        if cuda is not None:
            cuda.synchronize()  # or only the launch would be timed
        self.times.append(time.perf_counter())
        return len(self.times) >= self._n


def _make_ready(
    task: tuple[bytes, bytes], data: ShardedDataset, warmup: int, n_boundaries: int
) -> _Ready:
    """Load a shard and train a few batches; repeat the shard's samples if it has too few."""
    prepare_allocator(get_worker())  # as in a run
    workload, config = map(cloudpickle.loads, task)
    check_gpu_resource(get_worker().state.total_resources, gpus_seen())
    arrays = data.shard(_VISIT.shard)
    n_samples = len(next(iter(arrays.values())))
    ready = _train_alone(workload, config, arrays, warmup)
    needed = math.ceil(ready.batch_samples * (n_boundaries + 1))
    if needed > n_samples:
        times = math.ceil(needed / n_samples)
        repeated = {name: join_rows([array] * times) for name, array in arrays.items()}
        ready = _train_alone(workload, config, repeated, warmup)
    return ready


def _train_alone(workload: Workload, config: Config, arrays: Any, warmup: int) -> _Ready:
    shard, boundaries = workload.prepare(arrays), _Boundaries(warmup + 1)
    state = workload.init(config, _VISIT.seed)
    train = partial(workload.train, state, shard, config, visit=_VISIT, should_stop=boundaries)
    trained = where_units_train(get_worker(), train)
    return _Ready(shard, trained.n_samples / max(1, len(boundaries.times)))


def _time_rank(
    task: tuple[bytes, bytes], ready: _Ready, member: _Membership, n_boundaries: int
) -> _Rank:
    """Train as one rank of a gang and time the batches."""
    workload, config = map(cloudpickle.loads, task)
    give_back_memory()  # memory that an earlier task has freed would not count
    cuda = cuda_here()
    if cuda is not None:
        cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, boundaries = _memory(cuda), _Boundaries(n_boundaries)
    state = workload.init(config, _VISIT.seed) if member.rank == 0 else None
    begin = (state, ready.shard, config)
    how = {"visit": _VISIT, "should_stop": boundaries if member.rank == 0 else never}
    if member.size == 1:
        where_units_train(get_worker(), partial(workload.train, *begin, **how))
    else:
        with _gang(member) as gang:
            where_units_train(get_worker(), partial(workload.train_gang, *begin, **how, gang=gang))
    memory = max(0, _memory(cuda_here(), peak=True) - before)
    device = "the CPU" if cuda_here() is None else cuda_here().get_device_name()
    return _Rank(tuple(boundaries.times), ready.batch_samples, memory, device)


def _gang(member: _Membership) -> Any:
    if member.place is not None:
        host, port = member.place
        return join_gang(
            host, port, rank=member.rank, size=member.size, name=member.gang, timeout_s=_TIMEOUT_S
        )
    worker = get_worker()
    host = get_address_host(worker.address)

    def call(rank: int, port: int) -> None:
        worker.log_event(member.topic, (member.gang, (host, port)))  # all are called at the first

    about: Any = {"timeout_s": _TIMEOUT_S, "come_within_s": _TIMEOUT_S}
    return lead_gang(host, size=member.size, name=member.gang, call=call, **about)


def _memory(cuda: Any, *, peak: bool = False) -> int:
    """Return the bytes in use, or their peak: of the device on a GPU, else of the process."""
    if cuda is not None:
        return int(cuda.max_memory_allocated() if peak else cuda.memory_allocated())
    most = process_bytes("VmHWM") if peak else None
    return int(psutil.Process().memory_info().rss) if most is None else most
