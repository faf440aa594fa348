"""A URL that someone has written into a ``run.json`` opens no file and asks no host in silence."""

from __future__ import annotations

import contextlib
import http.server
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from distributed import Client
from lost_scheduler import space, workload
from served import served

import dagsel
import dagsel.run
from dagsel.errors import DatasetError, RunDirError, StudyStorageError
from dagsel.flows import RandomSearch
from dagsel.history.settings import Settings
from dagsel.storage import ShardedDataset
from dagsel.storage.urls import hosts_in, unknown_hosts
from dagsel.study import open_study


class Listening(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    """Give the address of a server that must hear nothing."""
    Listening.asked.clear()
    with served(Listening) as address:
        yield address


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    url = str(tmp_path_factory.mktemp("data") / "d.zarr")
    return ShardedDataset.write(url, {"x": np.arange(64)}, n_shards=2)


def plant(run_dir: str, there: ShardedDataset, client: Client, **planted: Any) -> None:
    """Leave an interrupted run whose ``run.json`` says what it should not."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(dagsel.run, "Settings", lambda **told: Settings(**{**told, **planted}))
        dagsel.optimize(
            optuna.create_study(study_name="s", direction="maximize"),
            workload(),
            there,
            space=space,
            flow=RandomSearch(max_epochs=1, n_trials=3),
            metric="value",
            client=client,
            run_dir=run_dir,
            callbacks=[interrupt],
        )


@pytest.mark.parametrize("call", [dagsel.resume, dagsel.replay])
@pytest.mark.parametrize("form", ["{}", "simplecache::{}", "filecache::zip://a::{}"])
def test_a_data_set_elsewhere_has_to_be_named(
    call: Any,
    form: str,
    host: str,
    data: ShardedDataset,
    client: Client,
    run_dir: str,
    tmp_path: Path,
) -> None:
    plant(run_dir, data, client, data=form.format(f"http://{host}/d.zarr"))
    before = outside(tmp_path)
    with pytest.raises(RunDirError, match=f"names the data set .*{host}/d.zarr.* give data=") as e:
        call(run_dir, client, workload=workload(), space=space)
    assert e.match(f"DAGSEL_KNOWN_HOSTS='http://{host}'")
    assert Listening.asked == []
    assert outside(tmp_path) == before
    call(run_dir, client, workload=workload(), space=space, data=data)
    assert Listening.asked == []


def test_a_host_that_the_user_knows_is_asked(
    host: str, data: ShardedDataset, client: Client, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(run_dir, data, client, data=f"http://{host}/d.zarr")
    monkeypatch.setenv("DAGSEL_KNOWN_HOSTS", f"s3://bucket, http://{host}")
    with pytest.raises(DatasetError, match="nothing is at http"):
        dagsel.resume(run_dir, client, workload=workload(), space=space)
    assert Listening.asked != []


def outside(folder: Path) -> list[Path]:
    """List what is there beside runs, whose workers may still end a unit."""
    return sorted(path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != "run")


def test_a_planted_study_makes_no_file(
    data: ShardedDataset, client: Client, run_dir: str, tmp_path: Path
) -> None:
    target = tmp_path / "made.db"
    plant(run_dir, data, client, home=f"sqlite:///{target}")
    before = outside(tmp_path)
    for call in (
        lambda: dagsel.resume(run_dir, client, workload=workload(), space=space),
        lambda: dagsel.resume(
            run_dir, client, workload=workload(), space=space, study=f"sqlite:///{target}"
        ),
    ):
        with pytest.raises(StudyStorageError, match=r"made.db: there is no such file; give study="):
            call()
    assert outside(tmp_path) == before
    dagsel.replay(run_dir, client, workload=workload(), space=space, into=str(tmp_path / "again"))
    assert not target.exists()
    fresh = optuna.create_study(study_name="s", direction="maximize")
    run = dagsel.resume(run_dir, client, workload=workload(), space=space, study=fresh)
    assert run.study is fresh


HOMES = [
    ("sqlite:////{tmp}/none.db", "there is no such file"),
    ("sqlite:///file:{tmp}/none.db?uri=true&mode=rwc", "there is no such file"),
    ("sqlite:///{tmp}/theirs.db", "no such table: studies"),
    ("sqlite:///file:{tmp}/theirs.db?uri=true", "no such table: studies"),
    ("sqlite:///{tmp}/text", "file is not a database"),
    ("sqlite:///{tmp}", "there is no such file"),
    ("sqlite://", "there is no such file"),
    ("sqlite+aiosqlite:///{tmp}/theirs.db", "nobody else does"),
    ("journal://{tmp}/none.log", "there is no such file"),
    ("journal://{tmp}/text", "JSONDecodeError"),
    ("journal:///dev/zero", "there is no such file"),
    ("postgresql://evil.example/db", "DAGSEL_KNOWN_HOSTS='postgresql://evil.example'"),
    ("postgresql+psycopg2://bucket/db?host=evil.example", "postgresql://bucket .*evil.example"),
    ("mysql+pymysql:///db", "mysql://localhost"),
    ("postgresql://me:***@known.example/db", "credentials are not kept"),
    ("postgresql://me@known.example/db?token=x", "credentials are not kept"),
    ("none://GrpcStorageProxy", "is in a GrpcStorageProxy; give study="),
    ("s3://bucket/study.db", "cannot be opened: NoSuchModuleError"),
    ("no url", "cannot be opened: ArgumentError"),
    ("http://evil.example/", "nobody else does"),
]


@pytest.mark.parametrize(("home", "text"), HOMES)
def test_no_planted_home_is_opened(
    home: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSEL_KNOWN_HOSTS", "postgresql://known.example")
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as theirs, theirs:
        theirs.execute("CREATE TABLE notes (text)")
    (tmp_path / "text").write_text("a diary\n" * 500)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StudyStorageError, match=text):
        open_study("s", "maximize", home.format(tmp=tmp_path), "s3://bucket/run")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "home",
    ["sqlite:///file:{tmp}/st\nudy.db?uri=true", "sqlite:///file:{tmp}/study.db\t?uri=true",
     "sqlite:///FILE:{tmp}/study.db?uri=true", "sqlite:///x:study.db?uri=true"],
)  # fmt: skip
def test_the_file_that_is_looked_into_is_the_one_that_sqlite_opens(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"FILE:{tmp_path}").mkdir(parents=True)
    optuna.create_study(study_name="s", direction="maximize", storage="sqlite:///study.db")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StudyStorageError, match="there is no such file"):
        open_study("s", "maximize", home.format(tmp=tmp_path), "s3://bucket/run")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_known_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSEL_KNOWN_HOSTS", "postgresql://known.example:5432")
    asked: list[Any] = []

    def load_study(**told: Any) -> optuna.Study:
        asked.append(told)
        raise ConnectionError("not at home")

    monkeypatch.setattr(optuna, "load_study", load_study)
    for home, run_dir in (
        ("postgresql://me@known.example/db", "/runs/1"),
        ("postgresql://other.example/db", None),  # the user's own words
    ):
        with pytest.raises(StudyStorageError, match="cannot be opened: ConnectionError: not at"):
            open_study("s", "maximize", home, run_dir)
        assert asked.pop() == {"study_name": "s", "storage": home}


URLS = [
    ("/data/d.zarr", []),
    ("file:///data/d.zarr", []),
    ("memory://d.zarr", []),
    ("simplecache::/data/d.zarr", []),
    ("zip://d.zarr::/data/d.zip", []),
    ("s3://bucket/d.zarr", []),
    ("s3a://Bucket/d.zarr", []),
    ("simplecache::s3://bucket/d.zarr", []),
    ("s3://other/d.zarr", ["s3://other"]),
    ("s3://bucket@other/d.zarr", ["s3://other"]),
    ("http://evil:80/@bucket/d.zarr", ["http://evil:80"]),
    ("https://bucket/d.zarr", ["http://bucket"]),
    ("simplecache::https://evil.example/d.zarr", ["http://evil.example"]),
    ("zip://d.zarr::gs://evil/d.zip", ["gs://evil"]),
    ("reference::/data/ref.json", ["reference://"]),
    ("reference://", ["reference://"]),
    ("simplecache://", ["simplecache://"]),
    ("github://evil:repo@main/d.zarr", ["github://main"]),
    ("sftp://evil/d.zarr", ["sftp://evil"]),
]


@pytest.mark.parametrize(("url", "unknown"), URLS)
def test_a_url_reaches_these_hosts(url: str, unknown: list[str]) -> None:
    assert unknown_hosts(hosts_in(url), "s3://bucket/runs/1") == unknown
