"""The page of file formats names each file that a write and a search leave, and its fields.

A data set is written, a search runs on it with observers, and its models, its report and a profile
are written; then each file that is there has its path on the page, and each JSON file its fields.
"""

from __future__ import annotations

import csv
import json
import re
import struct
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from distributed import Client, LocalCluster

import dagsel
from dagsel import messages
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "file-formats.md"
#: What is said below each heading.
SECTIONS = {
    found[1].replace("`", ""): found[2]
    for found in re.finditer(
        r"^##+ (.*?)\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
}
#: What a word in capital letters stands for.
VARIABLE = {
    "CHECKSUM": r"[0-9a-f]{8}", "ID": r"[0-9a-f]+", "SPLIT": "(?:train|validation)",
    "ARRAY": r"[\w.-]+", "NAME": r"[\w.-]+", "ZEROS": "0(?:/0)*", "RUN": r"\w+", "SESSION": ".+",
}  # fmt: skip
#: Files of moments that the search of these tests does not have.
NOT_NOW = (
    "dagsel.unfinished.json", "journal/", ".partial.json", "check-", "scores-", "refit/",
    "lock.json", "control.json", "commands/", "classes.json", "columns.json",
)  # fmt: skip


def column(heading: str, *, of: str = "field") -> set[str]:
    """Return what stands in the first column of a table of a section, if it is headed so."""
    table = re.search(
        rf"^\| `?{of}`? \|.*?(?=\n\n|\Z)", SECTIONS[heading], re.DOTALL | re.MULTILINE
    )
    assert table is not None, heading
    cells = [line.split(" | ")[0] for line in table[0].splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`(.+?)`", cell)}


def pattern(path: str) -> str:
    parts = re.split(r"([A-Z]{2,})", path)
    text = "".join(VARIABLE.get(p, r"\d+") if p.isupper() else re.escape(p) for p in parts)
    return text + ".+" if path.endswith("/") else text


def check_paths(folder: Path, heading: str) -> None:
    """Check that each file has a path on the page, and each path a file, but for rare ones."""
    paths = column(heading, of="path")
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    for file in files:
        assert any(re.fullmatch(pattern(path), file) for path in paths), file
    for path in paths:
        if not any(rare in path for rare in NOT_NOW):
            assert any(re.fullmatch(pattern(path), file) for file in files), path


def check_fields(body: dict[str, Any], heading: str, optional: Set[str] = frozenset()) -> None:
    told = column(heading)
    assert body.keys() <= told
    assert told - body.keys() <= optional


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-3, 0.1, log=True)}


def workload() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        model=lambda config: torch.nn.Linear(4, 3),
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.Adam,
        batch_size=32,
        metrics=["accuracy"],
    )


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    x = np.random.default_rng(0).normal(size=(120, 4)).astype("float32")
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        run = dagsel.optimize(
            optuna.create_study(direction="maximize"),
            workload(),
            (x, np.arange(120) % 3),
            space=space,
            metric="accuracy",
            flow=RandomSearch(max_epochs=1, n_trials=2),
            run_dir="run",
            client=client,
            observers=[dagsel.observers.CSV("epochs.csv"), dagsel.observers.TensorBoard("board")],
            progress=False,
        )
        run.export("models")
        run.report("report.html")
    return folder


@pytest.fixture(scope="module")
def data(here: Path) -> Path:
    """A data set with classes, one with columns, one of samples of unequal length, a profile."""
    table = pd.DataFrame({"a": np.arange(60.0), "kind": ["x", "y"] * 30})
    ShardedDataset.write(str(here / "classes"), table, n_shards=2)
    table = pd.DataFrame({"a": np.arange(60.0), "b": np.arange(60.0)})
    ShardedDataset.write(str(here / "columns"), table, columns={"x": ["a", "b"]}, n_shards=2)
    tokens = [np.arange(k % 5 + 1) for k in range(60)]
    arrays = {"x": np.zeros((60, 2)), "tokens": tokens}
    written = ShardedDataset.write(str(here / "data"), arrays, n_shards=2, ragged=["tokens"])
    dagsel.Profile.given({1: 1, 2: 1.8}).save(written)
    return here / "data"


def test_a_data_set(here: Path, data: Path) -> None:
    check_paths(data, "A data set")
    manifest = json.loads((data / "dagsel.json").read_text())
    assert manifest["version"] == 3
    check_fields(manifest, "dagsel.json", {"classes", "columns"})
    classes = json.loads((here / "classes/dagsel.json").read_text())
    assert classes["version"] == 2
    check_fields(classes, "dagsel.json", {"columns", "n_values"})
    columns = json.loads((here / "columns/dagsel.json").read_text())
    assert columns["version"] == 4
    check_fields(columns, "dagsel.json", {"classes", "n_values"})
    said = re.findall(r"`(\w+)`", SECTIONS["dagsel.json"])
    assert {name for array in manifest["arrays"] for name in array} <= {*said}


def test_a_profile(data: Path) -> None:
    (path,) = data.rglob("profiles/*.json")
    body = json.loads(path.read_text())
    check_fields(body, "A scaling profile")
    assert body["profile"].keys() <= set(re.findall(r"`(\w+)`", SECTIONS["A scaling profile"]))


def test_a_run(here: Path) -> None:
    check_paths(here / "run", "A run's folder")
    optional = {"top_k", "goals", "n_before", "threads", "trains_all", "currency", "pools"}
    settings = json.loads((here / "run/run.json").read_text())
    check_fields(settings, "run.json", optional | {"budget_money", "asked"})
    check_fields(json.loads((here / "run/best.json").read_text()), "best.json")


def test_a_journal(here: Path) -> None:
    for line in (here / "run/journal.jsonl").read_text().splitlines():
        check_fields(json.loads(line), "The journal")
    assert column("The journal", of="is") == set(messages.ENTRIES.names)


def test_a_state_and_its_record(here: Path) -> None:
    (path,) = here.glob("run/states/trial-*/*.json")
    record = json.loads(path.read_text())
    check_fields(record, "The record of a state")
    assert record["meta"].keys() <= set(re.findall(r"`(\w+)`", SECTIONS["The record of a state"]))
    state = path.with_name(record["blob"]).read_bytes()
    (n_header,) = struct.unpack("<Q", state[:8])
    header = json.loads(state[8 : 8 + n_header])
    assert header.pop("__metadata__").keys() == {"dagsel"}
    assert {"optimizer.state.0.exp_avg", "random.torch"} <= header.keys()


def test_models_tables_and_the_report(here: Path) -> None:
    check_paths(here / "models", "Exported models")
    (path,) = here.glob("models/*/metrics.json")
    said = re.findall(r"`(\w+)`", SECTIONS["Exported models"])
    assert json.loads(path.read_text()).keys() <= {*said}
    with (here / "epochs.csv").open() as file:
        columns = next(csv.reader(file))
    fixed = {name for name in column("CSV and TensorBoard", of="column") if name.islower()}
    assert {*columns} == fixed | {"loss", "accuracy", "param_lr"}
    events = [path.relative_to(here / "board").as_posix() for path in here.glob("board/*/*/*")]
    assert events
    for event in events:
        assert re.fullmatch(pattern("RUN/trial-NUMBER/events.out.tfevents.SESSION"), event)
    assert (here / "report.html").read_text().startswith("<!")
