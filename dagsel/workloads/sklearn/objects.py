"""Fitted estimators as arrays and JSON, without pickle.

An estimator holds a graph of objects: lists that two attributes share, arrays that are views of
one memory, random states. `Encoder` walks it and numbers every mutable object; `Decoder` builds it
again.

A state may come from a stranger, so the classes that it names are only compared with a list: the
estimators in the packages of `_PUBLIC`, the classes in `_PRIVATE`, and the caller's own. Modules
are imported from that list alone, no attribute is looked up under a name from the state, and only
the loss functions in `_CALLED` are called. No attribute hides a method, and no estimator gets a
cache folder from a state: joblib would unpickle what is there.
"""

from __future__ import annotations

import base64
import copy
import copyreg
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from importlib import import_module
from types import FunctionType, MemberDescriptorType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import sparray, spmatrix

from dagsel.codec import Json
from dagsel.errors import CheckpointCorruptError, WorkloadError
from dagsel.state import NUMPY, Tensor, reading_state
from dagsel.workloads.random_streams import checked_stream


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


#: Packages whose estimators may be in a state.
_PUBLIC = {
    f"sklearn.{name}"
    for name in (
        "cluster", "compose", "covariance", "decomposition", "dummy", "feature_extraction",
        "feature_selection", "impute", "kernel_approximation", "linear_model", "multiclass",
        "multioutput", "naive_bayes", "neural_network", "pipeline", "preprocessing",
        "random_projection",
    )
}  # fmt: skip
#: What fitted estimators hold besides, by module.
_PRIVATE = {
    "sklearn._loss._loss": {"CyHalfBinomialLoss", "CyHalfSquaredError", "CyHuberLoss"},
    "sklearn.cluster._birch": {"_CFNode", "_CFSubcluster"},
    "sklearn.linear_model._sgd_fast": {
        "EpsilonInsensitive", "Hinge", "Huber", "Log", "ModifiedHuber",
        "SquaredEpsilonInsensitive", "SquaredHinge", "SquaredLoss",
    },
    "sklearn.multiclass": {"_ConstantPredictor"},
    "sklearn.neural_network._stochastic_optimizers": {"AdamOptimizer", "SGDOptimizer"},
    "scipy.sparse._csc": {"csc_array", "csc_matrix"},
    "scipy.sparse._csr": {"csr_array", "csr_matrix"},
}  # fmt: skip
#: Modules in C whose objects are made by a call with numbers.
_CALLED = {"sklearn._loss._loss", "sklearn.linear_model._sgd_fast"}
_DTYPE = re.compile(r"[<>|=]?(?:[biufcSUV]\d{1,9}|[mM]8(?:\[\w{1,20}\])?)")
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, object)
#: Classes that may be named as values, such as a parameter ``dtype``.
_VALUES = {_name(kind): kind for kind in (*_PLAIN, *np.sctypeDict.values())}
_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox,
                 np.random.SFC64)
}  # fmt: skip
_global_random_state: Any = np.random.mtrand._rand


