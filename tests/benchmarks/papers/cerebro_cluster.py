"""Cerebro's Table 2, Figure 7's storage and Figure 8A on worker processes.

    python tests/benchmarks/papers/cerebro_cluster.py [--out FOLDER] [--only real-table-2]

A worker is a process that trains in one thread. There may be more of them than cores: where time is
measured on more than two, their units sleep. The page says what is assumed. ``--quick`` is a test
of the script. It takes 6 minutes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import matplotlib.pyplot as plt
import numpy as np
import optuna
import pandas as pd
from distributed import Client

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import dagsel
from dagsel.flows import Grid
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.manifest import SPLITS
from dagsel.testing.synthetic import CountingWorkload
from tests.benchmarks import grids
from tests.benchmarks.papers import mnist, pages

NAMES = pages.SCRIPTS["cerebro"]["cerebro_cluster"]
#: Four learning rates and two regularizations, as in the paper's Section 6.2.
GRID: grids.Grid = {
    "lr": (0.003, 0.01, 0.03, 0.1), "weight_decay": (1e-4, 1e-3), "momentum": (0.9,),
}  # fmt: skip
BATCH = 64
N_HELD_OUT = 2000
#: Of a training unit that sleeps there.
N_BATCHES = 10


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained. The defaults are the paper's Section 6.2."""

    n_epochs: int = 5
    n_workers: tuple[int, ...] = (1, 2, 4, 8)
    unit_s: float = 0.25  # of Figure 8A
    failing_unit_s: float = 1.0  # of Figure 8B
    n_repeats: int = 3
    n_images: int = 8000
    grid: grids.Grid = field(default_factory=lambda: GRID)

    @property
    def n_configs(self) -> int:
        return len(grids.points(self.grid))


QUICK = Size(2, (1, 2, 4), 0.02, 0.2, 1, 400, {**GRID, "lr": (0.01, 0.1)})


@contextmanager
def client_of(n_workers: int) -> Iterator[Client]:
    """Give the client of a cluster of worker processes on this machine."""
    with mnist.cluster_of(n_workers) as cluster, Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(n_workers, timeout=120)
        yield client


def search(
    client: Client, data: ShardedDataset, workload: Any, folder: str, size: Size, **options: Any
) -> dagsel.Run:
    """Train all configurations for all epochs; without options each shard is on one worker."""
    metric = "value" if isinstance(workload, CountingWorkload) else "accuracy"
    return dagsel.optimize(
        optuna.create_study(direction="maximize"),
        workload,
        data,
        space=mnist.space_of(size.grid),
        flow=Grid(size.n_epochs, n_concurrent=size.n_configs),
        metric=metric,
        client=client,
        run_dir=f"{folder}/run",
        **{"replicas": 1, "progress": False, **options},
    )


def trained_by(run: dagsel.Run) -> pd.DataFrame:
    """Return the training units of a run."""
    timeline = run.timeline()
    return timeline[timeline.kind == "train"]


def seconds_of(run: dagsel.Run) -> float:
    """Return how long a run trained: from its first unit's begin to its last one's end."""
    units = run.timeline()
    return float(units.stop.max() - units.start.min())


def write_images(folder: str, images: mnist.Images, n_shards: int, size: Size) -> ShardedDataset:
    options = {"n_shards": n_shards, "n_images": size.n_images, "n_held_out": N_HELD_OUT}
    if size is QUICK:
        options["n_held_out"] = 80
    return mnist.write(f"{folder}/data", images, **options)


# ---- Table 2: what is sent


@dataclass(frozen=True, slots=True)
class Sent:
    """What hopped in a search: by dagsel's record, and by Dask's own counts."""

    state_bytes: int  # the largest state
    n_units: int  # of training
    n_to_train: int  # hops
    n_to_score: int
    fetched: tuple[int, int]  # states and bytes, by the logs of the workers that fetched
    n_bytes_given: int  # by the counters of the workers that gave
    n_bytes_read: int  # of the data, by all workers

    @property
    def n_hops(self) -> int:
        return self.n_to_train + self.n_to_score

    @property
    def agrees(self) -> bool:
        """Whether the record and both counts of Dask's say the same, but for a frame's header."""
        n_states, n_bytes = self.fetched
        rest = n_bytes - n_states * self.state_bytes
        return (
            n_states == self.n_hops
            and n_bytes == self.n_bytes_given
            and abs(rest) <= 0.01 * n_bytes + 1
        )


def transfers(dask_worker: Any) -> tuple[list[int], int]:
    """Return the sizes of the states that a worker has fetched, and the bytes that it has given."""
    keys = [item for log in dask_worker.transfer_incoming_log for item in log["keys"].items()]
    states = [n_bytes for key, n_bytes in keys if str(key[0]).startswith("train-")]
    return states, dask_worker.transfer_outgoing_bytes_total


def bytes_read(dask_worker: Any) -> int:
    """Return the bytes of shards that the worker has read for the search that runs."""
    plugins = dask_worker.plugins.items()
    runs = [plugin for name, plugin in plugins if name.startswith("dagsel-")]
    return sum(plugin.units.shards.counters.shard_bytes_read for plugin in runs)


