"""What each worker does at a moment, for those who watch a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dagsel.dispatch.events import Worker
from dagsel.dispatch.trials import Binding
from dagsel.dispatch.units import Unit
from dagsel.dispatch.workers import KnownWorker


@dataclass(frozen=True, slots=True)
class DescribeWorkers:
    """Say what each worker does now; answer: `WorkersDescribed`."""


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
    there: Mapping[Worker, tuple[str, int, int, bool]],
) -> Iterator[WorkerNow]:
    """Yield what workers do, of those `there`: with name, memory, its limit, and if paused.

    A worker that has not said which unit it runs is about to run the first one that it was given.
    One that is paused runs none, unless it had begun before.

    Examples
    --------
    >>> unit = Unit("train", 7, 3, 0)
    >>> runs = Binding(unit, "a", shard=2, seconds=1.0, ahead_s=0.0, started=True, members=("b",))
    >>> given = Binding(Unit("train", 8, 1, 0), "c", shard=0, seconds=1.0, ahead_s=0.0)
    >>> workers = [KnownWorker(name, None, held=0b101) for name in "abcde"]
    >>> described = describe(workers, [given, runs], dict.fromkeys("abcd", ("", 0, 0, False)))
    >>> [(now.worker, now.unit == unit, now.shard) for now in described]
    [('a', True, 2), ('b', True, 2), ('c', False, 0), ('d', False, None)]
    """
    runs: dict[Worker, Binding] = {}
    for one in sorted(bindings, key=lambda binding: not binding.started):
        for worker in one.workers:
            runs.setdefault(worker, one)
    for host in workers:
        if host.worker not in there:
            continue
        bound, (name, used, limit, pauses) = runs.get(host.worker), there[host.worker]
        yield WorkerNow(
            host.worker,
            name,
            unit=None if bound is None else bound.unit,
            shard=None if bound is None else bound.shard,
            n_held=host.held.bit_count(),
            n_loading=host.loading.bit_count(),
            drains=host.draining,
            is_paused=pauses and not (bound is not None and bound.started),
            memory_bytes=used,
            memory_limit=limit,
        )
