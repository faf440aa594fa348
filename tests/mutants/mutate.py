"""Small faults, drawn by chance and put in one by one: how many do the tests see?

::

    python tests/mutants/mutate.py --n 300 --seed 0 --out /tmp/mutants.jsonl --only dispatch

Each mutant is a copy of the code with one change, and a process of its own, in which the ``TESTS``
of its folder run, and the examples of its docstrings: those of its module first, then the cheap
ones, and only those that call the changed function. Which do, one run of each file of tests has
shown (``--touched``). They end at the first failure, and at a test that takes several times the CPU
time that it takes without the mutant: the mutant hangs. Together they take at most ``--seconds``;
the dearest are left out, and so are all that start a cluster. Hypothesis draws the same examples
each time and makes none small. ``--out`` holds a line for each mutant and is gone on with, but for
files that have changed since; ``--again`` tries survivors once more. After tests were changed,
delete it.

Not mutmut 3: it leaves out properties, defaults of fields and constants of modules, tries all
mutants and no sample, and finds no tests where a module's path is not its name (``flows/asha.py``
is ``dagsel.flows.asha``). Not cosmic-ray: all modules have one command and one limit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutate_draw import FOLDERS, Mutant, draw
from mutate_same import SAME
from mutate_tests import Chosen, Touched, run

ROOT = Path(__file__).parents[2]
#: The folder's tests, and of the folders that use it those that start no cluster.
TESTS = {
    "planning": ("planning/", "flows/", "simulation/"),
    "dispatch": ("dispatch/", "driver/", "simulation/"),
    "flows": ("flows/", "simulation/", "attack/test_wrong_arguments.py"),
    "storage": (
        "storage/",
        "study/",
        "history/",
        "driver/",
        "attack/test_links.py",
        "attack/test_data_sets.py",
    ),
    "history": ("history/", "driver/", "simulation/", "views/"),
    "driver": ("driver/", "simulation/", "study/"),
}
START_S = 60.0
WALL_LIMIT = 6.0  # times the CPU time: a mutant may wait for ever, and the machine be busy
MEMORY_BYTES = 6 * 2**30
ENOUGH = 0.9
#: Imported once for all processes; dagsel is not among them.
COMMON = (
    "numpy",
    "pandas",
    "scipy.stats",
    "torch",
    "zarr",
    "optuna",
    "distributed",
    "sklearn.datasets",
)


def in_process(copy: Path, limit_s: float, work: Callable[[], int]) -> str:
    """Do work in a process of its own; return "0" or another exit status, or "hung"."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            output = os.open(copy / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(copy)
            os.environ["PYTHONPATH"] = str(copy)
            os.environ["TMPDIR"] = str(copy / "tmp")
            os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(copy / "drawn")
            tempfile.tempdir = None
            sys.path[:] = [str(copy), *(path for path in sys.path if path != str(ROOT))]
            sys.dont_write_bytecode = True
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    end = time.monotonic() + WALL_LIMIT * limit_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        late = time.monotonic() > end
        if done or late:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it started, too
    if not done:
        os.waitpid(child, 0)
        return "hung"
    is_over = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    return "hung" if is_over else str(os.waitstatus_to_exitcode(status))


