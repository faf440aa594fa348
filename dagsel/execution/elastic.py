"""Lets a cluster grow and shrink: one driver for every way of deploying Dask.

Three kinds of clusters are told apart by what they can do, not by their names:

- those that start each worker from a specification of its own and can close a named one
  (`LocalCluster`, dask-cuda's `LocalCUDACluster`, dask-jobqueue's, dask-cloudprovider's);
- those that know only how many workers there should be (dask-gateway's `GatewayCluster`,
  dask-kubernetes' `KubeCluster`): they ask Dask's scheduler which worker to close, and it is told;
- those that cannot be scaled: a client alone, hosts that are listed one by one, and a cluster whose
  size `cluster.adapt` decides.

``cluster.scale`` is never used to close a worker that is there: it may take one that still trains.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from distributed import Client, SchedulerPlugin, Status

from dagsel.errors import ClusterError

logger = logging.getLogger("dagsel")

#: How long a cluster that closes the workers that it is told to may take before they are retired.
CLOSE_TIMEOUT_S = 30.0


class Size(NamedTuple):
    """So many workers besides those that are leaving, while these are there."""

    n_workers: int
    besides: frozenset[str]


#: A size; the end of these workers; or the end of wishing.
Wish: TypeAlias = Size | frozenset[str] | None


class Deployment(Protocol):
    """A cluster that was deployed in one of the ways, to be scaled in its own.

    Calls may take long; they raise what goes wrong.
    """

    @property
    def node_size(self) -> int:
        """See `ClusterDriver.node_size`."""
        ...

    def why_not(self) -> str:
        """Say why the cluster cannot be scaled; empty if it can."""
        ...

    def places(self) -> int:
        """Count the workers that the cluster was told to have."""
        ...

    def fill(self, n_workers: int, besides: Collection[str]) -> None:
        """See `ClusterDriver.grow`."""
        ...

    def close(self, workers: Collection[str]) -> None:
        """See `ClusterDriver.retire`."""
        ...

    def node_of(self, name: str) -> str:
        """See `ClusterDriver.node_of`."""
        ...


@dataclass(slots=True)
class ClusterDriver:
    """Performs wishes for workers one after the other, in a thread of its own.

    Parameters
    ----------
    deployment
        The cluster, and how it is scaled.
    on_grown
        Called, in the driver's thread, each time that the cluster has been told how many workers
        it shall have, and has given up those that were too many and had not come.
    """

    deployment: Deployment
    on_grown: Callable[[], None] = lambda: None
    _wishes: queue.SimpleQueue[Wish] = field(default_factory=queue.SimpleQueue)
    _troubles: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None

    @property
    def can_scale(self) -> bool:
        """Whether the cluster can be scaled, and nobody else does."""
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why the cluster cannot be scaled, and what to do; empty if it can."""
        return self.deployment.why_not()

    @property
    def wanted(self) -> int:
        """Workers that the cluster was told to have: those that are there and those to come."""
        return self.deployment.places()

    @property
    def node_size(self) -> int:
        """Workers that come and go together, as in a batch system's job."""
        return self.deployment.node_size

    def node_of(self, name: str) -> str:
        """Name what the worker of a name comes and goes with; its own name if it is alone."""
        return self.deployment.node_of(name)

    def grow(self, n_workers: int, *, besides: Collection[str] = ()) -> None:
        """Have so many workers, with new ones in the place of lost ones.

        With fewer than there are, all stay, and those that have not come yet are given up.

        Parameters
        ----------
        n_workers
            How many.
        besides
            Addresses of workers that are leaving, which do not count while they are there.
        """
        self._wish(Size(n_workers, frozenset(besides)))

    def retire(self, workers: Iterable[str]) -> None:
        """Close workers that nothing runs on any more; none comes in their place.

        Parameters
        ----------
        workers
            Their addresses.
        """
        addresses = frozenset(workers)
        if addresses:
            self._wish(addresses)

    def troubles(self) -> list[str]:
        """Give what went wrong since the last call."""
        found = []
        while not self._troubles.empty():
            found.append(self._troubles.get())
        return found

    def close(self, *, timeout_s: float = 60.0) -> bool:
        """Perform what was wished for and stop; say whether there was time for it."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._wishes.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _wish(self, wish: Size | frozenset[str]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._perform, name="dagsel-scale", daemon=True)
            self._thread.start()
        self._wishes.put(wish)

    def _perform(self) -> None:
        wishes: deque[Wish] = deque()
        while True:
            while not wishes or not self._wishes.empty():
                wishes.append(self._wishes.get())
            wish = wishes.popleft()
            if wish is None:
                return
            try:
                self._grant(wish, wishes)
            except Exception as error:  # a search goes on with the workers it has
                logger.debug("scaling the cluster", exc_info=True)
                self._troubles.put(f"scaling the cluster: {type(error).__name__}: {error}")

    def _grant(self, wish: Size | frozenset[str], later: deque[Wish]) -> None:
        if isinstance(wish, Size):
            try:
                self.deployment.fill(wish.n_workers, wish.besides)
            finally:
                self.on_grown()
            return
        # Together: one after the other, what one leaves behind moves to the next that goes.
        workers = wish
        while later and isinstance(more := later[0], frozenset):
            workers |= more
            later.popleft()
        self.deployment.close(sorted(workers))


def elastic_for(client: Client, cluster: Any = None) -> ClusterDriver:
    """Give the driver of a cluster.

    Parameters
    ----------
    client
        A client of the cluster.
    cluster
        The cluster object; by default the one that the client was made with, if any.
    """
    cluster = cluster if hasattr(cluster, "scale") else client.cluster
    deployment: Deployment
    if cluster is None:
        deployment = _Fixed(
            "only a cluster object can be scaled, and there is only a client; pass cluster=, or "
            "start all workers beforehand"
        )
    elif not getattr(cluster, "_supports_scaling", True):
        deployment = _Fixed(f"a {type(cluster).__name__} has the workers that it was made with")
    elif hasattr(cluster, "worker_spec"):
        deployment = _ByName(client, cluster)
    else:
        deployment = _ByNumber(client, cluster)
    return ClusterDriver(deployment)


@dataclass(slots=True)
class _Fixed:
    """A cluster that cannot be scaled."""

    reason: str
    node_size: int = 1

    def why_not(self) -> str:
        """Say what this cluster lacks."""
        return self.reason

    def places(self) -> int:
        """Count none: it was told no number."""
        return 0

    def fill(self, n_workers: int, besides: Collection[str]) -> None:
        """Refuse: it keeps the workers that it has."""
        raise ClusterError(self.reason)

    def close(self, workers: Collection[str]) -> None:
        """Refuse: it keeps the workers that it has."""
        raise ClusterError(self.reason)

    def node_of(self, name: str) -> str:
        """Give the name itself: nothing comes and goes together."""
        return name


#: What has come to this does not run again.
GONE = {Status.closing_gracefully, Status.closing, Status.closed, Status.failed}
ADAPTS = "cluster.adapt() decides how many workers there are"


@dataclass(slots=True)
class _ByName:
    """A `SpecCluster`: it has a specification for each of its workers, or for each job of several.

    A worker that closes without its specification being taken back is started again.
    """

    client: Client
    cluster: Any

    @property
    def node_size(self) -> int:
        """Workers of a new specification."""
        return len(_members("", self.cluster.new_spec))

    def why_not(self) -> str:
        """Say that it adapts, where it does."""
        adaptive = self.cluster._adaptive
        return ADAPTS if adaptive is not None and adaptive.periodic_callback is not None else ""

    def places(self) -> int:
        """Count the workers of all specifications."""
        return sum(len(_members(*item)) for item in list(self.cluster.worker_spec.items()))

    def node_of(self, name: str) -> str:
        """Name the specification of a worker, if it has one for several."""
        return self._nodes().get(name, name)

    def fill(self, n_workers: int, besides: Collection[str]) -> None:
        """Let new specifications start what is missing; take back those that nothing came of."""
        there = self._forget_closed()
        n_workers += len(there.intersection(besides))
        surplus = self.places() - n_workers
        if surplus > 0:
            self._give_up(surplus)
            return
        try:
            self.cluster.scale(n_workers)
        except Exception:
            # LocalCUDACluster raises when it has no more devices, before it starts what it can.
            self.cluster.scale(self.places())
            raise

    def close(self, workers: Collection[str]) -> None:
        """Retire the workers, and take back the specifications of those that have gone."""
        left = self.places() - len(workers)
        self._forget_closed()
        before = _workers(self.client)
        retired = self.client.retire_workers(list(workers), close_workers=True)
        after = _workers(self.client)
        stuck = [worker for worker in workers if worker in after and worker not in retired]
        gone = {before[worker] for worker in {*workers} - {*stuck} if worker in before}
        stays = {*after.values()} - gone
        self._withdraw(
            name
            for name, spec in list(self.cluster.worker_spec.items())
            if (members := _members(name, spec)) & gone and not members & stays
        )
        _check_gone(stuck)
        self._give_up(self.places() - left)  # of a worker that was lost before

    def _give_up(self, n_workers: int) -> None:
        """Take back the newest specifications that no worker has come of."""
        there = {*_workers(self.client).values()}
        unmet = []
        for name, spec in reversed(list(self.cluster.worker_spec.items())):
            members = _members(name, spec)
            if len(members) <= n_workers and not members & there:
                unmet.append(name)
                n_workers -= len(members)
        self._withdraw(unmet)

    def _forget_closed(self) -> set[str]:
        """Take back the specifications of workers that have gone for good; say which are there.

        Dask would leave their places empty for a while, and then start them again unasked.
        """
        workers = _workers(self.client)
        there, specs = {*workers.values()}, dict(self.cluster.worker_spec)
        self._withdraw(
            name
            for name, machine in list(self.cluster.workers.items())
            if machine.status in GONE and name in specs and not _members(name, specs[name]) & there
        )
        return {*workers}

    def _withdraw(self, names: Iterable[Any]) -> None:
        # Not cluster.scale, which takes any worker, and any job of several workers for unmet.
        withdrawn = list(names)
        if withdrawn:
            self.cluster.sync(self.cluster.scale_down, withdrawn)

    def _nodes(self) -> dict[str, str]:
        specs = list(self.cluster.worker_spec.items())
        jobs = [(str(name), _members(name, spec)) for name, spec in specs if "group" in spec]
        return {member: name for name, members in jobs for member in members}


def _members(name: Any, spec: dict[str, Any]) -> set[str]:
    """Name the workers of a specification."""
    return {f"{name}{suffix}" for suffix in spec.get("group", [""])}


class Leaving(SchedulerPlugin):
    """Lets Dask's scheduler close no other workers than these when a cluster shrinks."""

    name = "dagsel-leaving"

    def __init__(self, workers: Collection[str]) -> None:
        self.workers = frozenset(workers)

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        """Choose among the workers that Dask would close."""
        return [worker for worker in workers if worker.address in self.workers]


