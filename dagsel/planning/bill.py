"""What a run has cost so far.

A provider bills a worker from its request to its release, start-up included; many bill whole nodes
of several workers. A cluster starts the workers that it was asked for and replaces those that are
lost. So at every moment the billed nodes are those that are there or those that were asked for,
whichever are more, in each pool of workers. A node that is taken back with notice is billed until
it has gone, beside the one that is asked for in its place. A batch system charges nothing for a
job that waits in its queue: there a node is billed from its own start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property


@dataclass(frozen=True)
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

    One is taken back at notice, beside the one that is asked for in its place:

    >>> Bill().ask(1, at=0).join("a", at=0).notice("a", at=10).leave("a", at=15).worker_seconds(20)
    25.0

    Workers of two pools, at 3.60 and 0.36 an hour:

    >>> bill = Bill(prices={"demand": 3.6, "spot": 0.36}).ask({"demand": 1, "spot": 10}, at=0)
    >>> bill.worker_seconds(100), round(bill.money(100), 9)
    (1100.0, 0.2)

    A job waits for 10 s, and its worker comes 2 s after its start:

    >>> Bill(bills_requests=False).ask(1, at=0).join("a", at=12, age_s=2).worker_seconds(20)
    10.0
    """

    node_size: int = 1  # workers of a node, which is billed as a whole
    requests: Mapping[str, int] = field(default_factory=dict)  # nodes asked for, by pool
    nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)  # with their workers
    at: float = 0.0  # time of the last event, in seconds since the run began
    node_seconds: float = 0.0  # billed until then
    # An hour of a worker of each pool; of others, as much as of the dearest. Empty: not known.
    prices: Mapping[str, float] = field(default_factory=dict)
    pools: Mapping[str, str] = field(default_factory=dict)  # of nodes; without one: ""
    paid: float = 0.0  # until the last event
    taken: frozenset[str] = frozenset()  # workers that go at notice, others are asked for instead
    bills_requests: bool = True  # False if a node is billed from its start, not from its request

    @property
    def asked(self) -> int:
        """Nodes that the cluster was asked for."""
        return sum(self.requests.values())

    def ask(self, n_workers: int | Mapping[str, int], *, at: float) -> Bill:
        """Ask the cluster for so many workers in all, or for so many of each pool."""
        by_pool = n_workers if isinstance(n_workers, Mapping) else {"": n_workers}
        nodes = {pool: -(-n // self.node_size) for pool, n in by_pool.items()}
        return replace(self._until(at), requests=nodes)

    def join(
        self, worker: str, *, at: float, node: str | None = None, pool: str = "", age_s: float = 0.0
    ) -> Bill:
        """Note that a worker has joined; without the name of its node it is a node of its own.

        Its node may have started some time before: that is billed unless its request was.
        """
        now, node = self._until(at), worker if node is None else node
        nodes = {**now.nodes, node: now.nodes.get(node, frozenset()) | {worker}}
        joined = replace(now, nodes=nodes, pools={**now.pools, node: pool} if pool else now.pools)
        if self.bills_requests or node in now.nodes:
            return joined
        per_second = joined._per_second - now._per_second if self.prices else 0.0
        return replace(
            joined,
            node_seconds=joined.node_seconds + age_s,
            paid=joined.paid + age_s * per_second,
        )

    def leave(self, worker: str, *, at: float) -> Bill:
        """Note that a worker has left; a node is released with its last worker."""
        now = self._until(at)
        nodes = {node: workers - {worker} for node, workers in now.nodes.items()}
        nodes = {node: workers for node, workers in nodes.items() if workers}
        return replace(now, nodes=nodes, taken=now.taken - {worker})

    def notice(self, worker: str, *, at: float) -> Bill:
        """Note that a worker goes soon, and that another one is asked for in its place."""
        return replace(self._until(at), taken=self.taken | {worker})

    def close(self, *, at: float) -> Bill:
        """Bill nothing from now on."""
        return replace(self._until(at), requests={}, nodes={}, taken=frozenset())

    def worker_seconds(self, now: float) -> float:
        """Return what is billed until a time, if nothing changes after the last event."""
        return self._node_seconds(now) * self.node_size

    def money(self, now: float) -> float | None:
        """Return what that costs, each worker at its own price; None without prices."""
        return self._paid(now) if self.prices else None

    def runs_out_at(self, worker_seconds: float) -> float:
        """Return when so much is billed if nothing changes; infinity for never.

        If it was billed before the last event, the time of that event is returned.
        """
        return self._after(worker_seconds / self.node_size - self.node_seconds, self.n_billed)

    def money_runs_out_at(self, money: float) -> float:
        """Return when it costs so much, as `runs_out_at`."""
        return self._after(money - self.paid, self._per_second)

    @cached_property
    def n_billed(self) -> int:
        """Number of nodes that are billed."""
        return sum(self.billed.values())

    @property
    def billed(self) -> dict[str, int]:
        """Number of nodes that are billed, by pool."""
        pool_of, asked = self.pools.get, Counter(self.requests if self.bills_requests else ())
        if self.taken and self.bills_requests:
            asked.update(pool_of(node, "") for node, who in self.nodes.items() if who <= self.taken)
        there = Counter({"": len(self.nodes)})  # counted one by one only where there are pools
        if self.pools:
            there = Counter(pool_of(node, "") for node in self.nodes)
        return {pool: max(there[pool], asked[pool]) for pool in {**there, **asked}}

    @cached_property
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

    def _node_seconds(self, now: float) -> float:
        return self.node_seconds + self._passed(now) * self.n_billed

    def _paid(self, now: float) -> float:
        return self.paid + self._passed(now) * self._per_second if self.prices else 0.0

    def _passed(self, now: float) -> float:
        assert now >= self.at, f"time goes back from {self.at} to {now}"
        return now - self.at

    def _until(self, now: float) -> Bill:
        return replace(self, at=now, node_seconds=self._node_seconds(now), paid=self._paid(now))
