"""Write the generated parts of docs/measured/benchmarks.md anew; ``make bench`` takes an hour.

    python tests/benchmarks/page.py [--only peers,engine] [--data PATH]

A part stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``; what is not between such
lines is written by hand and stays. A part is the standard output of a benchmark, which is markdown,
below a line that says what was run, of which commit, when, and on which machine. PATH is a folder
with the IDX files of MNIST; without it scikit-learn's digits are taken.

A benchmark ends with 0, or with 3 where it ran and missed a bar: that is told, and the part is
written all the same. With anything else it has failed: its part stays as it is. The page is written
after each benchmark. This program ends with 1 if a benchmark failed, else with 3 if one missed a
bar, else with 0.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs/measured/benchmarks.md"
MARKER = re.compile(r"^<!-- (begin|end): (\S+) -->$", re.MULTILINE)
#: A benchmark that takes longer has failed.
LIMIT_S = 1800
#: What makes each part, in sizes that take less than an hour in all on two cores.
PARTS = {
    "peers": "peers.py --rounds 5 {data}",
    "peers-two": "peers.py --rounds 3 --only dagsel,plain {data}",
    "peers-64": "peers.py --trials 64 --rounds 5 --only dagsel,plain {data}",
    "dask-ml": "dask_ml_race.py --rounds 3 {data}",
    "large-tensors": "large_tensors.py --rounds 3",
    "layouts": "layouts.py --rounds 5",
    "tabular": "tabular.py --rounds 3",
    "engine": "engine.py",
    "dispatch": "dispatch.py --quick",
    "write-memory": "write_memory.py --gigabytes 4",
    "held-on-disk": "held_on_disk.py --megabytes 100",
    "checkpointing": "checkpointing.py {data}",
    "checkpoints": "checkpoints.py",
    "determinism": "determinism.py",
    "suspend-resume": "suspend_resume.py --repeats 3",
    "time-sharing": "time_sharing.py",
    "simulator": "simulator.py --all",
    "display": "display.py --repeats 2",
}


class PageError(ValueError):
    """The page's markers, or what should stand between them, cannot be right."""


def replaced(page: str, parts: Mapping[str, str], known: Collection[str]) -> str:
    """Return the page with other text between the markers of `parts`; all else stays.

    `known` are the names that a marker may have.
    """
    for name, text in parts.items():
        if MARKER.search(text):
            raise PageError(f"what should become part {name} has a marker itself")
    prose, *rest = MARKER.split(page)
    made, seen, inside = [prose], set[str](), ""
    for kind, name, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if name not in known:
            raise PageError(f"no benchmark makes the part {name!r}: one of {', '.join(known)}")
        if name in seen if kind == "begin" else name != inside:
            raise PageError(f"<!-- {kind}: {name} --> stands where it cannot")
        if kind == "begin" and inside:
            raise PageError(f"<!-- end: {inside} --> is missing before that of {name}")
        inside = name if kind == "begin" else ""
        seen.add(name)
        is_new = kind == "begin" and name in parts
        made += [f"<!-- {kind}: {name} -->", f"\n\n{parts[name].strip()}\n\n" if is_new else text]
    if inside:
        raise PageError(f"<!-- end: {inside} --> is missing")
    for name in parts:
        if name not in seen:
            raise PageError(f"<!-- begin: {name} --> is missing")
    return "".join(made)


def output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def origin(command: str, minutes: float, load: float) -> str:
    """Say what was run, of which commit, when, and where; `load` is that of the machine before."""
    commit = output_of("git", "rev-parse", "--short", "HEAD") or "unknown"
    changed = output_of("git", "status", "--porcelain", "--", ".", ":!docs/measured/benchmarks.md")
    machine = [f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    machine += [f"PyTorch {version('torch')}", f"distributed {version('distributed')}"]
    return (
        f"*`python tests/benchmarks/{command}`, commit {commit}{' with changes' * bool(changed)}, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {minutes:.1f} min; {', '.join(machine)}; "
        f"load before it {load:.1f}.*"
    )


def run(name: str, data: Path | None) -> tuple[int, str]:
    """Run a benchmark; return how it ended, and its part of the page."""
    told = " ".join(PARTS[name].format(data="--data PATH" if data else "").split())
    print(f"{name}: {told}", file=sys.stderr, flush=True)
    program, *options = (str(data) if word == "PATH" else word for word in told.split())
    began, (load, *_) = time.monotonic(), os.getloadavg()
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / program), *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 1, ""
    text = f"{origin(told, (time.monotonic() - began) / 60, load)}\n\n{done.stdout.strip()}"
    return done.returncode, text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help="names of parts")
    parser.add_argument("--data", type=Path, help="folder with the IDX files of MNIST")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; one of {', '.join(PARTS)}")
    replaced(PAGE.read_text(), dict.fromkeys(names, ""), PARTS)  # tells of a missing marker now
    ended: dict[int, list[str]] = {0: [], 1: [], 3: []}
    for name in names:
        code, text = run(name, args.data and args.data.resolve())
        if code in (0, 3):
            PAGE.write_text(replaced(PAGE.read_text(), {name: text}, PARTS))
        ended[code if code in (0, 3) else 1].append(name)
        said = {0: "done", 3: "MISSED a bar"}.get(code, "FAILED, its part is as it was")
        print(f"{name}: {said}", file=sys.stderr, flush=True)
    for code, what in ((3, "missed a bar"), (1, "failed")):
        if ended[code]:
            print(f"{what}: {', '.join(ended[code])}", file=sys.stderr)
    return 1 if ended[1] else 3 if ended[3] else 0


if __name__ == "__main__":
    sys.exit(main())
