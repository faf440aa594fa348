"""Data larger than memory trains from the workers' disks: fetched once, same weights, nothing left.

Clusters are real, with real limits of memory; workers are killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import optuna
import pytest
import torch
from distributed import Client

import dagsel
from dagsel.dispatch.events import ShardLoaded, WorkerRemoved
from dagsel.dispatch.units import Chain, Round
from dagsel.errors import ClusterError
from dagsel.execution.engine import DaskEngine
from dagsel.flows import RandomSearch
from dagsel.messages import Message, Note, TrialReport
from dagsel.storage import Batches, ShardedDataset
from dagsel.storage.shard_cache import ShardCache
from dagsel.testing.synthetic import SyntheticWorkload, seen
from dagsel.workloads import TorchWorkload

from .helpers import BY_NIGHT, client_of, done, engine_for, final_state, listen, of, spawned_cluster

N_TRIALS = 2


@pytest.fixture
def cache_dir(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "cache"
    yield str(folder)
    assert not list(folder.glob("*")), "something is left on the disk"


def fetched(run: str, dask_worker: Any) -> tuple[int, list[int]]:
    """Return the bytes that a worker has read from the store, and which shards it has on disk."""
    shards = dask_worker.plugins[f"dagsel-{run}"].units.shards
    return shards.counters.shard_bytes_read, sorted(shards.on_disk)


def loaded(heard: list[Message]) -> set[int]:
    return {message.shard for message in of(ShardLoaded, heard)}


def submit(engine: DaskEngine, n_shards: int, n_epochs: int) -> int:
    """Send trials; return how many units they have."""
    chains = tuple(Chain(t, range(1, n_epochs + 1), n_shards) for t in range(N_TRIALS))
    engine.submit(Round(1, chains), {t: {} for t in range(N_TRIALS)})
    return 2 * N_TRIALS * n_epochs * n_shards


def kill(client: Client) -> None:
    for pid in client.run(os.getpid).values():
        os.kill(pid, signal.SIGKILL)


def on_disk(cache_dir: str | None = None, **spec: Any) -> dict[str, Any]:
    return {"hold": "disk", "cache_dir": cache_dir, **spec}


def check_states(engine: DaskEngine, n_shards: int, n_epochs: int) -> None:
    for trial in range(N_TRIALS):
        visits = seen(final_state(engine, trial, n_epochs, n_shards))
        assert len(set(visits)) == len(visits) == n_epochs * n_shards


@pytest.mark.parametrize("damage", [False, True])
def test_a_killed_worker_fetches_nothing_again_but_what_is_damaged(
    digits: ShardedDataset, run_dir: str, cache_dir: str, tmp_path: Path, damage: bool
) -> None:
    copy = str(shutil.copytree(digits.url, tmp_path / "data.zarr"))
    data, n_epochs = ShardedDataset.open(copy), 6
    workload = SyntheticWorkload(seconds=0.05)
    with (
        client_of(1) as client,
        engine_for(client, data, workload, run_dir, spec=on_disk(cache_dir)) as engine,
    ):
        n_units = submit(engine, data.n_shards, n_epochs)
        heard = listen(engine, until=lambda h: len(loaded(h)) == data.n_shards and len(done(h)) > 9)
        assert list(client.run(fetched, engine.spec.run).values()) == [(data.nbytes, [0, 1, 2, 3])]
        if damage:
            path = sorted(ShardCache(cache_dir, data).root.rglob("00002*.shard"))[0]
            text = bytearray(path.read_bytes())
            text[len(text) // 2] ^= 1
            path.write_bytes(text)
        else:
            Path(copy).rename(tmp_path / "away")  # nobody can read it any more
        kill(client)
        heard += listen(engine, until=lambda new: len({*done(heard + new)}) == n_units)
        n_bytes = data.shard_sizes[2].nbytes if damage else 0
        assert list(client.run(fetched, engine.spec.run).values()) == [(n_bytes, [0, 1, 2, 3])]
        check_states(engine, data.n_shards, n_epochs)
    assert of(WorkerRemoved, heard)
    assert not of(TrialReport, heard)


def test_workers_of_a_machine_share_one_copy_beside_dasks_own_folders(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    two_copies = {"replicas": 2}
    workload = SyntheticWorkload(seconds=0.01)
    spec = on_disk()
    with engine_for(client, digits, workload, run_dir, dispatch=two_copies, spec=spec) as engine:
        n_units = submit(engine, digits.n_shards, n_epochs=2)
        heard = listen(engine, until=lambda heard: len(done(heard)) >= n_units)
        n_loaded = 2 * digits.n_shards
        if len(of(ShardLoaded, heard)) < n_loaded:
            heard += listen(engine, until=lambda h: len(of(ShardLoaded, heard + h)) >= n_loaded)
        counted = client.run(fetched, engine.spec.run)
        folders = {Path(f).parent for f in client.run(local_folder).values()}
        assert len(list(folders.pop().rglob("*.shard"))) == digits.n_shards
    assert all(shards == [0, 1, 2, 3] for _, shards in counted.values())
    assert sum(n_bytes for n_bytes, _ in counted.values()) == digits.nbytes
    for folder in client.run(local_folder).values():
        assert not list(Path(folder).parent.glob("dagsel-shards*"))


def local_folder(dask_worker: Any) -> str:
    return str(dask_worker.local_directory)


def fill_disk() -> None:
    """Have no room for shards on this worker's disk."""
    import errno

    from dagsel.execution import held_shards
    from dagsel.storage import shard_cache

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    vars(shard_cache)["check_room"] = full
    vars(held_shards)["PATIENCE_S"] = 1.0


