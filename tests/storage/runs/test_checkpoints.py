"""A stored state is the one that was saved in its place, or an error that names the damage."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dagsel.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from dagsel.storage import CheckpointStore, RunDir
from dagsel.storage.runs.checkpoints import Extent
from tests.storage.os_calls import os_calls


def load(store: CheckpointStore, *key: int, partial: bool = False) -> tuple[bytes, dict[str, Any]]:
    """Load as saved: the digest, which `save` did not get, is checked and left out."""
    blob, meta = store.load(*key, partial=partial)
    assert meta.pop("digest") == f"{google_crc32c.value(blob):08x}"
    return blob, meta


@pytest.fixture
def store(place: Any) -> CheckpointStore:
    return CheckpointStore(place.url, place.options)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_was_saved_is_loaded(store: CheckpointStore, kind: Callable[[bytes], Any]) -> None:
    store.save(3, 1, 2, kind(b"state"), {"loss": 0.5, "shards": [1, 2]})
    assert load(store, 3, 1, 2) == (b"state", {"loss": 0.5, "shards": [1, 2]})
    assert store.latest(3) == (1, 2)
    assert store.trials() == (3,)


def test_an_empty_state_and_a_large_one(store: CheckpointStore) -> None:
    large = np.random.default_rng(0).bytes(3_000_001)
    store.save(0, 0, 0, b"", {})
    store.save(0, 0, 1, np.frombuffer(large, "u1").data, {})
    assert load(store, 0, 0, 0) == (b"", {})
    assert load(store, 0, 0, 1)[0] == large


def test_nothing_there(store: CheckpointStore) -> None:
    assert (store.latest(1), store.list(1), store.trials()) == (None, (), ())
    with pytest.raises(CheckpointNotFoundError, match="trial-000001/epoch-000002-position-000003"):
        load(store, 1, 2, 3)
    store.delete(1, 2, 3)
    store.drop(1)


def test_an_object_store_is_asked_to_remove_only_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request takes it tens of milliseconds, in which the worker trains nothing."""
    asked: list[str] = []
    monkeypatch.setattr(MemoryFileSystem, "rm_file", lambda _, path: asked.append(path))
    store = CheckpointStore("memory://removals")
    store.save_first(1, 0, 0, b"state", {})
    assert asked == []
    store.save(1, 0, 1, b"half", {}, partial=True)
    store.save_first(1, 0, 1, b"whole", {})
    assert len(asked) == 2


def test_keys_sort_as_numbers_do(store: CheckpointStore) -> None:
    places = [(10, 0), (2, 11), (2, 9), (1, 1_234_567), (0, 0)]
    for place in places:
        store.save(1, *place, b"", {})
    assert store.list(1) == tuple(sorted(places))
    assert store.latest(1) == (10, 0)


def test_the_same_key_again_replaces(store: CheckpointStore, place: Any) -> None:
    store.save(1, 0, 0, b"old", {"n": 1})
    store.save(1, 0, 0, b"new", {"n": 2})
    assert load(store, 1, 0, 0) == (b"new", {"n": 2})
    store.save(1, 0, 0, b"new", {"n": 3})
    assert load(store, 1, 0, 0) == (b"new", {"n": 3})
    assert len(place.files()) == 2


def test_a_partial_state_stands_beside_and_goes_with_the_complete_one(
    store: CheckpointStore, place: Any
) -> None:
    store.save(1, 0, 4, b"half", {"at": 7}, partial=True)
    assert store.latest(1) is None
    assert store.list(1, partial=True) == ((0, 4),)
    with pytest.raises(CheckpointNotFoundError):
        load(store, 1, 0, 4)
    store.save(1, 0, 4, b"more", {"at": 9}, partial=True)
    assert load(store, 1, 0, 4, partial=True) == (b"more", {"at": 9})
    store.save(1, 0, 4, b"whole", {})
    assert load(store, 1, 0, 4) == (b"whole", {})
    with pytest.raises(CheckpointNotFoundError):
        load(store, 1, 0, 4, partial=True)
    assert len(place.files()) == 2


