"""A long list of values of one kind of which the older ones are packed: little memory, few objects.

A record has an entry for each unit that was ever trained. As objects these take most of a search's
memory, and Python's garbage collector walks all of them again and again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, SupportsIndex, TypeVar, overload

T = TypeVar("T")

#: So many values are packed at a time; fewer of the newest ones are kept as they are.
BLOCK = 128


class Packed(MutableSequence[T]):
    """A list of dataclasses or named tuples, all but the newest of which are packed.

    It is made to append to, to look at, and to read from its beginning to its end. A packed value
    is made anew when it is read: equal to the one that was appended, and another object. One thread
    may append while others read.

    Examples
    --------
    >>> from dagsel.history.course import TrainedSpan
    >>> spans = Packed(TrainedSpan(trial, 0.0, 1.5) for trial in range(2000))
    >>> len(spans), spans[7], spans[-1].trial
    (2000, TrainedSpan(trial=7, begin=0.0, end=1.5), 1999)
    """

    __slots__ = ("_blocks", "_newest", "_opened")

    def __init__(self, values: Iterable[T] = ()) -> None:
        self.clear()
        self.extend(values)

    def clear(self) -> None:
        """Remove all values."""
        self._blocks: list[bytes | list[T]] = []
        # The number of blocks and what follows on them, always changed together.
        self._newest: tuple[int, list[T]] = (0, [])
        self._opened: tuple[int, list[T]] = (-1, [])  # the block that was looked at last

    def append(self, value: T) -> None:
        """Add a value."""
        n_blocks, newest = self._newest
        newest.append(value)
        if len(newest) == BLOCK:
            self._blocks.append(_pack(newest))
            self._newest = (n_blocks + 1, [])

    @property
    def newest(self) -> T | None:
        """The value that was appended last; None if there is none."""
        return self._newest[1][-1] if self._newest[1] else self[-1] if self else None

    def __len__(self) -> int:
        n_blocks, newest = self._newest
        return BLOCK * n_blocks + len(newest)

    def __iter__(self) -> Iterator[T]:
        n_blocks, newest = self._newest
        for number in range(n_blocks):
            yield from _unpack(self._blocks[number])
        yield from newest

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        n_blocks, newest = self._newest
        n = BLOCK * n_blocks + len(newest)
        if isinstance(at, slice):
            return [self._at(place, n_blocks, newest) for place in range(*at.indices(n))]
        place = at + n if at < 0 else at
        if not 0 <= place < n:
            raise IndexError(f"there are {n} values, none at {at}")
        return self._at(place, n_blocks, newest)

    def _at(self, place: int, n_blocks: int, newest: list[T]) -> T:
        number, row = divmod(place, BLOCK)
        if number == n_blocks:
            return newest[row]
        opened = self._opened
        if opened[0] != number:
            opened = self._opened = (number, _unpack(self._blocks[number]))
        return opened[1][row]

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


def _pack(values: list[T]) -> bytes | list[T]:
    """Return values of one kind as one object; if they cannot be packed, as they are."""
    kind: Any = type(values[0])
    read = _reader(kind)
    if read is None or any(type(value) is not kind for value in values):
        return values
    try:
        return pickle.dumps((kind, [*map(read, values)]), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - a user's own object among the metrics may raise anything
        return values


def _unpack(block: bytes | list[T]) -> list[T]:
    if isinstance(block, list):
        return block
    kind, rows = pickle.loads(block)  # noqa: S301 - this process has made it
    return [kind(*row) for row in rows]


@cache
def _reader(kind: type[Any]) -> Callable[[Any], Any] | None:
    """Return what reads the parts that a value can be made of again; None if it has none such."""
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple
    names = [part.name for part in fields(kind) if part.init] if is_dataclass(kind) else []
    is_made_of_them = len(names) > 1 and len(names) == len(fields(kind))
    return attrgetter(*names) if is_made_of_them else None
