"""The record of a run: what was added is what the frames hold."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.planning.rounds import Unit
from dagsel.record import EpochRecord, Record, RoundRecord, UnitRecord

METRICS = [
    {"loss": 0.5, "accuracy": 0.8},
    {"loss": 0.25, "accuracy": 0.9},
]


def make_record(n_trials: int, n_epochs: int) -> Record:
    record = Record("3f9a", started=0.0)
    for trial in range(n_trials):
        record.add_trial(trial, {"lr": 0.1, "fixed": 1}, {"lr": 0.1})
        for epoch in range(1, n_epochs + 1):
            metrics = METRICS[epoch % 2]
            record.trials[trial].epochs.append(EpochRecord(epoch, metrics, 1 / epoch, 2.0 * epoch))
    return record


@given(n_trials=st.integers(0, 4), n_epochs=st.integers(0, 3))
def test_the_metrics_have_a_row_for_each_number(n_trials: int, n_epochs: int) -> None:
    record = make_record(n_trials, n_epochs)
    frame = record.metrics()
    assert list(frame.columns) == ["trial", "epoch", "split", "name", "value", "seconds"]
    assert len(frame) == n_trials * n_epochs * 3
    assert record.n_epochs == n_trials * n_epochs
    key = ["trial", "epoch", "split", "name"]
    values = dict(zip(frame[key].itertuples(index=False, name=None), frame.value, strict=True))
    assert values == {
        (trial, epoch, split, name): value
        for trial in range(n_trials)
        for epoch in range(1, n_epochs + 1)
        for split, numbers in [("train", {"loss": 1 / epoch}), ("validation", METRICS[epoch % 2])]
        for name, value in numbers.items()
    }


def test_trials_end_once_and_in_their_own_way() -> None:
    record = make_record(4, 1)
    assert record.n_live == 4
    record.end_trial(0, "complete", "trained to the end")
    record.end_trial(1, "pruned", "rung 1")
    record.end_trial(2, "failed", "RuntimeError: broken", "Traceback")
    assert record.n_live == 1
    (failure,) = record.failures
    assert (failure.number, failure.reason, failure.traceback) == (
        2,
        "RuntimeError: broken",
        "Traceback",
    )
    assert record.n_epochs == 4


def test_the_timeline_has_a_row_for_each_unit_in_the_order_of_their_ends() -> None:
    message = {
        "op": "done",
        "worker": "tcp://10.0.0.1:4000",
        "shard": 2,
        "start": 10.0,
        "stop": 11.5,
        "hop": True,
        "state_bytes": 1000,
    }
    record = make_record(1, 0)
    train, evaluate = Unit("train", 0, 1, 3), Unit("evaluate", 0, 1, 2)
    record.units.append(UnitRecord.from_message(train, {**message, "recovered": True}))
    del message["state_bytes"]
    record.units.append(UnitRecord.from_message(evaluate, {**message, "hop": False}))
    assert [unit.state_bytes for unit in record.units] == [1000, 0]
    frame = record.timeline()
    assert frame.to_dict("records") == [
        {
            "kind": "train",
            "trial": 0,
            "epoch": 1,
            "position": 3,
            "shard": 2,
            "worker": "tcp://10.0.0.1:4000",
            "start": 10.0,
            "stop": 11.5,
            "hop": True,
            "recovered": True,
        },
        {
            "kind": "evaluate",
            "trial": 0,
            "epoch": 1,
            "position": 2,
            "shard": 2,
            "worker": "tcp://10.0.0.1:4000",
            "start": 10.0,
            "stop": 11.5,
            "hop": False,
            "recovered": False,
        },
    ]


def test_a_record_of_nothing_gives_frames_with_their_columns() -> None:
    record = Record("3f9a")
    assert record.metrics().empty
    assert "split" in record.metrics()
    assert "shard" in record.timeline()
    assert record.n_live == record.n_epochs == 0


def test_a_workload_without_a_training_loss_has_a_row_that_says_so() -> None:
    record = make_record(1, 0)
    record.trials[0].epochs.append(EpochRecord(1, {"score": 0.5}, math.nan, 1.0))
    frame = record.metrics()
    assert math.isnan(frame.value[frame.split == "train"].item())
    assert frame.value[frame.split == "validation"].item() == 0.5


def scheduled(
    n_workers: int, n_shards: int, costs: list[float], chance: random.Random, *, at: float
) -> list[UnitRecord]:
    """Train an epoch of each trial, in any order; worker ``j`` is ``j + 1`` times as fast."""
    left = {trial: chance.sample(range(n_shards), n_shards) for trial in range(len(costs))}
    trial_free, worker_free = dict.fromkeys(left, at), dict.fromkeys(range(n_workers), at)
    units = []
    while any(left.values()):
        trial = chance.choice([t for t, shards in left.items() if shards])
        shard = left[trial].pop()
        worker = shard % n_workers
        start = max(trial_free[trial], worker_free[worker])
        stop = start + costs[trial] / (worker + 1)
        trial_free[trial] = worker_free[worker] = stop
        unit = Unit("train", trial, 1, n_shards - 1 - len(left[trial]))
        units.append(UnitRecord(unit, f"w{worker}", shard, start, stop, False, False, 1))
    return units


@given(
    n_workers=st.integers(1, 3),
    more_shards=st.integers(0, 3),
    costs=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
)
def test_no_schedule_beats_the_bound_of_its_round(
    n_workers: int, more_shards: int, costs: list[float], seed: int
) -> None:
    record = Record("3f9a")
    chance, n_shards = random.Random(seed), n_workers + more_shards
    record.units = scheduled(n_workers, n_shards, costs, chance, at=100.0)
    others = scheduled(n_workers, n_shards, costs, chance, at=500.0)
    record.units += [replace(u, unit=u.unit._replace(epoch=2)) for u in others]
    for epoch, start in [(1, 100.0), (2, 500.0)]:
        epochs = frozenset((trial, epoch) for trial in range(len(costs)))
        record.rounds.append(RoundRecord(epoch, epochs, start))
    record.rounds.append(RoundRecord(3, frozenset({(0, 3)}), 900.0))  # nothing of it ran
    frame = record.makespans()
    assert frame["round"].tolist() == [1, 2]
    assert frame.units.tolist() == [len(costs) * n_shards] * 2
    ends = [max(u.stop for u in record.units if u.unit.epoch == epoch) for epoch in (1, 2)]
    assert frame.makespan.tolist() == [ends[0] - 100.0, ends[1] - 500.0]
    assert (frame.ratio > 1 - 1e-9).all()
    if n_workers == 1:
        assert frame.bound.tolist() == pytest.approx([sum(costs) * n_shards] * 2)
        assert frame.ratio.tolist() == pytest.approx([1.0, 1.0])


def test_a_round_that_was_found_in_the_store_has_no_bound() -> None:
    record = Record("3f9a")
    record.units = [UnitRecord(Unit("train", 0, 1, 0), "w", 0, 1.0, 1.0, False, True, 1)]
    record.rounds = [RoundRecord(1, frozenset({(0, 1)}), 0.5)]
    (ratio,) = record.makespans().ratio
    assert math.isnan(ratio)
