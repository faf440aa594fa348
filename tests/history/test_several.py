"""Several metrics: the front is what no other ended trial beats, as in Optuna; no trial is best."""

from __future__ import annotations

import json
import math
import uuid
from typing import Any, TypeAlias

import optuna
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import Asked, Direction, Finish, Goal, Paused, Reported, Stop, Train, TrialFailed
from dagsel.history import tables
from dagsel.history.record import Record
from dagsel.history.result import Result, Run
from dagsel.messages import ENTRIES, StatePlace, Turn
from dagsel.storage import RunDir

N_TRIALS = 7
NOTHING: Any = None
value = st.sampled_from([0.1, 0.2, 0.3, 0.4, float("inf"), float("-inf")])
direction: st.SearchStrategy[Direction] = st.sampled_from(["minimize", "maximize"])
Step: TypeAlias = tuple[str, int, tuple[float, ...]]
steps = st.lists(
    st.tuples(
        st.sampled_from(["epoch", "epoch", "rest", "complete", "prune", "fail"]),
        st.integers(0, N_TRIALS - 1),
        st.tuples(value, value, value),
    ),
    max_size=40,
)
directions = st.lists(direction, min_size=2, max_size=3)
infeasible = st.sets(st.integers(0, N_TRIALS - 1), max_size=3)
TOLD = {"complete": optuna.trial.TrialState.COMPLETE, "pruned": optuna.trial.TrialState.PRUNED}


def goals_of(directions: list[Direction]) -> tuple[Goal, ...]:
    return tuple(Goal(f"m{i}", one) for i, one in enumerate(directions))


def play(
    steps: list[Step], directions: list[Direction], infeasible: set[int]
) -> tuple[Record, dict[int, tuple[float, ...]], dict[int, str]]:
    """Put steps to a record, as they are read from a journal; return it, last values and ends."""
    goals = goals_of(directions)
    record = Record("run", 2, directions[0], "last", goals=goals)
    last: dict[int, tuple[float, ...]] = {}
    ends: dict[int, str] = {}
    n_epochs = dict.fromkeys(range(N_TRIALS), 0)

    def add(event: Any, *decisions: Any, **about: Any) -> None:
        entry = Turn(event, decisions, seconds=1.0, **about)
        record.add(ENTRIES.decode(json.loads(json.dumps(ENTRIES.encode(entry)))))

    trials = tuple(range(N_TRIALS))
    params = {number: {"x": number} for number in trials}
    trains = (Train(number, 99) for number in trials)
    add(Asked(trials), *trains, params=params, infeasible=tuple(sorted(infeasible)))
    for what, number, values in steps:
        if number in ends:
            continue
        metrics = {goal.metric: one for goal, one in zip(goals, values, strict=False)}
        told = tuple(metrics.values())
        if what == "epoch":
            n_epochs[number] += 1
            last[number] = told
            add(Reported(number, n_epochs[number], told[0], metrics | {"loss": 9.0}, 1.0))
        elif what == "rest":
            last[number] = told
            place = StatePlace(n_epochs[number] + 1, 0, is_partial=True)
            rests = Paused(number, n_epochs[number] + 0.5, 1.0, value=told[0], metrics=metrics)
            add(rests, Train(number, 0), place=place)
        elif what == "fail":
            ends[number] = "failed"
            add(TrialFailed(number, "broken"))
        else:
            ends[number] = what
            add(None, Stop(number, "", "complete" if what == "complete" else "pruned"))
    add(None, Finish())
    return record, last, ends


def study_of(record: Record, directions: list[Direction]) -> optuna.Study:
    """Tell a study what the run would have told it, with infinite values as the worst."""
    worst = [math.inf if one == "minimize" else -math.inf for one in directions]
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=directions)
    optuna.logging.set_verbosity(verbosity)
    for trial in record.trials.values():
        if trial.state == "failed":
            study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL))
            continue
        pairs = zip(trial.values, worst, strict=False)
        ranked = [value if math.isfinite(value) else bad for value, bad in pairs]
        values = ranked if trial.state == "complete" else None
        broken = {"constraints:c": 1.0} if not trial.is_feasible else {}
        told = optuna.trial.create_trial(
            state=TOLD[trial.state], values=values, system_attrs=broken
        )
        study.add_trial(told)
    return study


ALL: tuple[float, ...] = (0.1, 0.1, 0.1)
BROKEN: list[Step] = [("epoch", 0, ALL), ("prune", 0, ALL)]
LOST: list[Step] = [("epoch", 0, (-math.inf,) * 3), ("epoch", 1, ALL), ("complete", 0, ALL)]
EARLY: list[Step] = [("epoch", 1, (0.4,) * 3), ("complete", 1, ALL), *BROKEN]


