"""Cerebro's experiments (Nakandala et al. 2020) in virtual time: its page in docs/measured.

    python tests/benchmarks/papers/cerebro.py [--out FOLDER] [--limit 2] [--only figure-6]

The page says what is stated, what is assumed, and what comes out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import WorkerAdded, WorkerRemoved
from dagsel.dispatch.units import Chain, Round
from dagsel.simulation.machines import VirtualOutcome
from dagsel.simulation.virtual_cluster import VirtualCluster
from tests.benchmarks.papers import pages
from tests.benchmarks.reference.approximate import approximate, is_optimal
from tests.benchmarks.reference.bounds import lower_bound
from tests.benchmarks.reference.exact import milp, solve
from tests.benchmarks.reference.open_shop import Plan, Visit, plan, randomized
from tests.dispatch.families import UNIT_S, dispatch, het, times_of

RUNS = range(5)
SIZES = tuple(product((16, 256), (8, 16)))
FAMILIES = {"equal": "all alike", "het": "all different"}
HOP_S = 0.91
SCHEDULERS = ("randomized", "approximate", "CP-SAT", "planner")


# ---- Figure 6: three schedulers


def serial(times: Any) -> Plan:
    """Plan all units one after another: what a solver that is given nothing begins with."""
    visits, at = [], 0.0
    for trial, row in enumerate(times):
        for worker, took in enumerate(row):
            visits.append(Visit(trial, worker, at, at + float(took)))
            at += float(took)
    return Plan(tuple(visits), at, lower_bound(times))


def shuffled(times: Any, seed: int) -> Plan:
    """Plan approximately, with the trials in another order."""
    order = np.random.default_rng(seed).permutation(len(times))
    made = approximate(times[order])
    visits = tuple(Visit(int(order[v.trial]), v.worker, v.start, v.end) for v in made.visits)
    return Plan(visits, made.makespan, made.bound)


def schedulers(limit: float) -> dict[str, Callable[[Any, int], Plan]]:
    return {
        "randomized": lambda times, seed: randomized(times, seed=seed),
        "approximate": shuffled,
        "CP-SAT": lambda times, seed: (
            solve(times, limit_s=600.0, limit=limit, start=serial(times), seed=seed).plan
        ),
        "planner": lambda times, seed: plan(times, seed=seed),
    }


def compare(
    family: str, n: int, p: int, limit: float, only: Sequence[str] = SCHEDULERS
) -> dict[str, tuple[list[float], list[float]]]:
    """Give for each scheduler the makespans of its runs, and their seconds of one core."""
    times = times_of(family, n, p, 0)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, make in schedulers(limit).items():
        for seed in RUNS if name in only else ():
            began = time.process_time()
            made = make(times, seed)
            took_s = time.process_time() - began
            made.check(times)
            makespans, seconds = found.setdefault(name, ([], []))
            makespans.append(made.makespan)
            seconds.append(took_s)
    return found


def dispatched(family: str, n: int, p: int) -> float:
    """Give the makespan of the dispatcher, which binds unit by unit."""
    costs, speeds = (np.ones(n), np.ones(p)) if family == "equal" else het(n, p, 0)
    outcome, _ = dispatch(costs, speeds, p, holders=[[worker] for worker in range(p)])
    return outcome.makespan_s / UNIT_S


def instances() -> list[Any]:
    """Give the 12 small instances on which the MILP is solved."""
    sizes = [(2, 3), (3, 2), (3, 3), (4, 2)]
    rng = np.random.default_rng(0)
    return [rng.integers(1, 20, size).astype(float) for size in sizes for _ in range(3)]


def figure_6(folder: Path, limit: float) -> str:
    rows, bars = [], dict[tuple[str, str], list[tuple[float, float, float]]]()
    for family, (n, p) in product(FAMILIES, SIZES):
        found = compare(family, n, p, limit)
        print(f"{family} {n} × {p}", file=sys.stderr, flush=True)
        unit = np.mean(found["randomized"][0])
        table = times_of(family, n, p, 0)
        holds = "yes" if is_optimal(table) else "no"
        cells = []
        for name, (makespans, _) in found.items():
            ratios = np.array(makespans) / unit
            spread = (float(ratios.mean()), float(ratios.min()), float(ratios.max()))
            bars.setdefault((family, name), []).append(spread)
            cells.append("{:.3f} ({:.3f}–{:.3f})".format(*spread))
        seconds = [f"{np.mean(took):.2g}" for _, took in found.values()]
        ends = [f"{dispatched(family, n, p) / unit:.3f}", f"{lower_bound(table) / unit:.3f}"]
        rows.append([FAMILIES[family], n, p, *cells, *ends, holds, ", ".join(seconds)])
    head = ["", "configurations", "workers", *SCHEDULERS, "dispatcher", "bound", "condition"]
    exact = [(solve(one, limit_s=60.0).plan.makespan, milp(one)) for one in instances()]
    n_equal = sum(there is not None and abs(here - there) < 1e-6 for here, there in exact)
    alt = "Figure 6: makespans of the schedulers, in multiples of the randomized one's"
    shown = pages.picture(draw_6(bars), folder / "cerebro-figure-6.svg", alt)
    return (
        "### Figure 6: the schedulers\n\n"
        f"Makespans in multiples of the randomized scheduler's mean: mean of {len(RUNS)} runs "
        "(least–most). *Condition*: whether the approximate one is sure to be optimal. Seconds of "
        f"one core, in the order of the columns.\n\n{pages.table([*head, 'seconds'], rows)}\n\n"
        f"{shown}\n\nOn {n_equal} of {len(exact)} small instances CP-SAT's makespan is the MILP's."
    )


def draw_6(bars: Mapping[tuple[str, str], Sequence[tuple[float, float, float]]]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 2.8))
    for axis, (family, title) in zip(axes, FAMILIES.items(), strict=True):
        for place, name in enumerate(SCHEDULERS):
            means, lows, highs = np.array(bars[family, name]).T
            at = np.arange(len(SIZES)) + 0.2 * place - 0.3
            ends = np.maximum(0.0, [means - lows, highs - means])  # equal runs differ by rounding
            axis.bar(at, means, 0.2, yerr=ends, label=name, error_kw={"linewidth": 0.8})
        axis.set_xticks(range(len(SIZES)), [f"{n} × {p}" for n, p in SIZES])
        axis.set_title(title)
        axis.set_ylim(0.5, None)
        axis.set_ylabel("makespan / randomized")
        axis.legend(fontsize=7)
    return figure


# ---- on the model cluster


def searched(
    epoch_s: Sequence[float],
    n_workers: int,
    n_epochs: int,
    *,
    replicas: int = 1,
    hop_s: float = 0.0,
    load_s: float = 0.0,
    lost: Mapping[str, tuple[float, float]] | None = None,
    barrier: bool = True,
) -> VirtualOutcome:
    """Train configurations for some epochs: a partition for each worker, hops as they come.

    `epoch_s` are the seconds of each one's epoch on one worker; `lost` says when workers fail and
    return. With `barrier` an epoch begins when all have ended the one before, as with Cerebro.
    """
    dispatcher = Dispatcher(DispatchConfig(n_workers, replicas, rebalance=False))
    cluster = VirtualCluster(
        dispatcher,
        lambda unit, worker, shard: epoch_s[unit.trial] / n_workers,
        hop_seconds=hop_s,
        load_seconds=load_s,
    )
    names = [f"w{number}" for number in range(n_workers)]
    held = {
        name: [(number + k) % n_workers for k in range(replicas)]
        for number, name in enumerate(names)
    }
    cluster.add_workers(dict.fromkeys(names, 1.0), shards=held)
    for worker, (fails, returns) in (lost or {}).items():
        cluster.at(fails, WorkerRemoved(worker))
        cluster.at(returns, WorkerAdded(worker, frozenset(held[worker])))
    rounds = [range(e, e + 1) for e in range(1, n_epochs + 1)] if barrier else [
        range(1, n_epochs + 1)
    ]  # fmt: skip
    everything = VirtualOutcome()
    for number, epochs in enumerate(rounds):
        chains = (Chain(t, epochs, n_workers, evaluate=False) for t in range(len(epoch_s)))
        cluster.add_round(Round(number, tuple(chains)), cluster.now_s)
        n_units = len(everything.timeline) + len(epoch_s) * n_workers * len(epochs)
        while len(everything.timeline) + len(cluster.outcome.timeline) < n_units:
            assert cluster.step(), "the search stands still"
        done = cluster.take_outcome()
        everything.timeline += done.timeline
        everything.loaded += done.loaded
        assert not done.failed, done.failed
    return everything


def hops(outcome: VirtualOutcome) -> int:
    return sum(ran.hop for ran in outcome.timeline)


def table_2(folder: Path) -> str:
    k, n, p, m, data, batches = 20, 20, 10, 1e9, 1e12, 100_000
    formulas = {
        "model hopper": ("kmp·S + m·S", "4 TB", k * m * p * n + m * n),
        "task-parallel, all copied": ("p·D + m·S", "10 TB", p * data + m * n),
        "task-parallel, remote reads": ("k·S·D + m·S", "400 TB", k * n * data + m * n),
        "bulk synchronous": ("2kmp·S", "8 TB", 2 * k * m * p * n),
        "parameter server": ("2kmp·S·⌈batches/p⌉", "80 PB", 2 * k * m * p * n * batches / p),
        "all-reduce": ("kmp·S·⌈batches/p⌉", "40 PB", k * m * p * n * batches / p),
    }
    rows: list[list[object]] = [
        [what, formula, paper, f"{size / 1e12:,.2f} TB"]
        for what, (formula, paper, size) in formulas.items()
    ]
    n_hops = hops(searched([60.0 * p] * n, p, k))
    free = hops(searched([60.0 * p] * n, p, k, barrier=False))
    rows.append(["dagsel, an epoch after the other", "hops · m", "", f"{n_hops * m / 1e12:.2f} TB"])
    rows.append(["dagsel, without a barrier", "hops · m", "", f"{free * m / 1e12:.2f} TB"])
    stored = (n * p * k + n_hops) * m
    rows.append(
        ["dagsel, with a checkpoint a unit", "(kp·S + hops)·m", "", f"{stored / 1e12:.2f} TB"]
    )
    traffic = [["remote storage, task-parallel (10)", *_gb(8 * 5 * 250.0)]]
    traffic.append(["remote storage, hopping (10)", *_gb(250.0 + _hopped(1))])
    for r in (1, 2, 4, 8):
        traffic.append([f"{r} copies, task-parallel (11)", *_gb(8 * 5 * 250.0 * (1 - r / 8))])
        traffic.append([f"{r} copies, hopping (11)", *_gb(_hopped(r))])
    return (
        "### Table 2: what is sent\n\n"
        f"{pages.table(['approach', 'bytes', 'paper', 'ours'], rows)}\n\n"
        f"{n_hops:,} hops of {n * p * k:,} units, {free:,} without a barrier.\n\n"
        "### Figures 10 and 11: what is sent, in GB\n\n"
        f"{pages.table(['data', 'GB in 5 epochs'], traffic)}"
    )


def _gb(size: float) -> list[str]:
    return [f"{size:,.0f}"]


def _hopped(replicas: int) -> float:
    outcome = searched([3600.0] * 8, 8, 5, replicas=replicas)
    return hops(outcome) * 293 * 2**20 / 1e9


def figure_7(folder: Path) -> str:
    slow_h = 2.02 / 2
    fast_h = 1.72 - slow_h
    epochs = [3600 * slow_h] * 8 + [3600 * fast_h] * 8
    outcome = searched(epochs, 8, 1, hop_s=HOP_S)
    hours = outcome.makespan_s / 3600
    rows = [
        ["ImageNet: an epoch of all, hopping", "1.77 h", f"{hours:.2f} h"],
        ["ImageNet: an epoch of all, task-parallel", "1.72–2.02 h", "1.72–2.02 h (input)"],
        ["ImageNet: stored, hopping", "250 GB", f"{_stored(250):,.0f} GB"],
        ["ImageNet: stored, task-parallel", "2,000 GB", f"{8 * 250:,.0f} GB"],
        ["Criteo: stored, hopping", "400 GB", f"{_stored(400):,.0f} GB"],
        ["Criteo: stored, task-parallel", "3,200 GB", f"{8 * 400:,.0f} GB"],
    ]
    return f"### Figure 7: time and storage\n\n{pages.table(['', 'paper', 'ours'], rows)}"


def _stored(size: float) -> float:
    """Give what the workers hold after they were asked to load all: each shard once."""
    cluster = VirtualCluster(Dispatcher(DispatchConfig(8)), lambda *unit: 1.0)
    cluster.add_workers({f"w{number}": 1.0 for number in range(8)})
    cluster.add_round(Round(0, (Chain(0, range(1, 2), 8, evaluate=False),)))
    return len(cluster.run().loaded) * size / 8


def figure_8(folder: Path) -> str:
    epoch_s, n_epochs = 8 * 400.0, 5
    alone = searched([epoch_s] * 8, 1, n_epochs).makespan_s
    speedups = {
        p: alone / searched([epoch_s] * 8, p, n_epochs, hop_s=HOP_S).makespan_s for p in (2, 4, 8)
    }
    quiet = searched([epoch_s] * 8, 8, n_epochs, replicas=3, hop_s=HOP_S, load_s=40.0)
    fails = {"w0": (1.5 * epoch_s, 3.5 * epoch_s), "w1": (1.75 * epoch_s, 3.5 * epoch_s)}
    rough = searched(
        [epoch_s] * 8, 8, n_epochs, replicas=3, hop_s=HOP_S, load_s=40.0, lost=fails
    )  # fmt: skip
    each = [np.diff([0.0, *_ends(outcome, n_epochs)]) / 60 for outcome in (quiet, rough)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 2.6))
    left.plot([1, 8], [1, 8], "--", color="grey", label="linear")
    left.plot([1, *speedups], [1, *speedups.values()], "o-", label="dagsel")
    left.set_xlabel("workers")
    left.set_ylabel("speed-up")
    left.legend(fontsize=7)
    for minutes, label in zip(each, ("no worker fails", "two fail and return"), strict=True):
        right.plot(range(1, n_epochs + 1), minutes, "o-", label=label)
    right.set_xlabel("epoch")
    right.set_ylabel("minutes")
    right.set_ylim(0, None)
    right.legend(fontsize=7)
    alt = "Figure 8: speed-up by number of workers; minutes of each epoch when two workers fail"
    shown = pages.picture(figure, folder / "cerebro-figure-8.svg", alt)
    rows = [[p, "linear", f"{speedup:.2f}"] for p, speedup in speedups.items()]
    epochs = [
        [label, *(f"{m:.1f}" for m in minutes)]
        for label, minutes in zip(("none", "two"), each, strict=True)
    ]
    head = ["workers that fail", *(f"epoch {e}" for e in range(1, n_epochs + 1))]
    return (
        f"### Figure 8A: speed-up\n\n{pages.table(['workers', 'paper', 'ours'], rows)}\n\n"
        "### Figure 8B: two workers fail and return, 3 copies\n\nMinutes of each epoch; every unit "
        f"of every configuration is done.\n\n{pages.table(head, epochs)}\n\n{shown}"
    )


def _ends(outcome: VirtualOutcome, n_epochs: int) -> list[float]:
    return [
        max(ran.stop_s for ran in outcome.timeline if ran.unit.epoch == epoch)
        for epoch in range(1, n_epochs + 1)
    ]


def main() -> None:
    names = ("figure-6", "table-2", "figure-7", "figure-8")
    parser = pages.parser_of(__doc__ or "", names)
    parser.add_argument("--limit", type=float, default=2.0, help="of CP-SAT, in its own seconds")
    args = parser.parse_args()
    makers: tuple[pages.Part, ...] = (
        lambda folder: figure_6(folder, args.limit),
        table_2,
        figure_7,
        figure_8,
    )
    pages.write("cerebro", dict(zip(names, makers, strict=True)), args.out, args.only)


if __name__ == "__main__":
    main()
