"""What each worker did and when, since the run began: the bars of a Gantt chart."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dagsel.history.record import Record
from dagsel.messages import UnitWork


class Bar(NamedTuple):
    """A visit of a shard on one worker; of a gang each worker has one."""

    worker: str
    trial: int
    kind: str  # "train", "evaluate" or "check"
    epoch: int
    shard: int
    begin: float  # seconds since the run began, without the time that it lay dead
    end: float
    hop: bool  # whether the state came from another worker


def bars(record: Record) -> list[Bar]:
    """List what was done, in the order in which it ended.

    What was only found in the store has no time of its own and is left out; of what was stopped in
    the middle each piece is a bar.

    Examples
    --------
    >>> from dagsel.dispatch.units import Unit
    >>> from dagsel.messages import SessionBegun, UnitRecord
    >>> record = Record("run")
    >>> record.add(SessionBegun(1000.0, 0.0))
    >>> record.add(UnitRecord(Unit("train", 0, 1, 0), "tcp://a", 2, 1001.0, 1003.0, True))
    >>> bars(record)
    [Bar(worker='tcp://a', trial=0, kind='train', epoch=1, shard=2, begin=1.0, end=3.0, hop=True)]
    """
    starts = [at for at, _ in record.sessions]
    works: list[UnitWork] = [*record.units, *record.pieces]
    found = []
    for work in works:
        if not work.recovered:
            session = max(0, bisect_right(starts, work.start) - 1)
            zero = record.sessions[session][1] if record.sessions else 0.0
            unit = work.unit
            about = (unit.trial, unit.kind, unit.epoch, work.shard)
            when = (max(0.0, work.start - zero), max(0.0, work.stop - zero), work.hop)
            found += [Bar(worker, *about, *when) for worker in (work.worker, *work.members)]
    return sorted(found, key=lambda bar: bar.end)


def worker_names(all_bars: Sequence[Bar]) -> dict[str, str]:
    """Return a short name of each worker, by address, in the order in which they began.

    Examples
    --------
    >>> one = Bar("tcp://10.0.0.7:4711", 0, "train", 1, 0, 0.0, 1.0, False)
    >>> worker_names([one, one._replace(worker="tcp://10.0.0.7:4712", begin=0.5)])
    {'tcp://10.0.0.7:4711': 'worker 0', 'tcp://10.0.0.7:4712': 'worker 1'}
    """
    by_begin = sorted(all_bars, key=lambda bar: bar.begin)
    workers = dict.fromkeys(bar.worker for bar in by_begin)
    return {worker: f"worker {n}" for n, worker in enumerate(workers)}


def occupancy(
    all_bars: Sequence[Bar],
) -> tuple[NDArray[np.float64], dict[int, NDArray[np.float64]]]:
    """Count the workers that each trial had, over time.

    Returns
    -------
    times, workers
        The middles of equal steps, in seconds, shape ``(n_steps,)``; by trial how many workers it
        had in each of them on average, of the same shape. A step takes several visits.
    """
    end = max(bar.end for bar in all_bars)
    mean = sum(busy_seconds(all_bars).values()) / len(all_bars)
    n_steps = int(min(240.0, max(24.0, end / (8 * mean)))) if mean else 24
    edges = np.linspace(0.0, max(end, 1e-9), n_steps + 1)
    width = edges[1]
    found: dict[int, NDArray[np.float64]] = {}
    for bar in all_bars:
        busy = found.setdefault(bar.trial, np.zeros(n_steps))
        first, last = _steps(bar, width, n_steps)
        inside = np.minimum(edges[first + 1 : last + 2], bar.end)
        busy[first : last + 1] += np.maximum(
            0.0, inside - np.maximum(edges[first : last + 1], bar.begin)
        )
    return (edges[:-1] + edges[1:]) / 2, {n: busy / width for n, busy in sorted(found.items())}


def _steps(bar: Bar, width: float, n_steps: int) -> tuple[int, int]:
    return min(int(bar.begin / width), n_steps - 1), min(int(bar.end / width), n_steps - 1)


def busy_seconds(all_bars: Sequence[Bar]) -> dict[int, float]:
    """Return the worker-seconds that each trial took."""
    found: dict[int, float] = {}
    for bar in all_bars:
        found[bar.trial] = found.get(bar.trial, 0.0) + bar.end - bar.begin
    return found


def lanes(all_bars: Sequence[Bar]) -> Iterator[tuple[str, list[Bar]]]:
    """Yield each worker's bars, in the order of `worker_names`."""
    by_worker: dict[str, list[Bar]] = {worker: [] for worker in worker_names(all_bars)}
    for bar in all_bars:
        by_worker[bar.worker].append(bar)
    yield from by_worker.items()
