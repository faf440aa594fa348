"""What the documents say: their programs run, their links resolve, their site builds offline.

The blocks ``python`` of a page are one script. A block behind the comment ``notest`` is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import tested
from .programs import PORT_TAKEN, ROOT, run, run_here

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"(<!-- notest -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
#: Its program is run as a user runs it; `test_first_hour.py` runs others so.
FIRST = ROOT / "README.md"
#: What a page says that its programs print.
PRINTS = re.compile(r"[Pp]rints `([^`]+)`")
#: A test that a page refers to.
TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def blocks(page: Path) -> list[str]:
    return [code for notest, code in BLOCK.findall(page.read_text()) if not notest]


@pytest.mark.slow
@pytest.mark.filterwarnings(PORT_TAKEN)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda p: p.name)
def test_the_programs_of_a_page_run(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.py").write_text("\n".join(blocks(page)))
    if page == FIRST:
        printed = run("page.py", folder=tmp_path)
    else:
        run_here(tmp_path / "page.py", folder=tmp_path)
        printed = capsys.readouterr().out
    for said in PRINTS.findall(page.read_text()):
        assert said in printed


def test_few_blocks_are_left_out() -> None:
    fences = [found for page in PAGES for found in BLOCK.findall(page.read_text())]
    assert sum(bool(notest) for notest, _ in fences) <= 4
    assert len(fences) == sum(page.read_text().count("```python") for page in PAGES)


def test_the_readmes_program_is_of_fifteen_lines() -> None:
    (program,) = blocks(ROOT / "README.md")
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 100
    assert ";" not in program


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_resolve(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" not in link and not link.startswith("#"):
            assert (page.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    for path, name in TEST.findall(page.read_text()):
        if "/" in path:
            text = (ROOT / path).read_text()
            assert not name or re.search(rf"def {name}\(", text), (path, name)


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert all(f": {page}\n" in config for page in pages)


def test_the_page_of_the_tests_is_what_they_say() -> None:
    wrong = "docs/tests.md is out of date: python tests/tested.py"
    assert tested.PAGE.read_text() == tested.page(), wrong
    files = {path.relative_to(ROOT).as_posix() for path in tested.TESTS.rglob("test_*.py")}
    assert files == set(re.findall(r"^\| \S.* \| `([^`]+)` \|$", tested.page(), re.MULTILINE))


@pytest.mark.slow
def test_the_site_builds_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra docs")
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=120,
    )
    asked = re.compile(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="?((?:https?:)?//[^"\s>]+)')
    imported = re.compile(r"(?:@import|url\()[\s\"']*((?:https?:)?//[^\"')]+)")
    for path in site.rglob("*"):
        if path.suffix == ".html":
            assert not asked.findall(path.read_text()), path
        elif path.suffix == ".css":
            assert not imported.findall(path.read_text()), path
    api = (site / "api" / "index.html").read_text()
    for name in ("run.optimize", "history.result.Run.best_model", "storage.ShardedDataset.write"):
        assert f'id="dagsel.{name}"' in api, name
