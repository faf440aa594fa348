"""PBT: truncation selection and perturbation as in the paper, and generations of equal age."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import dagsel
from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Clone,
    Context,
    DeadlineReached,
    Decision,
    Finish,
    Reported,
    Stop,
    Train,
    TrialFailed,
    WorkersChanged,
    load_state,
    save_state,
)
from dagsel.flows import PBT, Range
from dagsel.simulation import PowerLaw, SimulatedCluster
from dagsel.testing import FlowSuite
from dagsel.testing.world import Tape, World

CHOICES = [3, 4, 8, 10]


class TestPBT(FlowSuite):
    n_concurrent = 3

    def make_flow(self) -> PBT:
        mutations: dict[str, Any] = {"x": Range(0.0, 1.0), "size": CHOICES}
        return PBT(5, 7, mutations, perturbation_interval=2, n_concurrent=3)

    def configs(self, trial: int) -> dict[str, Any]:
        return {"x": trial % 7 / 7, "size": CHOICES[trial % 4], "width": trial}


class TestPBTWithDefaults(FlowSuite):
    direction = "maximize"
    n_concurrent = 16  # four a worker, and the suite has two to four

    def make_flow(self) -> PBT:
        return PBT(max_epochs=3, n_trials=8, mutations={"x": Range(1e-3, 1.0, log=True)})


def generation(flow: PBT, epoch: int, losses: Iterable[float]) -> list[Decision]:
    answer: list[Decision] = []
    for trial, loss in enumerate(losses):
        answer = flow.handle(Reported(trial, epoch, loss, {}, 1.0))
    return answer


def clones(flow: PBT, config: dict[str, Any], n: int = 5, seed: int = 0) -> list[Clone]:
    flow.start(Context(n_workers=4, seed=seed))
    flow.handle(Asked(tuple(range(n)), configs=n * (config,)))
    answer = generation(flow, 1, range(n))
    return [decision for decision in answer if isinstance(decision, Clone)]


def explored(value: Any, values: Any, resample_probability: float = 0.0) -> set[Any]:
    """Give all that comes of a value under 60 seeds."""
    found = set()
    for seed in range(60):
        flow = PBT(3, 5, {"v": values}, resample_probability=resample_probability)
        found |= {clone.config["v"] for clone in clones(flow, {"v": value}, seed=seed)}
    return found


def test_five_members_have_two_worst_and_two_best() -> None:
    pairs = set()
    for seed in range(20):
        flow = PBT(max_epochs=3, n_trials=5, mutations={"v": [1, 2]})
        made = clones(flow, {"v": 1}, seed=seed)
        assert [clone.target for clone in made] == [3, 4]
        pairs |= {(clone.source, clone.target) for clone in made}
    assert pairs == {(0, 3), (1, 3), (0, 4), (1, 4)}


@pytest.mark.parametrize(
    ("n", "quantile", "n_worst"), [(4, 0.25, 1), (8, 0.25, 2), (5, 0.5, 2), (9, 0.2, 2)]
)
def test_quantiles(n: int, quantile: float, n_worst: int) -> None:
    flow = PBT(max_epochs=3, n_trials=n, mutations={"v": [1, 2]}, quantile=quantile)
    assert [clone.target for clone in clones(flow, {"v": 1}, n)] == list(range(n - n_worst, n))


def test_of_equal_members_the_lower_number_is_the_better() -> None:
    for seed in range(10):
        flow = PBT(max_epochs=3, n_trials=4, mutations={"v": [1, 2]})
        flow.start(Context(n_workers=4, seed=seed))
        flow.handle(Asked((0, 1, 2, 3), configs=4 * ({"v": 1},)))
        made = [d for d in generation(flow, 1, 4 * [0.5]) if isinstance(d, Clone)]
        assert [(clone.source, clone.target) for clone in made] == [(0, 3)]


def test_a_value_is_multiplied_with_one_of_the_factors() -> None:
    found = {
        clone.config["v"]
        for seed in range(40)
        for flow in [PBT(3, 5, {"v": Range(0.0, 100.0)}, 1, 0.25, 0.0, factors=(2.0, 3.0, 0.5))]
        for clone in clones(flow, {"v": 2.0}, seed=seed)
    }
    assert found == {4.0, 6.0, 1.0}


def test_perturbation_values_of_ray() -> None:
    assert explored(2.0, Range(0.0, 100.0)) == {2.0 * 1.2, 2.0 * 0.8}
    assert explored(10, Range(0, 100)) == {8, 12}
    assert {type(value) for value in explored(10, Range(0, 100), 0.5)} == {int}
    assert explored(4, CHOICES) == {3, 8}
    assert explored(3, CHOICES) == {3, 4}
    assert explored(10, CHOICES) == {8, 10}
    assert explored(7, CHOICES) == {3, 4, 8, 10}
    assert explored(4, CHOICES, resample_probability=1.0) == {3, 4, 8, 10}


def test_values_stay_inside_their_range() -> None:
    assert explored(2.0, Range(1.9, 2.1)) == {1.9, 2.1}
    assert explored(10, Range(8.5, 11.5)) == {9, 11}
    drawn = explored(1e-3, Range(1e-5, 1e-1, log=True), resample_probability=1.0)
    assert len(drawn) == 120
    assert all(1e-5 <= value <= 1e-1 for value in drawn)
    assert 40 < sum(value < 1e-3 for value in drawn) < 80  # the middle of the logarithms


def test_what_a_clone_becomes_is_what_its_own_clones_begin_with() -> None:
    flow = PBT(9, 4, {"v": Range(0.0, 100.0)}, resample_probability=0.0)
    flow.start(Context(n_workers=4))
    configs = tuple({"v": float(10**trial), "width": 8} for trial in range(4))
    flow.handle(Asked((0, 1, 2, 3), configs=configs))
    (first, *_) = generation(flow, 1, [0.0, 1.0, 2.0, 3.0])
    assert isinstance(first, Clone)
    assert (first.source, first.target) == (0, 3)
    assert list(first.config) == ["v"]
    assert first.config["v"] in (1.2, 0.8)
    (second, *_) = generation(flow, 2, [3.0, 2.0, 1.0, 0.0])
    assert isinstance(second, Clone)
    assert (second.source, second.target) == (3, 0)
    assert second.config["v"] in {first.config["v"] * factor for factor in (1.2, 0.8)}


def test_clones_come_before_training_and_members_are_of_one_age() -> None:
    mutations = {"x": Range(0.0, 1.0)}
    flow = PBT(5, 6, mutations, perturbation_interval=2, n_concurrent=2)
    world = World(flow, Context(n_workers=2), Tape(bytes(40)), lambda trial: {"x": 0.5})
    world.run()
    ages: dict[int, int] = {}
    for step in world.steps:
        kinds = [type(decision) for decision in step.decisions]
        n_clones = kinds.count(Clone)
        assert kinds[:n_clones] == [Clone] * n_clones
        for decision in step.decisions:
            if isinstance(decision, Clone):
                assert set(ages.values()) in ({2}, {4})
            if isinstance(decision, Train):
                ages[decision.trial] = ages.get(decision.trial, 0) + decision.epochs
                assert ages[decision.trial] in (2, 4, 5)
    assert list(ages.values()) == [5] * 6
    *stops, finish = world.steps[-1].decisions
    assert [stop.outcome for stop in stops if isinstance(stop, Stop)] == ["complete"] * 6
    assert finish == Finish()


def test_no_one_goes_on_from_a_member_that_is_broken() -> None:
    flow = PBT(9, 4, {"v": [1, 2]}, quantile=0.5)
    flow.start(Context(n_workers=4))
    flow.handle(Asked((0, 1, 2, 3), configs=4 * ({"v": 1},)))
    answer = generation(flow, 1, [float("nan"), 0.0, float("inf"), float("-inf")])
    sources = {decision.source for decision in answer if isinstance(decision, Clone)}
    assert sources == {1}
    assert [d.trial for d in answer if isinstance(d, Train)] == [0, 1, 2, 3]
    answer = generation(flow, 2, 4 * [float("nan")])
    assert all(isinstance(decision, Train) for decision in answer)


def test_a_member_that_fails_is_waited_for_no_longer() -> None:
    flow = PBT(2, 4, {"v": [1, 2]}, n_concurrent=2)
    flow.start(Context(n_workers=1))
    assert flow.handle(Asked((0, 1, 2, 3), configs=4 * ({"v": 1},))) == [Train(0, 1), Train(1, 1)]
    assert flow.handle(TrialFailed(0, "it broke")) == [Train(2, 1)]
    assert flow.handle(Reported(1, 1, 0.5, {}, 1.0)) == [Train(3, 1)]
    assert flow.handle(Reported(2, 1, 0.7, {}, 1.0)) == []
    clone, *trains = flow.handle(TrialFailed(3, "it broke"))
    assert isinstance(clone, Clone)
    assert (clone.source, clone.target) == (1, 2)
    assert trains == [Train(1, 1), Train(2, 1)]
    assert flow.handle(TrialFailed(1, "it broke")) == []
    assert flow.handle(TrialFailed(2, "it broke")) == [Finish()]


def test_a_member_that_fails_while_it_is_paused_is_no_source() -> None:
    flow = PBT(9, 4, {"v": [1, 2]})
    flow.start(Context(n_workers=4))
    flow.handle(Asked((0, 1, 2, 3), configs=4 * ({"v": 1},)))
    generation(flow, 1, [0.0, 1.0, 2.0])
    assert flow.handle(TrialFailed(0, "it broke")) == []
    clone, *_ = flow.handle(Reported(3, 1, 3.0, {}, 1.0))
    assert isinstance(clone, Clone)
    assert (clone.source, clone.target) == (1, 3)


def test_four_members_a_worker_train_until_the_deadline() -> None:
    flow = PBT(9, 10, {"v": [1, 2]})
    flow.start(Context(n_workers=1))
    assert len(flow.handle(Asked(tuple(range(10)), configs=10 * ({"v": 1},)))) == 4
    assert flow.handle(WorkersChanged(2)) == [Train(trial, 1) for trial in range(4, 8)]
    assert flow.handle(WorkersChanged(0)) == []
    for trial in range(5):
        answer = flow.handle(TrialFailed(trial, "it broke"))
    assert answer == [Train(8, 1)]
    pruned = [Stop(trial, "the time or the budget is over", "pruned") for trial in range(5, 10)]
    assert flow.handle(DeadlineReached(60.0)) == [*pruned, Finish()]
    assert flow.handle(TrialFailed(5, "it broke")) == flow.handle(WorkersChanged(9)) == []


def test_draws_go_on_where_a_stored_state_was() -> None:
    def play(restore: bool) -> list[Decision]:
        flow = PBT(9, 5, {"v": Range(0.0, 9.0)}, resample_probability=1.0)
        flow.start(Context(n_workers=4, seed=3))
        decisions = flow.handle(Asked(tuple(range(5)), configs=5 * ({"v": 1.0},)))
        for epoch in range(1, 6):
            decisions += generation(flow, epoch, range(5))
            if restore:
                saved = json.loads(json.dumps(save_state(flow)))
                flow = PBT(9, 5, {"v": Range(0.0, 9.0)}, resample_probability=1.0)
                load_state(flow, saved)
        return decisions

    decisions = play(restore=True)
    assert decisions == play(restore=False)
    values = {d.config["v"] for d in decisions if isinstance(d, Clone)}
    assert len(values) == 10


def test_the_population_is_asked_for_at_once_and_needs_what_is_to_mutate() -> None:
    flow = PBT(3, 4, {"lr": Range(0.0, 1.0), "size": CHOICES})
    assert flow.start(Context(n_workers=1)) == [Ask(4)]
    with pytest.raises(SearchError, match="names 'size', which a configuration lacks"):
        flow.handle(Asked((7,), configs=({"lr": 0.1},)))
    with pytest.raises(SearchError, match="names 'lr'"):
        flow.handle(Asked((7,)))
    with pytest.raises(SearchError, match="gives 'lr' a range, but it is 'auto' in a conf"):
        flow.handle(Asked((7,), configs=({"lr": "auto", "size": 3},)))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"n_trials": 3}, "four members"),
        ({"quantile": 0.0}, "quantile"),
        ({"quantile": 0.6}, "quantile"),
        ({"resample_probability": 1.5}, "resample_probability"),
        ({"factors": ()}, "factors"),
        ({"factors": (0.8, float("inf"))}, "factors"),
        ({"mutations": {}}, "mutations is empty"),
        ({"mutations": {"lr": []}}, r"mutations\['lr'\] must be a list"),
        ({"mutations": {"lr": "adam"}}, r"mutations\['lr'\] must be a list"),
        ({"mutations": {"lr": lambda: 0.1}}, r"got the function <lambda>; write \[0.1, 0.01\] or "),
        ({"mutations": {"lr": [print]}}, "has the choice <built-in"),
        ({"perturbation_interval": 0}, "perturbation_interval"),
    ],
)
def test_what_cannot_be_is_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(SearchError, match=text):
        PBT(**{"max_epochs": 3, "n_trials": 8, "mutations": {"lr": [1, 2]}, **bad})


def test_choices_may_be_those_of_an_array() -> None:
    of_numpy: dict[str, Any] = {"lr": np.array([1, 2]), "width": [np.int64(3), np.float32(0.5)]}
    flow = PBT(max_epochs=3, n_trials=8, mutations=of_numpy)
    assert json.dumps(dict(flow.mutations)) == '{"lr": [1, 2], "width": [3, 0.5]}'


@pytest.mark.parametrize("ends", [(1.0, 0.5), (0.0, float("nan")), ("a", "b"), (True, 2)])
def test_a_range_has_ends_in_order(ends: Any) -> None:
    with pytest.raises(SearchError, match="finite ends"):
        Range(*ends)
    with pytest.raises(SearchError, match="logarithm"):
        Range(0.0, 1.0, log=True)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_parameters_are_those_that_the_best_member_trains_with(seed: int) -> None:
    """All of them: a member that goes on from another one has its parameters, but for the rate."""
    run = dagsel.simulate(
        PBT(max_epochs=6, n_trials=6, mutations={"lr": [0.001, 0.01, 0.1]}),
        PowerLaw(asymptote=lambda config: config["lr"] + config["width"], epoch_s=1.0),
        SimulatedCluster(n_workers=2, n_shards=1),
        space=lambda trial: {
            "lr": trial.suggest_float("lr", 1e-3, 1e-1),
            "width": trial.suggest_int("width", 1, 99),
        },
        seed=seed,
    )
    assert any(trial.adoptions for trial in run.record.trials.values())
    assert run.best_params == run.record.trials[run.best.trial].config


def test_a_class_cannot_mutate() -> None:
    flow = PBT(max_epochs=3, n_trials=4, mutations={"act": ["ReLU", "Tanh"]})
    flow.check_config({"act": "ReLU"})
    told = "'act', which is the class int in a configuration, .*: suggest names of the choices"
    with pytest.raises(SearchError, match=told):
        flow.check_config({"act": int})
