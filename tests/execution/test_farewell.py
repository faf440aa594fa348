"""A worker that gets SIGTERM stores its unit at the next batch, and the trial goes on there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Status

from dagsel.execution.farewell import Farewell
from dagsel.planning.rounds import Chain, Round
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload, seen

from .helpers import client_of, engine_for, final_state


@pytest.fixture
def two() -> Iterator[Client]:
    with client_of(2) as client:
        yield client


def test_notice_costs_no_more_than_a_batch(
    two: Client, digits: ShardedDataset, run_dir: str
) -> None:
    workload = SyntheticWorkload(seconds=1.0, n_batches=40)
    pids = two.run(os.getpid)
    heard = []
    with engine_for(two, digits, workload, run_dir) as engine:
        chains = tuple(Chain(trial, range(1, 2), 4, evaluate=False) for trial in range(4))
        engine.submit(Round(1, chains), {trial: {} for trial in range(4)})
        told = None
        n_done = 0
        while n_done < 16:
            for message in engine.messages(timeout_s=60):
                heard.append(message)
                assert message["op"] not in ("failed", "fatal"), message
                if message["op"] == "done":
                    n_done += 1
                    if n_done == 3:  # four trials on two workers: both are busy
                        told = message["worker"]
                        os.kill(pids[told], signal.SIGTERM)
        states = [final_state(engine, trial, 1, 4) for trial in range(4)]
    pieces = [message for message in heard if message["op"] == "preempted"]
    assert [piece["worker"] for piece in pieces] == [told]
    for state in states:
        assert set(Counter(seen(state)).values()) == {1}
        assert len(seen(state)) == 4 * 40
    last = [message for message in heard if message["op"] == "done"][-1]
    assert last["worker"] != told


def test_runs_that_overlap_leave_the_handler_of_before() -> None:
    worker: Any = SimpleNamespace(status=Status.running)
    before = signal.getsignal(signal.SIGTERM)
    runs = [Farewell(worker, lambda: None, lambda: True, lambda op: None) for _ in range(3)]
    for k in (1, 0, 2):
        assert signal.getsignal(signal.SIGTERM) != before
        asyncio.run(runs[k].end())
    assert signal.getsignal(signal.SIGTERM) == before
