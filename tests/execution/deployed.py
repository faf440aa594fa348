"""Searches for any kind of cluster, what must hold of each, and a driver that can be killed."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optuna

import dagsel
from dagsel.execution.workforce import ASK_AGAIN_S
from dagsel.flow import (
    Ask,
    Asked,
    Decision,
    Event,
    Finish,
    Flow,
    Reported,
    Scale,
    Stop,
    Train,
    WorkersChanged,
)
from dagsel.flows import ASHA, SEER
from dagsel.messages import ENTRIES, Turn
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.base import never
from tests.driver.scripted import Scripted

UNIT_S, N_BATCHES, N_SHARDS = 0.25, 5, 4
N_MOST = 4  # workers that each search wants at most
#: One batch, 2 s to end and to release a worker, and as much for a machine that does other things.
RELEASE_S = UNIT_S / N_BATCHES + 2 + 3
#: Until a lost worker is asked for again, at most.
REPLACE_S = ASK_AGAIN_S + 1
#: Until a request has come to the cluster, on a machine that does other things.
MOMENT_S = 0.1
# Of a search. These times and those above are as much longer as the machine is slower.
DEADLINE_S, BUDGET_S, MIN_STAGE_S = 12.0, 36.0, 3.0


def growing(patience: int = 2) -> Flow:
    """Four trials until four workers have trained them; then the best goes on until there is one.

    `patience` is how many epochs they train at most to wait for the workers.
    """

    n_workers = 1
    n_with_all = 0  # epochs that have ended since there are four
    best: int | None = None
    values: dict[int, float] = {}

    def answer(event: Event) -> list[Decision]:
        nonlocal n_workers, n_with_all, best
        match event:
            case WorkersChanged(n):
                n_workers = n
            case Asked(trials):
                return [Train(trial, 1) for trial in trials]
            case Reported(trial, epoch) if best is None:
                values[trial] = event.value
                n_with_all += n_workers == N_MOST
                # At the first ones the fourth worker may have had no unit yet.
                has_waited = n_with_all > 2 * N_MOST or epoch >= patience
                if len(values) < N_MOST or not has_waited:
                    return [Train(trial, 1)]
                best = max(values, key=values.__getitem__)
                stops = [Stop(t, "not the best") for t in values if t != best]
                return [Scale(1), *stops, *([Train(best, 1)] if trial == best else [])]
            case Reported(trial, epoch):
                if n_workers > 1 and epoch < 2 * patience + 2:
                    return [Train(trial, 1)]
                return [Stop(trial, "the end", "complete"), Finish()]
        return []

    return Scripted([Scale(N_MOST), Ask(N_MOST)], answer)


def seer(slow: float) -> SEER:
    return SEER(
        DEADLINE_S * slow,
        BUDGET_S * slow,
        reduction_factor=2,
        max_workers_per_trial=1,
        min_stage=MIN_STAGE_S * slow,
        mode="paper",
    )


#: By name, for a machine that is so many times slower than one that does nothing else.
FLOWS: dict[str, Callable[[float], Flow]] = {
    "seer": seer,
    "asha": lambda slow: ASHA(max_epochs=4, n_trials=12, reduction_factor=2),
    "growth": lambda slow: growing(),
}


def value(config: Mapping[str, Any], epoch: int) -> float:
    return float(config["quality"]) - 1 / (1 + epoch)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"quality": trial.suggest_float("quality", 0.0, 1.0)}


def workload(folder: Path) -> SyntheticWorkload:
    """Return a workload that writes each batch that begins to a file."""
    path, n_batches = str(folder / "batches"), N_BATCHES

    class Noting(SyntheticWorkload):
        def train(
            self, state: Any, *args: Any, visit: Any, should_stop: Any = never, **rest: Any
        ) -> Any:
            last = state.tensors["seen"].numpy()[-1:, 2]
            batch = (int(last[0]) + 1) % n_batches if len(last) else 0

            def begin() -> None:
                nonlocal batch
                line = f"{visit.trial} {visit.epoch} {visit.shard} {batch}\n".encode()
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                os.write(file, line)
                os.close(file)
                batch += 1

            def stop() -> bool:
                if should_stop():
                    return True
                begin()
                return False

            begin()
            return super().train(state, *args, visit=visit, should_stop=stop, **rest)

    return Noting(UNIT_S, n_batches=N_BATCHES, value=value)


def data(folder: Path) -> ShardedDataset:
    arrays = {"x": np.arange(80)}
    return ShardedDataset.write(str(folder / "data.zarr"), arrays, n_shards=N_SHARDS)


@dataclass(frozen=True)
class Outcome:
    """What a search came to."""

    run: dagsel.Run
    called: float  # when, by the clock on the wall
    wall_s: float  # of the call
    folder: Path
    slow: float  # how many times slower the machine is than one that does nothing else

    @property
    def began(self) -> float:
        """When the run's time began, by the clock on the wall."""
        entries = self.run.run_dir.journal.read()
        return next(float(entry["at"]) for entry in entries if entry["is"] == "session")

    @property
    def end(self) -> float:
        """When the workers that came for the run had been released, by the clock on the wall."""
        entries = self.run.run_dir.journal.read()
        return next(float(entry["at"]) for entry in entries if entry["is"] == "ended")

    def within(self, moments: Iterable[float]) -> float:
        """Add up moments, by the clock on the wall, none of them outside the run."""
        return sum(min(max(moment, self.called), self.end) for moment in moments)

    @property
    def n_trained_again(self) -> int:
        """Batches that were begun more often than once."""
        counts = Counter((self.folder / "batches").read_text().split("\n")[:-1])
        return counts.total() - len(counts)

    def wanted(self) -> Iterator[tuple[float, int]]:
        """Yield when the flow wanted how many workers, by the clock on the wall."""
        for entry in map(ENTRIES.decode, self.run.run_dir.journal.read()):
            if isinstance(entry, Turn) and entry.seconds is not None:
                scales = [each for each in entry.decisions if isinstance(each, Scale)]
                yield from ((self.began + entry.seconds, each.n_workers) for each in scales)


