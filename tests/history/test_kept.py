"""What a trial is worth: its best state or its last one; and the best trial, however it ended."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagsel.flow import (
    Asked,
    Clone,
    Decision,
    Direction,
    Event,
    Finish,
    Keep,
    Paused,
    Reported,
    Stop,
    Train,
    TrialFailed,
)
from dagsel.history import tables
from dagsel.history.record import Record
from dagsel.history.report import report_page
from dagsel.history.result import Result, Run
from dagsel.messages import ENTRIES, BestLost, StatePlace, Turn
from dagsel.state import State
from dagsel.storage import RunDir
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.views.snapshot import Snapshot

N_SHARDS, N_TRIALS = 2, 4
VALUES = st.sampled_from([0.1, 0.2, 0.3, 0.4, float("inf"), float("-inf")])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["epoch", "epoch", "rest", "clone", "complete", "prune", "fail", "lose"]),
        st.integers(0, N_TRIALS - 1),
        VALUES,
    ),
    max_size=30,
)


@dataclass
class Oracle:
    """What was seen of a trial: values and places of its states, since it has its present model."""

    n_epochs: int = 0
    seen: list[tuple[float, StatePlace]] = field(default_factory=list)
    last: float | None = None  # what its state at the end of its last epoch is worth
    copied: StatePlace | None = None  # its state that is another trial's
    end: str = ""

    def worth(self, keep: Keep, loss: Any) -> tuple[float, StatePlace] | None:
        if not self.seen:
            return None
        return min(self.seen, key=lambda one: loss(one[0])) if keep == "best" else self.seen[-1]


def turn(event: Event | None, *decisions: Decision, **about: Any) -> Turn:
    return Turn(event, decisions, seconds=1.0, **about)


def end_of(epoch: int) -> StatePlace:
    return StatePlace(epoch, N_SHARDS - 1)


def loss_of(direction: Direction, value: float) -> float:
    if abs(value) == float("inf"):
        return float("inf")
    return value if direction == "minimize" else -value


def play(
    steps: list[tuple[str, int, float]], direction: Direction, keep: Keep
) -> tuple[Record, dict[int, Oracle]]:
    """Put steps to a record, as they are read from a journal, and to an oracle."""
    record = Record("run", N_SHARDS, direction, keep)
    known = {number: Oracle() for number in range(N_TRIALS)}

    def add(entry: Any) -> None:
        record.add(ENTRIES.decode(json.loads(json.dumps(ENTRIES.encode(entry)))))

    params = {number: {"x": number} for number in known}
    add(turn(Asked(tuple(known)), *(Train(t, 99) for t in known), params=params))
    for what, number, value in steps:
        one, other = known[number], known[(number + 1) % N_TRIALS]
        if one.end:
            continue
        if what == "epoch":
            one.n_epochs += 1
            one.last = value
            one.seen.append((value, end_of(one.n_epochs)))
            add(turn(Reported(number, one.n_epochs, value, {"f1": value}, 1.0)))
        elif what == "rest":
            place = StatePlace(one.n_epochs + 1, 0, is_partial=True)
            one.seen.append((value, place))
            rests = Paused(number, one.n_epochs + 0.25, 1.0, value=value, metrics={"f1": value})
            add(turn(rests, Train(number, 0), place=place))
        elif what == "clone" and one.n_epochs and other.n_epochs and not other.end:
            source, target = (number + 1) % N_TRIALS, number
            record.trials[target].n_decided = one.n_epochs  # it is paused
            assert other.last is not None
            one.last = other.last  # of the state, be it a clone's
            one.copied = end_of(one.n_epochs)
            one.seen = [(other.last, one.copied)]
            add(turn(None, Clone(source, target, {}), Train(target, 99)))
        elif what == "lose" and one.n_epochs:
            worth = one.worth(keep, lambda value: loss_of(direction, value))
            if worth is not None and worth[1] != end_of(one.n_epochs):  # that is made again
                assert one.last is not None
                one.seen = [(one.last, end_of(one.n_epochs))]
                add(BestLost(number))
        elif what == "fail":
            one.end = "failed"
            add(turn(TrialFailed(number, "broken")))
        elif what in ("complete", "prune"):
            one.end = what
            add(turn(None, Stop(number, "", "complete" if what == "complete" else "pruned")))
    return record, known


CLONED = [("epoch", 0, 0.1), ("epoch", 1, 0.4), ("clone", 0, 0.0)]
CLONED_TWICE = [*CLONED, ("epoch", 2, 0.3), ("clone", 1, 0.0), ("clone", 0, 0.0)]
LOST = [("epoch", 0, 0.1), ("epoch", 0, 0.4), ("lose", 0, 0.0)]


@given(STEPS, st.sampled_from(["minimize", "maximize"]), st.sampled_from(["best", "last"]))
@example(CLONED, "minimize", "best")  # chance seldom has them
@example(LOST, "minimize", "best")
@example(CLONED_TWICE, "minimize", "best")
def test_a_trial_is_worth_its_best_state_or_its_last_one(
    steps: list[tuple[str, int, float]], direction: Direction, keep: Keep
) -> None:
    record, known = play(steps, direction, keep)
    for number, one in known.items():
        kept = record.trials[number].kept
        found = None if kept is None else (kept.value, kept.place)
        assert found == one.worth(keep, lambda value: loss_of(direction, value))


def test_a_parameter_called_as_a_column_hides_none() -> None:
    record = Record("run", N_SHARDS, "minimize", "best")
    params = {0: {"trial": 50, "epoch": 51, "f1": 52, "state": 53, "x": 54}}
    add = [
        turn(Asked((0,)), Train(0, 1), params=params),
        turn(Reported(0, 1, 0.5, {"f1": 0.5}, 1.0)),
    ]
    for entry in add:
        record.add(entry)
    (row,) = tables.leaderboard(record, "f1").to_dict("records")
    assert (row["trial"], row["f1"], row["epoch"], row["state"]) == (0, 0.5, 1, "running")
    assert (row["param_trial"], row["param_f1"], row["x"]) == (50, 52, 54)


TIED = [("epoch", 0, 0.1), ("epoch", 1, 0.1), ("clone", 0, 0.0)]
OWN_AGAIN = [*TIED, ("epoch", 0, -0.1), ("epoch", 2, -0.1)]
LOST_AFTER = [*TIED, ("rest", 0, 0.1), ("lose", 0, 0.0)]


@given(STEPS, st.sampled_from(["minimize", "maximize"]))
@example(TIED, "minimize")
@example(OWN_AGAIN, "minimize")
@example(LOST_AFTER, "minimize")
def test_at_the_end_the_best_is_the_best_of_all_that_did_not_fail_and_is_complete(
    steps: list[tuple[str, int, float]], direction: Direction
) -> None:
    """Of equal ones a copy comes last: the value is its source's merit."""

    def is_copy(one: Oracle) -> bool:
        worth = one.worth("best", lambda value: loss_of(direction, value))
        return worth is not None and worth[1] == one.copied

    record, known = play(steps, direction, "best")
    leading = record.leading
    values = [
        (loss_of(direction, trial.value), is_copy(known[trial.number]), trial.number)
        for trial in record.trials.values()
        if trial.value is not None and known[trial.number].end != "failed"
    ]
    assert (leading is None) == (not values)
    if leading is not None:
        assert leading.number == min(values)[2]
    record.add(turn(None, Finish()))
    assert (record.best is None) == (not values)
    assert [trial.number for trial in tables.ranked(record)] == [
        number for *_, number in sorted(values)
    ]
    if record.best is not None:
        best = record.trials[record.best.trial]
        assert record.best.trial == min(values)[2]
        assert record.best.value == best.value
        was_other = any(one.end == "failed" or one.copied for one in known.values())
        assert best.state == "complete" or was_other, "one that failed later was better then"
        frame = tables.leaderboard(record, "f1")
        assert (frame["trial"][0], frame["f1"][0]) == (best.number, best.value)


