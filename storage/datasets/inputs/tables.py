"""Tables of pandas, polars and Arrow: columns become arrays."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.arrays import as_number, check_bytes, check_labels, of_list
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.ragged import RaggedArray

logger = logging.getLogger("dagsel")


def table_columns(source: Any) -> list[str] | None:
    """Names of a table's columns, be it of pandas, polars or Arrow; None if it is no table.

    Raises
    ------
    DatasetInputError
        If two columns have one name.
    """
    library = type(source).__module__.partition(".")[0]
    if library == "datasets":  # Hugging Face's has samples
        return None
    # Arrow's columns are values. Those of pandas are attributes, too, whatever they are called.
    columns: Any = getattr(source, "column_names" if library == "pyarrow" else "columns", None)
    if not (isinstance(columns, Sequence) or hasattr(columns, "to_list")):
        return None
    names = [str(column) for column in columns]
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise DatasetInputError(
            f"two columns of the table are called {twice[0]!r}; rename one of them, or leave it out"
        )
    return names


def getter(source: Any) -> Callable[[str], NDArray[Any]]:
    """Return a function that makes an array of a table's column.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame([[1, 2], [3, 4]])  # its columns are 0 and 1
    >>> table_columns(table), getter(table)("1").tolist()
    (['0', '1'], [2, 4])
    """
    named = _labels(source)

    def get(name: str) -> NDArray[Any]:
        column = source[named.get(name, name)]
        if str(getattr(column, "dtype", "")).startswith("category"):
            column = column.astype("object")
        if type(column).__module__.startswith("pyarrow"):
            column = column.to_pandas()
        array = column.to_numpy() if hasattr(column, "to_numpy") else np.asarray(column)
        return np.asarray(array)

    return get


def _labels(source: Any) -> dict[str, Any]:
    """Return the columns of a table by their names; those of pandas need not be text."""
    labels: Any = getattr(source, "columns", None)
    return {str(label): label for label in labels} if hasattr(labels, "to_list") else {}


def learn_orders(source: Any, wanted: Mapping[str, list[str]], classes: Classes) -> None:
    """Do as `learn_order` for the columns of a table that become arrays of their own."""
    named = _labels(source)
    for name, of in wanted.items():
        if len(of) == 1 and of[0] in named:
            learn_order(name, source[named[of[0]]], classes)


def learn_order(name: str, column: Any, classes: Classes) -> None:
    """Learn the order of an ordered column of pandas; other text has that of the alphabet.

    Examples
    --------
    >>> import pandas as pd
    >>> sizes = pd.Series(pd.Categorical(["L", "S"], categories=["S", "M", "L"], ordered=True))
    >>> classes = Classes()
    >>> learn_order("size", sizes, classes)
    >>> classes.known
    {'size': ['S', 'M', 'L']}
    """
    dtype = getattr(column, "dtype", None)
    if getattr(dtype, "ordered", False) is True and not classes.is_fixed:
        values = list(getattr(dtype, "categories", ()))
        if values and all(isinstance(value, str) for value in values):
            classes.known.setdefault(name, values)


def make_array(
    name: str, of: list[str], get: Callable[[str], NDArray[Any]], classes: Classes, where: str
) -> NDArray[Any] | RaggedArray:
    """Make an array of one column or several."""
    if len(of) == 1:
        values = get(of[0])
        if is_text(values) or (values.dtype == object and name in classes.known):
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
        if part.dtype.kind in "mM":
            what, cure = _no_numbers(column, part)
            raise DatasetInputError(
                f"{where}: column {column!r} holds {what}, and joins others as numbers: {cure}, or "
                "leave it out"
            )
        columns.append(part)
    dtype = np.result_type(*columns)
    # Features are what a model of float32 takes; float64 would be cast on each worker.
    wanted = np.dtype(np.float32) if dtype.kind in "biuf" else dtype
    joined = np.empty((len(columns[0]), len(columns)), wanted)
    for at, part in enumerate(columns):
        joined[:, at] = part
        say_rounded(of[at], part, joined[:, at])
    return joined


def say_rounded(column: str, values: NDArray[Any], kept: Any) -> None:
    """Say in the log that whole numbers of a column are kept as others."""
    if values.dtype.kind in "iu" and (kept != values).any():
        _say_rounded(column)


@cache
def _say_rounded(column: str) -> None:
    logger.warning(
        "column %r holds whole numbers above 16777216, which lose their last digits in the float32 "
        "that inputs are: give it an array of its own, as in ShardedDataset.write(..., "
        "columns={..., %r: %r}), or subtract its least value",
        column,
        column,
        column,
    )


def say_missing(
    where: str, arrays: Mapping[str, Any], wanted: Mapping[str, list[str]], said: set[str]
) -> None:
    """Say in the log which columns lack values, each once, and add it to what was said.

    Of a model whose input or target is NaN the loss is, too.
    """
    for name, of in wanted.items():
        values = arrays[name]
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            continue
        is_missing = np.isnan(values).reshape(len(values), -1)
        columns = of if is_missing.shape[1] == len(of) else of * is_missing.shape[1]
        for at in np.flatnonzero(is_missing.any(0)):
            if (column := columns[at]) not in said:
                said.add(column)
                logger.warning(
                    "%s: column %r lacks %d of its values, the first in row %d: with one of them "
                    "the loss of most models is NaN; fill them in, or leave these rows out",
                    where,
                    column,
                    int(is_missing[:, at].sum()),
                    int(np.flatnonzero(is_missing[:, at])[0]),
                )


def _no_numbers(column: str, values: NDArray[Any]) -> tuple[str, str]:
    """Return what a column holds that is no numbers, and how it becomes some."""
    frame, kind, first = f"frame[{column!r}]", values.dtype.kind, values[0]
    if kind != "O":
        return ("dates" if kind == "M" else "durations"), as_number(kind, frame)
    what = f"values of type {type(first).__name__}"
    if isinstance(first, np.ndarray | list | tuple):
        return f"lists of {type(first[0]).__name__}", "make numbers or one text of each"
    if hasattr(first, "total_seconds"):
        return what, as_number("m", frame)
    if hasattr(first, "toordinal"):
        made = f"write {frame} = pandas.to_datetime({frame}), and then"
        return what, as_number("M", frame).replace("write", made)
    is_decimal = hasattr(first, "quantize")
    return what, f"write {frame} = {frame}.astype(float)" if is_decimal else "make them numbers"


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
        stacked = np.stack([np.asarray(value) for value in values])  # lists of equal length
    except (TypeError, ValueError):
        pass
    else:
        if stacked.dtype == object:
            what, cure = _no_numbers(column, values)
            raise DatasetInputError(
                f"{where}: column {column!r} holds {what}, which an array does not store: {cure}, "
                "or leave it out"
            )
        check_bytes(f"{where}: column {column!r}", stacked, values)
        return stacked
    kinds = [type(value).__name__ for value in values]
    row = next((at for at, kind in enumerate(kinds) if kind != kinds[0]), 0)
    if kinds[row] == kinds[0]:
        return of_list(f"{where}: column {column!r}", list(values))
    raise DatasetInputError(
        f"{where}: column {column!r} mixes {kinds[0]} in row 0 with {kinds[row]} in row {row}; "
        "make them numbers"
    )