class Encoder:
    """Splits objects into JSON and arrays; `classes` may occur besides those on the list.

    Examples
    --------
    >>> shared = [np.arange(3.0)]
    >>> encoder = Encoder()
    >>> json = encoder.encode({"a": shared, "b": shared}, "estimator")
    >>> twin = Decoder(encoder.tensors).decode(json)
    >>> twin["a"] is twin["b"], twin["a"][0].tolist()
    (True, [0.0, 1.0, 2.0])
    """

    def __init__(self, classes: Iterable[type] = ()) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._classes = frozenset(classes)
        self._ids: dict[int, int] = {}
        self._alive: list[Any] = []
        # The first array that covers the whole memory, by the id of the memory's owner.
        self._memory: dict[int, NDArray[Any]] = {}

    def register(self, node: Any) -> int:
        """Return a number for a node, by which it is known when it occurs again."""
        self._ids[id(node)] = len(self._alive)
        self._alive.append(node)
        return len(self._alive) - 1

    def encode(self, node: Any, path: str) -> Json:
        """Encode a node; its path names the culprit in errors."""
        if node is None or type(node) in (bool, int, float, str):
            return node
        if id(node) in self._ids:
            return {"$": "ref", "id": self._ids[id(node)]}
        match node:
            case np.generic() if node.dtype != object:
                text = base64.b64encode(node.tobytes()).decode()
                return {"$": "scalar", "dtype": _describe(node.dtype), "base64": text}
            case np.ndarray():
                return self._array(node, path)
            case list() if type(node) is list:
                return {"$": "list", "id": self.register(node), "items": self._items(node, path)}
            case dict() if type(node) is dict:
                return {"$": "dict", "id": self.register(node), "items": self._pairs(node, path)}
            case tuple() | set() | frozenset() if type(node) in (tuple, set, frozenset):
                nodes = node if isinstance(node, tuple) else sorted(node, key=repr)
                return {"$": type(node).__name__, "items": self._items(nodes, path)}
            case bytes():
                return {"$": "bytes", "base64": base64.b64encode(node).decode()}
            case complex():
                return {"$": "complex", "parts": [node.real, node.imag]}
            case slice() | range():
                parts = self._items((node.start, node.stop, node.step), path)
                return {"$": type(node).__name__, "items": parts}
            case np.dtype():
                return {"$": "dtype", "dtype": _describe(node)}
            case type():
                return {"$": "class", "class": self._class(node, path)}
            case _:
                return self._object(node, path)

    def _items(self, nodes: Iterable[Any], path: str) -> list[Json]:
        return [self.encode(node, f"{path}.{index}") for index, node in enumerate(nodes)]

    def _pairs(self, node: Mapping[Any, Any], path: str) -> list[Json]:
        return [
            [self.encode(key, f"{path}.key"), self.encode(value, f"{path}.{key}")]
            for key, value in node.items()
        ]

    def _array(self, node: NDArray[Any], path: str) -> Json:
        if type(node) is not np.ndarray:
            raise _cannot(node, path)
        owner = node
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if id(owner) in self._memory:
            first = self._memory[id(owner)]
            return {
                "$": "view", "of": self.encode(first, path), "id": self.register(node),
                "dtype": _describe(node.dtype), "shape": list(node.shape),
                "strides": list(node.strides), "offset": _address(node) - _address(first),
            }  # fmt: skip
        whole = node.nbytes == owner.nbytes and not node.dtype.hasobject
        if whole and (node.flags.c_contiguous or node.flags.f_contiguous):
            self._memory[id(owner)] = node
        number = self.register(node)
        if node.dtype == object:
            items = self._items(node.reshape(-1).tolist(), path)
            return {"$": "objects", "id": number, "shape": list(node.shape), "items": items}
        if node.dtype.hasobject:
            raise _cannot(node, path)
        copy = node if node.flags.c_contiguous else node.copy(order="K")
        order = "F" if copy.flags.f_contiguous and not copy.flags.c_contiguous else "C"
        stored = np.ascontiguousarray(copy.T if order == "F" else copy)
        if stored.dtype.name not in NUMPY or not stored.dtype.isnative:
            stored = np.frombuffer(stored.tobytes(), np.uint8)
        name = path if path not in self.tensors else f"{path}'{number}"
        self.tensors[name] = Tensor.from_numpy(stored)
        return {
            "$": "array", "id": number, "name": name, "dtype": _describe(node.dtype),
            "shape": list(node.shape), "order": order,
        }  # fmt: skip

    def _object(self, node: Any, path: str) -> Json:
        if node is _global_random_state:
            return {"$": "global random state"}
        if isinstance(node, np.random.RandomState):
            number, state = self.register(node), node.get_state(legacy=False)
            return {"$": "random state", "id": number, "state": self.encode(state, path)}
        if isinstance(node, np.random.Generator):
            number, state = self.register(node), dict(node.bit_generator.state)
            return {"$": "generator", "id": number, "state": self.encode(state, path)}
        kind = type(node)
        name = self._class(kind, path)
        reduced = () if _name(kind) in _VALUES else node.__reduce_ex__(4)
        function, arguments, state, items, pairs = (*reduced, *[None] * 5)[:5]
        if function is copyreg.__newobj__ and arguments == (kind,):  # type: ignore[attr-defined]
            encoded: dict[str, Json] = {"$": "new", "args": []}
        elif function is kind and kind.__module__ in _CALLED:
            encoded = {"$": "call", "args": self._items(arguments, path)}
        else:
            raise _cannot(node, path)
        if items is not None and list(items):
            raise _cannot(node, path)
        encoded |= {"id": self.register(node), "class": name}
        encoded["state"] = self.encode(state, path)
        encoded["pairs"] = self._pairs(dict(pairs or ()), path)
        return encoded

    def _class(self, kind: type, path: str) -> Json:
        name = _name(kind)
        if kind in self._classes or _VALUES.get(name) is kind or _find(*name) is kind:
            return [*name]
        raise WorkloadError(
            f"{path}: a {'.'.join(name)} cannot be in a state; keep arrays, numbers, strings, "
            "containers of them, and estimators of scikit-learn"
        )


