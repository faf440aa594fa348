"""The messages of dagsel's errors: in the sources, and on docs/reference/errors.md.

A message is read from the syntax tree: its variable parts are `…`. What is raised by a function
that gets the class of the error as an argument is a message of any class.

python tests/raised.py  # prints a row for each message that the page lacks
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from dagsel import errors

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "errors.md"
#: `dagsel/flows` and `dagsel/storage` are links to the two last.
SOURCES = ("dagsel", "flows", "storage")
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
#: The heading of messages whose class is the caller's choice.
ANY = "Any of them"
#: Names of a parameter that is the class of an error.
GIVEN = {"error", "kind"}
#: A function that raises the text that it is called with, and the class.
RAISERS = {"no_columns": "DatasetInputError"}
#: What makes a text that comes from another file, by where it is raised: functions there.
MADE_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "dagsel/driver/runner.py: verdict.text": {
        "TooLittleTimeError": ("dagsel/driver/first_epoch.py", "_say", "_say_at_end"),
        "AllTrialsFailedError": ("dagsel/driver/troubles.py", "say"),
    },
    "dagsel/driver/troubles.py: failure.reason": {
        "ClusterError": ("dagsel/dispatch/workers.py", "shortage", "why_unfit"),
        "DatasetError": ("dagsel/dispatch/workers.py", "damage"),
    },
    "dagsel/execution/raising.py: text": {
        "OutOfMemoryError": ("dagsel/workloads/memory.py", "text_of"),
    },
    "dagsel/listening.py: why_not": {"DagselError": ("storage/runs/control.py", "_read")},
}
#: A text that was a message before: of another process, of an earlier call, of a recorded run.
PASSED_ON = {
    "dagsel/attaching.py: str(told.get('text'))",
    "dagsel/execution/engine.py: '; '.join(refusals)",
    "dagsel/going_on.py: record.failed_alike",
    "dagsel/going_on.py: record.too_little_time",
    "dagsel/simulation/recorded.py: self.failed[number]",
    "storage/datasets/inputs/reading.py: why",
    "storage/runs/lock.py: self._lost",
}
ROW = re.compile(r"^\| `(?P<text>.+?)` \| (?P<about>.+?) \| (?P<way>.+?) \|$", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Message:
    """A message of a class of errors, and where it is raised."""

    kind: str
    text: str
    path: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


def joined(text: str) -> str:
    """Return a text with one sign for adjacent variable parts."""
    return " ".join(re.sub("…+", "…", text).split())


@dataclass(frozen=True)
class Module:
    """A file of the sources."""

    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)
        }

    def texts(self, node: ast.expr | None, scope: ast.AST) -> list[str]:
        """Return what an expression may read; nothing if it comes from elsewhere."""
        match node:
            case ast.Constant(str(text)):
                return [text] if text else []
            case ast.JoinedStr(parts):
                options = [self.texts(part, scope) or ["…"] for part in parts]
                # What a text begins with, it is found by; further on, one text is as good as many.
                rest = [option if len(option) == 1 else ["…"] for option in options[1:]]
                return ["".join(chosen) for chosen in itertools.product(*options[:1], *rest)]
            case ast.FormattedValue(ast.Name(name), -1, None):
                return self.assigned(name, scope)
            case ast.BinOp(left, ast.Add(), right):
                options = [self.texts(part, scope) or ["…"] for part in (left, right)]
                return ["".join(chosen) for chosen in itertools.product(*options)]
            case ast.IfExp(_, _, ast.Constant("")):  # it may be left out
                return []
            case ast.IfExp(_, body, orelse):
                return [*self.texts(body, scope), *self.texts(orelse, scope)]
            case ast.Name(name):
                return self.assigned(name, scope)
            case ast.Attribute(_, name) | ast.Call(ast.Name(name) | ast.Attribute(_, name)) if (
                name in self.functions
            ):
                return self.returned(name)
            case ast.Call(_, _, [ast.keyword("why_not", why)]):
                return self.texts(why, scope)
        return []

    def returned(self, name: str) -> list[str]:
        """Return what a function, or a property, returns."""
        function = self.functions[name]
        found = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        return [text for value in found for text in self.texts(value, function)]

    def assigned(self, name: str, scope: ast.AST) -> list[str]:
        """Return what a function assigns to one of its names; nothing if it is not texts alone."""
        texts: list[str] = []
        for node in ast.walk(scope):
            match node:
                case ast.Assign([ast.Name(target)], value) if target == name:
                    texts += self.texts(value, scope) or ["…"]
                case ast.AugAssign(ast.Name(target)) if target == name:
                    return []
        return [text for text in texts if text != "…"]

    def raised(self) -> Iterator[tuple[ast.Call, str, ast.AST]]:
        """Walk over the calls that make an error, each with its class and its function."""

        def walk(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.Call, str, ast.AST]]:
            if isinstance(node, ast.FunctionDef):
                scope = node
            match node:
                case ast.Call(ast.Name(name)) if name in KINDS:
                    yield node, name, scope
                case ast.Call(ast.Attribute(_, name)) if name in RAISERS:
                    yield node, RAISERS[name], scope
                case ast.Raise(ast.Call(ast.Name(name)) as call) if name in GIVEN:
                    yield call, ANY, scope
            for child in ast.iter_child_nodes(node):
                yield from walk(child, scope)

        yield from walk(self.tree, self.tree)

    def messages(self) -> Iterator[Message]:
        for call, kind, scope in self.raised():
            place = f"{self.name}: {ast.unparse(call.args[0])}" if call.args else self.name
            if place in PASSED_ON:
                continue
            if kind in OWN_TEXT:
                texts = OWN_TEXT[kind]
            elif kind in MADE_BY.get(place, {}):
                path, *functions = MADE_BY[place][kind]
                texts = [text for name in functions for text in module(path).returned(name)]
            else:
                texts = self.texts(call.args[0], scope) if call.args else []
            for text in texts or [f"<{ast.unparse(call)}>"]:
                yield Message(kind, joined(text), self.name, call.lineno)


@cache
def module(path: str) -> Module:
    return Module(ROOT / path)


def own_texts() -> dict[str, list[str]]:
    """Return the texts of classes that write theirs themselves."""
    here = module("dagsel/errors.py")
    found = {}
    for node in ast.walk(here.tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__str__":
                    value = next(n.value for n in ast.walk(part) if isinstance(n, ast.Return))
                    assert value is not None
                    found[node.name] = here.texts(value, part)
    return found


OWN_TEXT = own_texts()


@cache
def in_sources() -> list[Message]:
    """Return all messages of the sources."""
    paths = (path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py")))
    links = [path for path in (ROOT / "dagsel").iterdir() if path.is_symlink()]
    return [
        message
        for path in paths
        if not any(path.is_relative_to(link) for link in links)
        for message in module(path.relative_to(ROOT).as_posix()).messages()
    ]


@dataclass(frozen=True)
class Row:
    """A row of the page: a message, what it means, and a way to make it happen."""

    kind: str
    text: str
    about: str
    way: str

    @property
    def is_code(self) -> bool:
        return self.way.startswith("`") and not self.is_test

    @property
    def is_test(self) -> bool:
        return self.way.startswith("`tests/")

    @property
    def code(self) -> str:
        """The way without its quotes: a line of Python, or the path and name of a test."""
        return self.way.strip("`")

    def matches(self, text: str) -> bool:
        """Whether a message that was raised is this one."""
        parts = map(re.escape, self.text.split("…"))
        return re.fullmatch(".*".join(parts), " ".join(text.split())) is not None


def on_page() -> list[Row]:
    """Return the rows of the page; those of a class stand below its heading."""
    rows = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        kind = section.partition("\n")[0].strip()
        if kind in KINDS | {ANY}:
            rows += [Row(kind, *found) for found in ROW.findall(section)]
    return rows


def missing() -> list[Message]:
    """Return the messages that the page lacks."""
    there = {(row.kind, row.text) for row in on_page()}
    lacking = {m.kind + m.text: m for m in in_sources() if (m.kind, m.text) not in there}
    return sorted(lacking.values())


def stale() -> list[Row]:
    """Return the rows of messages that no source has any more."""
    there = {(message.kind, message.text) for message in in_sources()}
    return [row for row in on_page() if (row.kind, row.text) not in there]


if __name__ == "__main__":
    for lacking in missing():
        print(f"{lacking}\n| `{lacking.text}` | what it means | a way to make it happen |")
    for row in stale():
        print(f"{PAGE.name}: no source has: {row.kind}: {row.text}")
