"""Laws of the states that a search goes on from: the newest of use, and another trial's.

What lies after a state that a trial goes on from is removed, and what a trial is told to train
waits until its lost state is made again.
"""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.driver.recovery import StoredStates
from dagsel.driver.scoring import Score, Scores
from dagsel.errors import CheckpointNotFoundError
from dagsel.flow import (
    Ask,
    Asked,
    Decision,
    Event,
    Finish,
    Paused,
    Reported,
    Train,
    WorkersChanged,
)
from dagsel.history.record import Record
from dagsel.history.tally import EpochTally
from dagsel.history.trial import EpochRecord, TrialRecord
from dagsel.messages import Message, StatePlace, StoredState, TrialReport
from dagsel.storage import RunDir
from tests.driver.hand_engine import HandEngine, epoch_of, search

BUSY = settings(deadline=None, max_examples=60)
N = 2
PLACES = [(epoch, position) for epoch in (1, 2, 3) for position in range(N)]


def stored(**trials: set[tuple[int, int]]) -> StoredStates:
    """Return the states of trials t0, t1, ... at places."""
    states = RunDir(f"memory://{uuid.uuid4().hex}").states
    for name, places in trials.items():
        for place in sorted(places):
            states.save(int(name[1:]), *place, f"{name} {place}".encode(), meta(place))
    record = Record("run", n_shards=N, direction="minimize")
    scores = Scores(states, ("loss",))
    return StoredStates(states, record, lambda blob, config, new: blob + b" adapted", scores)


def meta(place: tuple[int, int], **about: Any) -> dict[str, Any]:
    visits = list(range(place[1] + 1))
    return {
        "shard": place[1],
        "visits": visits,
        "n_samples": 1,
        "loss": 0.5,
        **about,
    }


def trial(number: int, n_epochs: int) -> TrialRecord:
    epochs = [EpochRecord(epoch, 0.5, {}, 0.5, 1.0) for epoch in range(1, n_epochs + 1)]
    return TrialRecord(number, {"x": number}, {}, epochs=epochs, n_decided=3)


@BUSY
@given(
    st.sets(st.sampled_from(PLACES)),
    st.sets(st.sampled_from(PLACES), max_size=2),
    st.integers(0, 1),
)
def test_a_trial_goes_on_from_the_newest_state_before_which_all_is_known(
    places: set[tuple[int, int]], damaged: set[tuple[int, int]], n_reported: int
) -> None:
    found = stored(t0=places)
    for place in places & damaged:  # what it visited cannot be
        found.states.save(0, *place, b"", meta(place, visits=[0] * (place[1] + 1) + [0]))
    readable = places - damaged

    def is_of_use(place: tuple[int, int]) -> bool:
        return all((epoch, N - 1) in readable for epoch in range(n_reported + 1, place[0]))

    states = [(state.epoch, state.position) for state in found.look_up(trial(0, n_reported))]
    of_use = {place for place in readable if is_of_use(place)}
    assert bool(states) is bool(of_use)
    if states:
        *ends, newest = states
        assert newest == max(of_use)
        assert ends == [(epoch, N - 1) for epoch in range(n_reported + 1, newest[0])]


@pytest.mark.parametrize("n_epochs", [0, 1, 2])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_clone_has_the_state_at_the_end_of_the_epoch_that_it_goes_on_from(
    n_epochs: int, is_there: bool
) -> None:
    ends = {(epoch, N - 1) for epoch in (1, 2) if is_there or epoch != 2}
    found = stored(t0=ends | {(3, 0)}, t1={(e, N - 1) for e in range(1, n_epochs + 1)})
    source, target = trial(0, 2), trial(1, n_epochs)
    found.record.trials.update({0: source, 1: target})
    target.adopt(source, {"x": 7})
    for tell in (found.adopt_again, found.adopt_again):  # the second time it is there already
        why = tell(target)
        if is_there:
            assert why == ""
            blob, about = found.states.load(1, n_epochs, N - 1)
            assert blob == b"t0 (2, 1) adapted"
            assert about["adoptions"] == 1
        else:
            assert "trial 0" in why
            assert "is lost" in why


def test_a_state_that_was_adopted_once_is_not_adopted_again_over_what_was_trained_since() -> None:
    found = stored(t0={(1, N - 1), (2, N - 1)}, t1={(1, N - 1)})
    source, target = trial(0, 2), trial(1, 1)
    found.record.trials.update({0: source, 1: target})
    target.adopt(source, {})
    assert found.adopt_again(target) == ""
    found.states.save(0, 2, N - 1, b"another", meta((2, N - 1)))
    found.states.save(1, 2, 0, b"trained", meta((2, 0), adoptions=1))
    assert found.adopt_again(target) == ""
    assert found.states.load(1, 1, N - 1)[0] == b"t0 (2, 1) adapted"


@BUSY
@given(
    st.sets(st.sampled_from(PLACES)),
    st.sets(st.sampled_from(PLACES)),
    st.none() | st.sampled_from(PLACES),
)
def test_a_trial_that_goes_on_from_before_its_states_has_none_after_that(
    places: set[tuple[int, int]], halves: set[tuple[int, int]], last: tuple[int, int] | None
) -> None:
    found = stored(t0=places, t1=places)
    states: Any = found.states  # whose protocol keeps no halves
    for place in sorted(halves):
        states.save(0, *place, b"half", meta(place), partial=True)
    newest = None if last is None else StoredState(*last, shard=0, visits=(0,))
    found.go_on_from(trial(0, 0), newest)
    kept = {place for place in places if last is not None and place <= last}
    assert set(found.states.list(0)) == kept
    # Without whole states after it, a unit that was stopped in the middle may go on.
    allowed = {half for half in halves if last is not None and half <= last}
    assert set(found.states.list(0, partial=True)) == (halves if kept == places else allowed)
    assert set(found.states.list(1)) == places


