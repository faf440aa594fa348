"""Laws of the fault injector: a seed is a schedule, a fault hits what it says and is undone."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import faults as faults_module
import numpy as np
import psutil
import pytest
from faults import (
    Add,
    Delay,
    Drain,
    Fault,
    FillDisk,
    Freeze,
    Injector,
    Kill,
    KillDriver,
    KillScheduler,
    corrupt,
    schedule,
)
from faulty import FaultyWorkload, read_starts
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dagsel.errors import CheckpointCorruptError
from dagsel.storage import CheckpointStore
from dagsel.testing import WorkloadSuite
from dagsel.testing.synthetic import CountingWorkload, SyntheticWorkload, seen
from dagsel.workloads.base import Visit

KINDS: list[Fault] = [Kill(), Freeze(1.0), Delay(0.5), Drain(), Add()]
seeds = st.integers(0, 2**32)
kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=5)
gaps = st.tuples(st.floats(0.2, 2.0), st.floats(0.0, 2.0)).map(lambda g: (g[0], sum(g)))


@given(seeds, kinds, gaps, st.floats(1.0, 60.0))
def test_a_schedule_keeps_its_bounds(
    seed: int, kinds: list[Fault], gaps: tuple[float, float], duration_s: float
) -> None:
    found = schedule(seed, kinds, between_s=gaps, duration_s=duration_s)
    times = [0.0, *(at_s for at_s, _ in found)]
    assert all(gaps[0] - 1e-9 <= b - a <= gaps[1] + 1e-9 for a, b in itertools.pairwise(times))
    assert duration_s - gaps[1] <= times[-1] < duration_s
    assert {fault for _, fault in found} <= set(kinds)


@given(seeds, kinds, st.floats(10.0, 30.0), st.floats(1.0, 30.0))
def test_a_schedule_is_its_seed_and_a_longer_one_begins_with_it(
    seed: int, kinds: list[Fault], short_s: float, more_s: float
) -> None:
    short = schedule(seed, kinds, duration_s=short_s)
    assert schedule(seed, kinds, duration_s=short_s + more_s)[: len(short)] == short
    once: list[Fault] = [KillDriver(), KillScheduler()]
    special = schedule(seed, kinds, duration_s=short_s, once=once)
    assert [at_s for at_s, _ in special] == [at_s for at_s, _ in short]
    changed = [new for (_, new), (_, old) in zip(special, short, strict=True) if new != old]
    assert sorted(map(repr, changed)) == sorted(map(repr, once))


def test_a_seed_gives_the_same_faults_today_as_before() -> None:
    found = schedule(2, [Kill(), Freeze(2.0)], duration_s=4.0, once=[KillDriver()])
    assert [(round(at_s, 2), fault) for at_s, fault in found] == [
        (1.27, Freeze(2.0)),
        (2.03, KillDriver()),
        (2.92, Freeze(2.0)),
    ]


def test_schedules_of_different_seeds_differ() -> None:
    assert len({schedule(seed, KINDS, duration_s=10.0) for seed in range(20)}) == 20


def test_a_schedule_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="take longer"):
        schedule(0, KINDS, duration_s=0.4, once=[KillDriver()])
    with pytest.raises(ValueError, match="between_s"):
        schedule(0, KINDS, duration_s=5.0, between_s=(2.0, 1.0))


@given(seeds)
def test_what_is_corrupted_is_the_newest_state(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(f"{folder}/states")
        for position in (0, 1):
            store.save(3, 1, position, bytes(64), {})
        store.save(3, 1, 2, bytes(64), {}, partial=True)
        path = corrupt(folder, random.Random(seed))
        assert path is not None
        assert sum(byte.bit_count() for byte in Path(path).read_bytes()) == 1
        with pytest.raises(CheckpointCorruptError):
            store.load(3, 1, 1)
        found = store.load_latest(3)
        assert found is not None
        assert found[0] == (1, 0)


class Workers:
    """What an injector asks of a client, answered for processes that sleep."""

    def __init__(self, n: int) -> None:
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        self.processes = [subprocess.Popen(sleep) for _ in range(n)]

    scheduler = property(lambda self: self)

    def identity(self, n_workers: int) -> dict[str, Any]:
        live = [process for process in self.processes if process.poll() is None]
        return {"workers": {f"tcp://{process.pid}": {} for process in live}}

    def sync(self, call: Any, **how: Any) -> Any:
        return call(**how)

    def run(self, function: Any, *, workers: list[str], on_error: str) -> dict[str, int]:
        return {worker: int(worker.removeprefix("tcp://")) for worker in workers}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def workers() -> Any:
    workers = Workers(2)
    yield workers
    workers.close()


def status(pid: int, wanted: str) -> None:
    deadline = time.monotonic() + 10
    while psutil.Process(pid).status() != wanted and time.monotonic() < deadline:
        os.sched_yield()
    assert psutil.Process(pid).status() == wanted


def test_a_paused_worker_goes_on_and_no_other_fault_hits_it(workers: Workers) -> None:
    injector = Injector(workers)
    paused = injector.inject(Freeze(60.0))
    assert paused is not None
    pid = int(paused.victim.removeprefix("tcp://"))
    status(pid, psutil.STATUS_STOPPED)
    killed = injector.inject(Kill())
    assert killed is not None
    assert killed.victim != paused.victim
    other = next(p for p in workers.processes if p.pid != pid)
    assert other.wait() == -signal.SIGKILL
    assert injector.inject(Kill()) is None
    injector.release()
    status(pid, psutil.STATUS_SLEEPING)
    assert [done.fault for done in injector.done] == [Freeze(60.0), Kill()]


def test_a_large_disk_is_not_filled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mount a tmpfs"):
        Injector(None, run_dir=str(tmp_path)).inject(FillDisk(1.0))


def test_a_filled_disk_is_full_until_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    filled = faults_module.fill_up
    written: list[int] = []

    def fill_up(fd: int) -> None:
        filled(fd)
        written.append(fd)

    monkeypatch.setattr(faults_module, "fill_up", fill_up)
    try:
        injector = Injector(None, run_dir=str(disk))
        injector.inject(FillDisk(60.0))
        while not written:
            os.sched_yield()
        with pytest.raises(OSError) as caught:
            (disk / "more").write_bytes(bytes(4096))
        assert caught.value.errno == errno.ENOSPC
        injector.release()
        (disk / "more").write_bytes(bytes(4096))
        assert [path.name for path in disk.iterdir()] == ["more"]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_faults_survive_pickling() -> None:
    assert pickle.loads(pickle.dumps(KINDS)) == KINDS


def test_units_that_begin_are_counted(tmp_path: Path) -> None:
    starts = str(tmp_path / "starts")
    workload = FaultyWorkload(SyntheticWorkload(), starts=starts)
    visit = Visit(seed=0, trial=4, epoch=1, shard=2)
    trained = workload.train(workload.init({}, seed=0), 10, {}, visit=visit)
    assert seen(trained.state) == [(1, 2, 0)]
    assert read_starts(starts) == [(4, 1, 2, os.getpid())]


class TestCounting(WorkloadSuite):
    """A `CountingWorkload` in a `FaultyWorkload` without faults is a workload."""

    def make_workload(self) -> FaultyWorkload:
        return FaultyWorkload(CountingWorkload(n_batches=3, n_shards=2))

    def make_arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        return {"x": np.random.default_rng(seed).normal(size=(9, 2))}
