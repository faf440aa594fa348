"""States in the cluster that nobody needs any more: spare copies, and those kept warm.

Dask keeps the copy at a hop's source until the state is needed no more. A state is as large as a
model with its optimizer, so a copy that no unit will read is dropped when the hop is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distributed import Scheduler
from distributed.scheduler import TaskState

from dagsel.dispatch.events import UnitReturned
from dagsel.dispatch.units import Unit
from dagsel.messages import PieceRecord


class WarmStates:
    """Pieces of units that were stopped in their shard, and the workers that keep their states.

    Parameters
    ----------
    forget
        Has a worker forget the state of a unit.
    """

    def __init__(self, forget: Callable[[str, Unit], None]) -> None:
        self._forget = forget
        self._pieces: dict[Unit, list[PieceRecord]] = {}

    def add(self, piece: PieceRecord) -> None:
        """Note a piece."""
        self._pieces.setdefault(piece.unit, []).append(piece)

    def n_pieces(self, unit: Unit) -> int:
        """How often a unit was stopped."""
        return len(self._pieces.get(unit, ()))

    def returned(self, unit: Unit) -> UnitReturned:
        """Return what the dispatcher is told of a unit that comes back."""
        pieces = self._pieces.get(unit)
        if not pieces:
            return UnitReturned(unit)
        last = pieces[-1]
        pieces[-1] = replace(last, stop=last.start)  # its time counts once
        return UnitReturned(unit, last.shard, last.stop - last.start)

    def drop(self, unit: Unit) -> None:
        """Have workers forget a unit's states."""
        for worker in {piece.worker for piece in self._pieces.pop(unit, ())}:
            self._forget(worker, unit)

    def drop_trial(self, trial: int) -> None:
        """Have workers forget the states of a trial that is over."""
        for unit in [unit for unit in self._pieces if unit.trial == trial]:
            self.drop(unit)


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
