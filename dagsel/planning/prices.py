"""Prices: an amount of money for an hour of a worker, with its currency."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from dagsel.checks import is_number, short_traceback, shown
from dagsel.errors import SearchError

#: An amount of money, and its currency: three capital letters or a sign.
MONEY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Z]{3}|[$€£¥])\s*")


@dataclass(frozen=True, slots=True)
class Price:
    """What a worker costs.

    Examples
    --------
    >>> Price(2.5, "USD").of(7200)
    5.0
    >>> str(Price(2.5, "USD"))
    '2.5 USD'
    """

    per_hour: float
    currency: str

    def of(self, worker_seconds: float) -> float:
        """Return the price of so much time."""
        return worker_seconds / 3600 * self.per_hour

    def __str__(self) -> str:
        return f"{self.per_hour:g} {self.currency}"


@short_traceback
def read_price(
    price: Any, currency: str = "", *, name: str = "price_per_worker_hour"
) -> Price | None:
    """Read what an hour of a worker costs, a text like ``"2.50 USD"``; None if nobody knows.

    Parameters
    ----------
    price
        The text; or a number, if the currency is known.
    currency
        That of the budget; empty if the budget is no money.
    name
        The name of the argument, for the error.

    Raises
    ------
    SearchError
        If it cannot be read, is not above 0, or its currency is missing or not that of the budget.

    Examples
    --------
    >>> read_price("2.50 USD")
    Price(per_hour=2.5, currency='USD')
    >>> read_price(2.5, "EUR")
    Price(per_hour=2.5, currency='EUR')
    >>> read_price(2.5)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: price_per_worker_hour=2.5 has no currency: write "2.5 USD"
    """
    if price is None or isinstance(price, Price):
        found = price
    elif is_number(price):
        if not 0.0 < float(price) < math.inf:
            raise SearchError(f"{name} must be above 0 and finite, got {shown(price)}")
        if not currency:
            raise SearchError(f'{name}={price} has no currency: write "{float(price):g} USD"')
        found = Price(float(price), currency)
    else:
        money = MONEY.fullmatch(price) if isinstance(price, str) else None
        if money is None:
            raise SearchError(f'cannot read {name}={shown(price)}: write a text like "2.50 USD"')
        if not float(money[1]) > 0.0:
            raise SearchError(f"{name} must be above 0, got {price!r}")
        found = Price(float(money[1]), money[2])
    if found is not None and currency and found.currency != currency:
        raise SearchError(
            f"the budget is in {currency}, and {name} is {found}: give both in one currency"
        )
    return found
