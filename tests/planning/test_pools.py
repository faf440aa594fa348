"""Pools: the cheapest that has room is asked first, and the bill is what each worker costs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.arguments import limits_of
from dagsel.codec import from_json, to_json
from dagsel.dispatch.downscaling import Releasable, choose
from dagsel.errors import SearchError
from dagsel.flow import Traits
from dagsel.flows import SEER
from dagsel.planning.bill import Bill
from dagsel.planning.hiring import pool_of, share_out
from dagsel.planning.pools import Workers, check_workers
from dagsel.planning.prices import Price

PRICES = {"demand": 7.2, "spot": 1.8, "": 7.2}  # of an unknown one, as of the dearest
POOL_OF = {"n0": "demand", "n1": "spot", "n2": ""}
WORKERS = [(f"w{k}", f"n{k % 3}-{k // 3}") for k in range(9)]
COUNTS = st.dictionaries(st.sampled_from(["demand", "spot"]), st.integers(0, 5))
MOVES = st.tuples(st.sampled_from(["join", "leave"]), st.sampled_from(WORKERS))
EVENTS = st.lists(
    st.tuples(st.integers(0, 12), st.tuples(st.just("ask"), COUNTS) | MOVES), max_size=10
)


def bill_of(events: Any, size: int, prices: Any = None) -> Bill:
    known = {pool: price for pool, price in PRICES.items() if pool}
    bill, at = Bill(node_size=size, prices=known if prices is None else prices), 0.0
    for seconds, (what, about) in events:
        at += seconds
        if what == "ask":
            bill = bill.ask(about, at=at)
        elif what == "join":
            worker, node = about
            bill = bill.join(worker, at=at, node=node, pool=POOL_OF[node[:2]])
        else:
            bill = bill.leave(about[0], at=at)
    return bill


def cost(events: Any, size: int, until: float) -> tuple[float, float]:
    """Add up the worker-seconds and the money, second by second and node by node."""
    times = list(itertools.accumulate(seconds for seconds, _ in events))
    spent = money = 0.0
    for second in range(int(until)):
        asked: dict[str, int] = {}
        there: dict[str, str] = {}
        for time, (_, (what, about)) in zip(times, events, strict=True):
            if time > second:
                break
            if what == "ask":
                asked = {pool: math.ceil(n / size) for pool, n in about.items()}
            elif what == "join":
                there[about[0]] = about[1]
            else:
                there.pop(about[0], None)
        nodes = Counter(POOL_OF[node[:2]] for node in set(there.values()))
        for pool, price in PRICES.items():
            n = max(nodes[pool], asked.get(pool, 0)) * size
            spent += n
            money += n * price / 3600
    return spent, money


@given(EVENTS, st.integers(1, 3), st.integers(0, 20))
def test_each_worker_is_billed_at_the_price_of_its_pool(events: Any, size: int, rest: int) -> None:
    bill = bill_of(events, size)
    now = bill.at + rest
    spent, money = cost(events, size, now)
    assert bill.worker_seconds(now) == spent
    assert bill.money(now) == pytest.approx(money)
    assert from_json(Bill, to_json(bill)) == bill
    closed = bill.close(at=now)
    assert (closed.money(now + 9), closed.worker_seconds(now + 9)) == (bill.money(now), spent)


@given(EVENTS, st.integers(1, 3), st.integers(1, 40))
def test_money_runs_out_when_it_was_said_to(events: Any, size: int, cents: int) -> None:
    bill, money = bill_of(events, size), cents / 100
    end = bill.money_runs_out_at(money)
    assert end >= bill.at
    spent = bill.money(1e9 if end == math.inf else end)
    assert spent is not None
    if end == math.inf:
        assert spent < money
    elif end > bill.at:
        assert spent == pytest.approx(money)
    else:
        assert spent >= money


@given(EVENTS, st.integers(1, 3))
def test_one_price_for_all_is_the_time_at_that_price(events: Any, size: int) -> None:
    bill = bill_of(events, size, {"demand": 2.0, "spot": 2.0})
    seconds = bill.worker_seconds(bill.at + 5)
    assert bill.money(bill.at + 5) == pytest.approx(Price(2.0, "USD").of(seconds))
    assert bill_of(events, size, {}).money(bill.at) is None


POOLS = st.lists(
    st.tuples(st.integers(1, 4), st.booleans(), st.none() | st.integers(1, 5)),
    min_size=1,
    max_size=4,
).map(lambda drawn: [Workers(f"p{k}", f"{p} USD", s, m) for k, (p, s, m) in enumerate(drawn)])


@given(POOLS, st.integers(0, 12), st.data())
def test_the_cheapest_with_room_are_asked(pools: list[Workers], n: int, data: Any) -> None:
    there = {pool.name: data.draw(st.integers(0, 5)) for pool in pools}
    size = data.draw(st.integers(1, 2))
    short = data.draw(st.sets(st.sampled_from([pool.name for pool in pools])))
    starts = share_out(pools, n, there=there, node_size=size, short=short)
    room = {p.name: max(0, p.nodes(size) - there[p.name]) for p in pools}
    assert sum(starts.values()) == min(n, sum(room.values()))
    assert all(0 < k <= room[name] for name, k in starts.items())
    rank = {p.name: (p.name in short, p.cost.per_hour, p.spot) for p in pools}
    for name in starts:
        full = [other for other in rank if rank[other] < rank[name]]
        assert all(starts.get(other, 0) == room[other] for other in full)


@pytest.mark.parametrize(
    ("name", "pool"),
    [("spot-3", "spot"), ("spot-3-1", "spot"), ("spot-big-0", "spot-big"), ("spot", "spot"),
     ("3", "demand"), ("spotless-3", "demand"), ("demand-3", "demand"), ("spot-x", "demand")],
)  # fmt: skip
def test_the_name_of_a_worker_says_its_pool(name: str, pool: str) -> None:
    pools = [Workers("demand", "2 USD"), Workers("spot", "1 USD"), Workers("spot-big", "1 USD")]
    assert pool_of(name, pools) == pool


DEMAND, SPOT = Workers("demand", "2.50 USD"), Workers("spot", "0.50 USD", spot=True)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: Workers("", "1 USD"), "the name of workers must be of letters"),
        (lambda: Workers("spot-3", "1 USD"), "a letter at the beginning and after each '-'"),
        (lambda: Workers("a b", "1 USD"), "got 'a b'"),
        (lambda: Workers("a", 1.2), "has no currency: write \"1.2 USD\""),  # type: ignore[arg-type]
        (lambda: Workers("a", None), "have no price"),  # type: ignore[arg-type]
        (lambda: Workers("a", "0 USD"), "must be above 0"),
        (lambda: Workers("a", "1 USD", most=0), "most of the workers 'a' must be a whole number"),
        (lambda: Workers("a", "1 USD", spot="yes"), "spot must be True"),  # type: ignore[arg-type]
        (lambda: Workers("a", "1 USD", options=3), "must be a dict"),  # type: ignore[arg-type]
        (lambda: check_workers(DEMAND), r"write workers=\[Workers\(name='demand'"),
        (lambda: check_workers([]), "must be a list of pools"),
        (lambda: check_workers(["spot"]), "must be a list of pools"),
        (lambda: check_workers(3), "got 3"),
        (lambda: check_workers([SPOT, DEMAND, SPOT]), "2 pools of workers are called 'spot'"),
        (
            lambda: check_workers([DEMAND, Workers("spot", "1 EUR")]),
            "'demand' cost 2.5 USD and the workers 'spot' 1 EUR: give all prices in one currency",
        ),
        (lambda: limits_of(Traits(), None, 60, "2 USD", [SPOT]), "leave out price_per_worker_hour"),
        (lambda: limits_of(Traits(), None, "6 EUR", None, [SPOT]), "the budget is in EUR"),
        (
            lambda: limits_of(
                SEER("10 min", "1 USD", price_per_worker_hour=0.5).traits, None, None, None,
                [SPOT, DEMAND],
            ),
            "has planned its budget at 0.5 USD an hour of a worker, and the dearest workers cost "
            "2.5 USD: give the flow that price",
        ),
    ],
)  # fmt: skip
def test_bad_pools_are_refused(made: Any, told: str) -> None:
    with pytest.raises(SearchError, match=told):
        made()


def test_a_budget_in_money_pays_for_the_dearest_workers() -> None:
    _, budget = limits_of(Traits(), None, "5 USD", None, [SPOT, DEMAND])
    assert budget is not None
    assert (budget.worker_seconds, budget.price, budget.amount) == (7200, Price(2.5, "USD"), 5)
    flow = SEER("10 min", "5 USD", price_per_worker_hour="3 USD")  # more than they cost is safe
    _, budget = limits_of(flow.traits, None, None, None, [SPOT, DEMAND])
    assert budget is not None
    assert (budget.worker_seconds, budget.price, budget.amount) == (6000, Price(2.5, "USD"), 5)


def test_of_equal_workers_the_dearest_is_released() -> None:
    cheap, dear = Releasable("a", price=0.5), Releasable("b", price=2.5, shards=frozenset({0}))
    other = Releasable("c", price=0.5, shards=frozenset({0}))
    assert choose([cheap, dear, other], 1) == ("b",)
    assert choose([cheap, replace(dear, running=True), other], 1) == ("a",)
    assert choose([cheap, dear], 1) == ("a",)  # nobody else holds the shard of the dear one
