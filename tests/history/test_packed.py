"""A packed list is a list: whatever is done to it, and whatever it holds."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.dispatch.units import Unit
from dagsel.history.course import Moment, TrainedSpan
from dagsel.history.packed import BLOCK, Packed
from dagsel.history.record import Record
from dagsel.messages import UnitRecord

maybe = st.none() | st.integers() | st.floats(allow_nan=False)
metrics = st.none() | st.dictionaries(st.text(max_size=3), maybe, max_size=3)
units = st.builds(
    UnitRecord,
    st.builds(Unit, st.sampled_from(["train", "evaluate"]), st.integers(), *2 * [st.integers(0)]),
    worker=st.text(max_size=3),
    start=st.just(0.5),
    stop=st.floats(1.0, 2.0),
    loss=st.none() | st.floats(allow_nan=False),
    losses=st.none() | st.tuples(st.integers(), st.floats(0, 1), st.floats(0, 1)),
    members=st.lists(st.text(max_size=2), max_size=2).map(tuple),
    metrics=metrics,
    seconds=st.none() | st.floats(allow_nan=False),
)
spans = st.builds(TrainedSpan, st.integers(), st.just(-0.0), st.floats(allow_nan=False))


def long(some: list[Any], n: int) -> list[Any]:
    """So many values, of a few kinds of them."""
    return [some[at % len(some)] for at in range(n)]


@settings(deadline=None, max_examples=50)
@given(st.lists(units | spans, min_size=1, max_size=3), st.integers(0, 3 * BLOCK), st.data())
def test_it_reads_as_the_list_of_what_was_appended(
    some: list[Any], n: int, data: st.DataObject
) -> None:
    told = long(some, n)
    packed = Packed(told)
    assert (list(packed), len(packed)) == (told, n)
    assert packed == told
    assert repr(list(packed)) == repr(told)  # -0.0 is not 0.0
    part = slice(*(data.draw(st.none() | st.integers(-n - 2, n + 2)) for _ in range(2)))
    assert packed[part] == told[part]
    if n:
        at = data.draw(st.integers(-n, n - 1))
        assert packed[at] == told[at]
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert other == told


@settings(deadline=None)
@given(st.integers(0, 3 * BLOCK), st.lists(st.integers(0, 10**6), max_size=4), st.data())
def test_it_changes_as_a_list_does(n: int, places: list[int], data: st.DataObject) -> None:
    told = [TrainedSpan(at, 0.0, 1.0) for at in range(n)]
    packed = Packed(told)
    for place in places:
        at = place % (len(told) or 1)
        how = data.draw(st.sampled_from(["insert", "put", "delete", "clear", "append"]))
        for spans_ in (told, packed):
            if how == "insert":
                spans_.insert(at, TrainedSpan(-1, 0.0, 0.0))
            elif how == "put" and spans_:
                spans_[at] = TrainedSpan(-2, 0.0, 0.0)
            elif how == "delete" and spans_:
                del spans_[at]
            elif how == "clear":
                spans_.clear()
            else:
                spans_.append(TrainedSpan(-3, 0.0, 0.0))
        assert packed == told


def test_what_cannot_be_packed_stays_as_it_is() -> None:
    odd = {"f": lambda: 0}  # what cannot be pickled
    told = [UnitRecord(Unit("evaluate", 0, 1, 0), "w", 0, 0.0, 1.0, False, metrics=odd)] * BLOCK
    assert list(Packed(told)) == told
    nan = Moment(math.nan, 0.0, 1)
    assert math.isnan(Packed([nan] * BLOCK)[0].seconds)


def test_a_reader_in_another_thread_sees_every_value_in_its_place() -> None:
    packed: Packed[TrainedSpan] = Packed()
    for at in range(2 * BLOCK + 1):
        before = iter(packed)
        first = [next(before).trial] if at else []
        packed.append(TrainedSpan(at, 0.0, 0.0))
        seen = first + [span.trial for span in before]
        assert seen == list(range(len(seen)))
        assert len(seen) >= at


def test_a_record_keeps_few_objects_of_units_that_are_long_over() -> None:
    record = Record("run")
    n = 20 * BLOCK
    for at in range(n):
        about: dict[str, Any] = {
            "seconds": float(at),
            "worker_seconds": float(at),
            "recovered": False,
        }
        record.add(UnitRecord(Unit("train", 0, at, 0), "w", 0, 0.0, 1.0, False, **about))
    assert [done.unit.epoch for done in record.units] == list(range(n))
    for kept in (record.units, record.trained, record.course):
        assert isinstance(kept, Packed)
        packed = [block for block in kept._blocks if isinstance(block, bytes)]
        assert len(packed) == n // BLOCK
