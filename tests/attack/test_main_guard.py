"""A script without its main guard: one error, few lines, the cure is the last one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import ClusterError
from dagsel.execution.cluster import check_cluster
from dagsel.execution.main_guard import check_main_guard, is_guarded

#: A search as a user writes it.
SEARCH = """\
import os
from pathlib import Path

import numpy as np
import optuna

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

if not os.path.exists("data"):
    ShardedDataset.write("data", {"x": np.arange(50)}, n_shards=2)


def search(**where):
    return dagsel.optimize(
        optuna.create_study(direction="maximize"),
        SyntheticWorkload(),
        "data",
        space=lambda trial: {"a": trial.suggest_float("a", 0, 1)},
        metric="value",
        flow=RandomSearch(max_epochs=1, n_trials=2),
        run_dir="run",
        **where,
    )


"""
#: The check alone, which takes less time to import.
SCRIPT = """\
import os

from dagsel.execution.main_guard import check_main_guard


def search():
    check_main_guard()
    print("taken")


"""
GUARD = 'if __name__ == "__main__":'
CURE = f"put it under  {GUARD}"


def run(*command: str, folder: Path, text: str | None = None) -> tuple[int, str, str]:
    """Run Python as a user does; return its exit status, and what it prints."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd()))},
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


REFUSED = {
    "in the open": "search()  # here\n",
    "in a function": "def main():\n    search()\n\n\nmain()  # here\n",
    "in a with": "with open(os.devnull):\n    search()  # here\n",
    "beside a guard": f"{GUARD}\n    print('begins')\n\nsearch()  # here\n",
    "under another question": "if len(os.environ) > 0:\n    search()  # here\n",
    "in a thread": (
        "from concurrent.futures import ThreadPoolExecutor\n\n"
        "with ThreadPoolExecutor() as pool:\n    error = pool.submit(search).exception()  # here\n"
        "raise error\n"
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_script_without_the_guard_ends_at_once_with_the_cure(how: str, tmp_path: Path) -> None:
    script = SCRIPT + REFUSED[how]
    (tmp_path / "study.py").write_text(script)
    status, out, err = run("study.py", folder=tmp_path)
    lines = err.splitlines()
    assert status == 1
    assert out.replace("begins\n", "") == ""
    assert lines[-1].startswith("dagsel.errors.ClusterError: dagsel starts worker processes, which")
    assert lines[-1].endswith(CURE)
    (asked,) = (n for n, line in enumerate(script.splitlines(), 1) if line.endswith("# here"))
    assert f"study.py again and must not run its line {asked}:" in lines[-1]
    assert sum(line.startswith("Traceback") for line in lines) == 1
    assert len(lines) < 16  # the frames of the script's own functions among them


@pytest.mark.parametrize("where", ["", "cluster='cuda'"])
def test_a_search_without_the_guard_writes_nothing(where: str, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(f"{SEARCH}search({where})\n")
    status, _, err = run("study.py", folder=tmp_path)
    lines = err.splitlines()
    assert status == 1
    assert lines[-1].startswith("dagsel.errors.ClusterError: dagsel starts worker processes, which")
    assert lines[-1].endswith(CURE)
    assert sum(line.startswith("Traceback") for line in lines) == 1
    assert len(lines) <= 16
    assert not (tmp_path / "run").exists()


def test_a_search_on_a_cluster_elsewhere_needs_no_guard(tmp_path: Path) -> None:
    dask = "import dask\n\ndask.config.set({'distributed.comm.timeouts.connect': '0.2 s'})\n"
    (tmp_path / "study.py").write_text(f"{SEARCH}{dask}search(client='tcp://127.0.0.1:9')\n")
    status, _, err = run("study.py", folder=tmp_path)
    assert status == 1
    assert "no scheduler at tcp://127.0.0.1:9" in err.splitlines()[-1]


def test_a_run_that_has_ended_is_read_without_the_guard(tmp_path: Path) -> None:
    runs = Path(__file__).parents[1] / "data" / "runs_of_163b1ee"
    shutil.copytree(runs / "asha-ended", tmp_path / "run")
    read = (
        f"import sys\n\nsys.path.insert(0, {str(runs)!r})\nimport searches\n\nimport dagsel\n\n"
        "parts = {'workload': searches.synthetic(), 'space': searches.space}\n"
        f"run = dagsel.resume('run', **parts, data={str(runs / 'data')!r})\n"
        "print(run.record.finished)\n"
    )
    (tmp_path / "read.py").write_text(read)
    status, out, err = run("read.py", folder=tmp_path)
    assert (status, out) == (0, "True\n"), err


def test_a_module_without_the_guard_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(SCRIPT + "search()\n")
    (tmp_path / "main.py").write_text("import study\n")
    for command, name in ((["-m", "study"], "study.py"), (["main.py"], "main.py")):
        status, _, err = run(*command, folder=tmp_path)
        assert status == 1
        assert f"which import {name} again" in err.splitlines()[-1]
        assert err.splitlines()[-1].endswith(CURE)


TAKEN = {
    "a guard": f"{GUARD}\n    search()\n",
    "a guard the other way round": "if '__main__' == __name__:\n    search()\n",
    "a guard and a function": f"def main():\n    search()\n\n\n{GUARD}\n    main()\n",
    "a guard within": f"if os.name:\n  {GUARD}\n    with open(os.devnull):\n      search()\n",
    "an else": "if __name__ != '__main__':\n    pass\nelse:\n    search()\n",
    "an early end": "if __name__ != '__main__':\n    raise SystemExit\nsearch()\n",
    "a question for the process": (
        "import multiprocessing\n\nif multiprocessing.parent_process() is None:\n    search()\n"
    ),
    "a guard in the function": f"def main():\n    {GUARD}\n        search()\n\n\nmain()\n",
    "workers that are forked": (
        "import dask\n\nwith dask.config.set("
        "{'distributed.worker.multiprocessing-method': 'fork'}):\n    search()\n"
    ),
    "a thread": f"import threading\n\n{GUARD}\n    threading.Thread(target=search).start()\n",
}  # fmt: skip


@pytest.mark.parametrize("how", TAKEN)
def test_a_script_with_a_guard_is_not_refused(how: str, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(SCRIPT + TAKEN[how])
    status, out, err = run("study.py", folder=tmp_path)
    assert (status, out) == (0, "taken\n"), err


def test_what_no_worker_imports_needs_no_guard(tmp_path: Path) -> None:
    script = SCRIPT + "search()\n"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(script)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(script)
    ways: list[tuple[tuple[str, ...], str | None]] = [
        (("-c", script), None),
        (("-",), script),
        (("-m", "package"), None),
        (("-m", "code", "-q"), f"exec({script!r})\n"),
        (("-c", "import runpy; runpy.run_path('folder/__main__.py')\n"), None),
    ]
    for command, text in ways:
        status, out, err = run(*command, folder=tmp_path, text=text)
        assert status == 0, (command, err)
        assert "taken" in out, (command, err)


@pytest.mark.alone
@pytest.mark.parametrize("command", [(), ("-",), ("-c", SEARCH + "search()\nprint('done')\n")])
def test_a_search_may_be_piped_in_or_given_as_text(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    # Python would import the file "<stdin>" in each worker process.
    status, out, err = run(*command, folder=tmp_path, text=SEARCH + "search()\nprint('done')\n")
    assert (status, out) == (0, "done\n"), err


def test_a_worker_that_imports_the_script_is_refused_with_the_cure(tmp_path: Path) -> None:
    """The second net: a script whose text does not tell, as a thread of it searches."""
    (tmp_path / "study.py").write_text(SEARCH + "search()\n")
    child = f"""
        import multiprocessing, runpy
        import numpy as np
        from dagsel.storage import ShardedDataset
        ShardedDataset.write("data", {{"x": np.arange(50)}}, n_shards=2)
        multiprocessing.current_process()._inheriting = True
        runpy.run_path({str(tmp_path / "study.py")!r}, run_name="__mp_main__")
    """
    status, _, err = run("-c", textwrap.dedent(child), folder=tmp_path)
    assert status == 1
    assert err.splitlines()[-1].startswith("dagsel.errors.ClusterError: a worker process imports")
    assert err.splitlines()[-1].endswith(CURE)


# ---- what the text of a script tells


calls = st.sampled_from(["search()", "with a:\n  search()", "try:\n  search()\nfinally:\n  b"])
others = st.sampled_from(["x = 1", "if x:\n  y = 2", "def f():\n  return 3", "class A:\n  x = 0"])


def line_of(source: str) -> int:
    return next(n for n, line in enumerate(source.splitlines(), 1) if "search()" in line)


@given(st.lists(others), calls, st.lists(others))
def test_a_guard_makes_the_difference(before: list[str], call: str, after: list[str]) -> None:
    bare = "\n".join([*before, call, *after])
    assert not is_guarded(bare, [line_of(bare)])
    inside = "\n".join([*before, GUARD, textwrap.indent(call, "    "), *after])
    assert is_guarded(inside, [line_of(inside)])
    beside = "\n".join([GUARD, "    pass", *before, call, *after])
    assert not is_guarded(beside, [line_of(beside)])


@given(st.text(), st.integers(-3, 9))
def test_a_text_that_is_no_python_is_not_refused(source: str, line: int) -> None:
    assert is_guarded(source, [line]) in (True, False)


def _told() -> str:
    try:
        check_cluster()
    except ClusterError as error:
        return str(error)
    return ""


def test_a_process_of_a_pool_starts_no_workers() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "ProcessPoolExecutor" in pool.apply(_told)


def test_the_main_threads_frames_are_read_without_a_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection within `sys._current_frames` may wait for ever for the lock that it holds."""
    read, seen = sys._current_frames, []

    def current_frames() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return read()

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    check_main_guard()
    assert seen == []  # in the main thread itself nobody needs it
    thread = threading.Thread(target=check_main_guard)
    thread.start()
    thread.join()
    assert seen == [False]
    assert gc.isenabled()
