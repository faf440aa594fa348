"""The runner performs what is decided once it is written, and tells the flow what came of it.

- A value that is no number is not reported: the trial fails.
- What is decided twice in a turn counts twice; what is decided after the end does not count.
- The state at the end of an epoch stays until the next one is reported, and no longer.
- The engine hears of a trial's priority before its units, and only when it changes.
- The flow hears of workers that came and went, never of none.
- The budget is that of all sessions; the flow's state is kept every so many turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from dagsel.dispatch.events import PriorityChanged
from dagsel.driver import runner
from dagsel.errors import AllTrialsFailedError, RunDirLockedError
from dagsel.flow import (
    Ask,
    Asked,
    Clone,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Keep,
    Reported,
    Stop,
    Tick,
    Train,
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.history.record import Record
from dagsel.messages import ENTRIES, Message, Note
from dagsel.planning.bill import Bill
from dagsel.session import LockedJournal
from dagsel.storage import RunDir

from .hand_engine import HandEngine, Kept, epoch_of, read_into, search


def quiet(engine: HandEngine) -> list[Message]:
    return []


def test_what_is_decided_is_written_before_it_is_done() -> None:
    done = search(
        [Ask(1)],
        lambda event: (
            [Train(0, 1)] if isinstance(event, Asked) else [Stop(0, "", "complete"), Finish()]
        ),
        lambda engine: epoch_of(0, 1, 0.5),
    )
    (train,) = (e for e in done.kept.entries if "Train" in str(e))
    n_written = done.kept.entries.index(train) + 1
    before = done.engine.told[: done.engine.told.index(("submit", [(0, range(1, 2))]))]
    assert max(n for kind, n in before if kind == "written") >= n_written
    assert [t.state.name for t in done.study.study.trials] == ["COMPLETE"]


@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_a_value_that_is_no_number_fails_its_trial_and_is_not_reported(value: float) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 2)]
            case Reported():
                return [Stop(0, "", "complete"), Finish()]
        return [Finish()]

    done = search([Ask(1)], answer, lambda engine: epoch_of(0, 1, value))
    (trial,) = done.study.study.trials
    if math.isnan(value):
        assert isinstance(done.events[-1], TrialFailed)
        assert "NaN after epoch 1" in done.events[-1].reason
        assert trial.state.name == "FAIL"
        assert trial.intermediate_values == {}
        assert done.record.trials[0].epochs == []
    else:
        assert trial.intermediate_values == {0: 0.5}


def test_epochs_that_are_decided_twice_in_a_turn_are_all_trained() -> None:
    done = search(
        [Ask(1)],
        lambda event: [Train(0, 1), Train(0, 2)] if isinstance(event, Asked) else [Finish()],
        lambda engine: epoch_of(0, 1, 0.5),
    )
    assert done.told("submit") == [[(0, range(1, 4))]]


def test_a_priority_is_told_before_the_units_of_its_trial_and_when_it_changes() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1), Train(1, 1, priority=2.0)]
            case Reported(1, epoch) if epoch < 3:
                return [Train(1, 1, priority=2.0 if epoch == 1 else 0.0)]
            case Reported(1, 3):
                return [Finish()]
        return []

    def both(engine: HandEngine) -> Sequence[Message]:
        return epoch_of(0, 1, 0.5) + epoch_of(1, 1, 0.5)

    done = search(
        [Ask(2)], answer, both, *(lambda engine, e=e: epoch_of(1, e, 0.5) for e in (2, 3))
    )
    told = [about for kind, about in done.engine.told if kind in ("tell", "submit")]
    assert told == [
        PriorityChanged(1, 2.0),
        [(0, range(1, 2)), (1, range(1, 2))],
        [(1, range(2, 3))],
        PriorityChanged(1, 0.0),
        [(1, range(3, 4))],
    ]


def test_a_session_that_goes_on_tells_the_priorities_of_the_one_before() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1), Train(1, 1, priority=2.0)]
            case Reported(1):
                return [Finish()]
        return []

    def dies(engine: HandEngine) -> Sequence[Message]:
        raise KeyboardInterrupt

    engine = HandEngine(())
    kept = Kept(engine)
    with pytest.raises(KeyboardInterrupt):
        search([Ask(2)], answer, dies, engine=engine, journal=kept)
    record = read_into(Record("run"), map(ENTRIES.decode, kept.entries))
    done = search([], answer, lambda engine: epoch_of(1, 1, 0.5), record=record)
    told = [about for kind, about in done.engine.told if kind in ("tell", "submit")]
    assert told == [PriorityChanged(1, 2.0), [(0, range(1, 2)), (1, range(1, 2))]]


def test_nothing_is_drawn_after_the_end() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 2), Train(1, 2)]
            case Reported(0):
                return [Ask(1)]
            case _:  # in the same turn
                return [Finish()]

    done = search([Ask(2)], answer, lambda engine: epoch_of(0, 1, 0.5) + epoch_of(1, 1, 0.5))
    assert len(done.study.study.trials) == 2
    assert done.record.finished


@pytest.mark.parametrize(
    ("keep", "values", "dropped"),
    [
        ("last", (0.5, 0.6, 0.7), {2: [1], 3: [2]}),
        ("best", (0.7, 0.6, 0.5), {2: [1], 3: [2]}),
        ("best", (0.5, 0.6, 0.7), {2: [], 3: [2]}),
        ("best", (0.6, 0.5, 0.7), {2: [1], 3: []}),
        ("best", (0.5, 0.5, 0.5), {2: [], 3: [2]}),  # of equal ones the first
    ],
)
def test_the_state_of_an_epoch_stays_until_the_next_one_is_reported_or_it_is_not_the_best(
    keep: Keep, values: tuple[float, ...], dropped: dict[int, list[int]]
) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 4)]
            case Reported(_, 4):  # all but the best is dropped at the end of the run
                return [Stop(0, "", "complete"), Finish()]
        return []

    done = search(
        [Ask(1)],
        answer,
        *(lambda engine, e=epoch: epoch_of(0, e, (*values, 0.9)[e - 1]) for epoch in (1, 2, 3, 4)),
        record=Record("run", n_shards=1, keep=keep),
    )
    told = [step for step in done.engine.told if step[0] in ("delete", "release")]
    assert told.pop() == ("release", (0, 4))
    assert told == [
        step
        for epoch in (1, 2, 3)
        for step in [
            ("release", (0, epoch)),
            *(("delete", (0, old, 0)) for old in dropped.get(epoch, [])),
        ]
    ]


def test_a_clone_is_made_before_the_state_that_it_needs_is_dropped() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 3), Train(1, 1)]
            case Reported(1, 1):
                return [Clone(0, 1, {"x": 0.5}), Train(1, 1)]
            case Reported(_, 3):
                return [Finish()]
        return []

    def both(engine: HandEngine) -> Sequence[Message]:
        return epoch_of(0, 1, 0.5) + epoch_of(1, 1, 0.5)

    later = [lambda engine, e=epoch: epoch_of(0, e, 0.5 - 0.1 * e) for epoch in (2, 3)]
    done = search([Ask(2)], answer, both, *later)
    assert done.told("save") == [(1, 1, 0)]
    assert done.engine.told.index(("save", (1, 1, 0))) < done.engine.told.index(
        ("delete", (0, 1, 0))
    )


def test_a_clone_is_made_before_its_source_is_dropped_also_after_a_crash_in_between() -> None:
    class Dies(Kept):
        def save(self, *about: Any) -> None:
            raise KeyboardInterrupt

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(trial, 1) for trial in range(3)]
            case Reported(2, 1):
                return [Stop(2, "", "complete")]
            case Reported(1, 1):
                return [Clone(0, 1, {}), Train(1, 1), Stop(0, "", "complete")]
            case Reported(1, 2):
                return [Finish()]
        return []

    def all_three(engine: HandEngine) -> Sequence[Message]:
        return epoch_of(2, 1, 0.1) + epoch_of(0, 1, 0.2) + epoch_of(1, 1, 0.3)

    engine = HandEngine(())
    dies = Dies(engine)
    with pytest.raises(KeyboardInterrupt):
        search([Ask(3)], answer, all_three, engine=engine, states=dies, journal=dies)
    record = read_into(Record("run"), map(ENTRIES.decode, dies.entries))
    done = search([], answer, lambda engine: epoch_of(1, 2, 0.4), record=record)
    assert done.told("save") == [(1, 1, 0)]
    told = done.engine.told
    assert told.index(("save", (1, 1, 0))) < told.index(("drop", 0))


def test_the_flow_hears_of_workers_but_never_of_none() -> None:
    def become(n_workers: int) -> Any:
        def change(engine: HandEngine) -> list[Message]:
            engine.n_workers = n_workers
            return []

        return change

    def answer(event: Event) -> list[Decision]:
        return [Finish()] if isinstance(event, WorkersChanged) and event.n_workers == 5 else []

    done = search([Wake(1e9)], answer, *map(become, (0, 2, 3, 0, 3, 5)))
    assert done.events == [WorkersChanged(3, seconds=0.0), WorkersChanged(5, seconds=0.0)]


def test_the_flow_is_woken_when_it_wants_to_be_and_once() -> None:
    def pass_time(engine: HandEngine) -> list[Message]:
        engine.seconds += 4.0
        return []

    def answer(event: Event) -> list[Decision]:
        return [Finish()] if event == Tick(20.0) else [Wake(20.0)]

    done = search([Wake(10.0)], answer, *(pass_time,) * 5)
    assert done.events == [Tick(12.0), Tick(20.0)]


def test_a_tick_that_a_later_wish_replaces_is_not_told() -> None:
    def at_ten(engine: HandEngine) -> Sequence[Message]:
        engine.seconds = 10.0
        return epoch_of(0, 1, 0.5)

    def at_twenty(engine: HandEngine) -> Sequence[Message]:
        engine.seconds = 20.0
        return []

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1)]
            case Reported():  # in the moment in which it was to be woken
                return [Wake(20.0)]
        return [Finish()]

    done = search([Ask(1), Wake(10.0)], answer, at_ten, at_twenty)
    assert done.events[2:] == [Tick(20.0)]


def test_the_budget_is_that_of_all_sessions() -> None:
    def pass_time(engine: HandEngine) -> list[Message]:
        engine.seconds += 4.0
        return []

    def spent(before: float) -> list[Event]:
        record = Record("run")
        record.worker_seconds, record.context = before, Context(n_workers=1)
        record.n_workers = 1
        engine = HandEngine((), n_workers=1, bill=Bill().join("a", at=0.0))
        begin: dict[str, Any] = {"engine": engine, "record": record, "budget_s": 60.0}
        return search([], lambda event: [], *(pass_time,) * 20, **begin).events

    assert spent(50.0) == [DeadlineReached(12.0)]
    assert spent(0.0) == [DeadlineReached(60.0)]


def test_the_flows_state_is_kept_every_so_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TURNS_PER_SNAPSHOT", 3)

    def pass_time(engine: HandEngine) -> list[Message]:
        engine.seconds += 1.0
        return []

    def answer(event: Event) -> list[Decision]:
        assert isinstance(event, Tick)
        return [Finish()] if event.seconds >= 14.0 else [Wake(event.seconds + 1.0)]

    done = search([Wake(1.0)], answer, *(pass_time,) * 14)
    kept = [entry["state"]["n_events"] for entry in done.kept.entries if "state" in entry]
    # The start of the search was the first turn; then after 3 more, or half as many as before.
    assert kept == [2, 5, 8, 12]


def test_a_driver_that_has_lost_its_lock_writes_nothing(tmp_path: Any) -> None:
    folder = RunDir(str(tmp_path))
    folder.claim("run", {})
    with folder.lock("run", beat_s=0.01) as lock:
        journal = LockedJournal(folder.journal, lock)
        journal.append([Note("1")])
        other = (tmp_path / "lock.json").read_text().replace(lock.holder.token, "another")
        (tmp_path / "lock.json").write_text(other)
        lock._thread.join(timeout=30)  # it ends when it sees the other one's lock
        with pytest.raises(RunDirLockedError, match="in use by the driver"):
            journal.append([Note("2")])
    assert [entry["text"] for entry in folder.journal.read()] == ["1"]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_what_comes_in_together_is_decided_on_before_anything_is_done(is_stopped: bool) -> None:
    """Whether or not one of the trials has been stopped meanwhile."""

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(trial, 2) for trial in range(3)]
            case Reported(1):
                return [Stop(0, "worse")] if is_stopped else []
            case Reported(2):
                return [Finish()]
        return []

    def together(engine: HandEngine) -> Sequence[Message]:
        return [message for trial in (1, 0, 2) for message in epoch_of(trial, 1, 0.5)]

    done = search([Ask(3)], answer, together)
    reports = [entry for entry in done.kept.entries if "Reported" in str(entry)]
    assert len(reports) == (2 if is_stopped else 3)
    assert len({entry["pass"] for entry in reports}) == 1


def test_a_flow_that_draws_for_each_trial_that_fails_ends_in_time() -> None:
    """All of them fail before they are sent, so nothing else happens in between."""
    engine = HandEngine(())

    def check(config: Any) -> None:
        engine.seconds += 1.0
        raise ValueError("too wide")

    def answer(event: Event) -> list[Decision]:
        return [Ask(1)] if isinstance(event, TrialFailed) else []

    with pytest.raises(AllTrialsFailedError, match=r"\(9\) failed alike"):
        search([Ask(1)], answer, lambda engine: [], engine=engine, check=check, deadline_s=9.0)
    assert engine.seconds == 9.0
