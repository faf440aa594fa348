"""What workloads share that take NumPy arrays batch by batch: those of JAX and of Keras.

Shards stay arrays of the host. A batch is gathered from them, `input_fn` makes inputs and targets
of it, and the library sends these to its device.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from dagsel.checks import flag, shown, takes, whole
from dagsel.errors import CheckpointCorruptError, NothingTrainedError, WorkloadError
from dagsel.state import NUMPY, Tensor
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.workloads.base import Config, DataOutline, Visit
from dagsel.workloads.batches import (
    Cursor,
    ShardPass,
    as_pair,
    batch_size_of,
    check_batches,
    check_numbers,
    check_order,
    sizes_of,
)
from dagsel.workloads.random_streams import preserved_streams, seed_streams

Shard: TypeAlias = dict[str, Any]
InputFn: TypeAlias = Callable[[dict[str, Any], Any], tuple[Any, Any]]
T = TypeVar("T")

#: Safetensors' names of dtypes that NumPy has from the package ml_dtypes.
_EXTENDED = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_CODES = NUMPY | _EXTENDED
_NAMES = {code: name for name, code in _CODES.items()}


def settle_jax() -> None:
    """Have JAX take GPU memory as it is needed, and as many threads as ``OMP_NUM_THREADS`` says.

    What the environment says already holds. JAX reads it when it looks for its devices, so this is
    called in each worker before anything is computed.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        os.environ.setdefault("PJRT_NPROC", os.environ["OMP_NUM_THREADS"])


def code_of(dtype: Any, name: str) -> str:
    """Return safetensors' name of a dtype, given as NumPy has it; `name` is whose dtype it is."""
    try:
        return _CODES[str(dtype)]
    except KeyError:
        raise WorkloadError(f"{name}: an array of dtype {dtype} cannot be in a state") from None


def to_tensor(array: Any, name: str) -> Tensor:
    """Return an array as a tensor of a state, bfloat16 and float8 too.

    Examples
    --------
    >>> to_tensor(np.ones(3, "float32"), "w").dtype
    'F32'
    """
    made = np.ascontiguousarray(array)
    shape = np.shape(array)  # that of a scalar is () still
    return Tensor(code_of(made.dtype, name), shape, made.reshape(-1).view(np.uint8))


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor of a state as an array; the numbers are not copied."""
    name = _NAMES[tensor.dtype]
    if name in _EXTENDED:
        dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    else:
        dtype = np.dtype(name)
    array: NDArray[Any] = tensor.data.view(dtype).reshape(tensor.shape)
    return array


def check_shapes(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Raise a `CheckpointCorruptError` if a state does not hold what a configuration makes."""
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            raise CheckpointCorruptError(
                f"a state is damaged, or is that of another workload: {name!r} is "
                f"{found.get(name, 'missing')} there, and the model of its configuration has "
                f"{expected.get(name, 'no such array')}"
            )


def new_beginning(
    state: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return a state's arrays for a new configuration.

    What begins otherwise under the new configuration begins anew, as a learning rate that the
    optimizer keeps; all else stays as it is trained.

    Parameters
    ----------
    state
        The trained arrays.
    before, after
        Those with which a trial would begin under the one and the other configuration.

    Raises
    ------
    WorkloadError
        If arrays differ in number or shape.
    """
    for name in [*before, *after]:
        old, new = before.get(name), after.get(name)
        if old is None or new is None or (old.dtype, old.shape) != (new.dtype, new.shape):
            raise WorkloadError(
                "a trial cannot go on with another configuration that gives its model or "
                f"optimizer other arrays: {name!r} is {_described(old)} and would be "
                f"{_described(new)}"
            )
    return {
        name: tensor
        if name not in before or np.array_equal(before[name].data, after[name].data)
        else after[name]
        for name, tensor in state.items()
    }


def _described(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} of shape {tensor.shape}"


def _content(value: Any) -> str:
    """Return text that is equal for equal values: what is printed of one may be its address."""
    return hashlib.blake2b(cloudpickle.dumps(value)).hexdigest()


#: How large what is compiled may be in all, as far as it says so in ``nbytes``.
_MOST_BYTES = 256 << 20


class Kept(Generic[T]):
    """What is compiled for the configurations that a worker has seen last.

    Parameters
    ----------
    most
        How many are kept.

    Examples
    --------
    >>> kept = Kept(most=1)
    >>> kept.get({"lr": 0.1}, 0, lambda: "first"), kept.get({"lr": 0.1}, 0, lambda: "again")
    ('first', 'first')
    >>> _ = kept.get({"lr": 0.2}, 0, lambda: "second")
    >>> kept.get({"lr": 0.1}, 0, lambda: "anew")
    'anew'
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, config: Config, seed: int, make: Callable[[], T]) -> T:
        """Return what was made for a configuration and a seed, or make it."""
        key = json.dumps(dict(config), sort_keys=True, default=_content), seed
        if key not in self._made:
            self._made[key] = make()
            while len(self._made) > 1 and self._is_full():
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def _is_full(self) -> bool:
        n_bytes = sum(getattr(made, "nbytes", 0) for made in self._made.values())
        return len(self._made) > self._most or n_bytes > _MOST_BYTES

    def __reduce__(self) -> tuple[Any, ...]:  # a worker compiles for itself
        return Kept, (self._most,)


