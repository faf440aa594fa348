"""Tables of pandas, polars and Arrow: columns become arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.arrays import check_labels, of_list
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.ragged import RaggedArray


def table_columns(source: Any) -> list[str] | None:
    """Names of a table's columns, be it of pandas, polars or Arrow; None if it is no table."""
    if type(source).__module__.partition(".")[0] == "datasets":  # Hugging Face's has samples
        return None
    for of_table in ("column_names", "columns"):  # Arrow's columns are values; the others' names
        names: Any = getattr(source, of_table, None)
        if isinstance(names, Sequence) or hasattr(names, "to_list"):
            return [str(name) for name in names]
    return None


def getter(source: Any) -> Callable[[str], NDArray[Any]]:
    """Return a function that makes an array of a table's column."""

    def get(name: str) -> NDArray[Any]:
        column = source[name]
        if str(getattr(column, "dtype", "")).startswith("category"):
            column = column.astype("object")
        if type(column).__module__.startswith("pyarrow"):
            column = column.to_pandas()
        array = column.to_numpy() if hasattr(column, "to_numpy") else np.asarray(column)
        return np.asarray(array)

    return get


def make_array(
    name: str, of: list[str], get: Callable[[str], NDArray[Any]], classes: Classes, where: str
) -> NDArray[Any] | RaggedArray:
    """Make an array of one column or several."""
    if len(of) == 1:
        values = get(of[0])
        if is_text(values):
            if name not in classes.known and not classes.is_fixed:
                classes.known[name] = sorted({str(it) for it in values if isinstance(it, str)})
            return classes.encode(name, values, where)
        numbers = _numbers(of[0], values, where)
        check_labels(name, numbers, f"{where}, column {of[0]!r}")
        return numbers
    parts = [_numbers(column, get(column), where) for column in of]
    columns: list[NDArray[Any]] = []
    for column, part in zip(of, parts, strict=True):
        if isinstance(part, RaggedArray) or part.ndim != 1:
            raise DatasetInputError(
                f"{where}: column {column!r} holds arrays; make it one of its own"
            )
        columns.append(part)
    dtype = np.result_type(*columns)
    # Features are what a model of float32 takes; float64 would be cast on each worker.
    wanted = np.dtype(np.float32) if dtype.kind in "biuf" else dtype
    joined = np.empty((len(columns[0]), len(columns)), wanted)
    for at, part in enumerate(columns):
        joined[:, at] = part
    return joined


def is_text(values: NDArray[Any]) -> bool:
    """Whether a column is text."""
    if values.dtype.kind in "UT":
        return True
    return values.dtype == object and any(isinstance(value, str) for value in values)


def _numbers(column: str, values: NDArray[Any], where: str) -> NDArray[Any] | RaggedArray:
    if values.dtype.kind in "UT" or (values.dtype == object and is_text(values)):
        raise DatasetInputError(
            f"{where}: column {column!r} is text; give it an array of its own, whose classes "
            f'become numbers: columns={{"{column}": "{column}", ...}}'
        )
    if values.dtype != object:
        return values
    try:
        return np.stack([np.asarray(value) for value in values])  # lists of equal length
    except (TypeError, ValueError):
        pass
    kinds = [type(value).__name__ for value in values]
    row = next((at for at, kind in enumerate(kinds) if kind != kinds[0]), 0)
    if kinds[row] == kinds[0]:
        return of_list(f"{where}: column {column!r}", list(values))
    raise DatasetInputError(
        f"{where}: column {column!r} mixes {kinds[0]} in row 0 with {kinds[row]} in row {row}; "
        "make them numbers"
    )