def test_what_was_scored_outlives_its_state(store: CheckpointStore, place: Any) -> None:
    store.save(1, 2, 4, b"half", {"at": 7}, partial=True)
    store.keep_check(1, 1, 2, 4, partial=True)
    store.save(1, 2, 4, b"more", {"at": 9}, partial=True)
    store.keep_check(1, 1, 2, 4, partial=True)  # again, after a crash: it is there
    store.save(1, 2, 4, b"whole", {})
    blob, meta = store.load_check(1, 1)
    assert (blob, meta["at"]) == (b"half", 7)
    store.keep_check(1, 2, 2, 4, partial=False)
    assert store.load_check(1, 2)[0] == b"whole"
    with pytest.raises(CheckpointNotFoundError):
        store.load_check(1, 1)
    assert len(place.files()) == 4
    with pytest.raises(CheckpointNotFoundError):
        store.keep_check(1, 3, 2, 5, partial=False)
    assert store.load_check(1, 2)[0] == b"whole"
    assert (store.list(1), store.list(1, partial=True)) == (((2, 4),), ())
    store.drop_checks(1)
    assert len(place.files()) == 2


def test_of_two_first_saves_the_first_one_counts(store: CheckpointStore, place: Any) -> None:
    store.save(1, 0, 4, b"half", {}, partial=True)
    one, two = (f"{google_crc32c.value(blob):08x}" for blob in (b"one", b"two"))
    kept = {"shard": 1, "digest": one}
    assert store.save_first(1, 0, 4, b"one", {"shard": 1}) == (one, kept)
    assert store.save_first(1, 0, 4, b"two", {"shard": 2}) == (two, kept)
    assert store.save_first(1, 0, 4, b"one", {"shard": 3}) == (one, kept)
    assert store.load(1, 0, 4) == (b"one", kept)
    assert len(place.files()) == 2


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@pytest.mark.parametrize("data", [b"", b"sta", b"stat\x00", None])
def test_a_damaged_first_save_is_replaced(tmp_path: Path, suffix: str, data: bytes | None) -> None:
    store = CheckpointStore(tmp_path)
    store.save_first(1, 0, 0, b"state", {"n": 1})
    damage(next(tmp_path.rglob(f"*.{suffix}")), data)
    digest, kept = store.save_first(1, 0, 0, b"again", {"n": 2})
    assert store.load(1, 0, 0) == (b"again", kept)
    assert kept == {"n": 2, "digest": digest}


