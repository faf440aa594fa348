"""Frozen values to JSON and back, led by their type annotations.

Nothing is looked up by a name that stands in the JSON: the reader says which type it expects, so a
file from a stranger can name no class and run no code.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

Json: TypeAlias = Any


def to_json(value: Any) -> Json:
    """Turn dataclasses, sets, tuples and mappings into what `json.dumps` takes.

    A mapping becomes a list of pairs unless its keys are strings; a set is sorted, so that equal
    values give equal text.

    Raises
    ------
    TypeError
        If a part of it has no form in JSON.

    Examples
    --------
    >>> to_json({3: (1, 2), 1: {"b", "a"}})
    [[3, [1, 2]], [1, ['a', 'b']]]
    """
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of NumPy or torch
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    match value:
        case Mapping():
            if all(isinstance(key, str) for key in value):
                return {key: to_json(item) for key, item in value.items()}
            return [[to_json(key), to_json(item)] for key, item in value.items()]
        case Set():
            return [to_json(item) for item in sorted(value)]
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [to_json(item) for item in value]
    raise TypeError(f"{value!r} has no form in JSON")


def from_json(kind: Any, value: Json) -> Any:
    """Read a value of a type.

    Parameters
    ----------
    kind
        A dataclass, a builtin, or a generic of these such as ``dict[int, set[str]]``.
    value
        What `to_json` gave.

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
    if kind is Any:
        return value
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _first(args, value)
    if origin is Literal:
        known = any(type(value) is type(arg) and value == arg for arg in args)  # True is not 1
        return _expect(known, kind, value)
    if is_dataclass(kind):
        return _dataclass(kind, value)
    if kind is None or kind is type(None):
        return _expect(value is None, "None", value)
    if kind is float:
        _expect(isinstance(value, int | float) and not isinstance(value, bool), "float", value)
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"expected float, got {value!r}") from error
    if kind is int:
        return _expect(isinstance(value, int) and not isinstance(value, bool), "int", value)
    if origin is None:
        return _expect(isinstance(value, kind), kind.__name__, value)
    return _container(origin, args, value)


def _container(origin: Any, args: tuple[Any, ...], value: Json) -> Any:
    if issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, dict) else map(_pair, _list(value))
        return {from_json(args[0], key): from_json(args[1], item) for key, item in pairs}
    items = _list(value)
    if origin is tuple and args[-1:] != (...,):
        _expect(len(items) == len(args), f"{len(args)} items", value)
        return tuple(from_json(kind, item) for kind, item in zip(args, items, strict=True))
    read = (from_json(args[0], item) for item in items)
    if issubclass(origin, Set):
        return frozenset(read) if origin is frozenset else set(read)
    return tuple(read) if origin is tuple else list(read)


def _dataclass(kind: Any, value: Json) -> Any:
    _expect(isinstance(value, dict), kind.__name__, value)
    hints = _hints(kind)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    made = {f.name: f.init for f in fields(kind)}
    read = {name: from_json(hints[name], item) for name, item in value.items()}
    try:
        result = kind(**{name: item for name, item in read.items() if made[name]})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error
    for name, item in read.items():
        if not made[name]:
            object.__setattr__(result, name, item)
    return result


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _first(kinds: tuple[Any, ...], value: Json) -> Any:
    for kind in kinds:
        try:
            return from_json(kind, value)
        except ValueError:
            continue
    return _expect(False, " or ".join(str(kind) for kind in kinds), value)


def _list(value: Json) -> list[Any]:
    _expect(isinstance(value, list), "a list", value)
    return list(value)


def _pair(value: Json) -> list[Any]:
    _expect(isinstance(value, list) and len(value) == 2, "a pair", value)
    return list(value)


def _expect(holds: bool, kind: Any, value: Json) -> Json:
    if not holds:
        raise ValueError(f"expected {kind}, got {value!r}")
    return value