def search(flow: Flow, folder: Path, slow: float = 1.0, **options: Any) -> Outcome:
    """Search within the limits, on a machine that is so many times slower."""
    study = options.pop("study", None) or optuna.create_study(direction="maximize")
    written, optimize = data(folder), dagsel.optimize  # which imports what it needs
    called = time.time()
    run = optimize(
        study,
        workload(folder),
        written,
        space=space,
        flow=flow,
        metric="value",
        run_dir=str(folder / "run"),
        **{
            "deadline": DEADLINE_S * slow,
            "budget": BUDGET_S * slow,
            "max_cluster_workers": N_MOST,
            **options,
        },
    )
    return Outcome(run, called, time.time() - called, folder, slow)


def check_limits(outcome: Outcome, *, release_s: float = RELEASE_S) -> None:
    """Deadline and budget hold, but for the release of the workers."""
    slow = outcome.slow
    assert outcome.run.record.seconds <= (DEADLINE_S + RELEASE_S) * slow
    assert outcome.wall_s <= (DEADLINE_S + RELEASE_S + release_s) * slow
    assert outcome.run.worker_seconds <= (BUDGET_S + N_MOST * release_s) * slow


def check_bill(
    outcome: Outcome, again: float, *, n_asked: int, n_lost: int = 0, late: float = 0.0
) -> None:
    """The bill is what the cluster's own log says: `again`.

    A request takes a moment to become a worker of the cluster's, or none any more. For a worker
    that is lost, another one is billed as if it had been asked for at once. So many seconds may
    not be billed between giving up workers and their coming all the same: `late`.
    """
    billed = outcome.run.worker_seconds
    off = 0.01 * again + MOMENT_S * n_asked * outcome.slow
    told = f"billed {billed:.2f}, and {again:.2f} by the cluster's log"
    assert again - late - off <= billed <= again + off + n_lost * REPLACE_S * outcome.slow, told


def check_model(outcome: Outcome) -> None:
    """There is a model, the best one, and it has seen each batch once."""
    run = outcome.run
    assert run.failures == []
    seen = run.best_model()
    config = run.record.trials[run.best.trial].config
    assert run.best_value == value(config, max(epoch for epoch, _, _ in seen))
    assert set(Counter(seen).values()) == {1}
    complete = set(product(range(1, run.best.epoch), range(N_SHARDS), range(N_BATCHES)))
    assert complete <= set(seen)


@contextmanager
def clusters(kind: str, folder: Path, gateway: str = "") -> Iterator[Any]:
    """Give a cluster of a kind, with a worker; `gateway` is the address of a server.

    Workers import this module, and need nothing of what a cluster is made with.
    """
    match kind:
        case "local":
            from .helpers import own_cluster

            with own_cluster(1) as here:
                yield here
        case "machines":
            from .machines import Provider, cluster_of

            with cluster_of(Provider(folder)) as rented:
                yield rented
        case "gateway":
            from dask_gateway import GatewayCluster

            cluster = GatewayCluster(address=gateway, auth="basic")
            try:
                with cluster:
                    cluster.scale(1)
                    with cluster.get_client(set_as_default=False) as client:
                        client.wait_for_workers(1, timeout=60)
                    yield cluster
            finally:
                del cluster.gateway._loop_runner  # its __del__ asks for a loop that has ended


if __name__ == "__main__":
    # What is sent to the workers must be found there under the name it has here.
    from tests.execution import deployed

    kind, flow, path, gateway, slower = sys.argv[1:]
    folder, slow = Path(path), float(slower)
    storage = f"sqlite:///{folder}/study.db"
    study = optuna.create_study(study_name="test", storage=storage, direction="maximize")
    with deployed.clusters(kind, folder, gateway) as cluster:
        if flow == "asha":  # which asks for no worker itself
            cluster.scale(N_MOST)
        deployed.search(deployed.FLOWS[flow](slow), folder, slow, study=study, cluster=cluster)
