"""A study is opened again where it lived; a password is never written down."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalRedisBackend

from dagsel.errors import StudyStorageError
from dagsel.study.home import home_of, open_study


@pytest.mark.parametrize("kind", ["url", "rdb", "journal"])
def test_a_study_on_disk_is_opened_again_from_any_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage: Any = {
        "url": lambda: "sqlite:///study.db",
        "rdb": lambda: RDBStorage("sqlite:///study.db"),
        "journal": lambda: JournalStorage(JournalFileBackend("study.log")),
    }[kind]()
    study = optuna.create_study(study_name="s", storage=storage, direction="maximize")
    study.add_trial(optuna.trial.create_trial(value=1.0))
    home = home_of(study)
    assert home is not None
    assert str(tmp_path) in home
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    again = open_study("s", "maximize", home)
    assert [trial.value for trial in again.trials] == [1.0]
    assert home_of(again) == home


@pytest.mark.parametrize("storage", [None, InMemoryStorage(), "sqlite://", "sqlite:///:memory:"])
def test_a_study_in_memory_begins_anew(storage: Any) -> None:
    study = optuna.create_study(study_name="s", storage=storage, direction="maximize")
    home = home_of(study)
    assert home is None
    again = open_study("s", "maximize", home)
    assert (again.study_name, again.direction.name, again.trials) == ("s", "MAXIMIZE", [])


def test_a_study_is_opened_whose_writer_was_killed_in_the_middle(tmp_path: Path) -> None:
    """SQLite's journal then says how to take back what is half written; that needs to write."""
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/live.db", study_name="killed")
    study.set_user_attr("kept", 1)
    add = "INSERT INTO study_user_attributes (study_id, key, value_json) VALUES (1, ?, ?)"
    with closing(sqlite3.connect(tmp_path / "live.db", isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = 1")  # what is changed is on the disk at once
        database.execute("BEGIN")
        database.execute("UPDATE studies SET study_name = 'half'")
        database.executemany(add, [(f"half {k}", '"x"' * 100) for k in range(200)])
        for end in ("", "-journal"):  # what a SIGKILL now would leave
            shutil.copy(tmp_path / f"live.db{end}", tmp_path / f"left.db{end}")
        database.execute("ROLLBACK")
    again = open_study("killed", "minimize", f"sqlite:///{tmp_path}/left.db")
    assert again.user_attrs == {"kept": 1}


def test_a_password_stays_out_and_a_user_name_may_stay(tmp_path: Path) -> None:
    storage = RDBStorage(f"sqlite:///{tmp_path}/s.db")
    study = optuna.create_study(study_name="s", storage=storage)
    urls = {
        "mysql+pymysql://me:secret@host/db": "mysql+pymysql://me:***@host/db",
        "postgresql://me@host:5432/db": "postgresql://me@host:5432/db",
    }
    for url, home in urls.items():
        storage.url = url
        assert home_of(study) == home


def test_a_journal_that_is_no_file_has_no_url() -> None:
    backend = JournalRedisBackend.__new__(JournalRedisBackend)
    storage = JournalStorage.__new__(JournalStorage)
    storage._backend = backend
    home = home_of(SimpleNamespace(_storage=storage))  # type: ignore[arg-type]
    assert home == "none://JournalStorage"
    with pytest.raises(StudyStorageError, match="study 's' is in a JournalStorage; give study="):
        open_study("s", "maximize", home)
