"""Conformance suites: tests that you inherit to check your own flow or workload."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagsel.testing.flows import FlowSuite
    from dagsel.testing.workloads import WorkloadSuite

__all__ = ["FlowSuite", "WorkloadSuite"]

_LAZY = {
    "FlowSuite": "dagsel.testing.flows",
    "WorkloadSuite": "dagsel.testing.workloads",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
