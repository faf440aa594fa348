"""The workers of a run: what the cluster was asked for, who came, how soon, and what it costs."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from dagsel.console import span
from dagsel.execution.answers import told_if_slow
from dagsel.execution.cluster_driver import ClusterDriver
from dagsel.execution.spec_cluster import end_workers
from dagsel.planning.bill import Bill
from dagsel.planning.capacity import ClusterCapacity

#: A cluster that has fewer workers than it should is asked for them again after so long.
ASK_AGAIN_S = 2.0
#: Workers are missed once they take so many times as long to come as workers do, or so many
#: seconds at least, or where nobody knows how long they take.
MISSED_AFTER, MISSED_AFTER_S, MISSED_AFTER_UNKNOWN_S = 4, 5.0, 12.0

logger = logging.getLogger("dagsel")


@dataclass(slots=True)
class Workforce:
    """The workers of a run. Dask's event loop, the search and the driver's thread all change it."""

    driver: ClusterDriver | None  # lets the cluster grow and shrink; None if nobody may
    capacity: ClusterCapacity  # what the cluster can have; what is measured replaces what was told
    now: Callable[[], float]
    n_first: int = 1  # workers to ask for if there is none
    there: set[str] = field(default_factory=set)  # workers that can run units
    leaving: set[str] = field(default_factory=set)
    _names: dict[str, str] = field(default_factory=dict)  # of workers that can run units
    _retiring: set[str] = field(default_factory=set)  # those of them that the cluster shall close
    _found: frozenset[str] = frozenset()  # workers that were there before the run
    _n_wanted: int | None = None  # workers that it is to have; None if nobody has said
    _n_asked: int | None = None  # workers that were asked for again
    _asked_at: float = -math.inf  # unless one has been lost since
    _requests: deque[float] = field(default_factory=deque)  # of workers that have not come
    _n_found: int = 0  # workers that the cluster was to have before the run, those to come as well
    _short_since: float | None = None  # when fewer were there than wanted; None if all are there
    _has_told: bool = False  # that some have not come, since then
    _bill: Bill = field(default_factory=Bill)
    _began: float = 0.0  # when the bill began
    _left: dict[str, float] = field(default_factory=dict)  # when nodes lost their last worker
    _writing: threading.Lock = field(default_factory=threading.Lock)  # on bill and capacity

    @property
    def bill(self) -> Bill:
        """What the workers have cost so far."""
        with self._writing:
            return self._bill

    @property
    def staying(self) -> set[str]:
        """Workers that are there and not about to leave."""
        return self.there - self.leaving

    @property
    def surplus(self) -> int | None:
        """Workers that shall stay, if more are there; one may have come after it was given up."""
        n = self._n_wanted
        return n if n is not None and len(self.staying) > n else None

    def prices(self, nodes: Mapping[str, str]) -> dict[str, float]:
        """Return what an hour of each worker costs, of those on nodes of pools."""
        prices, pools = self.bill.prices, self.bill.pools
        return {w: prices[pools[node]] for w, node in nodes.items() if node in pools}

    def begin(self, names: Mapping[str, str], began: float) -> None:
        """Begin with the workers that are there; `names` has their names by address."""
        driver = self.driver
        node_size = 1 if driver is None else driver.node_size
        own_since = None if driver is None else driver.own_since
        self._found, self._began = frozenset(names), began
        prices = {} if driver is None else driver.prices
        self._bill = Bill(
            node_size, at=began, prices=prices, bills_requests=self.capacity.bills_requests
        )
        since = began if own_since is None else max(began, own_since)
        for worker, name in names.items():
            place = (self._node_of(name), self._pool_of(name))
            self._bill = self._bill.join(worker, at=since, node=place[0], pool=place[1])
        if own_since is not None:
            self._requests.extend([since] * len(names))
        if driver is not None and driver.can_scale:
            driver.on_closed = self._closed
            self._n_found = driver.wanted
            self._bill = self._bill.ask(driver.wanted_of, at=since)
            if driver.pools and names:  # those that are taken back are replaced
                self._n_wanted = len(names)

    def miss(self, worker: str) -> None:
        """Note that a worker has gone; nobody may have heard that it was there."""
        name = self._names.pop(worker, None)
        if name is not None and self.driver is not None and worker in self.leaving - self._retiring:
            self.driver.taken.add(name)
        for known in (self.there, self.leaving, self._retiring):
            known.discard(worker)
        self._asked_at = -math.inf

        def change(bill: Bill, at: float) -> Bill:
            left = bill.leave(worker, at=at)
            n_gone = len(bill.nodes) - len(left.nodes)
            if bill.prices or not n_gone:
                return left
            # Nobody here asks for another one in its place, unless so many are wanted.
            n_left = max(0, left.asked - n_gone) * left.node_size
            n_asked = min(left.asked * left.node_size, max(n_left, self._n_wanted or 0))
            return left.ask(n_asked, at=at)

        if self.driver is None or worker not in self.driver.closing:  # else: until it has closed
            self._write(change)

    def join(self, worker: str, name: str, age_s: float = 0.0) -> None:
        """Note that a worker has come and can run units, so long after its process has begun."""
        node, pool = self._node_of(name), self._pool_of(name)
        # A nanny that starts its worker again is older than that; others had begun before the run.
        own_s = min(age_s, self.now() - self._left.get(node, self._began))
        self._write(lambda bill, at: bill.join(worker, at=at, node=node, pool=pool, age_s=own_s))
        self._names[worker] = name
        self.there.add(worker)
        is_own = self.driver is not None and self.driver.own_since is not None
        if self._requests and (is_own or worker not in self._found):
            self._learn(startup_s=self.now() - self._requests.popleft())

    def drain(self, worker: str, *, retire: bool) -> None:
        """Note that a worker is about to leave; `retire` says that the cluster shall close it."""
        self.leaving.add(worker)
        if retire:
            self._retiring.add(worker)
            return
        self._asked_at = -math.inf
        self._write(lambda bill, at: bill.notice(worker, at=at))

    def retire(self, worker: str) -> None:
        """Close a worker that holds nothing of the run any more, if the cluster shall do so."""
        if self.driver is not None and worker in self._retiring:
            self.driver.retire([worker])

    @property
    def why_fixed(self) -> str:
        """Why the cluster cannot be scaled; empty if it can."""
        return "there is no cluster to scale" if self.driver is None else self.driver.why_not

    def want(self, n_workers: int) -> str:
        """Have so many workers, as far as there can be so many; return why it cannot be."""
        if why := self.why_fixed:
            there = len(self.staying)
            workers = "1 worker" if there == 1 else f"{there} workers"
            does = "keeps them" if n_workers == there else f"wants {n_workers}"
            return f"the search has {workers}, and {does}: {why}"
        most = self.capacity.most_in_nodes
        self._n_wanted = max(1, n_workers if most is None else min(n_workers, most))
        self._grow(self._n_wanted)
        if self._n_wanted < n_workers:
            return f"{n_workers} workers were wanted, and the cluster can have {most}"
        return ""

    def settle(self) -> None:
        """Keep as many workers of pools as were asked for, if nobody wants a number.

        Those that are taken back are replaced then.
        """
        if self._n_wanted is None and self.driver is not None and self.driver.pools:
            self.want(max(1, len(self.staying), self._n_asked or 0))

    def ask_for_first(self, timeout_s: float) -> None:
        """Ask for workers where there is none, and say how long one is waited for."""
        logger.warning(
            "no worker is there yet: one is waited for, for %s; worker_timeout= says how long",
            span(timeout_s),
        )
        self.ask_again()

    def ask_again(self) -> None:
        """Ask for workers in the place of those that were lost, or if there is none.

        A cluster may be late to notice that a machine is gone, and starts no other one by itself.
        """
        if (
            len(self.staying) < (self._n_wanted or 1)
            and self.now() - self._asked_at > ASK_AGAIN_S
            and self.driver is not None
            and self.driver.can_scale
        ):
            # What the cluster was told first: now it may have places for those that leave as well.
            n = self._n_wanted or self._n_asked
            if n is None and self.driver.under_way:
                return  # asked for a number, it may give up those that are to come
            n = n or max(self.n_first, self.driver.wanted)
            most = self.capacity.most_in_nodes
            self._n_asked = n if most is None else min(n, most)
            self._grow(self._n_asked)

    def missing(self) -> str:
        """Say how many workers have not come, once they are overdue; empty otherwise."""
        n_wanted, n_there = self._n_wanted or self._n_found, len(self.staying)
        if n_there >= n_wanted:
            self._short_since, self._has_told = None, False
            return ""
        if self._short_since is None:
            self._short_since = self.now()
        startup_s = self.capacity.startup_s
        patience_s = MISSED_AFTER_UNKNOWN_S
        if startup_s:
            patience_s = max(MISSED_AFTER_S, MISSED_AFTER * startup_s)
        if self._has_told or self.now() - self._short_since < patience_s:
            return ""
        self._has_told = True
        return (
            f"{n_wanted - n_there} of {n_wanted} workers have not come within {patience_s:.3g} s; "
            f"the search goes on with {n_there}"
        )

    def give_back(self, there: Callable[[], set[str]]) -> None:
        """Leave the cluster as large as it was, without the workers that came for this run.

        While another search of this process scales it, that one does so at its end. `there` returns
        the workers that the cluster has. `give_up` comes after it.
        """
        driver = self.driver
        if driver is None:
            return
        if driver.own_since is not None:  # it is closed next
            self.give_up()
            end_workers(driver.cluster)
            return
        if (n_before := driver.leave()) is not None:
            driver.give_back(n_before, lambda: sorted(there(), key=self._stays))
        kind = type(driver.cluster).__name__
        with told_if_slow(
            lambda: f"the {kind} has not closed the workers yet that the search gave back"
        ):
            is_done = driver.close()
        for trouble in driver.troubles():
            logger.warning("giving workers back: %s", trouble)
        if not is_done:
            logger.warning("the cluster is still being scaled")

    def give_up(self) -> None:
        """Scale the cluster no more, and wait for nothing."""
        if self.driver is not None:
            self.driver.close(timeout_s=0.0)
            self.driver.leave()
            self.driver.forget_size()

    def _closed(self, workers: Collection[str]) -> None:
        """Bill workers no longer that the cluster has closed."""

        def change(bill: Bill, at: float) -> Bill:
            for worker in workers:
                bill = bill.leave(worker, at=at)
            return bill

        self._write(change)

    def end(self) -> None:
        """Bill nothing from now on."""
        self._write(lambda bill, at: bill.close(at=at))

    def _node_of(self, name: str) -> str:
        return name if self.driver is None else self.driver.node_of(name)

    def _pool_of(self, name: str) -> str:
        return "" if self.driver is None else self.driver.pool_of(name)

    def _stays(self, worker: str) -> tuple[bool, bool, str]:
        """Rank a worker: those that leave anyway go first, those that were there before last."""
        return worker not in self.leaving, worker in self._found, worker

    def _grow(self, n_workers: int) -> None:
        driver = self.driver
        assert driver is not None
        self._asked_at = self.now()
        driver.remember_size()

        def on_scaled() -> None:
            # A cluster may have taken fewer, or have kept some that start just now.
            taken = driver.wanted_of
            self._write(lambda bill, at: bill.ask(taken, at=at))
            if driver.most is not None:
                self._learn(most=driver.most)

        self._expect(n_workers - len(self.staying))
        if not driver.pools:  # which of them is asked is known once it is
            self._write(lambda bill, at: bill.ask(max(n_workers, bill.asked), at=at))
        driver.on_scaled = on_scaled
        driver.grow(n_workers, besides=self.leaving)

    def _expect(self, n_workers: int) -> None:
        """Note that so many are to come: those that were asked for first come first."""
        while len(self._requests) > max(0, n_workers):
            self._requests.pop()
        while len(self._requests) < n_workers:
            self._requests.append(self.now())

    def _learn(self, *, startup_s: float | None = None, most: int | None = None) -> None:
        """Replace what was told of the cluster by what has happened."""
        with self._writing:
            if startup_s is not None:
                self.capacity = replace(self.capacity, startup_s=startup_s)
            if most is not None:
                known = self.capacity.most_workers
                most = most if known is None else min(most, known)
                self.capacity = replace(self.capacity, most_workers=max(1, most))

    def _write(self, change: Callable[[Bill, float], Bill]) -> None:
        with self._writing:
            at, before = self.now(), self._bill.nodes
            self._bill = change(self._bill, at)
            self._left |= dict.fromkeys(before.keys() - self._bill.nodes.keys(), at)
