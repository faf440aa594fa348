"""Spot machines: cheap ones come first and are replaced, notice costs a batch, money is bounded."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Nanny, SpecCluster, Status
from distributed.scheduler import Scheduler

import dagsel
from dagsel.errors import ClusterError, SearchError
from dagsel.execution.cluster import workers_of
from dagsel.execution.spec_cluster import END_S
from dagsel.flow import Context, Decision, Scale
from dagsel.flows import RandomSearch
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize

from .helpers import processes

FREE = "127.0.0.1:0"
UNIT_S, N_BATCHES, N_SHARDS = 0.4, 8, 4
MAX_EPOCHS, N_TRIALS = 3, 6
N_NEEDED = MAX_EPOCHS * N_TRIALS * N_SHARDS * N_BATCHES
#: One batch, the time that a process has to end by itself, and 3 s for a machine that does other
#: things as well.
OVERSHOOT_S = UNIT_S / N_BATCHES + END_S + 3
DEMAND = dagsel.Workers("demand", "3600 USD")  # a dollar a second
SPOT = dagsel.Workers("spot", "720 USD", spot=True, most=2)
POOLS = [DEMAND, SPOT]


def value(config: Any, epoch: int) -> float:
    return float(config["x"]) - 1 / (1 + epoch)


def logged(path: Path) -> SyntheticWorkload:
    """A workload that writes a letter to a file whenever it begins a batch."""

    class Logged(SyntheticWorkload):
        def _train(
            self, state: Any, shard: Any, config: Any, visit: Any, should_stop: Any, speedup: float
        ) -> Any:
            def begins() -> None:
                with path.open("a") as file:
                    file.write("b")

            def stop() -> bool:
                if should_stop():
                    return True
                begins()
                return False

            begins()
            return super()._train(state, shard, config, visit, stop, speedup)

    return Logged(UNIT_S, n_batches=N_BATCHES, value=lambda config, epoch: value(config, epoch))


@dataclass
class Growing(RandomSearch):
    """A search that wants four workers."""

    def start(self, context: Context) -> list[Decision]:
        return [Scale(4), *super().start(context)]


class Machine(Nanny):
    """A machine of a provider, with a worker process: one that is taken back has gone."""

    async def _on_worker_exit(self, exitcode: Any) -> None:
        if self.status not in (Status.closing, Status.closed):
            await self.close()


@contextmanager
def provider(n_workers: int = 1) -> Iterator[tuple[SpecCluster, Client]]:
    """A cluster of machines of its own, of which no process is left."""
    before = processes()
    options = {"nthreads": 2, "host": "127.0.0.1", "dashboard_address": FREE, "silence_logs": 50}
    worker = {"cls": Machine, "options": options}
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": FREE, "port": 0}}
    workers = dict.fromkeys(range(n_workers), worker)
    with (
        SpecCluster(workers, scheduler, worker, silence_logs=50) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield cluster, client
    assert processes() <= before


@pytest.fixture
def search(optimize: Optimize, tmp_path: Path) -> Optimize:
    flow = Growing(max_epochs=MAX_EPOCHS, n_trials=N_TRIALS)
    return partial(
        optimize, flow=flow, workload=logged(tmp_path / "batches"), small_population="hop"
    )


class Provider(threading.Thread):
    """Takes spot machines back, one after the other, while a search runs."""

    def __init__(self, client: Client, seed: int, *, notice: bool, pause_s: float = 2.0) -> None:
        super().__init__(daemon=True)
        self.client, self.notice, self.pause_s = client, notice, pause_s
        self.drawn = random.Random(seed)
        self.taken: list[str] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(self.pause_s * self.drawn.uniform(0.5, 1.5)):
            workers = workers_of(self.client).items()
            there = [worker for worker, about in workers if "spot" in str(about["name"])]
            if there:
                taken = self.drawn.choice(there)
                with suppress(OSError, ProcessLookupError):  # it is going already
                    pids = self.client.run(os.getpid, workers=[taken], on_error="ignore")
                    for pid in pids.values():
                        os.kill(pid, signal.SIGTERM if self.notice else signal.SIGKILL)
                        self.taken.append(taken)


@contextmanager
def taking_back(
    client: Client, seed: int, *, notice: bool, pause_s: float = 2.0
) -> Iterator[Provider]:
    provider = Provider(client, seed, notice=notice, pause_s=pause_s)
    provider.start()
    try:
        yield provider
    finally:
        provider.over.set()
        provider.join(60)
        assert not provider.is_alive()


def check_nothing_lost(run: dagsel.Run) -> None:
    trials = run.record.trials.values()
    assert [trial.state for trial in trials] == ["complete"] * N_TRIALS
    config = run.record.trials[run.best.trial].config
    seen = run.best_model()
    assert run.best_value == value(config, MAX_EPOCHS)
    assert set(Counter(seen).values()) == {1}
    assert len(seen) == MAX_EPOCHS * N_SHARDS * N_BATCHES


SEEDS = range(int(os.environ.get("SPOT_SEEDS", "1")))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("notice", [True, False])
def test_machines_that_are_taken_back_again_and_again_lose_nothing(
    search: Any, tmp_path: Path, notice: bool, seed: int
) -> None:
    with provider() as (cluster, client):
        with taking_back(client, seed, notice=notice) as taker:
            run = search(cluster=cluster, workers=POOLS)
        assert len(taker.taken) > 2  # so they were replaced: two can be there at once
        assert list(cluster.worker_spec) == [0]  # as it was
    check_nothing_lost(run)
    n_lost = len((tmp_path / "batches").read_text()) - N_NEEDED
    assert 0 <= n_lost <= len(taker.taken) * (1 if notice else N_BATCHES)
    # Of two on-demand and two spot machines, some of the time: between their prices.
    assert 0.2 * run.worker_seconds < run.money < run.worker_seconds
    assert run.currency == "USD"
    assert run.plan.money == pytest.approx(run.money)


@pytest.mark.slow
def test_a_budget_in_money_bounds_what_all_cost(search: Any) -> None:
    with provider() as (cluster, client):
        with taking_back(client, 0, notice=True):
            flow = Growing(max_epochs=MAX_EPOCHS, n_trials=20 * N_TRIALS)  # more than it buys
            run = search(flow=flow, cluster=cluster, workers=POOLS, budget="40 USD")
    assert run.record.finished
    assert 40 * 0.8 < run.money <= 40 + (2 * 1.0 + 2 * 0.2) * OVERSHOOT_S
    # At the price of the dearest it would have been over long before.
    assert run.worker_seconds > 40
    assert run.best_value


@pytest.mark.slow
def test_a_search_that_scales_nothing_keeps_its_workers(search: Any) -> None:
    """An empty cluster has as many as the pools may have; the cheap ones of one pool only."""
    only = dagsel.Workers("spot", "720 USD", spot=True, most=2)
    with provider(0) as (cluster, client):
        flow = RandomSearch(max_epochs=2, n_trials=4)
        with taking_back(client, 1, notice=True, pause_s=6.0) as taker:
            run = search(flow=flow, cluster=cluster, workers=[only])
        assert taker.taken
        assert cluster.worker_spec == {}
    assert run.money == pytest.approx(run.worker_seconds * 0.2)


@pytest.mark.slow
def test_a_run_goes_on_without_pools_at_the_price_of_the_dearest(
    search: Any, tmp_path: Path
) -> None:
    with provider() as (cluster, _):

        def stop(study: Any, trial: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            search(cluster=cluster, workers=POOLS, budget="200 USD", callbacks=[stop])
        options: dict[str, Any] = {
            "workload": logged(tmp_path / "batches"),
            "space": lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)},
            "flow": Growing(max_epochs=MAX_EPOCHS, n_trials=N_TRIALS),
        }
        folder = str(tmp_path / "run")
        euros = [dagsel.Workers("a", "1 EUR")]
        with pytest.raises(SearchError, match="the budget is in USD, and the dearest of workers="):
            dagsel.resume(folder, cluster=cluster, workers=euros, **options)
        run = dagsel.resume(folder, cluster=cluster, **options)
    check_nothing_lost(run)
    assert run.money is not None


def test_pools_are_refused_before_anything_starts(search: Any, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="there is no cluster object"):
        search(workers=POOLS)
    with pytest.raises(SearchError, match="leave out price_per_worker_hour"):
        with provider() as (cluster, _):
            search(cluster=cluster, workers=POOLS, price_per_worker_hour="1 USD")
    with pytest.raises(SearchError, match="must be a list of pools"):
        search(workers="spot")
    assert not (tmp_path / "run").exists()
