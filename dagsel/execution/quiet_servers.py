"""The servers of our own cluster look after themselves less often than Dask has them do.

Dask's intervals are made for its dashboard, which our own cluster does not have. On a machine whose
cores all train, what a server does for nobody is time that a unit waits.
"""

from __future__ import annotations

from typing import Any

from distributed import Nanny

#: Milliseconds by the name of what a server does again and again; beside them those of Dask.
_INTERVALS_MS = {
    "tick": 500,  # how late the event loop is; 20
    "monitor": 1_000,  # time, memory and disk of the process; 500
    "memory_monitor": 250,  # whether a worker's memory is full; 100
    "idle-timeout": 1_000,  # 250
    "no-workers-timeout": 1_000,  # 250
}
#: Configuration of worker processes: they take no samples of what their threads do, either.
SELDOM = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": f"{_INTERVALS_MS['tick']}ms",
    "distributed.admin.system-monitor.interval": f"{_INTERVALS_MS['monitor']}ms",
    "distributed.worker.memory.monitor-interval": f"{_INTERVALS_MS['memory_monitor']}ms",
}


def look_seldom(server: Any) -> None:
    """Have a server in this process do so as seldom.

    In its configuration, which is the user's, other clusters would find the intervals too.
    """
    for name, interval_ms in _INTERVALS_MS.items():
        if (callback := server.periodic_callbacks.get(name)) is not None:
            callback.callback_time = interval_ms


class QuietNanny(Nanny):
    """The nanny of a worker of ours; it lives in this process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        look_seldom(self)