@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize("end", ["complete", "prune"])
def test_a_trial_that_breaks_a_constraint_wins_only_where_all_do(keep: Keep, end: str) -> None:
    for infeasible in ((0,), (0, 1)):
        record = Record("run", N_SHARDS, "maximize", keep)
        params = {number: {"x": number} for number in (0, 1)}
        asked = turn(Asked((0, 1)), Train(0, 9), Train(1, 9), params=params, infeasible=infeasible)
        record.add(ENTRIES.decode(json.loads(json.dumps(ENTRIES.encode(asked)))))
        for number, value in ((0, 0.9), (1, 0.1)):
            record.add(turn(Reported(number, 1, value, {"f1": value}, 1.0)))
        record.add(turn(None, Stop(0, "", "complete" if end == "complete" else "pruned")))
        record.add(turn(None, Stop(1, "", "complete")))
        winner = 1 if infeasible == (0,) else 0
        if end == "prune" and keep == "last" and infeasible == (0, 1):
            winner = 1  # a completed one comes before one that is not
        assert record.best is not None
        assert record.best.trial == winner
        frame = tables.leaderboard(record, "f1")
        assert frame["trial"][0] == winner
        assert list(frame["feasible"]) == [number not in infeasible for number in frame["trial"]]
        assert record.leading is record.trials[1 if infeasible == (0,) else 0]


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_pruned_trial_wins_if_it_was_better(keep: Keep) -> None:
    steps = [("epoch", 0, 0.4), ("epoch", 1, 0.3), ("prune", 0, 0.0), ("complete", 1, 0.0)]
    record, _ = play(steps, "maximize", keep)
    assert record.best is not None
    assert record.best.trial == (0 if keep == "best" else 1)
    assert record.trials[0].state == ("complete" if keep == "best" else "pruned")
    assert [t.number for t in tables.ranked(record)] == ([0, 1] if keep == "best" else [1, 0])


