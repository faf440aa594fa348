"""What it costs to show a search with many live trials: the driver's own time, and the search's.

A real search on two workers of a real cluster, whose trials sleep 2 ms a unit: all of them live
from the beginning to the end. It is run without a display and with each kind of display, in turns.

    python tests/benchmarks/display.py [--trials 512] [--epochs 2] [--repeats 1]

`share` is the processor's time of the display of all the time that the search takes, bar 1%;
`shown` how often it was made anew; `each` what that takes. A notebook's display is measured without
its kernel: what is sent to the browser is made and written as JSON. The last column is what the
search took, as a multiple of the search without a display of the same turn (median).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from distributed import Client
from rich.console import Console

import dagsel
from dagsel import session
from dagsel.execution.cluster import local_cluster
from dagsel.flows import RandomSearch
from dagsel.history.record import Record
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.views import progress
from dagsel.views.notebook import view_data
from dagsel.views.snapshot import Snapshot

KINDS = ("table", "line", "log", "notebook")
BAR = 0.01


class Notebook:
    """What a notebook is sent."""

    shows_workers = True

    def start(self) -> None: ...

    def show(self, snapshot: Snapshot) -> None:
        json.dumps(view_data(snapshot, "running"))

    def stop(self, snapshot: Snapshot | None, error: BaseException | None) -> None: ...


class Measured(progress.SearchProgress):
    """Counts what it costs."""

    kind: Any = False
    spent_s, n_shown = 0.0, 0

    def __init__(self, metric: str, how: Any, **given: Any) -> None:
        console = Console(file=StringIO(), force_terminal=True, width=200, height=50)
        super().__init__(metric, how, **{**given, "console": console})
        if Measured.kind == "notebook":
            self._display = Notebook()

    def update(self, record: Record) -> None:
        began, due = time.thread_time(), self._due
        super().update(record)
        Measured.spent_s += time.thread_time() - began
        Measured.n_shown += self._due != due


def search(kind: Any, n_trials: int, n_epochs: int, client: Client, folder: Path) -> float:
    """Return how long a search takes that is shown so, from its first unit to its last."""
    Measured.kind, Measured.spent_s, Measured.n_shown = kind, 0.0, 0

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"x": trial.suggest_float("x", 0.0, 1.0), "width": trial.suggest_int("width", 1, 99)}

    run = dagsel.optimize(
        optuna.create_study(direction="maximize"),
        SyntheticWorkload(seconds=0.002),
        str(folder / "data.zarr"),
        space=space,
        flow=RandomSearch(max_epochs=n_epochs, n_trials=n_trials, n_concurrent=n_trials),
        metric="value",
        client=client,
        run_dir=tempfile.mkdtemp(dir=folder) + "/run",
        progress="table" if kind == "notebook" else kind,
    )
    units = run.record.timed()
    return max(unit.stop for unit in units) - min(unit.start for unit in units)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    vars(session)["SearchProgress"] = Measured
    shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    eaches: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS}
    with (
        tempfile.TemporaryDirectory() as there,
        local_cluster(2) as cluster,
        Client(cluster) as client,
    ):
        folder = Path(there)
        ShardedDataset.write(folder / "data.zarr", {"x": np.arange(40)}, n_shards=2)
        search(False, 4, 1, client, folder)
        for _ in range(given.repeats):
            plain_s = search(False, given.trials, given.epochs, client, folder)
            for kind in KINDS:
                took_s = search(kind, given.trials, given.epochs, client, folder)
                shares[kind].append(Measured.spent_s / took_s)
                ratios[kind].append(took_s / plain_s)
                eaches[kind].append((Measured.n_shown, Measured.spent_s))
    print(f"{given.trials} live trials, {given.epochs} epochs of 2 units, {given.repeats} turns\n")
    print("| display | share | bar | | shown | each | time of the search, as a multiple |")
    print("| --- " * 7 + "|")
    missed = False
    for kind in KINDS:
        share = statistics.median(shares[kind])
        n_shown = statistics.median(n for n, _ in eaches[kind])
        each_ms = 1e3 * statistics.median(spent / max(1, n) for n, spent in eaches[kind])
        ratio = statistics.median(ratios[kind])
        verdict = "**missed**" if share > BAR else "held"
        missed |= share > BAR
        print(
            f"| {kind} | {share:.2%} | {BAR:.0%} | {verdict} | {n_shown:.0f} | {each_ms:.1f} ms | "
            f"{ratio:.3f} |"
        )
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
