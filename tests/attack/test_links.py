"""Nothing is written or deleted through a link; what dagsel did not write is not deleted."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches

import dagsel
from dagsel.errors import (
    CheckpointCorruptError,
    CheckpointError,
    DagselError,
    DatasetFormatError,
    LinkError,
    RunDirError,
)
from dagsel.profiling import Profile
from dagsel.storage import CheckpointStore, RunDir, ShardedDataset
from dagsel.storage.datasets.profiles import write_profile
from dagsel.storage.files import Folder

RUNS = Path(searches.__file__).parent
ARRAYS = {"x": np.arange(40.0).reshape(20, 2)}


def run_with(folder: Path) -> RunDir:
    run = RunDir(folder)
    run.claim("3f9a", {"study": "digits"})
    run.journal.append([{"kind": "asked"}])
    for epoch in (1, 2):
        run.states.save(1, epoch, 0, b"a state", {})
    run.states.save(1, 3, 0, b"a part", {}, partial=True)
    run.states.keep_check(1, 1, 1, 0, partial=False)
    run.write_best({"trial": 1})
    return run


def everything(folder: Path) -> dict[str, Any]:
    """What a folder and all below it hold."""
    found = {}
    for place, folders, names in os.walk(folder):
        for name in folders + names:
            path = Path(place, name)
            there = str(path.relative_to(folder))
            found[there] = path.readlink() if path.is_symlink() else path.is_dir() or (
                path.read_bytes(), path.stat().st_mode,
            )  # fmt: skip
    return found


def put_link(at: Path, target: Path) -> None:
    """Put a link where something is, and that at the link's target."""
    shutil.move(at, target)
    at.symlink_to(target)


def act_on(run: RunDir) -> list[Callable[[], object]]:
    """Return all that writes and deletes in a run's folder."""
    states = run.states
    return [
        lambda: states.save(1, 2, 0, b"another", {}),
        lambda: states.save_first(1, 4, 0, b"the next", {}),
        lambda: states.save(1, 3, 0, b"whole", {}),
        lambda: states.keep_check(1, 2, 2, 0, partial=False),
        lambda: states.drop_checks(1),
        lambda: states.delete(1, 1, 0),
        lambda: states.drop(1),
        lambda: run.journal.append([{"kind": "told"}]),
        lambda: run.write_best({"trial": 2}),
        lambda: run.claim("77aa", {}),
        lambda: run.lock("3f9a").release(),
        lambda: Folder(run.url).remove_file("best.json"),
    ]


LINKED = ["states", "states/trial-000001", "states/trial-000001/*-000002-*.json",
          "states/trial-000001/*-000002-*.safetensors", "states/trial-000001/check-*.json",
          "journal.jsonl", "best.json", "run.json"]  # fmt: skip


