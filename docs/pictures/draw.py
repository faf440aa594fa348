"""Draw the pictures of docs/how-to/plots.md and watching.md from searches that it runs.

PYTHONPATH=. python docs/pictures/draw.py  # needs Chromium and the dev extra; takes a minute
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

import optuna
import torch
from playwright.sync_api import Browser, Page, sync_playwright
from sklearn.datasets import load_digits

import dagsel
from dagsel.flows import ASHA
from dagsel.storage import ShardedDataset
from tests.notebook.lab import open_notebook, run_cell, served, write_notebook

HERE = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def model(config: Any) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, config["width"]), torch.nn.ReLU(), torch.nn.Linear(config["width"], 10)
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    return {"lr": lr, "width": trial.suggest_int("width", 16, 256, log=True)}


def search(folder: str) -> dagsel.Run:
    """Search for a small network on scikit-learn's digits, ten times over to take a while."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").repeat(10, axis=0)
    data = ShardedDataset.write(f"{folder}/digits.zarr", {"x": x, "y": y.repeat(10)}, n_shards=4)
    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters, config: torch.optim.SGD(parameters, lr=config["lr"]),
        batch_size=32,
        metrics={"accuracy": dagsel.metrics.accuracy},
    )
    study = optuna.create_study(study_name="digits", direction="maximize")
    return dagsel.optimize(
        study, workload, data, space=space, metric="accuracy", replicas=1,
        flow=ASHA(max_epochs=9, n_trials=12), run_dir=f"{folder}/run",
    )  # fmt: skip


def shoot(page: Page, url: str, name: str, height: int) -> None:
    """Write what a page shows as a picture."""
    page.set_viewport_size({"width": 1000, "height": height})
    page.goto(url)
    page.wait_for_timeout(800)
    page.screenshot(path=HERE / f"{name}.png")


LIVE = """
import sys; sys.path.insert(0, HERE)
from draw import begun

search = begun()
"""


def begun() -> dagsel.Search:
    """Begin a search in the folder of a notebook."""
    x, y = load_digits(return_X_y=True)
    data = ShardedDataset.write(
        "digits.zarr", {"x": (x / 16).astype("float32"), "y": y}, n_shards=4
    )
    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters, config: torch.optim.SGD(parameters, lr=config["lr"]),
        batch_size=1,
        metrics={"accuracy": dagsel.metrics.accuracy},
    )
    return dagsel.start(
        optuna.create_study(direction="maximize"), workload, data, space=space, metric="accuracy",
        flow=ASHA(max_epochs=81, n_trials=24), deadline="5 min", price_per_worker_hour="2.50 USD",
    )  # fmt: skip


def shoot_live(browser: Browser, folder: Path) -> None:
    """Write what JupyterLab shows of a search that trains, with the form of a clone open."""
    write_notebook(folder / "live.ipynb", LIVE.replace("HERE", repr(str(HERE))))
    with served(folder) as url:
        page = browser.new_page(viewport={"width": 1280, "height": 1400}, device_scale_factor=1.5)
        open_notebook(page, url.format("live.ipynb"))
        run_cell(page, 0)
        page.locator(".dagsel .state.training").first.wait_for(timeout=60_000)
        page.wait_for_timeout(10_000)
        page.locator("button:has-text('clone'):enabled:visible").first.click()
        for scheme in SCHEMES:
            theme = f"JupyterLab {scheme.title()}"
            page.evaluate(
                f"jupyterapp.commands.execute('apputils:change-theme', {{theme: '{theme}'}})"
            )
            page.wait_for_timeout(2000)
            page.locator(".dagsel").screenshot(path=HERE / f"live-{scheme}.png")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        run = search(folder)
        run.report(f"{folder}/report.html")
        for scheme in SCHEMES:
            for name, height in (("timeline", 290), ("curves", 450), ("workers", 420)):
                figure = getattr(run.plot, name)()
                if scheme == "dark":
                    figure.update_layout(template="plotly_dark")
                figure.write_html(f"{folder}/{name}.html")
                view = browser.new_page(viewport={"width": 1000, "height": height})
                view.goto(f"file://{folder}/{name}.html")
                view.locator(".main-svg").first.screenshot(path=HERE / f"{name}-{scheme}.png")
            page = browser.new_page(color_scheme=scheme)
            shoot(page, f"file://{folder}/report.html", f"report-{scheme}", 1100)
        (Path(folder) / "live").mkdir()
        shoot_live(browser, Path(folder) / "live")
        browser.close()


if __name__ == "__main__":
    main()
