"""Deep-learning model selection on Dask: the data stays on the workers, the models hop.

Names are imported when they are first used, so that ``import dagsel.storage`` needs neither torch
nor Dask.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    import dagsel.collate as collate
    import dagsel.metrics as metrics
    from dagsel.attaching import Attached as Attached
    from dagsel.attaching import attach as attach
    from dagsel.giving_up import abandon as abandon
    from dagsel.going_on import replay as replay
    from dagsel.going_on import resume as resume
    from dagsel.history.result import Run as Run
    from dagsel.loading import load as load
    from dagsel.planning.pools import Workers as Workers
    from dagsel.profiling import Profile as Profile
    from dagsel.profiling import profile as profile
    from dagsel.run import optimize as optimize
    from dagsel.run import start as start
    from dagsel.searching import Search as Search
    from dagsel.simulation import simulate as simulate
    from dagsel.simulation.preview import preview as preview
    from dagsel.verbosity import set_verbosity as set_verbosity
    from dagsel.workloads import Base as Base
    from dagsel.workloads import FlaxWorkload as FlaxWorkload
    from dagsel.workloads import HFWorkload as HFWorkload
    from dagsel.workloads import KerasWorkload as KerasWorkload
    from dagsel.workloads import LightningWorkload as LightningWorkload
    from dagsel.workloads import SklearnWorkload as SklearnWorkload
    from dagsel.workloads import TorchWorkload as TorchWorkload
    from dagsel.workloads import Workload as Workload

_HOMES = {
    "Attached": "dagsel.attaching",
    "Base": "dagsel.workloads",
    "FlaxWorkload": "dagsel.workloads",
    "HFWorkload": "dagsel.workloads",
    "KerasWorkload": "dagsel.workloads",
    "LightningWorkload": "dagsel.workloads",
    "Profile": "dagsel.profiling",
    "Run": "dagsel.history.result",
    "Search": "dagsel.searching",
    "SklearnWorkload": "dagsel.workloads",
    "TorchWorkload": "dagsel.workloads",
    "Workers": "dagsel.planning.pools",
    "Workload": "dagsel.workloads",
    "abandon": "dagsel.giving_up",
    "attach": "dagsel.attaching",
    "load": "dagsel.loading",
    "optimize": "dagsel.run",
    "preview": "dagsel.simulation.preview",
    "profile": "dagsel.profiling",
    "replay": "dagsel.going_on",
    "resume": "dagsel.going_on",
    "set_verbosity": "dagsel.verbosity",
    "simulate": "dagsel.simulation",
    "start": "dagsel.run",
}
_MODULES = (
    "codec",
    "collate",
    "errors",
    "flow",
    "flows",
    "metrics",
    "observers",
    "simulation",
    "steering",
    "storage",
    "testing",
    "workloads",
)

__all__ = [
    "Attached",
    "Base",
    "FlaxWorkload",
    "HFWorkload",
    "KerasWorkload",
    "LightningWorkload",
    "Profile",
    "Run",
    "Search",
    "SklearnWorkload",
    "TorchWorkload",
    "Workers",
    "Workload",
    "abandon",
    "attach",
    "collate",
    "load",
    "metrics",
    "optimize",
    "preview",
    "profile",
    "replay",
    "resume",
    "set_verbosity",
    "simulate",
    "start",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = globals()[name] = getattr(_imported(_HOMES[name]), name)
        return found
    if name in _MODULES:
        return _imported(f"dagsel.{name}")
    raise AttributeError(f"module 'dagsel' has no attribute {name!r}")


def _imported(module: str) -> Any:
    """Import a module; what a search needs is kept from the garbage collector in scripts."""
    from dagsel import garbage

    with garbage.kept_off():
        found = importlib.import_module(module)
        if module == _HOMES["optimize"]:
            garbage.set_imports_apart()
    return found


def __dir__() -> list[str]:
    """Return the public names, for what completes them as one types."""
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