class Bench:
    """A copy of the code, in which mutants are put and tests run."""

    def __init__(self, folder: Path) -> None:
        self.copy = folder
        for name in ("dagsel", "tests", "docs", "examples"):
            old = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=old)
        for name in ("pyproject.toml", "README.md", "constraints.txt", "Makefile"):
            shutil.copy(ROOT / name, folder)
        (folder / "tmp").mkdir()

    def renew(self, kept: Path, only: list[str]) -> dict[str, Any]:
        """Return what each test touches and takes; run those files that have changed."""
        known = json.loads(kept.read_text()) if kept.exists() else {}
        for place in sorted({place for one in only for place in TESTS[one]}):
            path = ROOT / "tests" / place
            for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
                self._renew(file.relative_to(ROOT).as_posix(), known, kept)
        for folder in only:
            for file in sorted((ROOT / "dagsel" / folder).rglob("*.py")):
                if ">>> " in file.read_text():
                    name = f"dagsel/{file.relative_to(ROOT / 'dagsel').as_posix()}"
                    self._renew(name, known, kept)
        return {name: file for name, file in known.items() if (ROOT / name).exists()}

    def _renew(self, name: str, known: dict[str, Any], kept: Path) -> None:
        now = hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
        if known.get(name, {}).get("digest") != now:
            known[name] = {"digest": now, **self._touched(name)}
            kept.write_text(json.dumps(known))

    def _touched(self, name: str) -> dict[str, Any]:
        found = self.copy / "touched"
        found.unlink(missing_ok=True)

        def work() -> int:
            touched = Touched()
            status = run(self.copy, [name], touched)
            found.write_text(json.dumps({"tests": touched.tests, "failed": sorted(touched.failed)}))
            return status

        start = time.monotonic()
        status = in_process(self.copy, 900, work)
        if not found.exists():
            raise RuntimeError(f"{name}: {status}\n{(self.copy / 'output').read_text()[-3000:]}")
        print(f"{name}: status {status} after {time.monotonic() - start:.0f} s", flush=True)
        return json.loads(found.read_text())

    def choose(
        self, mutant: Mutant, known: dict[str, Any], most_s: float
    ) -> tuple[dict[str, float], set[str]]:
        """Return the tests in their order, with their CPU time, and those to leave out."""
        path = Path(mutant.file).with_suffix("")
        module = ".".join(("dagsel", *path.parts)).removesuffix(".__init__")
        words = [path.stem, *(word for word in path.stem.split("_") if len(word) > 4)]
        ranked, others = [], set()
        first, *rest = (f"tests/{place}" for place in TESTS[mutant.folder])
        # The examples of its docstrings are tests of its own.
        for place, starts in enumerate([(f"dagsel/{mutant.file}", first), *zip(rest, strict=True)]):
            for file, about in known.items():
                if not file.startswith(starts):
                    continue
                is_first = place == 0 and any(word in file for word in words)
                for name, (seconds, touched) in about["tests"].items():
                    wanted = f"{module}:{mutant.scope}"
                    calls = any(
                        one == wanted or (not mutant.scope and one.startswith(f"{module}:"))
                        for one in touched
                    )
                    if calls and name not in about["failed"]:
                        ranked.append((place, not is_first, seconds, name))
                    else:
                        others.add(name)
        ranked.sort()
        taken_s, order = 0.0, {}
        for _, _, seconds, name in ranked:
            if taken_s + seconds <= most_s:
                taken_s += seconds
                order[name] = seconds
            else:
                others.add(name)
        return order, others

    def test(self, mutant: Mutant, known: dict[str, Any], most_s: float) -> dict[str, Any]:
        """Put a mutant in, run its tests, take it out again."""
        order, others = self.choose(mutant, known, most_s)
        files = sorted({name.split("::")[0] for name in order})
        failed = self.copy / "failed"
        failed.unlink(missing_ok=True)
        path = self.copy / "dagsel" / mutant.file
        right = path.read_bytes()
        start = time.monotonic()
        if not order:
            status = "5"
        else:
            path.write_bytes(mutant.put_in(right))
            limit_s = START_S + sum(order.values())
            chosen = Chosen(order, others, failed)
            status = in_process(self.copy, limit_s, lambda: run(self.copy, files, chosen))
            path.write_bytes(right)
        if status == "4":
            output = (self.copy / "output").read_text()
            if "while loading conftest" not in output:
                raise RuntimeError(f"{mutant}: the tests could not run:\n{output}")
        by = failed.read_text() if status != "0" and failed.exists() else f"status {status}"
        if status == "hung" and not by.startswith("in "):
            status = "1"  # it failed before
        return {
            "name": mutant.name,
            "code": digest(mutant),
            "folder": mutant.folder,
            "at": f"{mutant.file}:{mutant.line}",
            "text": mutant.text,
            "mutation": mutant.mutation,
            "changed": mutant.changed(right),
            "outcome": {"0": "survived", "5": "survived", "hung": "hung"}.get(status, "killed"),
            "by": by,
            "n_tests": len(order),
            "seconds": round(time.monotonic() - start, 1),
        }


