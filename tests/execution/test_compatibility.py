"""What is sent to the workers arrives as it was."""

from __future__ import annotations

import pickle
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from dagsel.errors import WorkloadTransportError
from dagsel.execution.compatibility import pack_workload


class Holds:
    """Stands for a workload, whose parts are its attributes."""

    def __init__(self, part: Any) -> None:
        self.part = part


def by_value(source: str) -> Any:
    """Make a function as a notebook does: no process can import it."""
    names: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec(source, names)
    return names["function"]


@pytest.mark.parametrize("name", ["ops", "classes", "backends"])
def test_a_function_that_names_torch_and_an_attribute_is_sent(name: str) -> None:
    """The attribute may have the name of a module of torch that is no plain one."""
    assert type(sys.modules[f"torch.{name}"]) is not ModuleType
    function = by_value(f"def function(self):\n    return torch.add(self.{name}, 1)")
    sent = pickle.loads(pack_workload(Holds(function)))
    assert sent.part(type("Layer", (), {name: torch.ones(1)})).tolist() == [2.0]


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(WorkloadTransportError, match="'part' of the Holds cannot be sent"):
        pack_workload(Holds(threading.Lock()))
