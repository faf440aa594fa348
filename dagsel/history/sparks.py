"""A curve as small as a word, for tables in HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence

_WIDTH, _HEIGHT = 90, 20


def spark(values: Sequence[float]) -> str:
    """Return an SVG of a curve; empty if there are fewer than two values.

    Examples
    --------
    >>> spark([0.5])
    ''
    >>> "".join(spark([0.0, 1.0, 0.5]).partition("points=")[1:])[:40]
    'points="1.0,19.0 45.0,1.0 89.0,10.0"/></'
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    least, most = min(finite), max(finite)
    height, step = _HEIGHT - 2, (_WIDTH - 2) / (len(values) - 1)
    points = " ".join(
        f"{1 + k * step:.1f},{1 + height * (1 - (value - least) / (most - least or 1)):.1f}"
        for k, value in enumerate(values)
        if math.isfinite(value)
    )
    return (
        f'<svg class="spark" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><polyline fill="none" stroke="currentColor" '
        f'stroke-width="1.5" points="{points}"/></svg>'
    )
