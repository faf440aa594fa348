"""A run directory is this run's, whole, and free for another run until something has begun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attacked
import dask
import optuna
import pytest
from distributed import Client, LocalCluster

import dagsel
from dagsel.errors import ClusterError, RunDirError
from dagsel.storage import RunDir, ShardedDataset
from tests.conftest import Optimize


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    options: dict[str, Any] = {"processes": False, "n_workers": 1, "threads_per_worker": 1}
    with LocalCluster(**options, dashboard_address=":0") as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    return attacked.write_data(tmp_path_factory.mktemp("data") / "data.zarr")


# ---- a failed call does not use its folder up


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """A scheduler that is not there is soon given up."""
    with dask.config.set({"distributed.comm.timeouts.connect": "0.2s"}):
        yield


def test_a_call_that_fails_before_anything_begins_leaves_its_folder_free(
    data: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    for _ in range(2):
        with pytest.raises(ClusterError):
            attacked.begin("synthetic", data, tmp_path / "run", "tcp://127.0.0.1:9")
    attacked.begin("synthetic", data, tmp_path / "run", client)
    with pytest.raises(RunDirError, match="already; go on with it by dagsel.resume"):
        attacked.begin("synthetic", data, tmp_path / "run", client)
    # A replay is a run, too.
    parts: dict[str, Any] = {"workload": attacked.synthetic_workload(), "space": attacked.space}
    again = {**parts, "data": data, "into": str(tmp_path / "again")}
    with pytest.raises(ClusterError):
        dagsel.replay(str(tmp_path / "run"), "tcp://127.0.0.1:9", **again)
    assert dagsel.replay(str(tmp_path / "run"), client, **again).record.notes == []


def test_a_search_whose_journal_is_deleted_ends_its_trials_and_promises_no_resume(
    optimize: Optimize, client: Client, run_dir: str
) -> None:
    study = optuna.create_study(direction="maximize")

    def delete(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        (Path(run_dir) / "journal.jsonl").unlink(missing_ok=True)

    with pytest.raises(RunDirError, match="was deleted while the search ran") as error:
        optimize(study=study, client=client, callbacks=[delete])
    assert "the run is kept" not in str(error.value)
    assert not hasattr(error.value, "__notes__")
    assert not study.get_trials(states=[optuna.trial.TrialState.RUNNING])


def test_a_run_of_which_nothing_has_begun_begins_when_it_is_resumed(
    data: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError):
        attacked.begin("synthetic", data, tmp_path / "run", "tcp://127.0.0.1:9")
    run = RunDir(str(tmp_path / "run")).about()["run"]
    with pytest.raises(RunDirError, match="nothing of the run has begun"):
        attacked.repeat("synthetic", data, tmp_path / "run", tmp_path / "again", client)
    assert attacked.go_on("synthetic", data, tmp_path / "run", client).trials
    assert RunDir(str(tmp_path / "run")).about()["run"] == run


def test_a_driver_that_is_killed_before_its_first_entry_leaves_its_folder_free(
    data: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    script = f"""
        import os, signal, sys
        import attacked
        from dagsel.session import Session
        from dagsel.storage import ShardedDataset

        if __name__ == "__main__":
            Session.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            data = ShardedDataset.open({data.url!r})
            attacked.begin("synthetic", data, {str(tmp_path / "run")!r}, None)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    paths = [str(Path(attacked.__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(tmp_path / "script.py")]
    driver = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    assert {"run.json", "lock.json"} <= {path.name for path in (tmp_path / "run").iterdir()}
    attacked.begin("synthetic", data, tmp_path / "run", client)
    assert attacked.go_on("synthetic", data, tmp_path / "run", client).trials


def test_of_two_drivers_that_claim_at_once_one_wins(tmp_path: Path) -> None:
    folder = RunDir(str(tmp_path / "run"))
    folder.claim("old", {})
    ready, won, lost = threading.Barrier(4), list[str](), list[str]()

    def drive(run: str) -> None:
        mine = RunDir(str(tmp_path / "run"))
        ready.wait()
        try:
            with mine.lock(run):
                mine.claim(run, {})
                mine.journal.append([{"is": run}])
                won.append(run)
        except RunDirError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=drive, args=(f"run{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1, (won, lost)
    assert len(lost) == 3
    assert folder.about()["run"] == won[0]
    assert folder.journal.read() == [{"is": won[0]}]


# ---- run.json, journal and states belong together


@pytest.fixture(scope="module")
def halted(data: ShardedDataset, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halted") / "run"
    attacked.begin("torch", data, folder, client, 14)
    assert RunDir(str(folder)).states.trials()
    return folder


@pytest.fixture(scope="module")
def ended(data: ShardedDataset, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended") / "run"
    attacked.begin("torch", data, folder, client)
    return folder


def change(folder: Path, **changes: Any) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=1))


def keep_lines(n: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = folder / "journal.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: n if n >= 0 else len(lines) + n]))

    return cut


def lose_journal(folder: Path) -> None:
    (folder / "journal.jsonl").unlink()


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "deterministic": (
        lambda folder: change(folder, deterministic=False),
        "run.json is not the one",
    ),
    "seed": (lambda folder: change(folder, seed=1), "run.json is not the one"),
    "n_shards": (lambda folder: change(folder, n_shards=2), "run.json is not the one"),
    "no journal": (lose_journal, "journal of .* is missing or empty: it does not know trial"),
    "empty journal": (keep_lines(0), "journal of .* is missing or empty: it does not know trial"),
    "shortened journal": (keep_lines(2), "lacks its end: it does not know trial"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("which", ["halted", "ended"])
def test_files_that_do_not_belong_together_are_refused(
    which: str,
    name: str,
    data: ShardedDataset,
    client: Client,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    spoil, text = REFUSED[name]
    shutil.copytree(request.getfixturevalue(which), tmp_path / "run")
    spoil(tmp_path / "run")
    before = attacked.contents(tmp_path / "run")
    with pytest.raises(RunDirError, match=text) as error:
        attacked.go_on("torch", data, tmp_path / "run", client)
    assert "restore" in str(error.value)
    with pytest.raises(RunDirError, match=text):
        attacked.repeat("torch", data, tmp_path / "run", tmp_path / "again", client)
    with pytest.raises(RunDirError, match="already; go on with it"):
        attacked.begin("torch", data, tmp_path / "run", client)
    assert attacked.contents(tmp_path / "run") == before


def test_a_run_that_has_ended_does_not_go_on_without_its_end(
    ended: Path, data: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    shutil.copytree(ended, tmp_path / "run")
    keep_lines(-2)(tmp_path / "run")  # the last two: it ends, and its workers are released
    with pytest.raises(RunDirError, match=r"there is a best\.json"):
        attacked.go_on("torch", data, tmp_path / "run", client)


def test_another_runs_journal_is_refused(
    ended: Path, halted: Path, data: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    shutil.copytree(ended, tmp_path / "run")
    shutil.copyfile(halted / "journal.jsonl", tmp_path / "run/journal.jsonl")
    with pytest.raises(RunDirError, match=r"run\.json is not the one"):
        attacked.go_on("torch", data, tmp_path / "run", client)


def test_a_journal_that_is_cut_anywhere_is_refused_or_the_search_comes_to_the_same(
    data: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    # Of 73 records; the third trial has begun in none of the first 24, so that most cuts heal.
    attacked.begin("synthetic", data, tmp_path / "halted", client, 24)
    shutil.copytree(tmp_path / "halted", tmp_path / "whole")
    undisturbed = attacked.go_on("synthetic", data, tmp_path / "whole", client)
    n_lines = len((tmp_path / "halted/journal.jsonl").read_bytes().splitlines())
    ends = set[str]()
    for n_left in range(0, n_lines, 3):
        folder = tmp_path / f"cut-{n_left}"
        shutil.copytree(tmp_path / "halted", folder)
        keep_lines(n_left)(folder)
        try:
            assert attacked.go_on("synthetic", data, folder, client) == undisturbed, n_left
            ends.add("healed")
        except RunDirError:
            ends.add("refused")
    assert ends == {"healed", "refused"}


def test_a_trial_whose_states_are_lost_is_trained_again(
    halted: Path, data: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    shutil.copytree(halted, tmp_path / "whole")
    shutil.copytree(halted, tmp_path / "lost")
    for trial in (tmp_path / "lost/states").iterdir():
        shutil.rmtree(trial)
    undisturbed = attacked.go_on("torch", data, tmp_path / "whole", client)
    assert attacked.go_on("torch", data, tmp_path / "lost", client) == undisturbed


def test_best_json_is_made_again(
    ended: Path, data: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    whole = (ended / "best.json").read_bytes()
    for name, text in {"missing": None, "damaged": b'{"tri', "another": b"{}"}.items():
        shutil.copytree(ended, tmp_path / name)
        path = tmp_path / name / "best.json"
        path.unlink() if text is None else path.write_bytes(text)
        attacked.go_on("torch", data, tmp_path / name, client)
        assert path.read_bytes() == whole
