"""A journal gives back what was appended whatever cuts it off, and other damage is named."""

from __future__ import annotations

import errno
import itertools
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import JournalCorruptError, RunDirError
from dagsel.storage import Journal, RunDir, disk
from dagsel.storage.runs.journal import scan

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
GROUPS = st.lists(
    st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)


def group(number: int, size: int = 3) -> list[dict[str, Any]]:
    return [{"group": number, "part": part, "text": "an é\n"} for part in range(size)]


def appended(folder: Path, sizes: tuple[int, ...] = (1, 3, 2)) -> tuple[bytes, list[int]]:
    """Write groups of these sizes; give the file's bytes and where each group ends."""
    shutil.rmtree(folder, ignore_errors=True)
    journal, ends = Journal(folder), [0]
    for number, size in enumerate(sizes):
        journal.append(group(number, size))
        ends.append((folder / "journal.jsonl").stat().st_size)
    return (folder / "journal.jsonl").read_bytes(), ends


def test_what_was_appended_is_read(place: Any) -> None:
    journal = Journal(place.url, place.options)
    assert journal.read() == []
    journal.append([])
    assert place.files() == []
    journal.append(group(0))
    again = pickle.loads(pickle.dumps(journal))
    again.append(group(1, 1))
    assert Journal(place.url, place.options).read() == group(0) + group(1, 1)


@pytest.mark.parametrize("name", ["sweep lr=[0.1,0.3]", "a*b", "{x}", "a#b%20"])
def test_a_run_at_a_url_with_the_signs_of_patterns_is_found_again(place: Any, name: str) -> None:
    run_dir = RunDir(f"{place.url}/{name}/run", place.options)
    run_dir.claim("3f9a", {})
    groups = [[{"number": number}] for number in range(3)]
    for group in groups:
        run_dir.journal.append(group)
    run_dir.states.save(1, 1, 0, b"state", {})
    again = RunDir(run_dir.url, place.options)
    assert again.belongs_to("3f9a")
    assert again.journal.read() == [record for group in groups for record in group]
    assert again.states.load(1, 1, 0)[0] == b"state"
    again.states.drop(1)
    assert again.states.trials() == ()


@pytest.mark.parametrize("protocol", ["s3", "memory"])
def test_a_query_is_no_name_of_a_folder_in_a_store(protocol: str) -> None:
    with pytest.raises(RunDirError, match=f"as in {protocol}://bucket/a, and pass") as refused:
        RunDir(f"{protocol}://bucket/a?b/run")
    assert "b/run" not in str(refused.value), "it may be secret"


@given(GROUPS)
def test_every_json_object_comes_back(groups: list[list[dict[str, Any]]]) -> None:
    MemoryFileSystem.store.clear()
    journal = Journal("memory://any")
    for records in groups:
        journal.append(records)
    # `repr` tells NaN from other floats, and -0.0 from 0.0.
    expected = [record for records in groups for record in records]
    assert repr(Journal("memory://any").read()) == repr(expected)


def test_nan_and_the_infinities_come_back(tmp_path: Path) -> None:
    Journal(tmp_path).append([{"loss": math.nan, "best": math.inf, "worst": [-math.inf]}])
    (record,) = Journal(tmp_path).read()
    assert math.isnan(record["loss"])
    assert (record["best"], record["worst"]) == (math.inf, [-math.inf])


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": {1, 2}}, {("a",): 1}, {"a": b"bytes"}])
def test_a_group_with_one_bad_record_is_refused_whole(tmp_path: Path, bad: Any) -> None:
    journal = Journal(tmp_path)
    journal.append(group(0))
    with pytest.raises(RunDirError, match="no JSON"):
        journal.append([{"good": 1}, bad])
    journal.append(group(1))
    assert journal.read() == group(0) + group(1)


def test_a_group_cut_off_anywhere_is_dropped_and_overwritten(tmp_path: Path) -> None:
    data, ends = appended(tmp_path / "whole")
    file = tmp_path / "journal.jsonl"
    for cut in range(ends[2], len(data)):
        file.write_bytes(data[:cut])
        journal = Journal(tmp_path)
        assert journal.read() == group(0, 1) + group(1)
        assert file.read_bytes() == data[:cut], "reading writes nothing"
        journal.append(group(9))
        assert Journal(tmp_path).read() == group(0, 1) + group(1) + group(9)


def test_blocks_that_a_power_failure_has_left_empty_are_dropped(tmp_path: Path) -> None:
    data, ends = appended(tmp_path / "whole", (2, 2, 30))
    file = tmp_path / "journal.jsonl"
    begin = ends[2]
    for start, stop in [(begin, len(data)), (begin, 512), (1024, 1536), (2048, len(data))]:
        file.write_bytes(data[:start] + bytes(stop - start) + data[stop:])
        journal = Journal(tmp_path)
        assert journal.read() == group(0, 2) + group(1, 2)
        journal.append(group(9))
        assert Journal(tmp_path).read() == group(0, 2) + group(1, 2) + group(9)


def test_an_empty_block_in_the_middle_is_damage(tmp_path: Path) -> None:
    data, ends = appended(tmp_path / "whole", (2, 30, 1))
    for start, stop in [(ends[1], ends[2]), (512, 1024), (0, ends[1])]:
        damaged = data[:start] + bytes(stop - start) + data[stop:]
        (tmp_path / "journal.jsonl").write_bytes(damaged)
        with pytest.raises(JournalCorruptError):
            Journal(tmp_path).read()


def test_every_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    data, ends = appended(tmp_path)
    for place in range(len(data)):
        for bit in (0, 3, 5):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            found = scan(bytes(damaged), 0)
            assert found.damage is not None, f"bit {bit} of byte {place}"
            assert found.n_bytes == max(end for end in ends if end <= place)


