"""Freed memory stays for the next batch, and large tensors are no exception."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import optuna
import pytest
import torch
from distributed import Client, get_worker

import dagsel
from dagsel.dispatch.events import TrialAllowed
from dagsel.dispatch.units import Chain, Round
from dagsel.execution.allocator import _is_on_main_arena, give_back_memory
from dagsel.flows import RandomSearch
from dagsel.messages import UnitRecord
from dagsel.state import State
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.gang.gang import Gang
from dagsel.workloads.memory import glibc
from tests.execution.helpers import client_of, done, engine_for, listen, of, own_cluster

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")

#: Of an activation: more than one of a thread's heaps takes.
LARGE_BYTES, N_TIMES, PAGE = 100 << 20, 20, 4096
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def n_faults(*_: torch.Tensor) -> torch.Tensor:
    """Fill and free a large tensor again and again; count the pages that the kernel has given."""
    for _number in range(3):
        torch.ones(LARGE_BYTES, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _number in range(N_TIMES):
        torch.ones(LARGE_BYTES, dtype=torch.uint8)
    return torch.tensor(float(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before))


def huge_bytes(*_: torch.Tensor) -> torch.Tensor:
    """Fill many small blocks; tell how much of the main arena lies in huge pages."""
    kept = [np.ones(1 << 20, np.uint8) for _ in range(64)]
    heap, n_kb = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            heap = line.endswith("[heap]")
        elif heap and line.startswith("AnonHugePages"):
            n_kb += int(line.split()[1])
    del kept
    return torch.tensor(float(n_kb << 10))


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}


def measured(metric: Any, data: ShardedDataset, run_dir: str, **how: Any) -> float:
    """Measure where a search evaluates."""
    workload = dagsel.TorchWorkload(
        lambda config: torch.nn.Linear(64, 10),
        torch.nn.functional.cross_entropy,
        torch.optim.SGD,
        batch_size=64,
        metrics={"measured": metric},
    )
    run = dagsel.optimize(
        optuna.create_study(direction="maximize"),
        workload,
        data,
        space=space,
        metric="measured",
        flow=RandomSearch(max_epochs=1, n_trials=1),
        run_dir=run_dir,
        **how,
    )
    return run.best_value


def test_a_large_tensor_is_not_faulted_in_again(digits: ShardedDataset, run_dir: str) -> None:
    faults = measured(n_faults, digits, run_dir, max_cluster_workers=1)
    assert faults < 0.25 * N_TIMES * LARGE_BYTES / PAGE  # a gap or two may be made first


def test_nor_on_a_worker_of_somebody_elses(digits: ShardedDataset, run_dir: str) -> None:
    """Also in the second search there, and beside threads that have run tasks before."""
    with own_cluster(1) as cluster, Client(cluster, set_as_default=False) as client:
        client.gather(client.map(np.ones, range(1_000_000, 1_000_008), pure=False))
        for number in range(2):
            faults = measured(n_faults, digits, f"{run_dir}-{number}", client=client)
            assert faults < 0.25 * N_TIMES * LARGE_BYTES / PAGE  # a gap or two may be made first


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this kernel has no huge pages"
)
def test_training_has_huge_pages(digits: ShardedDataset, run_dir: str) -> None:
    assert measured(huge_bytes, digits, run_dir, max_cluster_workers=1) > 32 << 20


class TellsWhereItIs(SyntheticWorkload):
    """Writes down which worker trains, and in which thread."""

    def train(self, state: State, shard: Any, config: Any, **how: Any) -> Any:
        with Path(config["folder"], "told").open("a") as told:
            told.write(f"{get_worker().address} {threading.get_ident()}\n")
        return super().train(state, shard, config, **how)


def test_a_worker_trains_in_one_thread_which_knows_it(
    digits: ShardedDataset, run_dir: str, tmp_path: Path
) -> None:
    configs = {trial: {"folder": str(tmp_path)} for trial in range(8)}
    chains = tuple(Chain(trial, range(1, 3), 4, evaluate=False) for trial in configs)
    with client_of(2) as client, engine_for(client, digits, TellsWhereItIs(), run_dir) as engine:
        engine.submit(Round(1, chains), configs)
        heard = listen(engine, until=lambda heard: len(done(heard)) == 8 * 2 * 4)
    told = {*(tmp_path / "told").read_text().splitlines()}
    assert len(told) == 2
    assert {line.split()[0] for line in told} == {record.worker for record in of(UnitRecord, heard)}


class TellsItsArena(SyntheticWorkload):
    """Writes down which ranks of a gang train in the main arena."""

    def train_gang(self, *given: Any, gang: Gang, **rest: Any) -> Any:
        told = Path(given[2]["folder"], f"{gang.size}-{gang.rank}")
        libc = glibc()
        told.write_text(str(libc is not None and _is_on_main_arena(libc)))
        return super().train_gang(*given, gang=gang, **rest)


def test_all_ranks_of_a_gang_train_there(
    digits: ShardedDataset, run_dir: str, tmp_path: Path
) -> None:
    """In a search, and where its time is measured."""
    workload, config = TellsItsArena(n_batches=50, seconds=0.05), {"folder": str(tmp_path)}
    with client_of(2) as client:
        with engine_for(client, digits, workload, run_dir) as engine:
            engine.tell(TrialAllowed(0, 2, None, 1))
            engine.submit(Round(1, (Chain(0, range(1, 2), 4, evaluate=False),)), {0: config})
            listen(engine, until=lambda heard: len(done(heard)) == 4)
        in_search = {told.name: told.read_text() for told in tmp_path.glob("2-?")}
        for told in tmp_path.glob("2-?"):
            told.unlink()
        dagsel.profile(workload, config, digits, client=client)
        in_profile = {told.name: told.read_text() for told in tmp_path.glob("2-?")}
    assert in_search == in_profile == {"2-0": "True", "2-1": "True"}


SCRIPT = """\
import threading
from dagsel.execution import allocator

