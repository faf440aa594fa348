"""Budget and bill: the bill is the integral of what is billed; the cheapest workers go first."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.codec import from_json, to_json
from dagsel.dispatch.downscaling import Releasable, choose
from dagsel.errors import SearchError
from dagsel.planning.bill import Bill
from dagsel.planning.budget import read_budget

WORKERS = [(f"w{k}", f"n{k // 3}") for k in range(7)]
ASKS = st.tuples(st.just("ask"), st.integers(0, 8))
MOVES = st.tuples(st.sampled_from(["join", "leave", "notice"]), st.sampled_from(WORKERS))
# Quarters of a second, so that sums are exact.
EVENTS = st.lists(st.tuples(st.integers(0, 40), ASKS | MOVES), max_size=12)
SIZES = st.integers(1, 3)


def bill_of(events: Any, size: int, n: int | None = None, *, queue: bool = False) -> Bill:
    bill, at = Bill(node_size=size, bills_requests=not queue), 0.0
    for quarters, (what, about) in events[:n]:
        at += quarters / 4
        if what == "ask":
            bill = bill.ask(about, at=at)
        elif what == "join":
            bill = bill.join(about[0], at=at, node=about[1])
        elif what == "leave":
            bill = bill.leave(about[0], at=at)
        else:
            bill = bill.notice(about[0], at=at)
    return bill


def integral(events: Any, size: int, until: float, *, queue: bool) -> float:
    """Add up quarters of seconds, one by one; in a queue only what is there costs."""
    times = list(itertools.accumulate(quarters for quarters, _ in events))
    total = 0.0
    for quarter in range(int(4 * until)):
        asked, there, taken = 0, {}, set()
        for time, (_, (what, about)) in zip(times, events, strict=True):
            if time > quarter:
                break
            if what == "ask":
                asked = math.ceil(about / size)
            elif what == "join":
                there[about[0]] = about[1]
            elif what == "leave":
                there.pop(about[0], None)
                taken.discard(about[0])
            else:
                taken.add(about[0])
        staying = {node for worker, node in there.items() if worker not in taken}
        n_nodes = len(set(there.values()))
        n_asked = 0 if queue else asked + n_nodes - len(staying)
        total += max(n_asked, n_nodes) * size / 4
    return total


@given(EVENTS, SIZES, st.integers(0, 20), st.booleans())
def test_the_bill_is_the_integral_of_what_is_billed(
    events: Any, size: int, rest: int, queue: bool
) -> None:
    bill = bill_of(events, size, queue=queue)
    now = bill.at + rest / 4
    assert bill.worker_seconds(now) == integral(events, size, now, queue=queue)
    assert from_json(Bill, to_json(bill)) == bill


@given(EVENTS, SIZES)
def test_the_bill_never_falls_and_an_event_costs_nothing_by_itself(events: Any, size: int) -> None:
    for n in range(len(events)):
        before, after = bill_of(events, size, n), bill_of(events, size, n + 1)
        assert after.worker_seconds(after.at) == before.worker_seconds(after.at)
        assert after.worker_seconds(after.at) >= before.worker_seconds(before.at)


@given(EVENTS, SIZES, st.integers(1, 400))
def test_a_budget_runs_out_when_it_was_said_to(events: Any, size: int, budget: int) -> None:
    bill = bill_of(events, size)
    end = bill.runs_out_at(budget)
    assert end >= bill.at
    if end == math.inf:
        assert bill.worker_seconds(1e9) < budget
    elif end > bill.at:
        assert bill.worker_seconds(end) == pytest.approx(budget)
    else:
        assert bill.worker_seconds(bill.at) >= budget


def test_a_node_is_billed_until_its_last_worker_goes() -> None:
    bill = Bill(node_size=2).ask(3, at=0).ask(0, at=10)
    bill = bill.join("a", at=10, node="n").join("b", at=10, node="n").leave("a", at=20)
    assert bill.worker_seconds(30) == 2 * 2 * 10 + 2 * 20
    assert bill.leave("b", at=30).worker_seconds(99) == bill.worker_seconds(30)


@pytest.mark.parametrize(("queue", "seconds"), [(True, 2 * (3 + 10)), (False, 2 * 20)])
def test_a_job_is_billed_from_its_start_where_waiting_costs_nothing(
    queue: bool, seconds: float
) -> None:
    bill = Bill(node_size=2, prices={"": 3600.0}, bills_requests=not queue).ask(2, at=0)
    bill = bill.join("a", at=10, node="n", age_s=3.0).join("b", at=10, node="n", age_s=2.0)
    assert bill.worker_seconds(20) == bill.money(20) == seconds


@pytest.mark.parametrize(
    ("value", "price", "worker_seconds"),
    [
        (90, None, 90),
        (2.5, "3.0 EUR", 2.5),
        ("30 worker-minutes", None, 1800),
        ("1.5 Worker-Hour", None, 5400),
        ("1worker-s", "2 USD", 1),
        ("100", None, 100),
        (" 2.5 ", "3.0 EUR", 2.5),
        ("12.50 USD", 2.5, 18000),
        ("12.50 USD", " 2.5 USD", 18000),
        (" 5€ ", 10.0, 1800),
    ],
)
def test_budgets_are_read(value: Any, price: Any, worker_seconds: Any) -> None:
    budget = read_budget(value, price)
    assert budget.worker_seconds == worker_seconds
    money = budget.money(worker_seconds)
    per_hour = None if price is None else float(str(price).split()[0])
    assert money == (None if price is None else pytest.approx(worker_seconds / 3600 * per_hour))


@pytest.mark.parametrize(
    ("value", "price", "message"),
    [
        ("12.50 USD", None, "price_per_worker_hour="),
        (0, None, "above 0"),
        (-3, None, "above 0"),
        (math.nan, None, "above 0"),
        (math.inf, None, "finite"),
        ("0 USD", 1.0, "above 0"),
        ("0", None, "above 0"),
        ("-5 USD", 1.0, "cannot read"),
        ("0 worker-hours", None, "above 0"),
        ("30 worker-things", None, "is no time"),
        (60, 0.0, "price_per_worker_hour must"),
        (60, 2.5, 'price_per_worker_hour=2.5 has no currency: write "2.5 USD"'),
        (60, "2.5", 'write a text like "2.50 USD"'),
        (60, "0 USD", "must be above 0"),
        ("5 USD", "2.5 EUR", "the budget is in USD, and price_per_worker_hour is 2.5 EUR"),
        ("5 $", "2.5 USD", "in one currency"),
        ("5 USD", -1.0, "price_per_worker_hour must"),
        ("30 minutes", None, '"30 worker-minutes"'),
        ("1.2.3 USD", 1.0, "cannot read"),
        ("", None, "cannot read"),
        ("1.2.3", None, "cannot read"),
        (True, None, "cannot read"),
        (None, None, "cannot read"),
    ],
)
def test_bad_budgets_are_refused(value: Any, price: Any, message: str) -> None:
    with pytest.raises(SearchError, match=message) as caught:
        read_budget(value, price)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


CANDIDATES = st.lists(
    st.tuples(st.booleans(), st.frozensets(st.integers(0, 4), max_size=3), st.integers(0, 3)),
    max_size=6,
)


def candidates(drawn: Any, *, alone: bool = True) -> list[Releasable]:
    return [
        Releasable(f"w{k}", running, shards, None if alone else f"n{node}")
        for k, (running, shards, node) in enumerate(drawn)
    ]


def lost(workers: list[Releasable], chosen: Collection[str]) -> Any:
    """Shards that nobody else holds."""
    left = {shard for worker in workers if worker.worker not in chosen for shard in worker.shards}
    return {shard for worker in workers for shard in worker.shards} - left


@given(CANDIDATES, st.integers(0, 8))
def test_the_cheapest_go_first(drawn: Any, n: int) -> None:
    workers = candidates(drawn)
    chosen = choose(workers, n)
    assert len(set(chosen)) == len(chosen) == min(n, len(workers))
    assert choose(workers[::-1], n) == chosen
    running = {worker.worker: worker.running for worker in workers}
    n_idle = sum(not busy for busy in running.values())
    assert sum(running[worker] for worker in chosen) == max(0, len(chosen) - n_idle)
    for k, worker in enumerate(chosen):
        rivals = [w for w in running if w not in chosen[:k] and running[w] == running[worker]]
        costs = {rival: len(lost(workers, {*chosen[:k], rival})) for rival in rivals}
        assert costs[worker] == min(costs.values())


@given(CANDIDATES, st.integers(0, 8))
def test_nodes_go_whole_or_not_at_all(drawn: Any, n: int) -> None:
    workers = candidates(drawn, alone=False)
    chosen = choose(workers, n)
    assert len(chosen) <= n
    sizes: dict[str | None, set[bool]] = {}
    for worker in workers:
        sizes.setdefault(worker.node, set()).add(worker.worker in chosen)
    assert all(len(fates) == 1 for fates in sizes.values())
    left = [node for node, fates in sizes.items() if fates == {False}]
    for node in left:
        assert sum(worker.node == node for worker in workers) > n - len(chosen)


def test_the_second_holder_of_a_shard_is_no_longer_free() -> None:
    twice = [Releasable("a", shards=frozenset({0})), Releasable("b", shards=frozenset({0}))]
    spare = Releasable("c", shards=frozenset({1, 2}))
    other = Releasable("d", running=True, shards=frozenset({1, 2}))
    assert choose([*twice, spare, other], 2) == ("a", "c")


def test_of_equals_the_one_with_the_fewest_shards_goes() -> None:
    many, few = Releasable("a", shards=frozenset({0, 1})), Releasable("b", shards=frozenset({0}))
    busy = Releasable("c", running=True, shards=frozenset({0, 1}))
    assert choose([many, few, busy], 1) == ("b",)
