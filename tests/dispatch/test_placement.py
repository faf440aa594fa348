"""Placement: completeness, proportion, memory, few moves; and the unit-time model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import LoadShard, RoundAdded, WorkerAdded
from dagsel.dispatch.placement import Capacity, place, quotas
from dagsel.dispatch.unit_times import UnitTimes
from dagsel.dispatch.units import Chain, Round, Unit

SPEEDS = st.lists(st.floats(0.2, 5.0), min_size=1, max_size=7)


def capacities_of(speeds, **options):
    return [Capacity(f"w{k}", speed, **options) for k, speed in enumerate(speeds)]


def copies(placed, n_shards):
    return [sum(shard in shards for shards in placed.values()) for shard in range(n_shards)]


@given(SPEEDS, st.integers(1, 20), st.integers(1, 3))
def test_every_shard_has_its_copies(speeds, n_shards, replicas):
    placed = place(n_shards, capacities_of(speeds), replicas=replicas)
    counts = copies(placed, n_shards)
    least = min(replicas, len(speeds))
    assert min(counts) >= least
    if len(speeds) <= least * n_shards:
        assert max(counts) == least
    assert max(counts) - min(counts) <= 1


@given(SPEEDS, st.integers(1, 20))
def test_loads_are_proportional_and_no_rounding_ends_sooner(speeds, n_shards):
    counts = quotas(n_shards, capacities_of(speeds))
    total = max(n_shards, len(speeds))
    assert sum(counts) == min(total, len(speeds) * n_shards)
    if max(speeds) / sum(speeds) * total >= n_shards:
        return  # somebody is full, and the others share the rest
    shares = [total * speed / sum(speeds) for speed in speeds]
    floors = [math.floor(share + 1e-12) for share in shares]
    assert all(floors[k] <= counts[k] <= floors[k] + 1 for k in range(len(speeds)))
    up = [counts[k] / speeds[k] for k in range(len(speeds)) if counts[k] > floors[k]]
    down = [(counts[k] + 1) / speeds[k] for k in range(len(speeds)) if counts[k] == floors[k]]
    assert max(up, default=0.0) <= min(down, default=math.inf) * (1 + 1e-9)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 16), st.integers(1, 3))
def test_memory_is_kept_and_used_as_far_as_needed(limits, n_shards, replicas):
    hosts = [Capacity(f"w{k}", max_shards=limit) for k, limit in enumerate(limits)]
    placed = place(n_shards, hosts, replicas=replicas)
    assert all(len(placed[s.worker]) <= limit for s, limit in zip(hosts, limits, strict=True))
    room = sum(min(limit, n_shards) for limit in limits)
    assert sum(count > 0 for count in copies(placed, n_shards)) == min(room, n_shards)


@given(SPEEDS, st.integers(1, 16), st.integers(1, 2), st.data())
def test_what_is_well_placed_stays(speeds, n_shards, replicas, data):
    hosts = capacities_of(speeds)
    placed = place(n_shards, hosts, replicas=replicas)
    again = [Capacity(s.worker, s.speed, held=placed[s.worker]) for s in hosts]
    assert place(n_shards, again, replicas=replicas) == placed
    if replicas == 1 and 1 < len(hosts) <= n_shards:
        gone = data.draw(st.integers(0, len(hosts) - 1))
        rest = [s for k, s in enumerate(again) if k != gone]
        after = place(n_shards, rest)
        moved = sum(len(after[s.worker] - s.held) for s in rest)
        wanted = quotas(n_shards, rest)
        fewest = sum(max(0, w - len(s.held)) for w, s in zip(wanted, rest, strict=True))
        assert moved == fewest


@given(st.data())
def test_refused_shards_go_elsewhere(data):
    n_workers, n_shards = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    refused = [data.draw(st.frozensets(st.integers(0, n_shards - 1))) for _ in range(n_workers)]
    hosts = [Capacity(f"w{k}", refused=shards) for k, shards in enumerate(refused)]
    placed = place(n_shards, hosts)
    for host in hosts:
        assert not placed[host.worker] & host.refused
    for shard, count in enumerate(copies(placed, n_shards)):
        assert count > 0 or all(shard in shards for shards in refused)


@given(st.data())
def test_no_worker_gets_more_than_fits_though_others_refuse_shards(data):
    n_workers, n_shards = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    limits = st.none() | st.integers(0, n_shards)
    refusals = st.frozensets(st.integers(0, n_shards - 1))
    hosts = [
        Capacity(f"w{k}", max_shards=data.draw(limits), refused=data.draw(refusals))
        for k in range(n_workers)
    ]
    placed = place(n_shards, hosts, replicas=data.draw(st.integers(1, 3)))
    for host in hosts:
        assert not placed[host.worker] & host.refused
        assert host.max_shards is None or len(placed[host.worker]) <= host.max_shards


def learn(times, true, n, *, sigma=0.0, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        trial, worker = int(rng.integers(6)), f"w{rng.integers(3)}"
        times.observe(trial, worker, [true(trial, worker) * math.exp(sigma * rng.normal())])


def fresh(costs=None):
    times = UnitTimes()
    for trial in range(6):
        times.add_trial(trial, None if costs is None else costs[trial])
    for k in range(3):
        times.add_worker(f"w{k}", 1.0)
    return times


def true_seconds(trial, worker):
    return 40.0 * (1 + trial) * {"w0": 1.0, "w1": 0.5, "w2": 2.0}[worker]


@settings(deadline=None)
@given(st.integers(0, 100))
def test_unit_times_are_learned_under_noise(seed):
    times = fresh()
    learn(times, true_seconds, 300, sigma=0.2, seed=seed)
    for trial in range(6):
        for worker in ("w0", "w1", "w2"):
            ratio = times.seconds(trial, worker) / true_seconds(trial, worker)
            assert 0.6 < ratio < 1.6


def test_the_first_unit_sets_the_scale_and_a_new_trial_is_taken_relative_to_it():
    times = fresh(costs=[1.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    assert not times.known
    times.observe(0, "w0", [30.0])
    assert times.known
    assert times.seconds(1, "w0") / times.seconds(2, "w0") == pytest.approx(2.0)
    assert times.seconds(2, "w1") == pytest.approx(30.0, rel=0.05)


def expected_of_new(*, tasks, n_trials=200, sigma=0.0, spread=0.0, seed=0):
    """How far off the first estimate of each trial is, as a logarithm, once ten have been seen.

    `tasks` are those of a trial, each with its units' seconds; two workers take turns.
    """
    times, rng, errors = UnitTimes(), np.random.default_rng(seed), []
    for worker in ("a", "b"):
        times.add_worker(worker, 1.0)
    for trial in range(n_trials):
        times.add_trial(trial)
        cost = math.exp(spread * rng.normal())
        for nth, units in enumerate(tasks):
            worker = "ab"[(trial + nth) % 2]
            if nth == 0 and trial >= 10:
                errors.append(math.log(times.seconds(trial, worker) / (cost * np.mean(units))))
            noise = np.exp(sigma * rng.normal(size=len(units)))
            times.observe(trial, worker, cost * np.array(units) * noise)
        times.forget_trial(trial)
    return np.array(errors)


@pytest.mark.parametrize(
    "tasks",
    [
        [8 * [1.0]],
        [[*(7 * [1.0]), 1.05]],  # the last unit of a task stores the state
        2 * [[*(7 * [1.0]), 1.05]],
        [[1.05, *(7 * [1.0])], 8 * [1.0]],  # the first unit of a trial builds the model
        [[1.05, 1.0], *(9 * [[1.0, 1.0]])],
        [[1.05], *(9 * [[1.0]])],
        [[1.0, 3.0]],
    ],
)
def test_new_trials_are_expected_to_take_what_all_others_took_however_many_came_before(tasks):
    errors = expected_of_new(tasks=tasks)
    assert np.abs(errors).max() < 0.15
    assert np.abs(errors[20:]).max() < 0.06
    errors = expected_of_new(tasks=tasks, sigma=0.02, n_trials=1000)
    assert np.sqrt(np.mean(errors**2)) < 0.06


@pytest.mark.parametrize("spread", [0.1, 0.3, 0.5])
def test_of_trials_that_differ_a_new_one_is_expected_to_be_about_their_mean(spread):
    errors = expected_of_new(tasks=2 * [4 * [1.0]], sigma=0.05, spread=spread, n_trials=1000)
    assert np.sqrt(np.mean(errors**2)) < 1.15 * spread  # no estimate could be nearer than 1.0
    assert abs(np.mean(errors)) < 0.1 * spread


def test_the_cold_first_unit_of_a_run_is_forgotten_with_its_trial():
    for n_trials in (2, 3, 8):
        times = fresh()
        for trial in range(n_trials):
            for task in range(4):
                is_cold = trial == task == 0
                times.observe(trial % 6, f"w{task % 2}", [4.0 if is_cold else 1.0, 1.0, 1.0, 1.0])
        assert times.seconds(5, "w0") == pytest.approx(1.0, rel=0.05)


@given(st.permutations([0.9, 1.0, 1.0, 1.2, 4.0]))
def test_the_order_of_a_tasks_units_teaches_nothing(units):
    told = []
    for order in (units, sorted(units)):
        times = fresh()
        for trial in range(3):
            times.observe(trial, "w0", order)
        told.append([times.seconds(trial, "w0") for trial in range(6)])
    assert told[0] == pytest.approx(told[1])


def test_one_odd_unit_is_not_believed_but_a_slow_worker_is():
    times = fresh()
    learn(times, lambda *_: 1.0, 60)
    before = times.seconds(0, "w0")
    times.observe(0, "w0", [50.0])
    assert times.seconds(1, "w0") < 1.5 * before
    for k in range(12):
        times.observe(k % 6, "w0", [3.0])
    assert times.seconds(1, "w0") / times.seconds(1, "w1") > 2.0


def test_looked_up_units_teach_nothing():
    times = fresh()
    times.observe(0, "w0", [0.0])
    assert not times.known


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": range(0, 1)}, "epochs"),
        ({"epochs": range(1, 1)}, "epochs"),
        ({"n_shards": 0}, "n_shards"),
        ({"order": ((0, 0),)}, "order"),
        ({"order": ()}, "orders"),
    ],
)
def test_bad_chains_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Chain(**{"trial": 0, "epochs": range(1, 2), "n_shards": 2, **options})


def test_a_round_knows_its_units():
    round_ = Round(0, (Chain(0, range(1, 3), 2), Chain(1, range(1, 2), 2, evaluate=False)))
    assert [len(list(chain.units)) for chain in round_.chains] == [2 * 2, 2]
    assert list(round_.chains[1].evaluations(1)) == []
    assert Unit("evaluate", 0, 2, 1) in list(round_.chains[0].evaluations(2))
    with pytest.raises(ValueError, match="more than one chain"):
        Round(0, (round_.chains[0], round_.chains[0]))


def asked_to_load(rooms, n_shards, replicas, max_shards=None):
    """What each worker is asked to load, in order, as a round begins."""
    dispatcher = Dispatcher(DispatchConfig(n_shards, replicas))
    workers = [
        WorkerAdded(f"w{k}", max_shards=max_shards, copy_room=room) for k, room in enumerate(rooms)
    ]
    chains = RoundAdded(Round(0, (Chain(0, range(1, 2), n_shards),)))
    told = dispatcher.handle(*workers, chains, now_s=0.0)
    loads = [instruction for instruction in told if isinstance(instruction, LoadShard)]
    return {w.worker: [x.shard for x in loads if x.worker == w.worker] for w in workers}


@given(st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 12))
def test_of_automatic_copies_there_are_as_many_as_take_little_memory(rooms, n_shards):
    loads = asked_to_load(rooms, n_shards, None)
    counts = [sum(shard in shards for shards in loads.values()) for shard in range(n_shards)]
    room = sum(min(n_shards, n_shards if room is None else room) for room in rooms)
    if room >= 2 * n_shards:
        assert min(counts) >= room // n_shards
        most = [n_shards if room is None else room for room in rooms]
        assert all(len(x) <= n for x, n in zip(loads.values(), most, strict=True))
    else:  # one copy, on whoever has memory for it
        assert loads == asked_to_load(rooms, n_shards, 1)


def test_small_data_is_everywhere_and_workers_begin_with_other_shards():
    loads = asked_to_load([None, None], 4, None)
    assert loads == {"w0": [0, 1, 2, 3], "w1": [2, 3, 0, 1]}
    assert asked_to_load([4, 4], 4, None, max_shards=20) == loads


def test_copies_beyond_one_are_made_only_where_all_shards_get_them():
    assert asked_to_load([3, 4], 4, None) == asked_to_load([3, 4], 4, 1)
