"""Saving and loading a state, against torch's and safetensors' own files; and what fsync costs.

Run as ``python tests/benchmarks/checkpoints.py [folder]``; it prints tables. Each row gives the
best of several rounds, in which all take turns: what else runs on the machine only adds. A save of
ours takes a checksum, writes two files and renames them; a load checks the checksum. All start from
a flat state, as training units do, and load into memory of their own.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dagsel.state import State, Tensor
from dagsel.storage import CheckpointStore, Journal

SIZES_MB = {1: 15, 100: 7, 800: 3}
N_TENSORS = 16


def main(folder: Path) -> None:
    print("| size | file | save | load | ours over it: save, load |\n" + "| --- " * 5 + "|")
    for size_mb, n_rounds in SIZES_MB.items():
        rows = measure(folder, size_mb, n_rounds)
        ours = rows["CheckpointStore"]
        for name, (save, load) in rows.items():
            ratio = f"{ours[0] / save:.2f}, {ours[1] / load:.2f}"
            took = f"{1e3 * save:.1f} ms | {1e3 * load:.1f} ms"
            print(f"| {size_mb} MB | {name} | {took} | {ratio} |", flush=True)
    print("\n| records appended to a journal | |\n| --- | --- |")
    for name, synced in (("without fsync", False), ("with fsync", True)):
        print(f"| {N_RECORDS}, {name} | {journal(folder, synced):.0f} µs |")


def measure(folder: Path, size_mb: int, n_rounds: int) -> dict[str, tuple[float, float]]:
    n = size_mb * 250_000 // N_TENSORS
    tensors = {f"layer{i}.weight": torch.rand(n) for i in range(N_TENSORS)}
    state = State.pack({name: Tensor.from_numpy(t.numpy()) for name, t in tensors.items()}, {})
    plain, synced = CheckpointStore(folder / "a"), CheckpointStore(folder / "b", sync=True)
    pt, st = str(folder / "x.pt"), str(folder / "x.safetensors")

    def load_own() -> object:
        return [t.clone() for t in load_file(st).values()]

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "CheckpointStore": (
            lambda: plain.save(0, 1, 0, state.buffer, {}),
            lambda: State(plain.load(0, 1, 0)[0]).tensors,
        ),
        "torch.save, .load": (lambda: torch.save(tensors, pt), lambda: torch.load(pt)),
        "safetensors": (lambda: save_file(tensors, st), load_own),
    }
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for _ in range(n_rounds):
        for name, acts in ways.items():
            for act, kept in zip(acts, times[name], strict=True):
                kept.append(seconds(act))
            clear(folder)  # every save makes a new file, as each unit's does
    os.sync()  # not what the others have left
    save = seconds(lambda: synced.save(0, 1, 0, state.buffer, {}))
    load = seconds(lambda: synced.load(0, 1, 0))
    clear(folder)
    found = {name: (min(s), min(ld)) for name, (s, ld) in times.items()}
    return {**found, "ours with fsync, once": (save, load)}


def clear(folder: Path) -> None:
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        path.unlink()


N_RECORDS = 10
RECORD = {
    "kind": "done",
    "trial": 17,
    "epoch": 3,
    "position": 5,
    "loss": 0.123456789,
    "worker": "w",
}


def journal(folder: Path, synced: bool) -> float:
    """Microseconds that an append takes."""
    sync, records, times = os.fsync, [RECORD] * N_RECORDS, []
    log = Journal(folder / f"journal-{synced}")
    log.append(records)
    try:
        if not synced:
            os.fsync = lambda fd: None
        times = [seconds(lambda: log.append(records)) for _ in range(300)]
    finally:
        os.fsync = sync
    return 1e6 * statistics.median(times)


def seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
