"""A real Slurm: what is asked for is in its queue, what is let go leaves it, nothing is lost.

Units sleep, so that more workers than cores are no slower. With ``SLURM=all`` in the environment
each way in which a job ends is tried with jobs of one worker and of two.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import numpy as np
import psutil
import pytest
from distributed import Client

import dagsel
from dagsel.errors import DagselError, NoWorkersError
from dagsel.execution.elastic import elastic_for
from dagsel.flow import (
    Ask,
    Asked,
    Decision,
    Event,
    Finish,
    Reported,
    Scale,
    Stop,
    Train,
    WorkersChanged,
)
from dagsel.flows import ASHA, SEER
from dagsel.storage import RunDir, ShardedDataset
from tests.cli.searches import DAGSEL, write_script
from tests.conftest import Optimize
from tests.driver.scripted import Scripted
from tests.waiting import slowness

from .slurm import PATH, Job, Slurm, slurm, why_not

pytest.importorskip("dask_jobqueue", reason="needs the extra dev: dask-jobqueue")

from . import slurm_driver
from .helpers import own_cluster, processes
from .slurm_driver import N_BATCHES, N_SHARDS, N_TRIALS, UNIT_S, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
only_long = pytest.mark.skipif(os.environ.get("SLURM") != "all", reason="SLURM=all is not set")

#: One batch, and 5 s for workers to leave on two cores that do other things as well.
LATE_S = UNIT_S / N_BATCHES + 5
#: So much passes, for each job, from a wish to its entry in Slurm's log.
ENTRY_S = 0.5


class Queue:
    """The jobs of one test."""

    def __init__(self, here: Slurm) -> None:
        self.here = here
        self._before = {*here.jobs()}

    @property
    def jobs(self) -> dict[str, Job]:
        return {n: job for n, job in self.here.jobs().items() if n not in self._before}

    def ended(self) -> list[tuple[Job, float]]:
        """Wait for the end of all of them; return each, and when it ended."""
        self.here.wait(lambda: all(job.ended is not None for job in self.jobs.values()))
        return [(job, job.ended) for job in self.jobs.values() if job.ended is not None]

    def sizes(self) -> list[int]:
        """How many there were, time after time."""
        changes = [
            change for job, end in self.ended() for change in ((job.submitted, 1), (end, -1))
        ]
        return [*accumulate(change for _, change in sorted(changes))]

    def job_seconds(self) -> float:
        """What they cost, from start to end; nothing if they were always pending."""
        return sum(end - job.started for job, end in self.ended() if job.started is not None)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes with room for two workers each."""
    before = processes()
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(started.config))
            patch.setenv("PATH", PATH)
            yield started
    assert processes() <= before


@pytest.fixture
def queue(here: Slurm) -> Iterator[Queue]:
    """The jobs of a test; nothing is left of them after it."""
    yield Queue(here)
    here.wait(lambda: not here.queue() and not here.stray())


@pytest.fixture
def data(tmp_path: Path) -> ShardedDataset:
    arrays = {"x": np.arange(80)}
    return ShardedDataset.write(str(tmp_path / "data.zarr"), arrays, n_shards=N_SHARDS)


@pytest.fixture
def search(optimize: Optimize, data: ShardedDataset) -> Optimize:
    workload, space = slurm_driver.workload(), slurm_driver.space
    return partial(optimize, workload=workload, data=data, space=space, small_population="hop")


def check_whole(run: dagsel.Run) -> None:
    """Each batch of each epoch was trained once, and no trial failed."""
    assert run.failures == []
    scored = [epoch for trial in run.record.trials.values() for epoch in trial.epochs]
    assert scored
    assert all(epoch.metrics["miscounted"] == 0 for epoch in scored)
    assert set(Counter(run.best_model()).values()) == {1}


def check_bill(run: dagsel.Run, queue: Queue, size: int = 1) -> None:
    """The run's bill is Slurm's: 1%, and what passes until Slurm has written what was wished."""
    by_slurm = size * queue.job_seconds()
    print(f"bill: {run.worker_seconds:.2f}, by Slurm's log {by_slurm:.2f}")
    allowed = 0.01 * by_slurm + size * ENTRY_S * len(queue.jobs) * slowness()
    assert run.worker_seconds == pytest.approx(by_slurm, abs=allowed)


Step: TypeAlias = Callable[[int], list[Decision]]


