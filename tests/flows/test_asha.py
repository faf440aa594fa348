"""ASHA promotes and stops what the papers and the public implementations promote and stop."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    Decision,
    Direction,
    Finish,
    Reported,
    Stop,
    Train,
    WorkersChanged,
)
from dagsel.flows import ASHA
from dagsel.flows.asha import Semantics
from dagsel.testing import FlowSuite


class TestPromotion(FlowSuite):
    n_concurrent = 3

    def make_flow(self) -> ASHA:
        return ASHA(max_epochs=9, n_trials=12, n_concurrent=3)


class TestPromotionOfFew(FlowSuite):
    direction: Direction = "maximize"

    def make_flow(self) -> ASHA:
        return ASHA(max_epochs=7, n_trials=3, min_epochs=2, reduction_factor=2)


class TestPromotionOnOneRung(FlowSuite):
    n_concurrent = 1

    def make_flow(self) -> ASHA:
        return ASHA(max_epochs=2, n_trials=4, min_epochs=2, n_concurrent=1)


class TestStoppingAsDetermined(FlowSuite):
    n_concurrent = 3

    def make_flow(self) -> ASHA:
        return ASHA(max_epochs=9, n_trials=12, mode="stopping", n_concurrent=3)


class TestStoppingAsRay(FlowSuite):
    def make_flow(self) -> ASHA:
        return ASHA(10, 11, reduction_factor=2, mode="stopping", semantics="ray")


class TestStoppingAsSyne(FlowSuite):
    direction: Direction = "maximize"

    def make_flow(self) -> ASHA:
        return ASHA(8, 9, min_epochs=2, mode="stopping", semantics="syne")


def begun(flow: ASHA) -> ASHA:
    """Start a flow whose trials all train at once, so that a place is always free."""
    flow.start(Context(n_workers=1))
    flow.handle(Asked(tuple(range(flow.n_trials))))
    return flow


def arrivals(flow: ASHA, losses: Sequence[float]) -> list[list[Decision]]:
    """Let one trial after another reach the lowest rung; a last one never does."""
    return [
        flow.handle(Reported(trial, 1, loss, {"loss": loss}, 1.0))
        for trial, loss in enumerate(losses)
    ]


def promoted(decisions: list[Decision]) -> list[int]:
    return [decision.trial for decision in decisions if isinstance(decision, Train)]


def test_promotions_of_the_paper() -> None:
    # Li et al., MLSys 2020, Algorithm 2 with η = 3, worked by hand.
    flow = begun(ASHA(max_epochs=3, n_trials=10, n_concurrent=10))
    losses = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9]
    answers = [promoted(answer) for answer in arrivals(flow, losses)]
    assert answers == [[], [], [1], [3], [], [5], [], [7], []]


def test_a_promotion_is_an_unpromoted_member_of_the_top() -> None:
    drawn = random.Random(0)
    for _ in range(20_000):
        losses = [drawn.randrange(6) / 6 for _ in range(drawn.randrange(1, 10))]
        eta = drawn.choice([2, 3, 4])
        flow = begun(ASHA(eta, n_trials=10, reduction_factor=eta, n_concurrent=10))
        gone: list[int] = []
        for n, answer in enumerate(arrivals(flow, losses), start=1):
            ranked = sorted(range(n), key=lambda trial: (losses[trial], trial))
            expected = [trial for trial in ranked[: n // eta] if trial not in gone]
            assert promoted(answer) == expected
            gone += expected


@settings(deadline=None)
@given(eta=st.integers(2, 4), seed=st.integers(0, 2**32 - 1))
def test_a_free_place_goes_to_the_highest_rung_with_a_promotable_trial(eta: int, seed: int) -> None:
    n_trials, drawn = 24, random.Random(seed)
    flow = ASHA(2 * eta**2, n_trials, reduction_factor=eta)
    rungs = flow.rungs
    heading: dict[int, int] = {}  # training trial: its next rung
    results: list[dict[int, float]] = [{} for _ in rungs]
    gone: list[set[int]] = [set() for _ in rungs]
    n_workers, n_asked, n_drawn, n_complete = 3, 0, 0, 0
    answer = flow.start(Context(n_workers))
    while Finish() not in answer:
        for decision in answer:
            match decision:
                case Ask(n):
                    assert promotable(results, gone, eta) is None
                    n_asked += n
                case Train(trial, epochs) if trial in results[0]:
                    found = promotable(results, gone, eta)
                    if found is None:  # the end: the best of the highest rung, if none completed
                        assert (heading, n_drawn, n_complete) == ({}, n_trials, 0)
                        rung = max(r for r in range(len(rungs)) if results[r].keys() - gone[r])
                        left = results[rung].keys() - gone[rung]
                        found = rung, min(left, key=lambda t: (results[rung][t], t))
                    assert trial == found[1]
                    gone[found[0]].add(trial)
                    heading[trial] = found[0] + 1
                    assert epochs == rungs[found[0] + 1] - rungs[found[0]]
                case Train(trial, epochs):
                    assert promotable(results, gone, eta) is None
                    assert epochs == rungs[0]
                    heading[trial] = 0
            n_places = len(heading) + n_asked - n_drawn
            assert isinstance(decision, Stop) or n_places <= 4 * n_workers
        assert len(heading) + n_asked - n_drawn >= 4 * n_workers or not promotable(
            results, gone, eta
        )
        if drawn.random() < 0.2:
            n_workers = drawn.randint(1, 3)
            answer = flow.handle(WorkersChanged(n_workers))
        elif n_asked > n_drawn:
            trials = tuple(range(n_drawn, n_asked))
            n_drawn = n_asked
            answer = flow.handle(Asked(trials))
        else:
            trial = drawn.choice(sorted(heading))
            rung, loss = heading.pop(trial), drawn.randint(0, 5) / 5
            results[rung][trial] = loss
            n_complete += rungs[rung] == flow.max_epochs
            answer = flow.handle(Reported(trial, rungs[rung], loss, {"loss": loss}, 1.0))
    assert n_complete


def promotable(
    results: list[dict[int, float]], gone: list[set[int]], eta: int
) -> tuple[int, int] | None:
    for rung in reversed(range(len(results) - 1)):
        there = results[rung]
        ranked = sorted(there, key=lambda trial: (there[trial], trial))
        for trial in ranked[: len(ranked) // eta]:
            if trial not in gone[rung]:
                return rung, trial
    return None


@pytest.mark.parametrize(
    ("semantics", "expected"),
    [
        ("determined", "CSSS"),  # Determined, master/pkg/searcher/asha_stopping.go
        ("ray", "CSSC"),  # Ray Tune, async_hyperband.py: percentile of those before
        ("syne", "CSCC"),  # Syne Tune 0.14, asha.py: rank among all, over n
    ],
)
def test_public_readings_of_the_stopping_rule(semantics: Semantics, expected: str) -> None:
    assert verdicts(semantics, 3, [0.1, 0.4, 0.3, 0.2]) == expected


def verdicts(semantics: Semantics, eta: int, losses: list[float]) -> str:
    flow = ASHA(
        max_epochs=eta,
        n_trials=len(losses) + 1,
        reduction_factor=eta,
        mode="stopping",
        semantics=semantics,
        n_concurrent=len(losses) + 1,
    )
    answers = arrivals(begun(flow), losses)
    return "".join("C" if isinstance(answer[0], Train) else "S" for answer in answers)


@given(losses=st.lists(st.integers(0, 6).map(float), max_size=12), eta=st.integers(2, 5))
def test_stopping_as_determined_keeps_the_top_of_what_came(losses: list[float], eta: int) -> None:
    expected = ""
    for n in range(1, len(losses) + 1):
        ranked = sorted(range(n), key=lambda trial: (losses[trial], trial))
        expected += "C" if n - 1 in ranked[: max(1, n // eta)] else "S"
    assert verdicts("determined", eta, losses) == expected


@given(losses=st.lists(st.integers(0, 6).map(float), max_size=12), eta=st.integers(2, 5))
def test_stopping_as_syne_tune_ranks_by_searchsorted(losses: list[float], eta: int) -> None:
    expected = ""
    for n in range(1, len(losses) + 1):
        rank = np.searchsorted(np.sort(losses[:n]), losses[n - 1]) / n
        expected += "S" if rank > 1 / eta else "C"
    assert verdicts("syne", eta, losses) == expected


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 12), eta=st.integers(2, 5))
def test_stopping_as_ray_cuts_at_the_percentile_of_the_ones_before(
    seed: int, n: int, eta: int
) -> None:
    # No ties here: np.percentile's rounding decides those, where dagsel's whole numbers are exact.
    rewards = -np.random.default_rng(seed).random(n)
    expected = ""
    for i, reward in enumerate(rewards):
        cutoff = np.percentile(rewards[:i], (1 - 1 / eta) * 100) if i else -math.inf
        expected += "S" if reward < cutoff else "C"
    assert verdicts("ray", eta, [-float(reward) for reward in rewards]) == expected


def test_values_that_are_not_finite_leave_ray_s_percentile_alone() -> None:
    assert verdicts("ray", 2, [0.1, math.nan, math.inf, 0.2, 0.1]) == "CSSSC"


@pytest.mark.parametrize("pick", [min, max])
def test_ten_trials_that_get_worse_and_worse(
    play: Callable[..., Any], pick: Callable[[list[int]], int]
) -> None:
    # Determined, master/pkg/searcher/asha_stopping_test.go, TestASHAStopping
    flow = ASHA(900, n_trials=10, min_epochs=100, mode="stopping", n_concurrent=1)
    assert flow.rungs == (100, 300, 900)
    played = play(flow, lambda trial, epoch: float(trial), pick=pick)
    assert played.at("complete") == [900]
    assert played.at("pruned") == [100] * 9
    assert played.reasons[9] == "rung 1: 9 is not among the best 1/3 of 10"


def test_a_paused_trial_is_pruned_only_at_the_end(play: Callable[..., Any]) -> None:
    played = play(ASHA(9, n_trials=27, n_concurrent=3), lambda trial, epoch: float(trial))
    assert played.at("complete") == [9, 9, 9]
    assert played.at("pruned") == [3] * 6 + [1] * 18
    assert played.reasons[26] == "rung 1: 26 is not among the best 9 of 27"
    assert max(played.order.index((trial, 1)) for trial in range(27)) < len(played.order) - 1


@pytest.mark.parametrize("n_trials", [1, 2])
def test_too_few_trials_still_complete_one(play: Callable[..., Any], n_trials: int) -> None:
    played = play(ASHA(9, n_trials), lambda trial, epoch: -float(trial))
    assert played.at("complete") == [9]
    assert played.ended[n_trials - 1] == "complete"


def test_the_next_best_completes_if_the_best_fails(play: Callable[..., Any]) -> None:
    def value(trial: int, epoch: int) -> float | None:
        return None if trial == 0 and epoch == 4 else float(trial)

    played = play(ASHA(9, n_trials=9, n_concurrent=1), value)
    assert (played.ended[0], played.epochs[0]) == ("failed", 3)
    assert (played.ended[1], played.epochs[1]) == ("complete", 9)


def test_failed_trials_vanish(play: Callable[..., Any]) -> None:
    def value(trial: int, epoch: int) -> float | None:
        return None if trial % 2 else float(trial)

    played = play(ASHA(3, n_trials=12, n_concurrent=2), value)
    assert played.at("complete") == [3, 3]  # two of the six that reached the rung, not of twelve
    assert played.at("failed") == [0] * 6


def test_an_exhausted_space_ends_the_search(play: Callable[..., Any]) -> None:
    played = play(ASHA(9, n_trials=50), lambda trial, epoch: float(trial), n_points=7)
    assert len(played.ended) == 7
    assert played.at("complete") == [9]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"mode": "pause"}, "mode must be one of 'promotion', 'stopping', got 'pause'"),
        ({"mode": "stopping", "semantics": "x"}, "semantics must be one of 'determined', 'ray'"),
        ({"semantics": "ray"}, "semantics='ray' is a stopping rule"),
        ({"n_trials": 0}, "n_trials must be a whole number of 1 or more"),
        ({"reduction_factor": 1}, "reduction_factor must be 2 or more"),
        ({"min_epochs": 10}, "min_epochs=10 is above max_epochs=9"),
    ],
)
def test_bad_input_is_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(SearchError, match=text):
        ASHA(**{"max_epochs": 9, "n_trials": 9} | bad)


def test_stops_come_before_the_next_draw() -> None:
    flow = ASHA(3, n_trials=3, mode="stopping", n_concurrent=1)
    flow.start(Context(n_workers=1))
    flow.handle(Asked((0,)))
    assert flow.handle(Reported(0, 1, 0.1, {}, 1.0)) == [Train(0, 2)]
    assert flow.handle(Reported(0, 2, 0.1, {}, 1.0)) == []
    stop, ask = flow.handle(Reported(0, 3, 0.1, {}, 1.0))
    assert stop == Stop(0, "trained to the last rung, 3 epochs", "complete")
    assert ask == Ask(1, "study")
