"""Every small fault that could be put into a file, one for each place, and a draw of them."""

from __future__ import annotations

import ast
import copy
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TURNED = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
FOLDERS = ("planning", "dispatch", "flows", "storage", "history", "driver")
#: What these calls are given is read by people.
SAID = {"logger", "_logger", "warnings", "assert_never", "cast", "TypeVar"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file of dagsel with one place changed."""

    file: str  # "flows/asha.py"
    line: int
    scope: str  # the function's qualified name, or "" where the place is outside of functions
    text: str  # the line without the fault
    mutation: str  # "a < b  ->  a <= b"
    nth: int  # of those that are alike in a scope
    span: tuple[int, int]  # where it starts and ends in the file
    by: str

    @property
    def folder(self) -> str:
        return self.file.split("/")[0]

    def put_in(self, code: bytes) -> bytes:
        """Return the file with the fault."""
        start, end = self.span
        return code[:start] + self.by.encode() + code[end:]

    def changed(self, code: bytes) -> str:
        """Return the line with the fault."""
        return self.put_in(code).decode().splitlines()[self.line - 1].strip()

    def rank(self, seed: int, of: str) -> str:
        """A random number of this mutant, which a change elsewhere leaves as it is."""
        key = (seed, of, self.file, self.scope, self.text, self.nth, self.mutation.split("  ->")[0])
        return hashlib.sha256(repr(key if of == "place" else (key, self.by)).encode()).hexdigest()

    @property
    def name(self) -> str:
        return self.rank(0, "name")[:16]


class _Places(ast.NodeVisitor):
    """Collects the nodes that can be changed, each with what can stand in its place."""

    def __init__(self) -> None:
        self.scopes: list[str] = []
        self.in_function = False
        self.found: list[tuple[ast.expr | ast.stmt, str, list[str]]] = []

    def add(self, node: ast.expr | ast.stmt, *texts: str) -> None:
        self.found.append((node, ".".join(self.scopes) if self.in_function else "", list(texts)))

    def all(self, nodes: list[ast.expr] | list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, self.in_function = self.in_function, True
        names = ["<locals>", node.name] if before else [node.name]
        self.scopes += names
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self._default(default)
        self.all(node.body)
        del self.scopes[-len(names) :]
        self.in_function = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.in_function = self.in_function, False
        self.scopes.append(node.name)
        self.all(node.body)
        self.scopes.pop()
        self.in_function = before

    def _default(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.add(node, "'mutant'")
        self.visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and ast.unparse(node.annotation) != "TypeAlias":  # a hint
            self.visit(node.value) if self.in_function else self._default(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        first = node.targets[0]
        if isinstance(first, ast.Name) and first.id.startswith("__"):
            return
        starts = bool(self.scopes) and self.scopes[-1] == "__init__"
        if isinstance(first, ast.Attribute | ast.Subscript) and not starts:
            self.add(node, "pass")
        self.visit(node.value)
        if isinstance(first, ast.Subscript):
            self.visit(first.slice)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        texts = ["pass"]
        if type(node.op) in ARITHMETIC:
            other = copy.copy(node)
            other.op = ARITHMETIC[type(node.op)]()
            texts.append(ast.unparse(other))
        self.add(node, *texts)
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _is_said(node.value):
            self.add(node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add(node, "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "break")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or ast.unparse(node.value) == "None":
            return
        # To return None for False changes nothing but what mypy says.
        texts = [] if ast.unparse(node.value) == "False" else ["return None"]
        if isinstance(node.value, ast.Call) and node.value.args:
            texts.append(f"return {ast.unparse(node.value.args[0]).removeprefix('*')}")
        self.add(node, *texts)
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._test(node.test)
            self.all(node.body)
        self.all(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._test(node.test)
        self.all(node.body)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._test(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        for test in node.ifs:
            self._test(test)

    def _test(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name | ast.Attribute | ast.Call):
            self.add(node, f"(not {ast.unparse(node)})")
        self.visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        texts = []
        for i, operator in enumerate(node.ops):
            for turned in TURNED[type(operator)]:
                other = copy.copy(node)
                other.ops = [*node.ops[:i], turned(), *node.ops[i + 1 :]]
                texts.append(f"({ast.unparse(other)})")
        self.add(node, *texts)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = copy.copy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, f"({ast.unparse(other)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_union = isinstance(node.op, ast.BitOr) and not self.in_function
        if (
            type(node.op) in ARITHMETIC
            and not is_union
            and not isinstance(node.left, ast.JoinedStr)
        ):
            other = copy.copy(node)
            other.op = ARITHMETIC[type(node.op)]()
            self.add(node, f"({ast.unparse(other)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_said(node):
            return
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            other = copy.copy(node)
            other.func = ast.Name("max" if node.func.id == "min" else "min", ast.Load())
            self.add(node, ast.unparse(other))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("strict", "repr"):  # an assertion of zip, and what is shown
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool(value):
                self.add(node, str(not value))
            case 1:
                self.add(node, "0", "2")
            case int(value) if abs(value) <= 10:
                self.add(node, str(value + 1))
            case int(value):
                self.add(node, str(value // 2))
            case float(value):
                self.add(node, str(value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text; nor are the places in it known before Python 3.12."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """A check, which a weaker one does not make wrong."""

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        """A pattern: its value is no expression that can stand in brackets."""


def _is_said(call: ast.Call) -> bool:
    root: ast.expr = call.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id in SAID


def mutants(file: str, code: bytes, seed: int) -> Iterator[Mutant]:
    """One mutant for each place of a file, drawn by the seed where there are several."""
    places = _Places()
    places.visit(ast.parse(code))
    lines = code.splitlines(keepends=True)
    starts = list(itertools.accumulate(map(len, lines), initial=0))
    seen: Counter[tuple[str, str, str]] = Counter()
    for node, scope, texts in places.found:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(code[start:end].decode().split())
        line = lines[node.lineno - 1].decode().strip()
        nth = seen[scope, line, old]
        seen[scope, line, old] += 1
        there = [
            Mutant(file, node.lineno, scope, line, f"{old}  ->  {text}", nth, (start, end), text)
            for text in texts
        ]
        if there:
            yield min(there, key=lambda mutant: mutant.rank(seed, "mutation"))


def draw(package: Path, n: int, seed: int) -> list[Mutant]:
    """A sample of the mutants of all folders, in the order of the folders and lines."""
    every: list[Mutant] = []
    for folder in FOLDERS:
        for path in sorted((package / folder).rglob("*.py")):
            every += mutants(path.relative_to(package).as_posix(), path.read_bytes(), seed)
    every.sort(key=lambda mutant: mutant.rank(seed, "place"))
    drawn = itertools.islice((mutant for mutant in every if _is_valid(mutant, package)), n)
    return sorted(
        drawn, key=lambda mutant: (FOLDERS.index(mutant.folder), mutant.file, mutant.line)
    )


def _is_valid(mutant: Mutant, package: Path) -> bool:
    try:
        ast.parse(mutant.put_in((package / mutant.file).read_bytes()))
    except SyntaxError:
        return False
    return True
