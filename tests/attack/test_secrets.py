"""No password, token or key of a URL or of options is written: to a file, a log or an error."""

from __future__ import annotations

import http.server
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import optuna
import pytest
import torch
from distributed import Client
from lost_scheduler import space, workload
from optuna.storages import RDBStorage
from served import served
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

import dagsel
from dagsel.errors import DatasetInputError, SearchError, StudyStorageError, WorkloadError
from dagsel.flows import RandomSearch
from dagsel.history.record import Record
from dagsel.observers import MLflow, SearchBegan
from dagsel.observers.observing import Observing
from dagsel.storage import ShardedDataset, WebDataset
from dagsel.storage.files import Folder
from dagsel.storage.urls import hide, secrets_in, without_credentials
from dagsel.study import StudyDriver, home_of, open_study
from tests.waiting import wait_until

SECRET = "Secret4711"


def with_url(url: str) -> optuna.Study:
    """Give a study whose storage says that it was opened with this URL."""
    storage = RDBStorage("sqlite://")
    study = optuna.create_study(study_name="s", storage=storage, direction="maximize")
    storage.url = url
    return study


HOMES = [
    "postgresql://me:Secret4711@host/db",
    "postgresql://me:Secret4711%20x@host/db",
    "postgresql://host/db?user=me&password=Secret4711",
    "postgresql://host/db?sslmode=require&sslpassword=Secret4711",
    "postgresql://host/db?options=-c%20token%3DSecret4711",
    "postgresql://host/db#password=Secret4711",
    "postgresql://host/db#Secret4711",
    "postgresql://host/db?sslmode=require#Secret4711",
    "mysql+pymysql://me@host/db?passwd=Secret4711",
    "mysql+pymysql://me@host/db?ssl_key=Secret4711",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3DSecret4711",
    "mssql://host/db?pwd=Secret4711",
    "sqlite:///file:/tmp/s.db?uri=true&password=Secret4711",
    "sqlite:////tmp/s.db?password=Secret4711",
    "sqlite:////tmp/s.db#password=Secret4711",
    "sqlite:///file:/tmp/s.db?mode=rw&uri=true&hexkey=Secret4711",
    "sqlite+pysqlcipher://:Secret4711@//tmp/s.db",
]


@pytest.mark.parametrize("url", HOMES)
def test_a_home_has_no_secret_and_says_that_one_is_missing(url: str) -> None:
    study = with_url(url)
    home = home_of(study)
    assert home is not None
    assert SECRET not in home
    assert "***" in home
    with pytest.raises(StudyStorageError, match="credentials are not kept.*give study=") as error:
        open_study("s", "maximize", home, "/runs/1")
    assert error.match(r"host|/tmp/s.db|mssql")