def on_sizes(n_trials: int, *steps: Step) -> Scripted:
    """Train trials epoch by epoch, and take one step after the other.

    A step is asked with the number of workers, at each change of it and after each epoch, until it
    decides something. The search ends with the last one.
    """
    waiting, live, n_workers = list(steps), set[int](), 1  # a search begins once there is one

    def go_on() -> list[Decision]:
        decided = waiting[0](n_workers)
        if decided:
            waiting.pop(0)
        if waiting:
            return decided
        return [*(Stop(trial, "the end", "complete") for trial in sorted(live)), Finish()]

    def answer(event: Event) -> list[Decision]:
        nonlocal n_workers
        match event:
            case Asked(trials):
                live.update(trials)
                return [Train(trial, 1) for trial in trials]
            case WorkersChanged(n):
                n_workers = n
                return go_on() if waiting else []
            case Reported(trial) if waiting:
                decided = go_on()
                return [*decided, Train(trial, 1)] if waiting else decided
        return []

    return Scripted([Ask(n_trials)], answer)


def when(n_there: int, *then: Decision) -> Step:
    return lambda n: list(then) if n == n_there else []


END = Finish()


def test_a_cluster_grows_and_shrinks_as_it_is_told(
    queue: Queue, search: Optimize, tmp_path: Path
) -> None:
    all_train = [when(4, Scale(4))] * 8
    flow = on_sizes(4, when(1, Scale(4)), *all_train, when(4, Scale(1)), when(1, END))
    with slurm_cluster(tmp_path) as cluster:
        run = search(flow, cluster=cluster)
        assert cluster.worker_spec == {}  # as it was
    sizes = queue.sizes()
    assert sizes == [1, 2, 3, 4, 3, 2, 1, 0]
    assert run.timeline().worker.nunique() == 4
    check_whole(run)
    check_bill(run, queue)


def test_a_search_in_a_job_writes_a_log_that_people_read(here: Slurm, tmp_path: Path) -> None:
    script = write_script(tmp_path, epochs=2, trials=3)
    command = shlex.join([DAGSEL, "run", str(script), "--workers", "1", "--run-dir", "run"])
    job = ["sbatch", "--wait", "--chdir", str(tmp_path), "--output", str(tmp_path / "job.log")]
    here(*job, "--wrap", f"PYTHONPATH={Path(__file__).parents[2]} {command}")
    log = (tmp_path / "job.log").read_text()
    assert "\x1b" not in log
    assert "\r" not in log
    lines = [line for line in log.splitlines() if line.startswith("dagsel ")]
    ends = [re.fullmatch(r"dagsel \d+:\d\d · trial (\d) complete .*", line) for line in lines[:-1]]
    assert sorted(end[1] for end in ends if end is not None) == ["0", "1", "2"]
    assert "the search has ended: 3 trials, 6 epochs" in lines[-1]


@pytest.mark.parametrize("size", [pytest.param(1, marks=only_long), 2])
def test_seer_keeps_to_its_limits(
    size: int, queue: Queue, search: Optimize, tmp_path: Path
) -> None:
    slow = slowness()
    flow = SEER(24 * slow, 60 * slow, reduction_factor=2, max_workers_per_trial=1)
    with slurm_cluster(tmp_path, size=size) as cluster:
        run = search(flow, cluster=cluster, max_cluster_workers=4)
        assert cluster.worker_spec == {}
    assert run.record.seconds <= (24 + LATE_S) * slow
    assert run.worker_seconds <= (60 + 4 * LATE_S) * slow
    assert run.failures == []
    assert set(Counter(run.best_model()).values()) == {1}
    assert max(queue.sizes()) <= 4 // size
    check_bill(run, queue, size)


def test_asha_keeps_to_a_budget(
    here: Slurm, queue: Queue, search: Optimize, tmp_path: Path
) -> None:
    slow = slowness()
    flow = ASHA(max_epochs=9, n_trials=32, reduction_factor=2)
    with slurm_cluster(tmp_path) as cluster:
        cluster.scale(2)
        here.wait(lambda: len(cluster.scheduler_info["workers"]) == 2)
        run = search(flow, cluster=cluster, budget=24 * slow)
        assert len(cluster.worker_spec) == 2
    assert run.worker_seconds <= (24 + 2 * LATE_S) * slow
    assert run.failures == []
    assert set(Counter(run.best_model()).values()) == {1}


@contextmanager
def room_for_one(here: Slurm, folder: Path) -> Iterator[None]:
    """Somebody else's jobs leave room for one worker."""
    script = folder / "sleep.sh"
    script.write_text("#!/bin/sh\nexec sleep 120\n")
    for n_cpus in (4, 2):
        here("sbatch", "-o", "/dev/null", f"-c{n_cpus}", str(script))
    here.wait(lambda: here.count("RUNNING") == 2)
    theirs = {*here.queue()}
    yield
    here.wait(lambda: {*here.queue()} == theirs)
    for job in theirs:
        here("scancel", job)


