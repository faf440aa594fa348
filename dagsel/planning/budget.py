"""What a run may cost, and what it has cost so far.

A provider bills a worker from its request to its release, start-up included; many bill whole nodes
of several workers. A cluster starts the workers that it was asked for and replaces those that are
lost. So at every moment the billed nodes are those that are there or those that were asked for,
whichever are more.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from dagsel.checks import is_number, shown
from dagsel.errors import SearchError
from dagsel.planning.pools import Workers, dearest
from dagsel.planning.prices import MONEY, Price, read_price

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
    if is_number(value):
        return to_seconds("budget", value)
    raise SearchError(
        f"cannot read budget={shown(value)}: give worker-seconds as a number, or a text like "
        '"30 worker-minutes" or "12.50 USD"'
    )


@dataclass(frozen=True, slots=True)
class Bill:
    """What the workers of a run have cost so far; each event makes a new bill.

    Examples
    --------
    Two workers are asked for; they come after 10 s and 20 s, and one goes after 60 s:

    >>> bill = Bill().ask(2, at=0).join("a", at=10).join("b", at=20)
    >>> bill = bill.ask(1, at=50).leave("b", at=60)
    >>> bill.worker_seconds(100)
    160.0
    >>> bill.runs_out_at(180)
    120.0

    Workers of two pools, at 3.60 and 0.36 an hour:

    >>> bill = Bill(prices={"demand": 3.6, "spot": 0.36}).ask({"demand": 1, "spot": 10}, at=0)
    >>> bill.worker_seconds(100), round(bill.money(100), 9)
    (1100.0, 0.2)
    """

    node_size: int = 1  # workers of a node, which is billed as a whole
    requests: Mapping[str, int] = field(default_factory=dict)  # nodes asked for, by pool
    nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)  # with their workers
    at: float = 0.0  # time of the last event, in seconds since the run began
    node_seconds: float = 0.0  # billed until then
    # What an hour of a worker of each pool costs; of others, as much as of the dearest. Empty: not
    # known.
    prices: Mapping[str, float] = field(default_factory=dict)
    pools: Mapping[str, str] = field(default_factory=dict)  # of nodes; without one: ""
    paid: float = 0.0  # until the last event

    @property
    def asked(self) -> int:
        """Nodes that the cluster was asked for."""
        return sum(self.requests.values())

    def ask(self, n_workers: int | Mapping[str, int], *, at: float) -> Bill:
        """Ask the cluster for so many workers in all, or for so many of each pool."""
        by_pool = n_workers if isinstance(n_workers, Mapping) else {"": n_workers}
        nodes = {pool: -(-n // self.node_size) for pool, n in by_pool.items()}
        return replace(self._until(at), requests=nodes)

    def join(self, worker: str, *, at: float, node: str | None = None, pool: str = "") -> Bill:
        """Note that a worker has joined; without the name of its node it is a node of its own."""
        now, node = self._until(at), worker if node is None else node
        nodes = {**now.nodes, node: now.nodes.get(node, frozenset()) | {worker}}
        return replace(now, nodes=nodes, pools={**now.pools, node: pool} if pool else now.pools)

    def leave(self, worker: str, *, at: float) -> Bill:
        """Note that a worker has left; a node is released with its last worker."""
        now = self._until(at)
        nodes = {node: workers - {worker} for node, workers in now.nodes.items()}
        return replace(now, nodes={node: workers for node, workers in nodes.items() if workers})

    def close(self, *, at: float) -> Bill:
        """Bill nothing from now on."""
        return replace(self._until(at), requests={}, nodes={})

    def worker_seconds(self, now: float) -> float:
        """Return what is billed until a time, if nothing changes after the last event."""
        return self._until(now).node_seconds * self.node_size

    def money(self, now: float) -> float | None:
        """Return what that costs, each worker at its own price; None without prices."""
        return self._until(now).paid if self.prices else None

    def runs_out_at(self, worker_seconds: float) -> float:
        """Return when so much is billed if nothing changes; infinity for never.

        If it was billed before the last event, the time of that event is returned.
        """
        return self._after(worker_seconds / self.node_size - self.node_seconds, self.n_billed)

    def money_runs_out_at(self, money: float) -> float:
        """Return when it costs so much, as `runs_out_at`."""
        return self._after(money - self.paid, self._per_second)

    @property
    def n_billed(self) -> int:
        """Number of nodes that are billed."""
        return sum(self.billed.values())

    @property
    def billed(self) -> dict[str, int]:
        """Number of nodes that are billed, by pool."""
        asked = self.requests
        there = Counter({"": len(self.nodes)})  # counted one by one only where there are pools
        if self.pools:
            there = Counter(self.pools.get(node, "") for node in self.nodes)
        return {pool: max(there[pool], asked.get(pool, 0)) for pool in {**there, **asked}}

    @property
    def _per_second(self) -> float:
        """What a second costs."""
        highest = max(self.prices.values(), default=0.0)
        by_pool = self.billed.items()
        return (
            sum(n * self.prices.get(pool, highest) for pool, n in by_pool) * self.node_size / 3600
        )

    def _after(self, left: float, per_second: float) -> float:
        if left <= 0:
            return self.at
        return self.at + left / per_second if per_second else math.inf

    def _until(self, now: float) -> Bill:
        assert now >= self.at, f"time goes back from {self.at} to {now}"
        passed = now - self.at
        paid = self.paid + passed * self._per_second if self.prices else 0.0
        node_seconds = self.node_seconds + passed * self.n_billed
        return replace(self, at=now, node_seconds=node_seconds, paid=paid)


_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}


_TEXT = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def to_seconds(name: str, span: Any) -> float:
    """Read a span of time: seconds, a number with a unit (s, min, h or d), or a `timedelta`.

    `name` is the name of the argument, for the error.

    Raises
    ------
    SearchError
        If it cannot be read, or is not positive and finite.

    Examples
    --------
    >>> to_seconds("deadline", "10 min"), to_seconds("deadline", "1.5h"), to_seconds("deadline", 5)
    (600.0, 5400.0, 5.0)
    >>> to_seconds("deadline", "soon")
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: deadline='soon' is no time; write seconds, or such as "10 min", "2 h"
    """
    amount, unit = span, "s"
    if isinstance(span, str):
        match = _TEXT.fullmatch(span)
        amount, unit = match.groups() if match else ("", "")
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
