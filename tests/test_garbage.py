"""What a script has imported is not walked for garbage; what else there is, is."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys, weakref
{before}
import dagsel
dagsel.optimize
n = gc.get_freeze_count()

class Node: pass

node = Node()
node.itself, seen = node, weakref.ref(node)
del node
gc.collect()
print(n > 1000, seen() is None, gc.isenabled())
"""


@pytest.mark.parametrize(
    ("before", "is_set_apart"),
    [("", True), ("sys.ps1 = '>>> '", False), ("gc.freeze()", None), ("gc.disable()", True)],
)
def test_imports_are_set_apart_in_scripts_alone(before: str, is_set_apart: bool | None) -> None:
    program = PROGRAM.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    was_set_apart, is_collected, is_on = done.stdout.split()
    if is_set_apart is not None:
        assert was_set_apart == str(is_set_apart)
    assert is_collected == "True"
    assert is_on == str(before != "gc.disable()")
