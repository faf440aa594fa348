"""Which test names which parameter of what is public.

A parameter counts as named by a test whose file names the function or class, and that gives a
keyword or a key of that name. Whether the test shows what the parameter changes, a reader says.

python tests/parameters.py  # lists the parameters, and the first test of each
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import dagsel
import dagsel.flows
import dagsel.metrics
import dagsel.storage
import dagsel.testing

TESTS = Path(__file__).parent
MODULES = (dagsel, dagsel.flows, dagsel.metrics, dagsel.storage, dagsel.testing)


def public() -> dict[str, Any]:
    """Return the functions and classes of the public modules, and their public methods."""
    found: dict[str, Any] = {}
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing):
                continue
            found[name] = thing
            if inspect.isclass(thing):
                for method, inner in inspect.getmembers(thing, inspect.isroutine):
                    is_own = inner.__qualname__ == f"{thing.__name__}.{method}"
                    if is_own and not method.startswith("_"):
                        found[f"{name}.{method}"] = inner
    return found


def parameters(thing: Any) -> list[str]:
    """Return the names of what a call of a function, a class or a method takes."""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return []
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = (p.name for p in signature.parameters.values() if p.kind not in rest)
    return [name for name in taken if name != "self" and not name.startswith("_")]


def given(tree: ast.Module) -> tuple[list[tuple[str, str]], list[tuple[str, int, str]]]:
    """Return what the tests of a file give, each with the test or what it is in.

    First the keywords and the keys of dicts, second what is called, with how many arguments
    without a keyword.
    """
    named: list[tuple[str, str]] = []
    called: list[tuple[str, int, str]] = []
    for top in tree.body:
        where = getattr(top, "name", "")
        for node in ast.walk(top):
            if isinstance(node, ast.keyword) and node.arg:
                named.append((node.arg, where))
            elif isinstance(node, ast.Dict):
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                named += [(key, where) for key in keys if isinstance(key, str)]
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                called.append((name, len(node.args), where))
    return named, called


def table() -> dict[tuple[str, str], str]:
    """Return the first test that names each parameter; empty for none."""
    things = {name: parameters(thing) for name, thing in public().items()}
    found = {(name, parameter): "" for name, taken in things.items() for parameter in taken}
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        here = {name for name in things if name.rpartition(".")[2] in text}
        place = path.relative_to(TESTS).as_posix()
        named, called = given(ast.parse(text))
        for key, where in named:
            for name in here:
                if found.get((name, key)) == "":
                    found[name, key] = f"{place}::{where}"
        for short, n, where in called:
            for name in here:
                if name.rpartition(".")[2] == short:
                    for parameter in things[name][:n]:
                        found[name, parameter] = found[name, parameter] or f"{place}::{where}"
    return found


if __name__ == "__main__":
    for (name, parameter), test in table().items():
        print(f"{name:32} {parameter:24} {test or '-- none'}")
