"""What each worker does at a moment, for those who watch a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dagsel.dispatch.events import Worker
from dagsel.dispatch.trials import Binding
from dagsel.dispatch.units import Unit
from dagsel.dispatch.workers import KnownWorker


@dataclass(frozen=True, slots=True)
class DescribeWorkers:
    """Say what each worker does now; answer: `WorkersDescribed`."""


class ProcessNow(NamedTuple):
    """A worker's process at a moment."""

    name: str = ""
    memory_bytes: int = 0  # 0 if it is not known
    memory_limit: int = 0  # 0 for no limit
    is_paused: bool = False  # whether Dask has paused it for its memory


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """What a worker does at a moment, as the scheduler knows it."""

    worker: Worker
    name: str = ""
    unit: Unit | None = None  # what it runs; None if it is idle
    shard: int | None = None  # that the unit visits
    n_held: int = 0  # shards that it holds
    n_loading: int = 0  # shards on their way to it
    drains: bool = False  # whether it gets no new units
    is_paused: bool = False  # whether Dask has paused it for its memory, and it runs nothing
    memory_bytes: int = 0  # what its process takes
    memory_limit: int = 0  # 0 for no limit


@dataclass(frozen=True, slots=True)
class WorkersDescribed:
    """What each worker does now."""

    workers: tuple[WorkerNow, ...]


def describe(
    workers: Iterable[KnownWorker],
    bindings: Iterable[Binding],
    there: Mapping[Worker, ProcessNow],
) -> Iterator[WorkerNow]:
    """Yield what workers do, of those whose process is `there`.

    A worker that has not said which unit it runs is about to run the first one that it was given.
    One that is paused runs none, unless it had begun before. Of one that stores what a unit has
    trained it is told what it trains meanwhile.

    Examples
    --------
    >>> unit = Unit("train", 7, 3, 0)
    >>> runs = Binding(unit, "a", shard=2, seconds=1.0, ahead_s=0.0, started=True, members=("b",))
    >>> given = Binding(Unit("train", 8, 1, 0), "c", shard=0, seconds=1.0, ahead_s=0.0)
    >>> workers = [KnownWorker(name, None, held=0b101) for name in "abcde"]
    >>> described = describe(workers, [given, runs], dict.fromkeys("abcd", ProcessNow()))
    >>> [(now.worker, now.unit == unit, now.shard) for now in described]
    [('a', True, 2), ('b', True, 2), ('c', False, 0), ('d', False, None)]
    """
    runs: dict[Worker, Binding] = {}
    for one in sorted(bindings, key=lambda binding: (binding.stores, not binding.started)):
        for worker in one.workers:
            runs.setdefault(worker, one)
    for host in workers:
        if host.worker not in there:
            continue
        bound, process = runs.get(host.worker), there[host.worker]
        yield WorkerNow(
            host.worker,
            process.name,
            unit=None if bound is None else bound.unit,
            shard=None if bound is None else bound.shard,
            n_held=host.held.bit_count(),
            n_loading=host.loading.bit_count(),
            drains=host.draining,
            is_paused=process.is_paused and not (bound is not None and bound.started),
            memory_bytes=process.memory_bytes,
            memory_limit=process.memory_limit,
        )
