"""What the documents say: their programs run, their links resolve, their site builds offline.

The blocks ``python`` of a page are one script. A block behind the comment ``notest`` is left out. A
block behind ``needs: ray`` is a program of its own, and runs where Python finds that package.
Tutorials are notebooks, and run in ``test_tutorials.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import tested
from .programs import HAS_NUMBERS_OF_PAGES, PORT_TAKEN, ROOT, run, run_here

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(
    r"(?:<!-- (notest|needs: \w+) -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
#: The Python that runs programs of packages that the environment of the tests lacks.
OTHER_PYTHON = os.environ.get("OTHER_PYTHON", sys.executable)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
#: Its program is run as a user runs it; `test_first_hour.py` runs others so.
FIRST = ROOT / "README.md"
#: What a page says that its programs print.
PRINTS = re.compile(r"[Pp]rints `([^`]+)`")
#: What it shows as their output.
SHOWN = re.compile(r'^```text title="Output"\n(.*?)\n```$', re.DOTALL | re.MULTILINE)
#: What Lightning's own Trainer says on a machine with Slurm, on one with many cores, and anywhere.
OF_LIGHTNING = (
    "ignore:The `srun` command is available",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
#: A test that a page refers to.
TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def blocks(page: Path) -> list[str]:
    return [code for mark, code in BLOCK.findall(page.read_text()) if not mark]


#: Programs of other projects that pages show: the package that each needs, and its text.
OTHERS = [
    pytest.param(mark.removeprefix("needs: "), code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (mark, code) in enumerate(BLOCK.findall(page.read_text()))
    if mark.startswith("needs: ")
]


def name_of(page: Path) -> str:
    """Return how a page is called among the tests: by its path, as two may have one name."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


@pytest.mark.slow
@pytest.mark.filterwarnings(PORT_TAKEN)
@pytest.mark.filterwarnings(*OF_LIGHTNING)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page) and page.parent.name != "tutorials"],
    ids=name_of,
)
def test_the_programs_of_a_page_run(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.py").write_text("\n".join(blocks(page)))
    if page == FIRST:
        printed = run("page.py", folder=tmp_path)
    else:
        run_here(tmp_path / "page.py", folder=tmp_path)
        printed = capsys.readouterr().out
    for said in (*PRINTS.findall(page.read_text()), *SHOWN.findall(page.read_text())):
        if HAS_NUMBERS_OF_PAGES:
            assert said in "\n".join(line.rstrip() for line in printed.splitlines())
        else:
            assert words_of(said) <= words_of(printed)


def words_of(text: str) -> set[str]:
    """Return the lines of a text, with a sign in place of each number and each gap."""
    return {re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip() for line in text.splitlines()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("package", "code"), OTHERS)
def test_the_programs_of_others_run_where_their_package_is(
    package: str, code: str, tmp_path: Path
) -> None:
    """`OTHER_PYTHON=/path/to/python` names a Python that has it; what these warn of is theirs."""
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    if subprocess.run([OTHER_PYTHON, "-c", find], check=False).returncode:
        pytest.skip(f"{OTHER_PYTHON} has no {package}")
    (tmp_path / "program.py").write_text(code)
    environment = {**os.environ, "HOME": str(tmp_path)}  # where some of them keep their results
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [OTHER_PYTHON, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_few_blocks_are_left_out() -> None:
    fences = [found for page in PAGES for found in BLOCK.findall(page.read_text())]
    assert sum(mark == "notest" for mark, _ in fences) <= 4
    assert len(fences) == sum(page.read_text().count("```python") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_resolve(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" not in link and not link.startswith("#"):
            assert (page.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    for path, name in TEST.findall(page.read_text()):
        if "/" in path:
            text = (ROOT / path).read_text()
            assert not name or re.search(rf"def {name}\(", text), (path, name)


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert all(re.search(rf"[:-] {page}\n", config) for page in pages)


def test_the_page_of_the_tests_is_what_they_say() -> None:
    wrong = "docs/measured/tests.md is out of date: python tests/tested.py"
    assert tested.PAGE.read_text() == tested.page(), wrong
    files = {path.relative_to(ROOT).as_posix() for path in tested.TESTS.rglob("test_*.py")}
    assert files == set(re.findall(r"^\| \S.* \| `([^`]+)` \|$", tested.page(), re.MULTILINE))


@pytest.mark.slow
def test_the_site_builds_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="needs the extra docs")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("dagsel", "flows", "storage"):
        (tmp_path / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        check=True,
        timeout=120,
    )
    site = tmp_path / "site"
    asked = re.compile(
        r'<(?:script|img|link(?! rel="?canonical)|iframe)[^>]*'
        r'(?:src|href)="?((?:https?:)?//[^"\s>]+)'
    )
    imported = re.compile(r"(?:@import|url\()[\s\"']*((?:https?:)?//[^\"')]+)")
    for path in site.rglob("*"):
        if path.suffix == ".html":
            assert not asked.findall(path.read_text()), path
        elif path.suffix == ".css":
            assert not imported.findall(path.read_text()), path
    found = (site / "search.json").read_text().casefold()
    for word in ("tensorboard", "parquet", "f1", "augment", "tutorial", "faq", "csv", "slurm"):
        assert word in found, word
