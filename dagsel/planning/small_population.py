"""When fewer trials are left than workers, whether to train them in gangs: pure.

Cerebro (Nakandala, Zhang and Kumar, VLDB 2020) found its hybrid of hopping and data parallelism
slower than hopping alone: a gang of g is worth it only where its efficiency e(g) = λ(g) / g is
above what the workers do without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

Policy: TypeAlias = Literal["auto", "hop", "gang", "release"]
Efficiency: TypeAlias = Callable[[int], float]

#: Seconds that a trial loses when it is stopped and goes on with another number of workers, until
#: that was measured.
SWITCH_S = 1.0
#: Seconds until a worker that was let go is back and has its shards, where that is quick. So long
#: workers idle before they are let go: who does not know how long they will not be needed loses at
#: most twice what the best choice would have cost.
RESTART_S = 5.0


def is_worth_it(gang: int, n_trials: int, n_workers: int, efficiency: float) -> bool:
    """Whether gangs train faster than hopping does: e(g) > max(s, p / g) / p.

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
    """Decide on how many workers to train each of a few trials.

    Parameters
    ----------
    policy
        ``"gang"`` takes the fastest gang whatever it gains, and the largest one if nothing was
        measured; ``"auto"`` takes it where it is known to be faster than hopping.
    n_trials
        Trials that have something left to train; 1 or more.
    n_workers
        Workers that are there.
    efficiency
        e(g) by the number of workers; None if nothing was measured.
    fits
        Whether so many workers can train each of the trials.

    Examples
    --------
    >>> gang_for("auto", 2, 8, efficiency=lambda g: 0.9 ** (g - 1))
    4
    >>> gang_for("auto", 2, 8, efficiency=None), gang_for("gang", 2, 8, efficiency=None)
    (1, 4)
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
    """Whether another gang wins more time than the switch costs.

    Parameters
    ----------
    now, then
        Workers of each trial.
    left_s
        What is left to train on one worker, of the trial with the most; None if nobody knows, and
        then the switch is made.
    efficiency
        e(g); None counts as 1.
    switch_s
        What it costs, in seconds of a trial.

    Examples
    --------
    >>> is_worth_a_switch(1, 4, 10.0, None), is_worth_a_switch(1, 4, 1.0, None)
    (True, False)
    """
    if left_s is None:
        return True
    e = efficiency or full
    return left_s / (now * e(now)) - left_s / (then * e(then)) > switch_s


def full(gang: int) -> float:
    """Give the e(g) of gangs of which nothing is known."""
    return 1.0
