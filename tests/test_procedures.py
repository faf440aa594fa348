"""Each search procedure has a page, and what the page says is what the code has.

Every name of `dagsel.flows` and `dagsel.flows.baselines` has the table of its parameters on one
page: their names, in their order, and their defaults. Each page has a picture with an alternative
text, drawn by a script that writes the same bytes again, for light and dark. Each says when to use
the procedure and when not, which paper it is from and what was measured. What stands on these pages
as the output of their programs is compared where the programs run, in ``test_docs.py``.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import dagsel.flows
import dagsel.flows.baselines

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/procedures"
PAGES = sorted(FOLDER.glob("*.md"))
PICTURES = ROOT / "docs/pictures/procedures"
NAMES = {
    name: getattr(module, name)
    for module in (dagsel.flows, dagsel.flows.baselines)
    for name in module.__all__
}
TABLE = re.compile(
    r"^#+ Parameters of `(\w+)`\n\n"
    r"\| parameter \| default \| what it is \|\n\| --- \| --- \| --- \|\n"
    r"((?:\| .*\n)+)",
    re.MULTILINE,
)
ROW = re.compile(r"\| `(\w+)` \| (required|`[^`]+`) \| .+ \|\n")
PICTURE = re.compile(r"!\[([^\]]+)\]\(\.\./pictures/procedures/([\w-]+)\.svg\)")
#: Pages whose pictures are drawn anew: two of them, and all by night.
DRAWN = ["marble", "random-and-grid"]
if os.environ.get("PAGES") == "all":
    DRAWN = [page.stem for page in PAGES]


def parameters(procedure: Any) -> list[tuple[str, str]]:
    """Return names and defaults of a procedure's parameters, as a page writes them."""
    found = []
    for field in sorted(dataclasses.fields(procedure), key=lambda field: bool(field.kw_only)):
        if not field.init:
            continue
        if field.default is not dataclasses.MISSING:
            found.append((field.name, f"`{field.default!r}`"))
        elif field.default_factory is not dataclasses.MISSING:
            found.append((field.name, f"`{field.default_factory()!r}`"))
        else:
            found.append((field.name, "required"))
    return found


def tables() -> dict[str, list[tuple[str, str]]]:
    """Return what the pages say of the parameters of each procedure."""
    found = [pair for page in PAGES for pair in TABLE.findall(page.read_text())]
    assert Counter(name for name, _ in found).most_common(1)[0][1] == 1, "one has two tables"
    return {name: ROW.findall(rows) for name, rows in found}


def test_each_procedure_is_on_one_page_and_no_other_name_is() -> None:
    assert tables().keys() == NAMES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_the_parameters_and_their_defaults(name: str) -> None:
    assert tables()[name] == parameters(NAMES[name])


def test_the_first_page_leads_to_every_other_one() -> None:
    index = (FOLDER / "index.md").read_text()
    assert [page.name for page in PAGES if f"]({page.name}" not in index] == ["index.md"]
    named = set(re.findall(r"`(\w+)`", index)) | set(re.findall(r"`(\w+)\(", index))
    assert NAMES.keys() - named <= {"Range"}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "index.md"], ids=lambda p: p.stem)
def test_a_page_says_what_a_reader_asks(page: Path) -> None:
    text = page.read_text()
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    for wanted in ("When to use", "The program", "How (it|they) decide", "The paper", "Measured"):
        assert any(re.match(wanted, head) for head in heads) or wanted.startswith("How"), wanted
    assert "**Not**" in text
    assert 'text title="Output"' in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_has_a_small_picture_for_light_and_dark_and_says_what_is_seen(page: Path) -> None:
    ((words, name),) = PICTURE.findall(page.read_text())
    assert name == page.stem
    assert len(words) > 60, words
    data = (PICTURES / f"{name}.svg").read_bytes()
    assert len(data) < 40_000
    assert b"@media (prefers-color-scheme: dark)" in data
    picture = ElementTree.fromstring(data)
    title = picture.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text


def test_pictures_and_pages_are_the_same_ones() -> None:
    assert {path.stem for path in PICTURES.iterdir()} == {page.stem for page in PAGES}


def test_the_script_of_the_pictures_writes_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(PICTURES.parent / "procedures.py"), f"--into={tmp_path}", *DRAWN],
        check=True,
        timeout=300,
        cwd=ROOT,
    )
    drawn = sorted(tmp_path.iterdir())
    assert [path.stem for path in drawn] == sorted(DRAWN)
    for path in drawn:
        wrong = f"{path.name}: python docs/pictures/procedures.py {path.stem}"
        assert path.read_bytes() == (PICTURES / path.name).read_bytes(), wrong
