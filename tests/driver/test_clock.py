"""What a run has taken is told while another thread writes on the bill."""

from __future__ import annotations

from itertools import count
from typing import Any

from dagsel.driver.clock import RunClock
from dagsel.history.record import Record
from dagsel.planning.bill import Bill


class Busy:
    """An engine whose clock goes on at each look; a worker comes just before the bill is read."""

    def __init__(self) -> None:
        self.now = count(1.0).__next__
        self._bill = Bill()

    @property
    def bill(self) -> Bill:
        self._bill = self._bill.ask(self._bill.asked + 1, at=self.now())
        return self._bill


def test_a_worker_that_comes_as_the_clock_is_read_does_not_end_the_search() -> None:
    engine: Any = Busy()
    clock = RunClock(engine, None, None, None)
    clock.begin(Record("r"))
    for n in range(1, 6):  # workers, as each has cost two seconds more when the next one comes
        assert clock.taken == (2.0 * n, float(n * n), None)
