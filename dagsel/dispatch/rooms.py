"""Which trials fit into which workers' memory.

A trial may say how many bytes its units take (`Chain.memory_bytes`), a worker how many there are
(`WorkerAdded.room`). No unit is bound to a worker that has less: the trial is *barred* there. A
trial that says nothing fits everywhere.

All its shards have to come to a trial, so the workers where the largest trial fits hold a copy of
each shard (`WorkerTable.replace`), and the others another one. A trial fails that no worker has
had room for, with a shard that it needs, for `DispatchConfig.room_timeout_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from math import inf

from dagsel.dispatch.events import Worker

_NOTHING: frozenset[int] = frozenset()


class Rooms:
    """Knows which trials are barred where; workers with equal room share what is known.

    Examples
    --------
    >>> rooms = Rooms()
    >>> rooms.set_need(7, 300)
    >>> rooms.set_room("small", 200)
    >>> rooms.set_room("large", 400)
    >>> rooms.set_room("boundless", None)
    >>> [set(rooms.barred(worker)) for worker in ("small", "large", "boundless")]
    [{7}, set(), set()]
    """

    def __init__(self) -> None:
        self.needs: dict[int, int] = {}  # bytes, by trial that says so
        self.by_worker: dict[Worker, set[int]] = {}  # barred trials, of workers with a limit
        self._room: dict[Worker, int] = {}
        self._by_room: dict[int, set[int]] = {}
        self._n_with: Counter[int] = Counter()  # workers, by room

    @property
    def is_used(self) -> bool:
        """Whether a trial is barred anywhere."""
        return bool(self._by_room) and any(self._by_room.values())

    @property
    def barred_somewhere(self) -> set[int]:
        """The trials that do not fit on all workers."""
        return self._by_room[min(self._by_room)] if self._by_room else set()

    def barred(self, worker: Worker) -> Set[int]:
        """Return the trials that do not fit there."""
        return self.by_worker.get(worker, _NOTHING)

    def fits(self, trial: int, worker: Worker) -> bool:
        """Whether the trial's units fit there."""
        return trial not in self.by_worker.get(worker, _NOTHING)

    def set_need(self, trial: int, n_bytes: int | None) -> None:
        """Note what the trial's units take from now on; None if it does not say."""
        self.forget(trial)
        if n_bytes is not None:
            self.needs[trial] = n_bytes
            for room, barred in self._by_room.items():
                if room < n_bytes:
                    barred.add(trial)

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        if self.needs.pop(trial, None) is not None:
            for barred in self._by_room.values():
                barred.discard(trial)

    def set_room(self, worker: Worker, n_bytes: int | None) -> None:
        """Note what the worker has for a unit from now on; None for anything."""
        if self._room.get(worker) == n_bytes:
            return
        self.remove_worker(worker)
        if n_bytes is None:
            return
        if n_bytes not in self._by_room:
            over = (trial for trial, need in self.needs.items() if need > n_bytes)
            self._by_room[n_bytes] = set(over)
        self._room[worker] = n_bytes
        self._n_with[n_bytes] += 1
        self.by_worker[worker] = self._by_room[n_bytes]

    def remove_worker(self, worker: Worker) -> None:
        """Forget a worker that is gone."""
        room = self._room.pop(worker, None)
        self.by_worker.pop(worker, None)
        if room is not None:
            self._n_with[room] -= 1
            if not self._n_with[room]:
                del self._by_room[room], self._n_with[room]

    def room(self, worker: Worker) -> int | None:
        """Return the bytes that the worker has for a unit; None for any number."""
        return self._room.get(worker)

    def largest(self, rooms: Iterable[int | None]) -> int:
        """Return the largest need for which one of these rooms is enough; 0 if there is none."""
        bounds = [inf if room is None else room for room in rooms]
        most = max(bounds, default=0)
        return max((need for need in self.needs.values() if need <= most), default=0)
