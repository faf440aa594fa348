"""List scheduling: which trial a free worker takes next, or whether it should wait.

`ListScheduler` keeps the remaining work of trials and workers; `ListScheduler.pick` chooses. The
dispatcher calls it with estimated times and the clock. With exact times it is also an off-line
planner (``tests/benchmarks/reference/open_shop.py``).

If each shard has one holder, the trial with the most remaining work goes first, unless its unit
would end after a critical running trial needs this worker. If shards have several holders, it also
counts how much work waits for each shard. Sets of shards are bit masks.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Set
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any, Generic, TypeVar

from dagsel.dispatch.worker_numbers import WorkerNumbers

W = TypeVar("W", bound=Hashable)

PRESSURE_WEIGHT = 3.0
ROUNDING_S = 1e-6  # rounding error of sums of times
STAY_BONUS = 0.3  # of the largest remaining work, for a trial whose state is here


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the ones, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class ListScheduler(Generic[W]):
    """Remaining work of trials and workers, and the rule that orders it.

    `time` returns the seconds that the next unit of a trial takes on a worker. A trial whose state
    is on the worker has a bonus: `stay`, as a share of the largest remaining work.
    """

    def __init__(self, time: Callable[[int, W], float], *, stay: float = STAY_BONUS) -> None:
        self.time = time
        self.stay = stay
        self.target = 0.0  # lower bound of the end of all; raised when it proves out of reach
        self.rem: dict[int, float] = {}  # remaining work
        self.need: dict[int, int] = {}  # shards that the trial's next unit may take
        self.priority: dict[int, float] = {}  # counts before `rem`
        self.home: dict[int, W] = {}  # the worker that has the state; fixed while the trial is idle
        self.held: dict[W, int] = {}
        self.barred: Mapping[W, Set[int]] = {}  # trials that do not fit into a worker's memory
        self.load: WorkerNumbers[W] = WorkerNumbers()  # remaining work
        self.free_at: WorkerNumbers[W] = WorkerNumbers()  # when the worker's last unit ends
        self.speed: dict[W, float] = {}
        self.demand: dict[int, float] = {}  # by shard: outstanding work at speed 1
        self.replicated = False  # a shard has several holders; only then `demand` counts
        self.wait_until = inf  # after a `pick` of nothing; infinity: the next event
        self._idle: list[tuple[float, float, int]] = []
        self._key: dict[int, tuple[float, float, int]] = {}
        self._lims: list[tuple[float, int]] = []
        self._lim: dict[int, float] = {}
        self._longest: list[tuple[float, int]] = []  # heap of running trials; some are out of date
        self._speeds: dict[int, float] = {}  # by shard: of all its holders; empty: to be counted
        self._here: dict[W, set[int]] = {}
        self.unneeded: set[W] = set()  # workers of which it is known that no idle trial needs them

    # ---- which trials are idle or run

    @property
    def idle(self) -> Iterator[int]:
        """The idle trials, in the order in which they are served."""
        return (key[2] for key in self._idle)

    @property
    def n_idle(self) -> int:
        """How many trials are idle."""
        return len(self._idle)

    def is_idle(self, trial: int) -> bool:
        """Whether the trial waits for a worker."""
        return trial in self._key

    def enter(self, trial: int, need: int, *, weight: float = 1.0) -> None:
        """Note that the trial is idle and that its next unit may take the shards in `need`.

        Its remaining work counts `weight` times among the idle trials.
        """
        self.leave(trial)
        self.need[trial] = need
        rank = self.rem[trial] * weight
        key = self._key[trial] = (-self.priority.get(trial, 0.0), -rank, trial)
        insort(self._idle, key)
        if self.unneeded:
            self.unneeded = {worker for worker in self.unneeded if not need & self.held[worker]}
        if self.stay and (home := self.home.get(trial)) is not None:
            self._here.setdefault(home, set()).add(trial)

    def enter_again(self, trials: Mapping[int, tuple[int, float]]) -> None:
        """Do what `enter` does for many trials that are idle, given need and weight of each."""
        some = 0
        for trial, (need, weight) in trials.items():
            some |= need
            self.need[trial] = need
            rank = self.rem[trial] * weight
            self._key[trial] = (-self.priority.get(trial, 0.0), -rank, trial)
        self._idle = sorted(self._key.values())
        if self.unneeded:
            self.unneeded = {worker for worker in self.unneeded if not some & self.held[worker]}

    def leave(self, trial: int) -> None:
        """Note that the trial is neither idle nor running."""
        key = self._key.pop(trial, None)
        if key is not None:
            del self._idle[bisect_left(self._idle, key)]
            if self.stay and (home := self.home.get(trial)) is not None:
                self._here[home].discard(trial)
        lim = self._lim.pop(trial, None)
        if lim is not None:
            del self._lims[bisect_left(self._lims, (lim, trial))]

    def start(
        self,
        trial: int,
        worker: W,
        now: float,
        seconds: float,
        need_next: int,
        *,
        scoring_s: float = 0.0,
    ) -> None:
        """Note that a unit starts at `now`; the trial's next one may take `need_next`.

        After it the worker scores for `scoring_s`, which counts among its own work alone.
        """
        self.leave(trial)
        end = now + seconds + scoring_s
        rem = self.rem[trial] = max(0.0, self.rem[trial] - seconds)
        load = self.load[worker] = max(0.0, self.load[worker] - seconds - scoring_s)
        self.target = max(self.target, end + rem, end + load)
        self.need[trial] = need_next
        self.free_at[worker] = end
        lim = self._lim[trial] = max(end, self.target - rem)
        insort(self._lims, (lim, trial))
        heappush(self._longest, (-rem, trial))
        if len(self._longest) > 2 * len(self._lim) + 64:
            self._rank_running()

    def give_back(self, trial: int, worker: W, seconds: float) -> None:
        """Note that the trial's unit came back undone."""
        self.leave(trial)
        self.rem[trial] += seconds
        if worker in self.load:
            self.load[worker] += seconds

    def retime(self, trial: int, end: float) -> None:
        """Note a new time at which a running unit is expected to end."""
        lim = self._lim.get(trial)
        if lim is not None:
            del self._lims[bisect_left(self._lims, (lim, trial))]
            lim = self._lim[trial] = max(end, self.target - self.rem[trial])
            insort(self._lims, (lim, trial))

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self.leave(trial)
        for table in (self.rem, self.need, self.home, self.priority):
            table.pop(trial, None)

    def remove_worker(self, worker: W) -> None:
        """Forget a worker that is gone, and which states it had."""
        tables: tuple[MutableMapping[W, Any], ...]
        tables = (self.held, self.load, self.free_at, self.speed)
        for table in tables:
            table.pop(worker, None)
        self._speeds.clear()
        self._here.pop(worker, None)
        self.unneeded.discard(worker)
        for trial in [trial for trial, home in self.home.items() if home == worker]:
            del self.home[trial]

    def holders_changed(self) -> None:
        """Note that workers hold other shards; see whether a shard has several holders."""
        self.unneeded.clear()
        self._speeds.clear()
        once = twice = 0
        for mask in self.held.values():
            twice |= once & mask
            once |= mask
        self.replicated = bool(twice)

    def recounted(self) -> None:
        """Note that remaining work and speeds were counted anew."""
        self._speeds.clear()
        self._rank_running()

    def check(self) -> None:
        """Raise ``AssertionError`` if what is kept is not what it comes to if counted anew."""
        most = max((self.rem[trial] for trial in self._lim), default=0.0)
        assert self._most_left() == most, "another running trial has more work left"
        if self._speeds:
            speeds = dict.fromkeys(self._speeds, 0.0)
            for worker, mask in self.held.items():
                for shard in bits(mask):
                    speeds[shard] += self.speed[worker]
            assert self._speeds == speeds, "the holders of a shard have another speed"

    def _rank_running(self) -> None:
        self._longest = [(-self.rem[trial], trial) for trial in self._lim]
        heapify(self._longest)

    def _most_left(self) -> float:
        """Return the remaining work of the running trial that has most; 0 if none runs."""
        longest = self._longest
        while longest:
            rem, trial = -longest[0][0], longest[0][1]
            if trial not in self._lim:
                heappop(longest)
            elif rem > self.rem[trial]:  # it has less by now
                heapreplace(longest, (-self.rem[trial], trial))
            else:
                return rem
        return 0.0

    # ---- the rule

    def pick(self, worker: W, now: float, *, blocked: int = 0) -> tuple[int, int] | None:
        """Choose trial and shard for a worker that is free at `now`; None if it should wait.

        Trials that could take one of the shards in `blocked` are left to other workers.
        """
        self.wait_until = inf
        if worker in self.unneeded:
            return None
        if self.replicated:
            return self._pick_by_pressure(worker, now, blocked)
        trial = self._pick_guarded(worker, now, blocked)
        if trial is None:
            return None
        return trial, self._shard(trial, self.need[trial] & self.held[worker])

    def would_stay(self, trial: int, worker: W) -> bool:
        """Whether a trial that runs on the worker is likely to take its next unit there."""
        if not self.need[trial] & self.held[worker]:
            return False
        first = self._first(worker)
        if first is None:
            return True
        if any(self.rem[other] > self.rem[trial] for other in self._stayers(worker)):
            return False
        bonus = self.stay * max(self.rem[first], self.rem[trial])
        return self.rem[trial] + bonus >= self.rem[first]

    def _stayers(self, worker: W, blocked: int = 0) -> Iterator[int]:
        """Yield the idle trials whose states are here and that may run here."""
        held, need, barred = self.held[worker], self.need, self.barred.get(worker, ())
        for trial in self._here.get(worker, ()):
            if need[trial] & held and not need[trial] & blocked and trial not in barred:
                yield trial

    def _shard(self, trial: int, mask: int) -> int:
        first = trial % mask.bit_length()  # trials begin at different shards
        mask = (mask >> first << first) or mask
        return (mask & -mask).bit_length() - 1

    def _first(self, worker: W) -> int | None:
        held, need, barred = self.held[worker], self.need, self.barred.get(worker, ())
        for key in self._idle:
            if need[key[2]] & held and key[2] not in barred:
                return key[2]
        return None

    def _stayer(self, worker: W, blocked: int) -> int | None:
        keys = (self._key[trial] for trial in self._stayers(worker, blocked))
        best = min(keys, default=None)
        if best is None:
            return None
        first = self._first(worker)
        if first is None or self._key[first][0] < best[0]:
            return None
        return best[2] if -best[1] >= -self._key[first][1] * (1.0 - self.stay) else None

    def _pick_guarded(self, worker: W, now: float, blocked: int) -> int | None:
        held, need, barred = self.held[worker], self.need, self.barred.get(worker, ())
        first = self._stayer(worker, blocked) if self.stay else None
        limit = inf
        if first is not None:
            end = now + self.time(first, worker)
            limit = self._limit(first, worker, now, end)
            if end <= limit:
                return first
        for trial in self.idle:
            if not need[trial] & held or need[trial] & blocked or trial in barred:
                continue
            end = now + self.time(trial, worker)
            if first is None:
                first = trial
                limit = self._limit(trial, worker, now, end)
            if end <= limit:
                return trial
        if first is None:
            if not blocked:
                self.unneeded.add(worker)
            return None
        slack = self.target - self.load[worker]
        if limit > slack or self.target - self.rem[first] < limit:
            return first  # to wait would cost too much
        self.wait_until = limit
        return None

    def _limit(self, first: int, worker: W, now: float, end: float) -> float:
        """Return when the first critical running trial needs this worker and no other will do."""
        held, barred = self.held[worker], self.barred.get(worker, ())
        priority = self.priority.get(first, 0.0)
        lims = self._lims
        for k in range(bisect_right(lims, (now, sys.maxsize)), len(lims)):
            lim, trial = lims[k]
            if lim >= end:
                break
            need = self.need[trial]
            if not need & held or self.priority.get(trial, 0.0) < priority or trial in barred:
                continue
            if not self._has_another(trial, worker, lim):
                return lim
        return inf

    def _has_another(self, trial: int, worker: W, by: float) -> bool:
        free_at, need, barred = self.free_at, self.need[trial], self.barred
        return any(
            need & mask
            and free_at[other] <= by
            and other != worker
            and trial not in barred.get(other, ())
            for other, mask in self.held.items()
        )

    def _pick_by_pressure(self, worker: W, now: float, blocked: int) -> tuple[int, int] | None:
        held = self.held[worker]
        pressure = self._pressures()
        rem = self.rem
        likely_longest = rem[self._idle[0][2]] if self._idle else 0.0
        top_rem = max(likely_longest, self._most_left()) or 1.0
        top_pressure = max(pressure.values(), default=0.0) or 1.0
        ranked: list[tuple[float, float, int, int]] = []
        for trial, mask in self._fronts(worker, held, blocked):
            rank = self.priority.get(trial, 0.0)
            score = rem[trial] / top_rem
            if self.home.get(trial) == worker:
                score += self.stay
            for shard in bits(mask):
                part = PRESSURE_WEIGHT * pressure.get(shard, 0.0) / top_pressure
                ranked.append((-rank, -score - part, trial, shard))
        if not ranked and not blocked:
            self.unneeded.add(worker)
        ranked.sort()
        for _, _, trial, shard in ranked:
            if now + self.time(trial, worker) <= self.target:
                return trial, shard
            until = self._sooner_elsewhere(trial, shard, worker, now)
            if until is None:
                return trial, shard
            self.wait_until = min(self.wait_until, until)
        return None

    def _pressures(self) -> dict[int, float]:
        speeds = self._speeds
        if not speeds:
            for worker, mask in self.held.items():
                for shard in bits(mask):
                    speeds[shard] = speeds.get(shard, 0.0) + self.speed[worker]
        return {
            shard: work / speeds[shard] for shard, work in self.demand.items() if shard in speeds
        }

    def _fronts(self, worker: W, held: int, blocked: int) -> Iterator[tuple[int, int]]:
        """Yield the idle trials that may be best: for each held shard the longest, and stayers."""
        unseen, barred = held, self.barred.get(worker, ())
        for key in self._idle:
            trial = key[2]
            need = self.need[trial]
            if need & unseen and not need & blocked and trial not in barred:
                yield trial, need & held
                unseen &= ~need
                if not unseen:
                    break
        for trial in self._stayers(worker, blocked):
            yield trial, self.need[trial] & held

    def _sooner_elsewhere(self, trial: int, shard: int, worker: W, now: float) -> float | None:
        """Return until when another worker is expected to end the unit sooner; None if none is.

        One that is to be free soon, and is faster by more than that takes. One that is overdue is
        expected to take as long again; so a unit that hangs keeps nothing waiting.
        """
        bit, here = 1 << shard, self.time(trial, worker)
        until: float | None = None
        for other, mask in self.held.items():
            if mask & bit and other != worker and trial not in self.barred.get(other, ()):
                free_at, gain = self.free_at[other], here - self.time(trial, other)
                if abs(now - free_at) + ROUNDING_S < gain:
                    until = max(until or 0.0, free_at + gain)
        return until
