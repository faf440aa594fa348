"""How long a trial takes to rest and to go on, by the size of its state: as MARBLE's Figure 9.

On two workers of a real cluster. Suspending: from the decision to the message that the trial rests,
its state in the store. Resuming: from the decision to the first batch; on the worker where it
rested, on another one, and with another number of workers. Medians.

    python tests/benchmarks/suspend_resume.py [--megabytes 1,100,500] [--repeats 5]

The trials sleep 2 ms a batch instead of training. A trial of no interest keeps the other worker
busy, so that only one is left to go on on.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
from distributed import Client

from dagsel.dispatch.dispatcher import DispatchConfig
from dagsel.dispatch.events import TrialAllowed, TrialHeld, TrialRests, UnitTrains
from dagsel.dispatch.units import Chain, Round
from dagsel.execution.cluster import local_cluster
from dagsel.execution.engine import DaskEngine
from dagsel.execution.run_spec import RunSpec, worker_topic
from dagsel.messages import NOTICES, PieceRecord
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.base import Trained

BATCH_S, N_BATCHES = 0.002, 1_000_000
WAYS = ("same worker", "another worker", "1 to 2 workers", "2 to 1 workers")


class Stamped(SyntheticWorkload):
    """Tells in place of a loss when its first batch began."""

    def _train(self, *args: Any) -> Trained:
        begun = time.time()
        return replace(super()._train(*args), loss=begun)


@dataclass
class Bench:
    """Trials that rest and go on as they are told: 0 is measured, 1 and 2 keep workers busy."""

    engine: DaskEngine
    settle_s: float
    number: int = 0
    resumed_at: float = 0.0
    begun: set[int] = field(default_factory=set)
    trains: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    suspends: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    resumes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def hear(self, event: tuple[float, dict[str, str]]) -> None:
        (message,) = NOTICES.from_text(event[1]["notice"])
        if isinstance(message, UnitTrains):
            self.trains.put(message.unit.trial)

    def go_on(self, trial: int, gang: int = 1) -> None:
        self.number += 1
        at = time.time()
        self.engine.tell(TrialAllowed(trial, gang, None, self.number))
        if trial not in self.begun:
            chain = Chain(trial, range(1, 2), 1, evaluate=False)
            self.engine.submit(Round(trial, (chain,)), {trial: {}})
            self.begun.add(trial)
        list(self.engine.messages(timeout_s=0))  # sends it
        while self.trains.get(timeout=60) != trial:
            pass
        time.sleep(self.settle_s)  # its state is there, and it trains
        if trial == 0:
            self.resumed_at = at

    def rest(self, trial: int) -> tuple[Any, float]:
        """Give what was told of its last piece, and how long it took to rest."""
        self.number += 1
        at = time.time()
        self.engine.tell(TrialHeld(trial, self.number))
        piece: PieceRecord | None = None
        while True:
            for message in self.engine.messages(timeout_s=60):
                if isinstance(message, PieceRecord) and message.unit.trial == trial:
                    piece = message
                if isinstance(message, TrialRests) and message.number == self.number:
                    return piece, time.time() - at

    def warm_up(self) -> None:
        """Train in a gang once: a process imports what it needs for its first one."""
        self.go_on(0)
        before, _ = self.rest(0)
        after = before
        while after.n_samples == before.n_samples:
            self.go_on(0, gang=2)
            after, _ = self.rest(0)

    def cycle(self, way: str, change: Callable[[], object], *, gang: int) -> None:
        """Let trial 0 rest, change what else runs, let it go on; note how long the way took."""
        before, suspend_s = self.rest(0)
        change()
        self.go_on(0, gang)
        after, _ = self.rest(0)  # tells when it began
        moved = before.worker != after.worker
        assert moved == (way == "another worker"), (way, before, after)
        assert after.n_samples > before.n_samples, "it went on at another sample"
        self.suspends[way].append(suspend_s)
        self.resumes[way].append(after.loss - self.resumed_at)
        self.go_on(0, gang)


def measure(client: Client, data: ShardedDataset, megabytes: int, n_repeats: int) -> None:
    run = uuid.uuid4().hex[:8]
    workload = Stamped(
        seconds=BATCH_S * N_BATCHES, n_batches=N_BATCHES, state_bytes=megabytes * 10**6
    )
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(folder)
        run_dir.claim(run, {})
        spec = RunSpec(run, cloudpickle.dumps(workload), data, run_dir, 0)
        with DaskEngine(client, spec, DispatchConfig(n_shards=1, replicas=2)) as engine:
            bench = Bench(engine, settle_s=0.1 + megabytes / 250)
            client.subscribe_topic(worker_topic(run), bench.hear)
            rotate(bench, n_repeats)
            client.unsubscribe_topic(worker_topic(run))
    for way in WAYS:
        suspend, resume = (
            1e3 * statistics.median(times[way]) for times in (bench.suspends, bench.resumes)
        )
        print(f"| {megabytes} MB | {way} | {suspend:.0f} ms | {resume:.0f} ms |", flush=True)


def rotate(bench: Bench, n_repeats: int) -> None:
    bench.warm_up()
    busy, other = 1, 2
    for trial in (0, busy):
        bench.go_on(trial)
    for _ in range(n_repeats):
        bench.cycle("same worker", lambda: None, gang=1)

        def exchange(busy: int = busy, other: int = other) -> None:
            bench.go_on(other)  # where trial 0 was
            bench.rest(busy)

        bench.cycle("another worker", exchange, gang=1)
        busy, other = other, busy
        bench.cycle("1 to 2 workers", partial(bench.rest, busy), gang=2)
        bench.cycle("2 to 1 workers", lambda: None, gang=1)
        bench.go_on(busy)
    for trial in (0, busy):  # else they write while the folder is removed
        bench.rest(trial)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", default="1,100,500")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("| state | goes on on | suspend | resume |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, local_cluster(2) as cluster:
        arrays = {"x": np.zeros((N_BATCHES, 1), np.uint8)}
        data = ShardedDataset.write(f"{folder}/data", arrays, n_shards=1)
        with Client(cluster, set_as_default=False) as client:
            for megabytes in map(int, args.megabytes.split(",")):
                measure(client, data, megabytes, args.repeats)


if __name__ == "__main__":
    main()
