"""Pareto fronts: what nothing beats, layer by layer, as brute force and Optuna find them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from optuna.study._multi_objective import _fast_non_domination_rank

from dagsel.planning.pareto import dominates, layers, ranking, spread

few = st.sampled_from([0.0, 1.0, 2.0, 3.0]) | st.floats(-1e6, 1e6)  # with ties
Points: TypeAlias = list[tuple[float, ...]]


def points(values: st.SearchStrategy[float]) -> st.SearchStrategy[Points]:
    return st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[values] * n), max_size=12))


infinite = points(few | st.sampled_from([math.inf, -math.inf]))


@given(infinite)
def test_one_dominates_another_if_it_is_nowhere_worse_and_somewhere_better(found: Points) -> None:
    for one in found:
        for other in found:
            pairs = list(zip(one, other, strict=True))
            expected = all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
            assert dominates(one, other) == expected


@given(infinite)
def test_each_layer_is_what_nothing_dominates_of_what_is_left(found: Points) -> None:
    left = list(range(len(found)))
    for layer in layers(found):
        assert layer == [i for i in left if not any(dominates(found[j], found[i]) for j in left)]
        left = [i for i in left if i not in layer]
    assert left == []


@given(points(few))
def test_layers_are_the_ranks_of_optuna(found: Points) -> None:
    ranks = [0] * len(found)
    for rank, layer in enumerate(layers(found)):
        for i in layer:
            ranks[i] = rank
    assert ranks == list(_fast_non_domination_rank(np.array(found))) or not found


@given(points(few))
def test_each_point_of_a_spread_is_as_far_from_those_before_it_as_one_can_be(
    found: Points,
) -> None:
    ranges = [(min(column), max(column)) for column in zip(*found, strict=True)]
    order = spread(found, ranges)
    assert sorted(order) == list(range(len(found)))
    shares = [
        [(x - a) / (b - a) if b > a else 0.0 for x, (a, b) in zip(one, ranges, strict=True)]
        for one in found
    ]
    for n in range(1, len(order)):
        far = [min(math.dist(shares[i], shares[j]) for j in order[:n]) for i in order[n:]]
        assert far[0] == max(far)
        assert order[n] == min(i for i, d in zip(order[n:], far, strict=True) if d == far[0])
    assert not order or found[order[0]][0] == min(one[0] for one in found)


@given(infinite)
def test_a_ranking_goes_layer_by_layer_and_ends_with_what_is_not_finite(found: Points) -> None:
    order = ranking(found)
    assert sorted(order) == list(range(len(found)))
    finite = [i for i, one in enumerate(found) if all(map(math.isfinite, one))]
    assert set(order[: len(finite)]) == set(finite)
    rest = [i for i in range(len(found)) if i not in finite]
    for members, part in ((finite, order[: len(finite)]), (rest, order[len(finite) :])):
        divided = enumerate(layers([found[i] for i in members]))
        rank = {members[i]: n for n, layer in divided for i in layer}
        assert all(rank[a] <= rank[b] for a, b in pairwise(part))


@given(st.lists(few))
def test_the_ranking_of_one_metric_is_its_order(losses: list[float]) -> None:
    assert ranking([(loss,) for loss in losses]) == sorted(
        range(len(losses)), key=lambda i: (losses[i], i)
    )
