"""Lists, tensors, frames and sparse matrices as arrays, or why they cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.ragged import RaggedArray


def as_array(name: str, value: Any) -> Any:
    """Return an array that a data set can be written from.

    Examples
    --------
    >>> as_array("y", ["cat", "dog"])
    array(['cat', 'dog'], dtype='<U3')
    """
    check_is_read(name, value)
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor
        try:
            return value.detach().cpu().numpy()
        except TypeError as error:
            raise DatasetInputError(f"{name} cannot become an array: {error}") from None
    if hasattr(value, "toarray"):
        raise DatasetInputError(f"{name} is a sparse matrix; give {name}.toarray()")
    if type(value).__module__.startswith("pyarrow") and hasattr(value, "to_pandas"):
        value = value.to_pandas()
    if isinstance(value, RaggedArray):
        return value
    array = value.to_numpy() if hasattr(value, "to_numpy") else value
    if isinstance(value, list):
        array = of_list(name, value)
        if isinstance(array, RaggedArray):
            return array
    if isinstance(value, Mapping):  # of a tokenizer, or of a model with several inputs
        raise DatasetInputError(
            f"{name} must be one array, got {shown(value)} of {', '.join(map(repr, value))}; write "
            f'data=ShardedDataset.write("data.zarr", {{**{name}, "y": ...}}, n_shards=8)'
        )
    if not all(hasattr(array, member) for member in ("shape", "dtype", "__getitem__")):
        # A data set is written of Dask's tables, too, part by part.
        cure = f"; give {name}.compute()" if hasattr(value, "compute") else ""
        raise DatasetInputError(
            f"{name} must be an array, a tensor, a data frame or a series, got {shown(value)}{cure}"
        )
    if not isinstance(array, np.ndarray) or array.dtype != object:
        return array  # read block by block: it may be larger than memory
    is_text = [isinstance(item, str) for item in array.flat]
    if all(is_text):
        return array.astype("U")
    if array.size and all(isinstance(item, bytes) for item in array.flat):
        raise DatasetInputError(
            f"{name} holds bytes; make text of labels, such as by [each.decode() for each in "
            f"{name}], and {name}.astype('S') keeps bytes"
        )
    import pandas as pd  # only here: workers that read shards do without

    lacking = np.flatnonzero(pd.isna(array)) if array.ndim == 1 else np.array([], int)
    if len(lacking) and len(lacking) < array.size:
        raise DatasetInputError(
            f"row {lacking[0]} of {name} has no value; leave it out, or fill it in"
        )
    if all(isinstance(item, bool | int | float | np.bool_ | np.number) for item in array.flat):
        numbers = np.array(array.tolist())
        if numbers.dtype != object:  # some are larger than any of NumPy's
            return numbers
    if hasattr(value, "select_dtypes"):  # a frame of pandas
        if all(getattr(dtype, "kind", "") in "biuf" for dtype in value.dtypes):
            return value.to_numpy(dtype="float64", na_value=np.nan)  # some are bool or nullable
        columns = [label for label in value if not _is_numbers(value[label])]
        cures = "; ".join(_cures(name, value[columns]))
        raise DatasetInputError(f"not all columns of {name} are numbers: {cures}")
    raise DatasetInputError(
        f"{name} holds neither numbers nor text alone; make numbers of it, such as with "
        f"pandas.get_dummies({name}, dtype=float)"
    )


def _is_numbers(column: Any) -> bool:
    """Whether a column of pandas holds numbers, of whatever dtype."""
    import pandas as pd

    kinds = ("integer", "floating", "mixed-integer-float", "boolean")
    is_number = getattr(column.dtype, "kind", "O") in "biufc"
    return is_number or pd.api.types.infer_dtype(column) in kinds


def as_number(kind: str, column: str) -> str:
    """Return what makes numbers of a column of pandas that has dates ("M") or durations ("m").

    Examples
    --------
    >>> as_number("m", "frame['took']")
    "write frame['took'] = frame['took'].dt.total_seconds()"
    """
    since = f"({column} - {column}.min()).dt.days"
    return f"write {column} = {since if kind == 'M' else f'{column}.dt.total_seconds()'}"


def _cures(name: str, frame: Any) -> Iterator[str]:
    """Say of columns that are no numbers what they hold, and how it becomes numbers."""
    import pandas as pd

    others = []
    for label, column in frame.items():
        of = f"{name}[{label!r}]"
        if (kind := column.dtype.kind) in "mM":
            what = "dates" if kind == "M" else "durations"
            yield f"{label!r} holds {what}, {as_number(kind, of)}"
        elif column.map(lambda value: isinstance(value, str)).all() and (
            pd.to_numeric(column.astype(object), errors="coerce").notna().all()
        ):
            yield f"{label!r} holds numbers as text, write {of} = pandas.to_numeric({of})"
        else:
            others.append(label)
    if others:
        which = ", ".join(map(repr, others))
        one = len(others) == 1
        yield (
            f"{which} {'holds' if one else 'hold'} text, categories or objects, write {name} = "
            f"pandas.get_dummies({name}, columns=[{which}], dtype=float)"
        )


def of_list(name: str, values: Sequence[Any]) -> NDArray[Any] | RaggedArray:
    """Return samples as an array; as a ragged one if they are not of one shape.

    Raises
    ------
    DatasetInputError
        If they are neither; names the sample.

    Examples
    --------
    >>> of_list("ids", [[1, 2], [3]])
    <RaggedArray int64[*]: 2 samples, 3 values>
    """
    if len(values) and hasattr(values[0], "detach"):
        values = [value.detach() if hasattr(value, "detach") else value for value in values]
    try:
        array = np.asarray(values)
    except TypeError as error:  # tensors of bfloat16
        raise DatasetInputError(f"{name} cannot become an array: {error}") from None
    except ValueError:
        pass
    else:
        if array.dtype.kind == "U":
            _check_text(name, values)
        check_bytes(name, array, values)
        return array
    try:
        return RaggedArray.of(values)
    except ValueError as error:
        raise DatasetInputError(
            f"{name} is neither an array nor a ragged one: {error}; give all samples one dtype and "
            "one number of axes"
        ) from None


def _check_text(name: str, values: Sequence[Any]) -> None:
    """Raise a `DatasetInputError` if not all of a list is text: NumPy makes text of numbers."""
    objects = np.asarray(values, object)
    for at, value in zip(np.ndindex(objects.shape), objects.flat, strict=True):
        if not isinstance(value, str):
            raise DatasetInputError(
                f"row {at[0]} of {name} has {value!r} among text; give text alone, or numbers "
                "alone, and leave out rows without a value"
            )


def check_bytes(name: str, array: Any, values: Any, row: int = 0) -> None:
    """Raise a `DatasetInputError` if bytes end in zeros, which an array of NumPy does not keep."""
    if array.dtype.kind != "S" or (hasattr(values, "itemsize") and values.dtype.kind == "S"):
        return
    objects = np.asarray(values, object)
    for at, value in zip(np.ndindex(objects.shape), objects.flat, strict=True):
        if isinstance(value, bytes) and value.endswith(b"\0"):
            raise DatasetInputError(
                f"row {row + at[0]} of {name} is bytes that end in a zero, which an array of NumPy "
                'drops; make numbers of them: [numpy.frombuffer(value, "uint8") for value in ...]'
            )


def check_is_read(name: str, value: Any) -> None:
    """Raise a `DatasetInputError` if a table of polars has no rows until it is collected."""
    if type(value).__name__ == "LazyFrame":
        raise DatasetInputError(
            f"{name} is a LazyFrame, which is not read yet; give {name}.collect()"
        )


def check_order(given: Mapping[str, Any]) -> None:
    """Raise a `DatasetInputError` if tables or columns of pandas label rows in another order.

    Each is compared with the first one that has labels.
    """
    indices: dict[str, Any] = {name: getattr(each, "index", None) for name, each in given.items()}
    names = [name for name, index in indices.items() if hasattr(index, "equals")]
    for other in names[1:]:
        first, index = indices[names[0]], indices[other]
        if first.equals(index) or len(first) != len(index) or not first.is_unique:
            continue
        if first.isin(index).all():
            raise DatasetInputError(
                f"the rows of {other} are in another order than those of {names[0]}, as their "
                f"index says; give {other}.loc[{names[0]}.index], or {other}.to_numpy() if they "
                "belong together as they stand"
            )


def check_labels(name: str, values: Any, where: str) -> None:
    """Raise a `DatasetInputError` if ``y``, one number a sample, has samples without a number."""
    is_column = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind == "f"
    if name != "y" or not is_column:
        return
    missing = np.flatnonzero(np.isnan(values))
    if missing.size:
        raise DatasetInputError(
            f"{where}: row {missing[0]} of 'y' has no value; fill it in, leave the row "
            "out, or give the array another name if a loss of yours knows what to do"
        )
