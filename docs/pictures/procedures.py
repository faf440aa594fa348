"""Draw a picture of each search procedure, from a search in virtual time, on the same curves.

::

    PYTHONPATH=. python docs/pictures/procedures.py             # all of them
    PYTHONPATH=. python docs/pictures/procedures.py asha seer   # two of them

They are docs/pictures/procedures/NAME.svg, light or dark as the reader's system is. The same code
writes the same bytes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
from panels import BOTTOM, LEFT, RIGHT, WIDE, Panel, coordinate, legend, picture, ticks_until

import dagsel
from dagsel.flow import Flow
from dagsel.flows import (
    ASHA,
    MOASHA,
    PBT,
    SEER,
    EarlyStopping,
    Grid,
    Hermes,
    Hyperband,
    HyperSched,
    JobQueue,
    Lookahead,
    Marble,
    MedianStopping,
    OptunaPruner,
    RandomSearch,
    Range,
    RoundRobin,
    SamplerSearch,
    SuccessiveHalving,
)
from dagsel.flows.baselines import FIFO, LSF
from dagsel.planning.scaling import Scaling
from dagsel.simulation import PowerLaw, SimulatedCluster
from dagsel.simulation.run import SimulatedRun

FOLDER = Path(__file__).parent / "procedures"


def space(trial: optuna.Trial) -> dict[str, Any]:
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    return {"lr": lr, "dropout": trial.suggest_float("dropout", 0.0, 0.8)}


def grid(trial: optuna.Trial) -> dict[str, Any]:
    lr = trial.suggest_categorical("lr", [0.0001, 0.001, 0.01, 0.1, 1.0])
    return {"lr": lr, "dropout": trial.suggest_categorical("dropout", [0.0, 0.2, 0.4, 0.6])}


def asymptote(config: Mapping[str, Any]) -> float:
    """Return the loss after endless training: least at lr=0.01 and dropout=0.3."""
    return 0.05 + 0.1 * math.log10(config["lr"] / 0.01) ** 2 + (config["dropout"] - 0.3) ** 2


CURVES = PowerLaw(asymptote=asymptote, rate=(0.3, 1.2), epoch_s=60.0)
FOUR = SimulatedCluster(n_workers=4, n_shards=1)
#: A cluster that a search makes larger and smaller.
ELASTIC = SimulatedCluster(n_workers=1, max_workers=64)
SCALING = Scaling({2: 1.85, 4: 3.43, 8: 5.40})


def search(flow: Flow, curves: Any = CURVES, **options: Any) -> SimulatedRun:
    options = {"cluster": FOUR, "space": space, **options}
    return dagsel.simulate(flow, curves, options.pop("cluster"), **options)


def kinds_of(run: SimulatedRun) -> dict[int, str]:
    """Return the colour of each trial: the best one, those trained to the end, the others."""
    trials = run.trials()
    reasons = zip(trials["trial"], trials["reason"], strict=True)
    kinds = {
        int(trial): "complete" if reason.startswith("trained to") else "pruned"
        for trial, reason in reasons
    }
    return {**kinds, run.best.trial: "best"}


def trained(run: SimulatedRun) -> list[tuple[int, float, float, int]]:
    """Return trial, begin and end in seconds, and workers of all that was trained, in order."""
    units = run.timeline()
    units = units[units["kind"] == "train"].sort_values(["start", "trial"], kind="stable")
    columns = (units[name].tolist() for name in ("trial", "start", "stop", "gang"))
    return list(zip(*columns, strict=True))


def values(run: SimulatedRun) -> dict[int, list[tuple[float, float]]]:
    """Return epochs and losses of each trial."""
    scored = run.metrics[run.metrics["split"] == "validation"]
    curves: dict[int, list[tuple[float, float]]] = {}
    columns = (scored[name].tolist() for name in ("trial", "epoch", "value"))
    for trial, epoch, value in zip(*columns, strict=True):
        curves.setdefault(trial, []).append((epoch, value))
    return curves


def rows(
    run: SimulatedRun, where: tuple[int, int], title: str, unit: str = "minutes"
) -> Iterator[str]:
    """Draw a row for each trial and in it when it trained."""
    end = run.seconds
    n_trials = len(run.trials())
    panel = Panel(where, (0.0, end / 60), (n_trials, 0.0))
    yield from panel.frame(title, unit, ticks_until(end / 60), "trials, the first one on top")
    spans: dict[int, list[list[float]]] = {}
    for trial, start, stop, _ in trained(run):
        known = spans.setdefault(trial, [])
        if known and abs(known[-1][1] - start) < 1e-6:
            known[-1][1] = stop
        else:
            known.append([start, stop])
    kinds = kinds_of(run)
    for trial, known in spans.items():
        for start, stop in known:
            ends = start / 60, stop / 60
            yield panel.bar(kinds[trial], *ends, trial + 0.86, trial + 0.14)


def losses(
    run: SimulatedRun, where: tuple[int, int], title: str, top: float = 1.0
) -> Iterator[str]:
    """Draw the learning curves."""
    curves = values(run)
    kinds = kinds_of(run)
    most = max(epoch for points in curves.values() for epoch, _ in points)
    panel = Panel(where, (1.0, most), (0.0, top), log=True)
    ticks = [tick for tick in (1, 3, 9, 27, 81) if tick <= most]
    yield from panel.frame(title, "epochs (logarithmic)", ticks)
    yield from panel.levels([0, top / 2, top])
    used = [kind for kind in ("best", "complete", "pruned") if kind in kinds.values()]
    words = {"best": "best", "complete": "trained to the end", "pruned": "stopped"}
    yield from legend([(kind, words[kind]) for kind in used], where[0])
    for kind in reversed(used):
        for trial, points in curves.items():
            if kinds[trial] != kind:
                continue
            places = [panel.place(epoch, min(value, top)) for epoch, value in points]
            if len(places) > 1:
                yield f'<polyline class="{kind}" points="{" ".join(places)}"/>'
            x, y = panel.at(points[-1][0], min(points[-1][1], top))
            spot = f'cx="{coordinate(x)}" cy="{coordinate(y)}"'
            yield f'<circle class="{kind}" {spot} r="{2.6 if kind == "pruned" else 3.4}"/>'


def stack(
    run: SimulatedRun,
    where: tuple[int, int],
    title: str,
    kinds: Mapping[int, str],
    *,
    end: float | None = None,
    most: int | None = None,
) -> Iterator[str]:
    """Draw the workers over time, stacked by trial; the trials of `kinds` lie at the bottom."""
    end = end or run.seconds
    work = trained(run)
    moments = sorted({round(at, 3) for _, start, stop, _ in work for at in (start, stop)})
    #: Begin and end of what is drawn as one: the trials with their workers, from the bottom up.
    spans: list[tuple[float, float, tuple[tuple[str, int], ...]]] = []
    for start, stop in pairwise(moments):
        busy = {trial: n for trial, a, b, n in work if a < (start + stop) / 2 < b}
        named = [(kind, busy.pop(trial)) for trial, kind in kinds.items() if trial in busy]
        others = [("pruned", n) for n in sorted(busy.values(), reverse=True)]
        layers = (*named, *others)
        if spans and spans[-1][1:] == (start, layers):
            spans[-1] = (spans[-1][0], stop, layers)
        else:
            spans.append((start, stop, layers))
    most = most or max(sum(n for _, n in layers) for _, _, layers in spans)
    panel = Panel(where, (0.0, end / 60), (0.0, most))
    yield from panel.frame(title, "minutes", ticks_until(end / 60), "busy workers")
    yield from panel.levels(ticks_until(most))
    for start, stop, layers in spans:
        base = 0.0
        for kind, n in joined(layers):
            gap = 0.01 * most if n > 0.1 * most else 0.0
            yield panel.bar(kind, start / 60, stop / 60, base + gap, base + n - gap)
            base += n


def joined(layers: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return layers of which those of one worker each are one, as lines would fill the picture."""
    singles = sum(n for kind, n in layers if (kind, n) == ("pruned", 1))
    rest = [layer for layer in layers if layer != ("pruned", 1)]
    return [*rest, ("pruned", singles)] if singles else rest


