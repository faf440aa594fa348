"""Copies of states in the cluster: which a hop makes, and which nobody needs after it.

Dask keeps the copy at a hop's source until the state is needed no more. A state is as large as a
model with its optimizer, so a copy that no unit will read is dropped when the hop is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed.scheduler import TaskState


def must_hop(task: TaskState) -> bool:
    """Say whether a task's input has to be sent to its worker: it is not there, nor on its way."""
    return any(
        task.processing_on not in (state.who_has or ())
        and not any(
            reader.processing_on is task.processing_on
            for reader in state.waiters or ()
            if reader is not task
        )
        for state in task.dependencies
    )


def spare_copies(state: TaskState, may_read: Callable[[Any, str], bool]) -> set[str]:
    """Name the workers whose copy of a state nobody needs; never all of them.

    Parameters
    ----------
    state
        Task whose result is the state.
    may_read
        Says of the key of a task that waits, and a worker, whether the copy there may serve it.
    """
    holders = {worker.address for worker in state.who_has or ()}
    readers = state.waiters or set()
    reading = {task.processing_on.address for task in readers if task.processing_on}
    if not reading <= holders:
        return set()  # one is being sent a copy, from who knows which of the holders
    waiting = [task.key for task in readers if not task.processing_on]
    needed = reading | {at for at in holders if any(may_read(key, at) for key in waiting)}
    return holders - (needed or {min(holders, default="")})
