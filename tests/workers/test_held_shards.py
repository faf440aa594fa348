"""A worker's shards give the same bits from memory, the disk and the store, and are counted.

No cluster is here: `HeldShards` need a data set and a workload.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import platform
import re
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from sklearn.linear_model import SGDClassifier

import dagsel
from dagsel.execution import mapped_pages
from dagsel.execution.held_shards import PATIENCE_S, HeldShards
from dagsel.execution.mapped_pages import Pages
from dagsel.execution.raising import StoreFailedError
from dagsel.storage import RaggedArray, ShardedDataset
from dagsel.storage.datasets.whole import WholeDataset
from dagsel.storage.files import Folder
from dagsel.storage.shard_cache import Hold, ShardCache
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads import SklearnWorkload, TorchWorkload, Visit
from dagsel.workloads.base import Workload, outline

N_SHARDS = 2


@pytest.fixture
def data(tmp_path: Path) -> ShardedDataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2, 3))  # float64, which a float32 model has cast
    arrays = {"x": x, "y": (x[:, 0, 0] > 0).astype(np.int64)}
    return ShardedDataset.write(tmp_path / "data.zarr", arrays, n_shards=N_SHARDS)


def torch_workload(**options: Any) -> TorchWorkload:
    made = TorchWorkload(
        lambda config: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 2)),
        torch.nn.functional.cross_entropy,
        torch.optim.Adam,
        batch_size=8,
        metrics=["accuracy"],
        **options,
    )
    made.validate({"lr": 0.1})  # as the driver does, which learns what is cast
    return made


def with_input_fn() -> TorchWorkload:
    return torch_workload(input_fn=lambda batch, config: (batch["x"].float(), batch["y"]))


def sklearn_workload() -> SklearnWorkload:
    return SklearnWorkload(SGDClassifier(random_state=0), classes=[0, 1], batch_size=8)


def held(data: ShardedDataset, workload: Any, tmp_path: Path, hold: Hold) -> HeldShards:
    return HeldShards(data, workload, hold=hold, folder=str(tmp_path / "cache"))


@pytest.mark.parametrize("hold", ["memory", "disk", "auto"])
def test_a_data_set_that_is_trained_on_whole_is_whole_wherever_it_is_held(
    hold: Hold, data: ShardedDataset, tmp_path: Path
) -> None:
    whole = WholeDataset(data.folder, data.manifest)
    told: list[str] = []
    shards = HeldShards(
        whole, torch_workload(), hold=hold, memory_limit=1000, folder=str(tmp_path / "cache"),
        tell=told.append,
    )  # fmt: skip
    shards.open()
    for index in range(N_SHARDS):
        n_bytes = shards.load(index)
        assert n_bytes == sum(rows.nbytes for rows in whole.shard(index).values())
        for _ in range(2):
            with shards.use(index, "train") as shard:
                assert torch.equal(shard["y"], torch.from_numpy(whole.shard(index)["y"]))
    shards.clear()
    assert not (tmp_path / "cache").exists()
    assert len(told) == (hold != "memory")
    assert all("are read from the store for each pass" in text for text in told)


def trained(workload: Workload, shards: HeldShards) -> tuple[bytes, dict[str, float]]:
    """Train for two epochs and score; return the state and the metrics."""
    config = {"lr": 0.1} if isinstance(workload, TorchWorkload) else {}
    state = workload.init(config, seed=1)
    for shard in range(N_SHARDS):
        shards.load(shard)
    for epoch in (1, 2):
        for index in range(N_SHARDS):
            visit = Visit(0, 0, epoch, index, ends_epoch=index == N_SHARDS - 1)
            with shards.use(index, "train") as shard:
                state = workload.train(state, shard, config, visit=visit).state
    with shards.use(1, "validation") as shard:
        scores = workload.evaluate(state, shard, config).metrics
    return bytes(state.buffer), scores


@pytest.mark.parametrize("make", [torch_workload, with_input_fn, sklearn_workload])
def test_the_state_does_not_depend_on_where_shards_are(
    data: ShardedDataset, tmp_path: Path, make: Any
) -> None:
    results = []
    for hold in ("memory", "disk", "disk"):
        shards = held(data, make(), tmp_path, hold)
        results.append(trained(make(), shards))
        assert shards.counters.shard_bytes_read == data.nbytes
        assert shards.on_disk == (set() if hold == "memory" else {0, 1})
        shards.clear()
    assert results[0] == results[1] == results[2]
    assert not list(tmp_path.glob("cache/*"))


def summed(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    x = torch.stack([sample["x"].sum()[None] for sample in samples])
    return {"x": x, "y": torch.stack([sample["y"] for sample in samples])}


def of_lists() -> TorchWorkload:
    """A workload on samples that differ in length."""
    made = TorchWorkload(
        lambda config: torch.nn.Linear(1, 2),
        torch.nn.functional.cross_entropy,
        torch.optim.Adam,
        batch_size=8,
        metrics=["accuracy"],
        collate=dagsel.collate.samples(summed),
    )
    made.validate({"lr": 0.1})
    return made


def test_ragged_arrays_give_the_same_bits_from_the_disk(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = [rng.normal(size=rng.integers(0, 5)) for _ in range(90)]
    arrays = {"x": RaggedArray.of(x), "y": rng.integers(0, 2, 90)}
    data = ShardedDataset.write(tmp_path / "lists.zarr", arrays, n_shards=N_SHARDS)
    results = []
    for hold in ("memory", "disk"):
        shards = held(data, of_lists(), tmp_path, hold)
        results.append(trained(of_lists(), shards))
        shards.clear()
    assert results[0] == results[1]


def test_what_is_cast_is_cast_before_it_is_kept_on_the_disk(
    data: ShardedDataset, tmp_path: Path
) -> None:
    assert torch_workload().cast_dtypes(outline(data.manifest)) == {"x": np.float32}
    assert with_input_fn().cast_dtypes(outline(data.manifest)) == {}
    shards = held(data, torch_workload(), tmp_path, "disk")
    shards.load(0)
    with shards.use(0, "train") as shard:
        assert shard["x"].dtype == torch.float32
        x = np.asarray(data.shard(0)["x"], np.float32)
        np.testing.assert_array_equal(shard["x"].numpy(), x)
    shards.clear()


@pytest.mark.parametrize("make", [torch_workload, sklearn_workload])
def test_a_prepared_shard_is_the_mapped_file_and_no_copy(
    data: ShardedDataset, tmp_path: Path, make: Any
) -> None:
    cache = ShardCache(tmp_path / "cache", data, {"x": "float32"})
    cache.open()
    arrays = cache.load(0).arrays["train"]
    prepared = make().prepare(arrays)
    for name, array in arrays.items():
        there = np.asarray(prepared[name])
        assert there.__array_interface__["data"][0] == array.__array_interface__["data"][0]
    cache.close()


def test_auto_takes_memory_while_the_shards_fit_into_their_share(
    data: ShardedDataset, tmp_path: Path
) -> None:
    n_bytes = data.shard_sizes[0].nbytes
    for room, n_in_memory in ((0.5, 0), (1.0, 1), (1.9, 1), (2.0, 2), (None, 2)):
        told: list[str] = []
        # A small worker's shards may take a tenth of its limit, whatever its process takes.
        limit = None if room is None else int(room * n_bytes * 10)
        folder = str(tmp_path / "cache")
        shards = HeldShards(
            data, torch_workload(), hold="auto", memory_limit=limit, folder=folder, tell=told.append
        )
        for shard in range(N_SHARDS):
            assert shards.load(shard) == data.shard_sizes[shard].nbytes
        assert len(shards.on_disk) == N_SHARDS - n_in_memory
        assert len(told) == (n_in_memory < N_SHARDS), "it is told once"
        assert all("memory" in text and "cache" in text for text in told)
        shards.drop(0)
        shards.drop(1)
        shards.load(1)  # takes the room that the other has left
        assert shards.on_disk == (set() if n_in_memory else {1})
        shards.clear()


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_once_and_the_store_read_until_there_is_room(
    data: ShardedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, pauses = list[str](), list[float]()
    workload = torch_workload()
    where: dict[str, Any] = {"folder": str(tmp_path / "cache"), "sleep": pauses.append}
    shards = HeldShards(data, workload, hold="disk", tell=told.append, **where)
    with monkeypatch.context() as patch:
        patch.setattr("dagsel.storage.shard_cache.check_room", full)
        found = trained(workload, shards)
        assert sum(pauses) == PATIENCE_S, "of all shards together"
        assert "after 10 s in which they wait for room" in told[0]
        assert shards.on_disk == set()
        assert len(told) == 1
        assert "No space left" in told[0]
        assert "cache_dir=" in told[0]
        assert not list(tmp_path.rglob("*.shard"))
        # In two epochs both shards twice, and once one of the validation shards.
        validation = sum(array.nbytes for array in data.validation_shard(1).values())
        train = sum(a.nbytes for s in range(N_SHARDS) for a in data.shard(s).values())
        assert shards.counters.shard_bytes_read == 2 * train + validation
    assert trained(workload, shards) == found
    assert shards.on_disk == {0, 1}
    shards.clear()
    in_memory = held(data, workload, tmp_path, "memory")
    assert trained(workload, in_memory) == found


def test_a_shard_takes_the_room_that_another_run_leaves_while_it_waits(
    data: ShardedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def other_run_ends(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            monkeypatch.undo()

    monkeypatch.setattr("dagsel.storage.shard_cache.check_room", full)
    where: dict[str, Any] = {"folder": str(tmp_path / "cache"), "sleep": other_run_ends}
    shards = HeldShards(data, SyntheticWorkload(), hold="disk", **where)
    shards.load(0)
    assert shards.on_disk == {0}
    assert len(pauses) == 3
    shards.clear()


def test_a_folder_that_is_a_link_is_told_and_the_store_read(
    data: ShardedDataset, tmp_path: Path
) -> None:
    told: list[str] = []
    root = ShardCache(tmp_path / "cache", data).root
    root.parent.mkdir()
    root.symlink_to(tmp_path)
    folder = str(tmp_path / "cache")
    shards = HeldShards(data, SyntheticWorkload(), hold="disk", folder=folder, tell=told.append)
    shards.load(0)
    with shards.use(0, "train") as n_samples:
        assert n_samples == 36
    assert "is a link" in told[0]
    shards.clear()


def test_what_cannot_be_read_from_the_store_is_raised(data: ShardedDataset, tmp_path: Path) -> None:
    for chunk in Path(data.url).rglob("train/00000/x/c/0/0/0"):
        chunk.unlink()
    shards = held(data, SyntheticWorkload(), tmp_path, "disk")
    with pytest.raises(Exception, match="missing object"):
        shards.load(0)
    shards.load(1)
    shards.clear()


@pytest.mark.parametrize("hold", ["memory", "disk"])
def test_a_store_that_cannot_be_read_is_told_from_the_workloads_errors(
    data: ShardedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    def fail(*_: Any, **how: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    shards = held(data, SyntheticWorkload(), tmp_path, hold)
    monkeypatch.setattr(Folder, "open_read", fail)
    with pytest.raises(StoreFailedError, match=f"{data.url}: OSError: .* Stale"):
        shards.load(0)
    shards.clear()


def faults_of(read: Callable[[], object]) -> int:
    """How many pages come into this process one by one as something is read."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    read()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 14),
    reason="pages come at once with Linux 5.14 and later",
)
def test_pages_that_the_system_holds_come_at_once_unless_they_are_too_many(tmp_path: Path) -> None:
    big = ShardedDataset.write(
        tmp_path / "big.zarr", {"x": np.zeros((4000, 4096), "uint8")}, n_shards=1
    )
    cache = ShardCache(tmp_path / "cache", big)
    cache.open()
    mapped = cache.load(0)
    samples = mapped.arrays["train"]["x"]
    n_faults = []
    for most_bytes in (samples.nbytes + (1 << 16), samples.nbytes - 1):
        mapped.forget_pages()
        with mapped.read_ahead("train", most_bytes):
            n_faults.append(faults_of(lambda: samples[:, 0].sum()))
    assert n_faults[1] >= samples.nbytes // mmap.PAGESIZE // 64
    assert n_faults[0] <= n_faults[1] // 8
    cache.close()


