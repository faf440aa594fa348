"""Scaling: the named workers go and no other, none comes back, what they hold does not get lost."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import optuna
import pytest
from distributed import Client, LocalCluster, Nanny, SpecCluster, Status, Worker
from distributed.scheduler import Scheduler

import dagsel
from dagsel.errors import ClusterError
from dagsel.execution.cluster import workers_of
from dagsel.execution.cluster_driver import ClusterDriver
from dagsel.execution.elastic import _ByName, elastic_for
from dagsel.execution.process import seconds_since_start
from dagsel.execution.workforce import Workforce
from dagsel.flows import RandomSearch
from dagsel.messages import Note
from dagsel.planning.capacity import ClusterCapacity
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

from .helpers import engine_for, processes, there

TIMEOUT_S = 60
FREE = "127.0.0.1:0"  # not the port that others on this machine may have
SCHEDULER = {"cls": Scheduler, "options": {"dashboard_address": FREE, "port": 0}}


@contextmanager
def cluster_of(n_workers: int, **options: Any) -> Iterator[tuple[LocalCluster, Client]]:
    """A cluster of single-thread workers, in this process if nothing else is said."""
    defaults = {"processes": False, "threads_per_worker": 1, "dashboard_address": FREE}
    kind = options.pop("kind", LocalCluster)
    with (
        kind(n_workers=n_workers, **{**defaults, **options}) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield cluster, client


@contextmanager
def driving(client: Client, cluster: Any = None) -> Iterator[ClusterDriver]:
    """A driver whose requests have been performed when the block ends."""
    driver = elastic_for(client, cluster)
    try:
        yield driver
    finally:
        driver.close()


def arrivals(client: Client) -> int:
    events = [event for _, event in client.get_events("all")]
    return sum(event.get("action") == "add-worker" for event in events)


def test_processes_come_and_the_named_ones_go_for_good() -> None:
    before = processes()
    with cluster_of(1, processes=True) as (cluster, client):
        with driving(client) as driver:
            assert driver.can_scale
            driver.grow(3)
        client.wait_for_workers(3, timeout=TIMEOUT_S)
        first, *_ = there(client)
        data = client.scatter({"held": 17}, workers=[first])
        leaving = [first, there(client)[2]]
        staying = there(client)[1]
        with driving(client) as driver:
            driver.retire(leaving)
        assert there(client) == [staying]
        assert driver.troubles() == []
        assert client.gather(data) == {"held": 17}
        assert driver.wanted == len(cluster.worker_spec) == 1
        cluster.scale(2)
        client.wait_for_workers(2, timeout=TIMEOUT_S)
        assert staying in there(client)
        assert arrivals(client) == 4  # 1, then 3, then the user's own
    assert processes() <= before


def test_the_last_search_that_scales_a_cluster_leaves_it_as_large_as_the_first_found_it(
    digits: ShardedDataset, tmp_path: Path
) -> None:
    workload = SyntheticWorkload()
    with cluster_of(1) as (cluster, client), ExitStack() as second:
        with engine_for(
            client, digits, workload, f"{tmp_path}/first", driver=elastic_for(client)
        ) as engine:
            engine.scale(2)
            client.wait_for_workers(2, timeout=TIMEOUT_S)
            other = engine_for(
                client, digits, workload, f"{tmp_path}/second", driver=elastic_for(client)
            )
            second.enter_context(other).scale(3)
            client.wait_for_workers(3, timeout=TIMEOUT_S)
        assert len(there(client)) == 3  # the second search goes on
        second.close()
        assert len(there(client)) == len(cluster.worker_spec) == 1
        cluster.scale(2)  # what was before is forgotten
        client.wait_for_workers(2, timeout=TIMEOUT_S)
        with engine_for(
            client, digits, workload, f"{tmp_path}/third", driver=elastic_for(client)
        ) as engine:
            engine.scale(3)
            client.wait_for_workers(3, timeout=TIMEOUT_S)
        assert len(there(client)) == len(cluster.worker_spec) == 2


def test_a_search_that_ctrl_c_keeps_from_giving_workers_back_scales_the_cluster_no_more(
    digits: ShardedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one leaves the cluster as large as it finds it."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with cluster_of(1) as (cluster, client):

        def grow(n_workers: int, name: str) -> None:
            about: Any = (SyntheticWorkload(), f"{tmp_path}/{name}")
            with engine_for(client, digits, *about, driver=elastic_for(client)) as engine:
                engine.scale(n_workers)
                client.wait_for_workers(n_workers, timeout=TIMEOUT_S)

        with monkeypatch.context() as patched:
            patched.setattr(client, "unregister_scheduler_plugin", interrupt)
            with pytest.raises(KeyboardInterrupt):
                grow(2, "first")
        grow(3, "second")
        assert len(there(client)) == len(cluster.worker_spec) == 2


class Asked(Nanny):
    """A nanny that notes whether its worker's process had ended when it listened no more."""

    had_ended: ClassVar[list[bool]] = []

    def stop(self) -> None:
        Asked.had_ended.append(self.process is None or self.process.status == Status.stopped)
        super().stop()


