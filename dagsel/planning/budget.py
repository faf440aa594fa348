"""What a run may cost, and what it has cost so far.

A provider bills a worker from its request to its release, start-up included; many bill whole nodes
of several workers. A cluster starts the workers that it was asked for and replaces those that are
lost. So at every moment the billed nodes are those that are there or those that were asked for,
whichever are more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from dagsel.checks import is_number, shown
from dagsel.errors import SearchError
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
    """

    node_size: int = 1  # workers of a node, which is billed as a whole
    asked: int = 0  # nodes that the cluster was asked for
    nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)  # with their workers
    at: float = 0.0  # time of the last event, in seconds since the run began
    node_seconds: float = 0.0  # billed until then

    def ask(self, n_workers: int, *, at: float) -> Bill:
        """Ask the cluster for so many workers in all."""
        return replace(self._until(at), asked=-(-n_workers // self.node_size))

    def join(self, worker: str, *, at: float, node: str | None = None) -> Bill:
        """Note that a worker has joined; without the name of its node it is a node of its own."""
        now, node = self._until(at), worker if node is None else node
        return replace(now, nodes={**now.nodes, node: now.nodes.get(node, frozenset()) | {worker}})

    def leave(self, worker: str, *, at: float) -> Bill:
        """Note that a worker has left; a node is released with its last worker."""
        now = self._until(at)
        nodes = {node: workers - {worker} for node, workers in now.nodes.items()}
        return replace(now, nodes={node: workers for node, workers in nodes.items() if workers})

    def worker_seconds(self, now: float) -> float:
        """Return what is billed until a time, if nothing changes after the last event."""
        return self._until(now).node_seconds * self.node_size

    def runs_out_at(self, worker_seconds: float) -> float:
        """Return when so much is billed if nothing changes; infinity for never.

        If it was billed before the last event, the time of that event is returned.
        """
        left = worker_seconds / self.node_size - self.node_seconds
        if left <= 0:
            return self.at
        return self.at + left / self.n_billed if self.n_billed else math.inf

    @property
    def n_billed(self) -> int:
        """Number of nodes that are billed."""
        return max(len(self.nodes), self.asked)

    def _until(self, now: float) -> Bill:
        assert now >= self.at, f"time goes back from {self.at} to {now}"
        passed = now - self.at
        return replace(self, at=now, node_seconds=self.node_seconds + passed * self.n_billed)


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
