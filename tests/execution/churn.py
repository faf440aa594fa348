"""A search whose workers are killed, added and drained while it runs, for one seed."""

from __future__ import annotations

import os
import random
import signal
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import dask
from distributed import Client, LocalCluster, SchedulerPlugin

from dagsel.dispatch.dispatcher import DispatchConfig
from dagsel.dispatch.events import Drained, DrainRequested, FailRun, UnitTrains
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.execution.cluster import close, workers_of
from dagsel.execution.engine import DaskEngine
from dagsel.execution.run_spec import RESOURCE, RunSpec, plugin_name, worker_topic
from dagsel.messages import NOTICES, TrialReport, UnitRecord, UnitsDone
from dagsel.state import State
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload, seen

N_TRIALS, N_SHARDS, N_EPOCHS = 8, 6, 2


@dataclass
class Outcome:
    """What a churned search came to."""

    visits: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    n_started: int = 0
    n_kills: int = 0
    leaving: set[str] = field(default_factory=set)  # workers that were told to go
    failed: list[str] = field(default_factory=list)

    @property
    def n_needed(self) -> int:
        return N_TRIALS * N_SHARDS * N_EPOCHS


def churn(folder: str, data: ShardedDataset, seed: int) -> Outcome:
    """Run a search of sleeping units; after every few units something happens to a worker."""
    chance = random.Random(seed)
    outcome = Outcome()
    run = uuid.uuid4().hex[:8]
    run_dir = RunDir(f"{folder}/{run}")
    run_dir.claim(run, {})
    workload = SyntheticWorkload(seconds=lambda config: config["s"], n_batches=3, state_bytes=1000)
    spec = RunSpec(run, cloudpickle.dumps(workload), data, run_dir, seed)
    configs = {trial: {"s": chance.uniform(0.01, 0.06)} for trial in range(N_TRIALS)}
    # Dask gives up a worker that is away 15 s after it was lost, be it for the second time; nobody
    # asks for it again here.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"})
    cluster = LocalCluster(
        n_workers=3,
        threads_per_worker=2,
        resources={RESOURCE: 1},
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=50,
    )
    try:
        run_search(cluster, spec, configs, chance, outcome)
    finally:
        close(cluster)
    return outcome


def run_search(
    cluster: LocalCluster,
    spec: RunSpec,
    configs: dict[int, dict[str, float]],
    chance: random.Random,
    outcome: Outcome,
) -> None:
    """Run the round while workers come and go, and note what came of it."""
    with (
        Client(cluster, set_as_default=False) as client,
        DaskEngine(client, spec, DispatchConfig(n_shards=N_SHARDS), poll_s=60.0) as engine,
    ):
        client.register_plugin(Notices())
        epochs = range(1, N_EPOCHS + 1)
        chains = tuple(Chain(t, epochs, N_SHARDS, evaluate=t % 2 == 0) for t in configs)
        engine.submit(Round(1, chains), configs)
        wanted = {unit for chain in chains for unit in chain.units}
        wanted |= {
            unit for chain in chains for epoch in epochs for unit in chain.evaluations(epoch)
        }
        due = chance.randint(8, 20)
        done: set[Unit] = set()
        while done < wanted:
            heard = list(engine.messages(timeout_s=60))
            if not heard:
                stalled = {"left": sorted(wanted - done), "bound": bindings(client, spec.run)}
                outcome.failed.append(f"stalled: {stalled}")
                return
            for message in heard:
                if isinstance(message, UnitRecord):
                    done.add(message.unit)
                    due -= 1
                elif isinstance(message, TrialReport | FailRun):
                    outcome.failed.append(repr(message))
                    return
                elif isinstance(message, Drained):
                    client.retire_workers([message.worker], close_workers=True)
                    # Never fewer than there are: `scale` would close a worker in its unit.
                    cluster.scale(4)
            if due <= 0 and outcome.n_kills < 4 and done < wanted:
                due = chance.randint(8, 20)
                disturb(client, cluster, engine, chance, outcome)
        for trial in configs:
            blob, _ = spec.run_dir.states.load(trial, N_EPOCHS, N_SHARDS - 1)
            outcome.visits[trial] = seen(State(blob))
        outcome.n_started = started_units(client, spec.run)


def disturb(
    client: Client,
    cluster: LocalCluster,
    engine: DaskEngine,
    chance: random.Random,
    outcome: Outcome,
) -> None:
    workers = set(workers_of(client))
    if not workers:
        return
    victim = chance.choice(sorted(workers))
    match chance.choice(["kill", "kill", "kill", "drain", "add"]):
        case "kill":
            pids = {nanny.worker_address: nanny.pid for nanny in list(cluster.workers.values())}
            if pid := pids.get(victim):  # a worker may be on its way out
                outcome.n_kills += 1
                os.kill(pid, signal.SIGKILL)
        case "drain" if workers - outcome.leaving - {victim}:  # else all would go
            outcome.leaving.add(victim)
            engine.tell(DrainRequested(victim))
        case "add":
            cluster.scale(4)


def bindings(client: Client, run: str) -> dict[str, str]:
    """Say which units are with which worker, as the dispatcher has it."""

    def say(dask_scheduler: Any) -> dict[str, str]:
        bound = dask_scheduler.plugins[plugin_name(run)].dispatcher.bindings
        return {str(unit): str(binding) for unit, binding in bound.items()}

    return dict(client.run_on_scheduler(say))


class Notices(SchedulerPlugin):
    """Keeps what workers tell, also of runs that have ended."""

    name, idempotent = "notices", True

    def __init__(self) -> None:
        self.told: dict[str, list[Any]] = {}

    def log_event(self, topic: str, msg: Any) -> None:
        if str(topic).endswith("-workers"):
            self.told.setdefault(topic, []).append(msg)


def started_units(client: Client, run: str) -> int:
    """Count the training units that workers have begun; a found result is no start.

    `Notices` keeps what they have told.

    A task says that its first unit begins, and at its end how many more it has trained; of one that
    was lost only the first unit counts.
    """

    def count(dask_scheduler: Any) -> int:
        n = 0
        for message in dask_scheduler.plugins["notices"].told.get(worker_topic(run), ()):
            (notice,) = NOTICES.from_text(message["notice"])
            n += isinstance(notice, UnitTrains)
            if isinstance(notice, UnitsDone):
                done = [it for it in notice.work if it.unit.kind == "train"]
                n += sum(not it.recovered for it in done if isinstance(it, UnitRecord)) - 1
        return n

    return int(client.run_on_scheduler(count))


def broken_laws(outcome: Outcome) -> list[str]:
    """Say what is wrong with an outcome."""
    wrong = [f"failed: {message}" for message in outcome.failed]
    batches = {(shard, batch) for shard in range(N_SHARDS) for batch in range(3)}
    for trial, visits in outcome.visits.items():
        for epoch in range(1, N_EPOCHS + 1):
            count = Counter((shard, batch) for e, shard, batch in visits if e == epoch)
            if count != Counter(batches):
                wrong.append(f"trial {trial}, epoch {epoch}: {count}")
    if not outcome.failed and outcome.n_started - outcome.n_needed > outcome.n_kills:
        wrong.append(
            f"{outcome.n_started} units began, {outcome.n_needed} were needed, "
            f"{outcome.n_kills} workers were killed"
        )
    return wrong