@pytest.mark.parametrize("blobs", [(b"one", b"two"), (b"same", b"same")])
def test_two_attempts_that_race_agree_on_one(tmp_path: Path, blobs: tuple[bytes, bytes]) -> None:
    def race(store: CheckpointStore, n: int) -> tuple[list[dict[str, Any]], bool]:
        """Let the second one through before the n-th system call of the first."""
        ends: list[dict[str, Any]] = []
        n_left = n

        def operation() -> None:
            nonlocal n_left
            n_left -= 1
            if n_left == -1:
                ends.append(store.save_first(1, 0, 0, blobs[1], {"n": 2})[1])

        def counted(_: str, function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                operation()
                return function(*args, **kwargs)

            return call

        names = ("open", "write", "close", "link", "replace", "unlink", "mkdir")
        with os_calls(names, counted):
            ends.append(store.save_first(1, 0, 0, blobs[0], {"n": 1})[1])
        return ends, n_left < 0

    winners = set()
    for n in range(10**3):
        store = CheckpointStore(tmp_path / str(n))
        ends, raced = race(store, n)
        if not raced:
            break
        blob, kept = store.load(1, 0, 0)
        assert ends == [kept, kept]
        assert blob == blobs[kept["n"] - 1]
        winners.add(kept["n"])
    assert winners == {1, 2}


def test_drop_removes_one_trial_alone(store: CheckpointStore, place: Any) -> None:
    for trial in (1, 11):
        store.save(trial, 0, 0, b"a", {})
        store.save(trial, 0, 1, b"b", {}, partial=True)
    store.drop(1)
    assert store.trials() == (11,)
    assert all(name.startswith("trial-000011/") for name in place.files())


def test_no_file_is_a_pickle_and_every_name_reads_well(store: CheckpointStore, place: Any) -> None:
    store.save(12, 3, 4, b"state", {"loss": 1})
    names = place.files()
    checksum = f"{google_crc32c.value(b'state'):08x}"
    assert names == [
        f"trial-000012/epoch-000003-position-000004.{checksum}.safetensors",
        "trial-000012/epoch-000003-position-000004.json",
    ]
    assert place.fs.cat_file(f"{place.root}/{names[0]}") == b"state"
    assert json.loads(place.fs.cat_file(f"{place.root}/{names[1]}"))["meta"] == {"loss": 1}


@pytest.mark.parametrize("bad", [-1, 1.0, "../x", "1", None, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_key_is_made_of_counting_numbers(tmp_path: Path, bad: Any, which: int) -> None:
    key: list[Any] = [0, 0, 0]
    key[which] = bad
    store = CheckpointStore(tmp_path)
    save: Any = store.save
    for method in (lambda: save(*key, b"", {}), lambda: load(store, *key)):
        with pytest.raises(CheckpointError, match="non-negative integer"):
            method()
    assert list(tmp_path.iterdir()) == []


def test_numpys_integers_are_numbers_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(np.int64(1), np.int64(2), np.int32(3), b"x", {})  # type: ignore[arg-type]
    assert load(store, 1, 2, 3)[0] == b"x"


def test_what_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="meta is no JSON"):
        CheckpointStore(tmp_path).save(1, 1, 1, b"x", {"a": object()})
    assert list(tmp_path.iterdir()) == []


def damage(path: Path, data: bytes | None) -> None:
    path.unlink() if data is None else path.write_bytes(data)


@pytest.mark.parametrize(
    ("suffix", "data", "says"),
    [
        ("safetensors", b"stat\x00", "checksum does not match"),
        ("safetensors", b"sta", "3 bytes instead of 5"),
        ("safetensors", None, "missing"),
        ("json", b"", "json"),
        ("json", b"{}", "json"),
        ("json", b"[1]", "json"),
        ("json", b"\xff", "json"),
        ("json", b'{"blob": "../x", "n_bytes": 5, "crc32c": "0", "meta": {}}', "json"),
    ],
)
def test_damage_is_found_and_named(
    tmp_path: Path, suffix: str, data: bytes | None, says: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, 0, 0, b"state", {})
    (path,) = tmp_path.rglob(f"*.{suffix}")
    damage(path, data)
    with pytest.raises(CheckpointCorruptError, match=says) as caught:
        load(store, 1, 0, 0)
    assert path.name in str(caught.value)
    store.save(1, 0, 0, b"again", {})
    assert load(store, 1, 0, 0)[0] == b"again"


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@pytest.mark.parametrize("data", [b"", b"sta", b"stat\x00", None])
def test_a_damaged_state_is_named_and_the_one_before_it_is_taken(
    tmp_path: Path, suffix: str, data: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    digests = [store.save(1, 0, position, b"state%d" % position, {}) for position in range(3)]
    assert store.load_latest(1) == ((0, 2), b"state2", {"digest": digests[2]})
    assert store.load_latest(1, at_most=(0, 1)) == ((0, 1), b"state1", {"digest": digests[1]})
    assert store.load_latest(2) is None
    assert caplog.records == []
    (path,) = tmp_path.rglob(f"*position-000002*.{suffix}")
    damage(path, data)
    assert store.load_latest(1) == ((0, 1), b"state1", {"digest": digests[1]})
    if (suffix, data) != ("json", None):  # which is what a deleted one looks like
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("dagsel", "WARNING")
        assert path.name in record.getMessage()
    damage(next(tmp_path.rglob("*position-000001*.safetensors")), b"")
    damage(next(tmp_path.rglob("*position-000000*.json")), b"")
    assert store.load_latest(1) is None


def test_a_state_stands_where_it_was_saved_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for trial in (1, 2):
        for place in ((1, 0), (1, 1)):
            store.save(trial, *place, b"a state", {"visits": [0]})
    store.keep_check(1, 1, 1, 0, partial=False)
    names = sorted(path.name for path in (tmp_path / "trial-000001").glob("*.json"))
    assert len(names) == 3
    for source in (tmp_path / "trial-000001").glob("*.json"):
        for goal in tmp_path.rglob("*.json"):
            before = goal.read_bytes()
            goal.write_bytes(source.read_bytes())
            _, epoch, _, position = goal.stem.split("-") if "epoch" in goal.name else [""] * 4
            key = (int(goal.parent.name[-1]), *((int(epoch), int(position)) if epoch else (1,)))
            read = store.load if epoch else store.load_check
            if goal == source:
                read(*key)
            else:
                with pytest.raises(CheckpointCorruptError, match="changed, or moved here"):
                    read(*key)
            goal.write_bytes(before)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "states")
    store.save(1, 2, 0, b"a state", {})
    assert store.extents() == {1: Extent(epoch=2, n_checks=0)}
    (blob,) = tmp_path.rglob("*.safetensors")
    blob.unlink()
    blob.mkdir()
    with pytest.raises(CheckpointCorruptError, match=r"safetensors is a folder and no file"):
        store.extents()
    shutil.rmtree(tmp_path / "states/trial-000001")
    (tmp_path / "states/trial-000001").touch()
    with pytest.raises(CheckpointCorruptError, match="trial-000001 is a file and no folder"):
        store.extents()
    shutil.rmtree(tmp_path / "states")
    (tmp_path / "states").touch()
    with pytest.raises(CheckpointCorruptError, match="states is a file and no folder"):
        store.extents()


def test_a_record_of_an_earlier_version_has_no_seal(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, 1, 0, b"a state", {"loss": 0.5})
    (path,) = tmp_path.rglob("*.json")
    body = json.loads(path.read_text())
    del body["seal"]
    path.write_text(json.dumps({**body, "version": 1}))
    assert load(store, 1, 1, 0) == (b"a state", {"loss": 0.5})
    for bad in ({"version": 2}, {"version": 3}, {"version": 0}, {"version": "1"}):
        path.write_text(json.dumps({**body, **bad}))
        with pytest.raises(CheckpointCorruptError):
            store.load(1, 1, 0)


@pytest.mark.parametrize("what", ["loss", "visits", "[" * 100_000])
def test_what_is_stored_with_a_state_is_not_changed_by_hand(tmp_path: Path, what: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, 1, 0, b"a state", {"loss": 0.5, "visits": [2, 1]})
    (path,) = tmp_path.rglob("*.json")
    text = path.read_text()
    changed = text.replace("0.5", "0.25") if what == "loss" else text.replace("[2, 1]", "[1, 2]")
    path.write_text(text.replace("0.5", what) if what.startswith("[") else changed)
    with pytest.raises(CheckpointCorruptError, match=path.name):
        store.load(1, 1, 0)


def test_the_digest_is_that_of_the_bytes(store: CheckpointStore) -> None:
    digests = {store.save(1, 0, n, blob, {}) for n, blob in enumerate([b"a", b"b", b"", b"a"])}
    assert digests == {store.load(1, 0, n)[1]["digest"] for n in range(3)}
    with pytest.raises(CheckpointError, match="digest"):
        store.save(1, 0, 0, b"a", {"digest": "mine"})


def test_a_record_cannot_lead_out_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "secret.00000000.safetensors").write_bytes(b"mine")
    store = CheckpointStore(tmp_path / "store")
    store.save(1, 0, 0, b"state", {})
    (path,) = tmp_path.rglob("*.json")
    body = {**json.loads(path.read_text()), "blob": "../../secret.00000000.safetensors"}
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointCorruptError):
        load(store, 1, 0, 0)
    store.delete(1, 0, 0)
    assert (tmp_path / "secret.00000000.safetensors").exists()


