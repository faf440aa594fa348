"""What fixing the orders of visits costs: makespans with ``deterministic=True`` over late binding.

In virtual time by the dispatcher itself, and once on a real cluster with sleeping units:

    python tests/benchmarks/determinism.py
"""

from __future__ import annotations

import random
import statistics
import tempfile

import numpy as np
import optuna
from distributed import Client

import dagsel
from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.units import Chain, Round, visit_order
from dagsel.execution.cluster import local_cluster
from dagsel.flows import RandomSearch
from dagsel.simulation.virtual_cluster import VirtualCluster
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

N_WORKERS, N_SHARDS, EPOCHS, SEEDS = 4, 8, 3, range(10)


def makespan(n_trials: int, replicas: int, seed: int, *, fixed: bool) -> float:
    seconds = random.Random(seed)
    costs = [seconds.uniform(0.5, 2.0) for _ in range(n_trials)]
    dispatcher = Dispatcher(DispatchConfig(N_SHARDS, replicas))
    cluster = VirtualCluster(dispatcher, lambda unit, worker, shard: costs[unit.trial])
    cluster.add_workers({f"w{k}": 1.0 for k in range(N_WORKERS)})
    chains = []
    for trial in range(n_trials):
        order = tuple(
            visit_order(N_SHARDS, seed=seed, trial=trial, epoch=epoch) if fixed else None
            for epoch in range(1, EPOCHS + 1)
        )
        chains.append(Chain(trial, range(1, EPOCHS + 1), N_SHARDS, order=order, evaluate=False))
    cluster.add_round(Round(0, tuple(chains)))
    return cluster.run().makespan_s


def real(client: Client, data: ShardedDataset, folder: str, *, deterministic: bool) -> float:
    study = optuna.create_study(study_name="determinism", direction="maximize")
    run = dagsel.optimize(
        study, SyntheticWorkload(lambda config: config["seconds"]), data, metric="value",
        space=lambda trial: {"seconds": trial.suggest_float("seconds", 0.02, 0.08)},
        flow=RandomSearch(EPOCHS, n_trials=16, n_concurrent=16), client=client,
        run_dir=f"{folder}/{deterministic}", deterministic=deterministic,
    )  # fmt: skip
    return float(run.makespans().makespan.max())


def main() -> None:
    print(f"{N_WORKERS} workers, {N_SHARDS} shards, {EPOCHS} epochs, unit times 1:4, "
          f"median of {len(SEEDS)} draws\n")  # fmt: skip
    print(
        "| trials a worker | 1 holder a shard | 2 holders | every worker |\n" + "| --- " * 4 + "|"
    )
    for per_worker in (1, 2, 4, 8):
        medians = []
        for replicas in (1, 2, N_WORKERS):
            ratios = [
                makespan(per_worker * N_WORKERS, replicas, seed, fixed=True)
                / makespan(per_worker * N_WORKERS, replicas, seed, fixed=False)
                for seed in SEEDS
            ]
            medians.append(f"{statistics.median(ratios):.2f}")
        print(f"| {per_worker} | {' | '.join(medians)} |", flush=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, local_cluster(N_WORKERS) as cluster:
        arrays = {"x": np.zeros((8 * N_SHARDS, 1))}
        data = ShardedDataset.write(f"{folder}/data", arrays, n_shards=N_SHARDS)
        with Client(cluster, set_as_default=False) as client:
            late, fixed = (real(client, data, folder, deterministic=d) for d in (False, True))
    print(f"\nOn a real cluster, 16 trials of units of 20 to 80 ms: {fixed / late:.2f}")


if __name__ == "__main__":
    main()