libc, told = allocator.glibc(), []
def look():
    told.append(allocator._is_on_main_arena(libc))
    at_once.wait()
at_once = threading.Barrier(3)
others = [threading.Thread(target=look) for _ in range(2)]
for thread in others:
    thread.start()
at_once.wait()
for thread in others:  # their arenas are free now, and the next threads get them
    thread.join()
found = allocator._on_main_arena()
here = allocator._is_on_main_arena(libc)
print(here, told, found.submit(allocator._is_on_main_arena, libc).result())
"""


def test_a_thread_is_found_that_shares_the_main_arena() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True [False, False] True\n", done.stderr


MAPPED = """\
import ctypes
from dagsel.execution import allocator

libc, gb = allocator.glibc(), 1 << 30
for limit in (gb, 4 * gb, 24 * gb, None):  # what is free at the end of the arena, all may take
    largest = allocator._largest_kept(limit)
    allocator._keep_freed_memory(libc, largest)
    allocator._ask_for_huge_pages(min(largest, allocator._AHEAD_BYTES))
    told = []
    for mb in (32, 100, 200, 800, 1_100):
        block = libc.malloc(mb << 20)
        told.append(ctypes.c_size_t.from_address(block - 8).value & 2 == 2)  # glibc's IS_MMAPPED
        libc.free(block)
    print(*map(int, told))
"""


def test_blocks_are_mapped_that_are_large_for_the_workers_memory() -> None:
    """1, 4 and 24 GB and no limit; blocks of 32 to 1,100 MB."""
    done = subprocess.run(
        [sys.executable, "-c", MAPPED], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["0 1 1 1 1", "0 0 1 1 1", "0 0 0 1 1", "0 0 0 0 1"]


cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("is_used", [True, False])
def test_what_pytorch_has_pinned_and_does_not_use_is_given_back(
    monkeypatch: pytest.MonkeyPatch, is_used: bool
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    give_back = lambda: given_back.append(1)  # noqa: E731
    monkeypatch.setattr(torch._C, "_host_emptyCache", give_back, raising=False)
    give_back_memory()
    assert given_back == [1] * is_used
