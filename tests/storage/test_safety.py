"""What a stranger hands over runs no code, reaches nothing outside, costs no memory; secrets stay.

Whatever stands in a run_dir or a data set is read as JSON or as plain numbers of a declared size.
"""

from __future__ import annotations

import ast
import http.server
import io
import json
import logging
import os
import pickle
import pickletools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import dagsel.storage
from dagsel.errors import (
    CheckpointCorruptError,
    DagselError,
    DatasetFormatError,
    RunDirError,
    ShardCorruptError,
)
from dagsel.state import State
from dagsel.storage import CheckpointStore, Journal, RunDir, ShardedDataset
from dagsel.storage.files import Folder

HUGE = 10**15


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[bytes]:
    """Bytes that tell on whoever unpickles them."""
    mark = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb works"
    mark.rmdir()
    yield pickle.dumps(Bomb(mark))
    assert not mark.exists(), "a stranger's code has run"


def data_set(path: Path) -> ShardedDataset:
    return ShardedDataset.write(path, {"x": np.zeros((40, 8)), "y": np.arange(40)}, n_shards=2)


def run_dir(path: Path) -> RunDir:
    run = RunDir(path)
    run.claim("3f9a", {"study": "digits"})
    run.journal.append([{"kind": "asked"}])
    run.states.save(1, 1, 0, b"a state", {})
    run.write_best({"trial": 1})
    return run


def use_run(path: Path) -> None:
    """Read all that there is to read."""
    run = RunDir(path)
    for act in (run.about, run.journal.read, lambda: run.lock("3f9a").release()):
        act()
    for trial in run.states.trials():
        for place in run.states.list(trial):
            _ = State(run.states.load(trial, *place)[0]).header


def use_data(path: Path) -> None:
    data = ShardedDataset.open(path)
    for index in range(data.n_shards):
        data.shard(index)
        data.validation_shard(index)
    data.verify()


@pytest.mark.parametrize(
    "name", ["run.json", "journal.jsonl", "lock.json", "states/*/*.json", "states/*/*.safetensors"]
)
def test_a_pickle_in_a_run_is_refused(tmp_path: Path, bomb: bytes, name: str) -> None:
    run_dir(tmp_path / "run")
    (tmp_path / "run/lock.json").touch()
    (path,) = (tmp_path / "run").glob(name)
    path.write_bytes(bomb + b"\n")
    if name != "lock.json":
        (tmp_path / "run/lock.json").unlink()
    with pytest.raises(DagselError, match=path.name):
        use_run(tmp_path / "run")


def test_a_pickle_that_is_named_as_a_state_is_refused(tmp_path: Path, bomb: bytes) -> None:
    run_dir(tmp_path / "run").states.save(1, 1, 0, bomb, {})
    with pytest.raises(CheckpointCorruptError, match="no state"):
        use_run(tmp_path / "run")


def test_a_pickle_in_a_data_set_is_refused(tmp_path: Path, bomb: bytes) -> None:
    data_set(tmp_path / "a.zarr")
    for path in [p for p in (tmp_path / "a.zarr").rglob("*") if p.is_file()]:
        if path.name == "zarr.json" and path.parent.name not in ("x", "y"):
            continue  # of a group, for other readers; nothing of ours looks at it
        whole = path.read_bytes()
        path.write_bytes(bomb)
        with pytest.raises((DatasetFormatError, ShardCorruptError)):
            use_data(tmp_path / "a.zarr")
        path.write_bytes(whole)
    use_data(tmp_path / "a.zarr")


def test_other_files_beside_ours_are_never_opened(tmp_path: Path, bomb: bytes) -> None:
    run_dir(tmp_path / "run").states.save(1, 1, 0, State.pack({}, {}).buffer, {})
    data_set(tmp_path / "a.zarr")
    for folder in [p for p in tmp_path.rglob("*") if p.is_dir()]:
        for name in ("state.pkl", "state.pt", "study.pickle", "__init__.py", "sitecustomize.py"):
            (folder / name).write_bytes(bomb)
    use_run(tmp_path / "run")
    use_data(tmp_path / "a.zarr")


