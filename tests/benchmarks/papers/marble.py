"""MARBLE's experiments (Han et al., CCGRID 2020) in the simulator: Tables II to IV, Figures 5 to 8.

    python tests/benchmarks/papers/marble.py [--out FOLDER]

It writes the tables of ``marble.md`` in that folder anew, and the pictures ``marble-*.svg``. What
the page says around them is written by hand: what the paper states and what is assumed stood there
before the first run. Nothing is drawn at random, so a second run gives the same numbers and
pictures. It takes a minute.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from dagsel.simulation import SimulatedRun
from tests.benchmarks.papers import pages
from tests.benchmarks.papers.marble_sets import (
    BEST,
    LSF_S,
    MARBLE_S,
    MOST_ALPHA,
    N_GPUS,
    SAVED,
    SETS,
    USED_MORE,
    Assumed,
    agreeing,
    gains,
    grid,
    is_within,
    lsf,
    marble,
    n_switches,
    optimus,
    saved,
    stretches,
)

FIRST = Assumed()
#: One assumption changed at a time.
CHANGES: dict[str, Assumed] = {
    "as above": FIRST,
    "a step of Inception-v3 is 1.2 of ResNet-50's": replace(FIRST, ratio=1.2),
    "… 1.8": replace(FIRST, ratio=1.8),
    "α = 0 but for VGG-16": replace(FIRST, alpha=0.0),
    "α = 2.91% for all": replace(FIRST, alpha=1.0),
    "λ linear up to the best number": replace(FIRST, loss=0.0),
    "a switch takes 0 s": replace(FIRST, switch_s=0.0),
    "a switch takes 33 s": replace(FIRST, switch_s=33.0),
    "a switch takes 132 s": replace(FIRST, switch_s=132.0),
    "eight nodes are as fast as one": replace(FIRST, nodes=1.0),
}
COSTS_S = (66.0, 33.0, 10.0, 0.0)


def against(number: int, ours: float) -> float:
    """Return MARBLE's time as a multiple of the paper's: in seconds, or by LSF's time."""
    return ours / (MARBLE_S.get(number) or 1 - SAVED[number] / 100)


def of_lsf(number: int, assumed: Assumed, run: SimulatedRun | None = None) -> tuple[float, float]:
    """Return MARBLE's seconds, and what they are as a multiple of the paper's."""
    run = run or marble(number, assumed)
    if number in MARBLE_S:
        return run.seconds, against(number, run.seconds)
    return run.seconds, against(number, run.seconds / lsf(number, assumed).seconds)


def mark(ratio: float) -> str:
    """Write a ratio, in bold where it keeps to the bar."""
    return f"**{ratio:.2f}**" if is_within(ratio, 1.0) else f"{ratio:.2f}"


def table(heads: str, rows: Sequence[Sequence[object]]) -> str:
    """Write a table; `heads` has its columns, with ``|`` between them."""
    return pages.table([head.strip() for head in heads.split("|")], rows)


def inputs_table(assumed: Assumed) -> str:
    scaling, step_s = assumed.scaling(), assumed.step_s()
    rows = [
        [network, f"{step_s[network]:.4f}", BEST[network]]
        + [f"{scaling[network].speedup(n):.2f}" for n in range(1, N_GPUS + 1)]
        for network in BEST
    ]
    return table("network | s a step on 6 | best | λ(1) | λ(2) | λ(3) | λ(4) | λ(5) | λ(6)", rows)


