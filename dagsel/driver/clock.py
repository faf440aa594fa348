"""How long a run has taken and what it has cost, over all its sessions, and when that is enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

from dagsel.driver.protocols import Engine
from dagsel.history.record import Record
from dagsel.messages import PieceRecord, Turn, UnitRecord, UnitWork
from dagsel.planning.bill import Bill
from dagsel.steering import SetLimits

#: What comes in together, as the units of a task, gets one time: no limit is as fine as this.
MOMENT_S = 1e-3

Work = TypeVar("Work", UnitRecord, PieceRecord)


@dataclass(slots=True)
class RunClock:
    """Time and cost of a run, and their limits."""

    engine: Engine  # whose clock and bill count in this session
    # When to end, in seconds since the run began; None for no limit.
    deadline_s: float | None = None
    budget_s: float | None = None  # what the workers may cost, in worker-seconds; None for no limit
    budget_money: float | None = None  # and in money, each worker at its own price
    # The flow pauses its trials before the end and has them scored where they are: a unit that
    # begins is not lost if it does not end in time, so the engine is not told of the end.
    scores_parts: bool = False
    _began: float = 0.0  # what the clock would have shown at the run's beginning
    _cost_before: float = 0.0  # worker-seconds of earlier sessions
    _money_before: float = 0.0
    # When what has been taken was last asked for, and what it was.
    _last: tuple[float, Bill, tuple[float, float, float | None]] | None = None
    _told: float = inf  # the end that the engine was told, by its clock

    @property
    def limits(self) -> SetLimits:
        """The limits that there are."""
        return SetLimits(self.deadline_s, self.budget_s, self.budget_money)

    def set(self, limits: SetLimits) -> None:
        """Have other limits from now on."""
        self.deadline_s, self.budget_money = limits.deadline_s, limits.budget_money
        # Where workers differ in their price, a budget in money is no number of worker-seconds.
        self.budget_s = limits.budget_s if limits.budget_money is None else None

    def begin(self, record: Record, lead_s: float = 0.0) -> None:
        """Go on where earlier sessions, if there were any, have ended.

        `lead_s` are the seconds that this session has taken before.
        """
        self._began = self.engine.now() - record.seconds - lead_s
        self._cost_before = record.worker_seconds
        self._money_before = record.money or 0.0
        self._last = None

    @property
    def seconds(self) -> float:
        """Time since the run began, without the time that it lay dead."""
        return self.engine.now() - self._began

    @property
    def worker_seconds(self) -> float:
        """What the workers have cost since the run began."""
        return self.taken[1]

    @property
    def taken(self) -> tuple[float, float, float | None]:
        """Seconds, worker-seconds and money until now; the same values for `MOMENT_S`."""
        bill = self.engine.bill  # first: another thread writes on it, at times up to then
        now = self.engine.now()
        last = self._last
        if last is None or now - last[0] >= MOMENT_S or last[1] is not bill:
            money = bill.money(now)
            cost = self._cost_before + bill.worker_seconds(now)
            paid = None if money is None else self._money_before + money
            last = self._last = (now, bill, (now - self._began, cost, paid))
        return last[2]

    @property
    def end_s(self) -> float:
        """When the run's time or its budget is over, in seconds since it began."""
        ends = [] if self.deadline_s is None else [self.deadline_s]
        if self.budget_s is not None:
            bill = self.engine.bill
            ends.append(bill.runs_out_at(self.budget_s - self._cost_before) - self._began)
        if self.budget_money is not None:
            end = self.engine.bill.money_runs_out_at(self.budget_money - self._money_before)
            ends.append(end - self._began)
        return min(ends, default=inf)

    @property
    def left_s(self) -> float:
        """Seconds until then."""
        return self.end_s - self.seconds

    @property
    def are_over(self) -> bool:
        """Whether the run has to end now."""
        return self.seconds >= self.end_s

    def patience_s(self, wake_at: float | None) -> float:
        """How long to wait for a message: until the end, or until the flow wants to be woken."""
        return max(0.0, min(self.end_s, inf if wake_at is None else wake_at) - self.seconds)

    def tell(self) -> None:
        """Tell the engine of the end if it has moved: a budget's does as workers come and go."""
        limit = self._began + self.end_s
        if limit != self._told and not self.scores_parts:
            self._told = limit
            self.engine.limit(limit)

    def timed(self, work: Work) -> Work:
        """Add what the run has taken so far, for a later session to continue from."""
        kind: Callable[..., Work] = type(work)  # `replace` takes four times as long
        return kind(*_UNTIMED(work), *self.taken)

    def timed_turn(self, turn: Turn, **changes: Any) -> Turn:
        """Change a turn, and add what the run has taken so far."""
        seconds, cost, money = self.taken
        return replace(turn, seconds=seconds, worker_seconds=cost, money=money, **changes)


_FIELDS = [field.name for field in fields(UnitWork)]
assert _FIELDS[-3:] == ["seconds", "worker_seconds", "money"], "what the run has taken comes last"
#: What a worker has done, without what the run has taken.
_UNTIMED = attrgetter(*_FIELDS[:-3])