def test_training_goes_on_where_the_disk_is_full_and_the_run_says_so(
    digits: ShardedDataset, run_dir: str, cache_dir: str
) -> None:
    with client_of(2) as client:
        client.run(fill_disk)
        with engine_for(
            client, digits, SyntheticWorkload(), run_dir, spec=on_disk(cache_dir)
        ) as engine:
            n_units = submit(engine, digits.n_shards, n_epochs=2)
            heard = listen(engine, until=lambda heard: len(done(heard)) >= n_units)
            counted = client.run(fetched, engine.spec.run)
            check_states(engine, digits.n_shards, n_epochs=2)
    (note,) = of(Note, heard)  # of two workers
    assert "No space left" in note.text
    assert "read from the store" in note.text
    assert all(not shards for _, shards in counted.values())
    assert sum(n_bytes for n_bytes, _ in counted.values()) == 2 * N_TRIALS * digits.nbytes


# ---- as users call it


def linear(config: Any) -> torch.nn.Module:
    return torch.nn.Linear(64, 10)


def sgd(parameters: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config["lr"], momentum=0.9)


def corner(batch: dict[str, torch.Tensor], config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Take a few of a sample's many bytes."""
    return batch["x"][:, :64].float() / 255, batch["y"]


def space(trial: optuna.Trial) -> dict[str, float]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


def search(data: ShardedDataset, run_dir: str, client: Client, **how: Any) -> dagsel.Run:
    return dagsel.optimize(
        optuna.create_study(direction="minimize"),
        how.pop("workload"),
        data,
        space=space,
        flow=RandomSearch(max_epochs=1, n_trials=2),
        metric="loss",
        client=client,
        run_dir=run_dir,
        deterministic=True,
        **how,
    )


def classifier(**options: Any) -> TorchWorkload:
    cross_entropy = torch.nn.functional.cross_entropy
    return TorchWorkload(linear, cross_entropy, sgd, batch_size=64, **options)


def weights(run: dagsel.Run) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in run.best_model().parameters()]


def test_the_result_does_not_depend_on_where_shards_are_held(
    client: Client, digits: ShardedDataset, tmp_path: Path, cache_dir: str
) -> None:
    how: list[dict[str, Any]] = [
        {"hold": "memory"},
        {"hold": "disk", "cache_dir": cache_dir},
        {"hold": "auto"},
    ]
    runs = [
        search(digits, str(tmp_path / f"run-{k}"), client, workload=classifier(), **options)
        for k, options in enumerate(how)
    ]
    assert weights(runs[0]) == weights(runs[1]) == weights(runs[2])
    assert runs[0].best_value == runs[1].best_value
    assert not any(run.record.notes for run in runs)
    given: dict[str, Any] = {"workload": classifier(), "space": space}
    again = dagsel.replay(
        tmp_path / "run-0", client, **given, into=tmp_path / "again", hold="disk",
        cache_dir=cache_dir,
    )  # fmt: skip
    assert not again.record.notes
    assert weights(again) == weights(runs[0])


