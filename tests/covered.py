"""The page docs/coverage.md: what of the product the tests run, line by line and branch by branch.

::

    make coverage               # runs all tests, in workers' processes as well, and writes the page
    python tests/covered.py     # writes it anew from what was measured

A file below `ENOUGH` needs a reason in `REASONS`, and one that has a reason is below it: else this
is an error, and the page is written all the same.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coverage.md"
ENOUGH = 95.0  # percent of the lines and branches of a file
#: Why less than that is run, by file.
REASONS: Mapping[str, str] = {}
HEAD = """\
# What the tests run

Lines and branches of the product that some test runs, measured with
[coverage](https://coverage.readthedocs.io) in the tests' own process and in those that they start:
workers, schedulers, drivers. A process that is killed takes what it counted with it.
`make coverage` writes this page; a file below {enough:.0f}% without a reason is an error.

{n_covered} of {n_all} lines and branches are run: **{percent:.1f}%**. {n_above} of {n_files} files
are above {enough:.0f}%; the others:

| file | run | why not all |
| --- | --- | --- |
"""


@dataclass(frozen=True)
class Covered:
    """How many lines and branches of a file, or of all, are run."""

    n_covered: int
    n_all: int

    @property
    def percent(self) -> float:
        return 100.0 * self.n_covered / self.n_all if self.n_all else 100.0


def measured() -> dict[str, Covered]:
    """Return what was measured, by file."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        coverage = Coverage(config_file=str(ROOT / "pyproject.toml"))
        coverage.load()
        coverage.json_report(outfile=str(told))
        files = json.loads(told.read_text())["files"]
    return {
        name: Covered(
            s["covered_lines"] + s["covered_branches"], s["num_statements"] + s["num_branches"]
        )
        for name, s in ((name, file["summary"]) for name, file in sorted(files.items()))
    }


def page(files: Mapping[str, Covered]) -> str:
    """Return the page."""
    whole = Covered(sum(f.n_covered for f in files.values()), sum(f.n_all for f in files.values()))
    below = {name: file for name, file in files.items() if file.percent < ENOUGH}
    head = HEAD.format(
        enough=ENOUGH,
        n_covered=f"{whole.n_covered:,}",
        n_all=f"{whole.n_all:,}",
        percent=whole.percent,
        n_above=len(files) - len(below),
        n_files=len(files),
    )
    rows = [
        f"| `{name}` | {file.percent:.1f}% | {REASONS.get(name, '')} |\n"
        for name, file in below.items()
    ]
    return head + "".join(rows)


def main() -> int:
    """Write the page; return how many files lack a reason, or have one that they do not need."""
    files = measured()
    PAGE.write_text(page(files))
    below = {name for name, file in files.items() if file.percent < ENOUGH}
    for name in sorted(below - REASONS.keys()):
        print(f"{name}: {files[name].percent:.1f}% is run, and tests/covered.py has no reason")
    for name in sorted(REASONS.keys() - below):
        print(f"{name}: tests/covered.py has a reason that it does not need, or it is gone")
    return len(below ^ REASONS.keys())


if __name__ == "__main__":
    sys.exit(min(main(), 1))
