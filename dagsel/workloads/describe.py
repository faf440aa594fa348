"""Describes a workload as text, which a later process compares with its own."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Protocol, runtime_checkable

from dagsel.metrics import OverSet

#: What a workload learns or keeps by itself, and what changes no result: a run may go on
#: with another ``memory``. A ``run.json`` of dagsel 0.1 holds the first.
_LEARNT = {
    "_asked", "_borne", "_casting", "_counts", "_has_made_two", "_has_said", "_has_tried",
    "_left_out", "_live", "_memory", "_packs", "_programs", "_unfilled",
}  # fmt: skip
#: A user's class in the escaped text of a description.
_CLASS = re.compile(r"([^\s'\"{(\[,]+)\\ \\\(class\\ [0-9a-f]{8}\\\)")


def describe(workload: Any) -> dict[str, str]:
    """Describe each part of a workload; equal parts give equal text in every process.

    Functions and a user's classes are told apart by their names and their code, wherever they
    stand, and not by what they call or close over; classes of libraries by their modules.

    Examples
    --------
    >>> from dagsel.workloads import SklearnWorkload
    >>> describe(SklearnWorkload(lambda config: None))["class"]
    'dagsel.workloads.sklearn.SklearnWorkload'
    """
    kind = type(workload)
    known = sorted(vars(workload).items())
    parts = {name: _text(part) for name, part in known if name not in _LEARNT}
    return {"class": _text(kind), **parts}


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Name the parts in which two descriptions differ.

    A part that is None does nothing, so it is what a run of before has that did not know it.

    Examples
    --------
    >>> differences({"loss": "a.b"}, {"loss": "a.b", "augment": "None"})
    []
    """
    return [
        f"{name!r} was {then.get(name, 'missing')} and is {now.get(name, 'missing')}"
        for name in sorted((then.keys() | now.keys()) - _LEARNT)
        if not _is_same(then.get(name, "None"), now.get(name, "None"))
    ]


def _is_same(then: str, now: str) -> bool:
    """Whether a text is that of now, or what an earlier dagsel had: a class was its module's."""
    if then == now:
        return True
    before = _CLASS.sub(r"(?:[\\w.]+\\.)?\1", re.escape(now))
    return re.fullmatch(before, then) is not None


@runtime_checkable
class Described(Protocol):
    """A part of a workload that says itself what it is."""

    def described(self) -> str:
        """Return the same text for an equal part, in every process."""
        ...


def _text(part: Any) -> str:
    if isinstance(part, Described):
        return part.described()
    if isinstance(part, partial):
        return f"partial of {_text(part.func)}"
    if isinstance(part, OverSet):
        return f"over_set of {_text(part.function)}"
    code = getattr(part, "__code__", None)
    if isinstance(code, CodeType):
        return f"{part.__qualname__} (code {_digest(code)})"
    if isinstance(part, type) or callable(part):
        owner = part if hasattr(part, "__qualname__") else type(part)
        if isinstance(owner, type) and _is_users(owner):
            return f"{owner.__qualname__} (class {_digest(*_codes(owner))})"
        return f"{owner.__module__}.{owner.__qualname__}"
    if isinstance(part, Mapping):
        return str({str(key): _text(value) for key, value in part.items()})
    if part is None or isinstance(part, bool | int | float | str):
        return repr(part)
    if isinstance(part, tuple | list):
        return str([_text(item) for item in part])
    return f"a {type(part).__module__}.{type(part).__qualname__}"


def _is_users(kind: type) -> bool:
    """Whether a class is of a user's file, and of no library."""
    return is_a_users(kind.__module__)


@cache
def is_a_users(module: str) -> bool:
    """Whether a module is a user's file, and of no library.

    Examples
    --------
    >>> is_a_users("__main__"), is_a_users("torch.nn")
    (True, False)
    """
    if module.partition(".")[0] in {"dagsel", *sys.stdlib_module_names}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    is_installed = bool(file and {"site-packages", "dist-packages"} & {*Path(file).parts})
    return module == "__main__" or not is_installed


def _codes(kind: type) -> Iterator[CodeType]:
    """Yield the code of the methods of a user's class, and of its bases that are a user's."""
    for base in filter(_is_users, kind.__mro__):
        for _, member in sorted(vars(base).items()):
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                yield inspect.unwrap(function).__code__


def _digest(*codes: CodeType) -> str:
    digest = hashlib.blake2b(digest_size=4)
    waiting = [*codes]
    while waiting:
        here = waiting.pop()
        digest.update(here.co_code)
        digest.update(repr(here.co_names).encode())
        for constant in here.co_consts:
            if isinstance(constant, CodeType):
                waiting.append(constant)
            elif not isinstance(constant, frozenset):  # their order differs between processes
                digest.update(repr(constant).encode())
    return digest.hexdigest()
