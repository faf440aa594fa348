"""What simulated searches cost: one against a heap, and how the cost grows with the size.

    python tests/benchmarks/simulator.py [--all]

First 256 trials of 50 epochs on 16 workers and 4 shards, against pushing and popping a heap in the
same process: that ratio depends little on the machine, and the best of three tries counts. Then
ASHA with more and more trials and workers on 4 shards, each in a process of its own, in processor
time and memory; with `--all` also the largest, of a minute. Exits with 3 if a bar is missed.

Configurations are drawn uniformly. Optuna's default sampler looks at every trial for each draw: the
last row says what that adds.
"""

from __future__ import annotations

import argparse
import heapq
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna

from dagsel.flows import ASHA, RandomSearch
from dagsel.simulation import PowerLaw, SimulatedCluster, SimulatedRun, simulate

MOST = 10.0 / 1.6  # seconds of a search, where the heap operations take 1.6 s; 5.0 is usual
TRIES = 3  # another process may have disturbed one
SIZES = ((100, 16), (1_000, 128), (1_000, 1_024), (10_000, 1_024))
MOST_US = 200.0  # processor time of a unit, at any size
MOST_S = 60.0  # of a whole search
MOST_MB = 300.0  # resident memory of its process
STATUS = Path("/proc/self/status")


def heap_seconds(n: int = 400_000) -> float:
    began = time.process_time()
    queue: list[tuple[int, int]] = []
    seen: dict[int, Any] = {}
    for i in range(n):
        heapq.heappush(queue, (i * 7919 % n, i))
        seen[i * 7919 % n] = (i, str(i))
    while queue:
        at, _ = heapq.heappop(queue)
        seen[at] = seen[at][1]
    return time.process_time() - began


def width(trial: optuna.Trial) -> dict[str, float]:
    return {"width": trial.suggest_float("width", 0.0, 1.0)}


def search_seconds() -> tuple[float, int]:
    began = time.process_time()
    run = simulate(
        RandomSearch(max_epochs=50, n_trials=256),
        PowerLaw(epoch_s=lambda config: 30.0 + 60.0 * config["width"]),
        SimulatedCluster(n_workers=16),
        space=width,
    )
    return time.process_time() - began, len(run.record.units)


def against_a_heap() -> bool:
    for _ in range(TRIES):
        before = heap_seconds()
        seconds, n_units = search_seconds()
        ratio = 2 * seconds / (before + heap_seconds())
        verdict = "held" if ratio <= MOST else "**missed**"
        print(
            f"| simulated search of {n_units} units / heap | {ratio:.2f} | ≤ {MOST:g} | {verdict} |"
        )
        print(f"| µs a unit | {1e6 * seconds / n_units:.0f} | | |", flush=True)
        if ratio <= MOST:
            return True
    return False


def asha(n_trials: int, n_workers: int, sampler: optuna.samplers.BaseSampler) -> SimulatedRun:
    return simulate(
        ASHA(max_epochs=9, n_trials=n_trials),
        PowerLaw(epoch_s=lambda config: 30.0 + 60.0 * config["width"]),
        SimulatedCluster(n_workers=n_workers, n_shards=4),
        space=width,
        sampler=sampler,
    )


def most_kilobytes() -> int:
    """Return the most memory that this process has taken; `ru_maxrss` counts its parent's."""
    (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1])


def measure(n_trials: int, n_workers: int, sampler: str) -> None:
    """Print processor seconds, units and memory of one search as JSON."""
    samplers = optuna.samplers
    own = samplers.TPESampler(seed=0) if sampler == "tpe" else samplers.RandomSampler(seed=0)
    asha(8, 2, own)  # what the first search imports is no search's
    began = time.process_time()
    run = asha(n_trials, n_workers, own)
    seconds = time.process_time() - began
    print(json.dumps([seconds, len(run.record.units), most_kilobytes() / 1e3]))


def grown(n_trials: int, n_workers: int, sampler: str = "random") -> bool:
    command = [sys.executable, __file__, "--one", str(n_trials), str(n_workers), sampler]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, n_units, megabytes = json.loads(told)
    micros = 1e6 * seconds / n_units
    is_held = micros <= MOST_US and seconds <= MOST_S and megabytes <= MOST_MB
    bar = f"≤ {MOST_US:g} µs, {MOST_S:g} s, {MOST_MB:g} MB" if sampler == "random" else ""
    verdict = ("held" if is_held else "**missed**") if bar else ""
    print(
        f"| ASHA, {n_trials:,} trials × {n_workers:,} workers, {sampler}: {n_units:,} units | "
        f"{micros:.0f} µs a unit, {seconds:.1f} s, {megabytes:.0f} MB | {bar} | {verdict} |",
        flush=True,
    )
    return is_held or not bar


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--one", nargs=3)
    args = parser.parse_args()
    if args.one:
        measure(int(args.one[0]), int(args.one[1]), args.one[2])
        return 0
    print("| what | measured | bar | |\n| --- | --- | --- | --- |")
    held = [against_a_heap()]
    held += [grown(*size) for size in (SIZES if args.all else SIZES[:-1])]
    grown(1_000, 128, "tpe")
    return 0 if all(held) else 3  # a crash ends with 1


if __name__ == "__main__":
    sys.exit(main())
