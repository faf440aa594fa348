"""The errors page has every message, what it means, and a way that makes it happen.

Each message that the sources give to a class of `dagsel.errors` has a row, and each row a message.
Each line of code in the third column raises the row's class with the row's message; each test that
is named there exists.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.config
import pytest

from dagsel import errors

from . import raised

ROWS = raised.on_page()
#: The block that a reader runs before the lines of the third column.
FIRST = re.findall(r"^```python\n(.*?)^```$", raised.PAGE.read_text(), re.DOTALL | re.MULTILINE)[-1]
AT_NIGHT = os.environ.get("EXAMPLES") == "all"
LARGE = re.compile(r"HFWorkload|FlaxWorkload")
#: What a row says of a message that nobody knows how to raise, and how many such rows there may be.
UNKNOWN, MOST_UNKNOWN = "none known", 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ways")


@pytest.fixture(scope="module")
def names(folder: Path) -> Iterator[dict[str, Any]]:
    """What the page's block defines."""
    said = copy.deepcopy(dask.config.config)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found: dict[str, Any] = {"__name__": "ways"}
        exec(FIRST, found)
        yield found
    dask.config.config.clear()
    dask.config.config.update(said)


def test_every_message_is_on_the_page() -> None:
    lacking = "\n".join(map(str, raised.missing()))
    assert not lacking, f"rows for docs/reference/errors.md, see tests/raised.py:\n{lacking}"


def test_every_row_is_of_a_message() -> None:
    assert not [f"{row.kind}: {row.text}" for row in raised.stale()]
    assert len({(row.kind, row.text) for row in ROWS}) == len(ROWS)


def test_every_table_is_read() -> None:
    lines = re.findall(r"^\| `.*\|$", raised.PAGE.read_text(), re.MULTILINE)
    assert len(lines) == len(ROWS)


def runs(row: raised.Row) -> bool:
    """Whether a row's line runs now: those that import a large library do so at night."""
    return row.is_code and (AT_NIGHT or not LARGE.search(row.code))


@pytest.mark.parametrize("row", [row for row in ROWS if runs(row)], ids=lambda row: row.text[:60])
def test_the_line_makes_it_happen(row: raised.Row, names: dict[str, Any]) -> None:
    with pytest.raises(errors.DagselError) as caught:
        exec(row.code, dict(names))
    assert row.matches(str(caught.value)), str(caught.value)
    assert row.kind in (type(caught.value).__name__, raised.ANY)


def test_the_tests_that_are_named_exist() -> None:
    for row in ROWS:
        if row.is_test:
            path, _, name = row.code.partition("::")
            text = (raised.ROOT / path).read_text()
            assert not name or re.search(rf"def {name}\(", text), row.way


def test_few_messages_have_no_way() -> None:
    assert sum(row.way == UNKNOWN for row in ROWS) <= MOST_UNKNOWN
    assert sum(row.is_code for row in ROWS) > len(ROWS) / 3


def test_variable_parts_of_a_message_are_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "def fail(name, many):\n"
        "    what = f'{len(many)} files' if many else 'nothing'\n"
        "    raise SearchError(f'{what} of {name!r} ' + 'is there')\n"
    )
    module = raised.Module(path)
    ((call, kind, scope),) = module.raised()
    texts = {raised.joined(text) for text in module.texts(call.args[0], scope)}
    assert kind == "SearchError"
    assert texts == {"… files of … is there", "nothing of … is there"}
