"""Whether a data set fits a workload, by what is known before any of it is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from dagsel.errors import WorkloadError
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.workloads.base import DataOutline
from dagsel.workloads.batches import check_numbers, say_unused

logger = logging.getLogger("dagsel")


def dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    """Return the one dtype of a module's floating parameters and buffers; None if there are more.

    Examples
    --------
    >>> dtype_of(torch.nn.BatchNorm1d(2))
    torch.float32
    """
    held = [*module.parameters(), *module.buffers()]
    found = {tensor.dtype for tensor in held if tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else None


class Casting:
    """Casts float64 arrays that a float32 model needs as float32: inputs, and maybe targets.

    Targets are cast only for a loss of PyTorch's own that refuses them.

    Parameters
    ----------
    loss
        The workload's loss.

    Examples
    --------
    >>> casting = Casting(torch.nn.functional.huber_loss)
    >>> arrays = {"x": np.zeros(3), "y": np.zeros(3)}
    >>> _ = casting.learn(torch.nn.Linear(1, 1))
    >>> [str(array.dtype) for array in casting.cast(arrays).values()]
    ['float32', 'float32']
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self._dtype: torch.dtype | None = None
        self._has_said = False

    def learn(self, module: torch.nn.Module) -> torch.nn.Module:
        """Take in a model; the first one decides."""
        self._dtype = self._dtype or dtype_of(module)
        return module

    def cast(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays, some of them as float32."""
        names = self._names({name: array.dtype for name, array in arrays.items()})
        return {n: _as_float32(a) if n in names else a for n, a in arrays.items()}

    def dtypes(self, data: DataOutline) -> dict[str, np.dtype[Any]]:
        """Return the dtypes of the arrays that are cast."""
        names = self._names({name: dtype for name, (dtype, _) in data.arrays.items()})
        return dict.fromkeys(names, np.dtype(np.float32))

    def say(self, data: DataOutline, *, all_used: bool = False) -> None:
        """Log once which arrays of a data set are cast, and which no batch has, unless all do."""
        if self._has_said:
            return
        self._has_said = True
        if not all_used:
            say_unused(data, "give input_fn= to use more, or write the data set without them")
        if names := self.dtypes(data):
            logger.warning(
                "workers cast to the model's float32 what is float64: %s; write the data set with "
                ".astype('float32') to halve what it takes",
                " and ".join(map(repr, names)),
            )

    def _names(self, dtypes: Mapping[str, np.dtype[Any]]) -> tuple[str, ...]:
        if self._dtype is not torch.float32:
            return ()
        first, last = next(iter(dtypes)), [*dtypes][-1]
        wide = [name for name in dict.fromkeys((first, last)) if dtypes[name] == np.float64]
        # Whether the loss bears them is tried where it matters alone, as it takes milliseconds.
        return tuple(name for name in wide if name == first or self._refuses_wide_targets)

    @cached_property
    def _refuses_wide_targets(self) -> bool:
        return _refuses_float64(self.loss)


def _as_float32(array: Any) -> Any:
    if isinstance(array, RaggedArray):
        return RaggedArray(array.values.astype(np.float32, copy=False), array.shapes)
    return np.asarray(array, np.float32)


class FitsData:
    """Says what a workload casts."""

    input_fn: Any
    _casting: Casting

    def cast_dtypes(self, data: DataOutline) -> Mapping[str, np.dtype[Any]]:
        """Return the dtypes of the arrays that are cast, by name."""
        return self._casting.dtypes(data) if self.input_fn is None else {}


def is_mapped(arrays: Mapping[str, Any]) -> bool:
    """Whether arrays are read from a disk as they are used; such arrays cannot be written to."""
    held = (a.values if isinstance(a, RaggedArray) else a for a in arrays.values())
    return not any(array.flags.writeable for array in held)


def _refuses_float64(loss: Any) -> bool:
    """Whether a loss of PyTorch's own fails for float64 targets of a float32 output."""
    while isinstance(loss, partial):
        loss = loss.func
    if not str(getattr(loss, "__module__", "")).startswith("torch.nn."):
        return False
    output = torch.full((2, 1), 0.5, requires_grad=True)
    try:
        with torch.enable_grad():
            loss(output, torch.full((2, 1), 0.5, dtype=torch.float64)).backward()
    except Exception as error:  # noqa: BLE001 - one that needs more arguments says so by its own
        return "Double" in str(error)
    return False


def check_dtypes(data: DataOutline) -> None:
    """Raise a `WorkloadError` if an array cannot become a tensor."""
    check_numbers(data)
    for name, (dtype, _) in data.arrays.items():
        try:
            torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
        except TypeError as error:
            raise WorkloadError(
                f"array {name!r} of dtype {dtype} cannot become a tensor: {error} Write the data "
                "set without it, or with numbers in its place"
            ) from error
