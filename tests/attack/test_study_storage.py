"""A study's storage that is gone, damaged or without the study ends in an error of dagsel's.

It names the study, its place and ``study=``. Nothing is created in the place of what is lost, and
the run goes on once the storage is back.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from distributed import Client
from lost_scheduler import space, workload
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import dagsel
from dagsel.errors import DagselError, StudyStorageError
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.study.home import guarded

N_TRIALS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    url = str(tmp_path_factory.mktemp("data") / "d.zarr")
    return ShardedDataset.write(url, {"x": np.arange(64)}, n_shards=2)


@pytest.fixture(params=["sqlite", "journal", "sqlite uri"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """Give the file of a study, and its storage."""
    path = tmp_path / "study.db"
    if request.param == "journal":
        return path, JournalStorage(JournalFileBackend(str(path)))
    if request.param == "sqlite uri":
        return path, f"sqlite:///file:{path}?uri=true&mode=rwc"
    return path, f"sqlite:///{path}"


@pytest.fixture
def begin(
    data: ShardedDataset, run_dir: str, client: Client, stored: Any
) -> Callable[..., dagsel.Run]:
    def call(callback: Any, **changes: Any) -> dagsel.Run:
        study = optuna.create_study(study_name="s", direction="maximize", storage=stored[1])
        flow = RandomSearch(max_epochs=2, n_trials=N_TRIALS)
        arguments: dict[str, Any] = {"space": space, "flow": flow}
        arguments |= {"metric": "value", "run_dir": run_dir}
        arguments |= {"client": client, "callbacks": [callback], **changes}
        return dagsel.optimize(study, workload(), data, **arguments)

    return call


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def delete(path: Path, storage: Any) -> None:
    optuna.delete_study(study_name="s", storage=storage)


def damage(path: Path, storage: Any) -> None:
    path.write_bytes(b"no storage at all\n" * 300)


def remove(path: Path, storage: Any) -> None:
    path.unlink()


LOSSES: dict[str, tuple[Any, str]] = {
    "gone": (remove, "there is no such file"),
    "damaged": (damage, "cannot be opened: (DatabaseError|JSONDecodeError): "),
    "without the study": (delete, "no study of that name is there|does not hold the study"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_resume_names_the_study_and_its_place(
    loss: str, begin: Any, stored: Any, run_dir: str, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        begin(interrupt)
    act, text = LOSSES[loss]
    path, _ = stored
    shutil.copy(path, tmp_path / "copy")
    act(*stored)
    before = sorted(tmp_path.iterdir()), Path(run_dir, "journal.jsonl").read_bytes()
    with pytest.raises(StudyStorageError, match=rf"^study 's' at .*{path}") as error:
        dagsel.resume(run_dir, client, workload=workload(), space=space)
    assert error.match(text)
    assert error.match(r"; give study=optuna.load_study\(study_name='s', storage=...\), or its URL")
    assert (sorted(tmp_path.iterdir()), Path(run_dir, "journal.jsonl").read_bytes()) == before
    shutil.copy(tmp_path / "copy", path)
    run = dagsel.resume(run_dir, client, workload=workload(), space=space)
    assert [trial.state.name for trial in run.study.trials] == ["COMPLETE"] * N_TRIALS


@pytest.mark.parametrize("loss", ["gone", "without the study"])
def test_a_study_that_is_lost_before_the_run_is_named(
    loss: str, begin: Any, stored: Any, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, storage = stored
    create = optuna.create_study

    def lost(**told: Any) -> optuna.Study:
        study = create(**told)
        LOSSES[loss][0](path, storage)
        return study

    monkeypatch.setattr(optuna, "create_study", lost)
    with pytest.raises(StudyStorageError, match=rf"^study 's' at .*{path}.* cannot be read") as e:
        begin(lambda *_: None)
    assert "the run is kept" not in str(e.value)
    assert not Path(run_dir).exists()


def test_a_database_that_another_program_holds_is_told_with_how_to_wait_longer(
    tmp_path: Path,
) -> None:
    path = tmp_path / "held.db"
    study = optuna.create_study(storage=f"sqlite:///{path}?timeout=0.01")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        with pytest.raises(StudyStorageError, match=r"is locked; wait .*\?timeout=60', or give"):
            guarded(study).ask()


@pytest.mark.parametrize("loss", ["gone", "without the study"])
def test_a_study_that_is_lost_in_the_middle_leaves_a_run_that_goes_on(
    loss: str, begin: Any, stored: Any, run_dir: str, client: Client, tmp_path: Path
) -> None:
    path, storage = stored

    def lose(*_: Any) -> None:
        if not (tmp_path / "copy").exists():
            shutil.copy(path, tmp_path / "copy")
            LOSSES[loss][0](path, storage)

    with pytest.raises(StudyStorageError, match=rf"^study 's' at .*{path}") as error:
        begin(lose)
    assert error.match("cannot be read or written: .*; bring its storage back, or give another")
    assert str(error.value).endswith(
        f"; the run is kept: go on with  dagsel.resume({run_dir!r}, workload=..., space=...)"
    )
    assert path.exists() == (loss != "gone")
    shutil.copy(tmp_path / "copy", path)
    run = dagsel.resume(run_dir, client, workload=workload(), space=space)
    assert [trial.state.name for trial in run.study.trials] == ["COMPLETE"] * N_TRIALS


@pytest.mark.parametrize("stored", ["sqlite"], indirect=True)
def test_a_url_or_a_study_of_the_users_takes_the_place_of_a_lost_one(
    begin: Any, stored: Any, run_dir: str, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        begin(interrupt)
    stored[0].rename(tmp_path / "moved.db")
    moved = f"sqlite:///{tmp_path / 'moved.db'}"
    with pytest.raises(DagselError, match="there is no such file"):
        dagsel.resume(run_dir, client, workload=workload(), space=space, study=f"{moved}x")
    run = dagsel.resume(run_dir, client, workload=workload(), space=space, study=moved)
    assert [trial.state.name for trial in run.study.trials] == ["COMPLETE"] * N_TRIALS
    assert not stored[0].exists()
