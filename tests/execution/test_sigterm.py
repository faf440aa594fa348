"""A worker that gets SIGTERM stores its unit at the next batch, and the trial goes on there."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Status

from dagsel.dispatch.events import FailRun
from dagsel.dispatch.units import Chain, Round
from dagsel.execution.sigterm import SigtermHandler
from dagsel.messages import PieceRecord, TrialReport, UnitRecord
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload, seen
from dagsel.workloads import Visit
from dagsel.workloads.base import never

from .helpers import client_of, done, engine_for, final_state, listen, of


@pytest.fixture
def two() -> Iterator[Client]:
    with client_of(2) as client:
        yield client


def test_notice_costs_no_more_than_a_batch(
    two: Client, digits: ShardedDataset, run_dir: str, tmp_path: Path
) -> None:
    told = tmp_path / "told"

    class Told(SyntheticWorkload):
        """Gets notice in the fifth batch of a unit, and writes down how many it has trained."""

        def train(
            self, *args: Any, visit: Visit, should_stop: Callable[[], bool] = never, **rest: Any
        ) -> Any:
            counts = itertools.count(1)
            is_first = visit.trial == 3 and not told.exists()

            def stop() -> bool:
                if is_first and (n := next(counts)) >= 5:
                    told.write_text(f"{os.getpid()} {n}")
                    if n == 5:
                        os.kill(os.getpid(), signal.SIGTERM)
                return should_stop()

            return super().train(*args, visit=visit, should_stop=stop, **rest)

    workload = Told(seconds=lambda config: config["s"], n_batches=40)
    workers = {pid: worker for worker, pid in two.run(os.getpid).items()}
    with engine_for(two, digits, workload, run_dir) as engine:
        chains = tuple(Chain(trial, range(1, 2), 4, evaluate=False) for trial in range(4))
        # Four trials on two workers: both are busy.
        configs = {trial: {"s": 1.0 if trial == 3 else 0.2} for trial in range(4)}
        engine.submit(Round(1, chains), configs)
        heard = listen(engine, until=lambda heard: len(done(heard)) == 16)
        states = [final_state(engine, trial, 1, 4) for trial in range(4)]
    assert not [*of(TrialReport, heard), *of(FailRun, heard)]
    (piece,) = of(PieceRecord, heard)
    pid, n_batches = map(int, told.read_text().split())
    assert piece.worker == workers[pid]
    assert piece.n_samples == len(digits.shard(piece.shard)["x"]) * n_batches // 40
    for state in states:
        assert set(Counter(seen(state)).values()) == {1}
        assert len(seen(state)) == 4 * 40
    last = of(UnitRecord, heard)[-1]
    assert last.worker != piece.worker


def test_runs_that_overlap_leave_the_handler_of_before() -> None:
    worker: Any = SimpleNamespace(status=Status.running)
    before = signal.getsignal(signal.SIGTERM)
    runs = [SigtermHandler(worker, lambda: None, lambda: True, lambda op: None) for _ in range(3)]
    for k in (1, 0, 2):
        assert signal.getsignal(signal.SIGTERM) != before
        asyncio.run(runs[k].end())
    assert signal.getsignal(signal.SIGTERM) == before


def test_all_searches_on_a_worker_hear_that_it_goes_and_are_waited_for() -> None:
    """A signal has one handler: that of the last one."""
    leaves: list[Any] = []
    stopped, told, closed_beside = list[int](), list[int](), list[set[int]]()
    worker: Any = SimpleNamespace(status=Status.running, address="a", nanny=None)
    worker.loop = SimpleNamespace(add_callback_from_signal=leaves.append)
    busy = {0, 1, 3}

    async def close(reason: str) -> None:
        closed_beside.append({*busy})

    worker.close_gracefully = close

    def handler(k: int) -> SigtermHandler:
        def is_idle() -> bool:
            was_busy = k in busy
            busy.discard(k)  # by the next look
            return not was_busy

        return SigtermHandler(worker, lambda: stopped.append(k), is_idle, lambda op: told.append(k))

    runs = [handler(k) for k in range(4)]
    try:
        asyncio.run(runs[2].end())
        signal.raise_signal(signal.SIGTERM)
        assert sorted(stopped) == [0, 1, 3]
        (leave,) = leaves
        asyncio.run(leave())
    finally:
        signal.signal(signal.SIGTERM, runs[0]._before)
    assert sorted(told) == [0, 1, 3]
    assert closed_beside == [set()]
