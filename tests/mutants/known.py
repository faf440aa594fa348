"""Small faults that no test saw once, put in one by one: each must be seen now.

The faults are in `known_faults.py`.

::

    python tests/mutants/known.py              # all of them
    python tests/mutants/known.py asha pbt     # those whose name contains one of the words

Each fault is put into a copy of the code, and its tests run there. A fault that they do not see, or
that cannot be put in any more because the code has changed, is an error.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from known_faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
FAILED = re.compile(r"^(?:FAILED|ERROR) (?:\S*/)?(.+?)(?: - .*)?$", re.MULTILINE)
LIMIT_S = 240  # of a processor: a fault may make the code go round for ever


def limit() -> None:
    """Let this process use a processor for so long, and no longer."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 10))


def try_out(fault: Fault) -> str:
    """Return the first test that fails with the fault; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("dagsel", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        fault.put_in(copy)
        tests = [f"tests/{test}" for test in fault.tests.split()]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": folder, "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, preexec_fn=limit, text=True
        )
        if done.returncode == -signal.SIGXCPU:
            return f"ended after {LIMIT_S} s"
        if done.returncode not in (0, 1):
            said = done.stdout + done.stderr
            raise RuntimeError(f"{fault.name}: the tests could not run:\n{said}")
        failed = FAILED.search(done.stdout)
        return failed[1] if failed else "" if done.returncode == 0 else "?"


def main(words: list[str]) -> int:
    """Try the faults whose name contains one of the words; return how many are not seen."""
    n_unseen = 0
    for fault in FAULTS:
        if words and not any(word in fault.name for word in words):
            continue
        start = time.monotonic()
        seen_by = try_out(fault)
        n_unseen += not seen_by
        seconds = time.monotonic() - start
        print(f"{'seen' if seen_by else 'NOT SEEN':8} {seconds:5.1f} s  {fault.name}", flush=True)
        if seen_by:
            print(f"{'':17} {seen_by}", flush=True)
    return n_unseen


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
