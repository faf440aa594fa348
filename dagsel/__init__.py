"""Deep-learning model selection on Dask: the data stays on the workers, the models hop.

Names are imported when they are first used, so that ``import dagsel.storage`` needs neither torch
nor Dask.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    import dagsel.metrics as metrics
    from dagsel.run import Run as Run
    from dagsel.run import optimize as optimize
    from dagsel.workloads import SklearnWorkload as SklearnWorkload
    from dagsel.workloads import TorchWorkload as TorchWorkload
    from dagsel.workloads import Workload as Workload

_HOMES = {
    "Run": "dagsel.run",
    "SklearnWorkload": "dagsel.workloads",
    "TorchWorkload": "dagsel.workloads",
    "Workload": "dagsel.workloads",
    "optimize": "dagsel.run",
}
_MODULES = ("errors", "flow", "flows", "metrics", "storage", "testing", "workloads")

__all__ = ["Run", "SklearnWorkload", "TorchWorkload", "Workload", "metrics", "optimize"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"dagsel.{name}")
    raise AttributeError(f"module 'dagsel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
