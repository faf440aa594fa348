"""The page docs/measured/coverage.md: what of the product the tests run, by line and by branch.

::

    make coverage               # runs all tests, in workers' processes as well, and writes the page
    python tests/covered.py     # writes it anew from what was measured

A file below `ENOUGH` needs a reason in `REASONS`: else this is an error, and the page is written
all the same.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/measured/coverage.md"
ENOUGH = 95.0  # percent of the lines and branches of a file
#: Why less than that is run, by file. How much of a process's count is lost when it is killed is
#: chance, so a file that is not far below may be above it in the next run.
REASONS: Mapping[str, str] = {
    "dagsel/dispatch/strikes.py": "a rank of a gang that is lost while another loss is weighed",
    "dagsel/driver/consistency.py": "entries that contradict each other: checksums find most "
    "damage first",
    "dagsel/driver/recovery.py": "a workload that no longer builds its model, a state that is "
    "damaged while it is read: attacks and chaos draw them by chance",
    "dagsel/execution/compatibility.py": "workers with another Python or another package: "
    "there is one of each here",
    "dagsel/execution/connection.py": "a scheduler that goes while a message is on its way",
    "dagsel/execution/fork_server.py": "a cluster that cannot be begun",
    "dagsel/execution/process.py": "C libraries other than glibc, GPUs",
    "dagsel/execution/scheduler_plugin.py": "races of workers that go while a message is on its "
    "way: the dispatcher's own laws draw them, a cluster shows them by chance",
    "dagsel/execution/spec_cluster.py": "a nanny that is closed while its process starts",
    "dagsel/history/script.py": "recorded decisions about a trial that fails when it is repeated",
    "dagsel/workloads/gang/process_group.py": "NCCL: it needs GPUs",
    "dagsel/workloads/sklearn/objects.py": "estimators of other versions of scikit-learn, and "
    "damage that the attacks draw by chance",
    "dagsel/workloads/sklearn/workload.py": "estimators and states that are wrong, which the "
    "attacks draw by chance",
    "dagsel/workloads/torch/ddp.py": "shards of more batches than are summed up at once",
    "dagsel/workloads/torch/device.py": "GPUs",
    "dagsel/workloads/torch/fit.py": "a loss in a `partial`, an array of a dtype that tensors lack",
    "dagsel/workloads/torch/speed.py": "TF32: it needs GPUs",
    "dagsel/workloads/torch/state.py": "random streams of GPUs, arrays of the other byte order",
    "storage/datasets/inputs/images.py": "a machine without Pillow",
    "storage/datasets/inputs/parquet.py": "a machine without pyarrow",
    "storage/runs/lock.py": "another system than Linux, and a race for a lock that is released",
}
HEAD = """\
# What the tests run

Lines and branches of the product that some test runs, measured with
[coverage](https://coverage.readthedocs.io) in the tests' own process and in those that they start:
workers, schedulers, drivers. A process that is killed takes what it counted with it.
`make coverage` writes this page; a file below {enough:.0f}% without a reason is an error.

{n_covered} of {n_all} lines and branches are run: **{percent:.1f}%**. {n_above} of {n_files} files
are above {enough:.0f}%; the others:

| file | run | why not all |
| --- | --- | --- |
"""


@dataclass(frozen=True)
class Covered:
    """How many lines and branches of a file, or of all, are run."""

    n_covered: int
    n_all: int

    @property
    def percent(self) -> float:
        return 100.0 * self.n_covered / self.n_all if self.n_all else 100.0


def measured() -> dict[str, Covered]:
    """Return what was measured, by file."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        coverage = Coverage(config_file=str(ROOT / "pyproject.toml"))
        coverage.load()
        coverage.json_report(outfile=str(told))
        files = json.loads(told.read_text())["files"]
    return {
        name: Covered(
            s["covered_lines"] + s["covered_branches"], s["num_statements"] + s["num_branches"]
        )
        for name, s in ((name, file["summary"]) for name, file in sorted(files.items()))
    }


def page(files: Mapping[str, Covered]) -> str:
    """Return the page."""
    whole = Covered(sum(f.n_covered for f in files.values()), sum(f.n_all for f in files.values()))
    below = {name: file for name, file in files.items() if file.percent < ENOUGH}
    head = HEAD.format(
        enough=ENOUGH,
        n_covered=f"{whole.n_covered:,}",
        n_all=f"{whole.n_all:,}",
        percent=whole.percent,
        n_above=len(files) - len(below),
        n_files=len(files),
    )
    rows = [
        f"| `{name}` | {file.percent:.1f}% | {REASONS.get(name, '')} |\n"
        for name, file in below.items()
    ]
    return head + "".join(rows)


def main() -> int:
    """Write the page; return how many files lack a reason."""
    files = measured()
    PAGE.write_text(page(files))
    silent = [name for name, file in files.items() if file.percent < ENOUGH and name not in REASONS]
    for name in silent:
        print(f"{name}: {files[name].percent:.1f}% is run, and tests/covered.py has no reason")
    return len(silent)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
