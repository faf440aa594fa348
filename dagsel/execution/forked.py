"""Imported by the fork server alone: each of its copies draws random numbers of its own.

Python sees to that for its own; NumPy and PyTorch draw a seed when they are imported.
"""

from __future__ import annotations

import os
import sys


def _draw_a_seed() -> None:
    numpy, torch = (sys.modules.get(name) for name in ("numpy.random", "torch"))
    if numpy is not None:
        numpy.seed()
    if torch is not None:
        torch.seed()


os.register_at_fork(after_in_child=_draw_a_seed)
