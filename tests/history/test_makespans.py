"""Makespans: no schedule beats the bound of its round."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.units import Unit
from dagsel.history.course import RoundRecord
from dagsel.history.makespans import bound_of, makespans, relative_speeds
from dagsel.history.record import Record
from dagsel.messages import UnitRecord


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
    frame = makespans(record)
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
    (ratio,) = makespans(record).ratio
    assert math.isnan(ratio)


def test_a_unit_is_of_the_round_that_had_begun_when_it_began() -> None:
    """An epoch that is interrupted goes on in another round."""
    record = Record("3f9a")
    for position, start in enumerate((1.0, 2.0, 11.0)):
        unit = Unit("train", 0, 1, position)
        record.units.append(UnitRecord(unit, "w", position, start, start + 1, False, False, 1))
    record.rounds = [RoundRecord(n, frozenset({(0, 1)}), at) for n, at in ((1, 0.5), (2, 10.5))]
    frame = makespans(record)
    assert frame.units.tolist() == [2, 1]
    assert frame.makespan.tolist() == [2.5, 1.5]
    assert frame.bound.tolist() == [2.0, 1.0]


def test_what_scores_a_paused_trial_is_of_no_round() -> None:
    record = Record("3f9a")
    record.units = [
        UnitRecord(Unit("train", 0, 1, 0), "w", 0, 1.0, 3.0, False, False, 1),
        UnitRecord(Unit("check", 0, 1, 0), "w", 0, 9.0, 10.0, False, False, 0),
    ]
    record.rounds = [RoundRecord(1, frozenset({(0, 1)}), 1.0)]
    (row,) = makespans(record).itertuples()
    assert (row.units, row.makespan, row.bound) == (1, 2.0, 2.0)


def test_a_worker_that_takes_half_the_time_of_each_trial_is_twice_as_fast() -> None:
    units = [
        UnitRecord(Unit("train", trial, 1, p), worker, p, 0.0, cost / speed, False, False, 1)
        for trial, cost in enumerate([1.0, 5.0, 0.2])
        for p, (worker, speed) in enumerate([("slow", 1.0), ("fast", 2.0)])
    ]
    speeds = relative_speeds(units)
    assert speeds["fast"] / speeds["slow"] == pytest.approx(2.0)
    assert bound_of(units[:1]) == pytest.approx(1.0)
