"""Waiting for what comes, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    holds: Callable[[], object], what: str | Callable[[], str], *, timeout_s: float = 60.0
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
