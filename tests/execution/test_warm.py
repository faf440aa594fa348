"""A suspended trial goes on at its sample: from memory where it rested, else from the store.

What is kept in memory is never older than what is stored, and goes when its trial does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from distributed import Client

from dagsel.dispatch.events import TrialAllowed, TrialHeld, TrialRests, WorkerRemoved
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.execution.engine import DaskEngine
from dagsel.execution.run_spec import plugin_name
from dagsel.execution.unit_runner import UnitRunner
from dagsel.messages import PieceRecord
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.waiting import wait_until

from .helpers import client_of, done, engine_for, listen, look_up, of

T = TypeVar("T")

N_BATCHES = 1000
UNIT = Unit("train", 0, 1, 0)
ENDLESS, SHORT = {"s": 50.0}, {"s": 1.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    """One shard, with samples enough to tell batches apart."""
    url = str(tmp_path_factory.mktemp("data") / "data.zarr")
    return ShardedDataset.write(url, {"x": np.zeros((2 * N_BATCHES, 1), np.uint8)}, n_shards=1)


@dataclass
class Pauses:
    """Lets the trials of an engine rest and go on."""

    engine: DaskEngine
    number: int = field(default=0)

    def begin(self, trial: int, config: dict[str, float] = ENDLESS) -> None:
        chain = Chain(trial, range(1, 2), 1, evaluate=False)
        self.engine.submit(Round(trial, (chain,)), {trial: config})
        self.await_bound(trial)

    def pause(self, trial: int) -> PieceRecord:
        """Give the message of the piece that it has trained."""
        self.number += 1
        self.engine.tell(TrialHeld(trial, self.number))
        rests = TrialRests(trial, self.number)
        heard = listen(self.engine, until=lambda heard: rests in heard)
        cuts = [piece for piece in of(PieceRecord, heard) if piece.unit.trial == trial]
        if cuts:
            return cuts[-1]
        self.go_on(trial)  # it was told to rest before it had begun
        return self.pause(trial)

    def go_on(self, trial: int) -> None:
        self.number += 1
        self.engine.tell(TrialAllowed(trial, 1, None, self.number))
        look_up(self.engine)
        self.await_bound(trial)

    def await_bound(self, trial: int) -> None:
        name = plugin_name(self.engine.spec.run)

        def is_bound(dask_scheduler: Any) -> bool:
            bindings = dask_scheduler.plugins[name].dispatcher.bindings
            return any(unit.trial == trial for unit in bindings)

        wait_until(lambda: self.engine.client.run_on_scheduler(is_bound), "its unit is bound")

    def warm(self) -> dict[str, set[Unit]]:
        """Units that wait in memory, by worker."""
        found = self._on_workers(lambda units: set(units.states.warm))
        return {worker: units for worker, units in found.items() if units}

    def is_idle(self) -> bool:
        return all(self._on_workers(lambda units: units.is_idle()).values())

    def _on_workers(self, ask: Callable[[UnitRunner], T]) -> dict[str, T]:
        name = plugin_name(self.engine.spec.run)

        def answer(dask_worker: Any) -> T:
            return ask(dask_worker.plugins[name].units)

        return dict(self.engine.client.run(answer))

    def swap(self) -> None:
        """Let trial 0, which rests, go on on the other worker than the one that it was on."""
        self.begin(2)  # takes the free worker, as trial 1 trains on the other one
        self.pause(1)
        self.go_on(0)


def trained(piece: PieceRecord) -> int:
    assert piece.n_samples is not None
    return piece.n_samples


@contextmanager
def pauses_on(
    client: Client, data: ShardedDataset, run_dir: str, **options: Any
) -> Iterator[Pauses]:
    workload = SyntheticWorkload(seconds=lambda config: config["s"], n_batches=N_BATCHES)
    dispatch = {"replicas": 2}
    with engine_for(client, data, workload, run_dir, dispatch=dispatch, **options) as engine:
        yield Pauses(engine)


@pytest.fixture
def pauses(client: Client, data: ShardedDataset, run_dir: str) -> Iterator[Pauses]:
    with pauses_on(client, data, run_dir) as pauses:
        yield pauses


def test_where_it_rested_it_goes_on_without_the_store(pauses: Pauses) -> None:
    pauses.begin(0)
    first = pauses.pause(0)
    assert pauses.warm() == {first.worker: {UNIT}}
    pauses.engine.spec.run_dir.states.delete(0, 1, 0, partial=True)
    pauses.go_on(0)
    second = pauses.pause(0)
    assert second.worker == first.worker
    assert trained(second) > trained(first)


def test_it_rests_and_goes_on_on_the_same_worker_while_that_is_free(pauses: Pauses) -> None:
    pauses.begin(0)
    pauses.begin(1)
    homes = [pauses.pause(trial).worker for trial in (0, 1)]
    for trial in (0, 1, 1, 0):
        pauses.go_on(trial)
        assert pauses.pause(trial).worker == homes[trial]


def test_elsewhere_it_goes_on_from_the_store_and_nothing_old_is_used(pauses: Pauses) -> None:
    pauses.begin(0)
    pauses.begin(1)
    first = pauses.pause(0)
    pauses.swap()
    second = pauses.pause(0)
    assert second.worker != first.worker
    assert trained(second) > trained(first)
    pauses.go_on(1)  # on the free worker; trial 2 is where trial 0 rested first
    pauses.pause(2)
    pauses.go_on(0)
    third = pauses.pause(0)
    assert third.worker == first.worker
    assert trained(third) > trained(second)


def test_what_waits_in_memory_goes_when_the_unit_is_done_elsewhere(pauses: Pauses) -> None:
    pauses.begin(0, SHORT)
    pauses.begin(1)
    pauses.pause(0)
    pauses.swap()
    listen(pauses.engine, until=lambda heard: UNIT in done(heard))
    wait_until(
        lambda: not any(UNIT in units for units in pauses.warm().values()), "it is warm nowhere"
    )


def test_what_waits_in_memory_goes_when_its_trial_is_stopped(pauses: Pauses) -> None:
    pauses.begin(0)
    pauses.pause(0)
    pauses.engine.stop(0)
    look_up(pauses.engine)
    wait_until(lambda: not pauses.warm(), "nothing is warm")


def test_a_trial_that_is_stopped_while_it_trains_leaves_nothing_in_memory(pauses: Pauses) -> None:
    pauses.begin(0)
    wait_until(lambda: not pauses.is_idle(), "a worker is busy")
    pauses.engine.stop(0)
    look_up(pauses.engine)
    wait_until(pauses.is_idle, "all workers are idle")
    wait_until(lambda: not pauses.warm(), "nothing is warm")


def test_where_memory_is_short_it_goes_on_from_the_store(
    client: Client, data: ShardedDataset, run_dir: str
) -> None:
    with pauses_on(client, data, run_dir, spec={"state_share": 1e-6}) as pauses:
        pauses.begin(0)
        first = pauses.pause(0)
        assert pauses.warm() == {}
        pauses.go_on(0)
        assert trained(pauses.pause(0)) > trained(first)


def test_after_the_loss_of_its_worker_it_goes_on_from_the_store(
    data: ShardedDataset, tmp_path: Path
) -> None:
    with client_of(2) as client, pauses_on(client, data, str(tmp_path / "run")) as pauses:
        pauses.begin(0)
        first = pauses.pause(0)
        (pid,) = client.run(os.getpid, workers=[first.worker]).values()
        os.kill(pid, signal.SIGKILL)
        listen(pauses.engine, until=lambda heard: of(WorkerRemoved, heard))
        pauses.go_on(0)
        second = pauses.pause(0)
    assert second.worker != first.worker
    assert trained(second) > trained(first)
