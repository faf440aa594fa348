"""What people write for a span of time: ``"10 min"``, ``"2 h"``."""

from __future__ import annotations

import math
import re

from dagsel.errors import SearchError

_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_TEXT = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def to_seconds(name: str, span: float | str) -> float:
    """Read a span of time.

    Parameters
    ----------
    name
        What it is called where it was given.
    span
        Seconds, or a number with a unit: s, min, h or d.

    Raises
    ------
    SearchError
        If it is none, or not positive and finite.

    Examples
    --------
    >>> to_seconds("deadline", "10 min"), to_seconds("deadline", "1.5h"), to_seconds("deadline", 5)
    (600.0, 5400.0, 5.0)
    >>> to_seconds("deadline", "soon")
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: deadline='soon' is no time; write seconds, or such as "10 min", "2 h"
    """
    seconds = _read(span)
    if seconds is None:
        raise SearchError(f'{name}={span!r} is no time; write seconds, or such as "10 min", "2 h"')
    if not 0.0 < seconds < math.inf:
        raise SearchError(f"{name} must be above 0 and finite, got {span!r}")
    return seconds


def _read(span: float | str) -> float | None:
    if isinstance(span, str):
        match = _TEXT.fullmatch(span)
        if match is None or match[2].lower() not in _SECONDS:
            return None
        try:
            return float(match[1]) * _SECONDS[match[2].lower()]
        except ValueError:
            return None
    try:
        return float(span)
    except (TypeError, ValueError):
        return None
