"""The recorded grid is whole; ranges of losses are those of the batches, however time is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import Losses
from dagsel.simulation.curves import Curves, Loses
from dagsel.simulation.traces import Traces
from tests.benchmarks.papers.hermes import HERE, MODELS, draw, goal_of, load

N_BATCHES, N_EPOCHS = 49, 3  # 1 / 49 * 49 is below 1
LOSSES = np.random.default_rng(0).normal(size=(2, N_BATCHES * N_EPOCHS))
CONFIGS = [{"lr": 0.1, "kind": "a"}, {"lr": 0.1, "kind": "b"}]
TRACES = Traces(CONFIGS, LOSSES, np.arange(6.0).reshape(2, 3), np.array([0.5, 2.0]))


@pytest.mark.parametrize("name", MODELS)
def test_the_grid_is_recorded(name: str) -> None:
    traces = load(name)
    assert isinstance(traces, Curves)
    assert isinstance(traces, Loses)
    assert traces.batch_losses.shape == (192, 1000)
    assert (traces.n_epochs, traces.n_batches) == (20, 50)
    assert len({tuple(config.items()) for config in traces.configs}) == 192
    assert traces.batch_s.mean() == pytest.approx(0.2)
    assert (traces.batch_s > 0).all()
    assert np.isfinite(traces.batch_losses).all()
    assert ((traces.values >= 0) & (traces.values <= 1)).all()
    # Rates of 1e-5 under SGD learn nothing, and Adam at 1e-3 nearly all there is.
    best = traces.values[:, -1].max()
    by_rate = {
        (config["optimizer"], config["lr"]): value
        for config, value in zip(traces.configs, traces.values[:, -1], strict=True)
    }
    assert by_rate["sgd", 1e-5] < 0.5 * best < 0.9 * best < by_rate["adam", 1e-3]


def test_all_is_small() -> None:
    assert sum(path.stat().st_size for path in HERE.glob("*.npz")) < 10_000_000


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_good", [4, 12])
def test_a_bin_holds_as_many_good_ones_as_it_says(name: str, n_good: int) -> None:
    traces = load(name)
    jobs = draw(traces, n_good, order=3)
    reaches = jobs.values.max(axis=1) >= goal_of(traces)
    assert (len(reaches), reaches.sum()) == (16, n_good)
    assert len({tuple(config.items()) for config in jobs.configs}) == 16


@given(st.integers(0, 1), st.lists(st.integers(0, 4 * LOSSES.shape[1]), min_size=2, max_size=6))
def test_a_range_is_that_of_the_batches_that_end_in_it(which: int, quarters: list[int]) -> None:
    quarters.sort()
    pieces = Losses()
    for start, stop in pairwise(quarters):  # in quarters of a batch
        told = losses_between(which, start, stop)
        ended = [
            float(loss) for end, loss in enumerate(LOSSES[which], 1) if start < 4 * end <= stop
        ]
        assert told.n == len(ended)
        if ended:
            assert (told.low, told.high) == (min(ended), max(ended))
        pieces += told
    whole = losses_between(which, quarters[0], quarters[-1])
    assert pieces == whole or pieces.n == whole.n == 0


def losses_between(which: int, start: int, stop: int) -> Losses:
    moments = [quarter / 4 / N_BATCHES for quarter in (start, stop)]
    return TRACES.losses(CONFIGS[which], *moments, trial=9)


def test_a_diverged_loss_stays_one() -> None:
    losses = np.array([[1.0, math.nan, 3.0]])
    traces = Traces(CONFIGS[:1], losses, np.zeros((1, 1)), np.ones(1))
    told = traces.losses(CONFIGS[0], 0.0, 1.0, trial=0)
    assert told.n == 3
    assert math.isnan(told.low)
    assert traces.losses(CONFIGS[0], 2 / 3, 1.0, trial=0) == Losses(1, 3.0, 3.0)


def test_values_and_seconds_are_those_of_the_configuration() -> None:
    assert [TRACES.value(CONFIGS[1], epoch, trial=0) for epoch in (1, 2, 3)] == [3.0, 4.0, 5.0]
    assert TRACES.value(CONFIGS[1], 2.25, trial=0) == 4.25
    assert TRACES.seconds(CONFIGS[1], trial=0) == 98.0


def test_inside_the_first_epoch_a_value_lies_between_the_initial_one_and_the_first() -> None:
    traces = replace(TRACES, initial=np.array([-1.0, 1.0]))
    assert [traces.value(CONFIGS[1], epoch, trial=0) for epoch in (0, 0.5, 1, 2)] == [1, 2, 3, 4]
    assert traces.value(CONFIGS[0], 0.25, trial=0) == -0.75
    with pytest.raises(SearchError, match="epoch -0.5, and epochs 0 to 3 were recorded"):
        traces.value(CONFIGS[0], -0.5, trial=0)


@given(
    asymptote=st.floats(0.2, 1.0),
    amplitude=st.floats(-0.8, -0.05),
    rate=st.sampled_from([0.1, 0.5, 1.0, 1.45]),
    n_epochs=st.integers(20, 60),
)
def test_a_fit_to_a_power_law_gives_it_back(
    asymptote: float, amplitude: float, rate: float, n_epochs: int
) -> None:
    values = asymptote + amplitude * np.arange(1, n_epochs + 1) ** -rate
    shown = np.stack([values, np.full(n_epochs, 0.5)])
    law = Traces(CONFIGS, np.ones((2, n_epochs)), shown, np.array([0.5, 2.0])).fitted()
    for epoch in (1, 7, n_epochs, 10 * n_epochs):
        there = asymptote + amplitude * epoch**-rate
        assert law.value(CONFIGS[0], epoch, trial=0) == pytest.approx(there, abs=1e-3)
        assert law.value(CONFIGS[1], epoch, trial=0) == pytest.approx(0.5, abs=1e-6)
    assert law.seconds(CONFIGS[1], trial=0) == 2.0


def test_what_was_not_recorded_is_refused() -> None:
    with pytest.raises(SearchError, match="epoch 4, and epochs 1 to 3 were recorded; set max_epo"):
        TRACES.value(CONFIGS[0], 4, trial=0)
    with pytest.raises(SearchError, match=r"epoch 3.5, and epochs 0 to 3 were recorded"):
        TRACES.losses(CONFIGS[0], 0.0, 3.5, trial=0)
    for epoch in (0, 0.5):
        with pytest.raises(SearchError, match=f"epoch {epoch}, and epochs 1 to 3.*give initial="):
            TRACES.value(CONFIGS[0], epoch, trial=0)
    with pytest.raises(SearchError, match=r"must have the shape \(2,\), got \(3,\)"):
        replace(TRACES, initial=np.zeros(3))
    with pytest.raises(SearchError, match="was not recorded"):
        TRACES.seconds({"lr": 0.2, "kind": "a"}, trial=0)
    with pytest.raises(SearchError, match="there twice"):
        Traces([CONFIGS[0]] * 2, LOSSES, TRACES.values, TRACES.batch_s)
    with pytest.raises(SearchError, match="shapes"):
        Traces(CONFIGS, LOSSES[:, :-1], TRACES.values, TRACES.batch_s)