def holds(dask_worker: Any) -> int:
    """Return the bytes of the tensors that the worker holds for the search that runs."""
    total = 0
    for name, plugin in dask_worker.plugins.items():
        if not name.startswith("dagsel-"):
            continue
        shards = plugin.units.shards
        for shard, split in product(shards, SPLITS):
            with shards.use(shard, split) as tensors:
                total += sum(tensor.nbytes for tensor in tensors.values())
    return total


def sent(n_workers: int, images: mnist.Images, size: Size) -> tuple[Sent, ShardedDataset]:
    """Train all configurations, a shard on each worker, and add up what hopped."""
    read = list[int]()

    def note(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        read[:] = client.run(bytes_read).values()

    with tempfile.TemporaryDirectory() as folder, client_of(n_workers) as client:
        data = write_images(folder, images, n_workers, size)
        run = search(client, data, mnist.workload(BATCH), folder, size, callbacks=[note])
        logs = client.run(transfers).values()
    hops = run.timeline().groupby("kind").hop.sum()
    fetched = [n_bytes for states, _ in logs for n_bytes in states]
    found = Sent(
        state_bytes=max(unit.state_bytes for unit in run.record.units),
        n_units=len(trained_by(run)),
        n_to_train=int(hops["train"]),
        n_to_score=int(hops["evaluate"]),
        fetched=(len(fetched), sum(fetched)),
        n_bytes_given=sum(given for _, given in logs),
        n_bytes_read=sum(read),
    )
    return found, data


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:,.2f}"


