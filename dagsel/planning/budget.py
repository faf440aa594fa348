"""What a run may cost: its budget and its deadline, read from what the user writes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from dagsel.checks import is_number, short_traceback, shown
from dagsel.errors import SearchError
from dagsel.planning.pools import Workers, dearest
from dagsel.planning.prices import MONEY, Price, read_price

_NUMBER = re.compile(r"\s*[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?\s*", re.IGNORECASE)
_WORKER_TIME = re.compile(r"\s*(\S+)\s*worker-(\w+)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may cost."""

    worker_seconds: float  # that may be billed; of money, what it pays for at the price
    price: Price | None = None  # of a worker; None: not known
    amount: float | None = None  # of money, if the budget is that

    def money(self, worker_seconds: float) -> float | None:
        """Return the price of so much time; None if it is not known."""
        return None if self.price is None else self.price.of(worker_seconds)

    def is_money_for(self, pools: Sequence[Workers]) -> bool:
        """Whether it is money, and each worker of the pools costs its own price.

        Such a budget bounds no worker-seconds.
        """
        return self.amount is not None and len(pools) > 0


def read_budget(value: float | str, price: Price | float | str | None = None) -> Budget:
    """Read a budget: worker-seconds, or a text like ``"30 worker-minutes"`` or ``"12.50 USD"``.

    `price` is that of an hour of a worker, as `read_price` reads it.

    Raises
    ------
    SearchError
        If the budget cannot be read, is not positive, or is money and there is no price; if the
        price has no currency, or another one than the budget.

    Examples
    --------
    >>> read_budget("30 worker-minutes")
    Budget(worker_seconds=1800.0, price=None, amount=None)
    >>> read_budget("12.50 USD", "2.50 USD")
    Budget(worker_seconds=18000.0, price=Price(per_hour=2.5, currency='USD'), amount=12.5)
    """
    money = MONEY.fullmatch(value) if isinstance(value, str) else None
    if money is None:
        return Budget(_worker_seconds(value), read_price(price))
    known = read_price(price, money[2])
    if known is None:
        raise SearchError(
            f"budget={value!r} is money, and what a worker costs is not known: give "
            f'price_per_worker_hour="2.50 {money[2]}", or the budget as "30 worker-minutes"'
        )
    amount = float(money[1])
    if not amount > 0:
        raise SearchError(f"budget must be above 0, got {value!r}")
    return Budget(amount / known.per_hour * 3600, known, amount)


def budget_for(
    own: Budget | None,
    budget: float | str | None,
    price: Price | float | str | None,
    workers: Sequence[Workers] = (),
) -> Budget | None:
    """Return the budget of a search: the caller's, or else the flow's `own`.

    Of pools, the dearest gives the price: what a budget in money pays for in worker-seconds, which
    a search plans with, can be paid whichever workers come. What they do cost is billed.

    Raises
    ------
    SearchError
        If it cannot be read, the prices contradict each other, or the flow has planned its own with
        a price that is too low.
    """
    if workers:
        price = price_for(price, workers)
    if budget is not None:
        return read_budget(budget, own.price if own and price is None else price)
    if own is None or price is None:
        return own
    planned = own.price
    if own.amount is None or planned is None:
        return replace(own, price=read_price(price))
    known = read_price(price, planned.currency)
    assert known is not None
    if known.per_hour > planned.per_hour or (known != planned and not workers):
        raise SearchError(
            f"the flow has planned its budget at {planned} an hour of a worker, and "
            f"{'the dearest workers cost' if workers else 'price_per_worker_hour is'} {known}: "
            "give the flow that price"
        )
    return replace(own, price=known)


@short_traceback
def price_for(price: Price | float | str | None, workers: Sequence[Workers] = ()) -> Price | None:
    """Return what an hour of a worker costs at most; None if nobody knows.

    Raises
    ------
    SearchError
        If it cannot be read, or pools have prices and it is given too.
    """
    if not workers:
        return read_price(price)
    if price is not None:
        raise SearchError(
            f"price_per_worker_hour={price!r} and workers= were both given, and each of the "
            "workers has its price: leave out price_per_worker_hour"
        )
    return dearest(workers)


def _worker_seconds(value: float | str) -> float:
    time = _WORKER_TIME.fullmatch(value) if isinstance(value, str) else None
    if time is not None:
        return to_seconds("budget", f"{time[1]} {time[2]}")
    if is_number(value) or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        return to_seconds("budget", value)
    raise SearchError(
        f"cannot read budget={shown(value)}: give worker-seconds as a number, or a text like "
        '"30 worker-minutes" or "12.50 USD"'
    )


_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}


_TEXT = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def to_seconds(name: str, span: Any) -> float:
    """Read a span of time: a number, with a unit (s, min, h or d) or in seconds; a `timedelta`.

    `name` is the name of the argument, for the error.

    Raises
    ------
    SearchError
        If it cannot be read, or is not positive and finite.

    Examples
    --------
    >>> [to_seconds("deadline", span) for span in ("10 min", "1.5h", "60", 5)]
    [600.0, 5400.0, 60.0, 5.0]
    >>> to_seconds("deadline", "soon")
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: deadline='soon' is no time; write seconds, or such as "10 min", "2 h"
    """
    amount, unit = span, "s"
    if isinstance(span, str):
        match = _TEXT.fullmatch(span)
        amount, unit = match.groups() if match else ("", "")
        unit = unit or "s"
    elif isinstance(span, timedelta):
        amount = span.total_seconds()
    try:
        seconds = float("" if isinstance(span, bool) else amount) * _SECONDS[unit.lower()]
    except (KeyError, TypeError, ValueError):
        told = f'{name}={shown(span)} is no time; write seconds, or such as "10 min", "2 h"'
        raise SearchError(told) from None
    if not _is_positive(seconds):
        raise SearchError(f"{name} must be above 0 and finite, got {shown(span)}")
    return seconds


def _is_positive(amount: float) -> bool:
    return 0.0 < amount < math.inf
