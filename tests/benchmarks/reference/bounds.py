"""What no schedule can beat where each shard has one holder."""

from __future__ import annotations

import numpy as np

from dagsel.history.makespans import Times


def lower_bound(times: Times) -> float:
    """Largest load of a worker or chain of a trial, where each shard has one holder.

    Parameters
    ----------
    times
        Seconds of each trial on each worker, shape ``(n_trials, n_workers)``.

    Examples
    --------
    >>> lower_bound([[1, 2], [3, 1]])
    4.0
    """
    table = np.asarray(times, dtype=np.float64)
    if table.size == 0:
        return 0.0
    return float(max(table.sum(axis=0).max(), table.sum(axis=1).max()))