def table_2(folder: Path, images: mnist.Images, size: Size) -> str:
    k, n = size.n_epochs, size.n_configs
    measured, formulas = list[list[object]](), list[list[object]]()
    for p in size.n_workers[1:]:
        found, data = sent(p, images, size)
        m = found.state_bytes
        n_batches = -(-data.n_train // (p * BATCH))  # of a worker
        hopping = k * m * p * n + m * n
        by_dask = found.fetched[1]
        trained = found.n_to_train * m
        cells = [trained + n * m, found.n_to_score * m, by_dask, found.n_bytes_read]
        agrees = "yes" if found.agrees else "**no**"
        hops = f"{found.n_to_train} of {found.n_units}, {found.n_to_score}"
        measured.append([p, hops, *map(_mb, [hopping, *cells]), agrees])
        others = [
            p * data.nbytes + m * n, k * n * data.nbytes + m * n, 2 * k * m * p * n,
            2 * k * m * p * n * n_batches, k * m * p * n * n_batches,
        ]  # fmt: skip
        formulas.append([p, *map(_mb, [hopping, trained + n * m, *others])])
        print(f"table 2, {p} workers: {found}", file=sys.stderr, flush=True)
    head = [
        "workers", "hops to train, to score", "kmp·S + m·S", "to train", "to score",
        "both, by Dask", "data read", "record and Dask agree",
    ]  # fmt: skip
    other = [
        "workers", "model hopper", "measured", "task-parallel, all copied",
        "task-parallel, remote reads", "bulk synchronous", "parameter server", "all-reduce",
    ]  # fmt: skip
    return (
        f"### Table 2, measured: {n} CNNs, {k} epochs, one shard a worker\n\n"
        f"A state has m = {m / 1e3:,.1f} kB, the data {data.nbytes / 1e6:,.1f} MB. In MB; *to "
        "train* are the hops of dagsel's record times m, and m·S as in the formula; *by Dask* is "
        "what the workers' own logs of transfers say of both kinds of hops. *Agree*: the logs of "
        "those that fetched have as many states as the record, and the counters of those that gave "
        "as many bytes as the logs.\n\n"
        f"{pages.table(head, measured)}\n\n"
        "What the other approaches would send by the table's formulas with these sizes, in MB:\n\n"
        f"{pages.table(other, formulas)}"
    )


# ---- Figure 7: what is stored


def figure_7(folder: Path, images: mnist.Images, size: Size) -> str:
    p, rows = size.n_workers[-1], []
    replicas: tuple[tuple[str, Any], ...] = (("1", 1), ("3", 3), ('"auto", the default', "auto"))
    once = Size(1, size.n_workers, grid=size.grid, n_images=size.n_images)
    with tempfile.TemporaryDirectory() as place, client_of(p) as client:
        data = write_images(place, images, p, size)
        for told, asked in replicas:
            held = list[int]()

            def note(study: Any, trial: Any, held: list[int] = held) -> None:
                held[:] = client.run(holds).values()

            options = {"replicas": asked, "callbacks": [note], "hold": "memory"}
            with tempfile.TemporaryDirectory() as run_dir:
                search(client, data, mnist.workload(BATCH), run_dir, once, **options)
            cells = [min(held), max(held), sum(held)]
            share = f"{sum(held) / data.nbytes:.2f} D"
            rows.append([f"dagsel, replicas {told}", *map(_mb, cells), share])
            print(f"figure 7, replicas {told}: {cells}", file=sys.stderr, flush=True)
    rows.append(["task-parallel, p·D", *[_mb(data.nbytes)] * 2, _mb(p * data.nbytes), f"{p} D"])
    head = ["", "least on a worker (MB)", "most", "in all", ""]
    return (
        f"### Figure 7, storage measured: {p} workers, D = {_mb(data.nbytes)} MB\n\n"
        "The bytes of the tensors that the worker processes hold when the last configuration has "
        f"ended an epoch.\n\n{pages.table(head, rows)}"
    )


# ---- Figure 8A: speed-up


def sleeping(unit_s: float, n_shards: int) -> CountingWorkload:
    return CountingWorkload(unit_s, n_batches=N_BATCHES, n_shards=n_shards)


def write_nothing(folder: str, n_shards: int) -> ShardedDataset:
    arrays = {"x": np.zeros((20 * n_shards, 1), np.float32)}
    return ShardedDataset.write(f"{folder}/data", arrays, n_shards=n_shards)


def slept(n_workers: int, size: Size) -> float:
    n_shards = size.n_workers[-1]
    with tempfile.TemporaryDirectory() as folder, client_of(n_workers) as client:
        data = write_nothing(folder, n_shards)
        return seconds_of(search(client, data, sleeping(size.unit_s, n_shards), folder, size))


def really_trained(n_workers: int, images: mnist.Images, size: Size) -> float:
    with tempfile.TemporaryDirectory() as folder, client_of(n_workers) as client:
        data = write_images(folder, images, size.n_workers[-1], size)
        return seconds_of(search(client, data, mnist.workload(BATCH), folder, size))


def figure_8a(folder: Path, images: mnist.Images, size: Size) -> str:
    n_units = size.n_configs * size.n_epochs * size.n_workers[-1]
    sleep_s = {}
    for p in size.n_workers:
        sleep_s[p] = slept(p, size)
        print(f"figure 8A, {p} workers, asleep: {sleep_s[p]:.2f} s", file=sys.stderr, flush=True)
    train_s: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(size.n_repeats):
        for p, times in train_s.items():
            times.append(really_trained(p, images, size))
            print(f"figure 8A, {p} workers, CNN: {times[-1]:.2f} s", file=sys.stderr, flush=True)
    rows = [
        [p, "sleep", f"{took:.2f}", f"{n_units * size.unit_s / p:.2f}", "linear",
         f"{sleep_s[1] / took:.2f}"]
        for p, took in sleep_s.items()
    ]  # fmt: skip
    cnn = {p: statistics.median(times) for p, times in train_s.items()}
    speed_ups = [one / two for one, two in zip(*train_s.values(), strict=True)]
    spread = f"{cnn[1] / cnn[2]:.2f} ({min(speed_ups):.2f}–{max(speed_ups):.2f})"
    rows += [
        [1, "CNN", f"{cnn[1]:.2f}", "", "", "1.00"],
        [2, "CNN", f"{cnn[2]:.2f}", "", "linear", spread],
    ]
    figure, axis = plt.subplots(figsize=(4.2, 2.6))
    most = size.n_workers[-1]
    axis.plot([1, most], [1, most], "--", color="grey", label="linear")
    axis.plot([*sleep_s], [sleep_s[1] / took for took in sleep_s.values()], "o-", label="asleep")
    axis.plot([1, 2], [1, cnn[1] / cnn[2]], "s-", label="CNN")
    axis.set(xlabel="worker processes", ylabel="speed-up")
    axis.legend(fontsize=7)
    alt = "Figure 8A, measured: speed-up by number of worker processes"
    shown = pages.picture(figure, folder / "cerebro-real-figure-8a.svg", alt)
    plt.close(figure)
    head = ["workers", "units", "seconds", "ideal", "paper", "speed-up"]
    return (
        f"### Figure 8A, measured: speed-up\n\n{size.n_configs} configurations, {size.n_epochs} "
        f"epochs, {most} shards, each on one worker: {n_units} units. From the begin of the first "
        f"unit to the end of the last one. Units that sleep take {size.unit_s:g} s; the CNN's are "
        f"real training, medians of {size.n_repeats} (least–most).\n\n{pages.table(head, rows)}"
        f"\n\n{shown}"
    )


def main() -> None:
    parser = pages.parser_of(__doc__ or "", NAMES)
    mnist.add_data(parser)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    size, images = QUICK if args.quick else Size(), mnist.images(args.data)
    makers: tuple[pages.Part, ...] = (
        lambda folder: table_2(folder, images, size),
        lambda folder: figure_7(folder, images, size),
        lambda folder: figure_8a(folder, images, size),
    )
    parts = dict(zip(NAMES, makers, strict=True))
    options = " --quick" * args.quick
    pages.write("cerebro", parts, args.out, args.only, script="cerebro_cluster", options=options)


cloudpickle.register_pickle_by_value(sys.modules[__name__])

if __name__ == "__main__":
    main()
