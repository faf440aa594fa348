"""What the pages of the papers have in common: their parts, tables and pictures."""

from __future__ import annotations

import argparse
import html
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from tests.benchmarks.page import output_of, replaced

PAGES = Path(__file__).parents[3] / "docs/measured/papers"
mpl.use("Agg")
# The same picture gives the same bytes; letters stay letters.
mpl.rcParams.update({"svg.hashsalt": "dagsel", "svg.fonttype": "none", "font.size": 9})

#: Makes a part of a page in a folder for its pictures.
Part = Callable[[Path], str]
#: The parts of each page, by the script that makes them.
SCRIPTS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "cerebro": {
        "cerebro": ("figure-6", "table-2", "figure-7", "figure-8"),
        "cerebro_cluster": ("real-table-2", "real-figure-7", "real-figure-8a"),
        "cerebro_faults": ("real-figure-8b",),
        "cerebro_training": ("real-curves",),
    },
    "hermes": {
        "hermes": ("figure-5", "figure-6", "figure-2", "ours"),
        "hermes_cluster": ("real-figure-5",),
    },
    "seer": {"seer": ("figures", "comparison"), "seer_training": ("real-table-2",)},
}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in markdown.

    Examples
    --------
    >>> print(table(["a", "b"], [[1, "x"]]))
    | a | b |
    | --- | --- |
    | 1 | x |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def picture(figure: Any, path: Path, alt: str) -> str:
    """Write a figure as SVG; return the line of markdown that shows it."""
    figure.savefig(path, metadata={"Date": None, "Title": html.escape(alt)}, bbox_inches="tight")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")
    return f"![{alt}]({path.name})"


def interval(values: NDArray[np.float64]) -> str:
    """Return mean and 95% confidence interval, by Student's t.

    Examples
    --------
    >>> interval(np.array([1.0, 2.0, 3.0]))
    '2.00 ± 2.48'
    """
    if len(values) < 2:
        return f"{values.mean():.2f}"
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.2f} ± {half:.2f}"


def write(
    name: str,
    parts: Mapping[str, Part],
    folder: Path,
    only: Sequence[str] = (),
    *,
    script: str = "",
    options: str = "",
) -> None:
    """Write the parts of a page anew, each as soon as it is made; what is by hand stays.

    In another folder than that of the documentation the page is begun as a copy of that one.

    Parameters
    ----------
    name
        Of the page.
    parts
        What makes each part.
    folder
        Where page and pictures are.
    only
        The parts to make; all if it is empty.
    script
        The script, if it is not that of the page's name. Then the parts are made on real workers,
        and what they took is told by the clock on the wall.
    options
        What the script was called with besides, such as ``" --quick"``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{name}.md"
    if not page.exists():
        page.write_text((PAGES / page.name).read_text())
    known = {*parts, *(part for all_of in SCRIPTS.get(name, {}).values() for part in all_of)}
    clock, unit = (time.monotonic, "s") if script else (time.process_time, "s of one core")
    for part, make in parts.items():
        if only and part not in only:
            continue
        began = clock()
        made, took_s = make(folder), 10 * math.ceil((clock() - began) / 10)
        command = f"python tests/benchmarks/papers/{script or name}.py --only {part}{options}"
        commit = output_of("git", "rev-parse", "--short", "HEAD") or "unknown"
        told = f"*`{command}`, commit {commit}, under {took_s} {unit}.*"
        page.write_text(replaced(page.read_text(), {part: f"{told}\n\n{made}"}, known))
        print(f"{name}, {part}: under {took_s} {unit}", file=sys.stderr, flush=True)


def parser_of(about: str, parts: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser of the options that all pages have."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PAGES, help="folder of page and pictures")
    parser.add_argument("--only", nargs="+", choices=list(parts), default=[])
    return parser
