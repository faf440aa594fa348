"""Lists, tensors, frames and sparse matrices as arrays, or why they cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown
from dagsel.errors import DatasetInputError


def as_array(name: str, value: Any) -> Any:
    """Return an array that a data set can be written from.

    Examples
    --------
    >>> as_array("y", ["cat", "dog"])
    array(['cat', 'dog'], dtype='<U3')
    """
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor
        try:
            return value.detach().cpu().numpy()
        except TypeError as error:
            raise DatasetInputError(f"{name} cannot become an array: {error}") from None
    if hasattr(value, "toarray"):
        raise DatasetInputError(f"{name} is a sparse matrix; give {name}.toarray()")
    array = value.to_numpy() if hasattr(value, "to_numpy") else value
    if isinstance(value, list):
        array = of_list(name, value)
    if not all(hasattr(array, member) for member in ("shape", "dtype", "__getitem__")):
        raise DatasetInputError(
            f"{name} must be an array, a tensor, a data frame or a series, got {shown(value)}"
        )
    if not isinstance(array, np.ndarray) or array.dtype != object:
        return array  # read block by block: it may be larger than memory
    if all(isinstance(item, str) for item in array.flat):
        return array.astype("U")
    others = getattr(value, "select_dtypes", None)
    columns = list(others(exclude=["number", "bool"]).columns) if others else []
    which = (
        f"columns {', '.join(map(repr, columns))} of {name} hold" if columns else f"{name} holds"
    )
    raise DatasetInputError(
        f"{which} neither numbers nor text alone; make numbers of them, such as with "
        f"pandas.get_dummies({name})"
    )


def of_list(name: str, values: list[Any] | tuple[Any, ...]) -> NDArray[Any]:
    """Return an array of samples; raise a `DatasetInputError` if they are not of one shape."""
    try:
        return np.asarray(values)
    except ValueError:
        shapes = [np.shape(value) for value in values]
        row = next((at for at, shape in enumerate(shapes) if shape != shapes[0]), 0)
        raise DatasetInputError(
            f"{name} is no regular array: sample {row} has shape {shapes[row]}, and sample 0 "
            f"{shapes[0]}; cut or pad them to one shape"
        ) from None
