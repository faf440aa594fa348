"""What people give as data arrives as they meant it, or is refused by a message that says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest
import torch

from dagsel.errors import DatasetInputError
from dagsel.storage import Batches, ShardedDataset
from dagsel.storage.datasets import transaction
from dagsel.storage.datasets.manifest import Manifest
from dagsel.storage.datasets.pair import ArrayPair
from dagsel.storage.files import Folder

N = 40
ID = np.arange(N)
Y = ID % 2
X = np.arange(2 * N, dtype="float32").reshape(N, 2)
TEXT = ["odd", "even"] * (N // 2)
FRAME = pd.DataFrame({"a": ID, "b": 10.0 * ID})
MANY = pd.DataFrame({("a", 0): ID, ("b", 1): 10 * ID})


def pair(x: Any, y: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Manifest]:
    """Return what becomes of a pair."""
    read = ArrayPair.read(x, y)
    return read.arrays["x"], read.arrays["y"], read.manifest


def written(data: Any, **how: Any) -> tuple[dict[str, np.ndarray[Any, Any]], ShardedDataset]:
    """Return what was written, sorted by the array ``id`` if there is one."""
    found = ShardedDataset.write("memory://given.zarr", data, n_shards=1, overwrite=True, **how)
    parts = (found.shard(0), found.validation_shard(0))
    rows = {name: np.concatenate([part[name] for part in parts]) for name in found.schema}
    order = rows["id"].argsort() if "id" in rows else np.arange(N)
    return {name: values[order] for name, values in rows.items()}, found


INPUTS: dict[str, Any] = {
    "an array": X,
    "tensors in a list": [torch.tensor(row, requires_grad=True) for row in X],
    "a frame": pd.DataFrame(X, columns=["a", "b"]),
    "a frame without names": pd.DataFrame(X),
    "an Arrow table": pyarrow.table({"a": X[:, 0], "b": X[:, 1]}),
    "objects": X.astype(object),
    "a masked array without a mask": np.ma.masked_array(X, mask=X < 0),
}


@pytest.mark.parametrize("given", INPUTS.values(), ids=INPUTS)
def test_inputs_of_a_pair(given: Any) -> None:
    assert (pair(given, Y)[0] == X).all()


def test_a_frame_of_two_levels() -> None:
    x, _, manifest = pair(MANY, Y)
    assert (x == MANY.to_numpy()).all()
    assert manifest.columns == {"x": ["('a', 0)", "('b', 1)"]}


def test_it_is_said_that_the_data_is_written_before_that_takes_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair, said = ArrayPair.read(np.zeros((10, 2), np.float32), np.zeros(10)), list[str]()
    write = transaction.write

    def watched(*given: Any, **more: Any) -> Any:
        said.extend(caplog.messages)
        return write(*given, **more)

    monkeypatch.setattr(transaction, "write", watched)
    data = pair.write(Folder(str(tmp_path / "data")))
    (line,) = said
    assert f"{data.url}: 1 shard, {data.n_train} samples to train and {data.n_validation}" in line


@pytest.mark.parametrize("given", [FRAME[["a"]], polars.DataFrame({"a": ID})])
def test_one_column_is_one_feature(given: Any) -> None:
    x, _, _ = pair(given, Y)
    assert x.dtype == np.float32
    assert (x == ID[:, None]).all()


TARGETS: dict[str, Any] = {
    "objects": Y.astype(object),
    "an Arrow array": pyarrow.array(Y),
    "an Arrow array of yes and no": pyarrow.array(Y == 1),
    "nullable": pd.Series(Y, dtype="Int64"),
    "yes and no": pd.Series(Y == 1, dtype="boolean"),
}


@pytest.mark.parametrize("given", TARGETS.values(), ids=TARGETS)
def test_targets_of_a_pair_and_in_a_mapping(given: Any) -> None:
    assert (pair(X, given)[1] == Y).all()
    if not isinstance(given, pyarrow.Array):
        rows, _ = written({"id": ID, "y": given})
        assert (rows["y"] == Y).all()


TEXTS: dict[str, Any] = {
    "a list": TEXT,
    "an Arrow array": pyarrow.array(TEXT),
    "a dictionary of Arrow": pyarrow.array(TEXT).dictionary_encode(),
    "categories": pd.Series(TEXT, dtype="category"),
    "a frame of one column": pd.DataFrame({"label": TEXT}),
    "rows of one": np.array(TEXT)[:, None],
}


@pytest.mark.parametrize("given", TEXTS.values(), ids=TEXTS)
def test_text_becomes_classes(given: Any) -> None:
    _, y, manifest = pair(X, given)
    assert manifest.classes == {"y": ["even", "odd"]}
    assert y.tolist() == [1, 0] * (N // 2)


def test_a_column_in_a_mapping_is_as_in_a_table() -> None:
    given = {
        "id": ID,
        "nullable": pd.Series(Y, dtype="Int64"),
        "polars": polars.Series(Y),
        "category": pd.Series(TEXT, dtype="category"),
        "objects": Y.astype(object),
    }
    rows, data = written(given)
    assert all((rows[name] == Y).all() for name in ("nullable", "polars", "objects"))
    assert data.classes == {"category": ("even", "odd")}


@pytest.mark.parametrize(
    ("table", "columns", "expected"),
    [
        (pd.DataFrame({0: ID, 1: 10 * ID}), [0, 1], FRAME),
        (pd.DataFrame({0: Y, 1: ID, 2: 10 * ID}), pd.RangeIndex(1, 3), FRAME),
        (MANY, [("a", 0), ("b", 1)], FRAME),
        (MANY, ("b", 1), FRAME["b"]),
        (MANY.set_axis(["a", "b"], axis=1), pd.Index(["b", "a"]), FRAME[["b", "a"]]),
    ],
)
def test_columns_are_chosen_by_any_label(table: Any, columns: Any, expected: Any) -> None:
    rows, _ = written(table, columns={"x": columns})
    wanted = expected.to_numpy()
    order = np.argsort(rows["x"].reshape(N, -1)[:, 0])
    assert (rows["x"][order] == wanted).all()


def test_a_column_called_as_an_attribute_of_arrow_is_a_column() -> None:
    assert set(written(FRAME.assign(column_names="z"))[0]) == {"a", "b", "column_names"}


def test_names_of_parts_may_be_numbers() -> None:
    rows, _ = written([{0: at, "id": at} for at in range(N)])
    assert (rows["0"] == ID).all()


def with_one(value: float, *, at: tuple[int, ...] = (3, 1), of: Any = X) -> Any:
    changed = of.astype("float32")
    changed[at] = value
    return changed


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (with_one(np.nan), Y, "1 of the numbers in x is NaN or infinite, the first in row 3: "),
        (with_one(-np.inf), Y, "1 of the numbers in x is"),
        (with_one(np.nan, of=with_one(np.inf)[None].repeat(N, 0)), Y, "are NaN or .* in row 0: "),
        (torch.tensor(with_one(np.inf)), Y, "in row 3: .* np.nan_to_num\\(x\\)"),
        (pd.DataFrame(with_one(np.inf), columns=["a", "b"]), Y, "in row 3 of column 'b': "),
        (
            X,
            with_one(np.inf, at=(7,), of=Y),
            "in y is .* in row 7: .* np.nan_to_num\\(y\\)",
        ),
    ],
)
def test_a_number_that_is_none_is_told_and_stays(
    x: Any, y: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    read = pair(x, y)
    assert sum((~np.isfinite(array)).sum() for array in read[:2]) > 0
    (record,) = caplog.records
    assert re.search(said, record.getMessage())


def test_large_numbers_are_no_infinite_ones(caplog: pytest.LogCaptureFixture) -> None:
    pair(np.full_like(X, np.finfo("float32").max), Y)
    pair(np.full((N, 2), np.finfo("float64").max), Y)  # whose sum is infinite
    assert not caplog.records


def test_an_index_that_differs_but_in_order_is_no_matter() -> None:
    x, y, _ = pair(FRAME.set_index(ID + 5), pd.Series(Y))
    assert (x[:, 0] % 2 == y).all()


GAPS = pd.Series([1, None] * (N // 2), dtype="Int64")
MASKED = np.ma.masked_array(X, mask=X == 4)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "rows in another order": (
        lambda: pair(FRAME.sample(frac=1, random_state=0), pd.Series(Y)),
        r"rows of y are in another order than those of x.*y.loc\[x.index\]",
    ),
    "columns in another order": (
        lambda: written({"x": pd.Series(ID), "y": pd.Series(Y).iloc[::-1]}),
        r"rows of y are in another order than those of x.*y.to_numpy\(\)",
    ),
    "two columns of one name": (
        lambda: pair(pd.DataFrame({1: ID, "1": ID}), Y), "two columns .* called '1'"),
    "two columns of one name, written": (
        lambda: written(pd.concat([FRAME, FRAME["a"]], axis=1)), "two columns .* called 'a'"),
    "two columns of one name, of Arrow": (
        lambda: written(pyarrow.Table.from_arrays([ID, ID], names=["a", "a"])), "called 'a'"),
    "masked inputs": (lambda: pair(MASKED, Y), r"row 2 of array 'x' is masked.*x.filled\(0\)"),
    "a masked array": (lambda: written({"x": X, "m": MASKED}), "row 2 of array 'm' is masked"),
    "a gap in text": (lambda: pair(X, ["a", float("nan")] * (N // 2)), "row 1 of y has nan among"),
    "a gap in an array of text": (
        lambda: written({"x": X, "y": ["a", None] * (N // 2)}), "row 1 of y has no value"),
    "a gap in batches of text": (
        lambda: written(Batches({"t": ["a", np.nan]} for _ in range(9))), "row 1 of t has nan"),
    "numbers among text": (lambda: pair(X, [0, "a"] * (N // 2)), "row 0 of y has 0 among text"),
    "numbers among rows of text": (
        lambda: pair([["a", "b"], ["a", 1]] * (N // 2), Y), "row 1 of x has 1 among text"),
    "a gap in objects": (
        lambda: pair(X, np.array([1, None] * (N // 2), object)), "row 1 of y has no value"),
    "a gap in a nullable column": (
        lambda: written({"x": X, "y": GAPS}), "row 1 of 'y' has no value"),
    "a gap in one column": (
        lambda: pair(pd.DataFrame({"a": GAPS}), Y), "the first in row 1 of column 'a'"),
    "numbers too large": (
        lambda: pair(X, np.array([2**70] * N, object)), "y holds neither numbers nor text"),
    "tensors that NumPy lacks": (
        lambda: pair([torch.ones(2).bfloat16()] * N, Y), "x cannot become an array: .*BFloat16"),
    "no column": (lambda: written(FRAME, columns={"x": []}), "makes 'x' of no column"),
    "None": (
        lambda: written(FRAME, columns={"x": None}), "there is no column 'None', but 'a', 'b'"),
    "a number that is no label": (
        lambda: written(FRAME, columns={"x": 0}), "there is no column '0', but 'a', 'b'"),
    "columns that are a number": (lambda: written(FRAME, columns=5), "columns= is 5; write"),
    "ragged that is no list": (lambda: written(FRAME, ragged=True), "ragged is True; give a list"),
    "a name with a space": (
        lambda: written(FRAME.rename(columns={"a": "a b"})),
        r"'a b' cannot be.*columns=\{\"x\": 'a b'",
    ),
    "a frame that is not read": (
        lambda: written(polars.from_pandas(FRAME).lazy()), r"is a LazyFrame.*arrays.collect\(\)"),
    "a part that the first sample lacks": (
        lambda: written([{"x": at, **({"z": 1} if at else {})} for at in range(N)]),
        "sample 1 has 'z', and sample 0 has not"),
    "a part that a later sample lacks": (
        lambda: written([{"x": at, **({"z": 1} if at != 5 else {})} for at in range(N)]),
        "sample 0 has 'z', and sample 5 has not"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_be_meant_otherwise_is_refused(what: str) -> None:
    give, message = REFUSED[what]
    with pytest.raises(DatasetInputError, match=message):
        give()
