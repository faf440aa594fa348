"""The tables of docs/measured/tests.md: which laws are tested, and where.

A file of tests opens with its laws; the first paragraph of that goes into the table.

python tests/tested.py  # writes the tables anew
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/measured/tests.md"
#: Below it stands what is written here.
MARK = "<!-- Written by tests/tested.py. -->\n"
#: Folders of tests, as a reader meets the parts, and their headings.
FOLDERS = {
    "laws": "A whole run",
    "execution": "On clusters",
    "attack": "Attacks, wrong calls, and the user's own errors",
    "chaos": "Faults of all kinds",
    "flows": "Search procedures",
    "planning": "Plans, budgets and bills",
    "dispatch": "Who trains what, where, when",
    "driver": "The driver",
    "workers": "Units on a worker, without a cluster",
    "simulation": "Virtual time",
    "study": "The study",
    "history": "The record",
    "workloads": "Training",
    "storage": "Data sets, states and journals",
    "views": "What is shown",
    "notebook": "In Jupyter",
    "cli": "The command line",
    "observers": "Who is told",
    "gpu": "GPUs",
    "benchmarks": "Benchmarks",
    "mutants": "The tests themselves",
    "examples": "Examples",
    ".": "The house, its documents, its values",
}


def laws(path: Path) -> str:
    """Return what a file of tests says that it holds."""
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(told.split("\n\n")[0].split()).replace("|", "/")


def tables() -> str:
    """Return a table of laws for each folder."""
    parts = []
    for folder, heading in FOLDERS.items():
        here = TESTS / folder
        files = here.glob("test_*.py") if folder == "." else here.rglob("test_*.py")
        rows = [f"| {laws(path)} | `{path.relative_to(TESTS.parent)}` |" for path in sorted(files)]
        parts.append("\n".join([f"### {heading}\n", "| laws | tests |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """Return the page as it should be."""
    head, mark, _ = PAGE.read_text().partition(MARK)
    return head + mark + "\n" + tables()


if __name__ == "__main__":
    PAGE.write_text(page())
