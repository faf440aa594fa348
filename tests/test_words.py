"""Pages for newcomers have short sentences, are spelt right, and speak of the project alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = [
    ROOT / "README.md",
    ROOT / "docs/index.md",
    *sorted((ROOT / "docs/tutorials").glob("*.md")),
    *sorted((ROOT / "docs/how-to").glob("*.md")),
    *sorted((ROOT / "docs/coming-from").glob("*.md")),
    *sorted((ROOT / "docs/procedures").glob("*.md")),
]
#: On average, on a page.
MOST_WORDS = 22
#: What is no sentence: code, comments, tags, tables, heads of sections and of boxes.
NO_SENTENCE = [
    re.compile(pattern, re.DOTALL | re.MULTILINE)
    for pattern in (
        r"^( *)```.*?^\1```$",
        r"<!--.*?-->",
        r"<[^>\n]+>",
        r"^\s*\|.*?$",
        r"^#.*?$",
        r"^\s*(?:!!!|\?\?\?\+?|===).*?$",
    )
]
LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\{[^}]*\})")
#: A sentence ends with its point, or with its paragraph or item.
END = re.compile(
    r"(?<!e\.g)(?<!i\.e)(?<!et al)[.!?][*_)\"”]*(?=\s|$)|\n\s*\n|\n\s*(?=(?:[-*]|\d+\.) )"
)
#: Words of those who make the project, which no reader can know.
OF_THE_MAKERS = re.compile(r"\b(?:lent to|(?:this|any) session|issue \d+)\b", re.IGNORECASE)


def words_of_sentences(text: str) -> list[int]:
    """Return how many words each sentence of a page has."""
    for pattern in NO_SENTENCE:
        text = pattern.sub("\n\n", text)
    text = re.sub(r"`[^`]+`", "code", LINK.sub(r"\1", text))
    found = [len(re.findall(r"\w[\w'’-]*", part)) for part in END.split(text)]
    return [n_words for n_words in found if n_words]


@pytest.mark.parametrize(
    ("text", "n_words"),
    [
        ("One two. Three four five.", [2, 3]),
        (
            "Say `a.b.c()` and\n[go on](there.md): it is e.g. so.\n\n- an item\n- another one",
            [10, 2, 2],
        ),
        ("# Head of it\n\n| a | table |\n\nOne.\n\n```python\nno = 1.\n```\n", [1]),
    ],
)
def test_sentences_are_counted(text: str, n_words: list[int]) -> None:
    assert words_of_sentences(text) == n_words


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_sentences_of_a_guide_are_short(page: Path) -> None:
    n_words = words_of_sentences(page.read_text())
    assert sum(n_words) / len(n_words) <= MOST_WORDS


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_a_page_speaks_of_the_project_alone(page: Path) -> None:
    assert not OF_THE_MAKERS.findall(page.read_text())


def test_the_words_are_in_the_dictionary() -> None:
    folders = ("dagsel", "flows", "storage", "docs", "examples", "tests", "README.md")
    found = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *folders, "CHANGELOG.md", "CONTRIBUTING.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