def test_a_pruned_trial_that_another_one_surpasses_is_pruned() -> None:
    steps = [("epoch", 0, 0.3), ("epoch", 1, 0.4), ("prune", 0, 0.0), ("fail", 1, 0.0)]
    record, _ = play(steps, "maximize", "best")
    assert [record.trials[number].state for number in (0, 1)] == ["pruned", "failed"]
    assert record.best is not None
    assert record.best.trial == 0, "and yet it is what is left"


def copied() -> Record:
    """A search whose best trial is worth what it has copied: drawn 0.5, copied 0.1, now 0.2."""
    record = Record("run", N_SHARDS, "maximize", "best")
    params = {0: {"lr": 0.1}, 1: {"lr": 0.5}}
    record.add(turn(Asked((0, 1)), Train(0, 1), Train(1, 1), params=params))
    record.configure(params)
    for number, value in enumerate((0.7, 0.4)):
        record.add(turn(Reported(number, 1, value, {"f1": value}, 1.0)))
    record.add(turn(None, Clone(0, 1, {"lr": 0.2}), Train(1, 1)))
    record.add(turn(TrialFailed(0, "broken")))
    return record


def test_what_is_shown_of_a_trial_is_what_its_value_was_trained_with() -> None:
    record, study = copied(), optuna.create_study(direction="maximize")
    live = Snapshot.of(record, "f1", 0.0)
    assert live.rows[0].params == live.rows[0].settings == {"lr": 0.2}, "which it trains with"
    record.add(turn(None, Stop(1, "", "complete")))
    ended = Snapshot.of(record, "f1", 0.0)
    for row in (live.best, ended.best, ended.rows[0]):
        assert row is not None
        assert (row.number, row.value) == (1, 0.7)
        assert row.params == row.settings == {"lr": 0.1}
    result = Result(study, "f1", record)
    assert result.best_params == {"lr": 0.1}
    (best,) = result.top()
    assert repr(best) == "<trial 1: complete after 1 epoch, value 0.7, lr=0.1>"
    (row,) = re.findall(r"<tr>(.*?)</tr>", result._repr_html_())[1:]
    assert row.endswith(">lr=0.1</td>")
    page = report_page("s", "f1", record, None, None, {})
    assert '<td data-key="0.1">0.1</td></tr>' in page
    assert '"1":"lr=0.1"' in page


def test_a_point_of_a_curve_has_the_parameters_of_its_epoch() -> None:
    record = copied()
    record.add(turn(Reported(1, 2, 0.8, {"f1": 0.8}, 1.0)))
    result = Result(optuna.create_study(direction="maximize"), "f1", record)
    texts = [text for line in result.plot.curves().data for text in line.text or ()]
    first, second = (text for text in texts if text and "trial 1<" in text)
    assert first.endswith("after 1 epochs<br>f1 0.4<br>lr=0.5")
    assert second.endswith("after 2 epochs<br>f1 0.8<br>lr=0.2")


class Writes(SyntheticWorkload):
    """Writes the configuration of a model."""

    def ensemble(self, models: Any) -> Any:
        raise NotImplementedError

    def export(self, model: Any, config: Any, about: str) -> dict[str, bytes]:
        return {"config.json": json.dumps(config).encode()}

    def restore(self, state: Any, config: Any) -> Any:
        return None


def test_an_export_has_no_metrics_of_another_state_than_the_kept_one(tmp_path: Path) -> None:
    record, study = copied(), optuna.create_study(direction="maximize")
    record.add(turn(None, Stop(1, "", "complete")))
    run = Run(study, "f1", record, Writes(), RunDir(f"memory://{uuid.uuid4().hex}"))
    place = (run.best.trial, run.best.epoch, run.best.position)
    run.run_dir.states.save(*place, bytes(State.pack({}, {}).buffer), {})
    (folder,) = map(Path, run.export(tmp_path / "models"))
    told = json.loads((folder / "metrics.json").read_text())
    assert (told["value"], told["metrics"]) == (0.7, {})
    assert json.loads((folder / "config.json").read_text()) == {"lr": 0.1}
    record.trials[1].epochs[0] = replace(record.trials[1].epochs[0], value=0.7)
    run.export(tmp_path / "models", overwrite=True)
    assert json.loads((folder / "metrics.json").read_text())["metrics"] == {"f1": 0.4}
