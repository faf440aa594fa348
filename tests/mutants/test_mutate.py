"""Laws of mutants: what is changed, what never, that a seed says which; known ones still apply."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


def loaded(name: str) -> ModuleType:
    """Load a module of this folder."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


draw, faults = loaded("mutate_draw"), loaded("known_faults")
for imported in ("mutate_same", "mutate_tests"):
    loaded(imported)
known, mutate = loaded("known"), loaded("mutate")  # which import those above
PACKAGE = HERE.parents[1] / "dagsel"
CHANGED = """
def f(x, y=2, mode="most"):
    while not x:
        if 3 <= x and y:
            break
        continue
    z.append(min(x, y + 0))
    z.kept = 7
    if x is None:
        raise ValueError("x")
    if z is None:
        return False
    return g(x)
"""
KEPT = '''
"""One 1 < 2."""
from typing import TYPE_CHECKING
__all__ = ["f", *names[1:]]
if TYPE_CHECKING:
    SIZE = 5
Sizes: TypeAlias = "list[int]"
def f(x: tuple[1, 2]) -> A[1]:
    """Not 1."""
    logger.warning("%d", 1)
    warnings.warn(f"{x + 1}", stacklevel=2)
    assert x < 3
    y: list[1]
    zip(x, strict=True)
'''


def changes(code: str) -> set[str]:
    """Everything that could stand in another place, over many seeds."""
    found = (m for seed in range(40) for m in draw.mutants("a/f.py", code.encode(), seed))
    return {mutant.mutation for mutant in found}


def test_each_kind_of_place_is_changed() -> None:
    assert changes(CHANGED) == {
        "2  ->  3",
        "\"most\"  ->  'mutant'",
        "not x  ->  (x)",
        "3 <= x and y  ->  (3 <= x or y)",
        "3 <= x  ->  (3 > x)",
        "3 <= x  ->  (3 < x)",
        "3  ->  4",
        "break  ->  continue",
        "continue  ->  break",
        "z.append(min(x, y + 0))  ->  pass",
        "min(x, y + 0)  ->  max(x, y + 0)",
        "y + 0  ->  (y - 0)",
        "0  ->  1",
        "z.kept = 7  ->  pass",
        "7  ->  8",
        "x is None  ->  (x is not None)",
        "z is None  ->  (z is not None)",
        "False  ->  True",
        'raise ValueError("x")  ->  pass',
        "return g(x)  ->  return None",
        "return g(x)  ->  return x",
    }


def test_texts_hints_checks_and_what_is_said_stay() -> None:
    assert changes(KEPT) == {"zip(x, strict=True)  ->  pass"}


def test_each_mutant_is_another_program_that_can_be_read() -> None:
    code = (PACKAGE / "flows" / "asha.py").read_bytes()
    right = ast.dump(ast.parse(code))
    every = list(draw.mutants("flows/asha.py", code, 0))
    assert len({mutant.name for mutant in every}) == len(every) > 50
    for mutant in every:
        changed = mutant.put_in(code)
        assert ast.dump(ast.parse(changed)) != right
        assert mutant.changed(code) in changed.decode()


@pytest.mark.parametrize("seed", range(3))
def test_a_change_elsewhere_leaves_the_draw_as_it_is(seed: int) -> None:
    def ranks(code: str, seed: int) -> set[str]:
        return {mutant.rank(seed, "place") for mutant in draw.mutants("f.py", code.encode(), seed)}

    assert ranks(CHANGED, seed) < ranks("A = 1\n" + CHANGED, seed)
    assert not ranks(CHANGED, seed) & ranks(CHANGED, seed + 1)


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_known_fault_can_still_be_put_in(fault: Any, tmp_path: Path) -> None:
    """Else nobody sees any more that a test sees it."""
    copy = tmp_path / "dagsel" / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text((PACKAGE / fault.file).read_text())
    fault.put_in(tmp_path)
    ast.parse(copy.read_text())
    assert all((HERE.parent / name.partition("::")[0]).exists() for name in fault.tests.split())


def test_a_fault_that_hangs_is_ended_by_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "LIMIT_S", 6)  # of a processor; these tests take two
    right = "        self.wait_until = inf\n        if worker in self.unneeded:"
    wrong = "        while True: pass\n        if worker in self.unneeded:"
    fault = faults.Fault(
        "hangs", "dispatch/list_scheduler.py", right, wrong, "dispatch/test_list_scheduler.py"
    )
    assert known.try_out(fault) == "ended after 6 s"


def test_a_mutant_that_hangs_is_ended_by_its_limit(tmp_path: Path) -> None:
    def work() -> int:
        while True:
            pass

    assert mutate.in_process(tmp_path, 1.0, work) == "hung"
    assert mutate.in_process(tmp_path, 1.0, lambda: 3) == "3"
