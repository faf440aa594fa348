"""A script decides again what was decided, in whatever order the same things happen."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from dagsel.flow import (
    Add,
    Ask,
    Asked,
    Clone,
    Context,
    DeadlineReached,
    Decision,
    Ended,
    Event,
    Extended,
    Finish,
    Reported,
    Stop,
    Train,
    TrialFailed,
)
from dagsel.going_on import _other_configs
from dagsel.history.record import Record
from dagsel.history.script import Script, drawn, read_turns
from dagsel.history.trial import TrialRecord
from dagsel.messages import ENTRIES, Entry, Note, SessionBegun, Turn


def reported(trial: int, epoch: int) -> Reported:
    return Reported(trial, epoch, 0.5, {}, 1.0)


@st.composite
def runs(draw: st.DrawFn) -> list[Turn]:
    """Make the turns of a run in which trials train epoch by epoch, are cloned, end or fail."""
    chance = random.Random(draw(st.integers(0, 10**6)))
    n_trials = draw(st.integers(1, 4))
    turns = [Turn(None, (Ask(n_trials),))]
    turns.append(
        Turn(Asked(tuple(range(n_trials))), tuple(Train(trial, 1) for trial in range(n_trials)))
    )
    training, epochs = set(range(n_trials)), dict.fromkeys(range(n_trials), 0)
    paused: set[int] = set()
    while training:
        trial = chance.choice(sorted(training))
        training.remove(trial)
        if chance.random() < 0.15:
            turns.append(Turn(TrialFailed(trial, "broken"), ()))
            continue
        epochs[trial] += 1
        decisions: list[Decision] = []
        for other in sorted({trial, *paused}):
            what = chance.choice(["train", "stop", "pause", "clone"])
            if what == "clone" and other in paused:
                decisions.append(Clone(trial, other, {"lr": chance.random()}))
                what = "train"
            paused.discard(other)
            if what == "train" and epochs[other] < 4:
                decisions.append(Train(other, 1, chance.random()))
                training.add(other)
            elif what == "pause":
                paused.add(other)
            else:
                decisions.append(Stop(other, "rung", "complete"))
                if other == trial:
                    break
        turns.append(Turn(reported(trial, epochs[trial]), tuple(decisions)))
    last = turns[-1]
    turns[-1] = Turn(last.event, (*last.decisions, Finish()))
    return turns


def test_a_gang_is_no_larger_than_the_cluster_is_now() -> None:
    turns = (Turn(None, (Train(0, 1, gang=4),)), Turn(reported(0, 1), (Finish(),)))
    for n_workers, gang in ((1, 1), (3, 3), (8, 4)):
        assert list(Script(turns).start(Context(n_workers))) == [Train(0, 1, gang=gang)]


def play(script: Script, chance: random.Random) -> list[Decision]:
    """Let what was decided happen, each trial in its order, the trials in any."""
    decided = list(script.start(Context(1)))
    due: dict[int, int] = {}
    done: dict[int, int] = {}
    taken = 0
    while True:
        for decision in decided[taken:]:
            match decision:
                case Train(trial, epochs):
                    due[trial] = due.get(trial, 0) + epochs
                case Stop(trial):
                    due.pop(trial, None)
        taken = len(decided)
        if Finish() in decided:
            return decided
        ready = sorted(trial for trial, n in due.items() if done.get(trial, 0) < n)
        assert ready, "it waits for nothing"
        trial = chance.choice(ready)
        done[trial] = done.get(trial, 0) + 1
        decided += script.handle(reported(trial, done[trial]))


def of(decisions: Sequence[Decision], trial: int) -> list[Decision]:
    """List what concerns a trial, up to its end."""
    found: list[Decision] = []
    for decision in decisions:
        match decision:
            case Train(number, epochs) if number == trial:
                found += [Train(trial, 1, decision.priority)] * epochs
            case Stop(number) if number == trial:
                return [*found, decision]
            case Clone(source, target) if trial in (source, target):
                found.append(decision)
    return found


@given(turns=runs(), seed=st.integers(0, 10**6))
def test_each_trial_gets_the_same_decisions_in_the_same_order(turns: list[Turn], seed: int) -> None:
    decided = play(Script(tuple(turns)), random.Random(seed))
    assert decided.count(Finish()) == 1
    assert not any(isinstance(decision, Ask) for decision in decided)
    failed = {turn.event.trial for turn in turns if isinstance(turn.event, TrialFailed)}
    then = [decision for turn in turns for decision in turn.decisions]
    epochs = {t.event.trial: t.event.epoch for t in turns if isinstance(t.event, Reported)}
    for trial in range(4):
        again = of(decided, trial)
        n_epochs = sum(isinstance(decision, Train) for decision in again)
        assert n_epochs == epochs.get(trial, 0), "it trains what it had reported then"
        if trial not in failed and Finish() in then:
            expected = of(then, trial)
            assert again == expected
    order = [d for d in then if isinstance(d, Clone)]
    assert [d for d in decided if isinstance(d, Clone)] == order


def test_of_a_search_that_went_on_only_the_last_end_is_one() -> None:
    """Trial 0 trains on after its end, is stopped once, and what came before is no end."""
    turns = (
        Turn(None, (Train(0, 2), Train(1, 1))),
        Turn(reported(0, 1), ()),
        Turn(reported(0, 2), (Stop(0, "end", "complete"),)),
        Turn(reported(1, 1), (Stop(1, "end", "complete"), Finish())),
        Turn(Extended(1, 4, 1, (Ended(0, 2, 0.5),)), (Train(0, 2), Ask(1))),
        Turn(Asked((2,)), (Train(2, 1),)),
        Turn(reported(2, 1), (Stop(2, "end", "complete"),)),
        Turn(reported(0, 3), ()),
        Turn(reported(0, 4), (Stop(0, "end", "complete"), Finish())),
    )
    for seed in range(9):
        decided = play(Script(turns), random.Random(seed))
        assert decided.count(Finish()) == 1
        stops = [decision.trial for decision in decided if isinstance(decision, Stop)]
        assert sorted(stops) == [0, 1, 2]
        trained = [decision for decision in decided if isinstance(decision, Train)]
        assert sum(it.epochs for it in trained if it.trial == 0) == 4


def test_one_that_failed_as_it_trained_on_and_then_trained_on_again_goes_on() -> None:
    turns = (
        Turn(None, (Train(0, 1),)),
        Turn(reported(0, 1), (Stop(0, "end", "complete"), Finish())),
        Turn(Extended(0, 3, 1, (Ended(0, 1, 0.5),)), (Train(0, 2),)),
        Turn(reported(0, 2), ()),
        Turn(TrialFailed(0, "broken"), (Finish(),)),
        Turn(Extended(0, 4, 1, (Ended(0, 2, 0.5),)), (Train(0, 2),)),
        Turn(reported(0, 3), ()),
        Turn(reported(0, 4), (Stop(0, "end", "complete"), Finish())),
    )
    decided = play(Script(turns), random.Random(0))
    assert sum(it.epochs for it in decided if isinstance(it, Train)) == 4
    assert decided[-2:] == [Stop(0, "end", "complete"), Finish()]


def test_what_was_decided_and_never_trained_is_not_trained() -> None:
    turns = (
        Turn(None, (Train(0, 5), Train(1, 5))),
        Turn(reported(0, 1), ()),
        Turn(
            DeadlineReached(9.0),
            (Stop(0, "the time or the budget is over"), Stop(1, "late"), Finish()),
        ),
    )
    script = Script(turns)
    assert script.start(Context(1)) == [Train(0, 1)]
    assert script.handle(reported(0, 1)) == [
        Stop(0, "the time or the budget is over"), Stop(1, "late"), Finish()
    ]  # fmt: skip


def test_what_has_come_of_all_trials_is_not_gone_through_for_each_of_them() -> None:
    class Looked(set[tuple[int, int]]):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            raise AssertionError("the epochs of all trials are gone through")

    script = Script(
        (
            Turn(None, (Train(0, 1), Train(1, 1))),
            Turn(reported(0, 1), (Train(0, 2),)),
            Turn(reported(0, 2), ()),
            Turn(reported(1, 1), (Finish(),)),
        )
    )
    script.start(Context(n_workers=1))
    script.state.reported = Looked()
    assert script.handle(reported(0, 1)) == [Train(0, 1)]


def test_a_trial_that_fails_only_now_ends_it_and_is_told() -> None:
    script = Script((Turn(None, (Train(0, 1), Train(1, 1))), Turn(reported(0, 1), (Finish(),))))
    script.start(Context(1))
    assert script.handle(TrialFailed(0, "broken")) == [Finish()]
    assert script.state.astray == "trial 0 failed: broken"


def test_one_that_failed_then_fails_again_or_is_stopped() -> None:
    turns = (
        Turn(None, (Train(0, 2), Train(1, 1))),
        Turn(reported(0, 1), ()),
        Turn(TrialFailed(0, "broken"), ()),
        Turn(reported(1, 1), (Stop(1, "end", "complete"), Finish())),
    )
    events: list[list[Event]] = [
        [reported(0, 1), reported(1, 1)],
        [reported(0, 1), TrialFailed(0, "broken"), reported(1, 1)],
    ]
    for heard in events:
        script = Script(turns)
        decided = script.start(Context(1))
        assert decided == [Train(0, 1), Train(1, 1)]
        for event in heard:
            decided += script.handle(event)
        assert decided[-2:] == [Stop(1, "end", "complete"), Finish()]
        assert script.state.astray == ""


def test_one_that_failed_as_it_trained_on_ends_as_it_had_ended_before() -> None:
    turns = (
        Turn(None, (Train(0, 1),)),
        Turn(reported(0, 1), (Stop(0, "the end", "complete"), Finish())),
        Turn(Extended(), (Train(0, 1),)),
        Turn(TrialFailed(0, "broken"), (Finish(),)),
    )
    script = Script(turns)
    script.start(Context(1))
    (stop, end) = script.handle(reported(0, 1))
    assert (stop, end) == (Stop(0, "the recorded run's failed: broken", "complete"), Finish())


def test_a_trial_that_was_added_is_not_drawn_once_more() -> None:
    turns = (
        Turn(None, (Ask(1),)),
        Turn(Asked((0,)), (Train(0, 1), Add({"x": 0.5}))),
        Turn(Asked((1,)), (Train(1, 1),)),
        Turn(reported(0, 1), ()),
        Turn(reported(1, 1), (Finish(),)),
    )
    assert Script(turns).start(Context(2)) == [Train(0, 1), Train(1, 1)]


def test_all_trials_are_drawn_with_what_they_were_drawn_with() -> None:
    one = drawn(
        [
            Turn(None, (Ask(2),)),
            Turn(Asked((0, 1), configs=({"x": 0.1}, {"x": 0.2})), (), params={0: {}, 1: {}}),
            Turn(reported(0, 1), ()),
            Turn(Asked((2,)), (), params={2: {"x": 1}}, infeasible=(2,), attrs={2: {"by": "me"}}),
        ]
    )
    assert one.event == Asked((0, 1, 2), configs=({"x": 0.1}, {"x": 0.2}, {}))
    assert (one.params, one.infeasible) == ({0: {}, 1: {}, 2: {"x": 1}}, (2,))
    assert one.attrs == {2: {"by": "me"}}


def test_one_that_fails_sooner_than_then_is_not_stopped_any_more() -> None:
    turns = (
        Turn(None, (Train(0, 1), Train(1, 2))),
        Turn(reported(1, 1), ()),
        Turn(TrialFailed(0, "broken"), ()),
        Turn(reported(1, 2), (Stop(1, "end", "complete"), Finish())),
    )
    script = Script(turns)
    script.start(Context(1))
    decided = script.handle(TrialFailed(0, "broken"))
    for epoch in (1, 2):
        decided += script.handle(reported(1, epoch))
    assert decided == [Stop(1, "end", "complete"), Finish()]


def test_one_that_fails_before_what_it_had_reported_then_ends_it_and_is_told() -> None:
    turns = (
        Turn(None, (Train(0, 2),)),
        Turn(reported(0, 1), ()),
        Turn(TrialFailed(0, "broken"), (Finish(),)),
    )
    script = Script(turns)
    script.start(Context(1))
    assert script.handle(TrialFailed(0, "killed")) == [Finish()]
    assert script.state.astray == "trial 0 failed: killed"


def test_a_run_that_never_ended_ends_with_its_last_turn() -> None:
    script = Script((Turn(None, (Train(0, 1),)), Turn(reported(0, 1), (Train(0, 3),))))
    script.start(Context(1))
    assert script.handle(reported(0, 1)) == [Finish()]


def test_turns_are_read_from_a_journal() -> None:
    turns = [Turn(None, (Ask(2),)), Turn(reported(0, 1), (Stop(0, "x"), Finish()))]
    entries: list[Entry] = [SessionBegun(0.0, 0.0), turns[0], Note("look"), turns[1]]
    assert read_turns([ENTRIES.encode(entry) for entry in entries]) == tuple(turns)


def test_a_configuration_with_nan_is_the_same_in_a_replay() -> None:
    configs = ({"a": math.nan, "b": -math.inf}, {"a": math.nan})
    written = json.dumps(ENTRIES.encode(Turn(Asked((0, 1), configs=configs), ())))
    turn = ENTRIES.decode(json.loads(written))
    now = ({"a": math.nan, "b": -math.inf}, {"a": 1.0})
    record = Record("run", trials={n: TrialRecord(n, config, {}) for n, config in enumerate(now)})
    assert isinstance(turn, Turn)
    (told,) = _other_configs(turn, record)
    assert told.startswith("trial 1: the space makes {'a': 1.0} of its parameters")
