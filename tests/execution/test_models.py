"""The models that a search keeps: several, as one, and as files that need no dagsel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from distributed import Client

import dagsel
from dagsel.errors import DatasetError, SearchError, WorkloadError
from dagsel.flows import ASHA, RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.torch.models import Ensemble
from tests.conftest import Optimize

from .helpers import validation_of

FLOW = ASHA(max_epochs=4, n_trials=6, reduction_factor=2)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.001, 0.3, log=True)}


def workload() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        model=lambda config: torch.nn.Sequential(
            torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 10)
        ),
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.SGD,
        batch_size=32,
        metrics=["accuracy"],
    )


@pytest.fixture
def search(
    optimize: Optimize, client: Client, digits: ShardedDataset, study: optuna.Study
) -> Optimize:
    def call(flow: Any = FLOW, **given: Any) -> Any:
        default = {"study": study, "data": digits, "space": space, "workload": workload()}
        return optimize(flow, **{**default, "metric": "accuracy", "client": client, **given})

    return call


def accuracy(model: Any, data: ShardedDataset) -> float:
    inputs, targets = validation_of(data)
    with torch.inference_mode():
        return float((model(inputs).argmax(1) == targets).double().mean())


LOADS = """
import sys
sys.path.insert(0, sys.argv[1])
import load, torch
model = torch.nn.Sequential(
    torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 10))
