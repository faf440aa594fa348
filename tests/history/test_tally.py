"""The tally of an epoch: each unit counts once, in whatever order the results come in."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.units import Begun, Unit
from dagsel.history.tally import EpochTally
from dagsel.messages import StoredState, UnitRecord

N = 3


def result(unit: Unit, shard: int, n_samples: int, **about: Any) -> UnitRecord:
    return UnitRecord(unit, "w", shard, 0.0, 1.0, False, n_samples=n_samples, **about)


def results(losses: list[float], n_samples: list[int]) -> list[UnitRecord]:
    found: list[UnitRecord] = []
    for p, (loss, n) in enumerate(zip(losses, n_samples, strict=True)):
        found.append(result(Unit("train", 0, 1, p), N - 1 - p, n, loss=loss, digest=f"d{p}"))
        metrics = {"f1": loss, "loss": -loss}
        found.append(result(Unit("evaluate", 0, 1, p), p, n, metrics=metrics))
    return found


def test_a_stored_state_tells_of_all_units_of_its_task() -> None:
    """The driver that was to hear of them was lost."""
    tally = EpochTally(n_shards=4)
    tally.add(result(Unit("train", 0, 1, 0), 3, 2, loss=0.5))
    stored = StoredState(1, 2, 0, (3, 1, 0), n_samples=4, loss=0.25, losses=((6, 0.75),))
    tally.follow(stored.visits)
    tally.update(2, stored)
    assert tally.trained == {0: (3, 2, 0.5), 1: (1, 6, 0.75), 2: (0, 4, 0.25)}


number = st.floats(-1e6, 1e6)


@given(
    losses=st.lists(number, min_size=N, max_size=N),
    n_samples=st.lists(st.integers(1, 99), min_size=N, max_size=N),
    data=st.data(),
)
def test_the_same_results_give_the_same_bits_in_any_order_and_twice(
    losses: list[float], n_samples: list[int], data: st.DataObject
) -> None:
    known = results(losses, n_samples)
    one, other = EpochTally(N), EpochTally(N)
    for done in known:
        one.add(done)
    for done in data.draw(st.permutations(known)):
        assert not other.is_complete
        other.add(done)
    late = {"loss": 1e9, "digest": "late", "metrics": {"f1": 1e9}}
    for done in known[: data.draw(st.integers(0, 2 * N))]:
        if done.unit != Unit("train", 0, 1, N - 1):
            other.add(result(done.unit, 0, 7, **late))
    assert one.is_complete
    assert one == other
    assert (one.metrics, one.train_loss) == (other.metrics, other.train_loss)
    assert one.digest == f"d{N - 1}"
    total = sum(n_samples)
    mean = math.fsum(x * n for x, n in zip(losses, n_samples, strict=True)) / total
    assert math.isclose(one.train_loss, mean, rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(one.metrics["f1"], mean, rel_tol=1e-9, abs_tol=1e-6)
    assert one.begun == Begun(tuple(reversed(range(N))), frozenset(range(N)))


@given(visits=st.permutations(range(N)), n=st.integers(0, N), n_known=st.integers(0, N))
def test_it_follows_other_visits_and_keeps_what_agrees(
    visits: list[int], n: int, n_known: int
) -> None:
    tally = EpochTally(N)
    for done in results([0.1, 0.2, 0.3], [1, 2, 3])[: 2 * n_known]:
        tally.add(done)
    before = dict(tally.trained)
    tally.follow(visits[:n])
    assert tally.begun == Begun(tuple(visits[:n]), frozenset(range(n_known)))
    for position, kept in tally.trained.items():
        if before.get(position, (None,))[0] == visits[position]:
            assert kept == before[position]
        else:
            assert kept[1] == 0


def test_unknown_losses_do_not_count() -> None:
    tally = EpochTally(2)
    assert math.isnan(tally.train_loss)
    tally.follow([1])
    assert math.isnan(tally.train_loss)
    tally.update(1, result(Unit("train", 0, 1, 1), 0, 3, loss=0.5, digest="d"))
    assert (tally.train_loss, tally.digest) == (0.5, "d")
