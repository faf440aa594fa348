"""What is done while a disk is full: wait, and say so."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: How long a write may wait for room.
PATIENCE_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_logger = logging.getLogger("dagsel")


def wait_for_room(
    write: Callable[[], T],
    where: str,
    *,
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Write, and again while the disk is full.

    Parameters
    ----------
    write
        Writes all or nothing.
    where
        What it writes to, for the warning.
    patience_s
        So long is waited at most.
    sleep
        Waits for some seconds.

    Raises
    ------
    OSError
        What `write` raises, if it is anything else or there is no room in time.

    Examples
    --------
    >>> wait_for_room(lambda: "written", "a file")
    'written'
    """
    waited_s, pause_s = 0.0, _FIRST_PAUSE_S
    while True:
        try:
            result = write()
        except OSError as error:
            if error.errno not in _FULL or waited_s >= patience_s:
                raise
            if not waited_s:
                _logger.warning(
                    "no room for %s (%s); waiting up to %g s for some: delete something there",
                    where,
                    error,
                    patience_s,
                )
        else:
            if waited_s:
                _logger.warning("there is room again for %s, after %.1f s", where, waited_s)
            return result
        sleep(pause_s)
        waited_s += pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