def test_damage_is_told_with_place_and_cure_and_never_appended_to(tmp_path: Path) -> None:
    data, ends = appended(tmp_path)
    file = tmp_path / "journal.jsonl"
    damaged = data.replace(b'"part":1', b'"part":7')
    file.write_bytes(damaged)
    for act in (Journal(tmp_path).read, lambda: Journal(tmp_path).append(group(9))):
        with pytest.raises(
            JournalCorruptError, match=rf"journal.jsonl, byte {ends[1]}: .*"
        ) as error:
            act()
        assert f"cut it to {ends[1]} bytes to keep the 1 records before" in str(error.value)
    assert file.read_bytes() == damaged
    file.write_bytes(damaged[: ends[1]])
    assert Journal(tmp_path).read() == group(0, 1)


def test_a_line_or_group_that_is_gone_or_twice_is_damage(tmp_path: Path) -> None:
    data, ends = appended(tmp_path)
    first, second, third = (data[a:b] for a, b in itertools.pairwise(ends))
    lines = second.splitlines(keepends=True)
    for damaged in (
        first + third,
        second + third,
        first + second + second,
        first + third + second,
        first + lines[0] + lines[2] + third,
        first + lines[0] + third,
    ):
        assert scan(damaged, 0).damage is not None


def test_a_missing_or_damaged_object_is_named(s3_options: dict[str, Any]) -> None:
    fs = fsspec.filesystem("s3", **s3_options)
    journal = Journal("s3://bucket/objects", s3_options)
    for number in range(3):
        journal.append(group(number))
    fs.pipe_file("bucket/objects/journal/notes.txt", b"not ours")
    assert journal.read() == group(0) + group(1) + group(2)
    second = fs.cat_file("bucket/objects/journal/00000002.jsonl")
    for damaged in (None, second[:-1], second + second, b""):
        fs.rm_file("bucket/objects/journal/00000002.jsonl")
        if damaged is not None:
            fs.pipe_file("bucket/objects/journal/00000002.jsonl", damaged)
        with pytest.raises(JournalCorruptError, match="journal/00000002.jsonl"):
            journal.read()
        fs.pipe_file("bucket/objects/journal/00000002.jsonl", second)


def test_hundreds_of_objects_are_read(s3_options: dict[str, Any]) -> None:
    journal = Journal("s3://bucket/many", s3_options)
    for number in range(120):
        journal.append(group(number, 1))
    assert [record["group"] for record in Journal("s3://bucket/many", s3_options).read()] == [
        *range(120)
    ]


def test_two_drivers_cannot_both_append(place: Any) -> None:
    one, two = Journal(place.url, place.options), Journal(place.url, place.options)
    one.append(group(0))
    two.append(group(1))
    with pytest.raises(RunDirError, match="another process writes to it too; mend that"):
        one.append(group(2))
    assert Journal(place.url, place.options).read() == group(0) + group(1)


def test_a_journal_that_was_copied_to_another_store_goes_on(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    Journal(tmp_path / "a").append(group(0))
    whole = (tmp_path / "a/journal.jsonl").read_bytes()
    memory.pipe_file("/moved/journal.jsonl", whole + whole[:9])
    for number in (1, 2):
        Journal("memory://moved").append(group(number))
    memory.get("/moved", str(tmp_path / "b"), recursive=True)
    Journal(tmp_path / "b").append(group(3))
    assert Journal(tmp_path / "b").read() == group(0) + group(1) + group(2) + group(3)


def test_an_append_that_failed_has_left_nothing(tmp_path: Path) -> None:
    import resource

    journal = Journal(tmp_path)
    journal.append(group(0))
    size = (tmp_path / "journal.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        with pytest.raises(RunDirError, match="File too large"):
            journal.append(group(1, 100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "journal.jsonl").stat().st_size == size
    journal.append(group(2))
    assert Journal(tmp_path).read() == group(0) + group(2)


def test_half_a_group_that_a_failed_append_could_not_remove_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(fd: int, data: bytes) -> None:
        os.write(fd, data[: len(data) // 2])
        fail()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    journal = Journal(tmp_path)
    journal.append(group(0))
    with monkeypatch.context() as broken:
        broken.setattr(disk, "write_all", write_half)
        broken.setattr(os, "ftruncate", fail)
        with pytest.raises(RunDirError, match="the disk is gone"):
            journal.append(group(1))
    journal.append(group(2))
    assert Journal(tmp_path).read() == group(0) + group(2)


@pytest.mark.parametrize(("number", "is_waited_for"), [(errno.EIO, False), (errno.ETIMEDOUT, True)])
def test_a_group_that_got_there_although_its_request_failed_is_there_once(
    number: int, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, answers = MemoryFileSystem.pipe_file, [False, True]

    def write_and_fail(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        if not answers.pop(0):
            raise OSError(number, "no answer")

    MemoryFileSystem.store.clear()
    journal = Journal("memory://unanswered")
    journal.append(group(0))
    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "pipe_file", write_and_fail)
        if is_waited_for:
            journal.append(group(1))
        else:
            with pytest.raises(RunDirError, match="no answer"):
                journal.append(group(1))
    journal.append(group(2))
    assert Journal("memory://unanswered").read() == group(0) + group(1) + group(2)


@pytest.mark.parametrize("n_left_out", [0, 1, 2])
def test_a_journal_is_torn_or_damaged_or_neither(tmp_path: Path, n_left_out: int) -> None:
    data, ends = appended(tmp_path)
    found = scan(data[: ends[1]] + data[ends[1 + n_left_out] :], 0)
    assert not found.is_torn
    assert (found.damage is None) is (n_left_out in (0, 2))
    cut = scan(data[:-1], 0)
    assert (cut.is_torn, cut.damage) == (True, None)
