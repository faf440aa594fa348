"""A manifest survives JSON; what cannot be one of ours is refused, whatever its bytes are."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import DatasetFormatError, DatasetInputError
from dagsel.storage.datasets.manifest import (
    CHUNK_BYTES,
    ArraySpec,
    Manifest,
    check_name,
    check_names,
    chunk_samples,
    shard_sizes,
)

NAMES = st.from_regex(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True).filter(
    lambda name: name != "zarr.json"
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique_by=str.casefold))
    n_shards = draw(st.integers(1, 50))
    more = st.integers(0, 1000)
    return Manifest(
        folder=f"data-{draw(st.integers(0, 2**64 - 1)):016x}",
        seed=draw(st.integers(0, 2**64)),
        n_shards=n_shards,
        n_train=n_shards + draw(more),
        n_validation=n_shards + draw(more),
        arrays=tuple(
            ArraySpec(
                name=name,
                dtype=draw(st.sampled_from(["<f4", "<i8", "|u1", "|b1", "<U7", "<M8[ns]", "<c16"])),
                shape=tuple(draw(st.lists(st.integers(1, 9), max_size=3))),
                train_chunk=draw(st.integers(1, 99)),
                validation_chunk=draw(st.integers(1, 99)),
            )
            for name in names
        ),
        version=draw(st.sampled_from([1, 2])),
    )


@given(manifests())
def test_a_manifest_survives_json(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json(), "url") == manifest


@given(st.integers(1, 10**6), st.integers(1, 500))
def test_shard_sizes_differ_by_at_most_one_sample(n_more: int, n_shards: int) -> None:
    n_samples = n_shards + n_more - 1
    sizes = shard_sizes(n_samples, n_shards)
    assert sum(sizes) == n_samples
    assert len(sizes) == n_shards
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert min(sizes) >= 1


@given(st.integers(1, 10**6), st.integers(1, 10**8))
def test_chunks_cover_a_shard_with_little_padding(n_samples: int, sample_bytes: int) -> None:
    chunk = chunk_samples(n_samples, sample_bytes, CHUNK_BYTES)
    n_chunks = -(-n_samples // chunk)
    assert 1 <= chunk <= n_samples
    assert chunk == 1 or (chunk - 1) * sample_bytes <= CHUNK_BYTES
    assert n_chunks * chunk - n_samples < max(chunk, n_chunks)


def body(version: int = 1) -> dict[str, Any]:
    """Give the entries of a manifest; one of version 1 has no checksum that stops a change."""
    spec = ArraySpec(name="x", dtype="<f4", shape=(2,), train_chunk=3, validation_chunk=1)
    manifest = Manifest(
        folder="data-0123456789abcdef",
        seed=0,
        n_shards=2,
        n_train=9,
        n_validation=3,
        arrays=(spec,),
        version=version,
    )
    return dict(json.loads(manifest.to_json()))


def damaged(**changes: Any) -> bytes:
    return json.dumps({**body(), **changes}).encode()


def with_array(**changes: Any) -> bytes:
    return damaged(arrays=[{**body()["arrays"][0], **changes}])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "not a data set of dagsel"),
        (b'{"format": "other"}', "not a data set of dagsel"),
        (damaged(version=5), "newer dagsel"),
        (damaged(version=2), "crc32c"),
        (damaged(crc32c="00000000"), "crc32c"),
        (damaged(version="1"), "version"),
        (damaged(version=True), "version"),
        (damaged(extra=1), "damaged"),
        (damaged(folder="../../etc"), "no folder"),
        (damaged(folder="/data-0123456789"), "no folder"),
        (damaged(folder=7), "no folder"),
        (damaged(n_shards=0), "n_shards"),
        (damaged(n_shards=10**9), "n_shards"),
        (damaged(n_train=1), "1 train samples"),
        (damaged(n_train=9.0), "9.0 train samples"),
        (damaged(n_validation=-3), "-3 validation samples"),
        (damaged(n_train=10**30), "cannot be divided"),
        (damaged(seed=-1), "seed"),
        (damaged(arrays=[]), "no arrays"),
        (damaged(arrays=7), "damaged"),
        (damaged(arrays=[7]), "damaged"),
        (damaged(arrays=body()["arrays"] * 2), "differ at most in case"),
        (with_array(name="../x"), "cannot be an array's name"),
        (with_array(name=None), "cannot be an array's name"),
        (with_array(dtype="|O"), "cannot be stored"),
        (with_array(dtype="object"), "cannot be stored"),
        (with_array(dtype="<f3"), "no dtype"),
        (with_array(dtype=["<f4"]), "cannot be stored"),
        (with_array(shape=[10**10, 10**10]), "no sensible size"),
        (with_array(shape=[2**59]), "no sensible size"),
        (with_array(shape=[2**56]), "larger than any store"),
        (with_array(shape=[-1]), "cannot be stored"),
        (with_array(shape=[1] * 40), "cannot be stored"),
        (with_array(shape="ab"), "cannot be stored"),
        (with_array(train_chunk=0), "chunk"),
        (with_array(odd=1), "odd"),
    ],
)
def test_a_manifest_that_cannot_be_ours_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(DatasetFormatError, match=says) as caught:
        Manifest.from_json(data, "s3://bucket/set.zarr")
    assert "s3://bucket/set.zarr" in str(caught.value)


@given(
    st.sampled_from(sorted(body(version=2))),
    st.none() | st.text() | st.integers(-3, 12) | st.floats() | st.lists(st.integers()),
)
def test_no_changed_entry_is_understood_where_there_is_a_checksum(entry: str, value: Any) -> None:
    changed = {**body(version=2), entry: value}
    if changed == body(version=2) and type(value) is type(body(version=2)[entry]):
        return
    with pytest.raises(DatasetFormatError):
        Manifest.from_json(json.dumps(changed).encode(), "url")


def test_a_checksum_is_of_what_the_manifest_says_not_of_its_spaces() -> None:
    text = json.dumps(dict(reversed(body(version=2).items()))).encode()
    assert Manifest.from_json(text, "url") == Manifest.from_json(
        json.dumps(body(version=2)).encode(), "url"
    )


@given(st.binary() | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps))
def test_no_bytes_make_from_json_raise_anything_else(data: bytes | str) -> None:
    with pytest.raises(DatasetFormatError):
        Manifest.from_json(data if isinstance(data, bytes) else data.encode(), "url")


@given(
    st.sampled_from(sorted(body())),
    st.none() | st.text() | st.integers() | st.floats() | st.lists(st.integers()),
)
def test_a_changed_entry_is_refused_or_understood(entry: str, value: Any) -> None:
    try:
        manifest = Manifest.from_json(damaged(**{entry: value}), "url")
    except DatasetFormatError:
        return
    assert asdict(manifest)[entry] == value if entry != "version" else value == 1


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/a",
        "a\\b",
        "__x",
        "-x",
        "ä",
        "a b",
        "x\n",
        "x" * 101,
        7,
        None,
        "zarr.json",
        ".hidden",
        "a\0b",
    ],
)
def test_odd_names_are_refused(name: object) -> None:
    with pytest.raises(DatasetInputError, match="cannot be an array's name"):
        check_name(name)


def test_names_that_differ_in_case_only_are_refused() -> None:
    with pytest.raises(DatasetInputError, match="'x' and 'X'"):
        check_names(["x", "y", "X"])
