"""What the engine costs on a real cluster, against the bound (sum of unit times / workers).

python tests/benchmarks/engine.py [--only sleep,noop,mixed,scaling,hops]

What is imported is set apart from the garbage collector, as `dagsel.optimize` does in a script: a
full collection stops both workers for 0.05 to 0.1 s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
from distributed import Client, LocalCluster, wait

from dagsel.dispatch.dispatcher import DispatchConfig
from dagsel.dispatch.events import FailRun
from dagsel.dispatch.units import Chain, Round
from dagsel.execution.cluster import workers_of
from dagsel.execution.engine import DaskEngine
from dagsel.execution.run_spec import RESOURCE, RunSpec
from dagsel.garbage import set_imports_apart
from dagsel.messages import TrialReport, UnitRecord
from dagsel.state import State, Tensor
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload


def make_data(folder: str, n_shards: int) -> ShardedDataset:
    arrays = {"x": np.zeros((n_shards * 20, 4), np.float32)}
    return ShardedDataset.write(
        f"{folder}/{n_shards}.zarr", arrays, n_shards=n_shards, overwrite=True
    )


def run_round(
    client: Client,
    data: ShardedDataset,
    folder: str,
    workload: SyntheticWorkload,
    configs: dict[int, dict[str, Any]],
    *,
    epochs: int = 1,
) -> tuple[float, float]:
    """Run one round of training units; give its seconds and the sum of the units' seconds."""
    run = uuid.uuid4().hex[:8]
    run_dir = RunDir(f"{folder}/{run}")
    run_dir.claim(run, {})
    spec = RunSpec(run, cloudpickle.dumps(workload), data, run_dir, 0)
    with DaskEngine(client, spec, DispatchConfig(n_shards=data.n_shards)) as engine:
        wait_for_shards(engine, data.n_shards, configs)
        n_units = len(configs) * data.n_shards * epochs
        chains = tuple(
            Chain(t, range(1, epochs + 1), data.n_shards, evaluate=False) for t in configs
        )
        start = time.perf_counter()
        engine.submit(Round(1, chains), configs)
        busy, n_done = 0.0, 0
        while n_done < n_units:
            for message in engine.messages(timeout_s=30):
                if isinstance(message, UnitRecord):
                    n_done += 1
                    busy += message.stop - message.start
                elif isinstance(message, TrialReport | FailRun):
                    raise SystemExit(message)
        return time.perf_counter() - start, busy


def wait_for_shards(engine: DaskEngine, n_shards: int, configs: dict[int, dict[str, Any]]) -> None:
    """Run a first unit of a trial of its own, so that the shards are where they will be."""
    warm = max(configs) + 1
    engine.submit(
        Round(0, (Chain(warm, range(1, 2), n_shards, evaluate=False),)), {warm: {"ms": 1}}
    )
    n_done = 0
    while n_done < n_shards:
        n_done += sum(isinstance(message, UnitRecord) for message in engine.messages(timeout_s=30))


def cluster_of(n_workers: int) -> LocalCluster:
    return LocalCluster(
        n_workers=n_workers,
        threads_per_worker=2,
        resources={RESOURCE: 1},
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    )


def bench_sleep(folder: str) -> list[tuple[str, float, float]]:
    with cluster_of(2) as cluster, Client(cluster) as client:
        data = make_data(folder, 16)
        configs: dict[int, Any] = {trial: {} for trial in range(16)}
        seconds, _ = run_round(client, data, folder, SyntheticWorkload(seconds=0.05), configs)
    return [("256 units of 50 ms on 2 workers / ideal", seconds / 6.4, 1.03)]


def bench_noop(folder: str) -> list[tuple[str, float, float]]:
    with cluster_of(2) as cluster, Client(cluster) as client:
        data = make_data(folder, 16)
        configs: dict[int, Any] = {trial: {} for trial in range(64)}
        seconds, _ = run_round(client, data, folder, SyntheticWorkload(), configs)
    return [("1,024 no-op units on 2 workers, ms a unit", seconds / 1.024, 4.0)]


def bench_mixed(folder: str) -> list[tuple[str, float, float]]:
    rng = np.random.default_rng(0)
    configs = {t: {"ms": float(ms)} for t, ms in enumerate(rng.uniform(20, 200, 64))}
    workload = SyntheticWorkload(seconds=lambda config: config["ms"] / 1000)
    with cluster_of(16) as cluster, Client(cluster) as client:
        data = make_data(folder, 16)
        seconds, _ = run_round(client, data, folder, workload, configs)
    bound = sum(config["ms"] for config in configs.values()) / 1000 * 16 / 16
    return [("64 trials × 16 shards of 20–200 ms on 16 workers / bound", seconds / bound, 1.08)]


def bench_scaling(folder: str) -> list[tuple[str, float, float]]:
    seconds = {}
    for n_workers in (1, 8):
        with cluster_of(n_workers) as cluster, Client(cluster) as client:
            data = make_data(folder, 32)
            configs: dict[int, Any] = {trial: {} for trial in range(16)}
            workload = SyntheticWorkload(seconds=0.1)
            seconds[n_workers], _ = run_round(client, data, folder, workload, configs)
    return [("1 worker / 8 workers, at least the bar", -seconds[1] / seconds[8], -7.6)]


def make_array(n_bytes: int) -> Any:
    return np.ones(n_bytes, np.uint8)


def make_state(n_bytes: int) -> State:
    halves = np.ones((2, n_bytes // 2), np.uint8)
    return State.pack({str(i): Tensor.from_numpy(half) for i, half in enumerate(halves)}, {})


def take(value: Any) -> int:
    return sys.getsizeof(value)


def bench_hops(folder: str) -> list[tuple[str, float, float]]:
    rows = []
    with cluster_of(2) as cluster, Client(cluster) as client:
        one, other = sorted(workers_of(client))
        for megabytes, repeats in ((4, 40), (100, 12), (800, 6)):
            seconds: dict[str, list[float]] = {"array": [], "state": []}
            for _ in range(repeats):
                for kind, make in (("array", make_array), ("state", make_state)):
                    made = client.submit(make, megabytes * 10**6, workers=[one], pure=False)
                    wait(made)
                    start = time.perf_counter()
                    client.submit(take, made, workers=[other], pure=False).result()
                    seconds[kind].append(time.perf_counter() - start)
            array, state = (statistics.median(seconds[kind]) for kind in ("array", "state"))
            rows.append((f"hop of {megabytes} MB, {array * 1e3:.0f} ms as an array, state / array",
                         state / array, 1.15))  # fmt: skip
    return rows


BENCHES: dict[str, Callable[[str], list[tuple[str, float, float]]]] = {
    "sleep": bench_sleep,
    "noop": bench_noop,
    "mixed": bench_mixed,
    "scaling": bench_scaling,
    "hops": bench_hops,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(BENCHES))
    args = parser.parse_args()
    set_imports_apart()
    missed = False
    print("| what | measured | bar | |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only.split(","):
            for what, value, bar in BENCHES[name](folder):
                ok = value <= bar
                missed |= not ok
                verdict = "held" if ok else "**missed**"
                print(f"| {what} | {abs(value):.3f} | {abs(bar)} | {verdict} |", flush=True)
    sys.exit(3 if missed else 0)  # a crash ends with 1


if __name__ == "__main__":
    main()