def test_a_nanny_listens_until_its_process_has_ended() -> None:
    """A worker that closes asks it first, and would ask for seconds where nobody listens."""
    spec = {"cls": Asked, "options": {"nthreads": 1, "host": "127.0.0.1"}}
    with (
        SpecCluster(dict.fromkeys(range(3), spec), SCHEDULER, spec, silence_logs=50) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(3, timeout=TIMEOUT_S)
        with driving(client, cluster) as driver:
            driver.retire(there(client)[1:])
        assert len(there(client)) == 1
        assert Asked.had_ended == [True, True]


class Queued:
    """A job that waits in a batch system's queue."""

    status = Status.running

    def __init__(self, scheduler: str, name: str) -> None:
        pass

    def __await__(self) -> Any:
        return asyncio.sleep(0).__await__()

    async def close(self) -> None:
        self.status = Status.closed


def test_those_that_have_not_come_are_given_up_and_those_there_stay() -> None:
    workers = {name: {"cls": Worker, "options": {"nthreads": 1}} for name in range(2)}
    with (
        SpecCluster(scheduler=SCHEDULER, workers=workers, worker={"cls": Queued}) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        old = there(client)
        for n_wanted, n_places in ((5, 5), (3, 3), (1, 2), (4, 4)):
            with driving(client) as driver:
                driver.grow(n_wanted)
            assert driver.wanted == len(cluster.worker_spec) == n_places
            assert there(client) == old
        with driving(client) as driver:
            driver.retire(old[:1])  # and the two in the queue may still come
        assert driver.wanted == 3
        assert there(client) == old[1:]


class Instance(Queued):
    """A machine as dask-cloudprovider's: it has a name of its own, and stays as its worker ends."""

    def __init__(self, scheduler: str, name: str, **options: Any) -> None:
        self.name = f"dask-{uuid.uuid4().hex[:6]}-worker"
        self.worker = Worker(scheduler, name=self.name, **options)

    def __await__(self) -> Any:
        return self.worker.__await__()

    async def close(self) -> None:
        await self.worker.close()
        await super().close()


def test_of_workers_with_names_of_their_own_the_named_ones_go() -> None:
    spec = {"cls": Instance, "options": {"nthreads": 1}}
    with (
        SpecCluster(dict.fromkeys(range(4), spec), SCHEDULER, spec) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(4, timeout=TIMEOUT_S)
        leaves, *stay = there(client)
        with driving(client) as driver:
            driver.grow(2)  # gives up nothing: all have come
        assert there(client) == [leaves, *stay]
        with driving(client) as driver:
            driver.retire([leaves])
        assert there(client) == stay
        assert driver.wanted == len(cluster.worker_spec) == 3


def test_one_that_comes_before_dask_tells_which_it_is_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dask tells it once all have started that were asked for together."""
    monkeypatch.setattr("dagsel.execution.spec_cluster.CLOSE_TIMEOUT_S", 0.1)
    may_start = threading.Event()

    class Late(Queued):
        def __await__(self) -> Any:
            return until(may_start.is_set).__await__()

    kinds = iter([Instance, Instance, Late, Instance])
    spec = {"cls": lambda scheduler, name: next(kinds)(scheduler, name)}
    with (
        SpecCluster({0: spec}, SCHEDULER, spec) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        try:
            client.wait_for_workers(1, timeout=TIMEOUT_S)
            first = there(client)
            driver = elastic_for(client)
            driver.grow(3)
            client.wait_for_workers(2, timeout=TIMEOUT_S)
            both = there(client)
            driver.grow(1)
            driver.close()
            assert there(client) == both
            assert driver.wanted == 3
            driver.retire({*both} - {*first})
            driver.close()
            assert there(client) == first
        finally:
            may_start.set()
        cluster.sync(until, lambda: len(cluster.workers) > 1)
        driver.grow(2)  # the place of the one that was closed is not taken for a worker to come
        driver.close()
        client.wait_for_workers(2, timeout=TIMEOUT_S)
        assert len({*there(client)} & {*both}) == 1


def lose(cluster: LocalCluster, client: Client) -> str:
    """Make a worker disappear, as a machine that the provider takes back."""
    (lost,) = client.retire_workers([there(client)[0]], close_workers=True)
    return str(lost)


def test_a_lost_worker_is_replaced_when_it_is_wanted() -> None:
    with cluster_of(2) as (cluster, client):
        lost = lose(cluster, client)
        cluster.sync(
            until, lambda: any(w.status == Status.closed for w in cluster.workers.values())
        )
        with driving(client) as driver:
            driver.grow(2)
        client.wait_for_workers(2, timeout=TIMEOUT_S)
        assert lost not in there(client)
        assert len(cluster.worker_spec) == 2


def test_a_leaving_worker_does_not_count_until_it_has_gone() -> None:
    with cluster_of(2) as (_, client):
        leaving = there(client)[0]
        with driving(client) as driver:
            driver.grow(2, besides=[leaving])
        assert driver.wanted == 3
        client.wait_for_workers(3, timeout=TIMEOUT_S)
        with driving(client) as driver:
            driver.retire([leaving])
            driver.grow(2, besides=[leaving])  # as one who has not heard of its end
        assert driver.wanted == 2
        assert len(there(client)) == 2
        assert arrivals(client) == 3


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_workers_that_go_one_after_the_other_go_together() -> None:
    closed, may_begin = list[int](), threading.Event()

    class Counting(_ByName):
        def fill(self, n_workers: int, besides: Collection[str]) -> None:
            may_begin.wait(TIMEOUT_S)

        def close_workers(self, workers: Collection[str]) -> None:
            closed.append(len(workers))
            _ByName.close_workers(self, workers)

    with cluster_of(4) as (cluster, client):
        driver = Counting(client, cluster)
        first, second, third, stays = there(client)
        data = client.scatter("held", workers=[first])
        driver.grow(4)
        for worker in (first, second, third):
            driver.retire([worker])
        may_begin.set()
        driver.close()
        assert closed == [3]
        assert there(client) == [stays]
        assert client.gather(data) == "held"


def test_a_lost_worker_that_is_retired_does_not_come_back() -> None:
    with cluster_of(2) as (cluster, client):
        (stays,) = there(client)[1:]
        lost = lose(cluster, client)
        with driving(client) as driver:
            driver.retire([lost])
        assert driver.wanted == 1
        with driving(client) as driver:
            driver.grow(1)
        assert there(client) == [stays]


def test_one_that_is_lost_as_it_is_given_back_leaves_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cluster_of(2) as (cluster, client), driving(client) as driver:

        def lose(workers: Collection[str]) -> None:
            cluster.sync(cluster.workers[1].close)
            raise ClusterError(f"no other worker takes what {workers} holds")

        monkeypatch.setattr(driver, "close_workers", lose)
        driver.give_back(1, lambda: there(client))
        assert driver.close()
        assert len(cluster.worker_spec) == 1
        assert "no other worker takes" in driver.troubles()[0]


def test_one_that_is_lost_before_the_others_are_chosen_leaves_no_place() -> None:
    with cluster_of(2) as (cluster, client), driving(client) as driver:

        def left() -> list[str]:
            for worker in [*cluster.workers.values()]:
                cluster.sync(worker.close)
            return there(client)

        driver.give_back(0, left)
        assert driver.close()
        assert driver.troubles() == []
        assert cluster.worker_spec == {}


def test_one_that_comes_as_the_others_are_closed_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of several workers has begun as its first one has: the others may come later."""
    with cluster_of(2) as (cluster, client), driving(client) as driver:
        close, late = driver.close_workers, [1]

        def close_as_one_comes(workers: Collection[str]) -> None:
            close(workers)
            if late:
                cluster.scale(late.pop())
                client.wait_for_workers(1, timeout=TIMEOUT_S)

        monkeypatch.setattr(driver, "close_workers", close_as_one_comes)
        driver.give_back(0, lambda: there(client))
        assert driver.close()
        assert driver.troubles() == []
        assert cluster.worker_spec == {}
        assert there(client) == []


def test_one_that_is_still_to_come_stays_wanted_when_a_lost_worker_is_retired() -> None:
    workers = {name: {"cls": Worker, "options": {"nthreads": 1}} for name in range(2)}
    with (
        SpecCluster(scheduler=SCHEDULER, workers=workers, worker={"cls": Queued}) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        cluster.scale(3)
        lost = lose(cluster, client)
        cluster.sync(
            until, lambda: any(w.status == Status.closed for w in cluster.workers.values())
        )
        with driving(client) as driver:
            driver.retire([lost])
        assert driver.wanted == 2


def test_a_worker_whose_data_nobody_takes_stays() -> None:
    with cluster_of(1) as (_, client):
        data = client.scatter("held")
        with driving(client) as driver:
            driver.retire(there(client))
        assert "no other worker takes" in driver.troubles()[0]
        assert client.gather(data) == "held"
        assert driver.wanted == 1


def test_workers_are_seen_though_the_client_asks_without_them(
    digits: ShardedDataset, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Client._update_scheduler_info

    async def twice(self: Client, n_workers: int = 0) -> None:
        await update(self, n_workers)
        await update(self)  # as the client does every two seconds

    monkeypatch.setattr(Client, "_update_scheduler_info", twice)
    with cluster_of(1) as (cluster, client):
        assert client.scheduler_info(n_workers=-1)["workers"] == {}
        assert list(workers_of(client)) == [cluster.workers[0].address]
        with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
            assert engine.workers == {cluster.workers[0].address}


def test_adapt_stays_in_charge() -> None:
    with cluster_of(1) as (cluster, client):
        driver = elastic_for(client)
        cluster.adapt(minimum=1, maximum=2)
        assert not driver.can_scale
        assert "adapt" in driver.why_not
        assert cluster._adaptive is not None
        cluster._adaptive.stop()
        assert driver.can_scale


def test_a_cluster_that_adapts_grows_for_a_search(digits: ShardedDataset, run_dir: str) -> None:
    with cluster_of(1) as (cluster, _):
        assert cluster.scheduler is not None
        scheduler: Any = cluster.scheduler
        of_dask = scheduler.adaptive_target
        cluster.adapt(minimum=1, maximum=2, interval="50ms")
        run = dagsel.optimize(
            optuna.create_study(direction="maximize"),
            SyntheticWorkload(seconds=0.1),
            digits,
            space=lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)},
            flow=RandomSearch(max_epochs=4, n_trials=8),
            metric="value",
            cluster=cluster,
            run_dir=run_dir,
        )
        assert run.timeline().worker.nunique() >= 2  # Dask may take one away and start another
        assert scheduler.adaptive_target == scheduler.handlers["adaptive_target"] == of_dask
        assert cluster._adaptive is not None
        cluster._adaptive.stop()


def test_a_client_alone_scales_nothing() -> None:
    with cluster_of(1) as (cluster, _), Client(cluster.scheduler_address) as client:
        with driving(client) as driver:
            assert not driver.can_scale
            assert "pass cluster=" in driver.why_not
            driver.grow(2)
        assert "pass cluster=" in driver.troubles()[0]
        assert len(there(client)) == 1
        assert elastic_for(client, cluster).can_scale


def test_a_cluster_of_listed_hosts_scales_nothing() -> None:
    workers = {0: {"cls": Worker, "options": {"nthreads": 1}}}
    with SpecCluster(scheduler=SCHEDULER, workers=workers) as cluster:
        with Client(cluster, set_as_default=False) as client:
            assert "made with" in elastic_for(client).why_not


class OnlyANumber:
    """Takes a number of workers alone, as a gateway does: the scheduler says which ones go."""

    def __init__(self, cluster: LocalCluster, n_workers: int = 0) -> None:
        self.cluster, self.scheduler = cluster, cast(Any, cluster.scheduler)
        self.n_workers = n_workers  # that it was made with, as dask-kubernetes' KubeCluster has it
        self.told: list[int] = []

    def scale(self, n_workers: int) -> None:
        self.told.append(n_workers)
        self.cluster.sync(self._close, n_workers)

    async def _close(self, n_workers: int) -> None:
        leaving = self.scheduler.workers_to_close(target=n_workers, attribute="name")
        await self.scheduler.retire_workers(names=leaving, close_workers=True, remove=True)


def test_one_that_comes_though_it_was_given_up_changes_no_number() -> None:
    with cluster_of(2) as (cluster, client):
        number = OnlyANumber(cluster)
        driver = elastic_for(client, number)
        first = there(client)
        for n_workers in (4, 2):  # gives up two that have not come
            driver.grow(n_workers)
            driver.close()
        cluster.scale(3)
        client.wait_for_workers(3, timeout=TIMEOUT_S)
        (late,) = {*there(client)} - {*first}
        driver.grow(2)
        driver.retire([late])
        driver.close()
        assert there(client) == first
        assert driver.wanted == 2
        assert number.told == [4, 2, 2]


@contextmanager
def without_workers(cluster: OnlyANumber, client: Client) -> Iterator[Workforce]:
    """The workforce of a search that begins while no worker is there."""
    driver = elastic_for(client, cluster)
    workforce = Workforce(driver, driver.capacity(), time.monotonic)
    workforce.begin({}, time.monotonic())
    workforce.ask_again()
    yield workforce
    driver.close()
    workforce.give_back(lambda: {*there(client)})


@pytest.mark.parametrize(("n_wanted", "told"), [(2, [2, 3, 3]), (4, [4, 3, 3]), (None, [])])
def test_workers_that_are_still_to_come_are_not_given_up(
    n_wanted: int | None, told: list[int]
) -> None:
    with cluster_of(0) as (cluster, client):
        number = OnlyANumber(cluster, n_workers=3)
        with without_workers(number, client) as workforce:
            cluster.scale(1)
            client.wait_for_workers(1, timeout=TIMEOUT_S)
            if n_wanted is not None:
                workforce.want(n_wanted)
        assert number.told == told  # in the end it has the size that it had


def test_workers_that_have_come_and_gone_are_not_waited_for() -> None:
    with cluster_of(2) as (cluster, client):
        number = OnlyANumber(cluster, n_workers=2)
        number.scale(0)
        with without_workers(number, client):
            pass
        assert number.told == [0, 1, 0, 0]


class TwoDevices(LocalCluster):
    """Says no to a third worker in the way that dask-cuda's `LocalCUDACluster` does."""

    def new_worker_spec(self) -> Any:
        if len(self.worker_spec) == 2:
            raise ValueError("Can not scale beyond visible devices")
        return super().new_worker_spec()


def test_a_cluster_grows_as_far_as_it_can() -> None:
    with cluster_of(1, kind=TwoDevices) as (_, client):
        with driving(client) as driver:
            told: list[int] = []
            driver.on_scaled = lambda: told.append(driver.wanted)
            driver.grow(3)
        assert told == [2]
        client.wait_for_workers(2, timeout=TIMEOUT_S)
        assert "beyond visible devices" in driver.troubles()[0]
        assert driver.wanted == 2


def test_workers_that_the_cluster_refuses_are_not_billed(
    digits: ShardedDataset, run_dir: str
) -> None:
    with cluster_of(1, kind=TwoDevices) as (_, client):
        driver = elastic_for(client)
        with engine_for(client, digits, SyntheticWorkload(), run_dir, driver=driver) as engine:
            engine.scale(4)
            heard: list[Any] = []
            while not any(
                isinstance(m, Note) and "beyond visible devices" in m.text for m in heard
            ):
                heard += engine.messages(timeout_s=0.1)
            assert engine.bill.n_billed == 2


def test_a_cluster_that_adapts_from_no_worker_starts_one(
    digits: ShardedDataset, run_dir: str
) -> None:
    with cluster_of(0) as (cluster, client):
        cluster.adapt(minimum=0, maximum=1, interval="20ms")
        with engine_for(client, digits, SyntheticWorkload(), run_dir) as engine:
            assert len(engine.workers) == 1


def test_a_worker_that_starts_as_it_is_given_up_is_billed_until_it_is_closed() -> None:
    with cluster_of(2) as (_, client):
        driver = elastic_for(client)
        workforce = Workforce(driver, driver.capacity(), time.monotonic)
        workforce.begin({}, time.monotonic())
        names = {worker: str(about["name"]) for worker, about in workers_of(client).items()}
        (first, its_name), (late, late_name) = names.items()
        workforce.join(first, its_name)
        workforce.want(1)
        driver.close()
        assert workforce.bill.n_billed == 2  # the other one is there, and cannot run units yet
        workforce.join(late, late_name)
        workforce.drain(late, retire=True)
        workforce.retire(late)
        driver.close()
        assert workforce.bill.n_billed == 1


def test_a_job_in_a_queue_is_billed_from_its_start_and_no_second_twice() -> None:
    now = 100.0
    workforce = Workforce(None, ClusterCapacity(bills_requests=False), lambda: now)
    workforce.begin({"found": "f"}, 100.0)
    now = 110.0
    workforce.join("found", "f", age_s=500.0)
    workforce.join("late", "late", age_s=4.0)
    assert workforce.bill.worker_seconds(now) == 10.0 + 4.0
    now = 120.0
    workforce.miss("late")
    now = 122.0
    workforce.join("again", "late", age_s=16.0)  # by its nanny, in the same job
    now = 130.0
    workforce.join("before", "b", age_s=500.0)  # it had started, and had not come
    assert workforce.bill.worker_seconds(now) == 30.0 + (4.0 + 20.0) + 30.0


def test_a_worker_may_be_the_first_process_of_a_container() -> None:
    """No process has started it there that could tell since when it runs."""
    contained = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*contained, "true"]).returncode:
        pytest.skip("this machine lets nobody begin a container")
    code = "import os; from dagsel.execution.process import seconds_since_start as age\n"
    code += "print(os.getpid(), os.getppid(), 0.0 <= age() < 600.0)"
    told = subprocess.run([*contained, sys.executable, "-c", code], capture_output=True, text=True)
    assert told.stdout.split() == ["1", "0", "True"], told.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_knows_its_age_though_the_clock_was_set_since_the_machine_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, now = seconds_since_start(), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)
    assert before <= seconds_since_start() < before + 3600.0


