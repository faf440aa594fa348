"""Figures say who trained what, when and for how much; and what is wrong with a call."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.units import Unit
from dagsel.errors import SearchError
from dagsel.flows import ASHA, SEER, RandomSearch
from dagsel.history.bars import Bar, bars, busy_seconds, lanes, occupancy, worker_names
from dagsel.history.plots.style import COLOURS, best_trials, colours
from dagsel.history.plots.timeline import MOST_BARS, bound_s, joined
from dagsel.history.record import Record
from dagsel.messages import SessionBegun, UnitRecord
from dagsel.simulation import PowerLaw, SimulatedCluster, SimulatedRun, simulate
from dagsel.study.plots import importance_plot

CLUSTER = SimulatedCluster(n_workers=3, n_shards=4)


def space(trial: optuna.Trial) -> dict[str, Any]:
    width = trial.suggest_int("width", 1, 64)
    return {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True), "width": width}


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    flow = ASHA(max_epochs=9, n_trials=24)
    limits: dict[str, Any] = {"deadline": "10 min", "budget": "30 worker-minutes"}
    return simulate(flow, PowerLaw(epoch_s=2.0), CLUSTER, space=space, **limits)


visits = st.builds(
    lambda worker, trial, begin, seconds, kind: Bar(
        worker, trial, kind, 1, 0, begin, begin + seconds, False
    ),
    st.sampled_from("abc"),
    st.integers(0, 4),
    st.floats(0.0, 100.0),
    st.floats(0.001, 10.0),
    st.sampled_from(["train", "evaluate"]),
)
LISTS = st.lists(visits, min_size=1, max_size=30)


@given(LISTS)
def test_occupancy_adds_up_to_the_time_that_trials_took(done: list[Bar]) -> None:
    times, workers = occupancy(done)
    width = times[1] - times[0]
    for trial, seconds in busy_seconds(done).items():
        assert workers[trial].sum() * width == pytest.approx(seconds)
        assert workers[trial].shape == times.shape


@given(LISTS)
def test_no_trial_takes_longer_than_the_bound_and_lanes_lose_nothing(done: list[Bar]) -> None:
    busy = busy_seconds(done)
    n_workers = len(worker_names(done))
    assert bound_s(done) >= sum(busy.values()) / n_workers - 1e-9
    assert sorted(bar for _, lane in lanes(done) for bar in lane) == sorted(done)
    assert joined(done) == [(bar, 1) for bar in done]


def test_of_many_visits_those_that_follow_are_joined_and_none_is_lost() -> None:
    one = Bar("a", 0, "train", 1, 0, 0.0, 1.0, False)
    many = [
        one._replace(worker=w, trial=(k // 40) % 7, begin=float(k), end=k + 0.8)
        for k in range(MOST_BARS)
        for w in "ab"
    ]
    drawn = joined(many)
    assert len(drawn) < len(many) / 20
    assert sum(n for _, n in drawn) == len(many)


def test_bars_know_of_sessions_gangs_and_what_was_found_stored() -> None:
    record = Record("run")
    record.add(SessionBegun(1000.0, 0.0))
    record.add(UnitRecord(Unit("train", 0, 1, 0), "a", 0, 1001.0, 1002.0, False))
    record.add(SessionBegun(5000.0, 3.0))  # it lay dead
    unit = Unit("train", 0, 1, 1)
    record.add(UnitRecord(unit, "a", 1, 5001.0, 5003.0, True, members=("b",)))
    record.add(UnitRecord(Unit("train", 0, 1, 2), "a", 2, 5003.0, 5004.0, False, recovered=True))
    assert [(bar.worker, bar.begin, bar.end) for bar in bars(record)] == [
        ("a", 1.0, 2.0),
        ("a", 4.0, 6.0),
        ("b", 4.0, 6.0),
    ]


def test_a_timeline_has_all_visits_and_the_bound(run: SimulatedRun) -> None:
    figure = run.plot.timeline()
    drawn = sum(len(trace.x) for trace in figure.data)
    assert drawn == len(run.timeline())
    total = sum(float(np.sum(trace.x)) for trace in figure.data)
    assert total == pytest.approx(sum(busy_seconds(bars(run.record)).values()))
    (line,) = figure.layout.shapes
    assert 0 < line.x0 <= max(run.timeline()["stop"])
    assert "3 workers" in figure.layout.title.text


def test_the_best_trials_have_colours_of_their_own_in_all_figures(run: SimulatedRun) -> None:
    best = best_trials(run.record)
    assert best[0] == run.best.trial
    assert len({colours(run.record)[number] for number in best}) == len(best) <= len(COLOURS)
    curves = {trace.name: trace.line.color for trace in run.plot.curves().data}
    workers = {trace.name: trace.line.color for trace in run.plot.workers().data}
    for number in best:
        state = run.record.trials[number].state
        assert curves[f"trial {number} ({state})"] == colours(run.record)[number]
        assert workers[f"trial {number}"] == colours(run.record)[number]


def test_curves_have_every_epoch_of_every_trial(run: SimulatedRun) -> None:
    figure = run.plot.curves(x="seconds")
    drawn = [y for trace in figure.data for y in trace.y if y is not None]
    assert sorted(drawn) == sorted(e.value for t in run.record.trials.values() for e in t.epochs)
    losses = run.plot.curves("train loss")
    assert len([y for trace in losses.data for y in trace.y if y is not None]) == len(drawn)


def test_workers_of_seers_stages_are_drawn() -> None:
    flow = SEER(deadline="10 min", budget="80 worker-minutes", min_stage="1 min")
    cluster = SimulatedCluster(n_workers=1, n_shards=4, max_workers=16)
    figure = simulate(flow, PowerLaw(epoch_s=20.0), cluster, space=space).plot.workers()
    there = next(trace for trace in figure.data if trace.name == "workers")
    assert max(there.y) > 4
    stacked = np.sum([trace.y for trace in figure.data if trace.stackgroup], axis=0)
    assert 1 < stacked.max() <= max(there.y) + 1e-9


def test_cost_shows_the_limits_and_what_trials_took(run: SimulatedRun) -> None:
    figure = run.plot.cost()
    billed, by_trial = figure.data
    assert billed.y[-1] == pytest.approx(run.worker_seconds)
    assert {line.y0 for line in figure.layout.shapes} >= {1800.0}
    assert {line.x0 for line in figure.layout.shapes} >= {600.0}
    label = {note.text: note for note in figure.layout.annotations}
    assert label["budget"].x == 0, "where the lines of budget and deadline meet both would lie"
    assert (label["deadline"].x, label["deadline"].y) == (600.0, 0)
    busy = busy_seconds(bars(run.record))
    assert max(by_trial.y) == pytest.approx(max(busy.values()))


def test_optuna_draws_parameters(run: SimulatedRun) -> None:
    drawn = run.plot.parallel("lr").to_json()
    assert "lr" in drawn
    assert len(run.plot.parallel().to_json()) > len(drawn)
    (bars_of_params,) = run.plot.importance().data
    assert {*bars_of_params.y} == {"lr", "width"}


def test_what_matters_is_the_same_whether_a_metric_is_alone_or_the_first_of_two() -> None:
    def importance(*directions: Any) -> dict[str, float]:
        study = optuna.create_study(directions=directions)
        for n in range(40):
            x, y = n / 39, n * 7 % 40 / 39
            params = {"x": x, "y": y}
            space: Any = optuna.distributions.FloatDistribution(0.0, 1.0)
            spaces = dict.fromkeys(params, space)
            values = [x**8 + 0.1 * y, 0.5][: len(directions)]
            study.add_trial(
                optuna.trial.create_trial(values=values, params=params, distributions=spaces)
            )
        (bars_of_params,) = importance_plot(study, None, "accuracy").data
        return dict(zip(bars_of_params.y, bars_of_params.x, strict=True))

    for direction in ("maximize", "minimize"):
        assert importance(direction, "minimize") == importance(direction)


def test_what_cannot_be_drawn_is_said(run: SimulatedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SearchError, match="no metric 'f1'; take one of value, train loss"):
        run.plot.curves("f1")
    with pytest.raises(SearchError, match="x must be"):
        run.plot.curves(x="hours")  # type: ignore[arg-type]
    with pytest.raises(SearchError, match="no parameter 'depth'; take one of lr, width"):
        run.plot.importance(["depth"])
    one = simulate(RandomSearch(max_epochs=1, n_trials=1), PowerLaw(), CLUSTER, space=space)
    with pytest.raises(SearchError, match="how much the parameters matter cannot be told"):
        one.plot.importance()
    with pytest.raises(SearchError, match="none of them is complete"):
        importance_plot(optuna.create_study(), None, "accuracy")
    find = builtins.__import__

    def without_plotly(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("plotly"):
            raise ImportError("No module named 'plotly'")
        return find(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_plotly)
    for name in ("timeline", "curves", "workers", "cost", "parallel", "importance"):
        with pytest.raises(SearchError, match=r'pip install "dagsel\[plot\]"'):
            getattr(run.plot, name)()


def test_a_search_of_which_nothing_has_ended_has_figures_that_say_so() -> None:
    run = simulate(RandomSearch(max_epochs=1, n_trials=1), PowerLaw(), CLUSTER, space=space)
    run.record.units.clear()
    run.record.trials[0].epochs.clear()
    for name in ("timeline", "curves", "workers"):
        (note,) = getattr(run.plot, name)().layout.annotations
        assert "yet" in note.text