def two(flow: Flow, name: str, words: str, **options: Any) -> str:
    """Draw learning curves and, beside them, when the trials trained."""
    run = search(flow, **options)
    parts = [
        *losses(run, LEFT, "Loss of each trial"),
        *rows(run, RIGHT, "When each trial trained, 4 workers"),
    ]
    return picture(name, words, parts)


def random_and_grid() -> str:
    drawn = search(RandomSearch(max_epochs=9, n_trials=20))
    walked = search(Grid(max_epochs=9), space=grid)
    parts: list[str] = []
    for run, where, title in (
        (drawn, LEFT, "RandomSearch: 20 draws"),
        (walked, RIGHT, "Grid: 5 × 4 points"),
    ):
        panel = Panel(where, (5e-5, 2.0), (-0.05, 0.85), log=True)
        parts += panel.frame(title, "learning rate (logarithmic)", (0.0001, 0.01, 1), "dropout")
        parts += panel.levels((0, 0.4, 0.8))
        configs = run.trials()
        best = run.best.trial
        for trial, lr, dropout in zip(
            configs["trial"], configs["param_lr"], configs["param_dropout"], strict=True
        ):
            kind, size = ("best", 7) if trial == best else ("complete", 5)
            x, y = map(coordinate, panel.at(lr, dropout))
            parts.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="{size}"/>')
    words = "points drawn at random beside points of a grid, the best ones marked"
    return picture("RandomSearch and Grid", words, parts)