def test_workers_that_were_there_before_the_run_are_there_after_it(
    digits: ShardedDataset, run_dir: str
) -> None:
    with cluster_of(1) as (_, client):
        before = there(client)
        driver = elastic_for(client)
        with engine_for(client, digits, SyntheticWorkload(), run_dir, driver=driver) as engine:
            engine.scale(3)
            while len(engine.workers) < 3:  # threads of one process count as one worker
                assert list(engine.messages(timeout_s=TIMEOUT_S))
        assert there(client) == before


def test_a_cluster_that_is_still_being_scaled_as_the_run_ends_is_warned_of(
    digits: ShardedDataset, run_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    may_begin = threading.Event()

    class Slow(_ByName):
        def fill(self, n_workers: int, besides: Collection[str]) -> None:
            may_begin.wait(TIMEOUT_S)

        def close(self, *, timeout_s: float = 0.0) -> bool:
            return super().close(timeout_s=0.0)

    with cluster_of(1) as (cluster, client):
        driver = Slow(client, cluster)
        with engine_for(client, digits, SyntheticWorkload(), run_dir, driver=driver) as engine:
            engine.scale(2)
        may_begin.set()
    assert "the cluster is still being scaled" in caplog.text


class Job:
    """Two workers that come and go together, as those of a batch system's job."""

    def __init__(self, scheduler: str, name: str) -> None:
        self.workers = [Nanny(scheduler, nthreads=1, name=f"{name}-{k}") for k in range(2)]

    @property
    def status(self) -> Any:
        return self.workers[0].status

    def __await__(self) -> Any:
        return self._start().__await__()

    async def _start(self) -> Job:
        for worker in self.workers:
            await worker
        return self

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()


@contextmanager
def jobs_of_two(n_jobs: int) -> Iterator[tuple[SpecCluster, Client]]:
    """A cluster of jobs of two workers each, all of which have come."""
    worker = {"cls": Job, "options": {}, "group": ["-0", "-1"]}
    with (
        SpecCluster(scheduler=SCHEDULER, worker=worker) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        cluster.scale(n_jobs)
        client.wait_for_workers(2 * n_jobs, timeout=TIMEOUT_S)
        yield cluster, client


def test_a_job_goes_with_its_last_worker() -> None:
    with jobs_of_two(2) as (cluster, client):
        driver = elastic_for(client)
        assert (driver.wanted, driver.node_size) == (4, 2)
        workers = workers_of(client).items()
        job = {address: driver.node_of(str(about["name"])) for address, about in workers}
        assert sorted(job.values()) == ["0", "0", "1", "1"]
        one, other = (address for address in job if job[address] == "0")
        driver.grow(1)  # gives up nothing: all have come
        driver.retire([one])
        driver.close()
        assert set(there(client)) == set(job) - {one}
        with driving(client) as driver:
            driver.retire([other])
        assert {job[address] for address in there(client)} == {"1"}
        assert len(there(client)) == 2
        assert list(cluster.worker_spec) == [1]


def test_as_many_jobs_are_asked_for_as_hold_the_workers() -> None:
    with jobs_of_two(1) as (cluster, client):
        for n_workers, n_jobs in ((3, 2), (4, 2), (5, 3), (1, 1), (2, 1)):
            with driving(client) as driver:
                driver.grow(n_workers)
            assert len(cluster.worker_spec) == n_jobs


def test_a_job_is_billed_as_a_whole(digits: ShardedDataset, run_dir: str) -> None:
    with jobs_of_two(2) as (_, client):
        driver = elastic_for(client)
        with engine_for(client, digits, SyntheticWorkload(), run_dir, driver=driver) as engine:
            assert engine.n_workers == 4
            assert engine.bill.n_billed == 2
            one = next(iter(engine.bill.nodes["0"]))
            client.retire_workers([one], close_workers=True)
            while one in engine.workers:
                list(engine.messages(timeout_s=TIMEOUT_S))
            assert engine.bill.n_billed == 2  # its other half is there
            assert engine.bill.node_size == 2


def test_the_workers_of_a_job_go_together(digits: ShardedDataset, run_dir: str) -> None:
    with jobs_of_two(3) as (_, client):
        driver: Any = elastic_for(client)
        close_workers, may_close = driver.close_workers, threading.Event()

        def close_slowly(workers: Any) -> None:
            close_workers(workers)
            may_close.wait(TIMEOUT_S)

        driver.close_workers = close_slowly
        with engine_for(client, digits, SyntheticWorkload(), run_dir, driver=driver) as engine:
            jobs = set(engine.bill.nodes.values())
            engine.scale(3)  # one job goes; half of another one would save nothing
            while len(engine.workers) > 4:
                list(engine.messages(timeout_s=TIMEOUT_S))
            assert engine.n_workers == 4
            assert set(engine.bill.nodes.values()) == jobs  # billed until the cluster has closed it
            may_close.set()
            driver.close()
            assert set(engine.bill.nodes.values()) < jobs
            assert engine.bill.n_billed == 2
