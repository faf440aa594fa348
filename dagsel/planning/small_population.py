"""Whether to train trials in gangs when fewer trials are left than workers.

The authors of Cerebro (Nakandala, Zhang and Kumar, VLDB 2020, section 6.2) found their hybrid of
hopping and data parallelism often slower than hopping alone, though workers idled. A gang of g
workers is worth it only if its efficiency e(g) = λ(g) / g is above the share of workers that would
be busy without gangs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

Policy: TypeAlias = Literal["auto", "hop", "gang", "release"]
Efficiency: TypeAlias = Callable[[int], float]

#: Seconds that a trial loses when it goes on with another number of workers, until it is measured.
SWITCH_S = 1.0
#: Seconds until a released worker is back and has its shards, on a quick cluster. Workers are
#: released after they were idle for as long: then they cost at most twice what the best choice
#: would have cost, however long they are not needed.
RESTART_S = 5.0


def is_worth_it(gang: int, n_trials: int, n_workers: int, efficiency: float) -> bool:
    """Whether gangs train faster than hopping: e(g) > max(s, p / g) / p.

    Examples
    --------
    >>> is_worth_it(4, n_trials=2, n_workers=8, efficiency=0.5)
    True
    >>> is_worth_it(2, n_trials=7, n_workers=8, efficiency=0.85)
    False
    """
    return efficiency > max(n_trials, n_workers / gang) / n_workers


def gang_for(
    policy: Policy,
    n_trials: int,
    n_workers: int,
    *,
    efficiency: Efficiency | None,
    fits: Callable[[int], bool] = lambda gang: True,
) -> int:
    """Return on how many workers to train each of a few trials.

    ``"gang"`` takes the fastest gang, or the largest if nothing was measured; ``"auto"`` takes it
    only if it is known to be faster than hopping. `efficiency` is e(g), None if nothing was
    measured; `fits` tells whether so many workers can train each of the trials.
    """
    if policy not in ("auto", "gang") or (policy == "auto" and efficiency is None):
        return 1
    e = efficiency or full
    sizes = [
        gang
        for gang in range(2, n_workers // n_trials + 1)
        if (policy == "gang" or is_worth_it(gang, n_trials, n_workers, e(gang))) and fits(gang)
    ]
    return max(sizes, key=lambda gang: gang * e(gang), default=1)


def is_worth_a_switch(
    now: int,
    then: int,
    left_s: float | None,
    efficiency: Efficiency | None,
    *,
    switch_s: float = SWITCH_S,
) -> bool:
    """Whether a gang of `then` instead of `now` workers saves more than the switch costs.

    `left_s` are the remaining seconds on one worker of the trial with the most; if they are not
    known, the switch is worth it.
    """
    if left_s is None:
        return True
    e = efficiency or full
    return left_s / (now * e(now)) - left_s / (then * e(then)) > switch_s


def full(gang: int) -> float:
    """Return 1, the e(g) of gangs of which nothing is known."""
    return 1.0
