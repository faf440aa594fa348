"""A trial's state as one flat buffer, which hops between workers and is stored.

The buffer is a safetensors file in memory: a length, a JSON header, then the bytes of all tensors.
So it hops between workers as a single frame without a copy, is stored and hashed in one pass, and
any safetensors reader opens it. Everything but tensors (hyper-parameters, counters, the place in
an epoch) is JSON in the header, so reading a state runs no code.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dagsel.codec import Json
from dagsel.errors import CheckpointCorruptError, DagselError, WorkloadError

Leaf = TypeVar("Leaf")

#: Bytes of an element of each dtype that the safetensors format names.
ITEMSIZE = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "BOOL": 1, "U8": 1, "I8": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
NUMPY = {
    "float64": "F64", "int64": "I64", "uint64": "U64", "complex64": "C64", "float32": "F32",
    "int32": "I32", "uint32": "U32", "float16": "F16", "int16": "I16", "uint16": "U16",
    "bool": "BOOL", "uint8": "U8", "int8": "I8",
}  # fmt: skip
_NUMPY_DTYPE = {code: np.dtype(name) for name, code in NUMPY.items()}
_META = "dagsel"
_MAX_HEADER = 100_000_000  # the bound of the safetensors format itself


@dataclass(frozen=True, slots=True)
class Tensor:
    """The bytes of one tensor, independent of a library.

    Parameters
    ----------
    dtype
        Name of the dtype in the safetensors format, such as ``"F32"`` or ``"BF16"``.
    shape
        Its shape; ``()`` for a scalar.
    data
        Its elements in C order, shape ``(n_bytes,)``, dtype ``uint8``. A view where possible.

    Examples
    --------
    >>> tensor = Tensor.from_numpy(np.ones((2, 3), "float32"))
    >>> tensor.dtype, tensor.shape, tensor.numpy().sum().item()
    ('F32', (2, 3), 6.0)
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> Tensor:
        """View a NumPy array.

        Parameters
        ----------
        array
            Any array; copied only where it is not contiguous.

        Raises
        ------
        WorkloadError
            If its dtype has no name in the safetensors format.
        """
        try:
            dtype = NUMPY[array.dtype.name]
        except KeyError:
            raise WorkloadError(
                f"an array of dtype {array.dtype} cannot be in a state; keep arrays of numbers"
            ) from None
        flat = np.ascontiguousarray(array).reshape(-1)
        return cls(dtype, array.shape, flat.view(np.uint8))

    def numpy(self) -> NDArray[Any]:
        """View it as a NumPy array."""
        return self.data.view(_NUMPY_DTYPE[self.dtype]).reshape(self.shape)