def test_jobs_that_stay_in_the_queue_hold_nothing_up(
    here: Slurm, search: Optimize, tmp_path: Path
) -> None:
    steps: list[Step] = [lambda n: [Scale(3)], *[when(1, Scale(3))] * 5, when(1, END)]
    with room_for_one(here, tmp_path):
        queue = Queue(here)
        with slurm_cluster(tmp_path) as cluster:
            run = search(on_sizes(2, *steps), cluster=cluster)
    assert queue.sizes() == [1, 2, 3, 2, 1, 0]
    assert [job.started is None for job in queue.jobs.values()] == [False, True, True]
    assert run.timeline().worker.nunique() == 1
    check_whole(run)
    check_bill(run, queue)  # who waits in the queue costs nothing


def end_job(here: Slurm, number: str, how: str) -> None:
    if how == "cancelled":
        here("scancel", number)
    elif how == "killed":
        here("scancel", "--full", "--signal=KILL", number)
    elif how == "its time is over":  # Slurm looks every 30 s
        here("scontrol", "update", f"jobid={number}", "EndTime=now")
    else:
        node = here("squeue", "-h", "-j", number, "-o", "%N").strip()
        here("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        here("scontrol", "update", f"nodename={node}", "state=idle")


@pytest.mark.parametrize(
    ("how", "size"),
    [
        ("cancelled", 2),
        pytest.param("cancelled", 1, marks=only_long),
        pytest.param("its time is over", 1, marks=only_long),
        pytest.param("its time is over", 2, marks=only_long),
        pytest.param("killed", 1, marks=only_long),
        pytest.param("killed", 2, marks=only_long),
        pytest.param("its node failed", 1, marks=only_long),
        pytest.param("its node failed", 2, marks=only_long),
    ],
)
def test_a_job_that_slurm_ends_loses_nothing(
    how: str, size: int, here: Slurm, queue: Queue, search: Optimize, tmp_path: Path
) -> None:
    n_wanted = 2 * size
    again: list[Decision] = [Scale(n_wanted)]

    def end_one(n_workers: int) -> list[Decision]:
        if n_workers < n_wanted:
            return []
        end_job(here, min(queue.jobs, key=int), how)
        return again

    def has_gone(n_workers: int) -> list[Decision]:
        return again if n_workers < n_wanted else []

    flow = on_sizes(2 * size, lambda n: again, end_one, has_gone, when(n_wanted, END))
    with slurm_cluster(tmp_path, size=size) as cluster:
        run = search(flow, cluster=cluster)
        assert cluster.worker_spec == {}
    check_whole(run)
    if how in (
        "cancelled",
        "its time is over",
    ):  # it got notice: a unit a worker at most is trained again, as a rule none
        assert len(queue.jobs) == 3
        assert (run.timeline().lost_seconds > UNIT_S / N_BATCHES).sum() <= size


@pytest.mark.parametrize(
    "kinds", [("slurm", "here"), pytest.param(("here", "slurm"), marks=only_long)]
)
def test_a_killed_driver_is_resumed_on_another_kind_of_cluster(
    kinds: tuple[str, str], here: Slurm, queue: Queue, data: ShardedDataset, tmp_path: Path
) -> None:
    began_on, goes_on_on = kinds
    folder = RunDir(str(tmp_path / "run"))
    command = [sys.executable, "-m", "tests.execution.slurm_driver", began_on, str(tmp_path)]
    log = tmp_path / "driver.log"
    with log.open("wb") as out:
        driver = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    while n_reports(folder) < N_TRIALS:
        with suppress(subprocess.TimeoutExpired):
            driver.wait(0.05)
        assert driver.poll() is None, log.read_text()
    theirs = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    # Workers that have lost their scheduler end, and their jobs with them.
    assert not psutil.wait_procs(theirs, timeout=30)[1]
    here.wait(lambda: not here.queue() and not here.stray())
    with slurm_cluster(tmp_path) if goes_on_on == "slurm" else own_cluster(2) as cluster:
        run = dagsel.resume(
            folder.url,
            cluster=cluster,
            workload=slurm_driver.workload(),
            space=slurm_driver.space,
        )
    assert len(run.record.sessions) == 2
    assert [trial.state for trial in run.record.trials.values()] == ["complete"] * N_TRIALS
    check_whole(run)


def n_reports(folder: RunDir) -> int:
    try:
        entries = folder.journal.read()
    except DagselError:  # it is not there yet
        return 0
    return sum(entry.get("event", {}).get("is") == "Reported" for entry in entries)


def test_a_job_that_slurm_refuses_is_told_with_its_reason(
    queue: Queue, search: Optimize, tmp_path: Path
) -> None:
    with slurm_cluster(tmp_path, queue="nobodys") as cluster:
        with pytest.raises(NoWorkersError, match="Invalid partition"):
            search(ASHA(max_epochs=9, n_trials=4), cluster=cluster, worker_timeout=3.0)
        assert cluster.worker_spec == {}
    assert queue.jobs == {}


def test_the_number_of_workers_of_a_job_is_known_however_it_is_given(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path, size=3) as cluster:
        with Client(cluster, set_as_default=False) as client:
            assert elastic_for(client).node_size == 3
