"""Laws of the rule that chooses a trial: what it may not depend on, and what it forgets."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dagsel.dispatch.list_scheduler import ListScheduler

BUSY = settings(deadline=None)
UNIT_S, N_SHARDS = 10.0, 3
masks = st.integers(1, 2**N_SHARDS - 1)


def rule(
    held: dict[str, int],
    speed: dict[str, float],
    demand: dict[int, float],
    idle: dict[int, tuple[float, int]],
    home: dict[int, str],
) -> ListScheduler[str]:
    """Workers at rest, and idle trials: what remains of each, and the shards it may take."""
    made: ListScheduler[str] = ListScheduler(lambda trial, worker: UNIT_S)
    made.held, made.speed, made.demand = dict(held), dict(speed), dict(demand)
    made.load.update(dict.fromkeys(held, 0.0))
    made.free_at.update(dict.fromkeys(held, 0.0))
    made.home.update(home)
    made.holders_changed()
    made.target = 1000.0
    for trial, (remaining, need) in idle.items():
        made.rem[trial] = remaining
        made.enter(trial, need)
    return made


@settings(BUSY, max_examples=500)
@given(
    others=st.lists(masks, min_size=1, max_size=3),
    speed=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    demand=st.lists(st.integers(1, 20), min_size=N_SHARDS, max_size=N_SHARDS),
    idle=st.lists(st.tuples(st.integers(1, 100), masks), min_size=1, max_size=3),
    home=st.dictionaries(st.integers(0, 2), st.sampled_from("0123"), max_size=3),
    factor=st.sampled_from([2.0**-10, 2.0**10]),
)
def test_the_choice_does_not_depend_on_the_units_of_work_and_of_speed(
    others: list[int],
    speed: list[int],
    demand: list[int],
    idle: list[tuple[int, int]],
    home: dict[int, str],
    factor: float,
):
    held = [2**N_SHARDS - 1, *others]

    def choice(of_speed: float, of_work: float) -> tuple[int, int] | None:
        made = rule(
            {str(i): mask for i, mask in enumerate(held)},
            {str(i): speed[i] * of_speed for i in range(len(held))},
            {shard: work * of_work for shard, work in enumerate(demand)},
            {trial: (float(remaining), need) for trial, (remaining, need) in enumerate(idle)},
            {trial: worker for trial, worker in home.items() if trial < len(idle)},
        )
        return made.pick("0", 0.0)

    assert choice(factor, 1.0) == choice(1.0, factor) == choice(1.0, 1.0)


@BUSY
@given(st.lists(masks, min_size=2, max_size=4), st.integers(1, 7))
def test_no_demand_is_as_good_as_equal_demand(held: list[int], need: int):
    def choice(work: float) -> tuple[int, int] | None:
        made = rule(
            {str(i): mask for i, mask in enumerate(held)},
            {str(i): 1.0 for i in range(len(held))},
            dict.fromkeys(range(N_SHARDS), work),
            {0: (50.0, need), 1: (90.0, need)},
            {},
        )
        return made.pick("0", 0.0)

    found = choice(0.0)
    assert (found is None) is (not need & held[0])
    assert found is None or found[0] == 1


@pytest.mark.parametrize("home", [{}, {1: "a"}], ids=["elsewhere", "here"])
@given(unit_s=st.integers(1, 30), until_s=st.integers(1, 30))
@BUSY
def test_wherever_its_state_is_a_trial_waits_for_a_critical_one(
    home: dict[int, str], unit_s: int, until_s: int
):
    """Trial 0 runs on ``b`` and then needs ``a``, or all ends late; trial 1 is idle."""
    made = rule(
        {"a": 0b01, "b": 0b10}, {"a": 1.0, "b": 1.0}, {}, {0: (100.0, 2), 1: (40.0, 1)}, home
    )
    made.time = lambda trial, worker: float(unit_s)
    made.target = 100.0
    made.start(0, "b", 0.0, float(until_s), need_next=0b01)
    fits = unit_s <= until_s
    assert made.pick("a", 0.0) == ((1, 0) if fits else None)
    assert made.wait_until == (inf if fits else until_s)


@BUSY
@given(st.lists(masks, min_size=1, max_size=4))
def test_nothing_is_remembered_of_a_worker_that_is_gone(held: list[int]):
    made = rule(
        {str(i): mask for i, mask in enumerate(held)},
        {str(i): 1.0 for i in range(len(held))},
        dict.fromkeys(range(N_SHARDS), 1.0),
        {0: (50.0, 0b001)},
        {0: "0"},
    )
    for worker in list(made.held):
        made.pick(worker, 0.0)
    for worker in list(made.held):
        made.remove_worker(worker)
    for table in (made.held, made.load, made.free_at, made.speed, made.unneeded, made.home):
        assert not table


@settings(BUSY, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(1, 20), masks, st.booleans()), max_size=3),
    st.tuples(st.integers(1, 20), masks),
    masks,
)
def test_a_trial_is_expected_to_stay_where_it_would_be_taken_again(
    idle: list[tuple[int, int, bool]], runs: tuple[int, int], held: int
):
    trials = {number: (float(left), need) for number, (left, need, _) in enumerate(idle)}
    homes = {number: "a" for number, (*_, is_here) in enumerate(idle) if is_here}
    made = rule({"a": held}, {"a": 1.0}, {}, trials, {9: "a", **homes})
    made.rem[9], made.need[9] = float(runs[0]), runs[1]
    assume(float(runs[0]) not in {left for left, _ in trials.values()})
    expected = made.would_stay(9, "a")
    made.enter(9, runs[1])
    taken = made.pick("a", 0.0)
    assert expected is (taken is not None and taken[0] == 9)


def test_a_worker_that_joins_under_the_address_of_one_that_is_gone_has_no_states():
    made = rule({"a": 1}, {"a": 1.0}, {}, {0: (90.0, 1), 1: (100.0, 1)}, {0: "a"})
    assert made.pick("a", 0.0) == (0, 0)  # its state is there
    made.remove_worker("a")
    made.held["a"], made.speed["a"], made.load["a"], made.free_at["a"] = 1, 1.0, 0.0, 0.0
    assert made.pick("a", 0.0) == (1, 0)


@BUSY
@given(
    st.permutations([1, 5, 9]),
    st.lists(st.integers(1, 4), min_size=2, max_size=3),
    masks,
    st.lists(st.integers(0, 2), min_size=2, max_size=2),
)
def test_of_a_trials_shards_the_one_with_the_most_work_for_its_workers_is_next(
    demand: list[int], speed: list[int], need: int, absent: list[int]
):
    """Worker 0 holds all shards, each other one all but one."""
    held = {str(i): 7 if not i else 7 & ~(1 << absent[i - 1]) for i in range(len(speed))}
    made = rule(
        held,
        {str(i): float(pace) for i, pace in enumerate(speed)},
        {shard: float(work) for shard, work in enumerate(demand)},
        {0: (50.0, need)},
        {},
    )

    def pressure(shard: int) -> float:
        return demand[shard] / sum(
            speed[int(worker)] for worker, mask in held.items() if mask >> shard & 1
        )

    taken = made.pick("0", 0.0)
    assert taken is not None
    assert pressure(taken[1]) == max(pressure(s) for s in range(N_SHARDS) if need >> s & 1)


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0, 3.0])
def test_a_trial_ranks_by_what_remains_of_it_times_its_weight_or_by_that_alone(weight: float):
    made = rule({"a": 1}, {"a": 1.0}, {}, {0: (60.0, 1)}, {})
    made.rem[1] = 50.0
    made.enter(1, 1, weight=weight)
    assert list(made.idle) == ([1, 0] if 50.0 * weight > 60.0 else [0, 1])


@settings(BUSY)
@given(
    idle=st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 5), masks), min_size=1),
    data=st.data(),
)
def test_idle_trials_that_enter_again_together_stand_as_if_each_did(
    idle: dict[int, tuple[float, int]], data: st.DataObject
) -> None:
    held = {"a": 0b001, "b": 0b110, "c": 0b111}
    one, other = (rule(held, dict.fromkeys(held, 1.0), {}, idle, {0: "a"}) for _ in range(2))
    again = {
        trial: (data.draw(masks), data.draw(st.sampled_from([1.0, 2.7])))
        for trial in data.draw(st.sets(st.sampled_from(sorted(idle))))
    }
    some = data.draw(st.sets(st.sampled_from(sorted(held))))
    for made in (one, other):
        made.unneeded = set(some)
        made.rem |= {trial: 7.0 - trial for trial in again}
    one.enter_again(again)
    for trial, (need, weight) in again.items():
        other.enter(trial, need, weight=weight)
    assert (list(one.idle), one.need, one.unneeded) == (
        list(other.idle),
        other.need,
        other.unneeded,
    )
    picks = [[made.pick(worker, 0.0) for worker in held] for made in (one, other)]
    assert picks[0] == picks[1]