@given(steps, directions, infeasible)
@example(BROKEN, ["minimize", "minimize"], {0})  # chance seldom has them
@example(EARLY, ["minimize", "maximize"], set())
@example([*LOST, ("complete", 1, ALL)], ["minimize", "minimize"], set())
@settings(deadline=None)
def test_the_front_is_what_no_other_ended_trial_beats_and_that_of_the_study(
    steps: list[Step], directions: list[Direction], infeasible: set[int]
) -> None:
    record, last, ends = play(steps, directions, infeasible)
    signs = [1 if one == "minimize" else -1 for one in directions]
    losses = {
        number: tuple(
            sign * one if math.isfinite(one) else math.inf
            for sign, one in zip(signs, values, strict=True)
        )
        for number, values in last.items()
        if ends.get(number) != "failed" and number not in infeasible
    }
    front = {
        number
        for number, mine in losses.items()
        if not any(
            all(a <= b for a, b in zip(theirs, mine, strict=True)) and theirs != mine
            for theirs in losses.values()
        )
    }
    assert {best.trial for best in record.top} == front
    assert {trial.number for trial in study_of(record, directions).best_trials} == front
    assert all(record.trials[number].state == "complete" for number in front)
    assert all(record.trials[number].values == values for number, values in last.items())
    for number in infeasible & {n for n, end in ends.items() if end == "prune"}:
        assert record.trials[number].state == "pruned"
    assert record.best is None
    assert record.leading is None
    result = Result(NOTHING, "m0", record)
    board = result.leaderboard(N_TRIALS)
    assert [trial.number for trial in result.top(N_TRIALS)] == list(board["trial"])
    assert result.top(1) == result.top(2)[:1]
    with pytest.raises(SearchError, match="n must be a whole number of 1 or more, got 0"):
        result.top(0)
    assert set(result.pareto()["trial"] if front else ()) == front
    if len(board):
        assert set(board["trial"][board["front"]]) == front
        assert list(board["front"]) == sorted(board["front"], reverse=True)
        for row in board.to_dict("records"):
            assert tuple(row[f"m{i}"] for i in range(len(directions))) == last[row["trial"]]


@given(steps, directions, infeasible)
@settings(deadline=None)
def test_the_leaderboard_has_each_layer_before_the_next_and_the_infeasible_last(
    steps: list[Step], directions: list[Direction], infeasible: set[int]
) -> None:
    record, _, _ = play(steps, directions, infeasible)
    ranked = tables.ranked(record)
    feasible = [trial.is_feasible for trial in ranked]
    assert feasible == sorted(feasible, reverse=True)
    for n, trial in enumerate(ranked):
        mine = record.losses(trial)
        for before in ranked[:n]:
            theirs = record.losses(before)
            is_worse = all(a <= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs
            assert not (is_worse and before.is_feasible == trial.is_feasible)


def searched() -> Run:
    record, _, _ = play(
        [
            ("epoch", 0, (0.1, 0.4, 0.0)),
            ("epoch", 1, (0.4, 0.1, 0.0)),
            ("epoch", 2, (0.4, 0.4, 0.0)),
            ("complete", 0, (0.0,) * 3),
            ("complete", 1, (0.0,) * 3),
        ],
        ["minimize", "minimize"],
        set(),
    )
    return Run(
        optuna.create_study(directions=["minimize"] * 2),
        "m0",
        record,
        NOTHING,
        RunDir(f"memory://{uuid.uuid4().hex}"),
    )


class Compared(float):
    """A loss that counts how often one is compared."""

    n = 0

    def __le__(self, other: float) -> bool:
        Compared.n += 1
        return super().__le__(other)


def test_a_trial_that_ends_is_compared_with_each_of_the_front_alone() -> None:
    """Else those of the front are compared with each other at each end, though none has changed."""
    n, goals = 60, goals_of(["minimize", "minimize"])
    record = Record("run", 1, "minimize", "last", goals=goals)
    trials = tuple(range(n))
    trains = tuple(Train(number, 1) for number in trials)
    record.add(Turn(Asked(trials), trains, params={number: {} for number in trials}))
    Compared.n = 0
    for number in trials:  # none is better than another one
        values = {"m0": Compared(number), "m1": Compared(n - number)}
        record.add(Turn(Reported(number, 1, values["m0"], values, 1.0), ()))
        record.add(Turn(None, (Stop(number, "", "complete"),)))
    assert [best.trial for best in record.top] == list(trials)
    assert Compared.n <= 4 * n**2 / 2


@pytest.mark.parametrize("name", ["best", "best_params", "best_value", "best_model"])
def test_what_asks_for_the_best_is_told_of_the_front(name: str) -> None:
    with pytest.raises(SearchError, match=r"about m0 and m1, and no trial is best .* run.pareto"):
        searched().best_model() if name == "best_model" else getattr(searched(), name)
    for n in (1, 2):
        with pytest.raises(SearchError, match=r"run.pareto\(\)"):
            searched().models(n)


def test_a_trial_that_is_not_on_the_front_has_no_model_and_the_error_names_those_that_have() -> (
    None
):
    with pytest.raises(SearchError, match="the model of trial 2 is not kept; .* one: 0, 1"):
        searched().best_model(trial=2)
    with pytest.raises(SearchError, match="trial must be a whole number"):
        searched().best_model(trial="0")  # type: ignore[arg-type]


def test_it_is_shown_with_its_front() -> None:
    assert "2 complete, 5 pruned; 2 on the Pareto front of m0 and m1>" in repr(searched())
    assert list(searched().pareto().columns) == ["trial", "m0", "m1", "epoch", "state", "x"]
    assert list(searched().trials().columns)[:5] == ["trial", "state", "m0", "m1", "epochs"]


def test_a_search_for_one_metric_has_no_front() -> None:
    record = Record("run", 1, "minimize")
    with pytest.raises(SearchError, match="about one metric, loss: run.best is its best trial"):
        Result(NOTHING, "loss", record).pareto()