@pytest.mark.parametrize(
    "codec", [{"name": "numcodecs.pickle"}, {"id": "pickle"}, {"name": "python", "code": "1"}]
)
def test_codecs_that_run_code_are_not_looked_at(tmp_path: Path, codec: dict[str, Any]) -> None:
    data = data_set(tmp_path / "a.zarr")
    path = next((tmp_path / "a.zarr").rglob("x/zarr.json"))
    body = json.loads(path.read_text())
    body["codecs"] = [codec]
    path.write_text(json.dumps(body))
    for index in range(data.n_shards):
        assert ShardedDataset.open(data.url).shard(index)["x"].shape == (16, 8)
    with pytest.raises(ShardCorruptError, match="zarr.json"):
        data.verify()


@pytest.mark.parametrize("dtype", ["|O", "object", "O8", "<V8", [["a", "|O"]]])
def test_dtypes_that_hold_objects_are_refused(tmp_path: Path, dtype: Any) -> None:
    with_manifest(tmp_path, lambda body: body["arrays"][0].update(dtype=dtype))
    with pytest.raises(DatasetFormatError, match="cannot be stored"):
        ShardedDataset.open(tmp_path / "a.zarr")


def with_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data_set(folder / "a.zarr")
    path = folder / "a.zarr/dagsel.json"
    body = json.loads(path.read_text())
    del body["crc32c"]
    change(body)
    path.write_text(json.dumps({**body, "version": 1}))  # version 1 has no checksum


@pytest.mark.parametrize("name", ["../../etc", "/etc", "data-0123456789abcdef/../..", "", ".."])
def test_keys_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda body: body.update(folder=name),
        lambda body: body["arrays"][0].update(name=name),
    ]
    for number, change in enumerate(changes):
        with_manifest(tmp_path / str(number), change)
        with pytest.raises(DatasetFormatError, match=r"no folder|array's name"):
            ShardedDataset.open(tmp_path / str(number) / "a.zarr")
    store = CheckpointStore(tmp_path / "states")
    store.save(1, 0, 0, b"a state", {})
    (path,) = (tmp_path / "states").rglob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "blob": name}))
    with pytest.raises(CheckpointCorruptError, match="json: it does not describe"):
        store.load(1, 0, 0)


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20, f"{peak:,} bytes for a few bytes of input"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(n_train=HUGE),
        lambda body: body["arrays"][0].update(shape=[HUGE]),
        lambda body: body["arrays"][0].update(shape=[10**5] * 3),
        lambda body: body["arrays"][0].update(train_chunk=HUGE),
        lambda body: body["arrays"][0].update(dtype="|S999999999"),
    ],
)
def test_absurd_sizes_in_a_manifest_cost_nothing(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], little_memory: None
) -> None:
    with_manifest(tmp_path, change)
    with pytest.raises((DatasetFormatError, ShardCorruptError)):
        ShardedDataset.open(tmp_path / "a.zarr").shard(0)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
    ],
)
def test_absurd_sizes_in_a_state_cost_nothing(entry: dict[str, Any], little_memory: None) -> None:
    header = json.dumps({"__metadata__": {"dagsel": "{}"}, "w": entry}).encode()
    for n_header in (len(header), HUGE, 2**64 - 1):
        with pytest.raises(CheckpointCorruptError, match="no state"):
            _ = State(n_header.to_bytes(8, "little") + header + bytes(4)).header


