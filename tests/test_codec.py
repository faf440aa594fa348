"""JSON and back: what a type says is what is read, or it is refused; equal values, equal text."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.codec import from_json, to_json


@dataclass(frozen=True, slots=True)
class Rung:
    trials: tuple[int, ...] = ()
    losses: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Everything:
    n: int
    share: float | None
    names: frozenset[str]
    kind: Literal["wide", "deep"]
    rungs: dict[tuple[int, str], Rung]
    by_name: Mapping[str, list[Rung]]
    pair: tuple[int, bool]
    mixed: int | str | None = None
    found: set[int] = field(default_factory=set, init=False)
    free: Any = None


numbers = st.integers(-(2**70), 2**70)
floats = st.floats(width=64)
rungs = st.builds(
    Rung, st.lists(numbers).map(tuple), st.dictionaries(numbers, floats.filter(lambda x: x == x))
)
anything: st.SearchStrategy[Everything] = st.builds(
    Everything,
    n=numbers,
    share=st.none() | st.floats(allow_nan=False),
    names=st.frozensets(st.text()),
    kind=st.sampled_from(["wide", "deep"]),
    rungs=st.dictionaries(st.tuples(numbers, st.text()), rungs, max_size=3),
    by_name=st.dictionaries(st.text(), st.lists(rungs, max_size=2), max_size=3),
    pair=st.tuples(numbers, st.booleans()),
    mixed=st.none() | numbers | st.text(),
    free=st.none() | st.lists(st.integers()) | st.dictionaries(st.text(), st.integers()),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["n", "trials", "losses", "kind", "is", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


def there_and_back(kind: Any, value: Any) -> Any:
    return from_json(kind, json.loads(json.dumps(to_json(value))))


@given(anything, st.sets(numbers))
def test_a_dataclass_comes_back_as_it_was(value: Everything, found: set[int]) -> None:
    value.found = found
    again = there_and_back(Everything, value)
    assert again == value
    assert type(again.names) is frozenset
    assert json.dumps(to_json(again)) == json.dumps(to_json(value))


@given(st.lists(floats))
def test_floats_come_back_to_the_bit(values: list[float]) -> None:
    again = there_and_back(list[float], values)
    assert [*map(float.hex, again)] == [*map(float.hex, values)]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (dict[str, int], {}),
        (dict[int, int], {}),
        (dict[int | str, int], {1: 1, "a": 2}),
        (dict[int | str, int], {"1": 1}),
        (dict[str | None, int], {None: 1}),
        (tuple[()], ()),
        (tuple[int, str], (1, "a")),
        (set[tuple[int, str]], {(2, "a"), (1, "b")}),
        (int | None, None),
        (float | str, math.inf),
        (bool | int, True),
        (Literal[1, "a", None], None),
    ],
)
def test_corners_come_back(kind: Any, value: Any) -> None:
    again = there_and_back(kind, value)
    assert again == value
    assert type(again) is type(value)


@given(st.lists(st.integers(0, 20).map(lambda n: 64 * n)))
def test_equal_sets_give_equal_text(numbers: list[int]) -> None:
    forwards, backwards = set(numbers), {*numbers[::-1]}  # they collide: order is kept
    assert json.dumps(to_json(backwards)) == json.dumps(to_json(forwards))


@given(json_values)
@pytest.mark.parametrize(
    "kind",
    [Everything, Rung, dict[int, Rung], tuple[int, str], set[int], float | None, Literal[1, "a"]],
    ids=str,
)
def test_strange_json_is_read_or_refused_with_a_value_error(kind: Any, value: Any) -> None:
    try:
        read = from_json(kind, value)
    except ValueError:
        return
    assert from_json(kind, to_json(read)) == read or read != read


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (int, True, "expected int, got True"),
        (int, 1.0, r"expected int, got 1\.0"),
        (float, 10**400, "expected float"),
        (float, "1", "expected float, got '1'"),
        (str, None, "expected str, got None"),
        (bool, 1, "expected bool, got 1"),
        (int | str, None, "got None"),
        (Literal["a"], "b", "got 'b'"),
        (Literal[1], True, "got True"),
        (Literal["a"], ["a"], "got "),
        (dict[int, int], [[1]], r"expected a pair, got \[1\]"),
        (dict[int, int], [1], "expected a pair, got 1"),
        (dict[int, int], [[1, 2, 3]], "expected a pair"),
        (dict[str, int], ["ab"], "expected a pair, got 'ab'"),
        (dict[int, int], 3, "expected a list, got 3"),
        (set[tuple[int, str]], [[1]], "expected 2 items"),
        (list[int], {"a": 1}, "expected a list"),
        (Rung, [], "expected Rung"),
        (Rung, {"trial": 3}, "Rung has no trial"),
        (Everything, {"n": 1}, "Everything: .*missing"),
    ],
)
def test_another_type_is_refused(kind: Any, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_json(kind, value)


@given(st.integers(-(2**31), 2**31 - 1), st.floats(width=32))
def test_scalars_of_numpy_become_plain(n: int, x: float) -> None:
    assert type(to_json(np.int32(n))) is int
    assert to_json(np.int32(n)) == n
    for kind in (np.float32, np.float64):
        number = to_json(kind(x))
        assert type(number) is float
        assert number == x or x != x
    assert to_json(np.bool_(n > 0)) is (n > 0)


@pytest.mark.parametrize("value", [b"bytes", object(), len, 1j, np.zeros(3), {3: object()}, Rung])
def test_what_has_no_form_in_json_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="has no form in JSON"):
        to_json(value)


def test_a_class_that_was_pickled_by_value_is_read() -> None:
    @dataclass
    class Local:
        n: int
        known: dict[int, float] = field(default_factory=dict)

    kind = pickle.loads(cloudpickle.dumps(Local))  # which gives it copies of its fields
    assert from_json(kind, {"n": 3}) == kind(3)
    assert from_json(kind, {"n": 3, "known": [[1, 0.5]]}) == kind(3, {1: 0.5})
    with pytest.raises(ValueError, match="n"):
        from_json(kind, {})
