"""Hyperband trains what the paper says, and no bracket waits for another one's stragglers."""

from collections.abc import Callable
from typing import Any

import pytest

from dagsel.errors import SearchError
from dagsel.flows import Hyperband, SuccessiveHalving
from dagsel.testing import FlowSuite


class TestFloor(FlowSuite):
    n_concurrent = 4

    def make_flow(self) -> Hyperband:
        return Hyperband(max_epochs=9, n_concurrent=4)


class TestCeil(FlowSuite):
    def make_flow(self) -> Hyperband:
        return Hyperband(max_epochs=7, min_epochs=2, reduction_factor=2, rounding="ceil")


class TestOneBracket(FlowSuite):
    n_concurrent = 1

    def make_flow(self) -> Hyperband:
        return Hyperband(max_epochs=4, min_epochs=3, n_concurrent=1)


@pytest.mark.parametrize(
    ("max_epochs", "n_models", "n_epochs"),
    [(9, 17, 69), (15, 17, 101), (20, 17, 144), (27, 49, 357)],
)
@pytest.mark.parametrize("pick", [min, max])
def test_a_run_costs_what_dask_ml_says(
    play: Callable[..., Any],
    max_epochs: int,
    n_models: int,
    n_epochs: int,
    pick: Callable[[list[int]], int],
) -> None:
    # dask-ml, HyperbandSearchCV(max_iter=..., aggressiveness=3).metadata
    played = play(Hyperband(max_epochs), lambda trial, epoch: -trial / epoch, pick=pick)
    assert len(played.ended) == n_models
    assert sum(played.epochs.values()) == n_epochs


def test_each_bracket_is_a_successive_halving(play: Callable[..., Any]) -> None:
    def value(trial: int, epoch: int) -> float:
        return float((trial * 7919 + epoch * 31) % 101)

    played = play(Hyperband(max_epochs=27), value, pick=max)
    first = 0
    for n_trials, min_epochs in [(27, 1), (12, 3), (6, 9), (4, 27)]:
        alone = play(
            SuccessiveHalving(max_epochs=27, n_trials=n_trials, min_epochs=min_epochs),
            lambda trial, epoch, first=first: value(first + trial, epoch),
        )
        mine = {trial - first: played.epochs[trial] for trial in range(first, first + n_trials)}
        assert mine == alone.epochs
        first += n_trials
    assert len(played.ended) == first


def test_a_straggler_holds_up_its_own_bracket_only(play: Callable[..., Any]) -> None:
    # The highest number trains first, so trial 0 of the first bracket comes when all else is done.
    played = play(Hyperband(max_epochs=9, n_concurrent=4), lambda trial, epoch: trial, pick=max)
    before = {trial for trial, _ in played.order[: played.order.index((0, 1))]}
    assert before == set(range(1, 17))
    assert played.ended[0] == "complete"
    assert played.at("complete") == [9, 9, 9, 9, 9]


def test_the_most_aggressive_bracket_is_served_first(play: Callable[..., Any]) -> None:
    played = play(Hyperband(max_epochs=9, n_concurrent=1), lambda trial, epoch: trial)
    trials = [trial for trial, epoch in played.order if epoch == 9]
    assert trials == [0, 9, 14, 15, 16]
    assert [trial for trial, _ in played.order[:12]] == [*range(9), 0, 0, 1]


@pytest.mark.parametrize(
    ("rounding", "sizes", "n_complete"),
    [("floor", [[9, 3, 1], [5, 1], [3]], 5), ("ceil", [[9, 3, 1], [5, 2], [3]], 6)],
)
def test_rungs_are_rounded_as_asked(
    play: Callable[..., Any], rounding: Any, sizes: list[list[int]], n_complete: int
) -> None:
    flow = Hyperband(max_epochs=9, rounding=rounding)
    assert [[rung.n_trials for rung in bracket] for bracket in flow.brackets] == sizes
    played = play(flow, lambda trial, epoch: trial)
    assert played.at("complete") == [9] * n_complete


def test_a_small_space_fills_the_first_brackets(play: Callable[..., Any]) -> None:
    played = play(Hyperband(max_epochs=9), lambda trial, epoch: trial, n_points=11)
    assert played.at("complete") == [9, 9]
    assert len(played.ended) == 11


def test_bad_input_is_refused() -> None:
    with pytest.raises(SearchError, match="rounding must be one of 'floor', 'ceil'"):
        Hyperband(9, rounding="round")  # type: ignore[arg-type]
    with pytest.raises(SearchError, match="min_epochs=10 is above max_epochs=9"):
        Hyperband(9, min_epochs=10)
    with pytest.warns(UserWarning, match="n_concurrent is 18, but n_trials is 17"):
        Hyperband(9, n_concurrent=18)
