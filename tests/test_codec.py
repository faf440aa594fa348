"""JSON and back: what a type says is what is read, or it is refused; equal values, equal text."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.codec import Tagged, from_json, to_json


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


@dataclass(frozen=True)
class Inner:
    n: int


class Place(NamedTuple):
    epoch: int
    share: float


@dataclass(frozen=True)
class Told:
    n: int = 0
    x: float | None = None
    word: Literal["a", "b"] = "a"
    many: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    place: Place | None = None
    inner: Inner | None = None
    config: Mapping[str, Any] | None = None


anything = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=2)),
    st.floats(0, 1).map(np.float64),
    st.sampled_from([Place(1, 0.5), Place(1, 1), Inner(3), Inner(True), (1, 0.5), [0.5], "c"]),
    st.lists(st.floats(0, 1) | st.integers(), max_size=2).map(tuple),
    st.dictionaries(st.text(max_size=2) | st.integers(), st.floats(0, 1) | st.integers()),
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Told.__annotations__, anything)))
def test_what_is_sure_to_be_read_back_is_read_back(about: dict[str, Any]) -> None:
    union: Tagged[Told] = Tagged(Told, brief=True)
    told = Told(**about)
    if union.is_read_back(told):
        read = union.decode(union.encode(told))
        assert (read, repr(read)) == (told, repr(told))


def test_plain_values_need_no_look_and_others_do() -> None:
    union: Tagged[Told] = Tagged(Told, brief=True)
    plain = Told(3, 0.5, "b", (0.5,), {"loss": 0.5}, Place(1, 0.5), Inner(3))
    assert union.is_read_back(plain)
    others: dict[str, Any] = {
        "n": True,
        "x": np.float64(0.5),
        "word": "c",
        "many": [0.5],
        "metrics": {"loss": 1},
        "place": (1, 0.5),
        "inner": Inner(n=1.0),  # type: ignore[arg-type]
        "config": {},
    }
    for name, value in others.items():
        assert not union.is_read_back(replace(plain, **{name: value})), name
    assert not union.is_read_back(Inner(3))  # type: ignore[arg-type]
