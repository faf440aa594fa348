"""A real Optuna Dashboard shows the study of a search as it goes, then the best model's files."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from distributed import Client
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from tests.waiting import wait_until

from .helpers import BY_NIGHT


@contextmanager
def dashboard(storage: str, artifacts: Path) -> Iterator[str]:
    """Serve a storage; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("optuna-dashboard")), storage, "--quiet"]
    command += ["--artifact-dir", str(artifacts), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as page:
        return bytes(page.read())


def shown(address: str, study: int) -> dict[str, Any]:
    """What it shows of a study; empty while it starts."""
    try:
        found: dict[str, Any] = json.loads(read(f"{address}/api/studies/{study}"))
    except OSError:
        return {}
    return found


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}


def make_workload() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        model=lambda config: torch.nn.Linear(64, 10),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters, config: torch.optim.SGD(parameters, lr=config["lr"]),
        batch_size=32,
    )


def live(address: str, study: int) -> list[dict[str, Any]]:
    """The trials that train, and have values on the way."""
    trials = shown(address, study).get("trials", [])
    return [t for t in trials if t["state"] == "Running" and t["intermediate_values"]]


def n_values(trial: dict[str, Any]) -> int:
    return len(trial["intermediate_values"])


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("journal", marks=BY_NIGHT)])
def test_a_dashboard_shows_the_live_study_and_the_files_of_the_best_model(
    kind: str, client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    if kind == "sqlite":
        place = f"sqlite:///{tmp_path}/study.db"
        study = optuna.create_study(storage=place, direction="minimize")
    else:
        place = str(tmp_path / "study.log")
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(place)), direction="minimize"
        )
    artifacts = tmp_path / "artifacts"
    artifacts.mkdir()
    number = study._study_id
    with dashboard(place, artifacts) as address:
        search = dagsel.start(
            study, make_workload(), digits, space=space, metric="loss", client=client,
            flow=RandomSearch(max_epochs=2000, n_trials=2), run_dir=tmp_path / "run",
        )  # fmt: skip
        wait_until(lambda: len(live(address, number)) == 2, "both trials have intermediate values")
        steps = [n_values(trial) for trial in live(address, number)]
        wait_until(  # one for each worker: neither waits for the other
            lambda: max(steps) < min(map(n_values, live(address, number)), default=0),
            "there are more of them",
        )
        search.finish()
        run = search.wait()
        store = FileSystemArtifactStore(artifacts)
        for folder in run.export(tmp_path / "best"):
            for file in sorted(Path(folder).iterdir()):
                upload_artifact(artifact_store=store, file_path=str(file), study_or_trial=run.study)
        pages = list[dict[str, Any]]()

        def is_new() -> bool:
            pages.append(shown(address, number))
            ends = [trial["state"] != "Running" for trial in pages[-1].get("trials", ())]
            return all(ends) and len(ends) == 2

        wait_until(is_new, "it looks at the storage again")
        page = pages[-1]
        files = {told["filename"]: told["artifact_id"] for told in page["artifacts"]}
        weights = read(f"{address}/artifacts/{number}/{files['weights.safetensors']}")
    assert {trial["state"] for trial in page["trials"]} <= {"Complete", "Pruned"}
    (there,) = (tmp_path / "best").glob("*/weights.safetensors")
    assert weights == there.read_bytes()
    assert {"load.py", "metrics.json"} <= files.keys()
