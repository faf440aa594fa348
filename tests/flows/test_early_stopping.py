"""Around any search: a trial ends after its patience, with its best value, and no trial before."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import Asked, Context, Direction, Finish, Flow, Reported, Stop
from dagsel.flows import ASHA, PBT, EarlyStopping, Hermes, RandomSearch, SuccessiveHalving
from dagsel.simulation import SimulatedCluster, simulate
from dagsel.testing import FlowSuite


class TestRandomSearch(FlowSuite):
    def make_flow(self) -> Flow:
        return EarlyStopping(RandomSearch(max_epochs=6, n_trials=8), patience=2)


class TestAsha(FlowSuite):
    n_concurrent = 3

    def make_flow(self) -> Flow:
        return EarlyStopping(
            ASHA(max_epochs=9, n_trials=12, reduction_factor=2, n_concurrent=3), patience=1
        )


class TestHalving(FlowSuite):
    direction: Direction = "maximize"

    def make_flow(self) -> Flow:
        return EarlyStopping(SuccessiveHalving(max_epochs=9, n_trials=9), patience=2)


class TestPbt(FlowSuite):
    def make_flow(self) -> Flow:
        inner = PBT(6, 4, {"x": [0.0, 0.5, 1.0]}, perturbation_interval=2)
        return EarlyStopping(inner, patience=2, min_delta=0.01)


class TestHermes(FlowSuite):
    def make_flow(self) -> Flow:
        return EarlyStopping(Hermes(max_epochs=3, n_trials=5), patience=1)


def end_of(
    values: list[float], direction: Direction, patience: int, min_delta: float
) -> int | None:
    """The epoch after which a trial ends early; None if it does not."""
    losses = [v if direction == "minimize" else -v for v in values]
    losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
    least, improved_at = losses[0], 1
    for epoch, loss in enumerate(losses, start=1):
        if loss < least - min_delta:
            least, improved_at = loss, epoch
        if epoch - improved_at >= patience:
            return epoch
    return None


@given(
    st.lists(st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, math.inf]), min_size=1, max_size=8),
    st.sampled_from(["minimize", "maximize"]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.06, 0.2]),
)
def test_a_trial_ends_when_its_patience_is_over_and_no_sooner(
    values: list[float], direction: Direction, patience: int, min_delta: float
) -> None:
    flow = EarlyStopping(RandomSearch(max_epochs=9, n_trials=1), patience, min_delta)
    flow.start(Context(1, direction))
    flow.handle(Asked((0,)))
    ended = None
    for epoch, value in enumerate(values, start=1):
        decisions = flow.handle(Reported(0, epoch, value, {}, 1.0))
        if decisions:
            text = "1 epoch" if patience == 1 else f"{patience} epochs"
            assert decisions == [Stop(0, f"no better for {text}", "complete"), Finish()]
            ended = epoch
            break
    assert ended == end_of(values, direction, patience, min_delta)


def test_a_trial_that_stops_early_has_its_best_value_and_wins() -> None:
    class Peak:
        """Rises to a height at epoch 3, and falls."""

        evaluation_share = 0.1

        def seconds(self, config: object, *, trial: int) -> float:
            return 10.0

        def value(self, config: object, epoch: float, *, trial: int) -> float:
            return 0.9 - 0.1 * trial - 0.05 * abs(epoch - 3)

    run = simulate(
        EarlyStopping(RandomSearch(max_epochs=50, n_trials=3), patience=4),
        Peak(),
        SimulatedCluster(n_workers=2),
        space=lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)},
        direction="maximize",
    )
    assert (run.best.trial, run.best.epoch, run.best_value) == (0, 3, 0.9)
    assert {len(trial.epochs) for trial in run.record.trials.values()} == {7}
    assert run.study.best_value == 0.9
    assert list(run.leaderboard()["state"]) == ["complete"] * 3
    assert {trial.reason for trial in run.record.trials.values()} == {"no better for 4 epochs"}


class Knees:
    """Curves that fall until an epoch of their own, and then no more."""

    evaluation_share = 0.1

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def seconds(self, config: object, *, trial: int) -> float:
        return 1.0 + Random(f"{self.seed} speed {trial}").random()

    def value(self, config: object, epoch: float, *, trial: int) -> float:
        chance = Random(f"{self.seed} {trial}")
        least, knee = chance.random(), chance.randint(2, 20)
        return least + 1.0 / min(epoch, knee)


@pytest.mark.parametrize("make", [ASHA, SuccessiveHalving])
@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_halves_trains_less_with_it(make: Callable[..., Flow], seed: int) -> None:
    """Where all that ASHA would train to the end stops before, it promotes no other for it."""

    def trained(flow: Flow) -> int:
        cluster = SimulatedCluster(n_workers=2)
        run = simulate(
            flow, Knees(seed), cluster, space=lambda t: {"x": t.suggest_float("x", 0, 1)}
        )
        return sum(len(trial.epochs) for trial in run.record.trials.values())

    alone = trained(make(max_epochs=27, n_trials=27))
    assert trained(EarlyStopping(make(max_epochs=27, n_trials=27), patience=2)) < alone


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patience": 0}, "patience"),
        ({"patience": 2.5}, "patience"),
        ({"min_delta": -0.1}, "min_delta must be a finite number from 0 up"),
        ({"min_delta": math.inf}, "min_delta"),
        ({"min_delta": "little"}, "min_delta"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        EarlyStopping(RandomSearch(max_epochs=9, n_trials=1), **wrong)  # type: ignore[arg-type]


def test_it_goes_around_a_search() -> None:
    with pytest.raises(SearchError, match="EarlyStopping goes around a search"):
        EarlyStopping("asha")  # type: ignore[arg-type]
