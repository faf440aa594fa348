"""The shape of the house: imports go down, names are told once, files are short."""

from __future__ import annotations

import ast
from collections import Counter
from statistics import median

from .architecture import circle, floors, imports, product, upward

MODULES = product()


def test_no_import_goes_up_and_none_in_a_circle() -> None:
    graph = imports(MODULES)
    assert len(graph) > 100
    assert sum(map(len, graph.values())) > 400
    assert upward(graph) == []
    assert circle(graph) == []


def test_what_goes_up_or_in_a_circle_is_seen() -> None:
    graph = imports(MODULES)
    for room, other in (("dispatch", "driver"), ("flows", "study"), ("simulation", "execution")):
        extra = {**graph, f"dagsel.{room}": {f"dagsel.{other}"}}
        assert upward(extra) == [f"dagsel.{room} -> dagsel.{other}"]
    assert circle({**graph, "dagsel.errors": {"dagsel.run"}})


def test_every_room_has_a_floor() -> None:
    rooms = {name.split(".")[1] for name in MODULES if name.count(".")}
    assert rooms == set(floors())


def test_no_two_public_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, n in names.items() if n > 1] == []


def test_files_are_short() -> None:
    lines = {name: path.read_text().count("\n") for name, path in MODULES.items()}
    assert {name: n for name, n in lines.items() if n > 500} == {}
    assert median(lines.values()) < 160  # each public name has an example in its docstring
