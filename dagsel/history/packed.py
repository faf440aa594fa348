"""A long list of values of one kind, kept in columns: little memory, few objects.

A record has an entry for each unit that was ever trained. As objects these take most of a search's
memory, and Python's garbage collector walks all of them again and again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, SupportsIndex, TypeVar, overload

T = TypeVar("T")

#: So many values are packed at a time; fewer of the newest ones are kept as they are.
BLOCK = 128
#: A column of values of more kinds, or of dictionaries with more sets of keys, is left as it is.
_FEW = 4

Column = Sequence[Any]


class Packed(MutableSequence[T]):
    """A list of dataclasses or named tuples, all but the newest of which are packed.

    What it is made for is to append to, to look at, and to read from its beginning to its end. A
    value is made anew whenever it is read: equal to the one that was appended, and another object.
    All fields of a dataclass have to be arguments of it.

    Examples
    --------
    >>> from dagsel.history.course import TrainedSpan
    >>> spans = Packed(TrainedSpan(trial, 0.0, 1.5) for trial in range(2000))
    >>> len(spans), spans[7], spans[-1].trial
    (2000, TrainedSpan(trial=7, begin=0.0, end=1.5), 1999)
    """

    __slots__ = ("_blocks", "_newest")

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._blocks: list[Column] = []
        self._newest: list[T] = []
        self.extend(values)

    def append(self, value: T) -> None:
        """Add a value."""
        self._newest.append(value)
        if len(self._newest) == BLOCK:
            self._blocks.append(_pack(self._newest))
            self._newest = []

    def clear(self) -> None:
        """Remove all values."""
        self._blocks, self._newest = [], []

    def __len__(self) -> int:
        return BLOCK * len(self._blocks) + len(self._newest)

    def __iter__(self) -> Iterator[T]:
        return chain(chain.from_iterable(self._blocks), self._newest)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return [self._at(place) for place in range(*at.indices(len(self)))]
        place = at + len(self) if at < 0 else at
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} values, none at {at}")
        return self._at(place)

    def _at(self, place: int) -> T:
        block, row = divmod(place, BLOCK)
        value: T = (self._blocks[block] if block < len(self._blocks) else self._newest)[row]
        return value

    def __setitem__(self, at: Any, value: Any) -> None:
        values = list(self)
        values[at] = value
        self._refill(values)

    def __delitem__(self, at: int | slice) -> None:
        values = list(self)
        del values[at]
        self._refill(values)

    def insert(self, at: SupportsIndex, value: T) -> None:
        """Put a value before another one."""
        values = list(self)
        values.insert(at, value)
        self._refill(values)

    def _refill(self, values: list[T]) -> None:
        self.clear()
        self.extend(values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Packed | list):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(frozen=True, slots=True, eq=False)
class _Same(Sequence[Any]):
    """A column of one value, over and over."""

    value: Any
    n: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: Any) -> Any:
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class _Rows(Sequence[Any]):
    """Values of one kind, of which each part has a column."""

    make: Any  # makes a value of its parts
    columns: tuple[Column, ...]
    n: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: Any) -> Any:
        return self.make(*[column[row] for column in self.columns])

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, *self.columns)


@dataclass(frozen=True, slots=True, eq=False)
class _Dictionaries(Sequence[Any]):
    """Dictionaries with the same keys in the same order; each key has a column."""

    keys: tuple[str, ...]
    columns: tuple[Column, ...]
    n: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: Any) -> Any:
        return dict(zip(self.keys, [column[row] for column in self.columns], strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Mixed(Sequence[Any]):
    """Values of a few kinds, each kind in a column of its own."""

    which: bytes  # of each value the column
    rows: array[int]  # and where it is in it
    columns: tuple[Column, ...]

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, row: Any) -> Any:
        return self.columns[self.which[row]][self.rows[row]]

    def __iter__(self) -> Iterator[Any]:
        streams = [iter(column) for column in self.columns]
        return (next(streams[which]) for which in self.which)


def _pack(values: Sequence[Any]) -> Column:
    """Return values in as few objects as they fit in without a loss; exact to the bit."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        (kind,) = kinds
        if kind is not dict:
            return _pack_alike(kind, values)
    elif dict not in kinds and kinds <= _SHARED:
        return tuple(values)
    shapes = [(dict, *value) if type(value) is dict else type(value) for value in values]
    parts: dict[Any, list[Any]] = {}
    which, rows = bytearray(), array("i")
    for shape, value in zip(shapes, values, strict=True):
        part = parts.setdefault(shape, [])
        if len(parts) > _FEW:
            return tuple(values)
        rows.append(len(part))
        part.append(value)
    number = {shape: at for at, shape in enumerate(parts)}
    which.extend(map(number.__getitem__, shapes))
    columns = [
        _pack_dictionaries(shape[1:], part)
        if isinstance(shape, tuple)
        else _pack_alike(shape, part)
        for shape, part in parts.items()
    ]
    return columns[0] if len(columns) == 1 else _Mixed(bytes(which), rows, tuple(columns))


#: Of these there is one object for each value.
_SHARED = {type(None), bool}


def _pack_alike(kind: type, values: Sequence[Any]) -> Column:
    n, first = len(values), values[0]
    if kind is float:
        packed = array("d", values)
        is_one = packed.tobytes() == n * packed[:1].tobytes()  # 0.0 equals -0.0
        return _Same(first, n) if is_one else packed
    if kind in _SHARED or kind is str or kind is int:
        if values.count(first) == n:
            return _Same(first, n)
        if kind is int:
            return _pack_whole_numbers(values)
        kept: dict[Any, Any] = {}  # of equal strings one stays
        return tuple(map(kept.setdefault, values, values))
    if all(value is first for value in values):
        return _Same(first, n)
    if getattr(kind, "_fields", ()):
        return _Rows(kind, tuple(map(_pack, zip(*values, strict=True))), n)
    names = _names(kind)
    if len(names) > 1:
        columns = zip(*map(attrgetter(*names), values), strict=True)
        return _Rows(kind, tuple(map(_pack, columns)), n)
    return tuple(values)


def _pack_whole_numbers(values: Sequence[int]) -> Column:
    for code in "iq":
        try:
            return array(code, values)
        except OverflowError:
            continue
    return tuple(values)


def _pack_dictionaries(keys: tuple[Any, ...], values: Sequence[dict[Any, Any]]) -> Column:
    columns = zip(*(value.values() for value in values), strict=True) if keys else ()
    return _Dictionaries(keys, tuple(map(_pack, columns)), len(values))


@cache
def _names(kind: type) -> tuple[str, ...]:
    """Return the fields of a frozen dataclass that is made of its fields; none of other types."""
    frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    parts = fields(kind) if frozen else ()  # type: ignore[arg-type]
    return tuple(part.name for part in parts) if all(part.init for part in parts) else ()