def test_absurd_sizes_in_a_record_or_a_journal_cost_nothing(
    tmp_path: Path, little_memory: None
) -> None:
    run = run_dir(tmp_path)
    (path,) = tmp_path.glob("states/*/*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1, "n_bytes": HUGE}))
    with pytest.raises(CheckpointCorruptError, match="7 bytes instead of"):
        run.states.load(1, 1, 0)
    names = {f"journal/{HUGE:08d}.jsonl": b""}
    for name, data in names.items():
        Folder(tmp_path).replace(name, data)
    with pytest.raises(RunDirError, match="journal/00000001.jsonl.*missing"):
        run.journal.read()


def test_nothing_that_is_kept_is_a_pickle(tmp_path: Path) -> None:
    run_dir(tmp_path / "run")
    data_set(tmp_path / "a.zarr")
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        with pytest.raises(ValueError):
            pickletools.dis(path.read_bytes(), out=io.StringIO())


def test_storage_imports_nothing_that_unpickles() -> None:
    banned = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch", "numcodecs"}
    modules = [*Path(dagsel.storage.__file__).parent.rglob("*.py")]
    assert {"files.py", "journal.py", "zarr_shard.py"} <= {path.name for path in modules}
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned & {name.partition(".")[0] for name in names}, path.name
            if isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle", path.name


SECRETS = ("Secret4711", "Key0815", "Token1234")


def clean(text: str) -> None:
    for secret in SECRETS:
        assert secret not in text


def test_credentials_reach_nothing_that_is_kept_shown_or_logged(
    s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "dagsel")
    server = {"client_kwargs": s3_options["client_kwargs"]}
    url = "s3://Key0815:Secret4711@bucket/secret-run"
    run = RunDir(url, server)
    run.claim("3f9a", {"study": "digits"})
    run.states.save(1, 1, 0, b"a state", {})
    with run.lock("3f9a") as lock:
        run.journal.append([{"kind": "asked"}])
        shown = [repr(lock), lock.holder, run, run.url, run.states, run.states.url, run.journal]
        for text in shown:
            clean(str(text))
        fs = fsspec.filesystem("s3", **s3_options)
        kept = fs.find("bucket/secret-run")
        assert len(kept) == 5
        for name in kept:
            clean(name + fs.cat_file(name).decode("latin-1"))
        acts: list[Callable[[], Any]] = [
            lambda: run.lock("other"),
            lambda: run.claim("77aa", {}),
            lambda: run.states.load(1, 9, 9),
            lambda: RunDir("s3://Key0815:Secret4711@no-bucket/x", server).claim("3f9a", {}),
            lambda: RunDir("s3://Key0815:Secret4711@no-bucket/x", server).lock("3f9a"),
            lambda: Journal("s3://Key0815:Secret4711@no-bucket/x", server).append([{}]),
            lambda: RunDir("odd://Key0815:Secret4711@bucket/x"),
        ]
        for act in acts:
            with pytest.raises(DagselError) as error:
                act()
            clean(told(error.value))
    clean(caplog.text)


def told(error: BaseException | None) -> str:
    """All that a traceback shows of an error and of those that it came from."""
    if error is None:
        return ""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return f"{error!r} {error} {error.args} {told(behind)}"


class Forbidden(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(403)

    do_PUT = do_HEAD = do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def test_a_token_in_a_url_stays_out_of_the_errors_of_the_file_system() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forbidden) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/run?token=Token1234&sig=Secret4711"
            run = RunDir(url)
            for act in (run.about, run.journal.read, lambda: run.states.load(1, 1, 0)):
                with pytest.raises((OSError, DagselError)) as error:
                    act()
                clean(told(error.value))
                assert f":{server.server_port}/run" in str(error.value)
            assert Forbidden.asked[0] == "/run/run.json?token=Token1234&sig=Secret4711"
            clean(repr(run) + repr(run.states) + repr(run.journal))
        finally:
            server.shutdown()
            thread.join()


def test_secrets_among_the_options_are_hidden_too() -> None:
    folder = Folder("s3://bucket/x", {"client_kwargs": {"aws_session_token": "Token1234"}})
    clean(folder.hide("denied for Token1234"))
