"""How fast the workers of a run are beside each other, as far as a short measurement tells."""

from __future__ import annotations

#: Workers whose measured speeds differ by less than this factor count as equally fast.
SAME_SPEED = 1.8


class Speeds:
    """Speeds that were measured, the first of each kind.

    Examples
    --------
    >>> speeds = Speeds()
    >>> [speeds.rounded(speed) for speed in (10.0, 14.0, 40.0, 35.0)]
    [10.0, 10.0, 40.0, 40.0]
    """

    def __init__(self) -> None:
        self._known: list[float] = []

    def rounded(self, speed: float) -> float:
        """Return the speed of the first worker that is about as fast."""
        for known in self._known:
            if 1 / SAME_SPEED < speed / known < SAME_SPEED:
                return known
        self._known.append(speed)
        return speed
