"""What is known of a trial: where its newest state is, and what it was worth there."""

from __future__ import annotations

from typing import Any

import pytest

from dagsel.dispatch.units import Unit
from dagsel.flow import Paused, Train
from dagsel.history.trial import EpochRecord, TrialRecord
from dagsel.messages import PieceRecord, StatePlace, UnitRecord

ABOUT: dict[str, Any] = {"worker": "a", "shard": 0, "start": 10.0, "stop": 12.0, "hop": False}


def trial(number: int = 0) -> TrialRecord:
    made = TrialRecord(number, {"x": number}, {"x": number})
    made.allow(Train(number, 4))
    return made


def test_a_unit_that_ends_leaves_no_share_of_its_pieces() -> None:
    record = trial()
    record.spend(PieceRecord(Unit("train", 0, 1, 0), **ABOUT, share=0.5))
    assert record.progress(n_shards=2) == 0.25
    assert record.place(n_shards=2) == StatePlace(1, 0, is_partial=True)
    record.spend(UnitRecord(Unit("train", 0, 1, 0), **ABOUT))
    assert record.share == 0.0
    assert record.trained_s == 4.0


def test_a_clone_is_not_worth_what_the_state_was_that_it_lost() -> None:
    source, target = trial(0), trial(1)
    for record in (source, target):
        record.epochs.append(EpochRecord(1, 0.5, {"loss": 0.5}, 0.5, 1.0))
    target.rest(Paused(1, 1.5, 2.0, value=0.1, metrics={"loss": 0.1}), StatePlace(2, 0))
    assert target.value == 0.1
    target.adopt(source, {"x": 7})
    assert target.check is None
    assert target.value == 0.5
    assert not target.is_scored
    assert target.config == {"x": 7}


def test_what_a_trial_was_worth_where_it_paused_counts_until_its_next_epoch() -> None:
    record = trial()
    record.rest(Paused(0, 0.5, 2.0, value=0.3, metrics={"loss": 0.3}), StatePlace(1, 0))
    assert record.value == 0.3
    record.allow(Train(0, 0))
    assert record.value == 0.3
    record.epochs.append(EpochRecord(1, 0.6, {"loss": 0.6}, 0.5, 3.0))
    assert record.value == 0.6


@pytest.mark.parametrize("recovered", [False, True])
def test_only_what_was_trained_says_what_a_switch_costs(recovered: bool) -> None:
    record = trial()
    record.spend(PieceRecord(Unit("train", 0, 1, 0), **ABOUT, share=0.5))
    later = {**ABOUT, "start": 13.0, "stop": 15.0, "members": ("b",)}
    record.spend(UnitRecord(Unit("train", 0, 1, 0), **later, recovered=recovered))
    assert record.switches == ([] if recovered else [1.0])
