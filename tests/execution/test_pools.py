"""Pools of workers: the cheapest come first, others where those do not, each at its price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from distributed import Client, LocalCluster, SpecCluster, Status, Worker
from distributed.scheduler import Scheduler

from dagsel.errors import ClusterError
from dagsel.execution.cluster import workers_of
from dagsel.execution.pools import PATIENCE_S, SHORT_S, check_pools, driver_for
from dagsel.planning.pools import Workers
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

from .helpers import engine_for, there
from .test_elastic import Instance, Job, Queued

FREE = "127.0.0.1:0"
SCHEDULER = {"cls": Scheduler, "options": {"dashboard_address": FREE, "port": 0}}
TIMEOUT_S = 60
DEMAND = Workers("demand", "2.50 USD")
SPOT = Workers("spot", "0.50 USD", spot=True, most=2, options={"nthreads": 2})


def machine(scheduler: str, name: str, nthreads: int = 1, broken: str = "") -> Any:
    """A worker in this process; a broken one never comes, or has ended when it should."""
    if not broken:
        return Worker(scheduler, name=name, nthreads=nthreads)
    queued = Queued(scheduler, name)
    queued.status = Status.failed if broken == "fails" else Status.running
    return queued


@contextmanager
def cluster_of(
    n_workers: int, cls: Any = machine, *, first: Any = machine
) -> Iterator[tuple[SpecCluster, Client]]:
    """A cluster without a pool; its workers are threads of this process."""
    workers = {k: {"cls": first, "options": {"nthreads": 1}} for k in range(n_workers)}
    worker = {"cls": cls, "options": {"nthreads": 1}}
    with (
        SpecCluster(scheduler=SCHEDULER, workers=workers, worker=worker) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield cluster, client


def grown(driver: Any, *sizes: int) -> dict[str, int]:
    """Have so many workers, one size after the other; return how many each pool has then."""
    for n_workers in sizes:
        driver.grow(n_workers)
        driver.close()
    driver.close()
    return {pool: n for pool, n in driver.wanted_of.items() if n}


def names(client: Client) -> dict[str, int]:
    """Names of the workers that are there, and their threads."""
    return {str(about["name"]): about["nthreads"] for about in workers_of(client).values()}


def test_the_cheapest_come_first_and_the_dearest_are_given_up_first() -> None:
    with cluster_of(1) as (_, client):
        driver = driver_for(client, None, [DEMAND, SPOT])
        assert grown(driver, 2) == {"demand": 1, "spot": 1}  # the one that was there is the first's
        assert grown(driver, 5) == {"demand": 3, "spot": 2}
        client.wait_for_workers(5, timeout=TIMEOUT_S)
        threads = {name.split("-")[0]: n for name, n in names(client).items()}
        assert threads == {"0": 1, "demand": 1, "spot": 2}
        spot = [a for a, about in workers_of(client).items() if about["nthreads"] == 2]
        driver.retire(spot[:1])
        assert grown(driver) == {"demand": 3, "spot": 1}
        assert grown(driver, 5) == {"demand": 3, "spot": 2}  # the one that was lost is replaced
        client.wait_for_workers(5, timeout=TIMEOUT_S)
        assert driver.troubles() == []
        assert len({*names(client)}) == 5


def test_of_those_that_have_not_come_the_dearest_are_given_up_first() -> None:
    pools = [DEMAND, Workers("spot", "0.50 USD", most=2), Workers("mid", "1 USD", most=2)]
    with cluster_of(1, queued()) as (_, client):
        driver = driver_for(client, None, pools)
        assert grown(driver, 7) == {"demand": 3, "spot": 2, "mid": 2}
        assert grown(driver, 4) == {"demand": 1, "spot": 2, "mid": 1}
        assert grown(driver, 1) == {"demand": 1}


def queued() -> Any:
    return lambda scheduler, name, **options: Queued(scheduler, name)


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("broken", ["waits", "fails"])
def test_where_a_pool_does_not_deliver_the_next_is_asked(broken: str) -> None:
    spot = Workers("spot", "0.50 USD", spot=True, options={"broken": broken})
    with cluster_of(1) as (cluster, client):
        driver: Any = driver_for(client, None, [DEMAND, spot])
        driver._now = clock = Time()
        assert grown(driver, 3) == {"demand": 1, "spot": 2}
        cluster.sync(cluster._correct_state)
        if broken == "waits":
            clock.now = PATIENCE_S
            assert grown(driver, 3) == {"demand": 1, "spot": 2}
        clock.now += 1.0
        assert grown(driver, 3) == {"demand": 3}
        client.wait_for_workers(3, timeout=TIMEOUT_S)
        clock.now += SHORT_S - 1
        assert grown(driver, 4) == {"demand": 4}
        clock.now += 2.0  # there may be some again
        assert grown(driver, 5) == {"demand": 4, "spot": 1}


def test_a_worker_that_was_taken_back_at_once_was_delivered() -> None:
    with cluster_of(1) as (cluster, client):
        driver = driver_for(client, None, [DEMAND, SPOT])
        assert grown(driver, 3) == {"demand": 1, "spot": 2}
        client.wait_for_workers(3, timeout=TIMEOUT_S)
        for name, machine in cluster.workers.items():
            assert driver.node_of(str(name)) == str(name)  # as it is asked when one joins
            if name != 0:
                cluster.sync(machine.close)
        assert grown(driver, 3) == {"demand": 1, "spot": 2}


def test_a_pool_that_does_not_deliver_is_waited_for_if_there_is_no_other() -> None:
    spot = Workers("spot", "0.50 USD", spot=True, options={"broken": "waits"})
    full = Workers("demand", "2.50 USD", most=1)
    with cluster_of(1) as (_, client):
        driver: Any = driver_for(client, None, [full, spot])
        driver._now = clock = Time()
        assert grown(driver, 3) == {"demand": 1, "spot": 2}
        clock.now = 2 * PATIENCE_S
        assert grown(driver, 3) == {"demand": 1, "spot": 2}


def test_more_than_the_pools_may_have_is_told_of() -> None:
    with cluster_of(0) as (_, client):
        driver = driver_for(client, None, [Workers("a", "1 USD", most=1), SPOT])
        assert driver.capacity().most_workers == 3
        for _ in range(2):
            assert grown(driver, 5) == {"a": 1, "spot": 2}
        (trouble,) = driver.troubles()  # it is told of once
        assert "more workers were wanted than the pools may have: a 1, spot 2" in trouble
        with pytest.raises(ClusterError, match="max_cluster_workers=4: workers= has pools for 3"):
            driver.capacity(4)


def test_workers_with_names_of_their_own_are_of_the_pool_that_was_asked() -> None:
    with cluster_of(2, Instance, first=Instance) as (cluster, client):
        driver = driver_for(client, None, [DEMAND, SPOT])
        assert grown(driver, 4) == {"demand": 2, "spot": 2}
        client.wait_for_workers(4, timeout=TIMEOUT_S)
        found = {name: driver.pool_of(name) for name in names(client)}
        assert Counter(found.values()) == {"demand": 2, "spot": 2}
        assert {names(client)[name] for name, pool in found.items() if pool == "spot"} == {2}
        spot = [a for a, about in workers_of(client).items() if found[str(about["name"])] == "spot"]
        driver.retire(spot)
        assert grown(driver) == {"demand": 2}
        driver.retire(there(client)[:1])  # it was there before
        assert grown(driver) == {"demand": 1}
        assert len(cluster.worker_spec) == 1


def test_jobs_of_several_workers_are_asked_for_as_jobs() -> None:
    worker = {"cls": Job, "options": {}, "group": ["-0", "-1"]}
    pools = [DEMAND, Workers("spot", "0.50 USD", spot=True, most=3)]
    with (
        SpecCluster(scheduler=SCHEDULER, worker=worker) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        driver = driver_for(client, cluster, pools)
        assert grown(driver, 4) == {"demand": 2, "spot": 2}
        client.wait_for_workers(4, timeout=TIMEOUT_S)
        pools_of = Counter(driver.pool_of(name) for name in names(client))
        assert pools_of == {"demand": 2, "spot": 2}
        nodes = {driver.node_of(name) for name in names(client)}
        assert len(nodes) == len(cluster.worker_spec) == 2


def test_each_worker_is_billed_at_the_price_of_its_pool(
    digits: ShardedDataset, run_dir: str
) -> None:
    with cluster_of(1) as (_, client):
        driver = driver_for(client, None, [DEMAND, SPOT])
        with engine_for(client, digits, SyntheticWorkload(), run_dir, driver=driver) as engine:
            assert engine.bill.billed == {"demand": 1}
            engine.scale(4)
            while len(engine.workers) < 4:
                assert list(engine.messages(timeout_s=TIMEOUT_S))
            assert engine.bill.billed == engine.bill.requests == {"demand": 2, "spot": 2}
            begun, now = engine.bill, engine.now()
            spent = begun.money(now + 3600)
            assert spent is not None
            assert spent - (begun.money(now) or 0.0) == pytest.approx(2 * 2.5 + 2 * 0.5)
            engine.scale(
                2
            )  # they all do nothing: those that hold the fewest shards alone, the dear
            while len(engine.workers) > 2 or sum(engine.bill.requests.values()) > 2:
                list(engine.messages(timeout_s=0.1))
            assert engine.bill.n_billed == 2
        end = engine.bill
        assert end.n_billed == 0
        assert end.money(engine.now() + 99) == end.paid
        assert len(there(client)) == 1


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        ([Workers("a", "1 USD", most=1)], "2 workers of the cluster are of the pool 'a'.* most=2"),
        ([DEMAND, Workers("a", "1 USD", options={"processes": 2})], "leave out processes"),
    ],
)
def test_pools_that_a_cluster_cannot_have(pools: list[Workers], told: str) -> None:
    with cluster_of(2) as (cluster, client):
        with pytest.raises(ClusterError, match=told):
            check_pools(client, cluster, pools)
        check_pools(client, None, [DEMAND, SPOT])
        check_pools(None, cluster, [DEMAND, SPOT])


def test_pools_need_a_cluster_that_starts_each_worker_by_itself() -> None:
    pools = [DEMAND, SPOT]
    told = r"workers= has 2 pools \('demand', 'spot'\), and there is no cluster object"
    with pytest.raises(ClusterError, match=told):
        check_pools(None, None, pools)
    with pytest.raises(ClusterError, match='give price_per_worker_hour="2.5 USD"'):
        check_pools("tcp://127.0.0.1:1", None, pools)

    class GatewayCluster:
        def scale(self, n: int) -> None:
            pass

    with pytest.raises(ClusterError, match="a GatewayCluster takes only a number of workers"):
        check_pools(None, GatewayCluster(), pools)
    workers = {0: {"cls": Worker, "options": {"nthreads": 1}}}
    with SpecCluster(scheduler=SCHEDULER, workers=workers) as cluster:
        with pytest.raises(ClusterError, match="a SpecCluster has the workers that it was made"):
            check_pools(None, cluster, pools)
    with cluster_of(1) as (adapts, client):
        adapts.adapt(minimum=1, maximum=2)
        with pytest.raises(ClusterError, match=r"cluster.adapt\(\) decides"):
            check_pools(client, None, pools)
        assert adapts._adaptive is not None
        adapts._adaptive.stop()
    worker = {"cls": Job, "options": {}, "group": ["-0", "-1", "-2"]}
    with SpecCluster(scheduler=SCHEDULER, worker=worker) as jobs:
        told = "may have most=2 workers, and 3 come together in a job: give most=3"
        with pytest.raises(ClusterError, match=told):
            check_pools(None, jobs, pools)


def test_a_local_cluster_may_have_pools_too() -> None:
    options = {"processes": False, "threads_per_worker": 1, "dashboard_address": FREE}
    with LocalCluster(n_workers=1, **options) as cluster, Client(cluster) as client:
        check_pools(client, None, [DEMAND, SPOT])
        assert grown(driver_for(client, None, [DEMAND, SPOT]), 4) == {"demand": 2, "spot": 2}
        client.wait_for_workers(4, timeout=TIMEOUT_S)
