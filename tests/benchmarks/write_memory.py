"""How much memory writing a large memmap takes, and how fast writing and reading are.

Writes a raw file of the asked size, then, in a child process, a data set from its memmap; prints
the child's peak resident memory (the kernel's ``VmHWM``) and ends with 3 if it is over the limit.

    python tests/benchmarks/write_memory.py --gigabytes 4
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LIMIT_MB = 600
N_SHARDS = 4
N_FEATURES = 1024


def make_input(path: Path, n_bytes: int) -> None:
    rng = np.random.default_rng(0)
    block = rng.random(64 << 18, "f4").tobytes()
    with path.open("wb") as file:
        for _ in range(n_bytes // len(block)):
            file.write(block)


def peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kb,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kb) * 1024 / 1e6


def child(source: str, target: str) -> None:
    from dagsel.storage import ShardedDataset

    x = np.memmap(source, dtype="f4", mode="r").reshape(-1, N_FEATURES)
    base_mb, begin = peak_mb(), time.perf_counter()
    data = ShardedDataset.write(target, {"x": x, "id": np.arange(len(x))}, n_shards=N_SHARDS)
    seconds = time.perf_counter() - begin
    body = {"base_mb": base_mb, "peak_mb": peak_mb(), "mb_per_s": data.nbytes / 1e6 / seconds}
    sys.stdout.write(json.dumps(body))


def check(target: str, source: Path) -> None:
    """Look whether a shard's samples are the input's: a fast write of nonsense would be no news."""
    from dagsel.storage import ShardedDataset

    x = np.memmap(source, dtype="f4", mode="r").reshape(-1, N_FEATURES)
    shard = ShardedDataset.open(target).validation_shard(0)
    some = slice(None, None, 97)
    assert np.array_equal(shard["x"][some], x[shard["id"][some]])


def compare_reading(folder: Path) -> None:
    from dagsel.storage import ShardedDataset

    x = np.random.default_rng(0).random((100_000, 256), "f4")
    data = ShardedDataset.write(
        folder / "read.zarr", {"x": x}, n_shards=1, validation={"x": x[:10]}
    )
    np.save(folder / "x.npy", x)

    def rate(read: object) -> float:
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            read()  # type: ignore[operator]
            times.append(time.perf_counter() - begin)
        return x.nbytes / 1e6 / sorted(times)[3]

    ours, numpys = rate(lambda: data.shard(0)), rate(lambda: np.load(folder / "x.npy"))
    print(f"| reading a shard of 102 MB back | {ours:,.0f} MB/s | | |")
    print(f"| the same with `np.load` | {numpys:,.0f} MB/s | | |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=None, help="where there is room for 3x that")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return 0
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        n_bytes = int(arguments.gigabytes * 1e9)
        if shutil.disk_usage(folder).free < 3.3 * n_bytes:
            parser.error(f"{folder} has too little room; pass --folder")
        source, target = folder / "input.raw", folder / "set.zarr"
        make_input(source, n_bytes)
        command = [sys.executable, __file__, "--child", str(source), str(target)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        is_held = result["peak_mb"] < LIMIT_MB
        print("| what | measured | bar | |\n| --- | --- | --- | --- |")
        print(
            f"| most memory, writing {source.stat().st_size / 1e9:.2f} GB in {N_SHARDS} shards | "
            f"{result['peak_mb']:.0f} MB, {result['base_mb']:.0f} before | {LIMIT_MB} MB | "
            f"{'held' if is_held else '**missed**'} |"
        )
        print(f"| writing it | {result['mb_per_s']:.0f} MB/s | | |")
        check(str(target), source)
        compare_reading(folder)
        return 0 if is_held else 3  # a crash ends with 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
