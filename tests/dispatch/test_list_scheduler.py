"""The rule by which a free worker takes a trial: the longest first, with the exceptions it names.

- What counts more than the remaining work: the priority; less: that the state is here.
- A worker waits for a critical trial that needs it, unless to wait costs more than it saves.
"""

from __future__ import annotations

from math import inf

import pytest

from dagsel.dispatch.list_scheduler import ListScheduler

UNIT_S = 10.0


def scheduler(
    remaining: dict[int, float],
    *,
    held: dict[str, int],
    home: dict[int, str] | None = None,
    priority: dict[int, float] | None = None,
    stay: float = 0.3,
) -> ListScheduler[str]:
    """Workers at rest, and idle trials that may take each of two shards."""
    made: ListScheduler[str] = ListScheduler(lambda trial, worker: UNIT_S, stay=stay)
    for worker, shards in held.items():
        made.held[worker], made.speed[worker] = shards, 1.0
        made.load[worker], made.free_at[worker] = 0.0, 0.0
    made.demand = {0: 1.0, 1: 1.0}
    made.home.update(home or {})
    made.priority.update(priority or {})
    made.holders_changed()
    made.target = max(remaining.values())
    for trial, seconds in remaining.items():
        made.rem[trial] = seconds
        made.enter(trial, 0b11)
    return made


ONE_HOLDER, TWO_HOLDERS = {"a": 0b01, "b": 0b10}, {"a": 0b11, "b": 0b11}


def chosen(made: ListScheduler[str], worker: str = "a", now: float = 0.0) -> int | None:
    found = made.pick(worker, now)
    return None if found is None else found[0]


@pytest.mark.parametrize("held", [ONE_HOLDER, TWO_HOLDERS], ids=["one holder", "two holders"])
class TestOrder:
    def test_the_longest_goes_first(self, held: dict[str, int]) -> None:
        assert chosen(scheduler({0: 50.0, 1: 80.0, 2: 60.0}, held=held)) == 1

    def test_a_priority_counts_before_the_remaining_work(self, held: dict[str, int]) -> None:
        assert chosen(scheduler({0: 50.0, 1: 80.0}, held=held, priority={0: 1.0})) == 0

    @pytest.mark.parametrize(("remaining_s", "first"), [(71.0, 0), (69.0, 1)])
    def test_a_state_that_is_here_is_worth_a_share_of_the_longest(
        self, held: dict[str, int], remaining_s: float, first: int
    ) -> None:
        # 0.3 of 100 s.
        made = scheduler({0: remaining_s, 1: 100.0}, held=held, home={0: "a"})
        assert chosen(made) == first
        made = scheduler({0: remaining_s, 1: 100.0}, held=held, home={0: "b"})
        assert chosen(made) == 1
        made = scheduler({0: remaining_s, 1: 100.0}, held=held, home={0: "a"}, stay=0.0)
        assert chosen(made) == 1

    def test_a_state_that_is_here_is_worth_less_than_a_priority(self, held: dict[str, int]) -> None:
        made = scheduler({0: 99.0, 1: 100.0}, held=held, home={0: "a"}, priority={1: 1.0})
        assert chosen(made) == 1


def critical(load_s: float = 0.0, rest_s: float = 40.0) -> ListScheduler[str]:
    """Trial 0 runs on ``b`` until 5 s, then needs ``a`` or all ends late; trial 1 is idle."""
    made = scheduler({0: 100.0, 1: rest_s}, held=ONE_HOLDER)
    made.load["a"] = load_s
    made.start(0, "b", 0.0, 5.0, need_next=0b01)
    assert made.target == 100.0
    return made


def test_a_worker_waits_for_a_critical_trial_that_needs_it() -> None:
    made = critical()
    assert chosen(made) is None  # 1 would hold the worker until 10 s
    assert made.wait_until == 5.0


def test_a_worker_that_is_late_itself_does_not_wait() -> None:
    assert chosen(critical(load_s=96.0)) == 1  # it has work until 96 s of 100: 4 s to spare, not 5
    assert chosen(critical(load_s=94.0)) is None


def test_a_worker_does_not_wait_with_a_trial_that_is_as_critical() -> None:
    assert chosen(critical(rest_s=96.0)) == 1  # it must begin before 4 s
    assert chosen(critical(rest_s=94.0)) is None


def test_a_worker_does_not_wait_for_a_trial_of_less_priority() -> None:
    made = critical()
    made.priority[1] = 1.0
    made.enter(1, 0b11)
    assert chosen(made) == 1


def test_a_worker_does_not_wait_where_another_one_will_do() -> None:
    made = critical()
    made.held["c"], made.free_at["c"], made.speed["c"] = 0b01, 0.0, 1.0
    made.load["c"] = 0.0
    assert made.pick("a", 0.0) == (1, 0)


def test_a_worker_that_nobody_needs_is_not_asked_again_until_somebody_does() -> None:
    made = scheduler({0: 50.0}, held={"a": 0b01, "b": 0b10})
    made.enter(0, 0b10)
    assert chosen(made) is None
    assert made.unneeded == {"a"}
    assert made.wait_until == inf
    made.enter(0, 0b01)
    assert chosen(made) == 0
