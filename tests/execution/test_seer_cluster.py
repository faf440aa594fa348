"""Searches in stages on real clusters: deadline and budget hold, whatever becomes of workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from distributed import Client, LocalCluster

import dagsel
from dagsel.errors import DagselError, NoWorkersError, SearchError, TooLittleTimeError
from dagsel.execution.cluster import close
from dagsel.flow import Flow
from dagsel.flows import SEER, RandomSearch
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize

from . import seer_driver
from .helpers import BY_NIGHT, processes, there

UNIT_S, N_BATCHES, N_SHARDS = 0.5, 10, 4
#: One batch, plus 2 s, plus as much for a machine that does other things as well.
OVERSHOOT_S = UNIT_S / N_BATCHES + 2 + 3


WORKLOAD = SyntheticWorkload(
    UNIT_S,
    n_batches=N_BATCHES,
    value=lambda config, epoch: float(config["x"]) - 1 / (1 + epoch),
)


@contextmanager
def cluster_of(n_workers: int, **options: Any) -> Iterator[LocalCluster]:
    """A cluster of single-thread worker processes, of which none is left."""
    before = processes()
    options = {"dashboard_address": "127.0.0.1:0", "silence_logs": 50, **options}
    cluster = LocalCluster(n_workers=n_workers, threads_per_worker=1, host="127.0.0.1", **options)
    try:
        yield cluster
    finally:
        close(cluster)
    assert processes() <= before


@pytest.fixture
def search(optimize: Optimize) -> Optimize:
    def call(flow: Flow, **given: Any) -> dagsel.Run:
        if "cluster" in given:  # its workers sleep, so cores do not count, and import no torch
            given = {"max_cluster_workers": 4, "worker_startup": 0.5, **given}
        return optimize(flow, **{"workload": WORKLOAD, **given})

    return call


def check_best(run: dagsel.Run) -> None:
    """The best model is what was reported, and saw each batch once and in time."""
    config = run.record.trials[run.best.trial].config
    seen = run.best_model()
    assert run.best_value == WORKLOAD.value(config, max(epoch for epoch, _, _ in seen))
    if run.record.trials[run.best.trial].state == "complete":
        assert run.best_value == run.study.best_value
    assert set(Counter(seen).values()) == {1}
    complete = set(product(range(1, run.best.epoch), range(N_SHARDS), range(N_BATCHES)))
    assert complete <= set(seen)


def sizes(client: Client) -> list[int]:
    """How many workers there were, time after time."""
    events = [event for _, event in client.get_events("all")]
    by_action = {"add-worker": 1, "remove-worker": -1}
    changes = [by_action[e["action"]] for e in events if e.get("action") in by_action]
    return [*accumulate(changes)]


@pytest.mark.slow
def test_a_cluster_follows_the_stages_within_deadline_and_budget(search: Optimize) -> None:
    flow = SEER("15 s", 46, reduction_factor=2, max_workers_per_trial=1, min_stage=3, mode="paper")
    # The first stage is of four whatever the start takes, up to 3 s; of 40 it depends on 0.1 s.
    assert [stage.n_workers for stage in flow.plan.stages] == [4, 2]
    with cluster_of(1) as cluster, Client(cluster, set_as_default=False) as client:
        limits = {"deadline": "15 s", "budget": 46, "price_per_worker_hour": "3.60 USD"}
        run = search(flow, cluster=cluster, **limits)
        assert max(sizes(client)) == 4
        assert len(there(client)) == len(cluster.worker_spec) == 1  # as it was
    assert run.record.seconds <= 15 + OVERSHOOT_S
    assert run.worker_seconds <= 46 + 4 * OVERSHOOT_S
    assert run.money == pytest.approx(run.worker_seconds / 1000)
    assert run.record.notes == []
    assert run.failures == []
    assert run.timeline().worker.nunique() == 4
    check_best(run)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=BY_NIGHT)])
def test_workers_are_lost_again_and_again(how: signal.Signals, search: Optimize) -> None:
    flow = SEER("18 s", 48, reduction_factor=2, max_workers_per_trial=2, min_stage=3, mode="paper")
    assert [stage.n_trials for stage in flow.plan.stages] == [(2, 1), (1, 0)]
    with cluster_of(1) as cluster, Client(cluster, set_as_default=False) as client:
        with losing(cluster, how, every_s=2.5) as lost:
            run = search(flow, cluster=cluster, deadline="18 s", budget=60)
        arrivals = sum(e.get("action") == "add-worker" for _, e in client.get_events("all"))
        # With notice the next one may come before the last one has gone. How many come, and are
        # lost, before the time is over depends on what else the machine does.
        assert 2 <= max(sizes(client)) <= (4 if how == signal.SIGKILL else 5)
        assert len(lost) >= 2
        assert arrivals > max(sizes(client)), "a lost one is replaced"
        client.wait_for_workers(1)
        assert len(cluster.worker_spec) == 1
    assert run.record.seconds <= 18 + OVERSHOOT_S
    assert run.worker_seconds <= 60 + 4 * OVERSHOOT_S
    assert run.failures == []
    assert {trial.state for trial in run.record.trials.values()} == {"complete", "pruned"}
    check_best(run)


@contextmanager
def losing(cluster: LocalCluster, how: signal.Signals, *, every_s: float) -> Iterator[list[int]]:
    """Send a signal to a random worker process again and again, when all those wanted are there."""
    chance, lost, is_over = random.Random(7), list[int](), threading.Event()

    def lose() -> None:
        while not is_over.wait(every_s):
            while len(pids := come()) < max(1, len(cluster.worker_spec)):
                if is_over.wait(0.05):
                    return
            lost.append(chance.choice(pids))
            os.kill(lost[-1], how)

    def come() -> list[int]:
        assert cluster.scheduler is not None
        known = cluster.scheduler.workers
        nannies = [nanny for nanny in list(cluster.workers.values()) if nanny.pid not in lost]
        return [nanny.pid for nanny in nannies if nanny.pid and nanny.worker_address in known]

    thread = threading.Thread(target=lose)
    thread.start()
    try:
        yield lost
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
def test_a_driver_that_is_killed_between_stages_is_resumed(tmp_path: Path) -> None:
    data = {"x": np.zeros((400, 4), np.float32)}
    ShardedDataset.write(str(tmp_path / "data.zarr"), data, n_shards=N_SHARDS)
    folder = RunDir(str(tmp_path / "run"))
    with cluster_of(3) as cluster:
        command = [sys.executable, "-m", "tests.execution.seer_driver", str(tmp_path)]
        driver = subprocess.Popen([*command, cluster.scheduler_address])
        while not has_paused(folder):  # a stage is over
            with suppress(subprocess.TimeoutExpired):
                driver.wait(0.05)
            assert driver.poll() is None
        driver.kill()
        driver.wait()
        with Client(cluster, set_as_default=False) as client:
            run = dagsel.resume(
                folder.url, client, workload=seer_driver.workload(), space=seer_driver.space
            )
    assert len(run.record.sessions) == 2
    assert run.record.seconds <= seer_driver.DEADLINE_S + OVERSHOOT_S
    assert not run.failures
    assert run.record.best is not None
    assert run.record.best.is_complete
    counts = Counter(run.best_model())
    assert set(counts.values()) == {1}
    epochs = [epoch for trial in run.record.trials.values() for epoch in trial.epochs]
    assert all(epoch.metrics["miscounted"] == 0 for epoch in epochs)


def has_paused(folder: RunDir) -> bool:
    try:
        entries = folder.journal.read()
    except DagselError:  # it is not there yet
        return False
    return any(entry.get("event", {}).get("is") == "Paused" for entry in entries)


def test_the_only_worker_is_asked_for_and_asked_for_again(search: Optimize) -> None:
    with cluster_of(0) as cluster:

        def lose(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
            if trial.number == 0:
                (nanny,) = cluster.workers.values()
                os.kill(nanny.pid, signal.SIGTERM)

        run = search(
            RandomSearch(max_epochs=1, n_trials=3, n_concurrent=1),
            workload=SyntheticWorkload(0.2, n_batches=N_BATCHES, value=WORKLOAD.value),
            cluster=cluster,
            max_cluster_workers=None,
            callbacks=[lose],
        )
        assert cluster.worker_spec == {}
        assert cluster.scheduler is not None
        events = [event for _, event in cluster.scheduler.get_events("all")]
        assert sum(event.get("action") == "add-worker" for event in events) == 2
    assert [trial.state for trial in run.record.trials.values()] == ["complete"] * 3
    assert run.timeline().worker.nunique() == 2
    check_best(run)


def test_a_fixed_cluster_is_left_as_it_is(cluster: LocalCluster, search: Optimize) -> None:
    flow = SEER(
        "12 s", "8 USD", reduction_factor=2, max_workers_per_trial=1, min_stage=2.4, mode="paper",
        price_per_worker_hour=900.0,
    )  # fmt: skip
    assert flow.plan.stages[0].n_workers > 2
    run = search(flow, client=cluster.scheduler_address)
    assert len(cluster.worker_spec) == 2
    assert any("the search has 2 workers, and" in note for note in run.record.notes)
    assert all("pass cluster=" in note for note in run.record.notes)
    assert run.record.seconds <= 12 + OVERSHOOT_S
    about = run.run_dir.about()  # the flow's own limits are the run's
    limits = (about["deadline_s"], about["budget_s"], about["price_per_worker_hour"])
    assert limits == (12.0, 32.0, 900.0)
    check_best(run)


def test_adapt_is_left_in_charge(search: Optimize) -> None:
    flow = SEER("12 s", 34, reduction_factor=2, max_workers_per_trial=1, min_stage=2, mode="paper")
    assert flow.plan.stages[0].n_workers > 2
    with cluster_of(2) as cluster, Client(cluster, set_as_default=False) as client:
        adaptive = cluster.adapt(minimum=2, maximum=2)
        run = search(flow, cluster=cluster, max_cluster_workers=None)
        assert cluster._adaptive is adaptive
        assert adaptive.periodic_callback.is_running()
        assert set(sizes(client)) == {1, 2}
    wanted = [note for note in run.record.notes if "the search has 2 workers" in note]
    assert wanted  # other notes may say that a stage is late
    assert all("adapt() decides" in note for note in wanted)
    check_best(run)


def test_a_cluster_whose_workers_cannot_start(search: Optimize) -> None:
    study = optuna.create_study(direction="maximize")
    with cluster_of(0, preload=["import os; os._exit(3)"]) as cluster:
        with pytest.raises(NoWorkersError, match="no worker came within 3 s"):
            search(SEER(60, 60), cluster=cluster, study=study, worker_timeout=3.0)
        assert len(cluster.worker_spec) == 0
        assert cluster.scheduler is not None
        assert not any("dagsel" in name for name in cluster.scheduler.plugins)
    assert study.trials == []


def test_a_fixed_cluster_without_a_worker(search: Optimize) -> None:
    with cluster_of(0) as cluster:
        with pytest.raises(NoWorkersError, match="start workers, scale the cluster"):
            search(SEER(60, 60), client=cluster.scheduler_address, worker_timeout=1.0)
        assert cluster.scheduler is not None
        assert not any("dagsel" in name for name in cluster.scheduler.plugins)


@pytest.mark.parametrize("limit", ["deadline", "budget"])
def test_what_there_is_when_the_time_is_over(limit: str, search: Optimize) -> None:
    end_s = 12.0  # the first units may come late
    given = {"deadline": end_s} if limit == "deadline" else {"budget": 2 * end_s}
    flow = RandomSearch(max_epochs=50, n_trials=4)
    with cluster_of(2) as cluster, Client(cluster, set_as_default=False) as client:
        run = search(flow, client=client, small_population="hop", **given)
        assert sizes(client) == [1, 2]  # no worker broke as its unit was ended
    assert end_s - UNIT_S <= run.record.seconds <= end_s + OVERSHOOT_S
    check_best(run)
    states = Counter(trial.state for trial in run.record.trials.values())
    assert states == {"pruned": 3, "complete": 1}, "what is best then is the result"
    units = [unit for unit in run.record.units if unit.unit.kind == "train"]
    began = next(e["at"] for e in run.run_dir.journal.read() if e["is"] == "session")
    # How long a unit takes is known from those before it, on a machine that does other things.
    assert max(unit.start for unit in units) - began <= end_s - 0.7 * UNIT_S


def test_units_that_the_end_of_a_search_stops_break_no_worker(search: Optimize) -> None:
    workload = SyntheticWorkload(20.0, n_batches=100, value=WORKLOAD.value)
    with cluster_of(2) as cluster, Client(cluster, set_as_default=False) as client:
        with pytest.raises(TooLittleTimeError, match="no unit of training has ended"):
            search(
                RandomSearch(max_epochs=1, n_trials=2),
                workload=workload,
                client=client,
                small_population="hop",
                deadline=1.5,
            )
        # Their one thread is free again once the unit has ended.
        after = [client.submit(os.getpid, workers=[worker], pure=False) for worker in there(client)]
        assert all(future.result(timeout=20) for future in after)
        assert sizes(client) == [1, 2]


BAD_INPUT = {
    "no time": (lambda: SEER(0, 60), "deadline must be above 0"),
    "no money": (lambda: SEER(60, -1), "budget must be above 0"),
    "too little money": (
        lambda: SEER(60, 5, min_stage=2, min_workers_per_trial=4, max_workers_per_trial=4),
        "the smallest that works is 8 worker-seconds",
    ),
    "contradictory workers": (
        lambda: SEER(60, 600, min_workers_per_trial=4, max_workers_per_trial=2),
        "max_workers_per_trial=2 is below min_workers_per_trial=4",
    ),
    "money without a price": (lambda: SEER(60, "12 USD"), "price_per_worker_hour"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused(name: str) -> None:
    make, text = BAD_INPUT[name]
    with pytest.raises(SearchError, match=text):
        make()
