"""Curves depend on what they are told alone, and cross; recorded ones are what was recorded."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError, TrainingError
from dagsel.flow import Flow
from dagsel.flows import SEER, Grid, RandomSearch, RoundRobin
from dagsel.flows.baselines import LSF
from dagsel.simulation import Curves, PowerLaw, Recorded, SimulatedCluster, decision_log, simulate
from tests.simulation.test_simulate import CLUSTER, CURVES, search, small_space, space

CONFIGS = [{"lr": k / 20, "layers": k % 3} for k in range(20)]


def test_a_curve_does_not_depend_on_what_was_asked_before() -> None:
    curves = PowerLaw(noise=0.1)
    points = [(c, e, t) for c in CONFIGS for e in (1, 2, 9) for t in (0, 1)]
    values = [curves.value(c, e, trial=t) for c, e, t in points]
    for place in random.Random(0).sample(range(len(points)), 60):
        config, epoch, trial = points[place]
        turned = dict(reversed(config.items()))
        assert PowerLaw(noise=0.1).value(turned, epoch, trial=trial) == values[place]
    assert len(set(values)) == len(values)
    assert PowerLaw(noise=0.1, seed=1).value(CONFIGS[0], 1, trial=0) != values[0]


@given(a=st.floats(-1, 1), b=st.floats(-2, 2), c=st.floats(0.1, 3), epoch=st.integers(1, 10_000))
def test_without_noise_it_is_the_power_law(a: float, b: float, c: float, epoch: int) -> None:
    curves = PowerLaw(asymptote=a, amplitude=lambda config: b, rate=(c, c), noise=0.0)
    assert curves.value({}, epoch, trial=0) == pytest.approx(a + b / epoch**c)


@given(
    ends=st.lists(st.tuples(st.floats(0.2, 0.9), st.floats(0.01, 0.1)), min_size=2, max_size=8),
    parts=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6),
    noise=st.sampled_from([0.0, 0.05]),
)
def test_inside_the_first_epoch_trials_rise_from_chance_and_rank_as_at_its_end(
    ends: list[tuple[float, float]], parts: list[float], noise: float
) -> None:
    """An accuracy ends its first epoch at `asymptote` less `amplitude`."""
    curves = PowerLaw(
        asymptote=lambda config: config["a"],
        amplitude=lambda config: -config["b"],
        noise=0.0,
        chance=0.1,
    )
    configs = [{"a": a, "b": b} for a, b in ends]
    for config in configs:
        rising = [curves.value(config, at, trial=0) for at in (0, *sorted(parts), 1)]
        assert rising[0] == 0.1
        assert all(one <= later + 1e-12 for one, later in pairwise(rising))
        assert rising[-1] == config["a"] - config["b"]
        fast = [curves.value(config, 1 + at, trial=0) for at in sorted(parts)]
        assert all(rising[-1] <= one <= later for one, later in pairwise([fast[0], *fast]))
    at_end = [curves.value(config, 1, trial=0) for config in configs]
    for part in parts:
        inside = [curves.value(config, part, trial=0) for config in configs]
        for (x, end), (y, other) in combinations(zip(inside, at_end, strict=True), 2):
            assert (x - y) * (end - other) >= 0.0
        noisy = replace(curves, noise=noise).value(configs[0], part, trial=0)
        assert noisy == pytest.approx(inside[0], abs=8 * noise * part + 1e-12)


def test_a_first_epoch_that_is_not_told_its_chance_begins_where_none_ends_worse() -> None:
    errors, accuracies = PowerLaw(noise=0.0), PowerLaw((0.6, 0.9), (-0.3, -0.1), noise=0.0)
    for config in CONFIGS:
        assert errors.value(config, 0, trial=0) == pytest.approx(1.4)
        assert errors.value(config, 0.25, trial=0) > errors.value(config, 1, trial=0)
        assert accuracies.value(config, 0, trial=0) == pytest.approx(0.3)
    by_rule = PowerLaw(lambda config: 0.5, 0.25, noise=0.0)
    assert [by_rule.value({}, at, trial=0) for at in (0, 0.5, 1)] == [1.0, 0.875, 0.75]
    # The first batches lose what the first epoch does, and no more.
    told = by_rule.losses({}, 0.0, 0.5, trial=0)
    assert (told.n, told.low) == (50, 0.875)
    assert told.high == pytest.approx(0.9975)


def test_draws_fill_their_range_and_noise_has_its_deviation() -> None:
    curves = PowerLaw(asymptote=(2.0, 4.0), amplitude=0.0, noise=0.5)
    configs = [{"x": k} for k in range(2000)]
    levels = [
        PowerLaw(asymptote=(2.0, 4.0), amplitude=0.0, noise=0).value(c, 1, trial=0) for c in configs
    ]
    assert 2.0 <= min(levels) < 2.01
    assert 3.99 < max(levels) <= 4.0
    assert fmean(levels) == pytest.approx(3.0, abs=0.05)
    noise = [curves.value(c, 1, trial=0) - level for c, level in zip(configs, levels, strict=True)]
    assert fmean(noise) == pytest.approx(0.0, abs=0.05)
    assert pstdev(noise) == pytest.approx(0.5, rel=0.05)


def test_curves_cross() -> None:
    curves = PowerLaw(noise=0.0)
    early = {k: curves.value(c, 2, trial=0) for k, c in enumerate(CONFIGS)}
    late = {k: curves.value(c, 80, trial=0) for k, c in enumerate(CONFIGS)}
    pairs = list(combinations(early, 2))
    crossing = sum((early[a] < early[b]) != (late[a] < late[b]) for a, b in pairs)
    assert 0.1 < crossing / len(pairs) < 0.6


def test_what_has_no_form_in_json_does_not_count() -> None:
    assert CURVES.value({"width": 0.5, "f": max}, 1, trial=0) == CURVES.value(
        {"width": 0.5, "f": min}, 1, trial=0
    )


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(SearchError, match="epoch_s must be above 0, got 0"):
        PowerLaw(epoch_s=0).seconds({}, trial=0)


def test_a_recorded_run_is_walked_through_in_its_order() -> None:
    told = search("random")
    curves = Recorded.from_run(told)
    assert isinstance(curves, Curves)
    again = simulate(RandomSearch(max_epochs=4, n_trials=12), curves, CLUSTER)
    for number, trial in told.record.trials.items():
        assert again.record.trials[number].config == trial.config
        assert again.record.trials[number].params == trial.config
        assert [e.value for e in again.record.trials[number].epochs] == [
            e.value for e in trial.epochs
        ]
    assert again.seconds == pytest.approx(told.seconds)


@pytest.mark.parametrize("seed", range(3))
def test_a_recorded_search_that_changes_its_trials_begins_with_what_was_drawn(seed: int) -> None:
    told = search("pbt", seed=seed)
    assert any(trial.adoptions for trial in told.record.trials.values())
    recorded = Recorded.from_run(told)
    again = search("pbt", seed=seed, space=None, curves=recorded, order=told.journal)
    assert decision_log(again.journal) == decision_log(told.journal)
    for number, trial in told.record.trials.items():
        assert again.record.trials[number].params == trial.params == recorded.configs[number]


def test_no_more_trials_are_drawn_than_were_recorded() -> None:
    curves = Recorded.from_run(search("random"))
    run = simulate(RandomSearch(max_epochs=4, n_trials=50, n_concurrent=5), curves, CLUSTER)
    assert sorted(run.record.trials) == list(range(12))
    assert all(trial.state == "complete" for trial in run.record.trials.values())


def test_a_recorded_grid_ends_where_it_ended() -> None:
    flow = Grid(max_epochs=3, n_concurrent=5)  # of 15 points, the last one asked for alone
    told = simulate(flow, CURVES, CLUSTER, space=small_space)
    again = simulate(flow, Recorded.from_run(told), CLUSTER, order=told.journal)
    assert decision_log(again.journal) == decision_log(told.journal)


def test_times_are_measured_as_on_a_worker_of_average_speed() -> None:
    speeds = (1.0, 1.0, 0.5, 1.5)
    cluster = SimulatedCluster(n_workers=4, speeds=speeds)
    told = search("random", cluster=cluster, curves=PowerLaw(epoch_s=40.0, evaluation_share=0.25))
    curves = Recorded.from_run(told)
    assert max(curves.epoch_s.values()) < 1.1 * min(curves.epoch_s.values())
    assert fmean(curves.epoch_s.values()) == pytest.approx(40.0 / fmean(speeds), rel=0.2)
    assert curves.evaluation_share == pytest.approx(0.25, rel=0.2)


@pytest.mark.parametrize(
    "flow", [RoundRobin(3, 12, quantum=10), SEER("20 min", 4800, min_stage=60)]
)
def test_times_are_those_of_whole_units_however_often_a_trial_was_stopped(flow: Flow) -> None:
    curves = PowerLaw(epoch_s=60.0, evaluation_share=0.25)
    told = simulate(flow, curves, SimulatedCluster(4, max_workers=8), space=space)
    assert told.record.pieces
    recorded = Recorded.from_run(told)
    assert list(recorded.epoch_s.values()) == pytest.approx([60.0] * len(recorded.epoch_s))
    assert recorded.evaluation_share == pytest.approx(0.25)


@pytest.mark.parametrize("takes", [{"hop_s": 5.0, "replicas": 1}, {"switch_s": 5.0}])
@pytest.mark.parametrize("flow", [RandomSearch(4, 8), RoundRobin(4, 8, quantum=100.0)])
def test_what_a_unit_waits_for_is_no_time_of_its_training(
    flow: Flow, takes: dict[str, Any]
) -> None:
    cluster = SimulatedCluster(**{"n_workers": 4, "replicas": 4, **takes})
    told = simulate(flow, PowerLaw(epoch_s=60.0), cluster, space=space)
    recorded = replace(Recorded.from_run(told), initial=1.0)
    assert list(recorded.epoch_s.values()) == pytest.approx([60.0] * 8, rel=1e-2)
    again = simulate(flow, recorded, cluster)
    assert again.seconds == pytest.approx(told.seconds, rel=1e-2)


def test_a_gang_counts_as_many_times_as_fast_where_a_trial_never_trained_alone() -> None:
    told = simulate(LSF(RandomSearch(2, 2)), PowerLaw(epoch_s=60.0), CLUSTER, space=space)
    curves = Recorded.from_run(told)
    assert curves.epoch_s == pytest.approx({0: 60.0, 1: 60.0})
    again = simulate(LSF(RandomSearch(2, 2)), curves, CLUSTER)
    assert again.seconds == pytest.approx(told.seconds)


def test_what_was_not_recorded_is_refused_and_what_failed_fails() -> None:
    curves = Recorded(
        configs={0: {"lr": 0.1}, 1: {"lr": 0.2}},
        values={0: (0.5, 0.4), 1: (0.7,)},
        epoch_s={0: 60.0},
        failed={1: "ValueError: no"},
    )
    with pytest.raises(SearchError, match="trial 0 was recorded for 2 epochs, and epoch 3"):
        curves.value({"lr": 0.1}, 3, trial=0)
    for epoch in (0, 0.25):
        with pytest.raises(SearchError, match=f"after epochs 1 to 2, and epoch {epoch} is wanted"):
            curves.value({"lr": 0.1}, epoch, trial=0)
    begun = replace(curves, initial=0.9)
    assert [begun.value({"lr": 0.1}, epoch, trial=0) for epoch in (0, 0.5, 1.5, 2)] == (
        pytest.approx([0.9, 0.7, 0.45, 0.4])
    )
    with pytest.raises(SearchError, match="after epochs 0 to 2, and epoch -1 is wanted"):
        begun.value({"lr": 0.1}, -1, trial=0)
    with pytest.raises(SearchError, match="a configuration that was not recorded"):
        curves.value({"lr": 0.3}, 1, trial=0)
    with pytest.raises(TrainingError, match="ValueError: no"):
        curves.value({"lr": 0.2}, 2, trial=1)
    assert curves.seconds({"lr": 0.2}, trial=1) == 60.0
    run = simulate(RandomSearch(max_epochs=2, n_trials=2), curves, CLUSTER)
    assert [trial.reason for trial in run.failures] == ["ValueError: no"]
    assert run.best_value == 0.4


def test_a_metric_that_was_not_recorded_is_named() -> None:
    metrics = search("random").metrics
    configs = {number: {"k": number} for number in range(12)}
    with pytest.raises(SearchError, match="no validation metric 'accuracy' was recorded; take"):
        Recorded.from_metrics(metrics, configs, metric="accuracy", epoch_s=1.0)
    torn = metrics[metrics["epoch"] != 2]
    with pytest.raises(SearchError, match="was not recorded after each epoch"):
        Recorded.from_metrics(torn, configs, metric="value", epoch_s=1.0)


def test_an_infinite_value_is_reported_as_it_is() -> None:
    curves = PowerLaw(asymptote=math.inf, noise=0.0)
    run = search("random", curves=curves)
    assert set(run.metrics.query("split == 'validation'")["value"]) == {math.inf}
