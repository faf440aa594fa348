"""The pages of the API reference: which names they show, and what stands in their docstrings.

``python tests/reference.py`` writes the table of all names into ``docs/reference/api/index.md``.
The code is read by griffe, as the site does it; nothing of it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/reference/api"
INDEX = FOLDER / "index.md"
#: Packages and modules whose names are public: those of ``__all__``, or all that they define.
NAMESPACES = [
    "dagsel",
    "dagsel.collate",
    "dagsel.flow",
    "dagsel.flows",
    "dagsel.flows.baselines",
    "dagsel.metrics",
    "dagsel.observers",
    "dagsel.planning.scaling",
    "dagsel.simulation",
    "dagsel.storage",
    "dagsel.testing",
    "dagsel.workloads",
]
_DIRECTIVE = re.compile(r"^#+ ::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)
_OPTION = re.compile(r"^      (\w+): (.*)$", re.MULTILINE)
_BEGIN, _END = "<!-- names -->\n", "<!-- end of names -->\n"


@lru_cache(maxsize=1)
def code() -> Any:
    """Return what griffe reads of dagsel."""
    return griffe.load("dagsel", docstring_parser="numpy", search_paths=[str(ROOT)])


def of(name: str) -> Any:
    """Return what griffe knows of a name such as ``dagsel.Run.best``."""
    return code() if name == "dagsel" else code()[name.removeprefix("dagsel.")]


@dataclass(frozen=True)
class Docstring:
    """What griffe has found in a docstring."""

    owner: Any

    @cached_property
    def sections(self) -> list[Any]:
        docstring = self.owner.docstring
        return [] if docstring is None else docstring.parsed

    @property
    def text(self) -> str:
        """All that is written, as one string."""
        return str(self.owner.docstring.value) if self.owner.docstring else ""

    @property
    def first_line(self) -> str:
        """The sentence that it begins with; of several lines one."""
        return " ".join(self.text.partition("\n\n")[0].split())

    @property
    def examples(self) -> str:
        """The code under Examples; empty if there is none."""
        found = [section for section in self.sections if section.kind.value == "examples"]
        return "\n".join(text for section in found for _, text in section.value)

    @property
    def described(self) -> set[str]:
        """Names of the parameters that are described."""
        found = [section for section in self.sections if section.kind.value == "parameters"]
        return {entry.name.lstrip("*") for section in found for entry in section.value}

    @property
    def takes(self) -> set[str]:
        """Names of the parameters that a caller can give."""
        if self.owner.kind.value not in ("function", "class"):
            return set()
        names = {parameter.name for parameter in self.owner.parameters} - {"self", "cls"}
        own = {name: str(getattr(self.owner.members.get(name), "value", "")) for name in names}
        is_set_inside = "init=False"  # a field of a dataclass
        return {n for n in names if not n.startswith("_") and is_set_inside not in own[n]}


@dataclass(frozen=True)
class Entry:
    """A name that a page shows."""

    page: str
    name: str
    options: dict[str, str]

    @property
    def members(self) -> tuple[str, ...]:
        """Members that are shown with it."""
        found = self.options.get("members", "false")
        return () if found == "false" else tuple(found.strip("[]").split(", "))

    @property
    def is_called(self) -> bool:
        """Whether a reader calls it; if not, something else makes the objects of this class."""
        return self.options.get("show_signature") != "false"

    @property
    def is_member(self) -> bool:
        """Whether it is a member of a class that has a directive of its own."""
        return of(self.name.rpartition(".")[0]).kind.value == "class"

    @property
    def docstring(self) -> Docstring:
        return Docstring(of(self.name))

    def all(self) -> Iterator[tuple[str, Docstring]]:
        """Return the name and the docstring of it and of each member that is shown."""
        yield self.name, self.docstring
        for member in self.members:
            yield f"{self.name}.{member}", Docstring(of(f"{self.name}.{member}"))


def entries() -> list[Entry]:
    """Return what all pages show, in their order."""
    found = []
    for page in sorted(FOLDER.glob("*.md")):
        for name, options in _DIRECTIVE.findall(page.read_text()):
            found.append(Entry(page.name, name, dict(_OPTION.findall(options))))
    return found


def public_names() -> list[str]:
    """Return the public names, each once, by the shortest way to write it."""
    found: dict[str, str] = {}
    for namespace in NAMESPACES:
        module = of(namespace)
        listed = module.exports
        names = listed or [
            name
            for name, member in module.members.items()
            if not (name.startswith("_") or member.is_alias)
            and member.kind.value in ("function", "class")
        ]
        for name in map(str, names):
            member = module[name]
            if member.kind.value in ("function", "class"):
                found.setdefault(member.canonical_path, f"{namespace}.{name}")
    return list(found.values())


def table() -> str:
    """Return the table of all names that the pages show, by name."""
    rows = {entry.name: entry for entry in entries() if not entry.is_member}
    lines = ["| name | what it does |", "| --- | --- |"]
    for name in sorted(rows, key=lambda name: (name.count("."), name.lower())):
        entry = rows[name]
        told = entry.docstring.first_line.replace("|", "\\|")
        lines.append(f"| [`{name}`]({entry.page}#{name}) | {told} |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """Return the index page with the table as it should be."""
    head, _, rest = INDEX.read_text().partition(_BEGIN)
    return head + _BEGIN + "\n" + table() + "\n" + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    INDEX.write_text(written())