class Decoder:
    """Builds the objects again that `Encoder` has split; copies the arrays."""

    def __init__(self, tensors: Mapping[str, Tensor], classes: Iterable[type] = ()) -> None:
        self.nodes: dict[int, Any] = {}
        self._tensors = tensors
        self._classes = {_name(kind): kind for kind in classes}

    def decode(self, node: Any) -> Any:
        """Decode a node, or raise a `CheckpointCorruptError`."""
        with reading_state():
            return self._decode(node)

    def _decode(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        match node["$"]:
            case "ref":
                return self.nodes[node["id"]]
            case "list":
                made: Any = self._keep(node, [])
                made.extend(map(self._decode, node["items"]))
                return made
            case "dict":
                made = self._keep(node, {})
                made.update(self._pairs(node["items"]))
                return made
            case "tuple" | "set" | "frozenset" as kind:
                makers = {"tuple": tuple, "set": set, "frozenset": frozenset}
                return makers[kind](map(self._decode, node["items"]))
            case "slice" | "range" as kind:
                return {"slice": slice, "range": range}[kind](*map(self._decode, node["items"]))
            case "bytes":
                return base64.b64decode(node["base64"])
            case "complex":
                return complex(*node["parts"])
            case "dtype":
                return np.dtype(object) if node["dtype"] == "|O" else _dtype(node["dtype"])
            case "class":
                name = tuple(node["class"])
                return _VALUES[name] if name in _VALUES else self._class(*name)
            case "scalar":
                data = base64.b64decode(node["base64"])
                return np.frombuffer(data, _dtype(node["dtype"]), 1)[0]
            case "array" | "view" | "objects":
                return self._keep(node, self._array(node))
            case _:
                return self._object(node)

    def _keep(self, node: Any, made: Any) -> Any:
        self.nodes[node["id"]] = made
        return made

    def _pairs(self, pairs: Any) -> dict[Any, Any]:
        return {self._decode(key): self._decode(value) for key, value in pairs}

    def _array(self, node: Any) -> NDArray[Any]:
        shape = tuple(node["shape"])
        if node["$"] == "objects":
            if math.prod(shape) != len(node["items"]):
                raise ValueError(f"{len(node['items'])} objects in an array of shape {shape}")
            made = np.empty(shape, object)
            self._keep(node, made)
            made.reshape(-1)[:] = [self._decode(item) for item in node["items"]]
            return made
        dtype = _dtype(node["dtype"])
        if node["$"] == "view":
            owner = self._decode(node["of"])
            if owner.dtype.hasobject:
                raise ValueError("an array of addresses")
            memory = owner if owner.flags.c_contiguous else owner.T
            return np.ndarray(shape, dtype, memory, node["offset"], tuple(node["strides"]))
        is_fortran = node["order"] == "F"
        stored = self._tensors[node["name"]].data.view(dtype)
        stored = stored.reshape(shape[::-1] if is_fortran else shape)
        made = np.empty(shape, dtype, order="F" if is_fortran else "C")
        made[...] = stored.T if is_fortran else stored
        return made

    def _object(self, node: Any) -> Any:
        match node["$"]:
            case "global random state":
                return _global_random_state
            case "random state":
                made = self._keep(node, np.random.RandomState())
                made.set_state(checked_stream(self._decode(node["state"])))
                return made
            case "generator":
                state = checked_stream(self._decode(node["state"]))
                bits: Any = _BIT_GENERATORS[state["bit_generator"]]()
                bits.state = state
                return self._keep(node, np.random.Generator(bits))
            case "new" | "call" as how:
                module, qualname = node["class"]
                kind: Any = self._class(module, qualname)
                if how == "new":
                    made = kind.__new__(kind)
                elif module in _CALLED:
                    made = kind(*map(self._decode, node["args"]))
                else:
                    raise CheckpointCorruptError(f"a state calls {module}.{qualname}")
                self._keep(node, made)
            case what:
                raise CheckpointCorruptError(f"a state holds an unknown kind of object {what!r}")
        set_state(made, self._decode(node["state"]))
        if isinstance(made, sparray | spmatrix):
            _check_sparse(made)
        for key, value in self._pairs(node["pairs"]).items():
            made[key] = value
        return made

    def _class(self, module: str, qualname: str) -> type:
        kind = self._classes.get((module, qualname)) or _find(module, qualname)
        if kind is None:
            raise CheckpointCorruptError(f"a state names {module}.{qualname}; it may not be in one")
        return kind


def set_state(made: Any, state: Any) -> None:
    """Set the state of an object, as unpickling does; raise a ValueError if it may not be set."""
    if state is None:
        return
    kind: Any = type(made)
    cache = getattr(made, "__dict__", {}).get("memory")
    if hasattr(kind, "__setstate__"):
        made.__setstate__(state)
    else:
        plain, slots = state if isinstance(state, tuple) else (state, None)
        if plain:
            made.__dict__.update(plain)
        for name, value in (slots or {}).items():
            if not isinstance(inspect.getattr_static(kind, name, None), MemberDescriptorType):
                raise ValueError(f"{kind.__name__} has no slot {name!r}")
            setattr(made, name, value)
    attributes = getattr(made, "__dict__", {})
    for name in attributes:
        if not isinstance(name, str) or name.startswith("__") or _is_method(kind, name):
            raise ValueError(f"a state cannot set {kind.__name__}.{name}")
    if isinstance(attributes.get("memory"), str) and _has_cache(kind):
        attributes["memory"] = cache


@lru_cache(maxsize=4096)
def _is_method(kind: type, name: str) -> bool:
    # Something of the class that an attribute of the object would hide.
    known = type(inspect.getattr_static(kind, name, None))
    is_hidden = hasattr(known, "__get__") and not hasattr(known, "__set__")
    return is_hidden and known is not cached_property


def _has_cache(kind: type) -> bool:
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "sklearn"]
    made_by = [vars(base).get("__init__") for base in own]
    return any(isinstance(made, FunctionType) and "memory" in made.__code__.co_varnames
               for made in made_by)  # fmt: skip