@contextmanager
def reading_state(*but: type[Exception]) -> Iterator[None]:
    """Raise a `CheckpointCorruptError` if something in the block fails: it reads a state.

    A state may come from a stranger, so nothing in it is what it should be until it was used. A
    lack of memory, and what `but` names, are not the state's fault.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (DagselError, MemoryError, *but)):
            raise
        raise CheckpointCorruptError(
            f"a state is damaged, or is that of another workload: {error!r}"
        ) from error


class State:
    """A trial's model, optimizer, learning-rate schedule and random streams at one moment.

    Nothing changes its bytes after it was packed.

    Parameters
    ----------
    buffer
        A complete safetensors file. Not copied.
    is_spare
        Whether who has it can get it again, from the store or as it was made. Then `let_go` frees
        memory.

    Examples
    --------
    >>> import numpy as np
    >>> state = State.pack({"w": Tensor.from_numpy(np.ones((2, 3), "float32"))}, {"step": 4})
    >>> state.meta["step"], state.tensors["w"].numpy().sum().item(), state.nbytes > 24
    (4, 6.0, True)
    >>> list(state.header)
    ['__metadata__', 'w']
    """

    __slots__ = ("_header", "buffer", "is_spare")

    def __init__(
        self, buffer: bytes | bytearray | memoryview | PickleBuffer, *, is_spare: bool = False
    ) -> None:
        view = memoryview(buffer)
        self.buffer = (view.cast("B") if view.nbytes else memoryview(b"")).toreadonly()
        self.is_spare = is_spare
        self._header: dict[str, Any] | None = None

    @classmethod
    def pack(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Json]) -> State:
        """Copy tensors and JSON into one new buffer.

        Parameters
        ----------
        tensors
            Tensors by name.
        meta
            All that is no tensor: what JSON can hold.
        """
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        state, views = cls.reserve(shapes, meta)
        for name, tensor in tensors.items():
            views[name].data[:] = tensor.data
        return state

    @classmethod
    def reserve(
        cls, shapes: Mapping[str, tuple[str, tuple[int, ...]]], meta: Mapping[str, Json]
    ) -> tuple[State, dict[str, Tensor]]:
        """Make a state of given dtypes and shapes; each library then fills in its tensors, once.

        Wider dtypes come first in the buffer, so that each tensor is aligned.

        Parameters
        ----------
        shapes
            Dtype and shape of each tensor, by its name.
        meta
            All that is no tensor: what JSON can hold.

        Returns
        -------
        state, tensors
            The state, and writable views of its tensors. Fill them all before anyone sees the
            state.

        Examples
        --------
        >>> state, tensors = State.reserve({"w": ("F32", (2,))}, {})
        >>> tensors["w"].numpy()[:] = 3
        >>> state.tensors["w"].numpy().tolist(), list(state.header)
        ([3.0, 3.0], ['__metadata__', 'w'])
        """
        order = sorted(shapes, key=lambda name: -ITEMSIZE[shapes[name][0]])
        header: dict[str, Any] = {"__metadata__": {_META: json.dumps(dict(meta))}}
        offset = 0
        for name in order:
            dtype, shape = shapes[name]
            end = offset + math.prod(shape) * ITEMSIZE[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(len(text) + -len(text) % 8)
        start = 8 + len(text)
        buffer = np.empty(start + offset, np.uint8)
        buffer[:start] = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
        state = cls(buffer.data)
        state._header = header
        return state, state._views(buffer)

    @property
    def nbytes(self) -> int:
        """Size of the whole buffer."""
        return self.buffer.nbytes

    @property
    def header(self) -> dict[str, Any]:
        """The safetensors header, checked: every tensor lies inside the buffer.

        Raises
        ------
        CheckpointCorruptError
            If the buffer is not a safetensors file of the declared sizes.
        """
        if self._header is None:
            self._header = _read_header(self.buffer)
        return self._header

    @property
    def meta(self) -> dict[str, Any]:
        """Everything but the tensors."""
        meta: dict[str, Any] = json.loads(self.header["__metadata__"][_META])
        return meta

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Read-only views of all tensors, by name."""
        return self._views(np.frombuffer(self.buffer, np.uint8))

    def let_go(self) -> None:
        """Keep the header alone, and no tensor, if the state is a spare one.

        A workload calls it once it has copied what it trains: its memory is there for training.

        Examples
        --------
        >>> state = State.pack({"w": Tensor.from_numpy(np.ones((2, 3), "float32"))}, {"step": 4})
        >>> spare = State(state.buffer, is_spare=True)
        >>> state.let_go(), spare.let_go()
        (None, None)
        >>> state.nbytes - spare.nbytes, spare.meta, list(spare.header)
        (24, {'step': 4}, ['__metadata__', 'w'])
        """
        if self.is_spare:
            self._header = self.header  # what is left alone would not be a whole one
            n_bytes = 8 + int.from_bytes(self.buffer[:8], "little")
            self.buffer = memoryview(bytes(self.buffer[:n_bytes]))

    def _views(self, buffer: NDArray[np.uint8]) -> dict[str, Tensor]:
        data = buffer[8 + int.from_bytes(self.buffer[:8], "little") :]
        return {
            name: Tensor(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
            for name, entry in self.header.items()
            if name != "__metadata__"
        }

    def __sizeof__(self) -> int:
        """Size in bytes: Dask's memory accounting asks for it."""
        return object.__sizeof__(self) + self.nbytes

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle with the buffer out of band: it hops as one frame without a copy.

        The frame is that of an array: on one of a memoryview that is in a cycle of references,
        Python's garbage collector ends with a segmentation fault before 3.12.7, and in every 3.11
        (python/cpython#77894).
        """
        if protocol >= 5:
            frame: Any = np.frombuffer(self.buffer, np.uint8)
            return State, (PickleBuffer(frame),)
        return State, (self.buffer.tobytes(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.buffer == other.buffer

    def __hash__(self) -> int:
        return hash(self.buffer.tobytes())

    def __repr__(self) -> str:
        return f"<State: {len(self.header) - 1} tensors, {self.nbytes:,} bytes>"


def _read_header(buffer: memoryview) -> dict[str, Any]:
    n_header = int.from_bytes(buffer[:8], "little")
    if buffer.nbytes < 8 or n_header > min(_MAX_HEADER, buffer.nbytes - 8):
        raise CheckpointCorruptError(
            f"it is no state: its header would have {n_header} bytes, and all of it has "
            f"{buffer.nbytes}"
        )
    try:
        header: dict[str, Any] = json.loads(bytes(buffer[8 : 8 + n_header]))
        if not isinstance(json.loads(header["__metadata__"][_META]), dict):
            raise ValueError("its metadata is no mapping")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        _check_offsets(entries, n_bytes=buffer.nbytes - 8 - n_header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"it is no state: {error}") from error
    return header


def _check_offsets(entries: Mapping[str, Any], *, n_bytes: int) -> None:
    # As the format demands: the tensors fill the data part, without gap or overlap.
    place = 0
    for name, entry in sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        (begin, end), shape = entry["data_offsets"], entry["shape"]
        if not all(type(number) is int and 0 <= number < 2**63 for number in (begin, end, *shape)):
            raise ValueError(f"{name} has sizes that are none")
        if begin != place or end - begin != math.prod(shape) * ITEMSIZE[entry["dtype"]]:
            raise ValueError(f"{name} of shape {shape} cannot lie at {begin}:{end}")
        place = end
    if place != n_bytes:
        raise ValueError(f"{place} of {n_bytes} bytes are accounted for")


def flatten(
    tree: Any,
    as_tensor: Callable[[Any], Leaf | None],
    *,
    prefix: str = "",
    same: Callable[[Leaf], Hashable] = lambda leaf: None,
) -> tuple[Json, dict[str, Leaf]]:
    """Split a nested structure into JSON and tensors; `unflatten` joins them.

    Parameters
    ----------
    tree
        Tensors, numbers, strings, None, and containers of them.
    as_tensor
        Returns the tensor of a leaf that is one (or a NumPy array), None for any other object.
    prefix
        What the names of all tensors begin with.
    same
        Returns a key of a tensor, or None. Tensors with one key are stored once.

    Returns
    -------
    json, tensors
        The structure, and its tensors by name.

    Raises
    ------
    WorkloadError
        For what is no tensor, number, string, None or container.

    Examples
    --------
    >>> def as_tensor(leaf):
    ...     return Tensor.from_numpy(leaf) if isinstance(leaf, np.ndarray) else None
    >>> json, tensors = flatten({"w": np.zeros(2), "betas": (0.9, 0.99)}, as_tensor)
    >>> list(tensors)
    ['w']
    >>> unflatten(json, lambda name: tensors[name].numpy())
    {'w': array([0., 0.]), 'betas': (0.9, 0.99)}
    """
    flattening = _Flattening(as_tensor, same)
    return flattening.encode(tree, prefix), flattening.tensors


class _Flattening(Generic[Leaf]):
    def __init__(
        self, as_tensor: Callable[[Any], Leaf | None], same: Callable[[Leaf], Hashable]
    ) -> None:
        self.tensors: dict[str, Leaf] = {}
        self._as_tensor, self._same = as_tensor, same
        self._names: dict[Hashable, str] = {}

    def encode(self, node: Any, path: str) -> Json:
        """Return a node as JSON, its tensors by name; the path names it in errors."""
        if node is None or isinstance(node, (bool, str)) or type(node) in (int, float):
            return node
        tensor = self._as_tensor(node)
        if tensor is not None:
            kind = "array" if isinstance(node, np.ndarray) else "tensor"
            return {"$": kind, "name": self._name(tensor, path)}
        match node:
            case np.generic():
                return {"$": "numpy", "dtype": node.dtype.name, "value": node.item()}
            case Counter():
                return {"$": "counter", "items": self._pairs(node, path)}
            case OrderedDict():
                return {"$": "ordered", "items": self._pairs(node, path)}
            case defaultdict():
                raise WorkloadError(f"{path}: a defaultdict cannot be in a state; use a dict")
            case dict() if all(isinstance(key, str) and key != "$" for key in node):
                return {key: self.encode(value, _join(path, key)) for key, value in node.items()}
            case dict():
                return {"$": "dict", "items": self._pairs(node, path)}
            case list():
                return self._items(node, path)
            case tuple() | set() | frozenset() if type(node) in (tuple, set, frozenset):
                items = node if isinstance(node, tuple) else sorted(node, key=repr)
                return {"$": type(node).__name__, "items": self._items(items, path)}
            case deque():
                return {"$": "deque", "items": self._items(node, path), "maxlen": node.maxlen}
            case bytes():
                return {"$": "bytes", "base64": base64.b64encode(node).decode()}
            case _:
                raise WorkloadError(
                    f"{path}: a {type(node).__module__}.{type(node).__qualname__} cannot be in a "
                    "state; keep tensors, numbers, strings and containers of them"
                )

    def _name(self, tensor: Leaf, path: str) -> str:
        key = self._same(tensor)
        if key is not None and key in self._names:
            return self._names[key]
        while path in self.tensors:
            path += "'"
        self.tensors[path], self._names[key] = tensor, path
        return path

    def _items(self, nodes: Iterable[Any], path: str) -> list[Json]:
        return [self.encode(node, _join(path, index)) for index, node in enumerate(nodes)]

    def _pairs(self, node: Mapping[Any, Any], path: str) -> list[Json]:
        return [
            [self.encode(key, _join(path, "key")), self.encode(value, _join(path, key))]
            for key, value in node.items()
        ]


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def unflatten(
    tree: Json, from_tensor: Callable[[str], Any], from_array: Callable[[str], Any] | None = None
) -> Any:
    """Join what `flatten` has split.

    Parameters
    ----------
    tree
        The structure that `flatten` has returned.
    from_tensor
        Returns the leaf for the name of a tensor.
    from_array
        Returns the leaf for the name of a NumPy array; None to use `from_tensor`.

    Examples
    --------
    >>> unflatten({"w": {"$": "tensor", "name": "w"}, "step": 4}, {"w": [0.0, 1.0]}.get)
    {'w': [0.0, 1.0], 'step': 4}
    """
    # A function inside this one that calls itself would be a cycle of references: what the readers
    # hold, a whole state, would stay until Python collects garbage.
    if isinstance(tree, list):
        return [unflatten(item, from_tensor, from_array) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if (kind := tree.get("$")) is None:
        return {key: unflatten(value, from_tensor, from_array) for key, value in tree.items()}
    node: dict[str, Any] = tree
    items = unflatten(node.get("items", []), from_tensor, from_array)
    match kind:
        case "tensor":
            return from_tensor(node["name"])
        case "array":
            return (from_array or from_tensor)(node["name"])
        case "numpy":
            dtype = np.dtype(node["dtype"])
            if dtype.kind not in "biufcmMSU":
                raise CheckpointCorruptError(f"a state holds a number of dtype {dtype}")
            return dtype.type(node["value"])
        case "counter":
            return Counter(dict(items))
        case "ordered":
            return OrderedDict(items)
        case "dict":
            return dict(items)
        case "tuple":
            return tuple(items)
        case "set":
            return set(items)
        case "frozenset":
            return frozenset(items)
        case "deque":
            return deque(items, node["maxlen"])
        case "bytes":
            return base64.b64decode(node["base64"])
        case _:
            raise CheckpointCorruptError(f"a state names an unknown container {kind!r}")
