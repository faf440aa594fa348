"""What scales a cluster, whatever kind it is of: requests, performed one after the other."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from distributed import Client

from dagsel.execution.cluster import WorkerLimit, own_since
from dagsel.planning.capacity import ClusterCapacity
from dagsel.planning.pools import Workers

logger = logging.getLogger("dagsel")

#: How often workers are closed as a cluster is given back: others may come meanwhile.
MOST_ROUNDS = 3


class Size(NamedTuple):
    """A request for a number of workers, not counting some that are leaving."""

    n_workers: int
    besides: frozenset[str]


class Return(NamedTuple):
    """A request for a number of workers, of which those that come first in an order go."""

    n_workers: int
    in_order: Callable[[], list[str]]


@dataclass(slots=True)
class SizeBefore:
    """How large a cluster was before the searches that scale it, and how many of them go on."""

    n_workers: int
    n_searches: int = 0


#: By cluster object. The searches of this process change it one at a time.
_BEFORE: WeakKeyDictionary[Any, SizeBefore] = WeakKeyDictionary()
_COUNTING = threading.Lock()

#: A size to reach, addresses of workers to close, or None to end the thread.
Request: TypeAlias = Size | Return | frozenset[str] | None


class ClusterDriver(ABC):
    """Scales a cluster: performs requests one after the other, in a thread of its own.

    Each kind of cluster has a subclass, which overrides `why_not`, `wanted`, `limit`, `fill` and
    `close_workers`. These may take long and raise what goes wrong.
    """

    #: Workers that the cluster has refused to exceed; None until it has refused some.
    most: int | None = None
    #: Pools of workers, and what an hour of one costs; empty if they are all alike.
    pools: tuple[Workers, ...] = ()
    prices: Mapping[str, float] = MappingProxyType({})

    def __init__(self, client: Client, cluster: Any) -> None:
        self.client, self.cluster = client, cluster
        # Called in the thread: after each `fill` and each `close_workers`, before that with the
        # workers that were closed.
        self.on_scaled: Callable[[], None] = lambda: None
        self.on_closed: Callable[[Collection[str]], None] = lambda workers: None
        self.taken: set[str] = set()  # names of workers that went at notice and do not come back
        self.closing: set[str] = set()  # workers that are to be closed, and have not been
        self._before: SizeBefore | None = None  # once it has scaled the cluster
        self._left: SizeBefore | None = None  # from the end of that until the cluster has its size
        self._requests: list[Request] = []
        self._changed = threading.Condition()
        self._troubles: list[str] = []
        self._thread: threading.Thread | None = None

    @property
    @abstractmethod
    def why_not(self) -> str:
        """Why the cluster cannot be scaled, and what to do; empty if it can."""

    @property
    @abstractmethod
    def wanted(self) -> int:
        """Workers that the cluster was told to have: those that are there and those to come."""

    @property
    @abstractmethod
    def limit(self) -> WorkerLimit:
        """How many workers there can be."""

    @abstractmethod
    def fill(self, n_workers: int, besides: Collection[str]) -> None:
        """Do what `grow` asks for."""

    @abstractmethod
    def close_workers(self, workers: Collection[str]) -> None:
        """Do what `retire` asks for."""

    @property
    def under_way(self) -> int:
        """Workers beside the wanted ones that the cluster still starts, as its maker has said."""
        return 0

    @property
    def wanted_of(self) -> Mapping[str, int]:
        """The same by pool, without those that were leaving when `fill` was called last."""
        return {"": self.wanted}

    def pool_of(self, name: str) -> str:
        """Return the pool of the worker of this name."""
        return ""

    @property
    def can_scale(self) -> bool:
        """Whether the cluster can be scaled, and nobody else scales it."""
        return not self.why_not

    @property
    def node_size(self) -> int:
        """Workers that start and end together, as in a batch system's job."""
        return 1

    def node_of(self, name: str) -> str:
        """Return the job of the worker of this name; the name itself if it runs alone."""
        return name

    @property
    def startup_s(self) -> float:
        """Seconds that a worker takes to start, if the kind of cluster tells; 0 if it does not."""
        return 0.0

    @property
    def bills_requests(self) -> bool:
        """Whether a worker costs from its request on, and not from its start."""
        return True

    @property
    def own_since(self) -> float | None:
        """When the workers of a cluster of our own were asked for; None if it is not ours."""
        return own_since(self.cluster)

    def capacity(
        self, max_cluster_workers: int | None = None, startup_s: float | None = None
    ) -> ClusterCapacity:
        """Return what the cluster can have.

        Parameters
        ----------
        max_cluster_workers
            Workers that it may have, over all trials; None for as many as there can be.
        startup_s
            Seconds that a worker takes to start; None if it is not known.

        Raises
        ------
        ClusterError
            If there cannot be so many workers, or not so few.
        """
        known_s = self.startup_s if startup_s is None else startup_s
        return self.limit.capacity(
            max_cluster_workers, known_s, self.node_size, bills_requests=self.bills_requests
        )

    def grow(self, n_workers: int, *, besides: Collection[str] = ()) -> None:
        """Have so many workers; lost ones are replaced.

        The workers at the addresses in `besides` are leaving and do not count. If more are there,
        all stay, and only those that have not started yet are given up.
        """
        self._request(Size(n_workers, frozenset(besides)))

    def retire(self, workers: Iterable[str]) -> None:
        """Close workers on which nothing runs any more, by address; they are not replaced."""
        addresses = frozenset(workers)
        if addresses:
            self.closing |= addresses
            self._request(addresses)

    def remember_size(self) -> None:
        """Remember how large the cluster is, unless another search that scales it has done so."""
        with _COUNTING:
            if self._before is None:
                if self.cluster not in _BEFORE:
                    _BEFORE[self.cluster] = SizeBefore(self.wanted + self.under_way)
                self._before = _BEFORE[self.cluster]
                self._before.n_searches += 1

    def leave(self) -> int | None:
        """Scale the cluster no more; return the size to give it back.

        None if it was not scaled, or another search that scales it goes on.
        """
        with _COUNTING:
            before, self._before = self._before, None
            if before is None:
                return None
            self._left = before
            before.n_searches -= 1
            return None if before.n_searches else before.n_workers

    def forget_size(self) -> None:
        """Forget the size, once the cluster has it again: unless a search scales it by now."""
        with _COUNTING:
            before, self._left = self._left, None
            if before is not None and not before.n_searches:
                _BEFORE.pop(self.cluster, None)

    def give_back(self, n_workers: int, in_order: Callable[[], list[str]]) -> None:
        """Have as many workers as before a run: give up those still to come, close the others.

        `in_order` returns the workers that are there; the first ones go.
        """
        self._request(Return(n_workers, in_order))

    def troubles(self) -> list[str]:
        """Return what went wrong since the last call."""
        with self._changed:
            found, self._troubles = self._troubles, []
        return found

    def close(self, *, timeout_s: float = 60.0) -> bool:
        """Perform what was requested and stop; return whether the time was enough."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._request(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _request(self, request: Request) -> None:
        if self._thread is None and request is not None:
            self._thread = threading.Thread(target=self._perform, name="dagsel-scale", daemon=True)
            self._thread.start()
        with self._changed:
            if isinstance(request, Size | Return):  # an earlier size is of no use any more
                self._requests = [r for r in self._requests if not isinstance(r, Size)]
            last = self._requests[-1] if self._requests else None
            if isinstance(request, frozenset) and isinstance(last, frozenset):
                # Closed one after the other, a worker would hand its data to the next that goes.
                self._requests[-1] = last | request
            else:
                self._requests.append(request)
            self._changed.notify()

    def _perform(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests)
                request = self._requests.pop(0)
            if request is None:
                return
            try:
                match request:
                    case frozenset():
                        self._close(sorted(request))
                    case Return(n_workers, in_order):
                        try:
                            # One may be lost meanwhile, and one come of a job that had begun.
                            for _ in range(MOST_ROUNDS):
                                self.fill(n_workers, ())
                                there = in_order()
                                n_over = min(self.wanted, len(there)) - n_workers
                                if n_over > 0:
                                    self._close(sorted(there[:n_over]))
                                elif self.wanted <= n_workers:
                                    break
                        finally:  # one that was lost has left its place
                            self.fill(n_workers, ())
                    case Size(n_workers, besides):
                        try:
                            self.fill(n_workers, besides)
                        finally:
                            self.on_scaled()
            except Exception as error:  # a search goes on with the workers it has
                logger.debug("scaling the cluster", exc_info=True)
                self._trouble(f"{type(error).__name__}: {error}")

    def _close(self, workers: Collection[str]) -> None:
        try:
            self.close_workers(workers)
        finally:
            self.closing.difference_update(workers)
            self.on_closed(workers)
            self.on_scaled()

    def _trouble(self, reason: str) -> None:
        text = f"scaling the cluster: {reason}"
        with self._changed:
            if text not in self._troubles:  # each try meets it again
                self._troubles.append(text)
