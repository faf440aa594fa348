"""What the workers of a run cost, and limits that count from a moment of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dagsel.arguments import limits_of
from dagsel.flow import Traits
from dagsel.history.settings import Settings
from dagsel.planning.pools import Workers
from dagsel.steering import SetLimits


@dataclass(frozen=True, slots=True)
class Tariff:
    """What the workers of a run cost.

    Parameters
    ----------
    price
        Of an hour of a worker, such as ``"2.50 USD"``; None if it is not known.
    workers
        Pools of workers, each with its price; then there is no other one.
    """

    price: str | None = None
    workers: Sequence[Workers] = ()

    @classmethod
    def of(cls, settings: Settings, workers: Sequence[Workers]) -> Tariff:
        """Return that of a run, with the pools of this session."""
        per_hour = settings.price_per_worker_hour
        return cls(
            None if per_hour is None or workers else f"{per_hour} {settings.currency}", workers
        )

    def limits(
        self,
        before: SetLimits,
        taken: tuple[float, float, float | None],
        deadline: Any,
        budget: float | str | None,
    ) -> SetLimits:
        """Return the limits that a deadline and a budget come to which count from now on.

        Parameters
        ----------
        before
            The limits that there are: they stay where nothing is given.
        taken
            Seconds, worker-seconds and money that the run has taken until now.
        deadline, budget
            As `dagsel.optimize` takes them; None for those that there are.

        Raises
        ------
        SearchError
            If one cannot be read, or is money and there is no price.

        Examples
        --------
        >>> there = SetLimits(deadline_s=60.0, budget_s=100.0)
        >>> Tariff("2 USD").limits(there, (50.0, 90.0, None), None, "1 USD")
        SetLimits(deadline_s=60.0, budget_s=1890.0, budget_money=None)
        """
        seconds, worker_seconds, money = taken
        deadline_s, cost = limits_of(Traits(), deadline, budget, self.price, self.workers)
        if deadline_s is not None:
            before = replace(before, deadline_s=seconds + deadline_s)
        if budget is None or cost is None:
            return before
        paid = None
        if cost.amount is not None and self.workers:  # each is paid at its own price
            paid = (money or 0.0) + cost.amount
        return replace(before, budget_s=worker_seconds + cost.worker_seconds, budget_money=paid)
