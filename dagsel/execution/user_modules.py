"""Whether a worker has imported the same modules of the user's as the driver.

A function of a module is sent by name. A worker keeps what it has imported, also when the file is
changed, and would train what the file held before.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import threading
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

#: By module, what it was imported by and the digest of its source, as first seen by a search. One
#: that is imported anew has another specification.
_SEEN: dict[str, tuple[ModuleSpec, str]] = {}
_LOOKING = threading.Lock()
#: Where Python's own stand, and what is installed: also where `PYTHONPATH` names the folder, as on
#: clusters where one loads a module of the system.
_PYTHONS = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))
_OURS = ("dagsel", "__main__", "__mp_main__")


def users_modules() -> dict[str, ModuleType]:
    """Return the modules that are neither Python's, nor installed, nor dagsel's, by name."""
    return {
        name: module
        for name, module in [*sys.modules.items()]
        if name.partition(".")[0] not in _OURS
        # Some libraries put other objects there.
        and isinstance(file := getattr(module, "__dict__", {}).get("__file__"), str)
        and not file.startswith(_PYTHONS)
        and not any(folder in file for folder in _INSTALLED)
    }


def digests_here() -> dict[str, str]:
    """Return the digest of the source of each module of the user's, as it was imported here."""
    modules = users_modules().items()
    return {name: digest for name, module in modules if (digest := _digest(name, module))}


def why_stale(theirs: Mapping[str, str]) -> str:
    """Say which modules this process has imported from another source; empty if none is.

    `theirs` are the digests of the driver.
    """
    here = digests_here()
    stale = sorted(name for name in here.keys() & theirs.keys() if here[name] != theirs[name])
    if not stale:
        return ""
    return (
        f"{', '.join(stale)} on the workers is not what it is here: a file was changed after it "
        "had been imported; the search trains what the workers have: let them import it again by "
        "client.restart(), and this process by importlib.reload or as it starts again"
    )


def _digest(name: str, module: ModuleType) -> str:
    spec = getattr(module, "__spec__", None)
    if not isinstance(spec, ModuleSpec) or not (spec.origin or "").endswith(".py"):
        return ""
    with _LOOKING:
        seen = _SEEN.get(name)
        if seen is None or seen[0] is not spec:
            try:
                source = Path(spec.origin or "").read_bytes()
            except OSError:
                return ""
            seen = _SEEN[name] = spec, hashlib.sha256(source).hexdigest()
        return seen[1]
