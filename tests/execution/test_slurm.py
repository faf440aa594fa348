"""A real Slurm: what is asked for is in its queue, what is let go leaves it, nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import psutil
import pytest
from slurm import PATH, Job, Slurm, slurm, why_not

import dagsel
from dagsel.errors import DagselError
from dagsel.flow import Ask, Asked, Decision, Event, Finish, Reported, Scale, Stop, Train, WorkersChanged
from dagsel.flows import ASHA, SEER
from dagsel.storage import RunDir, ShardedDataset
from tests.driver.scripted import Scripted

WHY = "needs the extra dev: dask-jobqueue"
pytest.importorskip("dask_jobqueue", reason=WHY)

from . import slurm_driver  # noqa: E402
from .helpers import processes  # noqa: E402
from .slurm_driver import N_BATCHES, N_SHARDS, N_TRIALS, UNIT_S, local_cluster, slurm_cluster  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

#: Slurm notes so much later that a job was submitted, or has ended, than the search reckons.
ENTRY_S = 0.5
#: A batch, the scoring and 5 s for two cores that do other things as well.
LATE_S = UNIT_S / N_BATCHES + 5


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes for two workers each."""
    before = processes()
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(started.config))
            patch.setenv("PATH", PATH)
            yield started
    assert processes() <= before


@pytest.fixture
def queue(here: Slurm) -> Iterator[Queue]:
    """What this test has submitted; all of it has left the queue afterwards."""
    queue = Queue(here)
    yield queue
    here.wait(lambda: not here.queue() and not here.stray())


class Queue:
    """A test's own jobs."""

    def __init__(self, here: Slurm) -> None:
        self.here = here
        self._before = {*here.jobs()}

    @property
    def jobs(self) -> dict[str, Job]:
        return {n: job for n, job in self.here.jobs().items() if n not in self._before}

    def ended(self) -> list[Job]:
        """Return the jobs once all have ended."""
        self.here.wait(lambda: not self.here.queue())
        return [*self.jobs.values()]

    def sizes(self) -> list[int]:
        """How many jobs there were, time after time."""
        jobs = self.ended()
        changes = [(job.submitted, 1) for job in jobs] + [(job.ended, -1) for job in jobs]
        return [*accumulate(change for _, change in sorted(changes))]

    def job_seconds(self) -> float:
        """What they cost from when they were submitted to their end."""
        return sum(job.ended - job.submitted for job in self.ended())


@pytest.fixture
def data(tmp_path: Path) -> ShardedDataset:
    arrays = {"x": np.arange(80)}
    return ShardedDataset.write(str(tmp_path / "data.zarr"), arrays, n_shards=N_SHARDS)


@pytest.fixture
def search(data: ShardedDataset, tmp_path: Path) -> Callable[..., dagsel.Run]:
    def call(flow: Any, cluster: Any, **options: Any) -> dagsel.Run:
        return dagsel.optimize(
            optuna.create_study(direction="maximize"),
            slurm_driver.workload(),
            data,
            space=slurm_driver.space,
            flow=flow,
            metric="value",
            cluster=cluster,
            run_dir=str(tmp_path / "run"),
            small_population="hop",
            **options,
        )

    return call


def check_whole(run: dagsel.Run) -> None:
    """Each batch of each epoch was trained once, and no trial failed."""
    assert run.failures == []
    scored = [epoch for trial in run.record.trials.values() for epoch in trial.epochs]
    assert scored
    assert all(epoch.metrics["miscounted"] == 0 for epoch in scored)
    assert set(Counter(run.best_model()).values()) == {1}


