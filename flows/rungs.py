"""Rungs and brackets in whole numbers: ``round(math.log(243, 3))`` is wrong for some sizes.

The formulas are those of Jamieson and Talwalkar, Non-stochastic Best Arm Identification, AISTATS
2016 (successive halving), and Li et al., Hyperband, JMLR 2018, Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dagsel.errors import SearchError
from dagsel.flow import Context, Stop
from dagsel.flows.drawing import check_counts

Rounding: TypeAlias = Literal["floor", "ceil"]


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung of a bracket: so many trials train up to it, to so many epochs."""

    n_trials: int
    epochs: int


Bracket: TypeAlias = tuple[Rung, ...]


def n_halvings(min_epochs: int, max_epochs: int, reduction_factor: int) -> int:
    """Return the largest s with ``min_epochs · reduction_factor**s <= max_epochs``.

    Examples
    --------
    >>> n_halvings(1, 243, 3), n_halvings(1, 242, 3), n_halvings(1, 1000, 10)
    (5, 4, 3)
    """
    s = 0
    while min_epochs * reduction_factor ** (s + 1) <= max_epochs:
        s += 1
    return s


def rung_epochs(min_epochs: int, max_epochs: int, reduction_factor: int) -> tuple[int, ...]:
    """Return the epochs of each rung: powers below the maximum, then the maximum itself.

    Examples
    --------
    >>> rung_epochs(1, 9, 3), rung_epochs(2, 20, 3)
    ((1, 3, 9), (2, 6, 18, 20))
    """
    epochs = [min_epochs]
    while epochs[-1] * reduction_factor < max_epochs:
        epochs.append(epochs[-1] * reduction_factor)
    return (*epochs, max_epochs) if epochs[-1] < max_epochs else (max_epochs,)


def rung_sizes(
    n_trials: int, n_rungs: int, reduction_factor: int, rounding: Rounding = "floor"
) -> tuple[int, ...]:
    """Return how many trials train up to each rung; never fewer than one.

    Examples
    --------
    >>> rung_sizes(34, 4, 3), rung_sizes(34, 4, 3, "ceil")
    ((34, 11, 3, 1), (34, 12, 4, 2))
    >>> rung_sizes(4, 3, 3)
    (4, 1, 1)
    """
    powers = [reduction_factor**i for i in range(n_rungs)]
    if rounding == "ceil":
        return tuple(_ceil_div(n_trials, power) for power in powers)
    return tuple(max(1, n_trials // power) for power in powers)


def hyperband_brackets(
    min_epochs: int, max_epochs: int, reduction_factor: int, rounding: Rounding = "floor"
) -> tuple[Bracket, ...]:
    """Return Hyperband's brackets, the most aggressive first.

    Bracket s starts ⌈(s_max + 1) / (s + 1) · η^s⌉ trials with ⌊R · η^-s⌋ epochs each and multiplies
    the epochs by η from rung to rung, as dask-ml does: where R is no power of η times the minimum,
    a bracket's last rung may lie below R.

    Examples
    --------
    >>> for bracket in hyperband_brackets(1, 9, 3):
    ...     print([(rung.n_trials, rung.epochs) for rung in bracket])
    [(9, 1), (3, 3), (1, 9)]
    [(5, 3), (1, 9)]
    [(3, 9)]
    """
    s_max = n_halvings(min_epochs, max_epochs, reduction_factor)
    brackets = []
    for s in range(s_max, -1, -1):
        power = reduction_factor**s
        sizes = rung_sizes(_ceil_div((s_max + 1) * power, s + 1), s + 1, reduction_factor, rounding)
        first = max_epochs // power
        brackets.append(tuple(Rung(n, first * reduction_factor**i) for i, n in enumerate(sizes)))
    return tuple(brackets)


def check_rungs(min_epochs: int, max_epochs: int, reduction_factor: int) -> None:
    """Raise a `SearchError` if the numbers make no rungs."""
    check_counts(min_epochs=min_epochs, max_epochs=max_epochs, reduction_factor=reduction_factor)
    if reduction_factor < 2:
        raise SearchError(
            f"reduction_factor must be 2 or more, got {reduction_factor}: with 1 every trial would "
            "train to the end"
        )
    if min_epochs > max_epochs:
        raise SearchError(
            f"min_epochs={min_epochs} is above max_epochs={max_epochs}; lower the first or raise "
            "the second"
        )


def prune_at(rung: int, trial: int, loss: float, best: str, context: Context) -> Stop:
    """Stop a trial that is not among the best of a rung; the lowest rung has the number 0.

    Examples
    --------
    >>> prune_at(0, 7, -0.25, "1 of 3", Context(n_workers=1, direction="maximize")).reason
    'rung 1: 0.25 is not among the best 1 of 3'
    """
    value = f"{context.loss(loss):.6g}" if loss < math.inf else "no finite, feasible value"
    return Stop(trial, f"rung {rung + 1}: {value} is not among the best {best}")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
