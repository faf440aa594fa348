"""SEER against its comparison partners in virtual time, as in Dunlap et al., SoCC 2021.

ResNet-like curves on workers that scale as λ = 1, 1.85, 3.43, 5.40 at 1, 2, 4, 8 of them; each
search has a deadline and a budget, on its own fixed or elastic cluster. The tables in
docs/elastic.md are what this prints:

    python tests/benchmarks/seer_comparison.py [--seeds 20] [--flows SEER ASHA] [--shards 1]

The first one holds the accuracy that each search ends with, the second one what SEER is ahead, pair
by pair: searches of one seed have the same curves and, but for BOHB-style, draw at random from the
same seed. A first stage of one epoch is not what SEER was first run with. That was the 64th of the
deadline (T/64), and it has rows of its own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import optuna
from scipy.stats import t as student

from dagsel.flow import Flow
from dagsel.flows import (
    ASHA,
    SEER,
    Hyperband,
    HyperSched,
    RandomSearch,
)
from dagsel.flows.baselines import ElasticGrid, ElasticHyperband
from dagsel.flows.rungs import Rung
from dagsel.planning.scaling import Scaling
from dagsel.simulation import PowerLaw, SimulatedCluster, SimulatedRun, simulate

SCALING = Scaling({2: 1.85, 4: 3.43, 8: 5.40})
MAX_GANG = 8
#: Workers that the budget pays for until the deadline, and the deadline in minutes.
SETTINGS = ((16, 15), (16, 30), (16, 60), (8, 30), (32, 30))
EPOCH_S = 30.0
#: More than any search asks for.
MOST_WORKERS = 1024


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
        "momentum": trial.suggest_float("momentum", 0.5, 0.99),
    }


def distance(config: Mapping[str, Any]) -> float:
    """How far from the best configuration."""
    lr = (math.log10(config["lr"]) + 1.3) / 1.2
    weight_decay = (math.log10(config["weight_decay"]) + 3.3) / 2.0
    momentum = (config["momentum"] - 0.9) / 0.25
    return math.sqrt(lr * lr + weight_decay * weight_decay + momentum * momentum)


def asymptote(config: Mapping[str, Any]) -> float:
    return 0.1 + 0.85 * math.exp(-0.12 * distance(config) ** 2)


def amplitude(config: Mapping[str, Any]) -> float:
    # The first epoch comes as far as 0.35 of the way from chance, in good configurations.
    return -0.65 * (asymptote(config) - 0.1)


def rate(config: Mapping[str, Any]) -> float:
    # A small learning rate is slow, a large one quick to begin with: curves cross.
    return 0.55 + 0.12 * (math.log10(config["lr"]) + 1.3)


def curves(seed: int) -> PowerLaw:
    return PowerLaw(
        asymptote, amplitude, rate, noise=0.005, epoch_s=EPOCH_S, seed=seed, scaling=SCALING,
        chance=0.1,
    )  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """How a search is set up for a deadline, a number of workers and the epochs that fit in it."""

    flow: Callable[[float, int, int], Flow]
    is_elastic: bool = False
    samples: bool = False  # by the study's sampler, not at random


def hyperband(n_workers: int, epochs: int) -> Hyperband:
    """Give the one whose brackets come nearest to the epochs that the budget pays for."""

    def cost(eta: int) -> int:
        brackets = Hyperband(epochs, reduction_factor=eta).brackets
        pairs = [pair for rungs in brackets for pair in pairwise((Rung(0, 0), *rungs))]
        return sum(rung.n_trials * (rung.epochs - before.epochs) for before, rung in pairs)

    eta = min((2, 3, 4), key=lambda eta: abs(math.log(cost(eta) / (n_workers * epochs))))
    n_trials = sum(rungs[0].n_trials for rungs in Hyperband(epochs, reduction_factor=eta).brackets)
    return Hyperband(epochs, reduction_factor=eta, n_concurrent=min(n_workers, n_trials))


def elastic(flow: Callable[..., Flow], **options: Any) -> Contestant:
    return Contestant(
        lambda deadline_s, n, _: flow(deadline_s, deadline_s * n, **options), is_elastic=True
    )


CONTESTANTS = {
    "SEER": elastic(SEER, max_workers_per_trial=MAX_GANG, min_stage=EPOCH_S),
    "SEER, paper": elastic(SEER, max_workers_per_trial=MAX_GANG, min_stage=EPOCH_S, mode="paper"),
    "SEER, T/64": elastic(SEER, max_workers_per_trial=MAX_GANG),
    "HyperSched": elastic(HyperSched, max_workers_per_trial=MAX_GANG),
    "E-Hyperband": elastic(ElasticHyperband, min_stage=EPOCH_S),
    "E-Hyperband, T/64": elastic(ElasticHyperband),
    "E-Grid": elastic(ElasticGrid, sampling="random"),
    "ASHA": Contestant(
        lambda _, n, epochs: ASHA(epochs, n * epochs, reduction_factor=4, n_concurrent=n)
    ),
    "BOHB-style": Contestant(lambda _, n, epochs: hyperband(n, epochs), samples=True),
    "random": Contestant(lambda _, n, epochs: RandomSearch(epochs, 20 * n, n_concurrent=n)),
}


def search(
    name: str, n_workers: int, minutes: int, seed: int, *, startup_s: float = 0.0, n_shards: int = 1
) -> SimulatedRun:
    one, deadline_s = CONTESTANTS[name], 60.0 * minutes
    cluster = SimulatedCluster(
        n_workers=1 if one.is_elastic else n_workers,
        n_shards=n_shards,
        startup_s=startup_s,
        max_workers=MOST_WORKERS if one.is_elastic else None,
    )
    sampler = None if one.samples else optuna.samplers.RandomSampler(seed=seed)
    return simulate(
        one.flow(deadline_s, n_workers, int(deadline_s / EPOCH_S)),
        curves(seed),
        cluster,
        seed=seed,
        space=space,
        sampler=sampler,
        direction="maximize",
        metric="accuracy",
        deadline=deadline_s,
    )


def ahead(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Mean of paired differences in points, its 95% interval by Student's t, and pairs ahead."""
    pairs = [100 * (one - other) for one, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    half = float(student.ppf(0.975, len(pairs) - 1)) * error
    n_ahead = sum(pair > 0 for pair in pairs)
    return f"{statistics.mean(pairs):+.2f} ± {half:.2f} ({n_ahead})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--flows", nargs="+", default=[*CONTESTANTS], choices=[*CONTESTANTS])
    parser.add_argument("--settings", type=int, nargs="+", default=[*range(len(SETTINGS))])
    parser.add_argument("--startup", type=float, default=0.0, help="seconds, of each worker")
    parser.add_argument("--shards", type=int, default=1, help="units of an epoch")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    settings = [SETTINGS[index] for index in args.settings]
    heads = " | ".join(f"{n} × {minutes} min" for n, minutes in settings)
    print(f"| accuracy (of the budget) | {heads} | s a run |")
    print("| --- " * (len(settings) + 2) + "|")
    found: dict[str, list[list[float]]] = {}
    for name in args.flows:
        row, began = [], time.perf_counter()
        for n_workers, minutes in settings:
            budget = n_workers * minutes * 60.0
            of = {"startup_s": args.startup, "n_shards": args.shards}
            runs = [search(name, n_workers, minutes, seed, **of) for seed in range(args.seeds)]
            values = [run.best_value for run in runs]
            found.setdefault(name, []).append(values)
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
            used = statistics.mean(run.cost for run in runs) / budget
            late = max(run.seconds for run in runs) - 60.0 * minutes
            told = f"{100 * statistics.mean(values):.2f} ± {100 * error:.2f} ({used:.0%}"
            row.append(told + (f", {late:.1f} s late)" if late > 0 else ")"))
        each_s = (time.perf_counter() - began) / (args.seeds * len(settings))
        print(f"| {name} | " + " | ".join(row) + f" | {each_s:.1f} |", flush=True)
    if args.seeds < 2 or "SEER" not in found:
        return
    ours = found.pop("SEER")
    print(f"\n| SEER is ahead (seeds) of | {heads} |")
    print("| --- " * (len(settings) + 1) + "|")
    for name, theirs in found.items():
        print(f"| {name} | " + " | ".join(map(ahead, ours, theirs)) + " |")


if __name__ == "__main__":
    main()
