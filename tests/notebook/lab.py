"""A real JupyterLab, as a browser shows it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

_READY = re.compile(r"(http://127\.0\.0\.1:\d+)/lab\?token=(\w+)")


def write_notebook(path: Path, *cells: str) -> None:
    """Write a notebook with some cells of code."""
    body: dict[str, Any] = {
        "cells": [
            {
                "cell_type": "code",
                "execution_count": None,
                "id": f"cell-{at}",
                "metadata": {},
                "outputs": [],
                "source": source.strip().splitlines(keepends=True),
            }
            for at, source in enumerate(cells)
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(body))


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder by JupyterLab; yield where a notebook there is, with ``{}`` for its name."""
    home = folder / "jupyter"  # nothing of whoever runs this counts
    home.mkdir()
    own = {
        f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")
    }
    here = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--port=0"]
    command += ["--ip=127.0.0.1", f"--ServerApp.root_dir={folder}", "--expose-app-in-browser"]
    log = home / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **own, "PYTHONPATH": here},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_until(lambda: _READY.search(log.read_text()), log.read_text)
        place, token = _READY.findall(log.read_text())[0]
        yield f"{place}/lab/tree/{{}}?token={token}&reset"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def open_notebook(page: Page, url: str) -> None:
    """Open a notebook, and wait until its kernel is there."""
    page.goto(url)
    page.wait_for_function(
        """() => {
            const kernel = window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel;
            return kernel?.connectionStatus === "connected" && kernel.status === "idle";
        }""",
        timeout=60_000,
    )


def run_cell(page: Page, at: int) -> None:
    """Run a cell, and do not wait for its end."""
    page.locator(".jp-Notebook .jp-CodeCell .cm-content").nth(at).click()
    page.evaluate("void jupyterapp.commands.execute('notebook:run-cell')")
