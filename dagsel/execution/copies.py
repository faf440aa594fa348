"""Copies of states in the cluster: which a hop makes, and which nobody needs after it.

Dask keeps the copy at a hop's source until the state is needed no more. A state is as large as a
model with its optimizer, so a copy that no unit will read is dropped when the hop is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from distributed import Scheduler
from distributed.scheduler import TaskState


class SpareCopies:
    """Drops the copies of states that no unit will read.

    Parameters
    ----------
    scheduler
        Dask's.
    may_read
        Says of the key of a task that waits, and a worker, whether the copy there may serve it.
    """

    def __init__(self, scheduler: Scheduler, may_read: Callable[[Any, str], bool]) -> None:
        self._scheduler, self._may_read = scheduler, may_read
        self._read: set[Any] = set()  # keys of states that were read and may have spare copies
        self._stimuli = itertools.count()

    def note_read(self, task: TaskState | None) -> None:
        """Note that a task has what it reads."""
        self._read.update(state.key for state in (task.dependencies if task else ()))

    def drop(self) -> None:
        """Drop the spare copies of the states that were read since the last call."""
        read, self._read = self._read, set()
        for key in read:
            state = self._scheduler.tasks.get(key)
            if state is None or len(state.who_has or ()) < 2:
                continue
            for worker in spare_copies(state, self._may_read):
                self._scheduler.request_remove_replicas(
                    worker, [key], stimulus_id=f"dagsel-spare-{next(self._stimuli)}"
                )


def must_hop(task: TaskState) -> bool:
    """Whether a task's input has to be sent to its worker: it is not there, nor on its way."""
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
    """Return the workers whose copy of a state nobody needs; never all of them.

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
