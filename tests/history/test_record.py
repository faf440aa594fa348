"""The record of a run: what the entries of a journal say is what it holds and its frames show."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.events import ShardLoaded
from dagsel.dispatch.units import Unit
from dagsel.errors import SearchError
from dagsel.flow import (
    Add,
    Ask,
    Asked,
    Clone,
    Commanded,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Extended,
    Finish,
    Keep,
    Pause,
    Paused,
    Reported,
    Stop,
    Train,
    TrialFailed,
    WorkersChanged,
)
from dagsel.history import tables
from dagsel.history.extension import can_train_on
from dagsel.history.live import config_kept
from dagsel.history.record import Best, Record
from dagsel.history.script import differences
from dagsel.history.tables import ranked
from dagsel.history.trial import EpochRecord
from dagsel.messages import (
    ENTRIES,
    Abandoned,
    Entry,
    FlowState,
    Note,
    PartFound,
    PieceRecord,
    RoundSent,
    SessionBegun,
    StatePlace,
    StatesFound,
    StoredState,
    Turn,
    UnitRecord,
)
from dagsel.steering import AddTrial
from tests.driver.hand_engine import read_into

N_SHARDS = 2


def turn(event: Event | Context | None, *decisions: Decision, **about: Any) -> Turn:
    context = event if isinstance(event, Context) else None
    told = None if isinstance(event, Context) else event
    return Turn(told, decisions, seconds=1.0, context=context, **about)


def asked(*trials: int, decisions: Sequence[Decision] = ()) -> Turn:
    return turn(Asked(trials), *decisions, params={trial: {"lr": 0.1 * trial} for trial in trials})


def trained(trial: int, epoch: int, position: int, shard: int, **about: Any) -> UnitRecord:
    told: dict[str, Any] = {"state_bytes": 9, "n_samples": 4, "loss": 0.5}
    told |= {"digest": f"{epoch}{position}"}
    unit = Unit("train", trial, epoch, position)
    return UnitRecord(unit, "w", shard, 1.0, 2.0, True, **told | about)


def scored(trial: int, epoch: int, shard: int, value: float) -> UnitRecord:
    unit = Unit("evaluate", trial, epoch, shard)
    return UnitRecord(unit, "w", shard, 2.0, 3.0, False, n_samples=2, metrics={"f1": value})


def epoch_of(trial: int, epoch: int, value: float, *decisions: Decision) -> list[Entry]:
    """List all that a journal says of an epoch."""
    units = [trained(trial, epoch, p, N_SHARDS - 1 - p) for p in range(N_SHARDS)]
    scores = [scored(trial, epoch, shard, value) for shard in range(N_SHARDS)]
    return [*units, *scores, turn(Reported(trial, epoch, value, {"f1": value}, 2.0), *decisions)]


def fold(*entries: Entry, direction: Any = "maximize", keep: Keep = "best") -> Record:
    written = json.loads(json.dumps([ENTRIES.encode(entry) for entry in entries]))
    return read_into(Record("3f9a", N_SHARDS, direction, keep), map(ENTRIES.decode, written))


def searched(n_trials: int, n_epochs: int, keep: Keep = "best") -> Record:
    trials = range(n_trials)
    entries: list[Entry] = [turn(Context(2), Ask(n_trials))]
    entries.append(asked(*trials, decisions=[Train(trial, n_epochs) for trial in trials]))
    for trial in trials:
        for epoch in range(1, n_epochs + 1):
            entries += epoch_of(trial, epoch, trial + epoch / 10)
    return fold(*entries, keep=keep)


@given(n_trials=st.integers(0, 3), n_epochs=st.integers(0, 3))
def test_the_frames_have_a_row_for_each_number_and_each_unit(n_trials: int, n_epochs: int) -> None:
    record = searched(n_trials, n_epochs)
    frame = tables.metrics(record)
    assert list(frame.columns) == ["trial", "epoch", "split", "name", "value", "seconds"]
    key = ["trial", "epoch", "split", "name"]
    values = dict(zip(frame[key].itertuples(index=False, name=None), frame.value, strict=True))
    assert values == {
        (trial, epoch, *name): value
        for trial in range(n_trials)
        for epoch in range(1, n_epochs + 1)
        for name, value in [
            (("train", "loss"), 0.5),
            (("validation", "f1"), trial + epoch / 10),
        ]
    }
    assert len(frame) == len(values) == 2 * record.n_epochs
    timeline = tables.timeline(record)
    assert len(timeline) == record.n_epochs * 2 * N_SHARDS
    assert {"shard", "worker", "hop", "recovered"} < set(timeline.columns)
    assert record.n_live == n_trials
    assert all(trial.is_paused for trial in record.trials.values())
    assert record.n_epochs_decided == n_trials * n_epochs


def test_the_timeline_says_where_and_when() -> None:
    record = fold(trained(0, 1, 3, 2, recovered=True), scored(0, 1, 1, 0.5))
    first, second = tables.timeline(record).to_dict("records")
    expected = {
        "kind": "train", "trial": 0, "epoch": 1, "position": 3, "shard": 2, "worker": "w",
        "start": 1.0, "stop": 2.0, "hop": True, "recovered": True,
    }  # fmt: skip
    assert expected.items() <= first.items()
    assert (second["kind"], second["recovered"]) == ("evaluate", False)
    assert [unit.state_bytes for unit in record.units] == [9, 0]


def test_a_visit_that_was_done_again_has_one_row() -> None:
    first = replace(trained(0, 1, 0, 2), start=1.0, stop=4.0, attempts=2, lost_seconds=0.5)
    other = replace(trained(0, 1, 1, 3), start=4.0, stop=5.0)
    found = replace(trained(0, 1, 0, 2, recovered=True), start=6.0, stop=6.1, lost_seconds=0.25)
    again = replace(trained(0, 1, 0, 1), start=7.0, stop=9.0)
    seen = ["position", "shard", "start", "recovered", "attempts", "lost_seconds"]

    def rows(*units: UnitRecord) -> list[tuple[Any, ...]]:
        return list(tables.timeline(fold(*units))[seen].itertuples(index=False, name=None))

    two = (1, 3, 4.0, False, 1, 0.0)
    assert rows(first, other) == [(0, 2, 1.0, False, 2, 0.5), two]
    assert rows(first, other, found) == [(0, 2, 1.0, False, 3, 0.75), two]
    assert rows(first, other, found, again) == [two, (0, 1, 7.0, False, 4, 3.75)]
    assert rows(found, other) == [(0, 2, 6.0, True, 1, 0.25), two]
    assert rows(found, other, again) == [two, (0, 1, 7.0, False, 2, 0.25)]


def test_an_epoch_has_the_results_of_its_units_and_the_checksum_of_its_end() -> None:
    record = fold(turn(Context(2), Ask(1)), asked(0, decisions=[Train(0, 2)]))
    for entry in epoch_of(0, 1, 0.25):
        record.add(entry)
    record.add(trained(0, 1, 1, 0, loss=99.0))  # a unit that was thought lost
    assert record.trials[0].epochs == [EpochRecord(1, 0.25, {"f1": 0.25}, 0.5, 2.0, "11")]
    assert record.trials[0].tallies == {}
    record.add(turn(Reported(0, 2, 0.5, {"f1": 0.5}, 3.0)))  # nothing is known of its units
    last = record.trials[0].epochs[-1]
    assert math.isnan(last.train_loss)
    assert last.digest == ""


def test_asks_wait_until_they_are_answered() -> None:
    record = fold(turn(Context(2), Ask(2), Ask(1, "random")), asked(0, 1))
    assert list(record.awaited) == [(Ask(1, "random"), None)]
    assert record.context == Context(2)
    record.add(turn(WorkersChanged(5)))
    assert record.n_workers == 5
    assert record.trials[1].params == {"lr": 0.1}


def test_a_command_has_the_trial_that_it_has_added_and_no_other() -> None:
    def commanded(id_: str) -> Turn:
        return turn(Commanded(AddTrial({"lr": 0.1}, 1), id_, 1.0), Add({"lr": 0.1}))

    record = fold(turn(Context(2), Add({"lr": 0.1})), commanded("a"), asked(0), asked(1))
    assert record.added == {"a": 1}
    record.add(commanded("late"))  # as the time is over: it is not drawn
    record.add(turn(DeadlineReached(2.0), Finish()))
    record.add(turn(Extended()))
    for entry in (commanded("b"), asked(2), commanded("c"), asked(3)):
        record.add(entry)
    assert record.added == {"a": 1, "b": 2, "c": 3}


def test_trials_end_in_their_own_way_and_of_last_states_the_best_completed_one_is_best() -> None:
    record = searched(5, 1, keep="last")  # worth 0.1, 1.1, 2.1, 3.1, 4.1
    record.add(turn(TrialFailed(4, "ValueError: bad"), traceback="the whole"))
    assert [record.best] == [None]
    record.add(turn(None, Stop(3, "rung 1")))
    assert record.best == Best(3, 1, 1, 3.1, is_complete=False)
    record.add(turn(None, Stop(0, "the end", "complete"), Stop(1, "the end", "complete")))
    assert record.best == Best(1, 1, 1, 1.1)
    record.add(turn(None, Finish()))
    states = [trial.state for trial in record.trials.values()]
    assert states == ["complete", "complete", "pruned", "pruned", "failed"]
    assert record.trials[2].reason == "the search has ended"
    assert (record.failures[0].reason, record.failures[0].traceback) == (
        "ValueError: bad", "the whole"
    )  # fmt: skip
    assert (record.n_live, record.finished) == (0, True)


@pytest.mark.parametrize(
    ("direction", "values", "best"),
    [
        ("minimize", (0.2, 0.1), 1),
        ("maximize", (0.2, 0.1), 0),
        ("maximize", (0.5, 0.5), 0),  # of equal ones the first drawn
        ("minimize", (float("-inf"), 7.0), 1),  # what is not finite is the worst, either way
        ("maximize", (float("inf"), -7.0), 1),
        ("maximize", (float("nan"), -7.0), 1),
    ],
)
@pytest.mark.parametrize("ends", [(0, 1), (1, 0)])
def test_the_best_is_the_same_whichever_ended_first(
    direction: str, values: tuple[float, float], best: int, ends: tuple[int, int]
) -> None:
    epochs = [entry for trial in (0, 1) for entry in epoch_of(trial, 1, values[trial])]
    stops = [turn(None, Stop(trial, "", "complete")) for trial in ends]
    found = fold(asked(0, 1), *epochs, *stops, direction=direction).best
    assert found is not None
    assert found.trial == best


def test_a_trial_without_an_epoch_is_not_complete_and_what_it_never_trained_is_not_counted() -> (
    None
):
    record = fold(asked(0, decisions=[Train(0, 5)]), turn(None, Stop(0, "", "complete")))
    assert (record.trials[0].state, record.best, record.n_epochs_decided) == ("pruned", None, 0)


def paused(trial: int, epochs: float, value: float | None, *decisions: Decision) -> Turn:
    event = Paused(trial, epochs, 3.0, 1.0, value=value, metrics={} if value is None else {"f1": 1})
    return turn(event, *decisions, place=StatePlace(int(epochs) + 1, 0, True))


@pytest.mark.parametrize("again", [(), (Pause(0, evaluate=True),)])
def test_the_last_score_counts_until_there_is_another(again: tuple[Decision, ...]) -> None:
    begun = [asked(0, 1, decisions=[Train(0, 5), Train(1, 5)]), *epoch_of(0, 1, 0.2)]
    begun += [*epoch_of(1, 1, 0.4), turn(None, Stop(1, "", "pruned"))]
    rests = fold(*begun, paused(0, 1.25, 0.6), turn(None, Stop(0, "", "complete")))
    assert rests.best == Best(0, 2, 0, 0.6, is_partial=True)
    goes_on = [*begun, paused(0, 1.25, 0.6, Train(0, 0)), turn(None, *again)]
    stop = turn(None, Stop(0, "", "complete"))
    assert fold(*goes_on, stop).best == Best(0, 2, 0, 0.6, is_partial=True, check=1)
    unscored = fold(*goes_on, paused(0, 1.75, None), stop)
    assert unscored.best == Best(0, 2, 0, 0.6, is_partial=True, check=1)
    of_last = fold(*goes_on, *epoch_of(0, 2, 0.5), stop, keep="last")
    assert of_last.best == Best(0, 2, 1, 0.5)
    twice = fold(*goes_on, paused(0, 1.75, 0.7, Train(0, 0)), stop)
    assert twice.best == Best(0, 2, 0, 0.7, is_partial=True, check=2)


def test_what_a_run_has_spent_is_known_as_of_its_last_unit() -> None:
    unit = trained(0, 1, 0, 1, seconds=50.0, worker_seconds=400.0)
    record = fold(asked(0, decisions=[Train(0, 5)]), unit)
    assert (record.seconds, record.worker_seconds) == (50.0, 400.0)


def test_what_the_store_holds_of_a_unit_is_trained() -> None:
    begun = [asked(0, decisions=[Train(0, 2)]), *epoch_of(0, 1, 0.2)]
    stored = StatesFound(0, (StoredState(1, 1, 0, (1, 0), 4, 0.5),))
    record = fold(*begun, stored, PartFound(0, 0.25))
    assert record.trials[0].progress(N_SHARDS) == 1.125
    assert record.trials[0].place(N_SHARDS) == StatePlace(2, 0, is_partial=True)


def test_a_clone_goes_on_from_the_sources_configuration() -> None:
    record = searched(3, 1)
    record.configure({n: {"lr": n / 10, "net": "a"} for n in range(3)})
    record.add(turn(None, Clone(0, 1, {"lr": 0.7})))
    assert record.trials[1].config == {"lr": 0.7, "net": "a"}
    record.add(turn(None, Clone(1, 2, {"lr": 0.9})))
    adoption = record.trials[2].adoptions[-1]
    assert (adoption.after, adoption.source, adoption.source_epoch, adoption.root) == (1, 1, 1, 0)
    live = {n: dict(record.trials[n].config) for n in range(3)}
    record.configure({n: {"lr": n / 10, "net": "a"} for n in range(3)})
    assert {n: record.trials[n].config for n in range(3)} == live


def test_what_a_copy_is_worth_is_the_merit_of_its_source() -> None:
    """The first of equal trials wins, but not by a state that another one has reached."""
    drawn = [asked(0, 1, 2, decisions=[Train(n, 1) for n in range(3)])]
    ended = [entry for n, value in enumerate((0.1, 0.5, 0.9)) for entry in epoch_of(n, 1, value)]
    record = fold(*drawn, *ended)
    record.configure({n: {"lr": n / 10, "net": "a"} for n in range(3)})
    copies = turn(None, Clone(2, 0, {"lr": 0.7}), *(Train(n, 1) for n in range(3)))
    record.add(copies)
    assert record.leading is record.trials[2]
    for entry in [*epoch_of(0, 2, 0.4), *epoch_of(1, 2, 0.6), *epoch_of(2, 2, 0.7)]:
        record.add(entry)
    stops = [turn(None, Stop(n, "", "complete")) for n in range(3)]
    for entry in stops[:2]:
        record.add(entry)
    assert record.best == Best(0, 1, 1, 0.9)  # its source may still come to nothing
    kept = record.trials[0]
    assert config_kept(record, kept) == {"lr": 0.2, "net": "a"}  # that of its source
    assert kept.config == {"lr": 0.7, "net": "a"}
    record.add(stops[2])
    assert record.best == Best(2, 1, 1, 0.9)
    assert [trial.number for trial in ranked(record)] == [2, 0, 1]
    record.configure({n: {"lr": n / 10, "net": "a"} for n in range(3)})
    assert config_kept(record, kept) == {"lr": 0.2, "net": "a"}


def test_a_trial_that_betters_its_copy_has_the_merit() -> None:
    drawn = [asked(0, 1, decisions=[Train(n, 1) for n in range(2)])]
    record = fold(*drawn, *epoch_of(0, 1, 0.1), *epoch_of(1, 1, 0.5))
    record.configure({n: {"lr": n / 10} for n in range(2)})
    for entry in [turn(None, Clone(1, 0, {"lr": 0.7}), Train(0, 1)), *epoch_of(0, 2, 0.6)]:
        record.add(entry)
    assert config_kept(record, record.trials[0]) == {"lr": 0.7}
    record.add(turn(None, Clone(0, 1, {}), Train(1, 1)))
    assert config_kept(record, record.trials[1]) == {"lr": 0.7}
    assert record.trials[1].config == {"lr": 0.7}


def test_a_trial_that_goes_on_from_another_breaks_the_constraints_that_this_one_breaks() -> None:
    drawn = replace(asked(0, 1, decisions=[Train(n, 1) for n in range(2)]), infeasible=(0,))
    record = fold(drawn, *epoch_of(0, 1, 0.9), *epoch_of(1, 1, 0.5))
    assert record.leading is record.trials[1]
    record.add(turn(None, Clone(1, 0, {"lr": 0.7}), Train(0, 1)))
    for entry in epoch_of(0, 2, 0.6):
        record.add(entry)
    assert record.leading is record.trials[0]


@pytest.mark.parametrize(
    "decision",
    [
        Train(7, 1),
        Stop(7, ""),
        Train(1, 1),
        Stop(1, ""),
        Clone(0, 1, {}),
        Clone(1, 0, {}),
        Clone(0, 2, {}),
    ],
)
def test_what_cannot_be_is_refused(decision: Decision) -> None:
    record = searched(3, 1)
    record.add(turn(None, Stop(1, ""), Train(2, 1)))
    with pytest.raises(SearchError, match=r"trial [127]"):
        record.decide([decision])


def test_orders_of_visits_are_those_of_epochs_that_came_to_their_end() -> None:
    record = fold(
        asked(0, decisions=[Train(0, 3)]), *epoch_of(0, 1, 0.5), trained(0, 2, 0, 1),
        StatesFound(0, (
            StoredState(2, 1, 0, (1, 0), 4, 1.5, digest="ab"), StoredState(3, 0, 0, (0,), 4, 1.0),
        )),
    )  # fmt: skip
    assert record.visits() == {(0, 1): (1, 0), (0, 2): (1, 0)}
    assert record.order(0, 3) is None
    tallies = record.trials[0].tallies
    assert (tallies[2].digest, tallies[2].train_loss) == ("ab", 1.0)
    assert tallies[3].begun.visits == (0,)


def test_a_visit_that_only_the_store_knows_has_its_row_once() -> None:
    """A driver was killed before it heard of two visits whose state was stored."""
    heard = [replace(trained(0, 2, 0, 1), start=1001.0, stop=1002.0, seconds=2.0)]
    begun: list[Entry] = [SessionBegun(1000.0, 0.0), asked(0, decisions=[Train(0, 2)])]
    record = fold(
        *begun, *epoch_of(0, 1, 0.2), *heard, SessionBegun(9000.0, 2.0),
        # The first one's states may be those of another trial: the epoch was reported.
        StatesFound(0, (StoredState(1, 1, 1, (0, 1), 4, 0.5), StoredState(2, 1, 0, (1, 0), 4))),
        scored(0, 2, 0, 0.5),
    )  # fmt: skip
    timeline = tables.timeline(record).query("epoch == 2")
    rows = [(u.kind, u.position, u.shard, u.worker, u.recovered) for u in timeline.itertuples()]
    expected = [("train", 0, 1, "w", False), ("train", 1, 0, None, True)]
    assert [row[:3] + row[4:] for row in rows[:2]] == [row[:3] + row[4:] for row in expected]
    assert timeline.worker.isna().tolist() == [False, True, False]
    assert timeline.stop.tolist()[:2] == [1002.0, 9000.0]
    assert tables.timeline(record).query("epoch == 1 and kind == 'train'").recovered.sum() == 0
    record.add(replace(trained(0, 2, 1, 0), start=9001.0, stop=9002.0))  # it was damaged, too
    last = tables.timeline(record).query("epoch == 2 and kind == 'train'")
    assert last.worker.tolist() == ["w", "w"]
    assert last.attempts.tolist() == [1, 1]


def test_a_store_that_is_behind_takes_visits_back_and_leaves_scores() -> None:
    entries = epoch_of(0, 1, 0.5)[:-2]  # all but one score and the report
    record = fold(asked(0, decisions=[Train(0, 1)]), *entries)
    record.add(StatesFound(0, (StoredState(1, 0, 1, (1,), 4, 0.5),)))
    begun = record.trials[0].tallies[1].begun
    assert begun.visits == (1,)
    assert begun.scored == {0}
    assert record.order(0, 1) == (1, 0), "what was scored came of this order"


def test_a_run_that_was_interrupted_has_no_best_trial_to_compare() -> None:
    then, now = searched(3, 2), searched(3, 2)
    now.add(turn(None, *(Stop(trial, "the end", "complete") for trial in range(3)), Finish()))
    assert then.best is None
    assert now.best is not None
    assert differences(then, now) == []


def test_differences_are_told_by_epoch() -> None:
    one, other = searched(3, 2), searched(3, 2)
    assert differences(one, other) == []
    epochs = other.trials
    epochs[0].epochs[1] = EpochRecord(2, 9.0, {"f1": 9.0}, 0.5, 2.0, "21")
    epochs[1].epochs[0] = EpochRecord(1, 1.1, {"f1": 1.1}, 0.5, 2.0, "other")
    epochs[2].epochs.pop()
    assert differences(one, other) == [
        "trial 0, epoch 2: {'f1': 0.2} then, {'f1': 9.0} now",
        "trial 1, epoch 1: the same metrics, another state",
        "trial 2, epoch 2: only one of the runs has it",
    ]


def test_nan_is_no_difference() -> None:
    one, other = searched(1, 1), searched(1, 1)
    for record in (one, other):
        record.trials[0].epochs[0] = EpochRecord(1, 0.1, {"f1": math.nan}, math.nan, 2.0)
    assert differences(one, other) == []


def test_sessions_rounds_loads_and_notes_are_kept() -> None:
    record = fold(
        SessionBegun(5.0, 0.0),
        RoundSent(1, 6.0, ((0, 1, 3), (4, 2, 3))),
        ShardLoaded("w", 1),
        Note("look"),
        FlowState({}),
    )
    assert (len(record.sessions), record.loads, record.notes) == (1, [("w", 1)], ["look"])
    assert record.rounds[0].epochs == {(0, 1), (0, 2), (4, 2)}


def piece(share: float, start: float, stop: float, **about: Any) -> PieceRecord:
    told = {"share": share, "losses": (1, 0.5, 0.5), **about}
    return PieceRecord(Unit("train", 0, 1, 0), "w", 0, start, stop, True, **told)


PAIR = {"members": ("v",)}


def switches(*entries: Entry) -> list[float]:
    began = [asked(0, decisions=[Train(0, 4)])]
    return read_into(Record("r", N_SHARDS), [*began, *entries]).switches


def test_a_switch_costs_the_time_in_which_the_trial_did_not_train() -> None:
    first = piece(0.25, start=1.0, stop=5.0, save_seconds=0.5)
    second = piece(0.5, start=6.0, stop=9.0, ready_seconds=2.0, **PAIR)
    last = replace(trained(0, 1, 0, 0), start=9.5, stop=12.0, ready_seconds=0.25)
    # It ceased at 4.5 and trained again from 8.0 on; then from 9.0 to 9.75 it was idle.
    assert switches(first, second, last) == [3.5, 0.75]


def test_what_is_no_switch_is_not_counted_as_one() -> None:
    first = piece(0.25, start=1.0, stop=5.0)
    alike = piece(0.5, start=60.0, stop=90.0)
    other = piece(0.5, start=60.0, stop=90.0, **PAIR)
    assert switches(first, alike) == []
    assert switches(piece(0.0, start=1.0, stop=5.0), other) == []  # it had not begun to train
    assert switches(first, replace(other, recovered=True)) == []
    pause, train = turn(None, Pause(0)), turn(None, Train(0, 0, gang=2))
    assert switches(pause, first, train, other) == []
    assert switches(first, pause, train, other) == []
    assert switches(turn(None, Train(0, 0, seconds=4.0)), first, train, other) == []
    assert switches(first, train, other) == [55.0]


def test_a_flow_hears_of_a_switch_once() -> None:
    reported = turn(Reported(0, 1, 0.5, {}, 1.0, switches=(3.5,)))
    record = read_into(Record("r", N_SHARDS), [asked(0, decisions=[Train(0, 4)])])
    record.trials[0].switches += [3.5, 4.5]
    record.add(reported)
    assert record.trials[0].n_switches_told == 1


def extended(direction: Any, values: Sequence[float], goes_on: Sequence[int], top_k: int) -> Record:
    """Make the record of a run whose trials had an epoch each, and of which some train on."""
    record = Record("run", N_SHARDS, direction, top_k=top_k)
    trials = tuple(range(len(values)))
    record.add(turn(Context(1), Ask(len(values))))
    started = [Train(trial, 1) for trial in trials]
    record.add(turn(Asked(trials), *started, params={trial: {} for trial in trials}))
    for trial, value in enumerate(values):
        end = Stop(trial, "the end", "complete")
        record.add(turn(Reported(trial, 1, value, {}, 1.0), end))
    record.add(turn(None, Finish()))
    more = Extended(0, 3, len(values), can_train_on(record))
    record.add(turn(more, *(Train(trial, 2) for trial in goes_on)))
    return record


def test_a_trial_that_breaks_a_constraint_is_worth_nothing_to_a_flow_that_goes_on() -> None:
    record = Record("run", N_SHARDS)
    drawn = replace(asked(0, 1, decisions=[Train(0, 1), Train(1, 1)]), infeasible=(0,))
    record.add(drawn)
    for trial, value in enumerate([0.1, 0.5]):
        end = Stop(trial, "the end", "complete")
        record.add(turn(Reported(trial, 1, value, {}, 1.0), end))
    best, worst = can_train_on(record)
    assert (best.trial, best.value) == (1, 0.5)
    assert worst.trial == 0
    assert math.isnan(worst.value)


@given(
    st.sampled_from(["minimize", "maximize"]),
    st.lists(st.integers(0, 5).map(float), min_size=1, max_size=6),
    st.integers(1, 3),
    st.data(),
)
def test_a_trial_that_trains_on_and_comes_to_nothing_is_worth_what_it_was(
    direction: Any, values: list[float], top_k: int, data: st.DataObject
) -> None:
    """It fails, is stopped, or the run is given up: the best ones are those of before."""
    goes_on = data.draw(st.lists(st.sampled_from(range(len(values))), unique=True))
    before = extended(direction, values, [], top_k)
    record = extended(direction, values, goes_on, top_k)
    assert not {best.trial for best in record.top} & {*goes_on}
    assert [it.trial for it in can_train_on(before)] == [t.number for t in ranked(before)]
    for trial in goes_on:
        assert record.trials[trial].is_live
        assert record.trials[trial].n_decided == 3
        how = data.draw(st.sampled_from(["fail", "stop", "leave"]))
        if how == "fail":
            record.add(turn(TrialFailed(trial, "broken")))
            assert "broken" in record.trials[trial].warning
        elif how == "stop":
            record.add(turn(None, Stop(trial, "the time or the budget is over")))
    is_abandoned = data.draw(st.booleans())
    record.add(Abandoned(1.0, "given up") if is_abandoned else turn(None, Finish()))
    assert not record.failures
    assert [b.trial for b in record.top] == [b.trial for b in before.top]
    assert [t.number for t in ranked(record)] == [t.number for t in ranked(before)]
    assert record.n_epochs_decided == len(values)
    with pytest.raises(SearchError, match="trains trial 0, which is"):
        record.decide([Finish(), Train(0, 1)])


def test_a_trial_whose_state_was_dropped_is_kept_again_once_it_is_made_again() -> None:
    for n_units in range(N_SHARDS + 1):
        record = extended("maximize", [0.9, 0.8, 0.5], [0, 2], top_k=2)
        for position in range(n_units):
            unit = Unit("train", 2, 1, position)
            record.add(UnitRecord(unit, "w", position, 0.0, 1.0, hop=False, n_samples=1))
        record.add(turn(None, Stop(2, "the time or the budget is over")))
        is_there = n_units == N_SHARDS
        assert [best.trial for best in record.top] == ([1, 2] if is_there else [1])
        record.add(turn(None, Finish()))
        assert [best.trial for best in record.top] == [0, 1]