def samplers() -> str:
    parts: list[str] = []
    for flow, where, title in (
        (RandomSearch(9, 96), LEFT, "RandomSearch"),
        (SamplerSearch(9, 96), RIGHT, "SamplerSearch with TPE"),
    ):
        run = search(flow)
        panel = Panel(where, (0.0, 95.0), (-4.0, 0.0))
        parts += panel.frame(title, "trials in their order", (0, 30, 60, 90), "learning rate")
        parts += panel.powers((0, -2, -4))
        trials = run.trials()
        for trial, lr in zip(trials["trial"], trials["param_lr"], strict=True):
            kind, size = ("best", 6) if trial == run.best.trial else ("complete", 4)
            x, y = map(coordinate, panel.at(trial, math.log10(lr)))
            parts.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="{size}"/>')
    words = "learning rates of 96 draws, all over the range, beside those that gather at 0.01"
    return picture("SamplerSearch", words, parts)


def moasha() -> str:
    curves = {
        "error": PowerLaw(asymptote=lambda config: 1 / config["width"], rate=0.5, epoch_s=60.0),
        "ms": PowerLaw(asymptote=lambda config: config["width"], amplitude=0.0, noise=0.0),
    }
    run = search(
        MOASHA(max_epochs=9, n_trials=27),
        curves,
        space=lambda trial: {"width": trial.suggest_float("width", 2, 16, log=True)},
        metric=["error", "ms"],
        direction=["minimize", "minimize"],
    )
    board = run.leaderboard(100)
    panel = Panel(WIDE, (0.0, 18.0), (0.0, 1.2))
    parts = [*panel.frame("The trials in both metrics", "latency, ms", (0, 4, 8, 12, 16))]
    parts += panel.levels((0, 0.6, 1.2))
    parts += legend([("best", "on the front"), ("pruned", "another trial beats it")], WIDE[0])
    for kind, front in (("pruned", False), ("best", True)):
        chosen = board[board["front"] == front]
        for error, latency in zip(chosen["error"], chosen["ms"], strict=True):
            x, y = map(coordinate, panel.at(latency, min(error, 1.2)))
            parts.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="6"/>')
    return picture("MOASHA", "error and latency of 27 trials, the front marked", parts)


def pbt() -> str:
    run = search(
        PBT(max_epochs=12, n_trials=8, mutations={"lr": Range(1e-4, 1.0, log=True)}), seed=1
    )
    copies: list[tuple[float, int, int, float]] = []
    first: dict[int, float] = {}
    for entry in run.journal:
        event = entry.get("event", {})
        if event.get("is") == "Asked":
            for trial, config in zip(event["trials"], event["configs"], strict=True):
                first[trial] = config["lr"]
        for decision in entry.get("decisions", []):
            if decision["is"] == "Clone":
                moment = (event["epoch"], decision["source"], decision["target"])
                copies.append((*moment, decision["config"]["lr"]))
    panel = Panel(RIGHT, (0.0, 12.0), (-4.0, 0.0))
    parts = [*losses(run, LEFT, "Loss of each member")]
    parts += panel.frame("Learning rate of each member", "epochs", (0, 4, 8, 12))
    parts += legend([("second", "goes on from another one")], RIGHT[0])
    parts += panel.powers((0, -2, -4))
    for trial, lr in first.items():
        kind = "best" if trial == run.best.trial else "complete"
        points = [(0.0, lr)]
        for epoch, _, target, new in copies:
            if target == trial:
                points += [(epoch, points[-1][1]), (epoch, new)]
                x, y = map(coordinate, panel.at(epoch, math.log10(new)))
                parts.append(f'<circle class="second" cx="{x}" cy="{y}" r="4"/>')
        points.append((12.0, points[-1][1]))
        places = " ".join(panel.place(epoch, math.log10(lr)) for epoch, lr in points)
        parts.append(f'<polyline class="{kind}" points="{places}"/>')
    words = "losses of eight members, and their learning rates, which change as members are copied"
    return picture("PBT", words, parts)


