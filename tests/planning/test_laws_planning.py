"""Laws of pools of workers, and of a switch of a gang about which nothing is known."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagsel.planning.pools import Workers, check_workers
from dagsel.planning.small_population import full, is_worth_a_switch

BUSY = settings(deadline=None)


@BUSY
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True))
def test_checked_pools_are_those_that_were_named_and_in_their_order(names: list[str]) -> None:
    pools = [Workers(name, price=f"{i + 1} USD") for i, name in enumerate(names)]
    assert check_workers(pools) == tuple(pools)
    assert check_workers(iter(pools)) == tuple(pools)


@BUSY
@given(
    *(st.integers(1, 64) for _ in range(2)),
    st.integers(1, 10_000),
    st.integers(1, 600),
)
@example(now=1, then=2, left_s=100, switch_s=40)
def test_of_an_unknown_trial_twice_the_workers_take_half_the_time(
    now: int, then: int, left_s: int, switch_s: int
) -> None:
    saves = left_s * then - left_s * now > switch_s * now * then
    found = is_worth_a_switch(now, then, left_s, None, switch_s=switch_s)
    assert found is saves or abs(left_s / now - left_s / then - switch_s) < 1e-9
    assert full(now) == full(then) == 1