@pytest.mark.parametrize("n_more", [1, 2])
def test_what_a_trial_is_told_waits_until_its_lost_state_is_made_again(n_more: int) -> None:
    """Its only state is damaged: it trains its first epoch again, and only then what is new."""
    states = RunDir(f"memory://{uuid.uuid4().hex}").states

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1)]
            case WorkersChanged():
                return [Train(0, n_more)]
            case Reported(_, 2):
                return [Finish()]
        return []

    def damaged(engine: HandEngine) -> list[Message]:
        states.save(0, 1, 0, b"", meta((1, 0), visits=[0, 0]))
        return [TrialReport(0, "CheckpointCorruptError: a checksum is wrong")]

    def changed(engine: HandEngine) -> list[Message]:
        assert states.list(0) == (), "it is made again"
        engine.n_workers = 3
        return []

    told: list[list[Any]] = []

    def look(engine: HandEngine) -> list[Message]:
        told.append(engine.all_told("submit"))
        return epoch_of(0, 1, 0.5)[:1]

    done = search(
        [Ask(1)],
        answer,
        lambda engine: epoch_of(0, 1, 0.5),
        damaged,
        changed,
        look,
        lambda engine: epoch_of(0, 2, 0.4),
        states=states,
    )
    again = [(0, range(1, 2))]
    assert told == [[again, again]]
    assert done.told("submit") == [again, again, [(0, range(2, 2 + n_more))]]
    assert done.told("release")[:2] == [(0, 1), (0, 1)]


def test_what_a_trial_was_scored_with_is_copied_once() -> None:
    kept: list[int] = []
    states: Any = SimpleNamespace(keep_check=lambda trial, number, *_, partial: kept.append(number))
    record = Record("run", n_shards=N)
    found = StoredStates(states, record, lambda blob, config, new: blob, Scores(states, ("loss",)))
    one = trial(0, 1)
    found.keep_scored(one)
    for n_checks in (1, 2):
        rests = Paused(0, 1 + n_checks / 8, 1.0, value=0.5)
        one.kept = one.rest(rests, StatePlace(2, 0, is_partial=True), (0.5,))
        found.keep_scored(one)
        assert kept == [1, 2][: n_checks - 1], "it still rests there"
        one.allow(Train(0, 1))
        for _ in range(3):
            found.keep_scored(one)
        assert kept == [1, 2][:n_checks]


@BUSY
@given(st.sets(st.integers(0, N - 1)), st.sets(st.integers(0, N - 1)))
def test_shards_of_which_nothing_can_be_read_are_scored_again(
    scored: set[int], lost: set[int]
) -> None:
    states = RunDir(f"memory://{uuid.uuid4().hex}").states
    record = Record("run", n_shards=N)

    def pool(kept: list[bytes]) -> dict[str, float]:
        return {"sum": float(sum(map(int, kept)))}

    scores = Scores(states, ("sum",), pool)
    found = StoredStates(states, record, lambda blob, config, new: blob, scores)
    one = trial(0, 0)
    one.tallies[1] = EpochTally(N, scored={shard: (1, {}) for shard in scored})
    for shard in scored - lost:
        states.save_scores(0, "epoch", 1, shard, str(shard).encode())
    found.look_up(one)
    assert set(one.tallies[1].scored) == scored - lost
    score = scores.of(one.tallies[1], "epoch 1", 0, 1)
    if scored - lost == set(range(N)):
        assert score == Score(sum(range(N)), {"sum": sum(range(N))})
    else:
        assert "no state is stored" in score.why_not
        assert "(in a metric of epoch 1)" in score.why_not
    record.trials[0] = trial(0, 1)
    found.reported(0, 1)
    with pytest.raises(CheckpointNotFoundError):
        states.load_scores(0, "epoch", 1, 0)


@BUSY
@given(st.lists(st.sampled_from(["report", "report", "clone", "mend"]), min_size=1, max_size=8))
def test_of_ends_that_are_needed_no_more_nothing_is_left(steps: list[str]) -> None:
    found = stored(t1={(1, N - 1)})
    one = found.record.trials[0] = TrialRecord(0, {"x": 0}, {})
    found.record.trials[1] = trial(1, 1)
    for step in steps:
        end = (len(one.epochs), N - 1)
        match step:
            case "report":
                end = (end[0] + 1, N - 1)
                digest = found.states.save(0, *end, f"trained {end}".encode(), meta(end))
                one.epochs.append(EpochRecord(end[0], 0.5, {}, 0.5, 1.0, digest))
                found.reported(0, end[0])
            case "clone" if one.epochs:
                one.adopt(found.record.trials[1], {"x": 1})
                assert not found.adopt(one)
            case "mend" if one.epochs:  # what is trained once more is not always the same
                found.go_on_from(one, found.look_up(one)[-1])
                about = meta(end, adoptions=len(one.adoptions))
                found.states.save(0, *end, f"anew {end}".encode(), about)
        found.drop_ends()
    folder = found.states._folder  # type: ignore[attr-defined]
    assert len(folder.names("trial-000000")) == 2 * bool(one.epochs)
    assert found.states.list(0) == (((len(one.epochs), N - 1),) if one.epochs else ())