@dataclass(slots=True)
class _ByNumber:
    """A cluster that knows only how many workers there should be, and replaces those that go."""

    client: Client
    cluster: Any
    node_size: int = 1
    close_timeout_s: float = CLOSE_TIMEOUT_S
    _n: int | None = None

    def why_not(self) -> str:
        """Ask the scheduler, which knows whether a gateway adapts the cluster."""
        try:
            gateway = self.client.run_on_scheduler(gateway_state)
        except OSError as error:
            return f"the scheduler does not answer: {error}"
        return ADAPTS if gateway is not None and gateway[0] else ""

    def places(self) -> int:
        """Give the number that the cluster was told, or has now."""
        if self._n is None:
            gateway = self.client.run_on_scheduler(gateway_state)
            self._n = len(_workers(self.client)) if gateway is None else gateway[1]
        return self._n

    def node_of(self, name: str) -> str:
        """Give the name itself: each worker comes and goes alone."""
        return name

    def fill(self, n_workers: int, besides: Collection[str]) -> None:
        """Tell the cluster the number, or that of the workers that are there if it is larger."""
        there = _workers(self.client)
        self._scale(max(n_workers + len(there.keys() & {*besides}), len(there)))

    def close(self, workers: Collection[str]) -> None:
        """Tell the cluster the number that is left, and the scheduler which workers go."""
        left = max(0, self.places() - len(workers))
        self.client.register_plugin(Leaving(workers))
        try:
            self._scale(left)
            self._wait_until_gone(workers, left)
        finally:
            self.client.unregister_scheduler_plugin(Leaving.name)
        # Another worker may have been lost at the same moment: then the cluster was small enough.
        late = [worker for worker in workers if worker in _workers(self.client)]
        retired = self.client.retire_workers(late, close_workers=True) if late else {}
        _check_gone([worker for worker in late if worker not in retired])

    def _scale(self, n_workers: int) -> None:
        self._n = None
        self.cluster.scale(n_workers)
        gateway = self.client.run_on_scheduler(gateway_state)
        self._n = n_workers if gateway is None else gateway[1]
        if self._n < n_workers:
            raise ClusterError(f"{n_workers} workers were wanted, and it may have {self._n}")

    def _wait_until_gone(self, workers: Collection[str], n_left: int) -> None:
        deadline = time.monotonic() + self.close_timeout_s
        while time.monotonic() < deadline:
            there = _workers(self.client)
            if len(there) <= n_left or not any(worker in there for worker in workers):
                return
            time.sleep(0.1)


def _workers(client: Client) -> dict[str, str]:
    """Names of the workers that are there, by address."""
    info = client.scheduler_info(n_workers=-1)["workers"]
    return {address: str(about["name"]) for address, about in info.items()}


def _check_gone(stuck: list[str]) -> None:
    if stuck:
        raise ClusterError(f"no other worker takes what {', '.join(stuck)} holds; it stays")


def gateway_state(dask_scheduler: Any) -> tuple[bool, int] | None:
    """Give whether a dask-gateway cluster adapts, and its number of workers; None for others.

    Runs on the scheduler.
    """
    service = dask_scheduler.services.get("gateway")
    return None if service is None else (service.adapt_task is not None, service.count)