def _check_sparse(matrix: Any) -> None:
    # SciPy's compiled code does not look where the indices lead.
    parts = (matrix.indices, matrix.indptr, matrix.data)
    if not all(type(part) is np.ndarray and part.ndim == 1 and part.dtype.isnative
               for part in parts):  # fmt: skip
        raise ValueError("a sparse matrix without its arrays")
    if not parts[0].dtype == parts[1].dtype in (np.int32, np.int64):
        raise ValueError(f"a sparse matrix with indices of {parts[0].dtype} and {parts[1].dtype}")
    if not all(type(size) is int and size >= 0 for size in matrix.shape):
        raise ValueError(f"a sparse matrix of shape {matrix.shape}")
    copy.copy(matrix).check_format(full_check=True)


def _find(module: str, qualname: str) -> type | None:
    """Find a class on the list."""
    package = ".".join(module.split(".")[:2])
    found: list[Any] = []
    if qualname in _PRIVATE.get(module, ()):
        found = [getattr(import_module(module), qualname, None)]
    elif package in _PUBLIC:
        found = [k for k in vars(import_module(package)).values() if hasattr(k, "get_params")]
    classes = (kind for kind in found if isinstance(kind, type))
    return next((kind for kind in classes if _name(kind) == (module, qualname)), None)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _describe(dtype: np.dtype[Any]) -> Any:
    return np.lib.format.dtype_to_descr(dtype)


def _dtype(description: Any) -> np.dtype[Any]:
    """Make a dtype of plain numbers, texts or bytes, or of fields of such."""

    def check(part: Any) -> None:
        """Raise unless a part of a dtype is plain."""
        if not isinstance(part, str):
            for _, inner, *shape in part:
                check(inner)
                if not all(type(size) is int for sizes in shape for size in sizes):
                    raise ValueError(f"a dtype of {shape}")
        elif not _DTYPE.fullmatch(part):
            raise ValueError(f"a dtype {part!r}")

    def tuples(part: Any) -> Any:
        # JSON has turned the tuples of a structured dtype's fields into lists.
        return [tuple(tuples(field) for field in item) for item in part] if (
            isinstance(part, list) and part and isinstance(part[0], list)
        ) else tuple(part) if isinstance(part, list) else part  # fmt: skip

    check(description)
    return np.lib.format.descr_to_dtype(tuples(description))


def _cannot(node: Any, path: str) -> WorkloadError:
    return WorkloadError(
        f"{path}: a {type(node).__module__}.{type(node).__qualname__} cannot be in a state; "
        "keep arrays, numbers, strings and containers of them"
    )
