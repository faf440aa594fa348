"""The training losses of many batches, as one value."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Losses:
    """The training losses of many batches.

    Parameters
    ----------
    n
        How many batches.
    low, high
        The least and the largest mean loss of a batch; NaN if none was reported.

    Examples
    --------
    >>> Losses(2, 0.5, 0.7) + Losses(1, 0.4, 0.4)
    Losses(n=3, low=0.4, high=0.7)
    """

    n: int = 0
    low: float = math.nan
    high: float = math.nan

    def __add__(self, other: Losses) -> Losses:
        if not (self.n and other.n):
            return self if self.n else other
        if math.isnan(self.low) or math.isnan(other.low):  # a diverged loss stays one
            return Losses(self.n + other.n)
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Losses(self.n + other.n, low, high)
