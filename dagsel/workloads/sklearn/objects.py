"""A fitted estimator as arrays and JSON: no pickle, and no code but that of known classes.

What an estimator holds is a graph: lists that two attributes share, arrays that are views of one
memory, random states. `Encoder` walks it and gives every mutable node a number; `Decoder` builds
it again. A class is found by name only in scikit-learn and ``scipy.sparse``, or among those that
the caller hands over.
"""

from __future__ import annotations

import base64
import copyreg
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import CheckpointCorruptError, WorkloadError
from dagsel.state import NUMPY, Json, Tensor

_HOMES = ("sklearn", "scipy.sparse")
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_PLAIN = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, object)}
_global_random_state: Any = np.random.mtrand._rand


class Encoder:
    """Parts objects into JSON and arrays.

    Parameters
    ----------
    classes
        Classes that may occur besides those of scikit-learn and scipy.sparse.

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
        self._memory: dict[
            int, NDArray[Any]
        ] = {}  # by its owner, the first array that is all of it

    def register(self, node: Any) -> int:
        """Give a node a number, so that it is known when it occurs again."""
        self._ids[id(node)] = len(self._alive)
        self._alive.append(node)
        return len(self._alive) - 1

    def encode(self, node: Any, path: str) -> Json:
        """Encode a node; its path names the culprit in errors."""
        if node is None or type(node) in (bool, int, float, str):
            return node  # type: ignore[no-any-return]
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
        if type(node) in _PLAIN.values():
            raise _cannot(node, path)
        self._class(type(node), path)
        reduced = node.__reduce_ex__(4)
        if not isinstance(reduced, tuple):
            raise _cannot(node, path)
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        new = function is copyreg.__newobj__  # type: ignore[attr-defined]
        kind = "new" if new else "call" if isinstance(function, type) else "unpickle"
        if new:
            function, *arguments = arguments
        elif kind == "unpickle" and not _is_cython_unpickle(function):
            raise _cannot(node, path)
        if items is not None and list(items):
            raise _cannot(node, path)
        encoded: dict[str, Json] = {"$": kind, "args": self._items(arguments, path)}
        encoded["id"] = self.register(node)
        encoded["class"] = (
            [function.__module__, function.__name__]
            if kind == "unpickle"
            else self._class(function, path)
        )
        encoded["state"] = self.encode(state, path)
        encoded["pairs"] = self._pairs(dict(pairs or ()), path)
        return encoded

    def _class(self, kind: type, path: str) -> Json:
        known = kind in self._classes or _PLAIN.get(kind.__name__) is kind
        if known or issubclass(kind, np.generic) or _at_home(kind.__module__):
            return [kind.__module__, kind.__qualname__]
        raise WorkloadError(
            f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be in a state; keep arrays, "
            "numbers, strings, containers of them, and estimators of scikit-learn"
        )


class Decoder:
    """Builds again what `Encoder` has parted.

    Parameters
    ----------
    tensors
        The arrays. Copied.
    classes
        As for the encoder.
    """

    def __init__(self, tensors: Mapping[str, Tensor], classes: Iterable[type] = ()) -> None:
        self.nodes: dict[int, Any] = {}
        self._tensors = tensors
        self._classes = {(kind.__module__, kind.__qualname__): kind for kind in classes}

    def decode(self, node: Any) -> Any:
        """Decode a node."""
        if not isinstance(node, dict):
            return node
        match node["$"]:
            case "ref":
                return self.nodes[node["id"]]
            case "list":
                made: Any = self._keep(node, [])
                made.extend(map(self.decode, node["items"]))
                return made
            case "dict":
                made = self._keep(node, {})
                made.update(self._pairs(node["items"]))
                return made
            case "tuple" | "set" | "frozenset" as kind:
                makers = {"tuple": tuple, "set": set, "frozenset": frozenset}
                return makers[kind](map(self.decode, node["items"]))
            case "slice" | "range" as kind:
                return {"slice": slice, "range": range}[kind](*map(self.decode, node["items"]))
            case "bytes":
                return base64.b64decode(node["base64"])
            case "complex":
                return complex(*node["parts"])
            case "dtype":
                return _dtype(node["dtype"])
            case "class":
                return self._class(node["class"])
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
        return {self.decode(key): self.decode(value) for key, value in pairs}

    def _array(self, node: Any) -> NDArray[Any]:
        shape = tuple(node["shape"])
        if node["$"] == "objects":
            made = np.empty(shape, object)
            self._keep(node, made)
            made.reshape(-1)[:] = [self.decode(item) for item in node["items"]]
            return made
        dtype = _dtype(node["dtype"])
        if node["$"] == "view":
            owner = self.decode(node["of"])
            memory = owner if owner.flags.c_contiguous else owner.T
            return np.ndarray(shape, dtype, memory, node["offset"], tuple(node["strides"]))
        made = np.empty(shape, dtype, order=node["order"])
        target = made.T if node["order"] == "F" else made
        target[...] = self._tensors[node["name"]].data.view(dtype).reshape(target.shape)
        return made

    def _object(self, node: Any) -> Any:
        match node["$"]:
            case "global random state":
                return _global_random_state
            case "random state":
                made = self._keep(node, np.random.RandomState())
                made.set_state(self.decode(node["state"]))
                return made
            case "generator":
                state = self.decode(node["state"])
                if state["bit_generator"] not in _BIT_GENERATORS:
                    raise CheckpointCorruptError(f"no bit generator: {state['bit_generator']}")
                bits = getattr(np.random, state["bit_generator"])()
                bits.state = state
                return self._keep(node, np.random.Generator(bits))
            case "new":
                kind = self._class(node["class"])
                made = self._keep(node, kind.__new__(kind, *map(self.decode, node["args"])))
            case "call":
                made = self._class(node["class"])(*map(self.decode, node["args"]))
                self._keep(node, made)
            case "unpickle":
                module, name = node["class"]
                function: Any = getattr(import_module(module), name) if _at_home(module) else None
                if not _is_cython_unpickle(function):
                    raise CheckpointCorruptError(f"a state names {module}.{name}")
                made = self._keep(node, function(*map(self.decode, node["args"])))
            case kind:
                raise CheckpointCorruptError(f"a state names an unknown kind of object {kind!r}")
        set_state(made, self.decode(node["state"]))
        for key, value in self._pairs(node["pairs"]).items():
            made[key] = value
        return made

    def _class(self, name: Any) -> Any:
        module, qualname = name
        if (module, qualname) in self._classes:
            return self._classes[module, qualname]
        if module == "builtins" and qualname in _PLAIN:
            return _PLAIN[qualname]
        home = import_module(module) if module == "numpy" or _at_home(module) else None
        kind: Any = home
        for part in qualname.split("."):
            kind = getattr(kind, part, None)
        if not isinstance(kind, type) or (module == "numpy" and not issubclass(kind, np.generic)):
            raise CheckpointCorruptError(f"a state names the class {module}.{qualname}")
        return kind


def set_state(made: Any, state: Any) -> None:
    """Give an object its state, as unpickling does."""
    if state is None:
        return
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    plain, slots = state if isinstance(state, tuple) else (state, None)
    made.__dict__.update(plain or {})
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def _at_home(module: str) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in _HOMES)


def _is_cython_unpickle(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    return name.startswith("__pyx_unpickle_") and _at_home(module)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _describe(dtype: np.dtype[Any]) -> Any:
    return np.lib.format.dtype_to_descr(dtype)


def _dtype(description: Any) -> np.dtype[Any]:
    def tuples(part: Any) -> Any:
        # JSON has turned the tuples of a structured dtype's fields into lists.
        return [tuple(tuples(field) for field in item) for item in part] if (
            isinstance(part, list) and part and isinstance(part[0], list)
        ) else tuple(part) if isinstance(part, list) else part  # fmt: skip

    return np.lib.format.descr_to_dtype(tuples(description))


def _cannot(node: Any, path: str) -> WorkloadError:
    return WorkloadError(
        f"{path}: a {type(node).__module__}.{type(node).__qualname__} cannot be in a state"
    )