def test_a_run_goes_on_on_a_cluster_that_holds_its_shards_elsewhere(
    client: Client, digits: ShardedDataset, run_dir: str, cache_dir: str, tmp_path: Path
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    given: dict[str, Any] = {"workload": classifier()}
    with pytest.raises(KeyboardInterrupt):
        search(digits, run_dir, client, **given, hold="memory", callbacks=[interrupt])
    assert "hold" not in Path(run_dir, "run.json").read_text()
    run = dagsel.resume(run_dir, client, **given, space=space, hold="disk", cache_dir=cache_dir)
    whole = search(digits, str(tmp_path / "whole"), client, **given)
    assert weights(run) == weights(whole)


def test_a_search_that_is_extended_may_hold_its_shards_elsewhere(
    client: Client, digits: ShardedDataset, run_dir: str, cache_dir: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"workload": classifier()}
    runs = [search(digits, f"{run_dir}-{k}", client, **given) for k in range(2)]
    whole = runs[0].extend(client, max_epochs=2)
    more = runs[1].extend(client, max_epochs=2, hold="disk", cache_dir=cache_dir)
    assert weights(more) == weights(whole)
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match="file/dagsel-shards.*cache_dir="):
        more.extend(client, max_epochs=3, hold="disk", cache_dir=tmp_path / "file")


def test_a_cache_dir_that_cannot_be_is_named_before_anything_trains(
    client: Client, digits: ShardedDataset, run_dir: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="file/dagsel-shards.*cache_dir="):
        search(
            digits, run_dir, client, workload=classifier(), hold="disk", cache_dir=tmp_path / "file"
        )


LIMIT_BYTES = 700_000_000
#: So many times the limit is the data; `make churn` takes four times.
TIMES = int(os.environ.get("DISK_TIMES", "2"))
N_BYTES = 16_000  # of a sample
N_SAMPLES = TIMES * LIMIT_BYTES // N_BYTES + 1


def large_rows() -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    block = rng.integers(0, 255, (5_000, N_BYTES), np.uint8)
    for start in range(0, N_SAMPLES, 5_000):
        x = np.roll(block, start // 5_000 + 1, axis=1)[: N_SAMPLES - start]
        yield {"x": x, "y": x[:, :10].argmax(axis=1)}


def pauses(dask_scheduler: Any) -> list[Any]:
    """List when workers were paused, or lost."""
    events = (e for topic in dask_scheduler.get_events().values() for _, e in topic)
    told = (e for e in events if isinstance(e, dict))
    wrong = ("paused", "closing")
    return [e for e in told if e.get("status") in wrong or e.get("action") == "remove-worker"]


@pytest.mark.slow
@pytest.mark.parametrize("hold", [pytest.param("disk", marks=BY_NIGHT), "auto"])
def test_data_of_several_times_the_memory_limit_trains(
    client: Client, tmp_path: Path, large: Callable[[], ShardedDataset], cache_dir: str, hold: str
) -> None:
    """On a cluster of one worker; its process alone takes two thirds of its limit."""
    data, workload = large(), classifier(input_fn=corner)
    assert data.nbytes > TIMES * LIMIT_BYTES
    with (
        spawned_cluster(1, f"{LIMIT_BYTES} B", logging.ERROR) as cluster,
        Client(cluster, set_as_default=False) as small,
    ):
        options: dict[str, Any] = {"hold": hold, "cache_dir": cache_dir}
        before = small.run(os.getpid)
        run = search(data, str(tmp_path / "run"), small, workload=workload, **options)
        assert small.run(os.getpid) == before
        assert not small.run_on_scheduler(pauses)
    assert len(run.record.notes) == (hold == "auto")
    if hold == "disk":
        in_memory = search(data, str(tmp_path / "memory"), client, workload=workload, hold="memory")
        assert weights(run) == weights(in_memory)
        assert run.best_value == in_memory.best_value


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], ShardedDataset]]:
    folder = tmp_path_factory.mktemp("large")
    made: list[ShardedDataset] = []

    def make() -> ShardedDataset:
        if not made:
            rows = Batches(large_rows(), N_SAMPLES)
            made.append(ShardedDataset.write(folder / "data.zarr", rows, n_shards=10 * TIMES))
        return made[0]

    yield make
    shutil.rmtree(folder)


cloudpickle.register_pickle_by_value(sys.modules[__name__])