def digest(mutant: Mutant) -> str:
    """Return the checksum of the file that is changed."""
    return hashlib.sha256((ROOT / "dagsel" / mutant.file).read_bytes()).hexdigest()


def is_same(mutant: Mutant) -> bool:
    """Whether somebody has shown that the program is the same one."""
    return any((mutant.file, mutant.text, mutant.mutation) == same[:3] for same in SAME)


def table(drawn: list[Mutant], outcomes: dict[str, dict[str, Any]]) -> float:
    """Print what came of the mutants; return the share that was killed."""
    rows: dict[str, Counter[str]] = {}
    left = []
    for mutant in drawn:
        about = outcomes.get(mutant.name)
        outcome = about["outcome"] if about else "not tried"
        if outcome == "survived" and is_same(mutant):
            outcome = "same"
        for folder in (mutant.folder, "all"):
            rows.setdefault(folder, Counter())[outcome] += 1
        if about and outcome == "survived":
            left.append(f"{mutant.file}:{mutant.line}: {about['changed']}\n    {mutant.mutation}")
    heads = ("killed", "hung", "same", "survived", "not tried")
    print(f"{'folder':10} {'drawn':>9}" + "".join(f"{head:>10}" for head in heads))
    share = 1.0
    for folder in [*(folder for folder in FOLDERS if folder in rows), "all"]:
        row = rows.get(folder, Counter())
        n_open = row["killed"] + row["survived"]
        share = row["killed"] / n_open if n_open else 1.0
        line = "".join(f"{row[head]:10}" for head in heads)
        print(f"{folder:10} {sum(row.values()):9}{line}   {share:6.1%} killed")
    print("\n".join(left))
    return share


def main() -> int:
    """Try a sample of mutants; return 1 where less than ``ENOUGH`` of them are killed."""
    parser = argparse.ArgumentParser(description="How many mutants do the tests see?")
    cache = Path(tempfile.gettempdir()) / "dagsel-mutants"
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=FOLDERS, default=[*FOLDERS])
    parser.add_argument("--out", type=Path, default=cache / "outcomes.jsonl")
    parser.add_argument("--touched", type=Path, default=cache / "touched.json")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests, at most")
    parser.add_argument("--again", action="store_true", help="try those again that survived")
    parser.add_argument("--for-s", type=float, default=1e9, help="stop after so many seconds")
    options = parser.parse_args()
    end = time.monotonic() + options.for_s
    drawn = [m for m in draw(ROOT / "dagsel", options.n, options.seed) if m.folder in options.only]
    for place in (options.out, options.touched):
        place.parent.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    if options.out.exists():
        lines = map(json.loads, options.out.read_text().splitlines())
        outcomes = {about["name"]: about for about in lines}
        codes = {m.name: digest(m) for m in drawn}
        outcomes = {n: a for n, a in outcomes.items() if a["code"] == codes.get(n)}
    todo = [m for m in drawn if m.name not in outcomes]
    if options.again:
        todo += [
            m
            for m in drawn
            if outcomes.get(m.name, {}).get("outcome") == "survived" and not is_same(m)
        ]
    if todo:
        for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[threads] = "1"  # a process with threads is not forked safely
        for name in COMMON:
            importlib.import_module(name)
        assert "dagsel" not in sys.modules
        with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
            bench = Bench(Path(folder))
            known = bench.renew(options.touched, options.only)
            for mutant in todo:
                if time.monotonic() > end:
                    break
                about = bench.test(mutant, known, options.seconds)
                outcomes[mutant.name] = about
                out.write(json.dumps(about) + "\n")
                out.flush()
                print(f"{about['outcome']:9} {about['seconds']:6} s  {about['at']}", flush=True)
    return int(table(drawn, outcomes) < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