@pytest.mark.parametrize("place", LINKED)
def test_nothing_behind_a_link_changes(tmp_path: Path, place: str) -> None:
    run = run_with(tmp_path / "run")
    (at,) = (tmp_path / "run").glob(place)
    (tmp_path / "elsewhere").mkdir()
    put_link(at, tmp_path / "elsewhere" / at.name)
    (tmp_path / "elsewhere" / "notes.txt").write_text("mine")
    before = everything(tmp_path / "elsewhere")
    for act in act_on(run):
        with suppress(DagselError):
            act()
        assert everything(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("place", ["states", "states/trial-000001", "journal.jsonl"])
def test_a_run_with_a_link_says_so(tmp_path: Path, place: str) -> None:
    run = run_with(tmp_path / "run")
    put_link(tmp_path / "run" / place, tmp_path / "elsewhere")
    acts = {
        "states": lambda: run.lock("3f9a"),
        "states/trial-000001": lambda: run.states.save(1, 2, 0, b"x", {}),
        "journal.jsonl": lambda: run.journal.append([{}]),
    }
    with pytest.raises(DagselError, match=rf"{place} is a symbolic link.*let the whole folder"):
        acts[place]()


def test_a_run_dir_that_is_a_link_is_as_good_as_any(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large disk")
    run = run_with(tmp_path / "run")
    with run.lock("3f9a"):
        run.states.drop(1)
        run.journal.append([{"kind": "told"}])
    assert run.states.trials() == ()
    assert sorted(path.name for path in (tmp_path / "large disk").iterdir()) == [
        "best.json", "journal.jsonl", "run.json", "states",
    ]  # fmt: skip


def test_resume_deletes_nothing_outside_the_run(tmp_path: Path) -> None:
    """A planted `states` used to lead the resume of a run that has ended to another's files."""
    shutil.copytree(RUNS / "torch-ended", tmp_path / "run")
    other = run_with(tmp_path / "other")
    shutil.rmtree(tmp_path / "run/states")
    (tmp_path / "run/states").symlink_to(tmp_path / "other/states")
    other.states.save(0, 1, 0, b"of another run", {})
    before = everything(tmp_path / "other")
    with pytest.raises(LinkError, match="states is a symbolic link"):
        dagsel.resume(
            str(tmp_path / "run"),
            workload=searches.trained(),
            space=searches.space,
            data=str(RUNS / "data"),
        )
    assert everything(tmp_path / "other") == before


def test_a_second_name_of_the_journal_keeps_what_it_names(tmp_path: Path) -> None:
    # Such as that of a snapshot made with `cp -al`; or of a file that someone wants to change.
    run = run_with(tmp_path / "run")
    for tail in (b"", b'{"crc32c":"00'):
        journal = tmp_path / "run/journal.jsonl"
        journal.write_bytes(journal.read_bytes() + tail)
        os.link(journal, tmp_path / "snapshot")
        kept = (tmp_path / "snapshot").read_bytes()
        n_records = len(run.journal.read())
        RunDir(run.url).journal.append([{"kind": "told"}])
        assert (tmp_path / "snapshot").read_bytes() == kept
        assert len(RunDir(run.url).journal.read()) == n_records + 1
        (tmp_path / "snapshot").unlink()


URLS = ["local", "memory", "s3"]


@pytest.fixture(params=URLS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    match request.param:
        case "s3":
            return f"s3://bucket/links-{tmp_path.name}", request.getfixturevalue("s3_options")
        case "memory":
            return f"memory://links-{tmp_path.name}", {}
    return str(tmp_path / "links"), {}


FOREIGN = ["notes.txt", "epoch-1.json", "epoch-000001-position-000000.txt", "check-1.txt",
           "check-000001.json.bak", "epoch-000001-position-000000.xyz.safetensors",
           "sub/epoch-000001-position-000000.json", "data.tmp"]  # fmt: skip
LEFT = ["epoch-000009-position-000000.json.0123abcd.tmp",
        "epoch-000009-position-000000.0123abcd.safetensors.0123abcd.tmp"]  # fmt: skip


def test_drop_removes_what_dagsel_wrote_and_no_more(place: tuple[str, dict[str, Any]]) -> None:
    folder = Folder(*place)
    for trial in (1, 2):
        store = CheckpointStore(folder)
        store.save(trial, 1, 0, b"a state", {})
        store.save(trial, 2, 0, b"a part", {}, partial=True)
        store.keep_check(trial, 1, 1, 0, partial=False)
    for name in (*FOREIGN, *LEFT):
        folder.replace(f"trial-000001/{name}", b"x")
    for trial in (1, 2):
        store.drop(trial)
    assert folder.names("trial-000001") == sorted({name.split("/")[0] for name in FOREIGN})
    assert folder.read("trial-000001/sub/epoch-000001-position-000000.json") == b"x"
    assert folder.names("trial-000002") == []
    assert folder.names() == ["trial-000001"]


def test_a_data_set_that_is_replaced_loses_what_dagsel_wrote_and_no_more(
    place: tuple[str, dict[str, Any]],
) -> None:
    url, options = place
    about: dict[str, Any] = {"n_shards": 2, "storage_options": options}
    data = ShardedDataset.write(url, ARRAYS, **about)
    write_profile(data, "resnet", b"{}")
    folder, old = data.folder, data.manifest.folder
    foreign = [f"{old}/notes.txt", f"{old}/train/00000/x/c/0/notes", "data-00000000/notes.txt"]
    for key in foreign:
        folder.replace(key, b"mine")
    new = ShardedDataset.write(url, ARRAYS, overwrite=True, **about)
    left = [f"{old}/{name}" for name in folder.names(old)]
    assert left == [f"{old}/notes.txt", f"{old}/train"]
    assert folder.names(f"{old}/train/00000/x") == ["c"]
    assert [folder.read(key) for key in foreign] == [b"mine"] * 3
    for key in foreign[:2]:
        folder.remove_file(key)
    assert folder.names(f"{old}/validation") == []
    new.verify()


def test_a_data_sets_folder_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "a.zarr", ARRAYS, n_shards=2)
    other = ShardedDataset.write(tmp_path / "other.zarr", ARRAYS, n_shards=2)
    put_link(tmp_path / "a.zarr" / data.manifest.folder, tmp_path / "linked")
    inside = tmp_path / "other.zarr" / other.manifest.folder / "train/00000"
    (tmp_path / "outside").mkdir()
    put_link(inside / "x", tmp_path / "outside" / "x")
    before = everything(tmp_path / "linked"), everything(tmp_path / "outside")
    with pytest.raises(LinkError):
        write_profile(data, "resnet", b"{}")
    for name in ("a.zarr", "other.zarr"):
        ShardedDataset.write(tmp_path / name, ARRAYS, n_shards=1, overwrite=True).verify()
    assert (everything(tmp_path / "linked"), everything(tmp_path / "outside")) == before


@pytest.mark.parametrize("name", ["..", "../run", "a/../../b", "/etc", "1", -1, True, 1.5])
def test_a_name_leads_nowhere_else(tmp_path: Path, name: Any) -> None:
    run = run_with(tmp_path / "run")
    before = everything(tmp_path)
    for act in (run.states.drop, run.states.drop_checks, lambda n: run.states.delete(n, 1, 0)):
        with pytest.raises(CheckpointError, match="non-negative integer"):
            act(name)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("run", ["../../outside", "/outside", "..", "*", "a/b", "a'b", ""])
def test_a_planted_identifier_names_nothing_that_observers_write_or_remove(
    tmp_path: Path, run: str
) -> None:
    shutil.copytree(RUNS / "asha-killed", tmp_path / "run")
    about = tmp_path / "run/run.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "run": run}))
    parts: Any = {"workload": searches.synthetic(), "space": searches.space}
    before = everything(tmp_path)
    for call in (dagsel.load, dagsel.attach, lambda it: dagsel.resume(it, **parts)):
        with pytest.raises(RunDirError, match="run.json is damaged"):
            call(tmp_path / "run")
    assert everything(tmp_path) == before


def test_a_store_of_a_run_knows_its_place_on_a_worker_too(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run")
    put_link(tmp_path / "run/states", tmp_path / "elsewhere")
    there: RunDir = pickle.loads(pickle.dumps(run))
    with pytest.raises(LinkError):
        there.states.save(1, 1, 0, b"x", {})
    with pytest.raises(LinkError):
        pickle.loads(pickle.dumps(run.states)).save(1, 1, 0, b"x", {})


@pytest.mark.parametrize("checksum", ["/../../../out", "/../out", "x", "", 7, None])
def test_a_planted_record_writes_nowhere_else(tmp_path: Path, checksum: Any) -> None:
    run = run_with(tmp_path / "run")
    record = tmp_path / "run/states/trial-000001/epoch-000002-position-000000.json"
    planted = {**json.loads(record.read_text()), "crc32c": checksum, "version": 1}  # without a seal
    record.write_text(json.dumps(planted))
    (tmp_path / "run/states/trial-000001/check-000002.").mkdir()
    before = everything(tmp_path)
    with pytest.raises(CheckpointCorruptError, match="does not describe a state|expected string"):
        run.states.keep_check(1, 2, 2, 0, partial=False)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, "9" * 10**5])
def test_a_record_that_cannot_be_read_is_damaged(tmp_path: Path, text: str) -> None:
    run = run_with(tmp_path / "run")
    (tmp_path / "run/states/trial-000001/epoch-000002-position-000000.json").write_text(text)
    with pytest.raises(CheckpointCorruptError, match="position-000000.json"):
        run.states.load(1, 2, 0)


@pytest.mark.parametrize("depth", [600, 900])
def test_a_run_json_that_is_too_deep_is_named(tmp_path: Path, depth: int) -> None:
    shutil.copytree(RUNS / "asha-ended", tmp_path / "run")
    about = tmp_path / "run/run.json"
    text = json.dumps({**json.loads(about.read_text()), "flow_config": "deep"})
    about.write_text(text.replace('"deep"', '{"a":' * depth + "1" + "}" * depth))
    with pytest.raises(RunDirError, match=r"run.json (cannot be read|is no JSON)"):
        dagsel.load(tmp_path / "run")


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, "9" * 10**5])
def test_a_profile_that_cannot_be_read_is_damaged(tmp_path: Path, text: str) -> None:
    data = ShardedDataset.write(tmp_path / "a.zarr", ARRAYS, n_shards=2)
    write_profile(data, "resnet", text.encode())
    with pytest.raises(DatasetFormatError, match="profile of 'resnet' is damaged"):
        Profile.load(data, "resnet")


def test_no_file_of_the_drivers_user_is_copied_into_a_run(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run")
    (tmp_path / "id_rsa").write_text("private")
    (blob,) = (tmp_path / "run/states/trial-000001").glob("*-000002-*.safetensors")
    blob.unlink()
    blob.symlink_to(tmp_path / "id_rsa")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        run.states.keep_check(1, 2, 2, 0, partial=False)
    copies = (tmp_path / "run").rglob("check-*.safetensors")
    assert [path.read_bytes() for path in copies] == [b"a state"]
