"""Generators of random numbers of a user's own, which no state holds, and who draws from them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import numpy as np
import torch

from dagsel.workloads.describe import is_a_users

Generator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_KINDS = frozenset({torch.Generator, random.Random, np.random.Generator, np.random.RandomState})
#: Those of the streams that travel with a trial.
_GLOBAL: Any = (torch.default_generator, random._inst, np.random.mtrand._rand)


def is_own(value: Any) -> bool:
    """Whether a value is a generator, and none of the streams that travel with a trial."""
    return type(value) in _KINDS and not any(value is it for it in _GLOBAL)


def place_of(generator: Any) -> Any:
    """Return where a generator is in its stream, to compare."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def generators_of(functions: Iterable[Any]) -> dict[str, list[Generator]]:
    """Return the generators that functions use: global ones, those they close over, and of calls.

    Several may have one name, in different functions.

    Examples
    --------
    >>> chance = np.random.default_rng(0)
    >>> list(generators_of([partial(print, chance=chance)]))
    ['chance']
    """
    found: dict[str, list[Generator]] = {}
    seen: dict[int, Any] = {}  # they stay alive, so that no other object has their id
    waiting: list[tuple[str, Any]] = [("", function) for function in functions]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if is_own(value):
            found.setdefault(name, []).append(value)
        else:
            waiting += used_by(value)
    return found


def used_by(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function or an object of the user's may call or draw from, by name."""
    if isinstance(value, partial):
        yield from (("", value.func), *value.keywords.items(), *(("", it) for it in value.args))
    elif isinstance(value, MethodType):
        yield from (("", value.__func__), ("", value.__self__))
    elif isinstance(value, FunctionType):
        if is_a_users(value.__module__ or ""):
            names, known = _names(value.__code__), value.__globals__
            yield from ((name, known[name]) for name in names if name in known)
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((name, it) for name, cell in cells for it in _content(cell))
    elif isinstance(value, type):
        if is_a_users(value.__module__):
            yield from vars(value).items()
            yield from (("", base) for base in value.__bases__)
    elif is_a_users(type(value).__module__):
        yield from (("", type(value)), *getattr(value, "__dict__", {}).items())


def _names(code: CodeType) -> set[str]:
    inner = [_names(it) for it in code.co_consts if isinstance(it, CodeType)]
    return set(code.co_names).union(*inner)


def _content(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing is in it yet
        return []
