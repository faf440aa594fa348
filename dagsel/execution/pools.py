"""A cluster whose workers are of several pools: cheap ones first, others where those do not come.

Dask starts each worker of a `SpecCluster` from a specification of its own. So pools need nothing of
the cluster but that: the specification of a pool's worker is the cluster's own with other options.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from distributed import Client
from distributed.utils import import_term

from dagsel.checks import short_traceback
from dagsel.errors import ClusterError
from dagsel.execution.cluster import WorkerLimit, workers_of
from dagsel.execution.cluster_driver import ClusterDriver
from dagsel.execution.elastic import ADAPTS, GONE, _ByName, elastic_for
from dagsel.execution.spec_cluster import add_workers
from dagsel.planning.hiring import pool_of, share_out
from dagsel.planning.pools import Workers, dearest, most_of

#: A worker that does not come within so long is asked of another pool, if there is one with room.
PATIENCE_S = 120.0
#: A pool that has not delivered is asked last for so long.
SHORT_S = 600.0


def driver_for(
    client: Client, cluster: Any = None, workers: Sequence[Workers] = ()
) -> ClusterDriver:
    """Return the driver of a cluster, with the pools of workers that it has."""
    if not workers:
        return elastic_for(client, cluster)
    return _ByPool(client, cluster if hasattr(cluster, "scale") else client.cluster, workers)


@short_traceback
def check_pools(client: Any, cluster: Any, workers: Sequence[Workers]) -> None:
    """Raise a `ClusterError` unless a cluster can have workers of these pools."""
    if not workers:
        return
    names = ", ".join(repr(pool.name) for pool in workers)
    instead = f'leave out workers= and give price_per_worker_hour="{dearest(workers)}"'
    if not hasattr(cluster, "scale"):
        cluster = getattr(client, "cluster", None)
    kind = type(cluster).__name__
    if cluster is None:
        raise ClusterError(
            f"workers= has {len(workers)} pools ({names}), and there is no cluster object that "
            f"could start them: give cluster=, or {instead}"
        )
    if hasattr(cluster, "cuda_visible_devices"):
        raise ClusterError(f"the workers of a {kind} are the GPUs of this machine: {instead}")
    if not hasattr(cluster, "worker_spec"):
        raise ClusterError(
            f"workers= has {len(workers)} pools ({names}), and a {kind} takes only a number of "
            f"workers: {instead}"
        )
    if getattr(cluster, "new_spec", None) is None:
        raise ClusterError(f"a {kind} has the workers that it was made with: {instead}")
    driver = _ByPool(client, cluster, workers)
    if driver.why_not:
        raise ClusterError(f"workers= has {len(workers)} pools ({names}), and {ADAPTS}: {instead}")
    there = driver.wanted_of
    for pool in workers:
        n = there.get(pool.name, 0)
        if pool.most is not None and n > pool.most:
            raise ClusterError(
                f"{n} workers of the cluster are of the pool {pool.name!r}, which may have "
                f"most={pool.most}: scale the cluster down, or give most={n}"
            )
        if pool.most is not None and pool.most < driver.node_size:
            raise ClusterError(
                f"the pool {pool.name!r} may have most={pool.most} workers, and "
                f"{driver.node_size} come together in a job: give most={driver.node_size}"
            )
        own, new = (options.get("processes") for options in (driver.options, pool.options))
        if new is not None and new != own:
            raise ClusterError(
                f"a job of the pool {pool.name!r} has {new} workers, and one of the cluster {own}: "
                "leave out processes, all jobs have as many workers"
            )


class _ByPool(_ByName):
    """A `SpecCluster` whose workers are of several pools; those found belong to the first one.

    New workers are of the cheapest pool that has room. Where its workers end before they come, or
    do not come for long, they are asked of the next one.
    """

    def __init__(self, client: Client, cluster: Any, pools: Sequence[Workers]) -> None:
        super().__init__(client, cluster)
        self.pools = tuple(pools)
        self.prices = {pool.name: pool.cost.per_hour for pool in pools}
        self._now = time.monotonic
        self._made: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._missing_since: dict[Any, float] = {}
        self._has_come: set[Any] = set()
        self._short_until: dict[str, float] = {}

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the cluster's own workers."""
        options: Mapping[str, Any] = self.cluster.new_spec.get("options", {})
        return options

    @property
    def limit(self) -> WorkerLimit:
        most = most_of(self.pools)
        if most is None:
            return super().limit
        return WorkerLimit(most, f"workers= has pools for {most}")

    def pool_of(self, name: str) -> str:
        specs = self._specs().items()
        return self.pool_of_spec(next((spec for spec, members in specs if name in members), name))

    def node_of(self, name: str) -> str:
        # It has come, and may be taken back before anybody looks again.
        self._has_come |= {spec for spec, members in self._specs().items() if name in members}
        return super().node_of(name)

    def pool_of_spec(self, name: Any) -> str:
        return pool_of(str(name), self.pools)

    def fill(self, n_workers: int, besides: Collection[str]) -> None:
        self._note_leaving(besides)
        self._watch({str(about["name"]) for about in workers_of(self.client).values()})
        super().fill(n_workers, besides)

    def _start_more(self, n_specs: int) -> None:
        starts = self._share_out(n_specs)
        pools = [pool for pool in self.pools for _ in range(starts.get(pool.name, 0))]
        specs = map(self._spec, pools)
        add_workers(self.cluster, len(pools), self._trouble, lambda: next(specs))
        if len(pools) < n_specs:
            self.most = self.wanted
            each = ", ".join(f"{pool.name} {pool.most}" for pool in self.pools)
            raise ClusterError(
                f"more workers were wanted than the pools may have: {each}; raise most=, or let "
                "the procedure use fewer"
            )

    def _share_out(self, n_specs: int, *, but: Collection[str] = ()) -> dict[str, int]:
        """Return how many to start in which pool, in none of `but`."""
        pools = [pool for pool in self.pools if pool.name not in but]
        there, size = self.wanted_of, self.node_size
        return share_out(pools, n_specs, there=there, node_size=size, short=self._short)

    @property
    def _short(self) -> list[str]:
        """Pools that do not deliver at present."""
        return [pool for pool, until in self._short_until.items() if until > self._now()]

    def _spec(self, pool: Workers) -> dict[Any, Any]:
        """Return the specification of a new worker of a pool, with its name."""
        (spec,) = self.cluster.new_worker_spec().values()
        name = f"{pool.name}-{self.cluster._i}"
        self.cluster._i += 1  # so that no name comes twice
        self._missing_since[name] = self._now()
        cls = import_term(spec["cls"]) if isinstance(spec["cls"], str) else spec["cls"]
        options = {**spec.get("options", {}), **pool.options}
        made = {"cls": partial(self._make, name, cls), "options": options}
        return {name: {**spec, **made}}

    def _make(self, spec: str, cls: Any, *args: Any, **options: Any) -> Any:
        machine = self._made[spec] = cls(*args, **options)
        return machine

    def _machines(self) -> dict[Any, Any]:
        # Those that we asked for are known before Dask tells of them.
        return {**super()._machines(), **self._made}

    def _newest(self) -> list[tuple[Any, set[str]]]:
        """Return the specifications in the order in which they are given up: the dearest first."""
        return sorted(super()._newest(), key=lambda spec: -self.prices[self.pool_of_spec(spec[0])])

    def _watch(self, there: set[str]) -> None:
        """Note which pools do not deliver, and do not wait any longer for what others may have."""
        late: list[Any] = []
        for spec, members in self._specs().items():
            pool = self.pool_of_spec(spec)
            if members & there:
                self._has_come.add(spec)
                self._missing_since.pop(spec, None)
                continue
            machine = self.cluster.workers.get(spec)
            if machine is not None and machine.status in GONE:
                if spec not in self._has_come:
                    self._short_until[pool] = self._now() + SHORT_S
            elif self._now() - self._missing_since.setdefault(spec, self._now()) > PATIENCE_S:
                self._short_until[pool] = self._now() + SHORT_S
                late.append(spec)
        n_others = sum(self._share_out(len(late), but=self._short).values()) if late else 0
        self._withdraw(late[:n_others])