class TakesArrays:
    """A workload that takes NumPy arrays batch by batch."""

    batch_size: int | Callable[[Any], int]
    input_fn: InputFn | None
    drop_last: bool
    eval_batch_size: int

    def _set_batches(
        self, batch_size: Any, input_fn: Any, drop_last: Any, eval_batch_size: Any
    ) -> None:
        if not callable(batch_size):
            whole("batch_size", batch_size, error=WorkloadError)
        if input_fn is not None and not takes(input_fn, 2):
            raise WorkloadError(
                "input_fn must be a function, called as input_fn(batch, config), got "
                f"{shown(input_fn)}; write input_fn=lambda batch, config: (batch['x'], batch['y'])"
            )
        self.batch_size, self.input_fn = batch_size, input_fn
        self.drop_last = flag("drop_last", drop_last, error=WorkloadError)
        self.eval_batch_size = whole("eval_batch_size", eval_batch_size, error=WorkloadError)

    def validate_data(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if nothing can be trained on a data set."""
        check_numbers(data)
        if self.input_fn is None:
            check_order(data)
        if data.ragged and self.input_fn is None:
            raise WorkloadError(
                f"the samples of {sorted(data.ragged)[0]!r} differ in shape: give the workload an "
                "input_fn that pads the list of arrays in a batch to one shape"
            )
        check_batches(self._batch_size(config), data, drop_last=self.drop_last)

    def prepare(self, arrays: Mapping[str, Any]) -> Shard:
        """Keep a shard's arrays as they are, in this machine's byte order."""
        return {
            name: array if isinstance(array, RaggedArray) else _native(np.asarray(array))
            for name, array in arrays.items()
        }

    def _batch_size(self, config: Config) -> int:
        return batch_size_of(self.batch_size, config)

    def _training_batches(
        self,
        shard: Shard,
        config: Config,
        visit: Visit,
        saved: dict[str, Any] | None,
        should_stop: Callable[[], bool],
    ) -> ShardPass:
        """Return the batches of a visit, each as inputs and targets."""
        n_samples, size = _length(shard), self._batch_size(config)
        order, sizes = visit.order(n_samples), sizes_of(n_samples, size, drop_last=self.drop_last)
        parts = [(number, order[number * size :][:n]) for number, n in enumerate(sizes)]
        key = [visit.seed, visit.trial, visit.epoch, visit.shard, 3]

        def make(part: tuple[int, NDArray[np.int64]]) -> tuple[Any, Any]:
            return self._pair(_rows(shard, part[1]), config, [*key, part[0]])

        cursor = Cursor.begin(saved, visit)
        return ShardPass(parts, sizes, make=make, cursor=cursor, should_stop=should_stop)

    def _evaluation_batches(
        self, shard: Shard, config: Config
    ) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """Yield the number of samples of each batch, and its inputs and targets."""
        n_samples, size = _length(shard), self.eval_batch_size
        for start in range(0, n_samples, size):
            stop = min(start + size, n_samples)
            rows = _rows(shard, np.arange(start, stop))
            yield stop - start, self._pair(rows, config, [start])

    def _pair(self, rows: dict[str, Any], config: Config, key: list[int]) -> tuple[Any, Any]:
        """Return inputs and targets; what `input_fn` draws depends on the batch's key alone."""
        if self.input_fn is None:
            return next(iter(rows.values())), next(reversed(rows.values()))
        seed = np.random.SeedSequence([abs(number) for number in key]).generate_state(1)[0]
        with preserved_streams():
            seed_streams(int(seed))
            made: Any = self.input_fn(rows, config)
        return as_pair(made)

    def _check_inputs(self, inputs: Any, visit: Visit) -> None:
        if self.input_fn is not None and isinstance(inputs, np.ndarray) and not inputs.size:
            raise NothingTrainedError(
                f"input_fn returns inputs without a sample for a batch of shard {visit.shard}: "
                "return what the model gets of the batch's arrays"
            )


def _native(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.byteorder in "=|":
        return array
    return array.astype(array.dtype.newbyteorder("="))


def _length(shard: Shard) -> int:
    return len(next(iter(shard.values())))


def _rows(shard: Shard, places: NDArray[np.int64]) -> dict[str, Any]:
    """Return the samples at some places: an array, or a list of arrays that differ in shape."""
    return {
        name: [array[int(place)] for place in places]
        if isinstance(array, RaggedArray)
        else array[places]
        for name, array in shard.items()
    }
