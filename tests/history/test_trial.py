"""What is known of a trial: where its newest state is, and what it was worth there.

One that trains on after its end does not rest, though a command had paused it.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagsel.dispatch.units import Unit
from dagsel.flow import Paused, Train
from dagsel.history.trial import EpochRecord, Scored, TrialRecord
from dagsel.messages import PieceRecord, StatePlace, UnitRecord
from dagsel.workloads.raised import Raised

ABOUT: dict[str, Any] = {"worker": "a", "shard": 0, "start": 10.0, "stop": 12.0, "hop": False}


def trial(number: int = 0) -> TrialRecord:
    made = TrialRecord(number, {"x": number}, {"x": number})
    made.allow(Train(number, 4))
    return made


def test_it_is_shown_in_a_line_with_what_it_came_to_and_where_it_raised() -> None:
    made = TrialRecord(3, {}, {"lr": 0.1, "act": "relu"})
    assert repr(made) == "<trial 3: running after 0 epochs, lr=0.1, act='relu'>"
    made.state, made.reason = "failed", "ValueError: no\nsuch thing"
    made.raised = Raised("ValueError", "no", "my train.py:3 loss")
    made.epochs.append(EpochRecord(1, 0.5, {}, 0.1, 1.0))
    assert repr(made) == (
        "<trial 3: failed after 1 epoch, lr=0.1, act='relu': ValueError: no such thing "
        "(my train.py:3 in loss)>"
    )
    made.state, made.reason, made.raised = "complete", "trained to the end", None
    made.kept = Scored((0.51239, 2.0), 1.0, StatePlace(1, 0))
    assert repr(made) == "<trial 3: complete after 1 epoch, value 0.5124, lr=0.1, act='relu'>"


def test_a_unit_that_ends_leaves_no_share_of_its_pieces() -> None:
    record = trial()
    record.spend(PieceRecord(Unit("train", 0, 1, 0), **ABOUT, share=0.5))
    assert record.progress(n_shards=2) == 0.25
    assert record.place(n_shards=2) == StatePlace(1, 0, is_partial=True)
    record.spend(UnitRecord(Unit("train", 0, 1, 0), **ABOUT))
    assert record.share == 0.0
    assert record.trained_s == 4.0


def test_a_value_of_the_middle_of_an_epoch_that_is_not_repeated_is_told() -> None:
    then, now = trial(), trial()
    then.kept = Scored((0.95,), 0.5, StatePlace(1, 0, is_partial=True))
    (told,) = then.differences(now)
    assert told.startswith("trial 0: worth 0.95 then, in the middle of an epoch")
    now.kept = then.kept
    assert then.differences(now) == []
    then.kept = Scored((0.95,), 1.0, StatePlace(1, 3))
    assert then.differences(trial()) == []  # of an epoch its metrics tell


def test_a_kept_state_is_in_its_own_place_until_its_trial_is_trained_on() -> None:
    record = trial()
    scored = record.rest(
        Paused(0, 0.5, 2.0, value=0.3, metrics={"loss": 0.3}), StatePlace(1, 0), (0.3,)
    )
    assert scored == Scored((0.3,), 0.5, StatePlace(1, 0), check=1)
    record.kept = scored
    assert record.copied_check == 0
    record.allow(Train(0, 0))
    assert record.copied_check == 1
    again = record.rest(
        Paused(0, 0.75, 3.0, value=0.4, metrics={"loss": 0.4}), StatePlace(1, 1), (0.4,)
    )
    assert again == Scored((0.4,), 0.75, StatePlace(1, 1), check=2)
    assert record.copied_check == 1, "it rests where another state was scored"
    record.epochs.append(EpochRecord(1, 0.6, {"loss": 0.6}, 0.5, 3.0))
    assert record.rest(Paused(0, 1.0, 4.0, value=0.6, metrics={}), StatePlace(1, 1), (0.6,)) is None


@pytest.mark.parametrize("recovered", [False, True])
def test_only_what_was_trained_says_what_a_switch_costs(recovered: bool) -> None:
    record = trial()
    record.spend(PieceRecord(Unit("train", 0, 1, 0), **ABOUT, share=0.5))
    later = {**ABOUT, "start": 13.0, "stop": 15.0, "members": ("b",)}
    record.spend(UnitRecord(Unit("train", 0, 1, 0), **later, recovered=recovered))
    assert record.switches == ([] if recovered else [1.0])


def test_a_trial_that_trains_on_after_its_end_does_not_rest() -> None:
    record = trial()
    record.paused_by_user, record.state = True, "pruned"
    record.reopen(has_kept=True)
    assert not record.paused_by_user
    assert record.is_live
