"""What to train: the `Workload` protocol and the workloads that dagsel brings.

Importing this package imports no library that trains: each workload is loaded when it is first
named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagsel.workloads.base import Evaluated, Reconfigurable, Trained, Visit, Workload

if TYPE_CHECKING:
    from dagsel.workloads.flax import FlaxWorkload
    from dagsel.workloads.huggingface import HFWorkload
    from dagsel.workloads.keras import KerasWorkload
    from dagsel.workloads.lightning import LightningWorkload
    from dagsel.workloads.sklearn import SklearnWorkload
    from dagsel.workloads.torch import Base, TorchWorkload

__all__ = [
    "Base",
    "Evaluated",
    "FlaxWorkload",
    "HFWorkload",
    "KerasWorkload",
    "LightningWorkload",
    "Reconfigurable",
    "SklearnWorkload",
    "TorchWorkload",
    "Trained",
    "Visit",
    "Workload",
]

_LAZY = {
    "Base": "dagsel.workloads.torch",
    "FlaxWorkload": "dagsel.workloads.flax",
    "HFWorkload": "dagsel.workloads.huggingface",
    "KerasWorkload": "dagsel.workloads.keras",
    "LightningWorkload": "dagsel.workloads.lightning",
    "SklearnWorkload": "dagsel.workloads.sklearn",
    "TorchWorkload": "dagsel.workloads.torch",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
