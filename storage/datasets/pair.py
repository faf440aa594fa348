"""Two arrays in place of a data set: inputs and targets, written as a data set of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dagsel.errors import DatasetInputError
from dagsel.storage.datasets import transaction
from dagsel.storage.datasets.dataset import ShardedDataset
from dagsel.storage.datasets.inputs.arrays import as_array, check_order
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.reading import joined
from dagsel.storage.datasets.inputs.tables import (
    getter,
    is_text,
    learn_order,
    make_array,
    say_rounded,
    table_columns,
)
from dagsel.storage.datasets.manifest import Manifest
from dagsel.storage.datasets.plan import plan_write
from dagsel.storage.files import Folder

logger = logging.getLogger("dagsel")

VALIDATION = 0.2


@dataclass(frozen=True, slots=True)
class ArrayPair:
    """Inputs and targets that can be written as a data set."""

    arrays: Mapping[str, Any]
    manifest: Manifest  # of the data set that they become

    @classmethod
    def read(cls, x: Any, y: Any) -> ArrayPair:
        """Read arrays, tensors, lists, a table and a column.

        Several columns of numbers become float32, as in `ShardedDataset.write`; targets of text
        become numbers, and `ShardedDataset.classes` says which. `ShardedDataset.columns` has the
        names of a table's columns.

        Raises
        ------
        DatasetInputError
            If they cannot become a data set; says which of them, and what to do.
        """
        _check_one_input(x, y)
        check_order({"x": x, "y": y})
        classes = Classes()
        inputs, names = _inputs(x)
        arrays = {"x": inputs, "y": _targets(y, classes)}
        _warn_of_what_is_not_finite("x", arrays["x"], names)
        _warn_of_what_is_not_finite("y", arrays["y"])
        options: dict[str, Any] = {"n_shards": "auto", "validation": VALIDATION, "seed": 0}
        columns = joined({"x": names})
        known: dict[str, Any] = {"classes": classes.known, "columns_of": columns}
        plan = plan_write(arrays, "data-00000000", **known, **options)
        return cls(arrays, plan.manifest)

    def write(self, folder: Folder) -> ShardedDataset:
        """Write them as a data set, in place of one that is there."""
        plan = partial(
            plan_write,
            self.arrays,
            n_shards=self.manifest.n_shards,
            validation=VALIDATION,
            seed=0,
            classes=self.manifest.classes,
            columns_of=self.manifest.columns,
        )
        # Said first: to write large data takes minutes, and a log shows no progress bar.
        logger.warning(
            "the data is written to %s: %d shard%s, %d samples to train and %d to validate; to "
            "choose these numbers, write it by ShardedDataset.write",
            folder.url,
            self.manifest.n_shards,
            "s" * (self.manifest.n_shards > 1),
            self.manifest.n_train,
            self.manifest.n_validation,
        )
        return ShardedDataset(folder, transaction.write(folder, plan, overwrite=True))


def _check_one_input(x: Any, y: Any) -> None:
    """Raise a `DatasetInputError` for several inputs, as models of Keras take them in a list."""
    if not isinstance(x, list | tuple) or not hasattr(y, "__len__") or len(x) in (0, len(y)):
        return
    if all(getattr(part, "shape", ())[:1] == (len(y),) for part in x):
        each = ", ".join(f'"x{at}": x[{at}]' for at in range(len(x)))
        raise DatasetInputError(
            f"x is a {type(x).__name__} of {len(x)} arrays, each with {len(y)} samples; write "
            f'data=ShardedDataset.write("data.zarr", {{{each}, "y": y}}, n_shards=8), and give the '
            "workload an input_fn"
        )


def _inputs(x: Any) -> tuple[Any, list[str]]:
    """Return inputs, several columns of a table as a model takes them, and the columns' names."""
    array = as_array("x", x)  # which names the columns that hold something else
    names = table_columns(x) or []
    is_numbers = isinstance(array, np.ndarray) and array.dtype.kind in "biuf"
    if not (names and is_numbers):
        return array, names
    one = len(names) == 1  # a feature, too
    values = array.astype(np.float32) if one else make_array("x", names, getter(x), Classes(), "x")
    if one:
        say_rounded(names[0], array, values)
    _check_complete(values, names)
    return values, names


def _check_complete(values: Any, names: list[str]) -> None:
    """Raise a `DatasetInputError` that names the first value that a table lacks."""
    if values.dtype.kind != "f" or not (missing := np.isnan(values)).any():
        return
    raise DatasetInputError(
        f"x lacks {int(missing.sum())} of its values, the first {_first(missing, names)}; fill "
        "them in, such as by x.fillna(x.median()), or give x.to_numpy() if your model takes NaN"
    )


def _warn_of_what_is_not_finite(name: str, values: Any, columns: Sequence[str] = ()) -> None:
    """Say in the log where numbers are NaN or infinite: some models take them, most do not."""
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        return
    with np.errstate(all="ignore"):
        if np.isfinite(values.sum(dtype=np.float64)):  # the sum is none by a single one of them
            return
    is_odd = ~np.isfinite(values)
    if not (n := int(is_odd.sum())):
        return
    logger.warning(
        "%d of the numbers in %s %s NaN or infinite, the first %s: with one of them the "
        "loss of most models is NaN; fill them in, such as by np.nan_to_num(%s)",
        n,
        name,
        "is" if n == 1 else "are",
        _first(is_odd, columns),
        name,
    )


def _first(marked: Any, columns: Sequence[str]) -> str:
    """Say where the first value stands that is marked, in which column if it is a table's."""
    row, column = (int(at) for at in np.argwhere(marked.reshape(len(marked), -1))[0])
    return f"in row {row}" + (f" of column {columns[column]!r}" if columns else "")


def _targets(y: Any, classes: Classes) -> Any:
    """Return targets; text as the numbers of its classes."""
    learn_order("y", y, classes)
    array = as_array("y", y)
    if isinstance(array, np.ndarray) and array.shape[1:] == (1,) and is_text(array):
        array = array.reshape(-1)
    if not (isinstance(array, np.ndarray) and array.ndim == 1):
        return array
    if is_text(array):
        return make_array("y", ["y"], lambda _: array, classes, "y")
    return array
