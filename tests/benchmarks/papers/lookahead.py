"""Lookahead beside SEER and its partners, in virtual time on recorded learning curves.

    python tests/benchmarks/papers/lookahead.py [--seeds 20] [--first 0] [--quick]

Writes the generated parts of ``lookahead.md`` and its pictures, the same at each call. What is
assumed, and what was found, stands on the page by hand. ``--first 100`` takes the seeds from 100
on, ``--quick`` is a test of the script: two seeds, two settings.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import optuna
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from dagsel.flows import Lookahead
from dagsel.simulation import SimulatedCluster, SimulatedRun, simulate
from tests.benchmarks.papers import pages, seer
from tests.benchmarks.papers.seer import FIGURE_4, MOST_WORKERS, SCALING, Found, Setting
from tests.benchmarks.seer_traces.load import HERE, N_EPOCHS, GridTraces, curves

PARTNERS = ("ASHA", "HyperSched", "BOHB", "E-Hyperband", "E-Grid", "SEER")
OURS = "Lookahead"
#: A second row of ours, whose trials are drawn by Optuna's TPE.
WITH_TPE = "Lookahead, TPE"
METHODS = (*PARTNERS, "SEER, fill", OURS, WITH_TPE)
SETS = ("table 1", "cnn", "mlp")
TITLES = {
    "table 1": "Table 1's points, MLP",
    "cnn": "Hermes' points, CNN",
    "mlp": "Hermes' points, MLP",
    "held out": "Table 1's points, CNN: held out",
}
#: More points than this behind the best partner are too many.
TOLERANCE = 0.2


def traces_of(name: str) -> GridTraces:
    path = HERE / "cnn.npz" if name == "held out" else None
    return curves("table 1" if path else name, 60.0, SCALING, path)


def search(method: str, at: Setting, traces: GridTraces, seed: int) -> SimulatedRun:
    if method not in (OURS, WITH_TPE):
        return seer.search(method, at, traces, seed)
    deadline_s = 60.0 * at.minutes
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
    if method == WITH_TPE:
        sampler = optuna.samplers.TPESampler(seed=seed)
    return simulate(
        Lookahead(deadline_s, deadline_s * at.n_workers, scaling=SCALING, max_epochs=N_EPOCHS),
        traces, SimulatedCluster(1, n_shards=1, max_workers=MOST_WORKERS), seed=seed,
        space=seer.space_of(traces), sampler=sampler, direction="maximize", metric="accuracy",
        deadline=deadline_s,
    )  # fmt: skip


def found_by(method: str, at: Setting, traces: GridTraces, seeds: Sequence[int]) -> Found:
    runs = [search(method, at, traces, seed) for seed in seeds]
    return Found(
        tuple(100 * run.best_value for run in runs),
        statistics.mean(run.cost / (60.0 * at.minutes * at.n_workers) for run in runs),
        statistics.mean(map(seer.used_of, runs)),
        statistics.mean(len(run.record.trials) for run in runs),
    )


Results = dict[Setting, dict[str, Found]]


def compare(name: str, settings: Sequence[Setting], seeds: Sequence[int]) -> Results:
    traces, results = traces_of(name), Results()
    for at in settings:
        results[at] = {method: found_by(method, at, traces, seeds) for method in METHODS}
        print(f"{name}, {at.name}: {verdict(results[at])}", flush=True)
    return results


# ---- the page


def verdict(found: dict[str, Found]) -> str:
    """Say how far ours is ahead of the best partner, and of which it is clearly ahead or behind."""
    best = max(PARTNERS, key=lambda method: found[method].mean)
    lead, half = ahead(found, best)
    clear = [method for method in PARTNERS if ahead(found, method)[0] > ahead(found, method)[1]]
    told = "all" if len(clear) == len(PARTNERS) else ", ".join(clear) or "none"
    return f"{lead:+.2f} ± {half:.2f} of {best}; clearly ahead of {told}"


def ahead(found: dict[str, Found], other: str, ours: str = OURS) -> tuple[float, float]:
    """Return how far ours is ahead in the mean, and half of the 95% interval (Student's t)."""
    if len(found[ours].accuracy) < 2:
        return found[ours].mean - found[other].mean, float("inf")
    return seer.behind(found[other].accuracy, found[ours].accuracy)


def target(results: Results) -> list[str]:
    """Return the row that says whether the target is met."""
    leads = []
    for found in results.values():
        best = max(PARTNERS, key=lambda method: found[method].mean)
        leads.append(ahead(found, best))
    first = sum(lead > 0 for lead, _ in leads)
    clear = sum(lead > half for lead, half in leads)
    least = min(lead for lead, _ in leads)
    n = len(leads)
    met = first == n and clear >= min(3, n) and least >= -TOLERANCE
    return [f"{first} of {n}", f"{clear} of {n}", f"{least:+.2f}", "yes" if met else "no"]


def tables(results: Results) -> str:
    head = [at.name for at in results]
    accuracy = [
        [method, *(f"{one[method].mean:.2f} ± {one[method].error:.2f}" for one in results.values())]
        for method in METHODS
    ]
    leads = [
        [method, *("{:+.2f} ± {:.2f}".format(*ahead(one, method)) for one in results.values())]
        for method in METHODS
        if method != OURS
    ]
    used = [
        [method, *(f"{one[method].billed:.0%}, {one[method].used:.0%}, {one[method].n_trials:.0f}"
                   for one in results.values())]
        for method in (*PARTNERS, OURS)
    ]  # fmt: skip
    return "\n\n".join(
        [
            pages.table(["accuracy (%)", *head], accuracy),
            pages.table(["Lookahead is ahead of", *head], leads),
            pages.table(["billed, used, trials", *head], used),
        ]
    )


def figure(folder: Path, name: str, results: dict[str, Results]) -> str:
    """Draw how far each method is behind the best of a setting."""
    drawn, axes = plt.subplots(
        1, len(results), figsize=(3.4 * len(results), 3.2), layout="constrained", squeeze=False
    )
    for axis, (told, one) in zip(axes[0], results.items(), strict=True):
        for place, method in enumerate((*PARTNERS, OURS)):
            means = [found[method].mean for found in one.values()]
            errors = [found[method].error for found in one.values()]
            places = [n + 0.05 * (place - 3) for n in range(len(means))]
            style = {"color": "black", "linewidth": 2.0} if method == OURS else {"linewidth": 0.8}
            axis.errorbar(places, means, errors, fmt="o-", markersize=3, label=method, **style)
        best = max(found[method].mean for found in one.values() for method in METHODS)
        floor = min(found[method].mean for found in one.values() for method in (OURS, "SEER"))
        axis.set(title=TITLES[told], xticks=range(len(one)), xlabel="workers × minutes")
        axis.set_xticklabels([at.name for at in one])
        axis.set_ylim(floor - 0.6 * (best - floor), best + 0.1 * (best - floor))
    axes[0][0].set_ylabel("accuracy (%)")
    axes[0][0].legend(fontsize=6)
    return pages.picture(drawn, folder / f"{name}.svg", "Accuracy of each method by setting")


def allocations(folder: Path) -> str:
    """Draw who has the workers in one run on each kind of curves."""
    at = Setting(16, 30)
    drawn, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
    for axis, name in zip(axes, SETS, strict=True):
        run = search(OURS, at, traces_of(name), 0)
        seer.draw_workers(axis, run, TITLES[name], at.minutes)
    axes[0].set_ylabel("workers")
    alt = "Workers over thirty minutes, stacked by trial, on three sets of curves"
    return pages.picture(drawn, folder / "lookahead-workers.svg", alt)


def part(names: Sequence[str], n: int, first: int, quick: bool, folder: Path) -> str:
    seeds = range(first, first + n)
    settings = FIGURE_4[:2] if quick else FIGURE_4
    results = {name: compare(name, settings, seeds) for name in names}
    head = [
        "curves",
        "ahead of all in the mean",
        "outside the interval",
        "least lead",
        "target met",
    ]
    met = pages.table(head, ([TITLES[name], *target(one)] for name, one in results.items()))
    told = [met]
    if "held out" not in names:
        told += [figure(folder, "lookahead", results), allocations(folder)]
    for name, one in results.items():
        told += [f"### {TITLES[name]}", tables(one)]
    return "\n\n".join(told)


def main() -> None:
    parser = pages.parser_of(__doc__ or "", ("comparison", "held-out"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", message="n_concurrent is")
    n = 2 if args.quick else args.seeds
    makers: dict[str, pages.Part] = {
        "comparison": partial(part, SETS, n, args.first, args.quick),
        "held-out": partial(part, ("held out",), n, args.first, args.quick),
    }
    pages.write("lookahead", makers, args.out, args.only)


if __name__ == "__main__":
    main()
