"""Which units train or score here, and which of them are to stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Reschedule

from dagsel.dispatch.units import Unit
from dagsel.workloads.random_streams import own_streams

#: A worker that leaves a run waits so long for the batches that it trains or scores.
LEAVE_S = 1.0


class Stops:
    """Tells units to stop, those that have not begun yet too.

    The threads of tasks and the one that hears the dispatcher use it side by side.
    """

    def __init__(self) -> None:
        self._events: dict[Unit, threading.Event] = {}  # of units that are here
        self._has_ended = threading.Condition()  # notified as one of them ends
        self._early: set[tuple[Unit, int]] = set()  # told to stop, with the number of the attempt
        self._are_all_told = False

    @contextmanager
    def of(self, unit: Unit, attempt: int) -> Iterator[threading.Event]:
        """Give an attempt at a unit what is set when it is to stop, for as long as it lasts."""
        stop = self._events[unit] = threading.Event()
        if self._are_all_told or (unit, attempt) in self._early:
            stop.set()
        try:
            yield stop
        finally:
            with self._has_ended:
                self._events.pop(unit, None)
                self._has_ended.notify_all()
            self._early.discard((unit, attempt))

    def tell(self, unit: Unit, attempt: int) -> None:
        """Tell an attempt at a unit to stop, or not to begin."""
        self._early.add((unit, attempt))
        stop = self._events.get(unit)
        if stop is not None:
            stop.set()

    def tell_all(self) -> None:
        """Tell all units to stop, those too that come to their turn only now."""
        self._are_all_told = True
        for stop in list(self._events.values()):
            stop.set()

    def wait(self) -> None:
        """Wait until none is here. Batches that take long are not waited for."""
        with self._has_ended:
            self._has_ended.wait_for(lambda: not self._events, LEAVE_S)

    def are_training(self) -> bool:
        """Whether one of them trains, or waits for its turn to."""
        return any(unit.kind == "train" for unit in list(self._events))


@contextmanager
def own_turn(stop: threading.Event) -> Iterator[None]:
    """Wait for a unit's turn: one at a time in a process, whatever workers and runs it has.

    Raises
    ------
    Reschedule
        If it is to stop by then.
    """
    with own_streams(give_up=stop.is_set) as is_its_turn:
        if not is_its_turn or stop.is_set():
            raise Reschedule
        yield
