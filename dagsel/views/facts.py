"""What a view is told beside the record: limits, what workers do, and who takes commands."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from dagsel.console import span
from dagsel.dispatch.description import WorkerNow
from dagsel.errors import SearchError
from dagsel.history.record import Record
from dagsel.history.settings import Settings
from dagsel.steering import SetLimits, UserCommand
from dagsel.views.words import clock

#: Takes a command for the search. It answers with the number of the trial that came of it, or None
#: if none did, or with an error.
Steer: TypeAlias = Callable[[UserCommand], "Future[int | None]"]


@dataclass(frozen=True, slots=True)
class Gauge:
    """How much of something a search has used, as text, and how much is left."""

    name: str  # "time", "workers' time" or "cost"
    used: str
    limit: str = ""  # empty if there is none
    left: str = ""
    share: float | None = None  # of the limit that is used

    @classmethod
    def of(cls, name: str, used: float, limit: float | None, told: Callable[[float], str]) -> Gauge:
        """Return how much is used of something that `told` makes a text of.

        Examples
        --------
        >>> Gauge.of("cost", 0.5, 2.0, lambda money: f"{money:.2f} USD")
        Gauge(name='cost', used='0.50 USD', limit='2.00 USD', left='1.50 USD', share=0.25)
        """
        if limit is None:
            return cls(name, told(used))
        share = min(1.0, used / limit) if limit > 0 else 1.0
        return cls(name, told(used), told(limit), told(max(0.0, limit - used)), share)

    @property
    def is_money(self) -> bool:
        """Whether it is what the search costs."""
        return self.name == "cost"

    def __str__(self) -> str:
        if not self.limit:
            return f"{self.name} {self.used}"
        return f"{self.name} {self.used} of {self.limit}, {self.left} left"


@dataclass(slots=True)
class Facts:
    """What a record does not hold of a search that runs."""

    limits: SetLimits = field(default_factory=SetLimits)  # with which the search began
    price_per_worker_hour: float | None = None
    currency: str = ""
    n_trials: Callable[[], int | None] = lambda: None  # trials that the search draws in all
    workers: Callable[[], tuple[WorkerNow, ...]] = tuple  # what they did a moment ago
    folder: str = ""  # of the run; empty where everybody knows it
    dashboard: str = ""  # address of Dask's dashboard; empty if there is none
    steer: Steer | None = None  # takes commands; None if the search takes none

    @classmethod
    def of(
        cls,
        settings: Settings,
        n_trials: Callable[[], int | None],
        steer: Steer | None,
        folder: str = "",
    ) -> Facts:
        """Return what is known before there is a cluster."""
        limits = SetLimits(settings.deadline_s, settings.budget_s, settings.budget_money)
        price = settings.price_per_worker_hour, settings.currency
        return cls(limits, *price, n_trials, steer=steer, folder=folder)

    @classmethod
    def read(cls, settings: Settings) -> Facts:
        """Return what a run's folder tells of a search that another process drives."""
        try:
            n_trials = settings.make_flow(None).traits.n_trials
        except SearchError:  # the search procedure is the user's own
            n_trials = None
        return cls.of(settings, lambda: n_trials, None)

    def total(self, record: Record) -> int | None:
        """Return how many trials there will be; None if nobody knows."""
        n_drawn = self.n_trials()
        return None if n_drawn is None else max(n_drawn + len(record.added), len(record.trials))

    def gauges(self, record: Record) -> tuple[Gauge, ...]:
        """Return what a search has used of its deadline and its budget, and what it has cost."""
        limits = record.limits or self.limits
        found = []
        if limits.deadline_s is not None:
            found.append(Gauge.of("time", record.seconds, limits.deadline_s, clock))
        worked = Gauge.of("workers' time", record.worker_seconds, limits.budget_s, span)
        if record.money is not None:  # pools: what a worker-second costs differs
            found += [worked] if limits.budget_money is None and worked.limit else []
            found.append(Gauge.of("cost", record.money, limits.budget_money, self._money))
        elif self.price_per_worker_hour is None:
            found.append(worked)
        else:
            per_s, most = self.price_per_worker_hour / 3600, limits.budget_money
            if most is None and limits.budget_s is not None:
                most = limits.budget_s * per_s
            found.append(Gauge.of("cost", record.worker_seconds * per_s, most, self._money))
        return tuple(found)

    def _money(self, amount: float) -> str:
        return f"{amount:,.2f} {self.currency}".rstrip()
