"""The servers of our own cluster look after themselves less often than Dask has them do.

Dask's intervals are made for its dashboard, which our own cluster does not have. On a machine whose
cores all train, what a server does for nobody is time that a unit waits. An interval that the user
has chosen stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask.config
from distributed import Nanny

#: What a server does again and again: after how many milliseconds, with Dask and with us.
_INTERVALS_MS = {
    "tick": (20, 500),  # how late the event loop is
    "monitor": (500, 1_000),  # time, memory and disk of the process
    "memory_monitor": (100, 250),  # whether a worker's memory is full
    "idle-timeout": (250, 1_000),
    "no-workers-timeout": (250, 1_000),
}
#: The same as configuration. Workers take no samples of what their threads do, either.
SELDOM = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": f"{_INTERVALS_MS['tick'][1]}ms",
    "distributed.admin.system-monitor.interval": f"{_INTERVALS_MS['monitor'][1]}ms",
    "distributed.worker.memory.monitor-interval": f"{_INTERVALS_MS['memory_monitor'][1]}ms",
}


def seldom() -> dict[str, Any]:
    """Return the configuration of worker processes, without what the user has chosen."""
    dasks = dask.config.merge(*dask.config.defaults)
    return {
        name: value
        for name, value in SELDOM.items()
        if dask.config.get(name) == dask.config.get(name, config=dasks)
    }


def look_seldom(server: Any) -> None:
    """Have a server in this process do as seldom what nobody has chosen an interval for.

    In the configuration, which is the user's, other clusters would find the intervals too.
    """
    for name, (dasks_ms, ours_ms) in _INTERVALS_MS.items():
        callback = server.periodic_callbacks.get(name)
        if callback is not None and callback.callback_time == dasks_ms:
            callback.callback_time = ours_ms


class QuietNanny(Nanny):
    """The nanny of a worker of ours; it lives in this process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        look_seldom(self)


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Keep a logger of Dask silent."""
    theirs = logging.getLogger(name)
    level = theirs.level
    theirs.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        theirs.setLevel(level)
