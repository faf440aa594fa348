"""Of docs/measured/benchmarks.md the generated parts change, its prose never.

A wrong marker is an error that names it; a benchmark that fails stops no other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import page as program
from .page import MARKER, PAGE, PARTS, PageError, origin, replaced

NAMES = ("one", "two", "three-long")
texts = st.text("ab |\n<!->-:*é").filter(lambda text: not MARKER.search(text))
#: Names and texts of parts, each followed by prose.
parts_of_pages = st.lists(st.tuples(st.sampled_from(NAMES), texts, texts), unique_by=lambda p: p[0])


def written(prose: str, parts: Sequence[tuple[str, str, str]]) -> str:
    return prose + "".join(
        f"\n<!-- begin: {name} -->\n{text}\n<!-- end: {name} -->\n{prose}"
        for name, text, prose in parts
    )


@given(texts, parts_of_pages, st.dictionaries(st.sampled_from(NAMES), texts))
def test_prose_and_other_parts_stay(
    prose: str, parts: list[tuple[str, str, str]], drawn: Mapping[str, str]
) -> None:
    new = {name: drawn[name] for name, _, _ in parts if name in drawn}
    made = replaced(written(prose, parts), new, NAMES)
    expected = [
        (name, f"\n{new[name].strip()}\n" if name in new else text, after)
        for name, text, after in parts
    ]
    assert made == written(prose, expected)
    assert replaced(made, new, NAMES) == made


def test_wrong_markers_are_named() -> None:
    good = "a\n<!-- begin: one -->\ntext\n<!-- end: one -->\nc"
    wrong = {
        "begin: two": (good, {"two": ""}),
        "'four'": (good.replace("one", "four"), {}),
        "end: one": (good.replace("<!-- end: one -->", ""), {}),
        "end: one --> stands": (good.replace("<!-- begin: one -->", ""), {}),
        "end: two --> stands": (good.replace("end: one", "end: two"), {}),
        "begin: one --> stands": (good + "\n" + good, {}),
        "end: one --> is missing before that of two": (
            good.replace("text", "<!-- begin: two -->\n<!-- end: two -->"), {}),
        "part one": (good, {"one": "<!-- end: one -->"}),
    }  # fmt: skip
    for told, (page, new) in wrong.items():
        with pytest.raises(PageError, match=re.escape(told)):
            replaced(page, new, NAMES)


def test_the_page_has_each_part_and_no_other() -> None:
    page = PAGE.read_text()
    assert replaced(page, {}, PARTS) == page
    assert {name for _, name in MARKER.findall(page)} == set(PARTS)


def test_every_benchmark_of_the_page_exists() -> None:
    for command in PARTS.values():
        assert (PAGE.parents[2] / "tests/benchmarks" / command.split()[0]).is_file(), command


def test_a_part_says_where_it_is_from() -> None:
    said = origin("engine.py", minutes=2.0, load=0.1)
    for what in (
        "`python tests/benchmarks/engine.py`",
        "commit ",
        "cores",
        "Python 3",
        "PyTorch 2",
    ):
        assert what in said


def test_one_that_fails_leaves_its_part_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = {"fails": 1, "misses": 3, "holds": 0}
    for name, code in ends.items():
        (tmp_path / f"{name}.py").write_text(f"print('new {name}'); raise SystemExit({code})")
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- begin: {n} -->\nold {n}\n<!-- end: {n} -->\n" for n in ends))
    monkeypatch.setattr(program, "PARTS", {name: f"{name}.py {{data}}" for name in ends})
    monkeypatch.setattr(program, "PAGE", page)
    monkeypatch.setattr(program, "HERE", tmp_path)
    codes = []
    for names in ("fails,misses,holds", "misses,holds", "holds"):
        monkeypatch.setattr(sys, "argv", ["page.py", "--only", names, "--data", str(tmp_path)])
        codes.append(program.main())
    assert codes == [1, 3, 0]
    written = page.read_text()
    assert re.findall(r"(?:old|new) \w+", written) == ["old fails", "new misses", "new holds"]
    assert "missed a bar: misses\nfailed: fails\n" in capfd.readouterr().err
