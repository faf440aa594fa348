"""Each figure, table, algorithm, equation and section that is cited of a paper is in the paper.

The papers are not part of the repository. What they have is listed below; that a statement is what
stands there is read, and not tested.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4, "V": 5, "VI": 6, "VII": 7, "VIII": 8}
#: How many of each a paper has, and its sections: by chapter how many there are, and those in them.
HAS = {
    "cerebro": {"Figure": 13, "Table": 6, "Algorithm": 2, "Equation": 4},
    "seer": {"Figure": 4, "Table": 4, "Algorithm": 3, "Equation": 2},
    "hermes": {"Figure": 7, "Table": 3, "Algorithm": 3, "Equation": 1},
    "marble": {"Figure": 9, "Table": 4, "Algorithm": 1, "Equation": 1},
}
SECTIONS = {
    "cerebro": {1: 0, 2: 2, 3: 2, 4: 3, 5: 7, 6: 3, 7: 0, 8: 0, 9: 0, 10: 0},
    "seer": {1: 0, 2: 0, 3: 5, 4: 0, 5: 0, 6: 5, 7: 0},
    "hermes": {1: 0, 2: 2, 3: 4, 4: 3, 5: 2, 6: 0},
    "marble": {1: 0, 2: 2, 3: 0, 4: 4, 5: 4, 6: 0, 7: 4, 8: 0},
}
#: Files that cite one paper alone.
FILES = {
    "docs/measured/papers/cerebro.md": "cerebro",
    "docs/measured/papers/seer.md": "seer",
    "docs/measured/papers/hermes.md": "hermes",
    "docs/measured/papers/marble.md": "marble",
    "docs/procedures/early-stopping.md": "hermes",
    "docs/procedures/hermes.md": "hermes",
    "docs/procedures/hypersched.md": "seer",
    "docs/procedures/job-queue.md": "marble",
    "docs/procedures/marble.md": "marble",
    "docs/procedures/round-robin.md": "hermes",
    "docs/procedures/samplers.md": "cerebro",
    "docs/procedures/seer.md": "seer",
    "docs/explanation/elasticity.md": "seer",
    "flows/seer.py": "seer",
    "flows/hypersched.py": "seer",
    "flows/hermes.py": "hermes",
    "flows/time_sharing.py": "hermes",
    "flows/by_convergence.py": "hermes",
    "flows/marble.py": "marble",
    "flows/job_queue.py": "marble",
    "flows/baselines/elastic_grid.py": "seer",
    "flows/baselines/elastic_hyperband.py": "seer",
    "flows/baselines/random_trial.py": "seer",
    "flows/baselines/fifo.py": "hermes",
    "flows/baselines/slaq.py": "hermes",
    "flows/baselines/lsf.py": "marble",
    "flows/baselines/optimus.py": "marble",
    "dagsel/planning/brackets.py": "seer",
    "dagsel/planning/small_population.py": "cerebro",
    "tests/benchmarks/papers/cerebro.py": "cerebro",
    "tests/benchmarks/papers/seer.py": "seer",
    "tests/benchmarks/papers/hermes.py": "hermes",
    "tests/benchmarks/papers/marble.py": "marble",
    "tests/benchmarks/papers/marble_sets.py": "marble",
    "tests/benchmarks/reference/approximate.py": "cerebro",
    "tests/benchmarks/reference/exact.py": "cerebro",
    "tests/benchmarks/reference/open_shop.py": "cerebro",
}
NUMBER = r"(?:\d+|[IVX]+\b)"
NUMBERED = re.compile(
    rf"\b(Figure|Table|Algorithm|Equation)s? "
    rf"({NUMBER}(?:[a-cA-C]\b)?(?:(?:, | and | to |–)\s*{NUMBER})*)",
    re.IGNORECASE,
)
SECTION = re.compile(r"(?:§|\bSections?\s)((?:\d+(?:\.\d+)*(?:, | and )?)+)", re.IGNORECASE)
ROMAN_SECTION = re.compile(r"\b([IVX]+)-([A-D])\d?\b")


def cited(text: str) -> list[tuple[str, int]]:
    """Return kind and number of all that a text cites."""
    text = " ".join(text.split())
    return [
        (kind.capitalize(), ROMAN.get(number) or int(number))
        for kind, numbers in NUMBERED.findall(text)
        for number in re.findall(NUMBER, numbers)
    ]


def sections(text: str) -> list[tuple[int, int]]:
    """Return chapter and section of all that a text cites; 0 for the chapter as a whole."""
    text = " ".join(text.split())
    found = [one for many in SECTION.findall(text) for one in re.findall(r"\d+(?:\.\d+)*", many)]
    pairs = [([*map(int, one.split(".")), 0])[:2] for one in found]
    roman = [
        (ROMAN[chapter], ord(part) - ord("A") + 1) for chapter, part in ROMAN_SECTION.findall(text)
    ]
    return [*((chapter, part) for chapter, part in pairs), *roman]


@pytest.mark.parametrize(("path", "paper"), FILES.items())
def test_what_is_cited_is_in_the_paper(path: str, paper: str) -> None:
    text = (ROOT / path).read_text()
    found, parts = cited(text), sections(text)
    assert found or parts, "it cites nothing: take it off the list"
    assert [one for one in found if not 1 <= one[1] <= HAS[paper][one[0]]] == []
    have = SECTIONS[paper]
    assert [one for one in parts if one[0] not in have or one[1] > have[one[0]]] == []


def test_citations_are_read_off_a_text() -> None:
    text = (
        "Algorithms 1 and 2, Tables II to IV, Figure 8B, Figures 10, 11 and 13; equations 1 and 2"
    )
    assert cited(text) == [
        ("Algorithm", 1), ("Algorithm", 2), ("Table", 2), ("Table", 4), ("Figure", 8),
        ("Figure", 10), ("Figure", 11), ("Figure", 13), ("Equation", 1), ("Equation", 2),
    ]  # fmt: skip
    text = "§6.3, Sections 2 and 6.4; Section 4.1.2, section V-C and VII-B1"
    assert sections(text) == [(6, 3), (2, 0), (6, 4), (4, 1), (5, 3), (7, 2)]