def test_it_pickles_small_and_shows_no_credentials(s3_options: dict[str, Any]) -> None:
    server = {"client_kwargs": s3_options["client_kwargs"]}
    store = CheckpointStore("s3://KEY:SECRET@bucket/pickled", server, sync=True)
    store.save(1, 0, 0, b"state", {})
    pickled = pickle.dumps(store)
    assert len(pickled) < 500
    again = pickle.loads(pickled)
    assert again.load(1, 0, 0)[0] == b"state"
    assert again.sync
    assert repr(again) == "CheckpointStore('s3://bucket/pickled')"


def test_listings_are_never_stale(s3_options: dict[str, Any]) -> None:
    here = CheckpointStore("s3://bucket/stale", s3_options)
    here.save(1, 0, 0, b"a", {})
    assert here.latest(1) == (0, 0)
    # Another file-system object, as in another process.
    there = CheckpointStore("s3://bucket/stale", {**s3_options, "default_block_size": 2**23})
    there.save(1, 0, 1, b"b", {})
    assert here.latest(1) == (0, 1)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what is asked of the file system."""
    counts = Counter[str]()

    def noted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (counts.update([name]), function(*args, **kwargs))[1]

    writing = ("open", "write", "close", "replace", "link", "unlink", "mkdir")
    with os_calls((*writing, "fsync", "listdir", "scandir"), noted):
        yield counts


@pytest.mark.parametrize("sync", [False, True])
def test_a_save_takes_as_little_however_many_states_there_are(tmp_path: Path, sync: bool) -> None:
    store = CheckpointStore(tmp_path, sync=sync)
    took = []
    for position in range(30):
        with counted() as counts:
            store.save(0, 0, position, bytes(1_000_000), {"loss": 1.0})
        took.append(counts)
    assert took[1:] == took[1:2] * 29
    assert took[1]["replace"] == 2  # the state and its record
    assert took[1]["write"] == 2  # each at once
    assert took[1]["listdir"] == took[1]["scandir"] == 0
    assert took[1]["fsync"] == (4 if sync else 0)  # both, and the directory after each


class StoreMachine(RuleBasedStateMachine):
    """The store against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        MemoryFileSystem.store.clear()
        self.store = CheckpointStore("memory://machine")
        self.model: dict[tuple[int, int, int], bytes] = {}
        self.partial: dict[tuple[int, int, int], bytes] = {}

    keys = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2))

    @rule(key=keys, blob=st.binary(max_size=3), partial=st.booleans())
    def save(self, key: tuple[int, int, int], blob: bytes, partial: bool) -> None:
        self.store.save(*key, blob, {"key": list(key)}, partial=partial)
        if partial:
            self.partial[key] = blob
        else:
            self.model[key] = blob
            self.partial.pop(key, None)

    @rule(key=keys, is_known=st.booleans())
    def delete(self, key: tuple[int, int, int], is_known: bool) -> None:
        digest = f"{google_crc32c.value(self.model.get(key, b'')):08x}"
        self.store.delete(*key, digest=digest if is_known else "")
        self.model.pop(key, None)

    @rule(trial=st.integers(0, 1))
    def drop(self, trial: int) -> None:
        self.store.drop(trial)
        for kept in (self.model, self.partial):
            for key in [key for key in kept if key[0] == trial]:
                del kept[key]

    @invariant()
    def both_hold_the_same(self) -> None:
        for trial in (0, 1):
            for partial, kept in ((False, self.model), (True, self.partial)):
                places = self.store.list(trial, partial=partial)
                assert places == tuple(sorted(key[1:] for key in kept if key[0] == trial))
                for place in places:
                    key = (trial, *place)
                    loaded = load(self.store, *key, partial=partial)
                    assert loaded == (kept[key], {"key": list(key)})
            n_states = sum(key[0] == trial for key in [*self.model, *self.partial])
            folder = self.store._folder
            assert len(folder.names(f"trial-{trial:06d}")) == 2 * n_states, "each has two files"


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_scores_of_one_epoch_are_dropped_and_no_others(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "states"))
    for number in (1, 2):
        store.save_scores(0, "epoch", number, 3, b"of an epoch")
        store.save_scores(0, "check", number, 3, b"of a check")
    store.drop_scores(0, "epoch", 1)
    with pytest.raises(CheckpointNotFoundError):
        store.load_scores(0, "epoch", 1, 3)
    assert store.load_scores(0, "epoch", 2, 3) == b"of an epoch"
    assert store.load_scores(0, "check", 1, 3) == b"of a check"


def test_a_new_folder_is_named_after_the_study() -> None:
    assert "/dagsel-runs/a_b.c-1_2-" in RunDir.fresh("a b.c-1/2", "3f9a").url
    assert RunDir.fresh("s", "3f9a").url.endswith("-3f9a")
