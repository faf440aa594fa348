"""MARBLE's Table II: how much sooner a queue of jobs is done than with the whole node for each.

Six job sets on a node of 6 GPUs, in the simulator. What the paper says is used: the best numbers of
GPUs, at most 3.3 times the speed on 6. What docs/marble.md says of it, and its table, is what this
prints:

    python tests/benchmarks/marble_table2.py [--draws 10] [--timelines]

The paper's inputs that we do not have are assumed: the rest of λ, which jobs a set holds and how
long they are, and what a switch costs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dagsel.flow import Flow
from dagsel.flows import JobQueue, Marble
from dagsel.flows.baselines import LSF, Optimus
from dagsel.planning.scaling import Scaling
from dagsel.simulation import PowerLaw, SimulatedCluster, SimulatedRun, simulate

Job = Mapping[str, Any]

N_GPUS = 6
N_JOBS = 12
EPOCH_S = 600.0  # on one GPU
EPOCHS = (5, 15)
SWITCH_S = 30.0

SCALING = {
    "ResNet-50": Scaling({2: 1.75, 3: 2.3, 4: 2.32, 5: 2.33, 6: 2.34}),
    "Inception-v3": Scaling({2: 1.8, 3: 2.45, 4: 2.95, 5: 3.0, 6: 3.02}),
    "VGG-16": Scaling({2: 1.85, 3: 2.6, 4: 3.2, 5: 3.6, 6: 3.3}),
}
#: VGG-16 without the loss on the sixth GPU, to see what it is worth.
FLAT = {**SCALING, "VGG-16": Scaling({2: 1.7, 3: 2.3, 4: 2.8, 5: 3.22, 6: 3.3})}

#: Which architectures a set holds, in turn.
SETS = {
    1: ("ResNet-50",),
    2: ("Inception-v3",),
    3: ("VGG-16",),
    4: ("Inception-v3", "VGG-16"),
    5: ("ResNet-50", "VGG-16"),
    6: ("ResNet-50", "Inception-v3", "VGG-16"),
}
PAPER = {1: 48.3, 2: 35.3, 3: 29.1, 4: 21.1, 5: 30.5, 6: 30.5}  # percent


def draw(
    number: int,
    seed: int,
    *,
    n_jobs: int = N_JOBS,
    epochs: tuple[int, int] = EPOCHS,
    epoch_s: float = EPOCH_S,
) -> list[Job]:
    """Draw the jobs of a set, in the order in which they come."""
    rng = random.Random(f"{number} {seed}")
    kinds = SETS[number]
    jobs: list[Job] = [
        {
            "architecture": kinds[index % len(kinds)],
            "epochs": rng.randint(*epochs),
            "epoch_s": epoch_s,
        }
        for index in range(n_jobs)
    ]
    rng.shuffle(jobs)
    return jobs


def flows(scaling: Mapping[str, Scaling] = SCALING, switch_s: float = SWITCH_S) -> dict[str, Flow]:
    """Give the policies that are compared."""
    return {
        "LSF": LSF(JobQueue()),
        "MARBLE": Marble(JobQueue(), scaling, switch_s=switch_s),
        "MARBLE, no switches": Marble(JobQueue(), scaling, switch_s=1e9),
        "Optimus": Optimus(JobQueue(), scaling),
    }


def play(
    jobs: Sequence[Job],
    flow: Flow,
    scaling: Mapping[str, Scaling] = SCALING,
    switch_s: float = SWITCH_S,
) -> SimulatedRun:
    """Run a queue in the simulator."""
    return simulate(
        flow,
        PowerLaw(
            epoch_s=lambda config: float(config["epoch_s"]),
            scaling=lambda config: scaling[config["architecture"]],
            n_batches=100_000_000,  # so short that a job stops at once
        ),
        SimulatedCluster(N_GPUS, n_shards=1, switch_s=switch_s),
        space=lambda trial: choose(trial, jobs),
    )


def choose(trial: optuna.Trial, jobs: Sequence[Job]) -> dict[str, Any]:
    """Draw the next job."""
    return dict(jobs[trial.suggest_int("job", 0, len(jobs) - 1)])


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time in which a job has a number of GPUs."""

    job: int
    begin_s: float
    end_s: float
    gang: int