def grown(n_most: int, n_trials: int = 4) -> Scripted:
    """Trials on one worker, then on more, then on one; it ends a few epochs later."""
    sizes: list[int] = []
    live: set[int] = set()
    n_reports = 0

    def answer(event: Event) -> list[Decision]:
        nonlocal n_reports
        match event:
            case Asked(trials):
                live.update(trials)
                return [Train(trial, 1) for trial in trials]
            case WorkersChanged(n):
                sizes.append(n)
            case Reported(trial):
                n_reports += 1
                decisions: list[Decision] = [Train(trial, 1)]
                if n_reports == n_trials:
                    decisions.append(Scale(n_most))
                elif n_most in sizes and 1 not in sizes[sizes.index(n_most):]:
                    decisions.append(Scale(1))
                elif n_most in sizes and sizes[-1] == 1:
                    stops = [Stop(t, "the end", "complete") for t in sorted(live)]
                    decisions = [*stops, Finish()]
                return decisions
        return []

    return Scripted([Ask(n_trials)], answer)


def near(worker_seconds: float, n_jobs: int) -> Any:
    """1%, and what passes between a wish and Slurm's entry of it in its log."""
    return pytest.approx(worker_seconds, abs=0.01 * worker_seconds + n_jobs * ENTRY_S)


def test_a_cluster_grows_and_shrinks_as_it_is_told(
    here: Slurm, queue: Queue, search: Any, tmp_path: Path
) -> None:
    with slurm_cluster(tmp_path) as cluster:
        run = search(grown(4), cluster)
        assert cluster.worker_spec == {}
    sizes = queue.sizes()
    top = sizes.index(4)
    print("GROW", sizes, queue.job_seconds(), run.worker_seconds, run.record.seconds)
    assert sizes == sorted(sizes[:top]) + sorted(sizes[top:], reverse=True)
    assert {1, 4} <= set(sizes[: top + 1])
    assert len(queue.jobs) == 4
    check_whole(run)
    assert run.worker_seconds == near(queue.job_seconds(), 4)


@pytest.mark.parametrize("size", [1, 2])
def test_seer_keeps_to_its_limits(
    size: int, here: Slurm, queue: Queue, search: Any, tmp_path: Path
) -> None:
    flow = SEER("15 s", 40, reduction_factor=2, max_workers=1, min_stage=3, mode="paper")
    with slurm_cluster(tmp_path, processes=size) as cluster:
        run = search(flow, cluster)
        assert cluster.worker_spec == {}
    print("SEER", size, queue.sizes(), size * queue.job_seconds(), run.worker_seconds, run.record.seconds, flow.plan)
    print(run.record.notes, run.timeline().worker.nunique())
    assert run.record.seconds <= 15 + LATE_S
    assert max(queue.sizes()) * size <= 4
    assert run.worker_seconds <= 40 + 4 * LATE_S
    assert run.failures == []
    assert set(Counter(run.best_model()).values()) == {1}
    assert run.worker_seconds == near(size * queue.job_seconds(), len(queue.jobs))


def test_asha_keeps_to_a_budget(
    here: Slurm, queue: Queue, search: Any, tmp_path: Path
) -> None:
    with slurm_cluster(tmp_path) as cluster:
        cluster.scale(2)
        here.wait(lambda: here.count("RUNNING") == 2)
        run = search(ASHA(max_epochs=9, n_trials=32, reduction_factor=2), cluster, budget=30)
        assert len(cluster.worker_spec) == 2  # as it was
    print("ASHA", run.worker_seconds, run.record.seconds)
    assert run.worker_seconds <= 30 + 2 * LATE_S
    assert run.failures == []
    assert run.record.best is not None


def test_jobs_that_do_not_start_hold_nothing_up(
    here: Slurm, queue: Queue, search: Any, tmp_path: Path
) -> None:
    blocker = tmp_path / "blocker.sh"
    blocker.write_text("#!/bin/sh\nexec sleep 600\n")
    for n_cpus in (4, 2):  # there is room for one worker
        here("sbatch", "-o", "/dev/null", f"-c{n_cpus}", str(blocker))
    here.wait(lambda: here.count("RUNNING") == 2)
    theirs = {*here.queue()}
    sizes: list[int] = []

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked(trials):
                return [Scale(3), *(Train(trial, 2) for trial in trials)]
            case WorkersChanged(n):
                sizes.append(n)
            case Reported(trial, 2):
                done.add(trial)
                stop = Stop(trial, "the end", "complete")
                return [stop, Finish()] if len(done) == 2 else [stop]
        return []

    done: set[int] = set()
    with slurm_cluster(tmp_path) as cluster:
        run = search(Scripted([Ask(2)], answer), cluster)
        here.wait(lambda: {*here.queue()} == theirs)
    for job in theirs:
        here("scancel", job)
    ours = [job for number, job in queue.jobs.items() if number not in theirs]
    print("PENDING", ours, run.record.notes, run.worker_seconds, run.record.seconds)
    assert len(ours) == 3
    assert sum(job.started is None for job in ours) == 2
    assert run.timeline().worker.nunique() == 1
    check_whole(run)


