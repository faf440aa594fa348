"""A tutorial is a page and a notebook: both say the same, and the notebook runs as it stands.

Jupyter runs it in an empty folder, as a reader would. No cell warns. What a page says that changes
from one cell to another is what differs between them. A figure of Plotly becomes a picture. By day
the first one runs, with ``EXAMPLES=all`` in the environment each of them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from . import tutorials

PAGES = [pytest.param(page, id=page.stem) for page in tutorials.pages()]
ALL = os.environ.get("EXAMPLES") == "all"
RUN = [page for page in PAGES if ALL or page.id == "digits"]


@pytest.mark.parametrize("page", PAGES)
def test_page_and_notebook_say_the_same(page: Path) -> None:
    import nbformat

    notebook = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
    of_page = tutorials.notebook_of(page)
    wrong = f"run python tests/tutorials.py {page.stem}"
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in of_page.cells], (
        wrong
    )
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code"), wrong
    assert tutorials.page_of(notebook, page) == page.read_text(), wrong


@pytest.mark.parametrize("page", PAGES)
def test_what_changes_is_what_differs_between_cells(page: Path) -> None:
    text = page.read_text()
    cells = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for diff in re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        lines = diff.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        assert before in cells
        assert after in cells


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("page", RUN)
def test_the_notebook_runs_and_warns_of_nothing(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "here").mkdir()
    notebook = tutorials.executed(page, tmp_path / "here")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    errors = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not [text for text in errors if "Warning" in text]


def test_what_a_cell_shows_stands_behind_it_once(tmp_path: Path) -> None:
    page = tmp_path / "sums.md"
    text = "# Sums\n\n```python\nprint(1)\n2 + 2\n```\n\nNothing:\n\n```python\nthree = 3\n```\n"
    page.write_text(text)
    tutorials.write(page)
    shown = text.replace("2 + 2\n```", '2 + 2\n```\n\n```text title="Output"\n1\n4\n```')
    assert page.read_text() == shown
    tutorials.write(page)
    assert page.read_text() == shown


@pytest.mark.slow
@pytest.mark.skipif(not Path(tutorials.CHROMIUM).exists(), reason="needs Debian's Chromium")
def test_a_figure_becomes_a_picture(tmp_path: Path) -> None:
    page = tmp_path / "line.md"
    cell = "import plotly.graph_objects as go\n\ngo.Figure(go.Scatter(y=[1, 2]))"
    page.write_text(f"```python\n{cell}\n```\n")
    tutorials.write(page)
    assert page.read_text().endswith("```\n\n![Output](line-1.png)\n")
    assert (tmp_path / "line-1.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_shows_no_path_of_the_machine_that_made_it(tmp_path: Path) -> None:
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    shown = f"{tmp_path}/a.zarr, {sys.prefix}/bin/python -m dask, /elsewhere/b"
    cell = new_code_cell(
        outputs=[
            new_output("stream", text=shown),
            new_output("execute_result", data={"text/plain": shown, "image/png": shown}),
        ]
    )
    tutorials.without_paths(new_notebook(cells=[cell]), tmp_path)
    printed, returned = cell.outputs
    assert printed.text == "a.zarr, python -m dask, /elsewhere/b"
    assert returned.data == {"text/plain": printed.text, "image/png": shown}
