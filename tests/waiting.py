"""Waiting for what comes, with an end; and how much longer it takes on a machine that is busy."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

#: What a process that imports `distributed` takes where the tests' deadlines were chosen.
QUIET_S = 0.5


def slowness() -> float:
    """Return how many times longer than there a process takes to start here and now, from 1 to 6.

    For deadlines that are kept in real time, and for how late an end may be: the law is the same on
    a machine that is slow or does other things, but workers come later there. A search uses up what
    time it is given: more than six times as much would make the machine slower still.
    """
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import distributed"], check=True)
    return min(max(1.0, (time.monotonic() - began) / QUIET_S), 6.0)


def wait_until(
    holds: Callable[[], object], what: str | Callable[[], str], *, timeout_s: float = 180.0
) -> None:
    """Ask again until something holds.

    `what` says what is waited for, or returns what there is instead.

    Raises
    ------
    AssertionError
        If it does not hold in time.
    """
    ends_at = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > ends_at:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"waited for {timeout_s:.0f} s in vain: {text}")
        time.sleep(0.01)
