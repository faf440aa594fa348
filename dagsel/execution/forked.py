"""Imported by the fork server alone: its copies draw random numbers of their own.

Python sees to that for its own; NumPy and PyTorch draw a seed when they are imported. The server
does not collect garbage while it imports, which would take a third of the time, and its copies
leave out what it has imported.
"""

from __future__ import annotations

import gc
import os
import sys


def _begin() -> None:
    gc.freeze()
    gc.enable()
    numpy, torch = (sys.modules.get(name) for name in ("numpy.random", "torch"))
    if numpy is not None:
        numpy.seed()
    if torch is not None:
        torch.seed()


gc.disable()
os.register_at_fork(after_in_child=_begin)