def stretches(run: SimulatedRun) -> list[Stretch]:
    """Read off a run's journal which job had how many GPUs when."""
    found: list[Stretch] = []
    open_: dict[int, tuple[float, int]] = {}
    for entry in run.journal:
        for decision in entry["decisions"] if entry["is"] == "turn" else ():
            if decision["is"] not in ("Train", "Stop"):
                continue
            job, now_s = decision["trial"], entry["seconds"]
            if job in open_:
                begin_s, gang = open_.pop(job)
                found.append(Stretch(job, begin_s, now_s, gang))
            if decision["is"] == "Train":
                open_[job] = now_s, decision["gang"]
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of a queue."""

    seconds: float
    mean_s: float  # from the beginning to the end of a job
    busy: float  # share of the GPUs' time in which they belong to a job
    n_switches: int


def judge(run: SimulatedRun) -> Outcome:
    """Measure a run."""
    parts = stretches(run)
    ends = {part.job: part.end_s for part in parts}
    gpu_s = sum(part.gang * (part.end_s - part.begin_s) for part in parts)
    return Outcome(
        run.seconds,
        statistics.fmean(ends.values()),
        gpu_s / (N_GPUS * run.seconds),
        len(parts) - len(ends),
    )


def gantt(jobs: Sequence[Job], run: SimulatedRun, until_s: float, width: int = 72) -> str:
    """Draw each job as a line: its GPUs over time, and dots while it waits."""
    lines = []
    for number, job in enumerate(jobs):
        line = ["."] * width
        mine = [part for part in stretches(run) if part.job == number]
        for part in mine:
            for place in range(width):
                if part.begin_s <= (place + 0.5) * until_s / width < part.end_s:
                    line[place] = str(part.gang)
        end = round(max(part.end_s for part in mine) * width / until_s)
        lines.append(f"{number:2} {job['architecture']:12} |{''.join(line)[:end]}")
    return "\n".join(lines)


def less(ours: float, than: float) -> float:
    """How much less something is, in percent."""
    return 100 * (1 - ours / than)


def row(number: int, n_draws: int, scaling: Mapping[str, Scaling]) -> str:
    """Compare the policies on a set; means over the draws."""
    played = {
        name: [judge(play(draw(number, seed), flow, scaling)) for seed in range(n_draws)]
        for name, flow in flows(scaling).items()
    }

    def won(name: str) -> list[float]:
        pairs = zip(played[name], played["LSF"], strict=True)
        return [less(one.seconds, lsf.seconds) for one, lsf in pairs]

    marble = won("MARBLE")
    means = [
        less(one.mean_s, lsf.mean_s)
        for one, lsf in zip(played["MARBLE"], played["LSF"], strict=True)
    ]
    return (
        f"| {number} | {', '.join(SETS[number])} | {PAPER[number]} "
        f"| **{statistics.fmean(marble):.1f}** ({min(marble):.1f}–{max(marble):.1f}) "
        f"| {statistics.fmean(won('MARBLE, no switches')):.1f} "
        f"| {statistics.fmean(won('Optimus')):.1f} | {statistics.fmean(means):.1f} "
        f"| {100 * statistics.fmean(o.busy for o in played['MARBLE']):.0f}% "
        f"| {statistics.fmean(o.n_switches for o in played['MARBLE']):.1f} |"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--timelines", action="store_true")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print(
        "| set | jobs | paper | MARBLE (least–most) | without promotions | Optimus "
        "| MARBLE, a job's mean end | GPUs given to jobs | switches |\n" + "| --- " * 9 + "|"
    )
    for number in SETS:
        print(row(number, options.draws, SCALING))
    print("\nWith a λ of VGG-16 that is flat from 5 to 6 GPUs:\n")
    for number in (3, 4):
        print(row(number, options.draws, FLAT))
    for number in SETS if options.timelines else (6,):
        jobs = draw(number, seed=0)
        runs = {name: play(jobs, flow) for name, flow in flows().items()}
        until_s = max(run.seconds for run in runs.values())
        for name, run in runs.items():
            print(f"\nset {number}, {name}: {run.seconds / 3600:.2f} h")
            print(gantt(jobs, run, until_s))


if __name__ == "__main__":
    main()
