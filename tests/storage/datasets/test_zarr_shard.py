"""Shards are what Zarr writes and reads; any flipped bit, lost end or moved chunk is found."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import MemoryStore

from dagsel.storage.datasets.zarr_shard import DamagedError, ShardFormat

DTYPES = st.sampled_from(
    ["<f4", "<f8", "<f2", "<i8", "|u1", "|b1", "<c8", "<U3", "|S4", "<M8[ns]", "<m8[s]", "<u2"]
)


@st.composite
def shards(draw: st.DrawFn) -> tuple[ShardFormat, np.ndarray]:
    dtype = draw(DTYPES)
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    n_samples = draw(st.integers(1, 30))
    place = draw(st.sampled_from(["", "data-1f0c/train/00003/x"]))
    form = ShardFormat(n_samples, dtype, shape, draw(st.integers(1, n_samples)), place)
    raw = draw(hnp.arrays("u1", form.n_samples * form.chunk_bytes // form.chunk))
    if dtype in ("<U3", "|S4", "|b1"):
        raw = raw % 2 if dtype == "|b1" else raw
        rows = np.arange(raw.size // np.dtype(dtype).itemsize).astype(dtype)
        rows = raw.view("|b1") if dtype == "|b1" else rows
    else:
        rows = raw.view(dtype)
    return form, rows.reshape(n_samples, *shape)


def encoded(form: ShardFormat, rows: np.ndarray) -> bytes:
    stream, whole = io.BytesIO(), form.chunk * (form.n_chunks // 2)
    form.encode(stream, [rows[:whole], rows[whole:]] if whole else [rows])
    return stream.getvalue()


def opened(form: ShardFormat, data: bytes | None) -> Any:
    buffer = default_buffer_prototype().buffer
    stored: dict[str, Buffer] = {"zarr.json": buffer.from_bytes(form.metadata())}
    if data is not None:
        stored[form.key] = buffer.from_bytes(data)
    return zarr.open_array(MemoryStore(stored), mode="r+"), stored


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@given(shards())
def test_decode_undoes_encode(shard: tuple[ShardFormat, np.ndarray]) -> None:
    form, rows = shard
    data = encoded(form, rows)
    assert len(data) == form.object_bytes
    assert same(form.decode(io.BytesIO(data)), rows)


@settings(max_examples=60, deadline=None)
@given(shards())
def test_zarr_reads_what_we_write_and_we_read_what_zarr_writes(
    shard: tuple[ShardFormat, np.ndarray],
) -> None:
    form, rows = shard
    with warnings.catch_warnings():
        # zarr-python warns that its fixed-length strings are not in the specification yet.
        warnings.simplefilter("ignore")
        array, _ = opened(form, encoded(form, rows))
        assert array.chunks == (form.chunk, *form.shape)
        assert array.shards[0] >= form.n_samples
        assert same(np.asarray(array[:]), rows)
        array, stored = opened(form, None)
        array[:] = np.ones_like(rows) if rows.dtype.kind in "fiuc" else rows
    form = replace(form, place="")
    if form.key in stored and form.n_chunks == 1 and rows.dtype.kind in "fiuc":
        decoded = form.decode(io.BytesIO(stored[form.key].to_bytes()))
        assert same(decoded, np.ones_like(rows))


@given(shards(), st.data())
def test_any_flipped_bit_is_found(
    shard: tuple[ShardFormat, np.ndarray], data: st.DataObject
) -> None:
    form, rows = shard
    whole = bytearray(encoded(form, rows))
    place = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[place // 8] ^= 1 << place % 8
    with pytest.raises(DamagedError, match=r"checksum mismatch|damaged index"):
        form.decode(io.BytesIO(bytes(whole)))


@given(shards(), st.data())
def test_any_lost_end_is_found(shard: tuple[ShardFormat, np.ndarray], data: st.DataObject) -> None:
    form, rows = shard
    whole = encoded(form, rows)
    n_left = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DamagedError):
        form.decode(io.BytesIO(whole[:n_left]))


@given(shards())
def test_a_shard_is_read_in_its_own_place_alone(shard: tuple[ShardFormat, np.ndarray]) -> None:
    form, rows = shard
    data = encoded(replace(form, place="data-1f0c/train/00003/x"), rows)
    for place in ("data-1f0c/train/00004/x", "data-1f0c/validation/00003/x", "data-2/train/3/x"):
        other = replace(form, place=place)
        assert other.object_bytes == len(data)
        with pytest.raises(DamagedError, match="written for another place"):
            other.decode(io.BytesIO(data))


def test_chunks_that_changed_places_are_found() -> None:
    form = ShardFormat(6, "<i4", (), 2, "data-1f0c/train/00003/x")
    data = encoded(form, np.arange(6, dtype="<i4"))
    one, two, rest = data[:12], data[12:24], data[24:]
    with pytest.raises(DamagedError, match="checksum mismatch"):
        form.decode(io.BytesIO(two + one + rest))


def test_many_chunks_in_zarrs_own_order_are_where_we_look_for_them() -> None:
    form = ShardFormat(1000, "<i4", (3,), 7)
    rows = np.arange(1, 3001, dtype="<i4").reshape(1000, 3)
    array, stored = opened(form, None)
    array[:] = rows
    assert same(form.decode(io.BytesIO(stored[form.key].to_bytes())), rows)