def sets_table() -> str:
    rows = []
    for number in SAVED:
        whole, run, pays = lsf(number, FIRST), marble(number, FIRST), marble(number, FIRST, None)
        seconds, ratio = of_lsf(number, FIRST, run)
        paper = [f"{given.get(number, math.nan):.0f}" for given in (LSF_S, MARBLE_S)]
        row: list[object] = [number, *(cell.replace("nan", "–") for cell in paper)]
        row += [f"{whole.seconds:.0f}", f"{seconds:.0f}", mark(ratio), SAVED[number]]
        row += [f"{saved(seconds, whole.seconds):.1f}", USED_MORE.get(number, "≤ 34.6")]
        row += [f"{100 * (whole.seconds / seconds - 1):.0f}", n_switches(run)]
        row += [f"{pays.seconds:.0f}"]
        row += [f"{gains(number, FIRST, every_s).seconds:.0f}" for every_s in (600.0, 300.0)]
        rows.append(row)
    return table(
        "set | paper: LSF, s | paper: MARBLE, s | ours: LSF, s | ours: MARBLE, s | ours/paper "
        "| paper: less than LSF, % | ours, % | paper: GPUs used more, % | ours, % | switches "
        "| `Marble` by default, s | `MarginalGain`, s | every 300 s, s",
        rows,
    )


def agreeing_table(found: Mapping[Assumed, Mapping[int, SimulatedRun]]) -> str:
    rows: list[list[object]] = []
    for assumed, runs in found.items():
        cells = [of_lsf(number, assumed, runs.get(number)) for number in SAVED]
        row: list[object] = [f"{assumed.switch_s:.0f}", assumed.ratio]
        row += [f"{100 * MOST_ALPHA * assumed.alpha:.2f}", assumed.loss]
        rows.append(row + [f"{s:.0f} ({mark(ratio)})" for s, ratio in cells])
    heads = "a switch, s | step ratio | α, % | c | set 1 | set 2 | set 3 | set 4 | set 5 | set 6"
    return table(heads, rows)


def changes_table() -> str:
    rows = [
        [name, *(mark(of_lsf(number, assumed)[1]) for number in SAVED)]
        for name, assumed in CHANGES.items()
    ]
    return table("changed | set 1 | set 2 | set 3 | set 4 | set 5 | set 6", rows)


def optimus_rows(assumed: Assumed) -> list[list[Any]]:
    """Compare MARBLE with Optimus in sets 7 to 9: see the heads in `optimus_table`."""
    rows: list[list[Any]] = []
    for number in (7, 8, 9):
        ours = marble(number, assumed)
        row: list[Any] = [number, ours.seconds, n_switches(ours)]
        for options in ({}, {"traffic": 0.05}, {"has_own_nodes": False}):
            run = optimus(number, assumed, **options)
            row += [run.seconds, saved(ours.seconds, run.seconds), n_switches(run)]
        rows.append(row)
    return rows


def optimus_table(rows: Sequence[Sequence[Any]]) -> str:
    heads = "set | MARBLE, s | switches"
    for kind in ("Optimus", "with some traffic", "servers beside workers"):
        heads += f" | {kind}, s | MARBLE less, % | switches"
    shown = [[f"{x:.1f}" if i in (4, 7, 10) else f"{x:.0f}" for i, x in enumerate(r)] for r in rows]
    return table(heads, shown)


def agreeing_of(second: Mapping[Assumed, Mapping[int, SimulatedRun]]) -> Assumed:
    """Return of the inputs that agree with the paper's account those of the pictures."""
    return next(assumed for assumed in second if assumed.switch_s == 0 and assumed.alpha == 0.5)


def tables(folder: Path) -> str:
    """Write the pictures; return the generated part of the page."""
    second = second_step()
    told, shown = agreeing_of(second), draw(folder, second)
    return "\n\n".join(
        [
            "### First inputs: λ and step times (Figure 2)",
            inputs_table(FIRST),
            "### First inputs: sets 1 to 6 (Figures 6a, 6b, 7a, 7b)",
            "Bold: within 10% of the paper. For sets 4 to 6 ours/paper is of the shares of LSF's "
            "time. The last three columns are dagsel's own and not in the paper: promotions that "
            "pay alone, and the rule of Optimus on single GPUs, every 600 s and every 300 s.",
            sets_table(),
            shown["sets"],
            "### First inputs, one assumption changed",
            "MARBLE's time as a multiple of the paper's; bold: within 10%.",
            changes_table(),
            f"### Inputs under which sets 1 to 3 go as the paper tells: of {len(grid())} for each "
            "cost of a switch",
            "MARBLE's seconds, and in brackets as a multiple of the paper's (sets 4 to 6: of the "
            "shares of LSF's time).",
            agreeing_table(second),
            "The course of sets 1 to 3 with the last but one of these inputs (Figure 5):",
            shown["course"],
            "### Optimus (Figure 8)",
            "The paper: MARBLE needs up to 47% less time; in its example 2 switches against 9.",
            "First inputs:",
            optimus_table(optimus_rows(FIRST)),
            "Inputs that agree with the paper's account, α 1.46%, a switch of 0 s:",
            optimus_table(optimus_rows(told)),
            shown["optimus"],
        ]
    )


