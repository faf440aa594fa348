"""How a cluster grows and shrinks, whatever way of deploying Dask it comes from.

Three kinds of clusters are told apart by what they can do, not by their names:

- those that start each worker from a specification of its own and can close a named one
  (`LocalCluster`, dask-cuda's `LocalCUDACluster`, dask-jobqueue's, dask-cloudprovider's);
- those that only take a number of workers (dask-gateway's `GatewayCluster`, dask-kubernetes'
  `KubeCluster`): they ask Dask's scheduler which worker to close, and a plugin answers;
- those that cannot be scaled: a client alone, hosts that are listed one by one, and a cluster whose
  size `cluster.adapt` decides.

``cluster.scale`` is never used to close a worker: it may close one that still trains.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

from distributed import Client, LocalCluster, SchedulerPlugin, Status

from dagsel.errors import ClusterError
from dagsel.execution.cluster import (
    LOCAL_STARTUP_S,
    WorkerLimit,
    limit_here,
    limit_of_gpus,
    workers_of,
)
from dagsel.execution.cluster_driver import ClusterDriver
from dagsel.execution.jobs import jobs_of
from dagsel.execution.spec_cluster import CLOSE_TIMEOUT_S, add_workers, machines_of, withdraw

ADAPTS = "cluster.adapt() decides how many workers there are"
#: A worker in one of these states does not run again.
GONE = {Status.closing_gracefully, Status.closing, Status.closed, Status.failed}


def elastic_for(client: Client, cluster: Any = None) -> ClusterDriver:
    """Return the driver of a cluster object, by default the one that the client was made with."""
    cluster = cluster if hasattr(cluster, "scale") else client.cluster
    if cluster is None or not getattr(cluster, "_supports_scaling", True):
        return _Fixed(client, cluster)
    return (_ByName if hasattr(cluster, "worker_spec") else _ByNumber)(client, cluster)


class _Fixed(ClusterDriver):
    """A cluster that cannot be scaled."""

    wanted = 0

    @property
    def why_not(self) -> str:
        if self.cluster is not None:
            return f"a {type(self.cluster).__name__} has the workers that it was made with"
        return (
            "only a cluster object can be scaled, and there is only a client; pass cluster=, or "
            "start all workers beforehand"
        )

    @property
    def limit(self) -> WorkerLimit:
        n = len(workers_of(self.client))
        return WorkerLimit(n or None, f"the cluster has {n}, and {self.why_not}", is_fixed=True)

    def fill(self, n_workers: int, besides: Collection[str]) -> None:
        """Raise a `ClusterError`: no worker can be started."""
        raise ClusterError(self.why_not)

    def close_workers(self, workers: Collection[str]) -> None:
        """Raise a `ClusterError`: no worker can be closed."""
        raise ClusterError(self.why_not)


class _ByName(ClusterDriver):
    """A `SpecCluster`: it has a specification for each worker, or for each job of several workers.

    Dask restarts a worker that closes while its specification is there.
    """

    def __init__(self, client: Client, cluster: Any) -> None:
        super().__init__(client, cluster)
        self._jobs = jobs_of(cluster)
        self._leaving: frozenset[str] = frozenset()  # names of workers

    @property
    def node_size(self) -> int:
        return len(_members("", self.cluster.new_spec))

    @property
    def why_not(self) -> str:
        adaptive = self.cluster._adaptive
        return ADAPTS if adaptive is not None and adaptive.periodic_callback is not None else ""

    @property
    def limit(self) -> WorkerLimit:
        if self.why_not:
            most = self.cluster._adaptive.maximum
            return WorkerLimit(None if math.isinf(most) else int(most), self.why_not, is_fixed=True)
        if hasattr(self.cluster, "cuda_visible_devices"):
            return limit_of_gpus(len(self.cluster.cuda_visible_devices))
        if not isinstance(self.cluster, LocalCluster):
            return WorkerLimit()  # the provider's own, which it does not tell
        there = len(workers_of(self.client))  # some may have come from outside: they stay
        return limit_here(self.cluster.new_spec["options"], at_least=max(self.wanted, there))

    @property
    def startup_s(self) -> float:
        is_here = isinstance(self.cluster, LocalCluster) and self.cluster.processes
        return LOCAL_STARTUP_S if is_here else 0.0

    @property
    def bills_requests(self) -> bool:
        return self._jobs.bills_requests

    @property
    def wanted(self) -> int:
        return sum(len(members) for members in self._specs().values())

    @property
    def wanted_of(self) -> Mapping[str, int]:
        found: Counter[str] = Counter()
        for name, members in self._specs().items():
            if not members <= self._leaving:
                found[self.pool_of_spec(name)] += len(members)
        return found

    def pool_of_spec(self, name: Any) -> str:
        """Return the pool of a specification's workers."""
        return ""

    def node_of(self, name: str) -> str:
        """Return the name of the job that a worker is part of, or the worker's own."""
        specs = dict(self.cluster.worker_spec)
        jobs = (
            job for job, spec in specs.items() if "group" in spec and name in _members(job, spec)
        )
        node = str(next(jobs, name))
        self._jobs.meet(node)
        return node

    def fill(self, n_workers: int, besides: Collection[str]) -> None:
        """Ask for workers until so many are there or on their way; give up what is too many."""
        self._note_leaving(besides)
        self._forget_closed()
        n_workers += len(_workers(self.client).keys() & set(besides))
        surplus = self.wanted - n_workers
        if surplus > 0:
            self._give_up(surplus)
        else:
            self._start_more(-(surplus // self.node_size))

    def _note_leaving(self, workers: Collection[str]) -> None:
        there = _workers(self.client)
        self._leaving = frozenset(there[worker] for worker in workers if worker in there)

    def _start_more(self, n_specs: int) -> None:
        try:
            add_workers(self.cluster, n_specs, self._trouble)
        except Exception:  # LocalCUDACluster has no more devices
            self.most = self.wanted
            raise

    def close_workers(self, workers: Collection[str]) -> None:
        """Close these workers, and do not start others in their place."""
        left = self.wanted - len(workers)
        self._forget_closed()
        before = _workers(self.client)
        retired = self.client.retire_workers(list(workers), close_workers=True)
        after = _workers(self.client)
        stuck = [worker for worker in workers if worker in after and worker not in retired]
        gone = {before[worker] for worker in {*workers} - {*stuck} if worker in before}
        stays = {*after.values()} - gone
        self.taken |= gone & self._starting()
        self._withdraw(
            name
            for name, members in self._specs().items()
            if members & gone and not members & stays
        )
        _check_gone(stuck)
        self._give_up(self.wanted - left)  # the places of workers that were lost before

    def _specs(self) -> dict[Any, set[str]]:
        """Return the names of the workers of each specification."""
        specs, machines = dict(self.cluster.worker_spec), self._machines()
        return {name: _members(name, spec, machines.get(name)) for name, spec in specs.items()}

    def _machines(self) -> dict[Any, Any]:
        """Return what was started of each specification, as far as that is known."""
        return dict(self.cluster.workers)

    def _starting(self) -> set[str]:
        """Return the names of machines of which it is not known yet which specification they have.

        Dask tells that once all have started that were asked for together.
        """
        known = {id(machine) for machine in self._machines().values()}
        machines = [it for it in machines_of(self.cluster) if id(it) not in known]
        return {str(getattr(it, "name", "")) for it in machines if it.status not in GONE}

    def _newest(self) -> list[tuple[Any, set[str]]]:
        return list(reversed(self._specs().items()))

    def _give_up(self, n_workers: int) -> None:
        """Withdraw the newest specifications of which no worker has started; first lost jobs."""
        there, specs = {*_workers(self.client).values()}, self._specs()
        self._jobs.look(specs, there)
        may_be_any = bool(there & self._starting() - set().union(*specs.values()))
        known, unmet = self._machines(), []
        for name, members in sorted(self._newest(), key=lambda s: s[0] not in self._jobs.alone):
            has_started = members & there or (may_be_any and name not in known)
            if len(members) <= n_workers and not has_started:
                unmet.append(name)
                n_workers -= len(members)
        self._withdraw(unmet)

    def _forget_closed(self) -> None:
        """Withdraw the specifications of workers that have gone for good.

        Dask would leave their places empty for a while, and then start them again unasked.
        """
        there, specs = {*_workers(self.client).values()}, self._specs()
        self._jobs.look(specs, there)
        machines = dict(self.cluster.workers)
        self._jobs.find_refused(machines.values())
        gone = {name for name, machine in machines.items() if machine.status in GONE}
        gone |= {name for name, members in specs.items() if members <= self.taken}
        gone |= self._jobs.ended()
        self._withdraw(name for name in gone & specs.keys() if not specs[name] & there)

    def _withdraw(self, names: Iterable[Any]) -> None:
        withdraw(self.cluster, set(names), is_ours=self.own_since is not None)


def _members(name: Any, spec: dict[str, Any], machine: Any = None) -> set[str]:
    """Return the names of the workers of a specification.

    A machine may have a name of its own, as those of dask-cloudprovider have.
    """
    if "group" not in spec:
        own = getattr(machine, "name", None)
        return {str(name if own is None else own)}
    return {f"{name}{suffix}" for suffix in spec["group"]}


class Leaving(SchedulerPlugin):
    """Makes Dask's scheduler close only these workers when a cluster shrinks."""

    name = "dagsel-leaving"

    def __init__(self, workers: Collection[str]) -> None:
        self.workers = frozenset(workers)

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        """Return those of the workers that may be closed."""
        return [worker for worker in workers if worker.address in self.workers]


class _ByNumber(ClusterDriver):
    """A cluster that only takes a number of workers, and replaces those that go."""

    _n: int | None = None
    _leaving: frozenset[str] = frozenset()  # addresses

    @property
    def why_not(self) -> str:
        try:
            gateway = self._gateway()
        except OSError as error:
            return f"the scheduler does not answer: {error}"
        return ADAPTS if gateway is not None and gateway[0] else ""

    @property
    def limit(self) -> WorkerLimit:
        return WorkerLimit()  # a gateway's administrator sets one, which it tells when it refuses

    @property
    def wanted(self) -> int:
        if self._n is None:
            gateway = self._gateway()
            if gateway is None:  # nobody tells, until we have asked for a number
                return len(_workers(self.client))
            self._n = gateway[1]
        return self._n

    @property
    def under_way(self) -> int:
        n_first = getattr(self.cluster, "n_workers", None)  # not what `scale` was told since
        if self._n is not None or not isinstance(n_first, int):
            return 0
        n_come: int = self.client.run_on_scheduler(_n_come)
        return max(0, n_first - n_come)

    @property
    def wanted_of(self) -> Mapping[str, int]:
        return {"": self.wanted - len(_workers(self.client).keys() & self._leaving)}

    def fill(self, n_workers: int, besides: Collection[str]) -> None:
        """Ask the cluster for so many workers, never for fewer than are there."""
        there = _workers(self.client)
        self._leaving = frozenset(besides)
        n_workers += len(there.keys() & {*besides})
        if n_workers >= len(there):
            self._scale(n_workers)
        # Else it would close some of those that are there.
        elif self.wanted + self.under_way > len(there):
            self._scale(len(there))

    def close_workers(self, workers: Collection[str]) -> None:
        """Lower the number that the cluster is asked for, and close these workers."""
        # Those that came after they had been given up were not wanted.
        n_unwanted = max(0, len(_workers(self.client).keys() | {*workers}) - self.wanted)
        left = max(0, self.wanted - max(0, len(workers) - n_unwanted))
        self.client.register_plugin(Leaving(workers))
        try:
            self._scale(left)
            self._wait_until_gone(workers, left)
        finally:
            self.client.unregister_scheduler_plugin(Leaving.name)
        # If another worker was lost meanwhile, the cluster was small enough and closed none.
        late = [worker for worker in workers if worker in _workers(self.client)]
        retired = self.client.retire_workers(late, close_workers=True) if late else {}
        _check_gone([worker for worker in late if worker not in retired])

    def _gateway(self) -> tuple[bool, int] | None:
        found: tuple[bool, int] | None = self.client.run_on_scheduler(_gateway_state)
        return found

    def _scale(self, n_workers: int) -> None:
        self._n = None
        self.cluster.scale(n_workers)
        gateway = self._gateway()
        self._n = n_workers if gateway is None else gateway[1]
        if self._n < n_workers:
            self.most = self._n
            raise ClusterError(
                f"{n_workers} workers were wanted, and the cluster may have {self._n}; let the "
                "procedure use fewer"
            )

    def _wait_until_gone(self, workers: Collection[str], n_left: int) -> None:
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while time.monotonic() < deadline:
            there = _workers(self.client)
            if len(there) <= n_left or not any(worker in there for worker in workers):
                return
            time.sleep(0.1)


def _gateway_state(dask_scheduler: Any) -> tuple[bool, int] | None:
    """Return, on the scheduler, whether dask-gateway adapts it and to how many workers."""
    service = dask_scheduler.services.get("gateway")
    return None if service is None else (service.adapt_task is not None, service.count)


def _n_come(dask_scheduler: Any) -> int:
    """Return, on the scheduler, how many workers have come so far; some may have gone."""
    threads = [n for _, n in dask_scheduler.total_nthreads_history]
    return sum(after > before for before, after in pairwise(threads))


def _workers(client: Client) -> dict[str, str]:
    """Return the names of the workers that are there, by address."""
    return {address: str(about["name"]) for address, about in workers_of(client).items()}


def _check_gone(stuck: list[str]) -> None:
    if stuck:
        raise ClusterError(f"no other worker takes what {', '.join(stuck)} holds; it stays")
