"""Cerebro's Figure 8B: two of eight workers are killed and come back: its page in docs/measured.

    python tests/benchmarks/papers/cerebro_faults.py [--out FOLDER]

The units sleep, as there are more processes than cores; all else is real. The page says what is
assumed. ``--quick`` is a test of the script. It takes 2 minutes.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import optuna
from distributed import Client

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import dagsel
from dagsel.execution.run_spec import RESOURCE
from dagsel.storage import RunDir
from tests.benchmarks.papers import mnist, pages
from tests.benchmarks.papers.cerebro_cluster import (
    QUICK,
    Size,
    search,
    sleeping,
    trained_by,
    write_nothing,
)

NAMES = pages.SCRIPTS["cerebro"]["cerebro_faults"]


@dataclass
class Outsider:
    """A worker process that no cluster object starts again when it is lost."""

    address: str  # of the scheduler
    name: str
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "dask", "worker", self.address, "--no-nanny"]
        options = {"name": self.name, "nthreads": 2, "resources": f"{RESOURCE}=1"}
        command += [f"--{key}={value}" for key, value in options.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(mnist.ROOT)}
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, **quiet)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def warmed_up() -> None:
    """Import what a worker needs for its first unit: the cluster's own have it from the begin."""
    for name in ("torch", "dagsel.execution.worker_plugin", "dagsel.execution.timing"):
        import_module(name)


@contextmanager
def cluster_of(n_workers: int, n_outside: int) -> Iterator[tuple[Client, list[Outsider]]]:
    """Give a cluster of worker processes on this machine, and some more that may be killed."""
    with mnist.cluster_of(n_workers) as cluster, Client(cluster, set_as_default=False) as client:
        others = [Outsider(cluster.scheduler_address, f"killed-{n}") for n in range(n_outside)]
        try:
            for one in others:
                one.start()
            client.wait_for_workers(n_workers + n_outside, timeout=120)
            client.run(warmed_up)
            yield client, others
        finally:
            for one in others:
                one.kill()


@dataclass
class Fate:
    """Kills workers and brings them back, by the clock from the begin of the first unit."""

    workers: list[Outsider]
    kills_s: tuple[float, ...]
    return_s: float
    done: list[tuple[float, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def of(self, run_dir: str) -> Iterator[None]:
        """Do so in a thread of its own, until the search has ended."""
        thread = threading.Thread(target=self._follow, args=(run_dir,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()

    def _follow(self, run_dir: str) -> None:
        began = self._began(run_dir)
        kills = zip(self.kills_s, self.workers, strict=True)
        plan = [(at, one.name + " killed", one.kill) for at, one in kills]
        plan += [(self.return_s, one.name + " asked for", one.start) for one in self.workers]
        for at, told, act in sorted(plan, key=lambda step: step[0]):
            if self.over.wait(max(0.0, began + at - time.time())):
                return
            act()
            self.done.append((time.time() - began, told))

    def _began(self, run_dir: str) -> float:
        while not self.over.wait(0.02):
            entries = RunDir(run_dir).journal.read() if Path(run_dir).exists() else ()
            starts = [float(entry["start"]) for entry in entries if entry["is"] == "unit"]
            if starts:
                return min(starts)
        return math.inf


def rough(size: Size, *, fails: bool) -> tuple[dagsel.Run, list[tuple[float, str]]]:
    """Train on all workers; let two of them fail and return, or not."""
    n_shards = size.n_workers[-1]
    epoch_s = size.failing_unit_s * size.n_configs
    with tempfile.TemporaryDirectory() as folder, cluster_of(n_shards - 2, 2) as (client, others):
        data = write_nothing(folder, n_shards)
        fate = Fate(others, (1.5 * epoch_s, 1.75 * epoch_s), 3.5 * epoch_s)
        workload = sleeping(size.failing_unit_s, n_shards)
        with fate.of(f"{folder}/run") if fails else nullcontext():
            run = search(client, data, workload, folder, size, replicas=min(3, n_shards))
    return run, fate.done


def done_once(run: dagsel.Run, n_shards: int, size: Size) -> bool:
    """Whether each configuration has trained each batch once an epoch, by its own state."""
    units = trained_by(run)
    visits = set(zip(units.trial, units.epoch, units.shard, strict=True))
    is_whole = len(units) == len(visits) == size.n_configs * size.n_epochs * n_shards
    counts = run.metrics.query("name == 'miscounted' and split == 'validation'")
    return is_whole and len(counts) == size.n_configs * size.n_epochs and not counts.value.any()


def epochs_of(run: dagsel.Run) -> list[float]:
    """Return how long after the one before each epoch has ended for all configurations."""
    units = trained_by(run)
    ends = units.groupby("epoch").stop.max().to_numpy()
    return np.diff([units.start.min(), *ends]).tolist()


def figure_8b(folder: Path, size: Size) -> str:
    p = size.n_workers[-1]
    rows, told, figures = list[list[object]](), list[str](), list[Sequence[float]]()
    for label, fails in (("none", False), ("two", True)):
        run, done = rough(size, fails=fails)
        epochs = epochs_of(run)
        is_whole = "yes" if done_once(run, p, size) else "**no**"
        units = trained_by(run)
        is_lost, is_repeated = units.lost_seconds > 0, units.attempts > 1
        n_again, n_found = int(is_lost.sum()), int((is_repeated & ~is_lost).sum())
        rows.append([label, *(f"{took:.1f}" for took in epochs), is_whole, n_again, n_found])
        figures.append(epochs)
        told += [f"{what} after {at:.1f} s" for at, what in done]
        print(f"figure 8B, {label}: {rows[-1]}, {done}", file=sys.stderr, flush=True)
    figure, axis = plt.subplots(figsize=(4.2, 2.6))
    for took_s, label in zip(figures, ("no worker fails", "two fail and return"), strict=True):
        axis.plot(range(1, len(took_s) + 1), took_s, "o-", label=label)
    axis.set(xlabel="epoch", ylabel="seconds", ylim=(0, None))
    axis.legend(fontsize=7)
    alt = "Figure 8B, measured: seconds of each epoch when two of the worker processes are killed"
    shown = pages.picture(figure, folder / "cerebro-real-figure-8b.svg", alt)
    plt.close(figure)
    epochs_head = (f"epoch {e}" for e in range(1, size.n_epochs + 1))
    head = ["killed", *epochs_head, "all once", "trained again", "found in the store"]
    return (
        f"### Figure 8B, measured: two of {p} worker processes are killed and come back\n\n"
        f"{min(3, p)} copies; units sleep {size.failing_unit_s:g} s. Seconds from the end of an "
        "epoch of all configurations to that of the next one; whether each configuration has "
        "trained each batch once an epoch, as its own state says; units that trained again "
        "after they were lost with a worker, and units whose lost result was in the store.\n\n"
        f"{pages.table(head, rows)}\n\n{'; '.join(told)}.\n\n{shown}"
    )


def main() -> None:
    parser = pages.parser_of(__doc__ or "", NAMES)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    size = QUICK if args.quick else Size()
    makers: dict[str, pages.Part] = {NAMES[0]: lambda folder: figure_8b(folder, size)}
    options = " --quick" * args.quick
    pages.write("cerebro", makers, args.out, args.only, script="cerebro_faults", options=options)


if __name__ == "__main__":
    main()