class Mapped:
    """Pages of a file that a process takes until it forgets them."""

    def __init__(self) -> None:
        self.n_forgotten = 0

    def forget_pages(self) -> None:
        self.n_forgotten += 1


class Process:
    """A process that takes so much."""

    def __init__(self) -> None:
        self.rss = self.shared = 0

    def memory_info(self) -> Process:
        return self


def test_pages_are_forgotten_when_the_process_takes_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, mapped = Process(), Mapped()
    monkeypatch.setattr(psutil, "Process", lambda: process)
    monkeypatch.setattr(mapped_pages, "_LOOK_S", 1e9)
    pages, worth = Pages(500e6), mapped_pages._WORTH_BYTES
    pages.add(0, mapped)  # type: ignore[arg-type]
    process.rss, process.shared = 400_000_000, 100_000_000
    pages.relieve()
    process.rss, process.shared = 499_000_000, 200_000_000
    pages.relieve()
    assert mapped.n_forgotten == 0, "there is room"
    process.rss += 2_000_000
    pages.relieve()
    assert mapped.n_forgotten == 1
    process.rss, process.shared = 600_000_000, 100_000_000 + worth - 1
    pages.relieve()
    assert mapped.n_forgotten == 1, "they are not what takes it"
    process.shared += 1
    pages.drop(0)
    pages.relieve()
    assert mapped.n_forgotten == 1
    pages.close()


def test_a_large_shard_is_forgotten_while_it_is_in_use(
    data: ShardedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread looks: a unit that takes long asks nobody."""
    from tests.waiting import wait_until

    monkeypatch.setattr(mapped_pages, "_WORTH_BYTES", 0)
    folder = str(tmp_path / "cache")
    shards = HeldShards(data, SyntheticWorkload(), hold="disk", memory_limit=1, folder=folder)
    shards.load(0)
    mapped: Any = Mapped()
    shards._pages.add(0, mapped)
    with shards.use(0, "train"):
        wait_until(lambda: mapped.n_forgotten, "pages are forgotten")
    shards.clear()


def test_nothing_of_a_dropped_shard_stays(data: ShardedDataset, tmp_path: Path) -> None:
    shards = held(data, torch_workload(), tmp_path, "disk")
    shards.load(0)
    with shards.use(0, "train") as shard:
        gone = weakref.ref(shard["x"])
    del shard
    shards.drop(0)
    gc.collect()
    assert gone() is None
    assert 0 not in shards
    shards.clear()