def elastic(flow: Flow, name: str, words: str) -> str:
    """Draw the workers of a search with a deadline and a budget, and its learning curves."""
    curves = PowerLaw(asymptote=asymptote, rate=(0.3, 1.2), epoch_s=30.0, scaling=SCALING)
    run = search(flow, curves, cluster=ELASTIC)
    parts = [
        *stack(run, WIDE, "Workers over time, stacked by trial", {run.best.trial: "best"}),
        *legend([("best", "best trial"), ("pruned", "others")], 160),
    ]
    return picture(name, words, parts)


def turns(flows: Sequence[tuple[Flow, str]], name: str, words: str) -> str:
    """Draw two searches of 12 trials on two workers, side by side."""
    parts: list[str] = []
    cluster = SimulatedCluster(n_workers=2)
    for (flow, title), where in zip(flows, (LEFT, RIGHT), strict=True):
        run = search(flow, cluster=cluster)
        parts += rows(run, where, title, "minutes; ● a loss of 0.35")
        found = run.metrics[(run.metrics["split"] == "validation") & (run.metrics["value"] <= 0.35)]
        panel = Panel(where, (0.0, run.seconds / 60), (len(run.trials()), 0.0))
        for trial, seconds in found.groupby("trial")["seconds"].min().items():
            x, y = map(coordinate, panel.at(seconds / 60, int(str(trial)) + 0.5))
            parts.append(f'<circle class="second" cx="{x}" cy="{y}" r="5"/>')
    return picture(name, words, parts)


JOBS = (
    {"architecture": "resnet", "epochs": 40},
    {"architecture": "inception", "epochs": 90},
    {"architecture": "vgg", "epochs": 60},
)
LAMBDA = {
    "resnet": Scaling({2: 1.75, 3: 2.3, 6: 2.34}),
    "inception": Scaling({2: 1.8, 3: 2.4, 4: 2.9, 6: 2.85}),
    "vgg": Scaling({2: 1.85, 3: 2.6, 4: 3.2, 5: 3.6, 6: 3.3}),
}


def jobs(flows: Sequence[tuple[Flow, str]], name: str, words: str) -> str:
    """Draw who has the six workers while three jobs are trained."""
    curves = PowerLaw(epoch_s=60.0, scaling=lambda config: LAMBDA[config["architecture"]])
    runs = [
        search(
            flow,
            curves,
            cluster=SimulatedCluster(n_workers=6, n_shards=1),
            space=lambda trial: JOBS[trial.suggest_int("job", 0, len(JOBS) - 1)],
        )
        for flow, _ in flows
    ]
    parts: list[str] = []
    colours = {0: "complete", 1: "best", 2: "second"}
    end = max(run.seconds for run in runs)
    named = [("complete", "job 1"), ("best", "job 2"), ("second", "job 3")]
    places = (LEFT, RIGHT) if len(flows) == 2 else (WIDE,)
    for run, (_, title), where in zip(runs, flows, places, strict=True):
        parts += stack(run, where, title, colours, end=end, most=6)
        parts += legend(named, where[0] + 96)
    return picture(name, words, parts)


