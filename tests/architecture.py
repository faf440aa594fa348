"""Counts imports that go up, and circles: ``python tests/architecture.py`` prints both.

It reads every import of the product as text, those for type checkers and those inside functions
too. The floors are those of the layer contract in ``pyproject.toml``.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {"dagsel": "dagsel", "flows": "dagsel.flows", "storage": "dagsel.storage"}


def product() -> dict[str, Path]:
    """Name every module of the product."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder)
            if any((ROOT / folder / part).is_symlink() for part in inner.parts[:1]):
                continue
            parts = inner.with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join([package, *parts])] = path
    return found


def imports(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Return what each module imports of the product.

    A package's ``__init__`` that hands out its own modules' names is left out: it stands for them.
    """
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        graph[name] = set()
        for target in _targets(ast.parse(path.read_text())):
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target not in ("", "dagsel", name):
                graph[name].add(target)
    for name, path in modules.items():
        if path.name == "__init__.py":
            graph[name] = {to for to in graph[name] if not to.startswith(f"{name}.")}
    return graph


def _targets(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floors() -> dict[str, int]:
    """Return the floor of each room, the lowest first; rooms with a ``|`` between share one."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (c["layers"] for c in config["contracts"] if c["type"] == "layers")
    return {
        room.strip(): floor for floor, row in enumerate(reversed(layers)) for room in row.split("|")
    }


def upward(graph: dict[str, set[str]]) -> list[str]:
    """List the imports from a room to one that does not lie below it."""
    floor_of = floors()
    found = []
    for name, targets in graph.items():
        for target in sorted(targets):
            here, there = (module.split(".")[1:2] for module in (name, target))
            if here and here != there and floor_of[there[0]] >= floor_of[here[0]]:
                found.append(f"{name} -> {target}")
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


if __name__ == "__main__":
    found = imports(product())
    print(f"{len(upward(found))} imports go up", *upward(found), sep="\n  ")
    print(f"{int(bool(circle(found)))} circles", *circle(found), sep="\n  ")
