"""Which of several losses are better than others, where there is more than one of each trial.

A vector *dominates* another one if it is nowhere worse and somewhere better. What nothing dominates
is the *Pareto front*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

#: The losses of a trial, one a metric, each better when smaller.
Losses: TypeAlias = Sequence[float]


def dominates(one: Losses, other: Losses) -> bool:
    """Whether losses are nowhere worse than others, and somewhere better.

    Examples
    --------
    >>> dominates((0.1, 2.0), (0.1, 3.0)), dominates((0.1, 3.0), (0.2, 2.0))
    (True, False)
    """
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def layers(losses: Sequence[Losses]) -> list[list[int]]:
    """Divide into the front, the front of the others, and so on (non-dominated sorting).

    Examples
    --------
    >>> layers([(0.1, 3.0), (0.2, 4.0), (0.2, 2.0), (0.3, 5.0)])
    [[0, 2], [1], [3]]
    """
    # What dominates another one comes before it in this order, so each is compared once with those
    # of a layer: it belongs to the first one in which nothing dominates it.
    found: list[list[int]] = []
    for i in sorted(range(len(losses)), key=lambda i: (tuple(losses[i]), i)):
        for layer in found:
            if not any(dominates(losses[j], losses[i]) for j in layer):
                layer.append(i)
                break
        else:
            found.append([i])
    return [sorted(layer) for layer in found]


def spread(losses: Sequence[Losses], ranges: Sequence[tuple[float, float]]) -> list[int]:
    """Order points so that the first ones lie far apart (an epsilon net).

    The first is the one with the least first loss, each next one that whose distance to those
    before it is largest. Of equal ones the first counts.

    Parameters
    ----------
    losses
        The points; all finite.
    ranges
        The least and the largest loss of each metric, between which a distance is 1.

    Examples
    --------
    >>> spread([(0.0, 4.0), (0.1, 3.9), (2.0, 2.0), (4.0, 0.0)], [(0.0, 4.0), (0.0, 4.0)])
    [0, 3, 2, 1]
    """
    if not losses:
        return []
    points = [tuple(_share(x, *r) for x, r in zip(one, ranges, strict=True)) for one in losses]
    last = min(range(len(points)), key=lambda i: (losses[i][0], i))
    order, left = [last], [i for i in range(len(points)) if i != last]
    nearest = [math.inf] * len(points)
    while left:
        for i in left:
            nearest[i] = min(nearest[i], math.dist(points[i], points[last]))
        last = max(left, key=lambda i: (nearest[i], -i))
        left.remove(last)
        order.append(last)
    return order


def _share(loss: float, low: float, high: float) -> float:
    return (loss - low) / (high - low) if high > low else 0.0


def ranking(losses: Sequence[Losses]) -> list[int]:
    """Order from the best to the worst: layer by layer, each `spread`; the first of equal ones.

    What has a loss that is not finite comes after all that has none, layer by layer.

    Examples
    --------
    >>> ranking([(0.4, 5.0), (0.2, 2.0), (0.1, 3.0), (math.inf, 0.0)])
    [2, 1, 0, 3]
    """
    finite = [i for i, one in enumerate(losses) if all(map(math.isfinite, one))]
    columns = zip(*(losses[i] for i in finite), strict=True)
    ranges = [(min(column), max(column)) for column in columns]
    order = list[int]()
    for layer in layers([losses[i] for i in finite]):
        members = [finite[i] for i in layer]
        order += [members[i] for i in spread([losses[i] for i in members], ranges)]
    rest = sorted(set(range(len(losses))) - set(finite))
    for layer in layers([losses[i] for i in rest]):
        order += [rest[i] for i in layer]
    return order