print(load.CONFIG["lr"], load.load(model)(torch.ones(1, 64)).tolist()[0])
assert "dagsel" not in sys.modules
"""


def test_the_best_models_stay_and_are_what_they_were_scored_as(
    search: Optimize, digits: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    run = search(top_k=3)
    ranked = list(run.leaderboard()["trial"])[:3]
    assert [best.trial for best in run.record.top] == ranked
    assert sorted(run.run_dir.states.trials()) == sorted(ranked)
    assert [len(run.run_dir.states.list(trial)) for trial in ranked] == [1, 1, 1]
    values = [accuracy(model, digits) for model in run.models()]
    assert values == pytest.approx(list(run.leaderboard()["accuracy"])[:3], abs=1e-12)
    inputs, _ = validation_of(digits)
    together = run.ensemble(2)
    with torch.inference_mode():
        mean = torch.stack([model(inputs) for model in run.models(2)]).mean(0)
        assert torch.equal(together(inputs), mean)
    with pytest.raises(SearchError, match="keeps 3 models, not 4; search with top_k=4"):
        run.models(4)
    again = dagsel.resume(run.run_dir.url, client, workload=workload(), space=space)
    assert [best.trial for best in again.record.top] == ranked
    assert accuracy(again.models(3)[2], digits) == values[2]
    told = json.loads((Path(run.run_dir.url) / "best.json").read_text())
    assert [told["trial"], *(other["trial"] for other in told["others"])] == ranked


def test_exported_models_need_torch_and_safetensors_alone(search: Optimize, tmp_path: Path) -> None:
    run = search(RandomSearch(max_epochs=2, n_trials=3), top_k=2)
    urls = run.export(tmp_path / "models", n=2)
    assert [Path(url).name for url in urls] == [
        f"{rank}-trial-{best.trial}" for rank, best in enumerate(run.record.top, 1)
    ]
    for url, model, best in zip(urls, run.models(), run.record.top, strict=True):
        told = json.loads((Path(url) / "metrics.json").read_text())
        assert (told["value"], told["epoch"]) == (best.value, best.epoch)
        assert told["metrics"]["accuracy"] == best.value
        if best is not run.best:
            continue
        output = subprocess.run(
            [sys.executable, "-c", LOADS, url],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        with torch.inference_mode():
            wanted = model(torch.ones(1, 64)).tolist()[0]
        lr = run.record.trials[best.trial].config["lr"]
        assert output.strip() == f"{lr} {wanted}"
    with pytest.raises(SearchError, match="models is not empty; give another folder"):
        run.export(tmp_path / "models")
    with pytest.raises(SearchError, match="n must be a whole number of 1 or more, got 0"):
        run.export(tmp_path / "other", n=0)
    assert not (tmp_path / "other").exists()


def test_an_exported_model_says_what_its_classes_and_columns_are(
    search: Optimize, tmp_path: Path
) -> None:
    """As long as the data set is there."""
    y, columns = ["even", "odd"], [f"c{number}" for number in range(64)]
    x = pd.DataFrame(np.random.default_rng(0).normal(size=(64, 64)), columns=columns)
    labels = np.array(y)[np.arange(64) % 2]
    run = search(RandomSearch(max_epochs=1, n_trials=1), data=(x, labels))
    (url,) = run.export(tmp_path / "models")
    assert json.loads((Path(url) / "classes.json").read_text()) == {"y": y}
    assert json.loads((Path(url) / "columns.json").read_text()) == {"x": columns}
    shutil.rmtree(run.data.url)
    (url,) = run.export(tmp_path / "others")
    assert not {"classes.json", "columns.json"} & {path.name for path in Path(url).iterdir()}


def test_a_run_that_is_moved_has_its_own_data_still(search: Optimize, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    labels = np.array(["even", "odd"])[np.arange(64) % 2]
    begun = tmp_path / "begun"
    run = search(RandomSearch(max_epochs=1, n_trials=1), data=(x, labels), run_dir=begun)
    digest = run.data.digest
    begun.rename(tmp_path / "moved")
    moved = dagsel.load(tmp_path / "moved", workload=workload())
    assert (moved.data.digest, moved.data.url) == (digest, str(tmp_path / "moved" / "data"))
    (url,) = moved.export(tmp_path / "models")
    assert json.loads((Path(url) / "classes.json").read_text()) == {"y": ["even", "odd"]}
    # Another data set in its place is not taken for it.
    shutil.rmtree(moved.data.url)
    ShardedDataset.write(tmp_path / "moved" / "data", {"x": x[:8]}, n_shards=1)
    with pytest.raises(DatasetError, match="begun/data"):
        assert moved.data


def test_an_exported_configuration_is_what_the_model_was_made_of(
    search: Optimize, tmp_path: Path
) -> None:
    activations = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}

    def space(trial: optuna.Trial) -> dict[str, Any]:
        width = trial.suggest_int("log2_width", 3, 5)
        activation = trial.suggest_categorical("activation", [*activations])
        of_optimizer = {"lr": trial.suggest_float("lr", 0.01, 0.1)}
        return {
            "sizes": [64, 2**width, 10], "optimizer": of_optimizer, "lr": of_optimizer["lr"],
            "activation": activations[activation],
        }  # fmt: skip

    run = search(RandomSearch(max_epochs=1, n_trials=1), space=space)
    (url,) = run.export(tmp_path / "models")
    config = dict(run.record.trials[0].config)
    config["activation"] = run.best_params["activation"]
    assert json.loads((Path(url) / "config.json").read_text()) == config


def test_an_export_replaces_what_an_export_has_written_and_nothing_else(
    search: Optimize, tmp_path: Path
) -> None:
    run = search(RandomSearch(max_epochs=1, n_trials=3), top_k=2)
    place = tmp_path / "models"
    first, second = map(Path, run.export(place, n=2, overwrite=True))
    (first / "load.py").write_text("another one's")
    for kept in (place / "notes.txt", second / "mine.txt"):
        kept.write_text("mine")
        before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
        with pytest.raises(SearchError, match=f"models has '{kept.name}' in it, which no export"):
            run.export(place, overwrite=True)
        assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
        kept.unlink()
    assert run.export(place, overwrite=True) == [str(first)]
    assert list(place.iterdir()) == [first], "the second model was not asked for"
    assert "another one's" not in (first / "load.py").read_text()
    for damaged in ("{", "[]", '{"files": 3}'):
        (first / "metrics.json").write_text(damaged)
        with pytest.raises(SearchError, match="which no export has written"):
            run.export(place, overwrite=True)


def test_one_model_stays_where_no_more_are_asked_for(search: Optimize) -> None:
    run = search(RandomSearch(max_epochs=1, n_trials=3))
    assert len(run.models()) == 1
    with pytest.raises(SearchError, match="keeps 1 model, not 2; search with top_k=2"):
        run.ensemble(2)


def test_a_workload_that_cannot_join_models_says_so(
    optimize: Optimize, client: Client, tmp_path: Path
) -> None:
    run = optimize(RandomSearch(max_epochs=1, n_trials=2), client=client)
    assert isinstance(run.workload, SyntheticWorkload)
    with pytest.raises(WorkloadError, match="a SyntheticWorkload joins no models; take run.models"):
        run.ensemble()
    with pytest.raises(WorkloadError, match="a SyntheticWorkload writes no models"):
        run.export(tmp_path / "models")


class Keeps(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return {"n": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_what_is_no_tensor_is_not_exported() -> None:
    with pytest.raises(WorkloadError, match="'_extra_state' of the model is dict, which the safet"):
        workload().export(Keeps(), {}, "a model")


def test_an_ensemble_averages_tuples_and_mappings() -> None:
    class Both(torch.nn.Module):
        def __init__(self, n: float) -> None:
            super().__init__()
            self.n = n

        def forward(self, x: torch.Tensor) -> Any:
            return {"a": (x * self.n, x)}

    found = Ensemble([Both(1.0), Both(3.0)])(torch.ones(2))
    assert found["a"][0].tolist() == [2.0, 2.0]

    class Normal(NamedTuple):
        mean: torch.Tensor

    class Named(Both):
        def forward(self, x: torch.Tensor) -> Normal:
            return Normal(x * self.n)

    assert Ensemble([Named(1.0), Named(3.0)])(torch.ones(2)).mean.tolist() == [2.0, 2.0]
    with pytest.raises(WorkloadError, match="averages tensors, and the models return str"):
        Ensemble([torch.nn.Identity()] * 2)("text")