# ---- pictures


def draw(folder: Path, second: Mapping[Assumed, Mapping[int, SimulatedRun]]) -> dict[str, str]:
    """Write the pictures; return the lines of markdown that show them."""
    told, shown = agreeing_of(second), dict[str, str]()

    def share(number: int, assumed: Assumed) -> float:
        return 100 * marble(number, assumed).seconds / lsf(number, assumed).seconds

    def keep(name: str, alt: str) -> None:
        plt.tight_layout()
        shown[name] = pages.picture(plt.gcf(), folder / f"marble-{name}.svg", alt)
        plt.close()

    plt.figure(figsize=(7, 3))
    bars = {
        "paper": [100 - less for less in SAVED.values()],
        "first inputs": [share(number, FIRST) for number in SAVED],
        "as told, a switch of 0 s": [share(number, told) for number in SAVED],
    }
    for place, (name, heights) in enumerate(bars.items()):
        plt.bar([n + 0.27 * (place - 1) for n in SAVED], heights, 0.25, label=name)
    plt.xticks(list(SAVED), [f"set {number}" for number in SAVED])
    plt.ylabel("MARBLE's time, % of LSF's")
    plt.ylim(0, 100)
    plt.legend(ncols=3, loc="upper center", frameon=False)
    keep(
        "sets",
        "MARBLE's time as a share of LSF's in sets 1 to 6: the paper's, ours with the first "
        "inputs, ours with inputs that agree with the paper's account",
    )

    _, axes = plt.subplots(3, 2, figsize=(8, 5), sharex=True)
    for number in MARBLE_S:
        for axis, kind in zip(axes[number - 1], (lsf, marble), strict=True):
            for part in stretches(kind(number, told)):
                length = part.end_s - part.begin_s
                axis.barh(part.job, length, left=part.begin_s, color=f"C{part.gang - 1}")
                axis.text(part.begin_s + length / 2, part.job, part.gang, ha="center", va="center")
            axis.set_yticks(range(3), [f"{net}, {steps}" for net, steps in SETS[number]])
            axis.invert_yaxis()
            axis.set_title(f"set {number}, {'LSF' if kind is lsf else 'MARBLE'}")
    for axis in axes[-1]:
        axis.set_xlabel("seconds; a number is that of the GPUs")
    keep("course", "Which job has how many GPUs when, in sets 1 to 3, under LSF and MARBLE")

    plt.figure(figsize=(7, 3))
    rows = optimus_rows(FIRST)
    for place, (name, column) in enumerate(
        {"MARBLE": 1, "Optimus": 3, "Optimus, servers beside workers": 9}.items()
    ):
        heights = [row[column] for row in rows]
        plt.bar([row[0] + 0.27 * (place - 1) for row in rows], heights, 0.25, label=name)
    plt.xticks([7, 8, 9], ["set 7", "set 8", "set 9"])
    plt.ylabel("seconds")
    plt.legend(frameon=False)
    keep("optimus", "Time of sets 7 to 9 under Optimus and MARBLE")
    return shown


def second_step() -> dict[Assumed, dict[int, SimulatedRun]]:
    """Return the inputs that agree with the paper's account, for each cost of a switch."""
    return {key: runs for cost_s in COSTS_S for key, runs in agreeing(cost_s).items()}


def main() -> None:
    """Write the page and its pictures."""
    args = pages.parser_of(__doc__ or "", ["tables"]).parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pages.write("marble", {"tables": tables}, args.out, args.only)


if __name__ == "__main__":
    main()
