"""Draws the pictures of docs/afterwards.md from a search that it runs.

python docs/pictures/draw.py  # needs Chromium and the dev extra; takes a minute
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import optuna
import torch
from playwright.sync_api import Page, sync_playwright
from sklearn.datasets import load_digits

import dagsel
from dagsel.flows import ASHA
from dagsel.storage import ShardedDataset

HERE = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"


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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = search(folder)
        for name in ("timeline", "curves", "workers"):
            getattr(run.plot, name)().write_html(f"{folder}/{name}.html")
        run.report(f"{folder}/report.html")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for name, height in (("timeline", 290), ("curves", 450), ("workers", 420)):
                shoot(browser.new_page(), f"file://{folder}/{name}.html", name, height)
            for scheme in ("light", "dark"):
                page = browser.new_page(color_scheme=scheme)  # type: ignore[arg-type]
                shoot(page, f"file://{folder}/report.html", f"report-{scheme}", 1100)
            browser.close()


if __name__ == "__main__":
    main()
