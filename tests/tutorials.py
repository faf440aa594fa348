"""Run the tutorials as notebooks, and put what they show into their pages.

::

    python tests/tutorials.py             # all of them: `make tutorials`
    python tests/tutorials.py digits csv  # two of them

A tutorial is one page, docs/tutorials/NAME.md. Its ``python`` blocks are the cells of a notebook.
They are run from top to bottom by Jupyter in an empty folder. What a cell prints or returns is put
behind its block, and NAME.ipynb beside the page is the notebook for those who download it. Edit
the page alone: outputs and notebook are made anew. Debian's Chromium makes a picture of a figure of
Plotly.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dagsel.history.plots.style import plotly

if TYPE_CHECKING:  # Jupyter takes seconds to import, in each process that collects tests
    from nbformat import NotebookNode

FOLDER = Path(__file__).parent.parent / "docs/tutorials"
#: A code block, and what stands behind it if it has shown something.
CODE = re.compile(r"^```python\n.*?^```$", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(
    r'\n\n(?:```text title="Output"\n.*?^```$|!\[Output\]\([^)\s]+\))', re.DOTALL | re.MULTILINE
)
#: The codes by which a terminal shows colours.
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PLOTLY = "application/vnd.plotly.v1+json"
CHROMIUM = "/usr/bin/chromium"
#: Of a picture, in pixels.
SIZE = {"width": 760, "height": 360}


def pages() -> list[Path]:
    """Return the pages of the tutorials, in the order of their names."""
    return sorted(page for page in FOLDER.glob("*.md") if page.name != "index.md")


def source_of(page: Path) -> str:
    """Return the text of a page without what its cells have shown."""
    return SHOWN.sub("", page.read_text())


def notebook_of(page: Path) -> NotebookNode:
    """Make the notebook of a page; its cells have not run."""
    import jupytext

    notebook = jupytext.reads(source_of(page), fmt="md")
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def executed(page: Path, folder: Path) -> NotebookNode:
    """Run the notebook of a page in a folder.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        A cell has raised.
    """
    from nbclient import NotebookClient

    notebook = notebook_of(page)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return notebook


def shown_by(cell: NotebookNode, picture: str) -> str:
    """Return what a page says that a cell has shown: a picture, or its text, or nothing."""
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            return f"\n\n![Output]({picture})"
        if output.get("name") == "stdout":
            texts.append(output.text)
        elif "text/plain" in data and "application/vnd.jupyter.widget-view+json" not in data:
            texts.append(data["text/plain"] + "\n")
    text = COLOUR.sub("", "".join(texts)).strip("\n")
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f'\n\n```text title="Output"\n{lines}\n```' if lines else ""


def page_of(notebook: NotebookNode, page: Path) -> str:
    """Return the text of a page with what the cells of its notebook have shown."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")

    def with_output(block: re.Match[str]) -> str:
        cell = next(cells)
        return block[0] + shown_by(cell, picture_of(page, cell))

    return CODE.sub(with_output, source_of(page))


def picture_of(page: Path, cell: NotebookNode) -> str:
    """Return the name of the file of a cell's picture."""
    return f"{page.stem}-{cell.execution_count}.png"


def draw(notebook: NotebookNode) -> None:
    """Put a picture beside each figure of Plotly that a cell has shown."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    figures = [output.data for output in outputs if PLOTLY in output.get("data", {})]
    if not figures:
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        view = browser.new_page(viewport=SIZE, device_scale_factor=1.5)  # type: ignore[arg-type]
        for data in figures:
            drawn = {name: data[PLOTLY][name] for name in ("data", "layout")}
            path = Path(folder) / "figure.html"
            figure = plotly().Figure(json.loads(json.dumps(drawn)))
            figure.update_layout(**SIZE).write_html(path, config={"displayModeBar": False})
            view.goto(path.as_uri())
            view.locator(".main-svg").first.wait_for()
            data["image/png"] = base64.b64encode(view.screenshot()).decode()
        browser.close()


def without_paths(notebook: NotebookNode, folder: Path) -> None:
    """Leave out of shown paths the folder in which cells ran, and the one where Python is."""
    ours = re.compile(f"(?:{re.escape(str(folder))}|{re.escape(sys.prefix)}/bin)/")
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = ours.sub("", output.text)
            for kind, shown in output.get("data", {}).items():
                if isinstance(shown, str) and kind.startswith("text/"):
                    output.data[kind] = ours.sub("", shown)


def write(page: Path) -> None:
    """Run a page's notebook; write the notebook, and the page with what it has shown."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(page, Path(folder))
    draw(notebook)
    without_paths(notebook, Path(folder))
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                picture = page.with_name(picture_of(page, cell))
                picture.write_bytes(base64.b64decode(output.data["image/png"]))
    nbformat.write(notebook, page.with_suffix(".ipynb"))
    page.write_text(page_of(notebook, page))


if __name__ == "__main__":
    for page in pages():
        if not sys.argv[1:] or page.stem in sys.argv[1:]:
            print(page.stem, flush=True)
            write(page)
