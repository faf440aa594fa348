"""Frozen values to JSON and back, led by their type annotations.

Nothing is looked up by a name that stands in the JSON: the reader says which type it expects, or
which few (`Tagged`), so a file from a stranger can name no class and run no code.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

Json: TypeAlias = Any
Reader: TypeAlias = Callable[[Json], Any]
T = TypeVar("T")

#: In the metadata of a field that a dataclass got later: its default is not written, so that what
#: was written before looks the same.
LATER = "later"
_write = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode
_PLAIN = frozenset({type(None), bool, int, float, str})


def to_json(value: Any) -> Json:
    """Turn dataclasses, sets, tuples and mappings into what `json.dumps` takes.

    A mapping becomes a list of pairs unless its keys are strings; a set is sorted, so that equal
    values give equal text; a range becomes its start, stop and step.

    Raises
    ------
    TypeError
        If a part of it has no form in JSON.

    Examples
    --------
    >>> to_json({3: (1, 2), 1: {"b", "a"}})
    [[3, [1, 2]], [1, ['a', 'b']]]
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):  # before the slower look at what else it may be
        return [item if type(item) in _PLAIN else to_json(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of NumPy or torch
        return value.item()
    if isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        parts = [(f, getattr(value, f.name)) for f in fields(value)]
        return {f.name: to_json(part) for f, part in parts if not _is_left_out(f, part)}
    match value:
        case Mapping():
            if all(isinstance(key, str) for key in value):
                return {key: to_json(item) for key, item in value.items()}
            return [[to_json(key), to_json(item)] for key, item in value.items()]
        case Set():
            return [to_json(item) for item in sorted(value)]
        case range():
            return [value.start, value.stop, value.step]
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [to_json(item) for item in value]
    raise TypeError(f"{value!r} has no form in JSON")


def plain_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a configuration has a form in JSON by itself, lists and dicts of such too.

    Examples
    --------
    >>> plain_part({"lr": 0.1, "sizes": [64, 32], "activation": abs, "both": [abs, 1]})
    {'lr': 0.1, 'sizes': [64, 32]}
    """
    return {name: value for name, value in config.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    match value:
        case None | bool() | int() | float() | str():
            return True
        case list() | tuple():
            return all(map(_is_plain, value))
        case dict():
            return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return False


def finite_part(value: Any) -> Any:
    """Return a value with None for the numbers that JSON does not have: NaN and infinities.

    Examples
    --------
    >>> finite_part({"value": float("nan"), "at": (1, 2.5)})
    {'value': None, 'at': [1, 2.5]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): finite_part(part) for name, part in value.items()}
    return [finite_part(part) for part in value] if isinstance(value, list | tuple) else value


def _is_left_out(field: Field[Any], value: Any) -> bool:
    return LATER in field.metadata and bool(value == _default(field))


def from_json(kind: Any, value: Json) -> Any:
    """Read a value of a type.

    Parameters
    ----------
    kind
        A dataclass, a named tuple, a builtin, or a generic of these such as
        ``dict[int, set[str]]``.
    value
        What `to_json` returned.

    Raises
    ------
    ValueError
        If the value is not one of that type.

    Examples
    --------
    >>> from_json(dict[int, set[str]], [[3, ["a"]], [1, []]])
    {3: {'a'}, 1: set()}
    >>> from_json(tuple[int, ...], ["one"])
    Traceback (most recent call last):
    ...
    ValueError: expected int, got 'one'
    """
    return _reader(kind)(value)


class Tagged(Generic[T]):
    """A union of dataclasses: in JSON each is an object whose ``is`` names its class.

    A field that holds such a union is annotated with it: ``Annotated[Event, EVENTS]``. A field
    whose name is a word of Python has an underscore behind it, which its key has not.

    Parameters
    ----------
    kinds
        Classes that go by their own names.
    brief
        Whether to leave out fields that are None or as they are by default.
    named
        Classes by other names.

    Examples
    --------
    >>> from dagsel.dispatch.events import DropShard, LoadShard
    >>> orders = Tagged(LoadShard, drop=DropShard)
    >>> orders.encode(DropShard("w0", shard=3))
    {'is': 'drop', 'worker': 'w0', 'shard': 3}
    >>> orders.decode({"is": "LoadShard", "worker": "w0", "shard": 3})
    LoadShard(worker='w0', shard=3)
    """

    def __init__(self, *kinds: type[Any], brief: bool = False, **named: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds} | named
        self._names = {kind: name for name, kind in self._kinds.items()}
        self._brief = brief

    @property
    def kinds(self) -> tuple[type[Any], ...]:
        """Its classes."""
        return tuple(self._names)

    @property
    def names(self) -> tuple[str, ...]:
        """What ``is`` says of each of them."""
        return tuple(self._kinds)

    def encode(self, value: T) -> dict[str, Json]:
        """Turn a value into JSON that says what it is."""
        kind: Any = type(value)
        written, is_brief = {"is": self._names[kind]}, self._brief
        for part in _parts(kind):
            item = getattr(value, part.name)
            if not (is_brief and (item is None or item == part.default)):
                written[part.key] = item if type(item) in _PLAIN else part.write(item)
        return written

    def is_read_back(self, value: T) -> bool:
        """Whether `decode` is sure to return an equal value, of equal types, for what is encoded.

        False says that it has to be seen: a part may be of a type that JSON does not have.

        Examples
        --------
        >>> from dagsel.flow import DECISIONS, Stop, Train
        >>> DECISIONS.is_read_back(Train(0, epochs=1)), DECISIONS.is_read_back(Train(0, epochs=1.0))
        (True, False)
        """
        kind: Any = type(value)
        return kind in self._names and _is_exact(kind, value)

    def decode(self, value: Json) -> T:
        """Read what `encode` returned.

        Raises
        ------
        ValueError
            If it is none of the union.
        """
        rest = dict(value) if isinstance(value, dict) else {}
        name = rest.pop("is", None)
        if not isinstance(name, str) or name not in self._kinds:
            raise ValueError(f"{name!r} is none of {', '.join(self._kinds)}")
        kind: Any = self._kinds[name]
        if self._brief:
            rest = _nones(kind) | rest
        decoded: T = _dataclass(kind, rest)
        return decoded

    def to_text(self, *values: T) -> str:
        """Return values as one text.

        Of what it sends Dask asks the size of each part, down to the numbers, which takes three
        times as long as to write and read such a text.

        Examples
        --------
        >>> from dagsel.dispatch.events import DropShard, LoadShard
        >>> orders = Tagged(LoadShard, DropShard)
        >>> orders.from_text(orders.to_text(DropShard("w0", shard=3), LoadShard("w0", shard=4)))
        [DropShard(worker='w0', shard=3), LoadShard(worker='w0', shard=4)]
        """
        return _write([self.encode(value) for value in values])

    def from_text(self, text: str) -> list[T]:
        """Read what `to_text` returned.

        Raises
        ------
        ValueError
            If it is no such text.
        """
        return [self.decode(value) for value in _list(json.loads(text))]


class _Part(NamedTuple):
    """A field of a dataclass, and how it is written and read."""

    name: str
    key: str
    is_argument: bool
    default: Any
    write: Callable[[Any], Json]
    read: Reader
    is_exact: Callable[[Any], bool]  # whether what is read is sure to be what was written


@cache
def _parts(kind: Any) -> tuple[_Part, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        _Part(f.name, f.name.rstrip("_"), f.init, _default(f), _writer(hint), _reader(hint), exact)
        for f in fields(kind)
        for hint in [hints[f.name]]
        for exact in [_exact(hint)]
    )


@cache
def _parts_by_key(kind: Any) -> dict[str, _Part]:
    return {part.key: part for part in _parts(kind)}


@cache
def _nones(kind: Any) -> dict[str, None]:
    """Return None for each field without a default."""
    return {part.key: None for part in _parts(kind) if part.default is MISSING}


def _default(field: Field[Any]) -> Any:
    if callable(field.default_factory):
        return field.default_factory()
    # A class that was pickled by value has a copy of MISSING.
    return MISSING if isinstance(field.default, type(MISSING)) else field.default


def _writer(kind: Any) -> Callable[[Any], Json]:
    """Return what writes a type: it looks for unions that are to be tagged."""
    if get_origin(kind) is Annotated:
        encode: Callable[[Any], Json] = get_args(kind)[1].encode
        return encode
    inner = [write for arg in get_args(kind) if (write := _writer(arg)) is not to_json]
    if not inner:
        return to_json
    (write,) = inner
    if get_origin(kind) is tuple:
        return lambda items: [write(item) for item in items]
    return lambda item: None if item is None else write(item)


def _exact(kind: Any) -> Callable[[Any], bool]:
    """Return what says whether a value of a type is sure to be the same once it was read."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        exact: Callable[[Any], bool] = args[1].is_read_back
        return exact
    if kind in _PLAIN or kind is None:
        expected = type(None) if kind is None else kind
        return lambda value: type(value) is expected
    if origin in (Union, types.UnionType):
        each = [_exact(arg) for arg in args]
        return lambda value: any(is_exact(value) for is_exact in each)
    if origin is Literal:
        return lambda value: type(value) is str and value in args
    if origin is tuple and args[1:] == (...,):
        item = _exact(args[0])
        return lambda value: type(value) is tuple and all(map(item, value))
    if origin is Mapping and args == (str, float):
        return lambda value: (
            type(value) is dict
            and all(type(k) is str and type(v) is float for k, v in value.items())
        )
    if is_dataclass(kind):
        return lambda value: type(value) is kind and _is_exact(kind, value)
    if origin is None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        parts = [_exact(hint) for hint in get_type_hints(kind).values()]
        return lambda value: (
            type(value) is kind
            and all(is_exact(part) for is_exact, part in zip(parts, value, strict=True))
        )
    return lambda value: False


def _is_exact(kind: Any, value: Any) -> bool:
    return all(part.is_exact(getattr(value, part.name)) for part in _parts(kind))


def _reader(kind: Any) -> Reader:
    """Return what reads a type."""
    if kind is Any:
        return lambda value: value
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        decode: Reader = args[1].decode
        return decode
    if origin in (Union, types.UnionType):
        readers = [_reader(arg) for arg in args if arg is not type(None)]
        of_any = readers[0] if len(readers) == 1 else partial(_first, kind, readers)
        if len(readers) == len(args):
            return of_any
        return lambda value: None if value is None else of_any(value)
    if origin is Literal:
        return partial(_literal, kind, args)
    if is_dataclass(kind):
        return partial(_dataclass, kind)  # its fields are looked up late: it may hold itself
    if kind is float:
        return _float
    if kind is None or kind is type(None):
        return lambda value: _expect(value is None, "None", value)
    if kind is int:
        return lambda value: _expect(type(value) is int, "int", value)
    if kind is range:
        return lambda value: range(*_tuple(value, [int, int, int]))
    if origin is None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        read = [_reader(hints[name]) for name in kind._fields]
        return lambda value: kind(*_tuple(value, read))
    if origin is None:
        return lambda value: _expect(isinstance(value, kind), kind.__name__, value)
    return _container(origin, args)


def _container(origin: Any, args: tuple[Any, ...]) -> Reader:
    readers = [_reader(arg) for arg in args if arg is not ...]
    if issubclass(origin, Mapping):
        return partial(_mapping, *readers)
    if origin is tuple and args[-1:] != (...,):
        return lambda value: _tuple(value, readers)
    made = origin if origin in (tuple, frozenset) else set if issubclass(origin, Set) else list
    (read,) = readers
    return lambda value: made(map(read, _list(value)))


def _mapping(read_key: Reader, read: Reader, value: Json) -> dict[Any, Any]:
    pairs = value.items() if isinstance(value, dict) else map(_pair, _list(value))
    return {read_key(key): read(item) for key, item in pairs}


def _tuple(value: Json, readers: Sequence[Reader]) -> tuple[Any, ...]:
    items = _list(value)
    if len(items) != len(readers):
        raise ValueError(f"expected {len(readers)} items, got {value!r}")
    return tuple([read(item) for read, item in zip(readers, items, strict=True)])


def _dataclass(kind: Any, value: Json) -> Any:
    _expect(isinstance(value, dict), kind.__name__, value)
    parts = _parts_by_key(kind)
    if not value.keys() <= parts.keys():
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(value.keys() - parts.keys()))}")
    given: dict[str, Any] = {}
    later: dict[str, Any] = {}
    for key, item in value.items():
        part = parts[key]
        (given if part.is_argument else later)[part.name] = part.read(item)
    try:
        result = kind(**given)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error
    for name, item in later.items():
        object.__setattr__(result, name, item)
    return result


def _first(kind: Any, readers: Sequence[Reader], value: Json) -> Any:
    for read in readers:
        try:
            return read(value)
        except ValueError:
            continue
    return _expect(False, kind, value)


def _literal(kind: Any, args: tuple[Any, ...], value: Json) -> Json:
    for arg in args:
        if value == arg and type(value) is type(arg):  # True is not 1
            return value
    return _expect(False, kind, value)


def _float(value: Json) -> float:
    if type(value) is float:
        return value
    _expect(type(value) is int, "float", value)
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"expected float, got {value!r}") from error


def _list(value: Json) -> list[Any]:
    _expect(isinstance(value, list | tuple), "a list", value)  # msgpack makes tuples of lists
    items: list[Any] = value
    return items


def _pair(value: Json) -> list[Any]:
    _expect(isinstance(value, list | tuple) and len(value) == 2, "a pair", value)
    return list(value)


def _expect(holds: bool, kind: Any, value: Json) -> Json:
    if not holds:
        raise ValueError(f"expected {kind}, got {value!r}")
    return value
