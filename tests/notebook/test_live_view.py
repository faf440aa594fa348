"""The live view in a real JupyterLab: it follows the search, and what is clicked happens, to that
trial alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dagsel
from tests.browser import chromium
from tests.notebook.lab import open_notebook, run_cell, served, write_notebook
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PARTS = """
import numpy as np
import optuna

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

def space(trial):
    return {"x": trial.suggest_float("x", 0.0, 1.0)}

data = ShardedDataset.write("data.zarr", {"x": np.arange(40)}, n_shards=2)
parts = optuna.create_study(direction="maximize"), SyntheticWorkload(seconds=0.05), data
flow = RandomSearch(max_epochs=2000, n_trials=4)
about = {"space": space, "metric": "value", "flow": flow, "run_dir": "run"}
"""
START = f"{PARTS}\nsearch = dagsel.start(*parts, **about)"
WAIT = "run = search.wait(); print(run.best_value)"
OPTIMIZE = f"{PARTS}\nrun = dagsel.optimize(*parts, **about); print(run.best_value)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def row(trial: int) -> str:
    return f".dagsel tr[data-trial='{trial}']"


def states(page: Page) -> dict[int, str]:
    """The state of each trial that the view shows."""
    read = (
        """rows => rows.map(row => [+row.dataset.trial, row.querySelector(".state").textContent])"""
    )
    return dict(page.eval_on_selector_all(".dagsel tr[data-trial]", read))  # rows move: all at once


def epochs(page: Page) -> int:
    tile = page.locator(".dagsel .tile", has=page.locator("h4", has_text="epochs"))
    return int(tile.locator(".big").inner_text().split()[0])


@contextmanager
def shown(browser: Browser, folder: Path, *cells: str) -> Iterator[Page]:
    """Run the first cell of a notebook until its search trains; the page may raise nothing."""
    write_notebook(folder / "live.ipynb", *cells)
    errors: list[str] = []
    with served(folder) as url:
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.on("pageerror", lambda error: errors.append(str(error)))
        open_notebook(page, url.format("live.ipynb"))
        run_cell(page, 0)
        page.wait_for_selector(f"{row(3)} .state.training", timeout=60_000)
        yield page
    assert errors == []


def finish(page: Page) -> None:
    """End the search by a click, and see what stays of the view, and what the cell prints."""
    page.click(".dagsel .top button.danger")
    page.click(".dagsel form button[type=submit]")
    page.wait_for_selector(".jp-RenderedHTML table", timeout=30_000)
    assert "best value 0.9" in page.locator(".jp-RenderedHTML").first.inner_text()
    page.wait_for_selector(".jp-RenderedText:has-text('0.9')", timeout=30_000)


def test_the_view_follows_and_clicks_are_commands(browser: Browser, tmp_path: Path) -> None:
    with shown(browser, tmp_path, START, WAIT) as page:
        page.wait_for_selector(f"{row(0)} button[aria-label='stop trial 0']", timeout=20_000)
        before = epochs(page)
        wait_until(lambda: epochs(page) > before, "the view shows more epochs", timeout_s=20.0)
        assert set(states(page).values()) == {"training"}

        page.click("button[aria-label='stop trial 1']")
        page.wait_for_selector(f"{row(1)}.over", timeout=20_000)
        others = {trial: state for trial, state in states(page).items() if trial != 1}
        assert others == dict.fromkeys((0, 2, 3), "training")
        assert page.locator(f"{row(1)} button:visible").count() == 0

        page.click("button[aria-label='pause trial 2']")
        page.wait_for_selector(f"{row(2)} .state.paused", timeout=20_000)
        page.click("button[aria-label='resume trial 2']")
        page.wait_for_selector(f"{row(2)} .state.training", timeout=20_000)

        page.click("button[aria-label='clone trial 3']")
        page.fill(".dagsel form input[name=x]", "1.5")
        page.click(".dagsel form button[type=submit]")
        page.wait_for_selector(".dagsel .said.bad", timeout=20_000)
        assert "x" in page.locator(".dagsel .said").inner_text()
        page.fill(".dagsel form input[name=x]", "0.25")
        page.click(".dagsel form button[type=submit]")
        page.wait_for_selector(row(4), timeout=20_000)
        assert page.locator(".dagsel .said").inner_text() == "trial 4 is a copy of trial 3"

        run_cell(page, 1)  # commands are heard while a cell waits
        finish(page)
    record = dagsel.load(tmp_path / "run").record
    assert record.finished
    reasons = {number: trial.reason for number, trial in record.trials.items()}
    assert [n for n, reason in reasons.items() if reason == "stopped by the user"] == [1]
    assert record.trials[4].params == {"x": 0.25}
    assert [*record.added.values()] == [4]


def test_buttons_work_while_a_cell_waits_in_optimize(browser: Browser, tmp_path: Path) -> None:
    with shown(browser, tmp_path, OPTIMIZE) as page:
        page.click("button[aria-label='stop trial 1']", timeout=20_000)
        page.wait_for_selector(f"{row(1)}.over", timeout=20_000)
        wait_until(lambda: epochs(page) > 20, "a value is above 0.9", timeout_s=60.0)
        finish(page)
    assert dagsel.load(tmp_path / "run").record.trials[1].reason == "stopped by the user"
