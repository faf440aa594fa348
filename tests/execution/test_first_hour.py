"""A deadline and a budget are named and nothing else: in a script, a pipe and a notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import slowness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# On a machine that does nothing else; all of these times are as much longer as it is slower.
DEADLINE_S, BUDGET_S, TIMEOUT_S = 40.0, 30.0, 100.0
#: So much of both has what shows no more than that a search works there as well.
SHARE = 0.5
#: The prompt is back so soon after the deadline, on a local cluster: the page of SEER.
RETURN_S = 5.0
#: How long the release of a worker may take, for each of them.
RELEASE_S = 5.0

TASK = """\
import json, time
import dagsel, optuna, torch
from dagsel import optimize  # its import is no part of the search
from dagsel.flows import SEER, Lookahead
from sklearn.datasets import make_classification

def space(trial):
    return {"lr": trial.suggest_float("lr", 1e-4, 0.1, log=True)}

x, y = make_classification(20_000, 16, n_informative=8, n_classes=4, class_sep=2.0, random_state=0)
workload = dagsel.TorchWorkload(
    model=lambda config: torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)),
    loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.Adam, batch_size=64,
    metrics=["accuracy"])
"""
SEARCH = """\
study, began = optuna.create_study(direction="maximize"), time.monotonic()
run = optimize(study, workload, (x.astype("float32"), y), space=space, metric="accuracy",
               flow={flow}(deadline="{deadline} s", budget="{budget} worker-seconds"))
told = {{"wall_s": time.monotonic() - began, "value": run.best_value, "bill": run.worker_seconds,
        "workers": max(moment.n_workers for moment in run.record.course),
        "classes": run.best_model()(torch.zeros(1, 16)).shape[1]}}
print("told", json.dumps(told))
"""


@pytest.fixture
def slow() -> float:
    return slowness()


def search(slow: float, share: float = 1.0, flow: str = "SEER") -> str:
    limits = {"deadline": DEADLINE_S * share * slow, "budget": BUDGET_S * share * slow}
    return SEARCH.format(flow=flow, **limits)


def check(printed: str, slow: float, share: float = 1.0) -> None:
    (line,) = (line for line in printed.splitlines() if line.startswith("told "))
    told: dict[str, Any] = json.loads(line.removeprefix("told "))
    # Better than chance, 0.25; how much depends on what else runs here.
    assert 0.3 < told["value"] <= 1.0
    assert told["classes"] == 4
    assert told["wall_s"] < (DEADLINE_S * share + RETURN_S) * slow
    assert told["bill"] < (BUDGET_S * share + RELEASE_S * told["workers"]) * slow


def run(folder: Path, slow: float, *command: str, program: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        input=program,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * slow,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " · the search has ended: " in done.stderr
    return done.stdout


@pytest.mark.parametrize("flow", ["SEER", "Lookahead"])
def test_a_script_names_both_and_nothing_else(tmp_path: Path, slow: float, flow: str) -> None:
    body = "".join(f"    {line}\n" for line in search(slow, flow=flow).splitlines())
    (tmp_path / "search.py").write_text(f'{TASK}\nif __name__ == "__main__":\n{body}')
    check(run(tmp_path, slow, "search.py"), slow)


def test_a_program_that_is_piped_in_names_both_and_nothing_else(
    tmp_path: Path, slow: float
) -> None:
    check(run(tmp_path, slow, "-", program=TASK + search(slow, SHARE)), slow, SHARE)


def test_a_notebook_names_both_and_nothing_else(tmp_path: Path, slow: float) -> None:
    pytest.importorskip("ipykernel", reason="needs ipykernel and nbclient")
    nbclient = pytest.importorskip("nbclient", reason="needs ipykernel and nbclient")
    import nbformat

    sources = (TASK, search(slow, SHARE), "run.plan")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in sources])
    place = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(book, timeout=int(TIMEOUT_S * slow), resources=place).execute()
    outputs = [output for cell in book.cells for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    check(printed, slow, SHARE)
    assert "<svg" in outputs[-1].data["text/html"]
    views = [output.data["text/html"] for output in outputs if output.output_type == "display_data"]
    assert any("best accuracy" in view and "<td>complete</td>" in view for view in views)
    assert 'install "ipywidgets"' not in str(book), "what is shown needs no widgets"
