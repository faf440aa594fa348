"""One rank of a timed gang: what a worker does for a scaling profile."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
from distributed import get_worker
from distributed.comm.addressing import get_address_host

from dagsel.execution.process import (
    check_gpu_resource,
    give_back_memory,
    gpus_seen,
    keep_freed_memory,
)
from dagsel.storage import ShardedDataset
from dagsel.workloads.base import Config, Visit, Workload, never
from dagsel.workloads.gang.gang import join_gang, lead_gang

#: So long a gang waits for one of its ranks.
_TIMEOUT_S = 60.0
_SEED = 0
_SHARD = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker that holds the shard and has trained on it before.

    Parameters
    ----------
    shard
        What the workload made of it.
    batch_samples
        Samples in a batch.
    """

    shard: Any
    batch_samples: float


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank has seen: when its batches ended, and the rest as in `Measured`."""

    boundaries: tuple[float, ...]
    batch_samples: float
    memory_bytes: int
    device: str


class Boundaries:
    """Notes when each batch ends, and says stop after so many.

    Parameters
    ----------
    n
        How many.
    """

    def __init__(self, n: int) -> None:
        self.times: list[float] = []
        self._n = n

    def __call__(self) -> bool:
        """Say whether to stop; asked once a batch."""
        cuda = _cuda()
        if cuda is not None:
            cuda.synchronize()  # or the time would be that of the launch
        self.times.append(time.perf_counter())
        return len(self.times) >= self._n


class Memory:
    """The most memory that was taken since it was made."""

    def __init__(self) -> None:
        give_back_memory()  # or what an earlier unit has freed would be taken again unseen
        cuda = _cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = _memory_now()

    @property
    def growth(self) -> int:
        """Bytes of the device on a GPU, else of the process."""
        cuda = _cuda()
        peak = cuda.max_memory_allocated() if cuda is not None else _peak_memory()
        return max(0, int(peak) - self._before)


def make_ready(
    workload: bytes, config: bytes, data: ShardedDataset, warmup: int, n_boundaries: int
) -> Ready:
    """Task that loads a shard, trains a few batches and repeats the shard if it has too few."""
    keep_freed_memory()  # as in a run
    work, settings = cloudpickle.loads(workload), cloudpickle.loads(config)
    check_gpu_resource(get_worker().state.total_resources, gpus_seen())
    arrays = data.shard(_SHARD)
    n_samples = len(next(iter(arrays.values())))
    shard = work.prepare(arrays)
    batch_samples = _train_alone(work, settings, shard, warmup + 1)
    needed = math.ceil(batch_samples * (n_boundaries + 1))
    if needed > n_samples:
        times = math.ceil(needed / n_samples)
        repeated = {name: np.concatenate([array] * times) for name, array in arrays.items()}
        shard = work.prepare(repeated)
        batch_samples = _train_alone(work, settings, shard, warmup + 1)
    return Ready(shard, batch_samples)


def _train_alone(work: Workload, config: Config, shard: Any, n_boundaries: int) -> float:
    boundaries = Boundaries(n_boundaries)
    state = work.init(config, _SEED)
    trained = work.train(state, shard, config, visit=_visit(), should_stop=boundaries)
    return trained.n_samples / max(1, len(boundaries.times))


def time_rank(
    workload: bytes, config: bytes, ready: Ready, about: tuple[str, str, int, int, Any, int]
) -> Rank:
    """Task of one rank of a timed gang."""
    work, settings = cloudpickle.loads(workload), cloudpickle.loads(config)
    topic, name, rank, size, place, n_boundaries = about
    boundaries, memory = Boundaries(n_boundaries), Memory()
    state = work.init(settings, _SEED) if rank == 0 else None
    if size == 1:
        work.train(state, ready.shard, settings, visit=_visit(), should_stop=boundaries)
    else:
        with _gang(topic, name, rank, size, place) as gang:
            work.train_gang(
                state,
                ready.shard,
                settings,
                visit=_visit(),
                should_stop=boundaries if rank == 0 else never,
                gang=gang,
            )
    device = _cuda().get_device_name() if _cuda() is not None else "the CPU"
    return Rank(tuple(boundaries.times), ready.batch_samples, memory.growth, device)


def _gang(topic: str, name: str, rank: int, size: int, place: tuple[str, int] | None) -> Any:
    if place is not None:
        host, port = place
        return join_gang(host, port, rank=rank, size=size, name=name, timeout_s=_TIMEOUT_S)
    worker = get_worker()
    host = get_address_host(worker.address)

    def gather(port: int) -> None:
        worker.log_event(topic, {"name": name, "host": host, "port": port})

    return lead_gang(host, size=size, name=name, timeout_s=_TIMEOUT_S, gather=gather)


def _visit() -> Visit:
    return Visit(seed=_SEED, trial=0, epoch=1, shard=_SHARD)


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def _memory_now() -> int:
    cuda = _cuda()
    return int(cuda.memory_allocated() if cuda is not None else psutil.Process().memory_info().rss)


def _peak_memory() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return _memory_now()
