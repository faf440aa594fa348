"""A real dask-gateway server: its workers come and the named ones go, and nothing is left of it."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, SchedulerPlugin

from dagsel.execution.elastic import elastic_for
from tests.waiting import slowness, wait_until

from .deployed import (
    FLOWS,
    N_MOST,
    Outcome,
    check_bill,
    check_limits,
    check_model,
    growing,
    search,
)
from .gateway import gateway_server
from .helpers import BY_NIGHT, processes, started_since, there

WHY = "needs the extra dev: a dask-gateway server"
dask_gateway = pytest.importorskip("dask_gateway", reason=WHY)
pytest.importorskip("dask_gateway_server", reason=WHY)
pytestmark = pytest.mark.slow

TIMEOUT_S = 60


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Any]:
    """A cluster without workers, and its client; all that it started has ended afterwards."""
    before = processes()
    with gateway_server(tmp_path) as address:
        with dask_gateway.GatewayCluster(address=address, auth="basic") as cluster:
            with cluster.get_client(set_as_default=False) as client:
                yield cluster, client
            ours = started_since(before)
        # Its __del__ asks for a loop that has ended.
        del cluster.gateway._loop_runner
    # Workers outlive the server as children of init.
    assert not psutil.wait_procs(ours, timeout=TIMEOUT_S)[1]
    assert processes() <= before


def n_created(folder: Path) -> int:
    """Workers that the server has started."""
    return len(re.findall("Created worker", (folder / "gateway.log").read_text()))


def test_the_named_workers_go_and_are_not_replaced(gateway: Any, tmp_path: Path) -> None:
    _, client = gateway
    driver = elastic_for(client)
    assert driver.can_scale
    driver.grow(1)
    client.wait_for_workers(1, timeout=TIMEOUT_S)
    driver.grow(5)  # the administrator allows 4
    client.wait_for_workers(4, timeout=TIMEOUT_S)
    old = there(client)
    data = client.scatter({"held": 17}, workers=old[1:2])
    driver.grow(1)  # closes none that is there
    driver.retire(old[1:2])
    driver.close()
    assert there(client) == [old[0], *old[2:]]
    assert client.gather(data) == {"held": 17}
    assert driver.wanted == 3
    # One is lost as another one is retired: there are as many as there should be, of others.
    client.retire_workers(old[:1], close_workers=True)
    driver.retire(old[3:])
    driver.close()
    assert driver.wanted == 2
    client.wait_for_workers(2, timeout=TIMEOUT_S)
    assert set(there(client)) & set(old) == {old[2]}
    assert client.gather(data) == {"held": 17}
    (trouble,) = driver.troubles()
    assert "5 workers" in trouble
    assert n_created(tmp_path) == 5


def test_adapt_stays_in_charge(gateway: Any) -> None:
    cluster, client = gateway
    driver = elastic_for(client)
    cluster.adapt(minimum=0, maximum=2)
    assert "adapt" in driver.why_not
    cluster.adapt(active=False)
    assert driver.can_scale


def test_a_search_grows_and_shrinks_the_cluster(gateway: Any, tmp_path: Path) -> None:
    cluster, client = gateway
    one_worker(gateway)
    slow = slowness()
    limits: dict[str, Any] = {"deadline": 90 * slow, "budget": 360 * slow}
    outcome = search(growing(patience=60), tmp_path, cluster=cluster, **limits)
    wait_until(lambda: wanted(tmp_path)[-1] == 1, "one is wanted")
    sizes = [n for n, _ in itertools.groupby(wanted(tmp_path))]
    up = sizes.index(N_MOST)
    assert sizes == sorted(sizes[:up]) + sorted(sizes[up:], reverse=True)
    assert {1, N_MOST} <= set(sizes)
    assert sizes[-1] == len(there(client)) == 1  # as it was
    assert n_created(tmp_path) == N_MOST
    # On a machine that does other things they come, but late.
    assert [note for note in outcome.run.record.notes if "have not come" not in note] == []
    assert outcome.run.timeline().worker.nunique() == N_MOST
    assert outcome.n_trained_again == 0
    check_model(outcome)


@pytest.mark.parametrize("flow", ["seer", pytest.param("asha", marks=BY_NIGHT)])
def test_limits_hold(flow: str, gateway: Any, tmp_path: Path) -> None:
    cluster, client = gateway
    one_worker(gateway)
    stays, slow = note_stays(client), slowness()
    if flow == "asha":  # which asks for no worker itself
        cluster.scale(N_MOST)
    outcome = search(FLOWS[flow](slow), tmp_path, slow, cluster=cluster)
    check_limits(outcome)
    check_model(outcome)
    again, late = cost_of(outcome, stays(), tmp_path)
    check_bill(outcome, again, n_asked=n_created(tmp_path), late=late)
    n_before = N_MOST if flow == "asha" else 1
    wait_until(lambda: wanted(tmp_path)[-1] == n_before, "as many are wanted as before")


def one_worker(gateway: Any) -> None:
    cluster, client = gateway
    cluster.scale(1)
    client.wait_for_workers(1, timeout=TIMEOUT_S)


@dataclass
class Stay:
    """When a worker joined the scheduler and left it, by the clock on the wall."""

    joined: float
    left: float = math.inf


def note_stays(client: Client) -> Callable[[], dict[str, Stay]]:
    """Return what tells of each worker that comes from now on, or is there, by name."""

    class Notes(SchedulerPlugin):  # in a function, so that it can be sent
        name = "notes"

        async def start(self, scheduler: Any) -> None:
            self.stays: dict[str, list[float]] = {}
            self.names: dict[str, str] = {}
            for worker in scheduler.workers:
                self.add_worker(scheduler, worker)

        def add_worker(self, scheduler: Any, worker: str) -> None:
            self.names[worker] = scheduler.workers[worker].name
            self.stays[self.names[worker]] = [time.time()]

        def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
            self.stays[self.names[worker]].append(time.time())

    def noted(dask_scheduler: Any) -> dict[str, list[float]]:
        stays: dict[str, list[float]] = dask_scheduler.plugins["notes"].stays
        return stays

    client.register_plugin(Notes())
    return lambda: {name: Stay(*times) for name, times in client.run_on_scheduler(noted).items()}


def cost_of(outcome: Outcome, stays: dict[str, Stay], folder: Path) -> tuple[float, float]:
    """Add up the seconds from each worker's request until it left, or the server stopped it.

    Second, those in which one may have been given up that joined all the same; it is not billed
    in between.
    """
    log = (folder / "gateway.log").read_text()
    created, stopped = times(log, r"Created worker (\w+)"), times(log, r"Stopping worker (\w+)")
    asked, cost, late = list(outcome.wanted()), 0.0, 0.0
    fewer = [at for (_, before), (at, n) in itertools.pairwise(asked) if n < before]
    for name, created_at in created.items():
        stay = stays.get(name, Stay(math.inf))
        end = min(stay.left, stopped.get(name, math.inf))
        cost += outcome.within([end]) - outcome.within([created_at])
        late += max(
            [stay.joined - at for at in fewer if created_at < at < stay.joined < end] or [0]
        )
    return cost, late


def times(log: str, what: str) -> dict[str, float]:
    """When a line of this form told of each worker, by name."""
    lines = re.findall(rf"\[I (\S+ \S+) DaskGateway\]\S* {what}", log)
    return {name: datetime.fromisoformat(at).timestamp() for at, name in lines}


def wanted(folder: Path) -> list[int]:
    """How many workers the server was told to have, time after time."""
    log = (folder / "gateway.log").read_text()
    return [int(n) for n in re.findall(r"heartbeat \[count: (\d+)", log)]
