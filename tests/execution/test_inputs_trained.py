"""Each kind of input is written, read back and trained in a search on two workers."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from distributed import Client
from PIL import Image

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import Batches, ImageFolder, ShardedDataset

N = 400
KINDS = ["ant", "bee", "cat"]
NAMES = [f"f{k}" for k in range(12)]


def frame() -> pd.DataFrame:
    """Whole numbers, and a word that says which third of a row has the largest sum."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 16, (N, 12))
    best = x.reshape(N, 3, 4).sum(axis=2).argmax(axis=1)
    return pd.DataFrame(x, columns=NAMES).assign(kind=np.array(KINDS)[best])


def samples() -> Iterator[Any]:
    table = frame()
    for x, kind in zip(table[NAMES].to_numpy(np.float32), table["kind"], strict=True):
        yield torch.from_numpy(x.copy()), kind


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.all = list(samples())

    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> Any:
        return self.all[at]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return samples()


def of_parquet(folder: Path) -> Any:
    frame().to_parquet(folder / "t.parquet", row_group_size=50)
    return folder / "t.parquet"


def of_hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = [{"x": x.tolist(), "kind": kind} for x, kind in samples()]
    return datasets.Dataset.from_list(rows)


def of_tar(folder: Path) -> Any:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for at, (x, kind) in enumerate(samples()):
            array = io.BytesIO()
            np.save(array, x.numpy())
            parts = {"npy": array.getvalue(), "json": json.dumps({"kind": kind}).encode()}
            for extension, data in parts.items():
                member = tarfile.TarInfo(f"{at:04}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder / "a.tar"


def of_images(folder: Path) -> Any:
    for at, (x, kind) in enumerate(samples()):
        (folder / kind).mkdir(exist_ok=True)
        pixels = (x.numpy().reshape(3, 4) * 15).astype(np.uint8)
        Image.fromarray(pixels).save(folder / kind / f"{at}.png")
    return ImageFolder(folder, mode="L")


def of_batches(folder: Path) -> Any:
    table = frame()
    return Batches(
        {"x": rows[NAMES].to_numpy(np.float32), "y": rows["kind"].to_numpy(object)}
        for rows in (table.iloc[at : at + 33] for at in range(0, N, 33))
    )


TABLE: dict[str, Any] = {"columns": {"x": NAMES, "y": "kind"}}
INPUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "pandas": (lambda p: frame(), TABLE),
    "polars": (lambda p: pytest.importorskip("polars").from_pandas(frame()), TABLE),
    "arrow": (lambda p: pytest.importorskip("pyarrow").Table.from_pandas(frame()), TABLE),
    "parquet": (of_parquet, TABLE),
    "samples": (lambda p: Samples(), {"stratify": "y"}),
    "processes": (lambda p: Samples(), {"workers": 2}),
    "stream": (lambda p: Stream(), {"stratify": "y"}),
    "generator": (lambda p: samples(), {}),
    "batches": (of_batches, {"groups": np.arange(N) // 7}),
    "hugging face": (of_hugging_face, {"columns": {"x": "x", "y": "kind"}}),
    "hugging face stream": (
        lambda p: of_hugging_face(p).to_iterable_dataset(), {"columns": {"x": "x", "y": "kind"}}),
    "tar": (of_tar, {"columns": {"x": "npy", "y": "json.kind"}, "stratify": "y"}),
    "images": (of_images, {"stratify": "y"}),
}  # fmt: skip


def model(config: Any) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(12, config["width"]), torch.nn.ReLU(), torch.nn.Linear(config["width"], 3)
    )


def input_fn(batch: Any, config: Any) -> Any:
    x = batch["x"].flatten(1).float()
    return (x / 15 if x.max() > 15 else x), batch["y"]


def search(data: Any, client: Client, folder: Path, **options: Any) -> dagsel.Run:
    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.Adam,
        batch_size=16,
        metrics=["accuracy"],
        **options,
    )
    return dagsel.optimize(
        optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0)),
        workload, data, metric="accuracy",
        space=lambda trial: {"lr": 0.01, "width": trial.suggest_int("width", 32, 64)},
        flow=RandomSearch(n_trials=2, max_epochs=6), client=client, run_dir=folder,
        deterministic=True,
    )  # fmt: skip


@pytest.mark.parametrize("kind", INPUTS)
def test_it_is_written_read_back_and_trained(kind: str, client: Client, tmp_path: Path) -> None:
    make, options = INPUTS[kind]
    (tmp_path / "in").mkdir()
    data = ShardedDataset.write(tmp_path / "data", make(tmp_path / "in"), n_shards=3, **options)
    assert data.classes == {"y": tuple(KINDS)}
    rows = {
        (
            tuple(np.ravel(sample["x"]).astype(int) // (15 if kind == "images" else 1)),
            int(sample["y"]),
        )
        for sample in data
    }
    wanted = {(tuple(x.int().tolist()), KINDS.index(word)) for x, word in samples()}
    assert rows == wanted
    run = search(data, client, tmp_path / "run", input_fn=input_fn)
    assert run.best_value > 0.8  # a guess has 0.33
    assert run.data == data


def test_images_decoded_on_the_way_train_as_those_decoded_before(
    client: Client, tmp_path: Path
) -> None:
    of_images(tmp_path)
    weights = []
    for decode in (True, False):
        source = ImageFolder(tmp_path, mode="L", decode=decode)
        data = ShardedDataset.write(tmp_path / f"out{decode}" / "d", source, n_shards=2)
        collate = {} if decode else {"collate": dagsel.collate.images(mode="L")}
        run = search(data, client, tmp_path / f"out{decode}" / "run", input_fn=input_fn, **collate)
        assert run.best_value > 0.8
        weights.append(run.best_model().state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_table_and_its_labels_are_searched_as_they_are(client: Client, tmp_path: Path) -> None:
    """Read a CSV file, search, predict words for new rows."""
    frame().to_csv(tmp_path / "table.csv", index=False)
    table = pd.read_csv(tmp_path / "table.csv")
    features = table.drop(columns="kind")
    run = search((features, table["kind"]), client, tmp_path / "run")
    assert run.data.classes == {"y": tuple(KINDS)}
    with torch.no_grad():
        scores = run.best_model()(torch.tensor(features.to_numpy(), dtype=torch.float32))
    words = np.array(run.data.classes["y"])[scores.argmax(1)]
    assert (words == table["kind"]).mean() > 0.8
