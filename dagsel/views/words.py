"""The words in which a search is shown: times, configurations, curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dagsel.console import counted, readable_size, span
from dagsel.dispatch.description import WorkerNow
from dagsel.messages import UnitRecord

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE = 12  # values of a curve that are shown


def seconds_left(
    units: Sequence[UnitRecord], n_epochs: int, *, n_shards: int, n_workers: int
) -> tuple[float, float] | None:
    """Estimate how long so many epochs take, at least and at most, by the last units.

    The least and the most are two standard errors of a mean unit apart from what is likely, and
    workers are taken to be always busy.

    Examples
    --------
    >>> from dagsel.dispatch.units import Unit
    >>> units = [
    ...     UnitRecord(Unit("train", 0, 1, k), "w", k, 0.0, 2.0 + k % 2, False) for k in range(8)
    ... ]
    >>> least, most = seconds_left(units, 10, n_shards=4, n_workers=2)
    >>> round(least), round(most)
    (42, 58)
    """
    took = [unit.stop - unit.start for unit in units if not unit.recovered]
    n_train = sum(unit.unit.kind == "train" and not unit.recovered for unit in units)
    if n_epochs <= 0 or n_train < 2 or not n_workers:
        return None
    mean = math.fsum(took) / len(took)
    variance = math.fsum((seconds - mean) ** 2 for seconds in took) / (len(took) - 1)
    n_left = n_epochs * n_shards * len(took) / n_train
    error = 2 * math.sqrt(variance * (1 / len(took) + 1 / n_left))
    return max(0.0, mean - error) * n_left / n_workers, (mean + error) * n_left / n_workers


def from_to(least: float, most: float) -> str:
    """Return two times in two digits, as one if they are alike.

    Examples
    --------
    >>> from_to(123.4, 167.2), from_to(5.01, 5.02)
    ('2 min to 2.83 min', 'about 5 s')
    """
    low, high = span(float(f"{least:.2g}")), span(float(f"{most:.2g}"))
    return f"about {high}" if low == high else f"{low} to {high}"


def clock(seconds: float) -> str:
    """Return a time since the beginning.

    Examples
    --------
    >>> clock(83.2), clock(7384)
    ('1:23', '2:03:04')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float]) -> str:
    """Return the last values as a line of blocks, from the least to the largest of them.

    Examples
    --------
    >>> sparkline([0.1, 0.5, 0.9, 0.7])
    '▁▅█▆'
    >>> sparkline([1.0, 1.0]), sparkline([1.0, float("nan"), 2.0])
    ('▁▁', '▁ █')
    """
    last = values[-_CURVE:]
    finite = [value for value in last if math.isfinite(value)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (most - least) if most > least else 0.0
    return "".join(
        _BLOCKS[round((value - least) * scale)] if math.isfinite(value) else " " for value in last
    )


def doing(now: WorkerNow) -> str:
    """Say what a worker does.

    Examples
    --------
    >>> from dagsel.dispatch.units import Unit
    >>> doing(WorkerNow("tcp://a:1", "0", Unit("train", 7, 3, 0), shard=2))
    'trains trial 7, epoch 3, shard 2'
    >>> doing(WorkerNow("tcp://a:1", "0", n_loading=2)), doing(WorkerNow("tcp://a:1", "0"))
    ('loads 2 shards', 'idle')
    >>> doing(WorkerNow("tcp://a:1", "0", is_paused=True))
    'paused by Dask for its memory'
    """
    if now.is_paused:
        return "paused by Dask for its memory"
    if now.unit is None:
        waits = f"loads {counted(now.n_loading, 'shard')}" if now.n_loading else "idle"
        return "leaves" if now.drains else waits
    kind, trial, epoch, _ = now.unit
    if kind == "check":
        return f"scores trial {trial} where it rests, shard {now.shard}"
    verb = "trains" if kind == "train" else "scores"
    return f"{verb} trial {trial}, epoch {epoch}, shard {now.shard}"


def memory(now: WorkerNow) -> str:
    """Say how much memory a worker's process takes.

    Examples
    --------
    >>> memory(WorkerNow("a", "0", memory_bytes=3 * 10**8, memory_limit=4 * 10**9))
    '300.0 MB of 4.0 GB'
    """
    used = readable_size(now.memory_bytes)
    return f"{used} of {readable_size(now.memory_limit)}" if now.memory_limit else used