@pytest.mark.parametrize("url", HOMES)
def test_an_error_of_the_storage_shows_no_secret(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    study = with_url(url)
    driver = StudyDriver(study, space, "value")

    def fail(*_: Any, **__: Any) -> Any:
        raise OperationalError(
            "SELECT 1", {}, ConnectionError(f"cannot reach {url} {unquote(url)}")
        )

    monkeypatch.setattr(type(study._storage), "get_all_trials", fail)
    with pytest.raises(StudyStorageError, match="^study 's' at ") as error:
        driver.ask(1, "random")
    assert SECRET not in f"{error.value!r}"
    assert error.value.__suppress_context__
    monkeypatch.setattr(optuna, "load_study", fail)
    with pytest.raises(StudyStorageError, match="^study 's' at ") as error:
        open_study("s", "maximize", url)
    assert SECRET not in f"{error.value!r}"


PLAIN = [
    "postgresql://me@host:5432/db",
    "postgresql://host/db?sslmode=require&application_name=x",
    "sqlite:////tmp/s.db",
    "sqlite:////tmp/s#1.db",
    "sqlite:///file:/tmp/s.db?mode=rw&uri=true",
]


@pytest.mark.parametrize("url", PLAIN)
def test_a_url_without_secrets_is_kept_as_it_is(url: str) -> None:
    home = home_of(with_url(url))
    assert home is not None
    assert make_url(home) == make_url(url)


def test_a_uri_is_kept_with_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = optuna.create_study(
        study_name="s", direction="maximize", storage="sqlite:///file:s%20t.db?uri=true"
    )
    study.add_trial(optuna.trial.create_trial(value=1.0))
    home = home_of(study)
    assert home is not None
    assert home.startswith(f"sqlite:///file:{tmp_path}/s%")
    monkeypatch.chdir("/")
    assert open_study("s", "maximize", home, "/runs/1").best_value == 1.0
    for memory in ("sqlite:///file::memory:?uri=true", "sqlite:///file:x?mode=memory&uri=true"):
        assert home_of(with_url(memory)) is None


URLS = {
    "s3://me:Secret4711@bucket/d": "s3://bucket/d",
    "https://host/d?sig=Secret4711": "https://host/d",
    "https://host/d#token=Secret4711": "https://host/d",
    "https://host/d?a=b#Secret4711": "https://host/d",
    "https://host/d#Secret4711": "https://host/d",
    "s3://bucket/d#token=Secret4711": "s3://bucket/d",
    "s3://bucket/d#1": "s3://bucket/d#1",
    "simplecache::https://me:Secret4711@host/d?k=Secret4711": "simplecache::https://host/d",
    "https://me:pa::Secret4711@host/d": "https://host/d",
    "zip://a::https://host/d.zip?password=Secret4711": "zip://a::https://host/d.zip",
    "/a/b#c?d=e": "/a/b#c?d=e",
}


@pytest.mark.parametrize(("url", "shown"), URLS.items())
def test_a_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert without_credentials(url) == shown
    for text in (url, url.partition("#")[2], unquote(url)):
        assert SECRET not in hide(f"cannot open {text}", secrets_in(url))


def everything(folder: str | Path) -> str:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return "".join(f"{path} {path.read_bytes()!r}" for path in files)


def test_a_run_writes_no_secret(
    client: Client, run_dir: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"token": SECRET, "client_kwargs": {"endpoint_url": f"https://{SECRET}"}}
    written = ShardedDataset.write(
        str(tmp_path / "d.zarr"), {"x": np.arange(64)}, n_shards=2, storage_options=options
    )
    url = f"sqlite:///file:{tmp_path}/s.db?uri=true&password={SECRET}"
    study = optuna.create_study(study_name="s", direction="maximize", storage=url)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    shown: list[str] = []
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(KeyboardInterrupt) as stopped:
            dagsel.optimize(
                study,
                workload(),
                written,
                space=space,
                flow=RandomSearch(max_epochs=1, n_trials=3),
                metric="value",
                client=client,
                run_dir=run_dir,
                callbacks=[interrupt],
            )
        with pytest.raises(StudyStorageError, match="credentials are not kept") as refused:
            dagsel.resume(run_dir, client, workload=workload(), space=space)
        run = dagsel.resume(run_dir, client, workload=workload(), space=space, study=url)
    assert [trial.state.name for trial in run.study.trials] == ["COMPLETE"] * 3
    shown += ["".join(traceback.format_exception(e.value)) for e in (stopped, refused)]
    shown += [repr(run), run._repr_html_(), repr(run.run_dir), repr(written), caplog.text]
    shown += [everything(run_dir)]
    assert SECRET not in "".join(shown)


def test_options_of_a_folder_are_not_in_its_errors() -> None:
    folder = Folder("s3://bucket/x", {"client_kwargs": {"aws_session_token": SECRET}})
    assert SECRET not in repr(folder) + folder.url + folder.hide(f"denied for {SECRET}")
    endpoint, proxy = f"https://me:{SECRET}@minio", f"http://me:{SECRET}@proxy:3128"
    for options in ({"endpoint_url": endpoint}, {"config_kwargs": {"proxies": {"https": proxy}}}):
        told = Folder("s3://bucket/x", options).hide(f"no answer from {endpoint}/x by {proxy}")
        assert told.count("***") == 2
        assert "minio" in told


def test_a_tracker_shows_no_secret_of_its_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"https://me:{SECRET}@tracking.example"

    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError(f"API request to {uri}/api failed")

    monkeypatch.setattr("mlflow.MlflowClient.search_experiments", fail)
    with pytest.raises(SearchError, match="MLflow cannot use https://tracking.example: ") as error:
        MLflow(uri).check()
    assert SECRET not in str(error.value)
    tracker = MLflow(uri)
    monkeypatch.setattr(tracker, "search_began", fail)
    began, said = SearchBegan("r", "s", "value", "maximize", "runs/r"), "told no more: Connection"
    with caplog.at_level(logging.WARNING, logger="dagsel"):
        with Observing([tracker], began, Record("r")):
            pass
        wait_until(lambda: said in caplog.text, "what is said of the tracker")
    assert SECRET not in caplog.text


class Store(http.server.BaseHTTPRequestHandler):
    """Answers what the path says, such as ``/403/x.tar``; what it gives is no file of ours."""

    def do_GET(self) -> None:
        status = int(self.path[1:4])
        self.send_response(status)
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b"nothing")

    def do_HEAD(self) -> None:
        self.send_error(200)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def store() -> Iterator[str]:
    """Give the URL of a store, with a user and a password."""
    with served(Store) as address:
        yield f"http://me:{SECRET}@{address}"


@pytest.mark.parametrize(
    ("place", "sha256", "told"),
    [
        ("403", None, "cannot be read here: 403"),  # such as a signature that is out of date
        ("404", None, "cannot be read here: 404"),
        ("200", "0" * 64, "has changed"),
        ("200", None, "is no safetensors file"),
    ],
)
def test_a_bases_file_is_named_without_secrets(
    store: str, place: str, sha256: str | None, told: str
) -> None:
    # The error of a trial is kept in the run's folder, with its traceback.
    url = f"{store}/{place}/w.safetensors?sig={SECRET}%2Bx%3D#{SECRET}"
    base = dagsel.Base(lambda: torch.nn.Linear(2, 2), url, sha256=sha256)
    with pytest.raises(WorkloadError, match=f"file http://127.0.0.1.*/w.safetensors {told}") as e:
        base.load()
    assert SECRET not in "".join(traceback.format_exception(e.value))


@pytest.mark.parametrize("name", ["x.parquet", "x.tar"])
@pytest.mark.parametrize("form", ["403/{}", "404/{}", "200/{}", "403/{}?sig=Secret4711"])
def test_a_file_that_cannot_be_read_is_named_without_secrets(
    store: str, form: str, name: str, tmp_path: Path
) -> None:
    url = f"{store}/{form.format(name)}"
    with pytest.raises(DatasetInputError, match=f"http://127.0.0.1.*/{name}(;| cannot be)") as e:
        ShardedDataset.write(tmp_path / "d.zarr", url, n_shards=1)
    assert SECRET not in "".join(traceback.format_exception(e.value))


@pytest.mark.parametrize("read", [lambda url: url, WebDataset])
def test_a_file_of_no_known_kind_is_named_without_secrets(
    store: str, read: Any, tmp_path: Path
) -> None:
    source = read(f"{store}/200/x.parquet?sig={SECRET}")
    with pytest.raises(DatasetInputError, match="/x.parquet has no ") as error:
        ShardedDataset.write(tmp_path / "d.zarr", source, n_shards=1)
    assert SECRET not in "".join(traceback.format_exception(error.value))