def together() -> str:
    """Draw the best loss so far over an hour, on average over five draws of the trials."""
    curves = PowerLaw(asymptote=asymptote, rate=(0.3, 1.2), epoch_s=120.0)
    flows: tuple[tuple[str, Flow, str], ...] = (
        ("pruned", RandomSearch(27, 100), "RandomSearch"),
        ("third", Hyperband(27), "Hyperband"),
        ("complete", ASHA(27, 100), "ASHA"),
        ("second", SEER("1 h", "4 worker-h"), "SEER"),
        ("best", Lookahead("1 h", "4 worker-h"), "Lookahead"),
    )
    panel = Panel((52, 590), (0.0, 60.0), (0.0, 0.6))
    parts = list(panel.frame("Best loss so far, mean of 5 searches", "minutes", range(0, 61, 10)))
    parts += panel.levels((0, 0.2, 0.4, 0.6))
    named: list[tuple[float, str, str]] = []
    for kind, flow, name in flows:
        elastic = SimulatedCluster(n_workers=4, n_shards=1, max_workers=64)
        cluster = elastic if name in ("SEER", "Lookahead") else FOUR
        best = [0.0] * 61
        for seed in range(5):
            run = search(flow, curves, cluster=cluster, seed=seed, deadline="1 h")
            scored = run.metrics[run.metrics["split"] == "validation"]
            for minute in range(61):
                known = scored["value"][scored["seconds"] <= 60 * minute + 0.5]
                best[minute] += min(known, default=math.nan) / 5
        points = [(at, value) for at, value in enumerate(best) if value <= 0.6]
        places = " ".join(panel.place(*point) for point in points)
        parts.append(f'<polyline class="{kind}" style="stroke-width:2.4" points="{places}"/>')
        named.append((points[-1][1], name, kind))
    height = BOTTOM + 20.0
    for value, name, kind in sorted(named):
        height = min(height - 17, panel.at(60.0, value)[1])
        spot = f'cx="602" cy="{coordinate(height)}" r="5"'
        parts.append(f'<circle class="{kind}" {spot}/>')
        parts.append(f'<text class="small" x="612" y="{coordinate(height + 4.5)}">{name}</text>')
    words = "the best loss so far of five of them, over one hour on four workers"
    return picture("Search procedures", words, parts)


STOPPED = "learning curves, those of stopped trials end early; beside them when each trial trained"
PICTURES: dict[str, Callable[[], str]] = {
    "index": together,
    "random-and-grid": random_and_grid,
    "samplers": samplers,
    "successive-halving": lambda: two(SuccessiveHalving(27, 27), "SuccessiveHalving", STOPPED),
    "hyperband": lambda: two(Hyperband(27), "Hyperband", STOPPED),
    "asha": lambda: two(ASHA(27, 27), "ASHA", STOPPED),
    "moasha": moasha,
    "median-stopping": lambda: two(MedianStopping(27, 27), "MedianStopping", STOPPED),
    "optuna-pruners": lambda: two(
        OptunaPruner(
            27, 20, optuna.pruners.PercentilePruner(25.0, n_warmup_steps=2), n_concurrent=4
        ),
        "OptunaPruner",
        STOPPED,
    ),
    "pbt": pbt,
    "early-stopping": lambda: two(
        EarlyStopping(RandomSearch(27, 16), patience=2), "EarlyStopping", STOPPED
    ),
    "seer": lambda: elastic(
        SEER("10 min", "80 worker-minutes", reduction_factor=2, min_stage="1 min"),
        "SEER",
        "many trials on many workers first, then fewer on fewer workers",
    ),
    "hypersched": lambda: elastic(
        HyperSched("30 min", "240 worker-minutes", reduction_factor=2, scaling=SCALING),
        "HyperSched",
        "the same number of workers all the time, at the end for few trials",
    ),
    "lookahead": lambda: elastic(
        Lookahead("30 min", "240 worker-minutes", scaling=SCALING),
        "Lookahead",
        "many workers at the beginning, then the best trials on fewer",
    ),
    "hermes": lambda: turns(
        (
            (Hermes(9, 12, quantum="30 s"), "Hermes: the fastest first"),
            (RoundRobin(9, 12, quantum="30 s"), "RoundRobin: each in turn"),
        ),
        "Hermes beside RoundRobin",
        "when each of 12 trials trained on two workers; a dot where one came to a loss of 0.35",
    ),
    "round-robin": lambda: turns(
        (
            (RoundRobin(9, 12, quantum="30 s"), "RoundRobin: each in turn"),
            (FIFO(9, 12), "FIFO: one after another"),
        ),
        "RoundRobin beside FIFO",
        "when each of 12 trials trained on two workers; a dot where one came to a loss of 0.35",
    ),
    "marble": lambda: jobs(
        ((Marble(JobQueue(), LAMBDA), "Marble: three jobs on six workers"),),
        "Marble",
        "job 2 begins on three workers and has four when job 1 has ended; job 3 takes the rest",
    ),
    "job-queue": lambda: jobs(
        (
            (LSF(JobQueue()), "LSF: one job at a time"),
            (Marble(JobQueue(), LAMBDA), "Marble: side by side"),
        ),
        "LSF beside Marble",
        "LSF gives six workers to one job after another; Marble trains jobs side by side",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES])
    parser.add_argument("--into", type=Path, default=FOLDER)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for name in options.names or PICTURES:
        (options.into / f"{name}.svg").write_text(PICTURES[name]())


if __name__ == "__main__":
    main()
