"""Attempts at units: their numbers, which of them run, and what was lost with workers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice

from dagsel.dispatch.events import UnitDone
from dagsel.dispatch.units import Kind, Round, Unit, units_after
from dagsel.execution.state_cache import before
from dagsel.messages import UnitRecord


def unit_done(work: Sequence[UnitRecord]) -> UnitDone:
    """Return what the dispatcher is told of the units that one task has done, in order."""
    kind = work[0].unit.kind
    took = {done.unit: (done.shard, 0.0 if done.recovered else done.stop - done.start)
            for done in work}  # fmt: skip
    (shard, seconds), *then = (each for unit, each in took.items() if unit.kind == kind)
    scored = tuple(each for unit, each in took.items() if unit.kind != kind)
    return UnitDone(work[0].unit, seconds, shard, scored, tuple(then))


class Attempts:
    """Counts the attempts at a run's units."""

    def __init__(self, n_shards: int) -> None:
        self._n_shards = n_shards
        self._tasks: dict[int, Unit] = {}  # of each trial the first unit of its last training task
        self._numbers: dict[Unit, int] = {}
        # Of those that are forgotten of a trial's units: the highest one, and the last epoch.
        self._forgotten: dict[tuple[Kind, int], tuple[int, int]] = {}
        self._results: set[Unit] = set()  # units whose results the cluster has
        self._running: dict[Unit, float] = {}  # units that run, and since when
        # By unit, since its last record: how often it was begun, and seconds of lost attempts.
        self._n_begun: Counter[Unit] = Counter()
        self._lost_s: defaultdict[Unit, float] = defaultdict(float)

    def number(self, unit: Unit) -> int:
        """Return the number of the last attempt, or a higher one; 0 if there was none."""
        number = self._numbers.get(unit)
        if number is not None:
            return number
        highest, epoch = self._forgotten.get((unit.kind, unit.trial), (0, 0))
        return highest if unit.epoch <= epoch else 0

    def next(self, unit: Unit, n_more: int = 0) -> int:
        """Return the number of another attempt, in whose task so many more units follow."""
        for each in (unit, *islice(units_after(unit, self._n_shards), n_more)):
            self._numbers[each] = self.number(each) + 1
        return self._numbers[unit]

    def note_stored(self, unit: Unit) -> None:
        """Note that the store may have something of a unit: the next attempt looks there."""
        self._numbers[unit] = max(1, self.number(unit))

    def note_begun(self, round_: Round) -> None:
        """Note what the store has of a round's units."""
        for chain in round_.chains:
            for epoch, begun in zip(chain.epochs, chain.begun, strict=False):
                if begun.partial is not None:
                    self.note_stored(Unit("train", chain.trial, epoch, len(begun.visits)))

    def note_result(self, unit: Unit) -> None:
        """Note that the cluster has a unit's result."""
        self._results.add(unit)

    def has_result(self, unit: Unit) -> bool:
        """Whether the cluster has had a unit's result, and was not told to forget it."""
        return unit in self._results

    def forget(self, unit: Unit) -> None:
        """Forget a unit that nobody waits for any more.

        If it is sent again its attempts have higher numbers, so that what comes late is known.
        """
        self._results.discard(unit)
        number = self._numbers.pop(unit, 0)
        if number:
            of = (unit.kind, unit.trial)
            highest, epoch = self._forgotten.get(of, (0, 0))
            self._forgotten[of] = max(highest, number), max(epoch, unit.epoch)

    def is_running(self, unit: Unit) -> bool:
        """Whether a worker has said that it has begun the unit, and nothing since."""
        return unit in self._running

    def begun(self, unit: Unit) -> None:
        """Note that a worker has begun a unit."""
        self._running[unit] = time.monotonic()
        self._n_begun[unit] += 1

    def stopped(self, unit: Unit) -> None:
        """Note that a unit has said how far it has come."""
        self._running.pop(unit, None)

    def returned(self, unit: Unit) -> None:
        """Note that a unit came back; if it did not say how far it has come, its time is lost."""
        if unit in self._running:
            self._lost_s[unit] += time.monotonic() - self._running.pop(unit)

    def task_done(self, unit: Unit) -> None:
        """Note that a task is done, by its first unit.

        One that repeats an older unit, whose result was lost, has stored nothing.
        """
        if unit.kind == "train":
            self._tasks[unit.trial] = max(unit, self._tasks.get(unit.trial, unit))

    def spare(self, unit: Unit) -> tuple[int, int] | None:
        """Return the place of a state that nobody needs once the unit's task has stored its own.

        The state that the task begins with stays, so that there are two. The one before it, with
        which the last task began, is spare.
        """
        first = self._tasks.get(unit.trial)
        if first is None or first[2:] >= unit[2:] or first[2:] == (1, 0):
            return None
        return before(first, self._n_shards)

    def done(self, unit: Unit) -> tuple[int, float]:
        """Note that a unit is done; return how often it was begun, and the seconds lost."""
        self.stopped(unit)
        return self._n_begun.pop(unit, 1), self._lost_s.pop(unit, 0.0)
