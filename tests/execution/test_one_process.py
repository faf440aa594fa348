"""Workers that are threads of one process: one unit at a time, and no harm to those that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from distributed import Client

from dagsel.dispatch.events import TrialAllowed, TrialHeld, TrialRests
from dagsel.dispatch.units import Chain, Round
from dagsel.messages import PieceRecord, TrialReport, UnitRecord
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

from .helpers import done, engine_for, listen, of, threads_of_this_process


@pytest.fixture
def two() -> Iterator[Client]:
    """Two workers that are threads of this process."""
    with threads_of_this_process(2) as client:
        yield client


def chains(*trials: int) -> Round:
    return Round(1, tuple(Chain(trial, range(1, 2), 4, evaluate=False) for trial in trials))


def test_units_wait_for_each_other_and_that_is_not_their_time(
    two: Client, digits: ShardedDataset, run_dir: str
) -> None:
    workload = SyntheticWorkload(seconds=0.6, n_batches=10)
    limit = {"unit_timeout_s": 1.0, "grace_s": 0.1, "max_strikes": 1}
    with engine_for(two, digits, workload, run_dir, dispatch=limit) as engine:
        assert engine.n_workers == 1
        engine.submit(chains(0, 1), {0: {}, 1: {}})
        heard = listen(engine, until=lambda heard: len(done(heard)) == 8 or of(TrialReport, heard))
    assert of(TrialReport, heard) == []
    assert of(PieceRecord, heard) == []
    units = sorted(of(UnitRecord, heard), key=lambda unit: unit.start)
    assert len({unit.worker for unit in units}) == 2
    for before, after in pairwise(units):
        assert before.stop <= after.start


class Gate(SyntheticWorkload):
    """Trains trial 0 for as long as the gate is closed."""

    def train(self, *args: Any, **options: Any) -> Any:
        if options["visit"].trial == 0:
            inside.set()
            while not gate.is_set() and not options["should_stop"]():
                time.sleep(0.001)
        return super().train(*args, **options)


inside, gate = threading.Event(), threading.Event()


def test_a_unit_that_waits_for_another_one_can_be_told_to_stop(
    two: Client, digits: ShardedDataset, run_dir: str
) -> None:
    with engine_for(two, digits, Gate(), run_dir) as engine:
        engine.submit(chains(0, 1), {0: {}, 1: {}})
        assert inside.wait(60)
        engine.tell(TrialHeld(1, 7))
        heard = listen(engine, until=lambda heard: TrialRests(1, 7) in heard)
        engine.tell(TrialAllowed(1, 1, None, 8))
        gate.set()
        n_left = 8 - len(done(heard))  # trial 1 may have been the first to train
        heard += listen(engine, until=lambda heard: len(done(heard)) == n_left)
        assert of(TrialReport, heard) == []


def test_no_gang_has_two_ranks_in_one_process(
    two: Client, digits: ShardedDataset, run_dir: str
) -> None:
    limit = {"capacity_timeout_s": 0.1}
    with engine_for(two, digits, SyntheticWorkload(), run_dir, dispatch=limit) as engine:
        engine.tell(TrialAllowed(0, 2, None, 1))
        engine.submit(chains(0), {0: {}})
        heard = listen(engine, until=lambda heard: of(TrialReport, heard))
    assert "2 workers are threads of 1 process" in of(TrialReport, heard)[0].reason