def hit(here: Slurm, number: str, how: str) -> None:
    if how == "cancelled":
        here("scancel", number)
    elif how == "its node failed":
        node = here("squeue", "-h", "-j", number, "-o", "%N").strip()
        here("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        here("scontrol", "update", f"nodename={node}", "state=resume")
    else:
        here("scontrol", "update", f"jobid={number}", "EndTime=now")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["cancelled", "its node failed", "its time is over"])
def test_a_job_that_slurm_ends_loses_nothing(
    how: str, size: int, here: Slurm, queue: Queue, search: Any, tmp_path: Path
) -> None:
    hits: list[str] = []
    n_after = 0
    live: set[int] = set()

    def answer(event: Event) -> list[Decision]:
        nonlocal n_after
        match event:
            case Asked(trials):
                live.update(trials)
                return [Scale(2 * size), *(Train(trial, 1) for trial in trials)]
            case WorkersChanged(n) if n == 2 * size and not hits:
                hits.append(min(here.queue()))
                hit(here, hits[0], how)
            case WorkersChanged(n) if n == 2 * size and hits:
                hits.append("replaced")
            case Reported(trial):
                n_after += len(hits) == 2
                if n_after > 4:
                    return [*(Stop(t, "the end", "complete") for t in sorted(live)), Finish()]
                return [Train(trial, 1)]
        return []

    with slurm_cluster(tmp_path, processes=size) as cluster:
        run = search(Scripted([Ask(4)], answer), cluster)
        assert cluster.worker_spec == {}
    print("HIT", how, size, queue.sizes(), queue.jobs, run.record.notes, run.timeline().lost_seconds.sum(), run.timeline().attempts.max(), run.record.seconds)
    check_whole(run)
    assert max(queue.sizes()) <= 3


@pytest.mark.parametrize("kinds", [("slurm", "here"), ("here", "slurm")])
def test_a_killed_driver_is_resumed_on_another_cluster(
    kinds: tuple[str, str], here: Slurm, queue: Queue, data: ShardedDataset, tmp_path: Path
) -> None:
    before = processes()
    began_on, resumed_on = kinds
    folder = RunDir(str(tmp_path / "run"))
    command = [sys.executable, "-m", "tests.execution.slurm_driver", began_on, str(tmp_path)]
    driver = subprocess.Popen(command)
    while n_reports(folder) < 4:
        with suppress(subprocess.TimeoutExpired):
            driver.wait(0.05)
        assert driver.poll() is None
    theirs = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    # Workers that have lost their scheduler end, and their jobs with them.
    assert not psutil.wait_procs(theirs, timeout=30)[1]
    here.wait(lambda: not here.queue() and not here.stray())
    place = slurm_cluster(tmp_path) if resumed_on == "slurm" else local_cluster()
    with place as cluster:
        run = dagsel.resume(
            folder.url,
            cluster=cluster,
            workload=slurm_driver.workload(),
            space=slurm_driver.space,
        )
    print("KILL", kinds, run.record.seconds)
    assert run.record.n_sessions == 2
    assert [trial.state for trial in run.record.trials.values()] == ["complete"] * N_TRIALS
    assert run.record.n_epochs == 3 * N_TRIALS
    check_whole(run)


def n_reports(folder: RunDir) -> int:
    try:
        entries = folder.journal.read()
    except DagselError:  # it is not there yet
        return 0
    return sum(entry.get("event", {}).get("is") == "Reported" for entry in entries)
