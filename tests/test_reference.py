"""What the API reference says: every public name is there, with an example and all its parameters.

- Each public name stands on one page of ``docs/reference/api``, and none on two.
- Each class and each function has an example, which `make doctest` runs. A method has one of its
  own, or is used in that of its class; so is a property whose docstring has more than one line.
- The parameters that a docstring describes are those of the signature.
- The page of `Run` shows all that it inherits.
- The table of all names is made from the docstrings.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter

import pytest

from . import reference
from .reference import Docstring, Entry

ENTRIES = reference.entries()
#: Those that other programs use, not those of a user.
MODULES = ("dagsel.codec", "dagsel.errors", "dagsel.steering")
WRONG = "docs/reference/api/index.md is out of date: python tests/reference.py"


def test_each_public_name_stands_on_one_page() -> None:
    shown = Counter(reference.of(entry.name).canonical_path for entry in ENTRIES)
    assert [name for name, n in shown.items() if n > 1] == []
    there = [reference.of(name) for name in reference.public_names()]
    assert [name.path for name in there if name.canonical_path not in shown] == []


def test_what_is_shown_has_the_shortest_of_its_names() -> None:
    short = {reference.of(name).canonical_path: name for name in reference.public_names()}
    for entry in ENTRIES:
        assert short.get(reference.of(entry.name).canonical_path, entry.name) == entry.name


@pytest.mark.parametrize("name", reference.NAMESPACES)
def test_what_is_offered_as_one_types_is_public(name: str) -> None:
    package = importlib.import_module(name)
    if hasattr(package, "__path__"):
        offered = {each for each in dir(package) if not each.startswith("_")}
        within = {it for it in offered if f"{name}.{it}" in (*reference.NAMESPACES, *MODULES)}
        assert offered == {*package.__all__, *within}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_it_has_an_example(entry: Entry) -> None:
    owner = Docstring(reference.of(entry.name.rpartition(".")[0])) if entry.is_member else None
    example = (owner or entry.docstring).examples
    assert example
    assert [name for name, text in entry.all() if not _is_shown(name, text, example)] == []


def _is_shown(name: str, docstring: Docstring, owner: str) -> bool:
    is_plain = docstring.owner.kind.value == "attribute" and docstring.text.count("\n") == 0
    used = re.search(rf"(\.|def ){name.rpartition('.')[2]}\b", owner)
    return is_plain or bool(docstring.examples or used)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_its_parameters_are_described(entry: Entry) -> None:
    for name, docstring in entry.all():
        assert docstring.text, f"{name} has no docstring"
        if name != entry.name or entry.is_called:
            assert docstring.described == docstring.takes, name


def test_the_page_of_a_run_shows_what_it_inherits() -> None:
    shown = {entry.name for entry in ENTRIES if entry.page == "run.md"}
    members = {
        name
        for name, member in reference.of("dagsel.Run").all_members.items()
        if not name.startswith("_") and member.docstring is not None
    }
    assert {"best_value", "leaderboard", "metrics", "failures", "timeline"} <= members
    assert members == {
        name.removeprefix("dagsel.Run.") for name in shown if name.startswith("dagsel.Run.")
    }


def test_the_table_of_all_names_is_what_the_docstrings_say() -> None:
    assert reference.INDEX.read_text() == reference.written(), WRONG
