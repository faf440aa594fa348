"""The rule that gives a free worker its next unit: one object on-line and in virtual time.

`ListScheduler` knows the work that is left and who may do it; `ListScheduler.pick` answers which
trial a free worker should take, or until when to hold the worker. The dispatcher calls it with
estimated times and the clock; in virtual time, with exact times, it is an off-line planner
(``tests/benchmarks/reference/open_shop.py``).

Where each shard has one holder the guarded rule applies: most remaining work first, unless the
unit would end after a critical running trial needs this worker. Where shards have several holders
the pressure of the shards counts too. Both rules, and what they gain, stand in the design's
scheduling notes; sets of shards are bit masks.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterator
from math import inf
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)

PRESSURE_WEIGHT = 3.0
STAY_BONUS = 0.3  # of the largest remaining work, for a trial whose state is here


def bits(mask: int) -> Iterator[int]:
    """Positions of the ones, lowest first.

    Examples
    --------
    >>> list(bits(0b1010))
    [1, 3]
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class ListScheduler(Generic[W]):
    """Remaining work of trials and workers, and the rule that orders it.

    Parameters
    ----------
    time
        Seconds that the next unit of a trial takes on a worker, with a shard.
    stay
        Bonus, as a share of the largest remaining work, of a trial whose state is on the worker.

    Attributes
    ----------
    target
        When everything could be over: a lower bound, raised as it proves out of reach.
    rem, need, priority, home
        Of a trial: remaining work; shards that its next unit may take; what dominates ``rem``;
        where its state is.
    held, load, free_at, speed
        Of a worker: shards; remaining work; when its last unit ends; how fast it is.
    demand
        Of a shard: outstanding work at speed 1; used where shards have several holders.
    weight
        Of a trial: factor on ``rem`` in the order of the idle trials.
    wait_until
        After a `pick` that took nothing: until when the worker is held (infinity: next event).
    """

    def __init__(self, time: Callable[[int, W, int], float], *, stay: float = STAY_BONUS) -> None:
        self.time = time
        self.stay = stay
        self.target = 0.0
        self.rem: dict[int, float] = {}
        self.need: dict[int, int] = {}
        self.priority: dict[int, float] = {}
        self.home: dict[int, W] = {}
        self.held: dict[W, int] = {}
        self.load: dict[W, float] = {}
        self.free_at: dict[W, float] = {}
        self.speed: dict[W, float] = {}
        self.demand: dict[int, float] = {}
        self.weight: dict[int, float] = {}
        self.skips: Callable[[], bool] | None = None
        self.replicated = False
        self.wait_until = inf
        self._idle: list[tuple[float, float, int]] = []
        self._key: dict[int, tuple[float, float, int]] = {}
        self._lims: list[tuple[float, int]] = []
        self._lim: dict[int, float] = {}
        self._here: dict[W, set[int]] = {}
        self._dry: set[W] = set()  # workers that no idle trial needs

    # ---- who is idle, who runs

    @property
    def idle(self) -> Iterator[int]:
        """The idle trials, first served first."""
        return (key[2] for key in self._idle)

    def enter(self, trial: int, need: int) -> None:
        """Note that the trial is idle and its next unit may take the shards in `need`."""
        self.leave(trial)
        self.need[trial] = need
        rank = self.rem[trial] * self.weight.get(trial, 1.0)
        key = self._key[trial] = (-self.priority.get(trial, 0.0), -rank, trial)
        insort(self._idle, key)
        if self._dry:
            self._dry = {worker for worker in self._dry if not need & self.held[worker]}
        if self.stay and (home := self.home.get(trial)) is not None:
            self._here.setdefault(home, set()).add(trial)

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

    def move_home(self, trial: int, worker: W | None) -> None:
        """Note where a trial that is not idle has its state; None for nowhere in particular."""
        if worker is None:
            self.home.pop(trial, None)
        else:
            self.home[trial] = worker

    def start(self, trial: int, worker: W, now: float, seconds: float, need_next: int) -> None:
        """Note that a unit begins at `now`; the trial's next one may take `need_next`."""
        self.leave(trial)
        end = now + seconds
        rem = self.rem[trial] = max(0.0, self.rem[trial] - seconds)
        load = self.load[worker] = max(0.0, self.load[worker] - seconds)
        self.target = max(self.target, end + rem, end + load)
        self.need[trial] = need_next
        self.free_at[worker] = end
        lim = self._lim[trial] = max(end, self.target - rem)
        insort(self._lims, (lim, trial))

    def give_back(self, trial: int, worker: W, seconds: float) -> None:
        """Note that the trial's unit came back undone."""
        self.leave(trial)
        self.rem[trial] += seconds
        if worker in self.load:
            self.load[worker] += seconds

    def retime(self, trial: int, end: float) -> None:
        """Expect a running unit to end at another time."""
        lim = self._lim.get(trial)
        if lim is not None:
            del self._lims[bisect_left(self._lims, (lim, trial))]
            lim = self._lim[trial] = max(end, self.target - self.rem[trial])
            insort(self._lims, (lim, trial))

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self.leave(trial)
        for table in (self.rem, self.need, self.home, self.priority, self.weight):
            table.pop(trial, None)

    def remove_worker(self, worker: W) -> None:
        """Forget a worker that is gone, and the states that were there."""
        for table in (self.held, self.load, self.free_at, self.speed):
            table.pop(worker, None)
        self._here.pop(worker, None)
        self._dry.discard(worker)
        for trial in [trial for trial, home in self.home.items() if home == worker]:
            del self.home[trial]

    def holders_changed(self) -> None:
        """See anew what is held, and whether a shard has several holders."""
        self._dry.clear()
        once = twice = 0
        for mask in self.held.values():
            twice |= once & mask
            once |= mask
        self.replicated = bool(twice)

    # ---- the rule

    def pick(self, worker: W, now: float, *, blocked: int = 0) -> tuple[int, int] | None:
        """Trial and shard for a worker that is free at `now`, or None to hold it.

        Parameters
        ----------
        worker
            Which one.
        now
            When it is free.
        blocked
            Trials that could take one of these shards are left to others.
        """
        self.wait_until = inf
        if worker in self._dry:
            return None
        if self.replicated:
            return self._pick_by_pressure(worker, now, blocked)
        trial = self._pick_guarded(worker, now, blocked)
        if trial is None:
            return None
        return trial, self._shard(trial, self.need[trial] & self.held[worker])

    def is_dry(self, worker: W) -> bool:
        """Whether no idle trial is known to need the worker."""
        return worker in self._dry

    def would_stay(self, trial: int, worker: W) -> bool:
        """Whether a trial that runs on the worker may well take its next unit there."""
        if not self.need[trial] & self.held[worker]:
            return False
        first = self._first(worker)
        if first is None:
            return True
        bonus = self.stay * max(self.rem[first], self.rem[trial])
        return self.rem[trial] + bonus >= self.rem[first]

    def _shard(self, trial: int, mask: int) -> int:
        turn = trial % mask.bit_length()  # trials begin at different shards
        mask = (mask >> turn << turn) or mask
        return (mask & -mask).bit_length() - 1

    def _first(self, worker: W) -> int | None:
        held, need = self.held[worker], self.need
        for key in self._idle:
            if need[key[2]] & held:
                return key[2]
        return None

    def _stayer(self, worker: W, blocked: int) -> int | None:
        here = self._here.get(worker)
        if not here:
            return None
        held = self.held[worker]
        best: tuple[float, float, int] | None = None
        for trial in here:
            if self.need[trial] & held and not self.need[trial] & blocked:
                key = self._key[trial]
                if best is None or key < best:
                    best = key
        if best is None:
            return None
        first = self._first(worker)
        if first is None or self._key[first][0] < best[0]:
            return None
        return best[2] if -best[1] >= -self._key[first][1] * (1.0 - self.stay) else None

    def _pick_guarded(self, worker: W, now: float, blocked: int) -> int | None:
        held, need, skips = self.held[worker], self.need, self.skips
        first = self._stayer(worker, blocked) if self.stay else None
        limit = inf
        if first is not None:
            end = now + self.time(first, worker, 0)
            limit = self._limit(first, worker, now, end)
            if end <= limit:
                return first
        for key in self._idle:
            trial = key[2]
            if not need[trial] & held or (blocked and need[trial] & blocked):
                continue
            if skips is not None and skips():
                continue
            end = now + self.time(trial, worker, 0)
            if first is None:
                first = trial
                limit = self._limit(trial, worker, now, end)
            if end <= limit:
                return trial
        if first is None:
            if not blocked and skips is None:
                self._dry.add(worker)
            return None
        slack = self.target - self.load[worker]
        if limit > slack or self.target - self.rem[first] < limit:
            return first  # holding the worker would cost too much
        self.wait_until = limit
        return None

    def _limit(self, first: int, worker: W, now: float, end: float) -> float:
        """When the first critical running trial needs this worker and has no other to go to."""
        held = self.held[worker]
        priority = self.priority.get(first, 0.0)
        lims = self._lims
        for k in range(bisect_right(lims, (now, sys.maxsize)), len(lims)):
            lim, trial = lims[k]
            if lim >= end:
                break
            need = self.need[trial]
            if not need & held or self.priority.get(trial, 0.0) < priority:
                continue
            if not self._goes_elsewhere(need, worker, lim):
                return lim
        return inf

    def _goes_elsewhere(self, need: int, worker: W, by: float) -> bool:
        free_at = self.free_at
        return any(
            need & mask and free_at[other] <= by and other != worker
            for other, mask in self.held.items()
        )

    def _pick_by_pressure(self, worker: W, now: float, blocked: int) -> tuple[int, int] | None:
        held = self.held[worker]
        pressure = self._pressures()
        rem = self.rem
        top_rem = max((rem[t] for t in self._likely_longest()), default=0.0) or 1.0
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
            self._dry.add(worker)
        ranked.sort()
        for _, _, trial, shard in ranked:
            end = now + self.time(trial, worker, shard)
            if end <= self.target or not self._sooner_elsewhere(trial, shard, worker, now, end):
                return trial, shard
        return None

    def _likely_longest(self) -> Iterator[int]:
        if self._idle:
            yield self._idle[0][2]
        yield from self._lim

    def _pressures(self) -> dict[int, float]:
        speeds: dict[int, float] = {}
        for worker, mask in self.held.items():
            speed = self.speed[worker]
            for shard in bits(mask):
                speeds[shard] = speeds.get(shard, 0.0) + speed
        return {
            shard: work / speeds[shard] for shard, work in self.demand.items() if shard in speeds
        }

    def _fronts(self, worker: W, held: int, blocked: int) -> Iterator[tuple[int, int]]:
        """For each shard held the idle trials that may be best: the longest, and those at home."""
        unseen = held
        for key in self._idle:
            trial = key[2]
            need = self.need[trial]
            if need & unseen and not need & blocked:
                yield trial, need & held
                unseen &= ~need
                if not unseen:
                    break
        for trial in self._here.get(worker, ()):
            if self.need[trial] & held and not self.need[trial] & blocked:
                yield trial, self.need[trial] & held

    def _sooner_elsewhere(self, trial: int, shard: int, worker: W, now: float, end: float) -> bool:
        bit = 1 << shard
        return any(
            mask & bit
            and other != worker
            and max(now, self.free_at[other]) + self.time(trial, other, shard) < end
            for other, mask in self.held.items()
        )
