"""How an input is read, and what has been read: what each reader is told and returns."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.sources import Arrays

logger = logging.getLogger("dagsel")

#: Which columns become which arrays: one column, or several that become one array of numbers.
Columns: TypeAlias = "Mapping[str, str | Sequence[str]] | Sequence[str]"
#: Of a column that says how samples are divided, among the arrays of a batch.
KEY = "__key__"

SAMPLES = 256  # that are joined in a block at most
_BLOCK_BYTES = 8 << 20
_SHOWN = 3

S = TypeVar("S")
R = TypeVar("R")
T = TypeVar("T", bound="Mapping[str, Any]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is read of an input.

    Parameters
    ----------
    columns
        Which columns become which arrays; None for all of them.
    by
        The column or array that says how the samples are divided, if one does.
    keeps_by
        Whether that one is stored too where all columns are.
    workers
        Processes that decode samples; 0 for this one.
    skips
        Whether samples that cannot be decoded are left out.
    ragged
        Arrays whose samples may differ in shape.
    """

    columns: Columns | None = None
    by: str | None = None
    keeps_by: bool = True
    workers: int = 0
    skips: bool = False
    ragged: Sequence[str] = ()

    def keeps(self, name: str) -> bool:
        """Whether a column is stored where all are."""
        return self.keeps_by or name != self.by

    def chosen(self, names: Sequence[str], what: str) -> dict[str, list[str]]:
        """Return of which columns each array is made."""
        columns: Any = self.columns
        if columns is None:
            columns = [name for name in names if self.keeps(name)]
        if isinstance(columns, str) or not isinstance(columns, Iterable):
            raise DatasetInputError(
                f'columns= is {columns!r}; write {{"x": ..., "y": {str(columns)!r}}}'
            )
        pairs = (
            columns.items()
            if isinstance(columns, Mapping)
            else ((str(name), name) for name in columns)
        )
        found = {name: _labels(of, names) for name, of in pairs}
        for name, of in found.items():
            for column in of:
                check_column(column, names, what)
            if not of:
                raise DatasetInputError(f"columns= makes {name!r} of no column; name one")
        return found

    def chosen_ones(self, names: Sequence[str], what: str, one: str) -> dict[str, str]:
        """Return of which one column each array is made; `one` says what a column is here."""
        wanted = self.chosen(names, what)
        if any(len(of) > 1 for of in wanted.values()):
            raise DatasetInputError(f"{what}: an array is made of one {one}; name one for each")
        return {name: of for name, (of,) in wanted.items()}

    def key(self, names: Sequence[str], what: str) -> str | None:
        """Return the column by which samples are divided, named as itself or as its array."""
        if self.by is None:
            return None
        of = self.chosen(names, what).get(self.by, [])
        column = of[0] if len(of) == 1 else self.by
        check_column(column, names, what)
        return column

    def no_columns(self, why: str) -> None:
        """Raise a `DatasetInputError` if columns are chosen where there are none."""
        if self.columns is not None:
            raise DatasetInputError(why)

    def nothing_to_decode(self, what: str) -> None:
        """Raise a `DatasetInputError` for options of what is decoded sample by sample."""
        if self.workers:
            raise DatasetInputError(
                f"workers= decode the samples of a data set that has a length, and {what} is a "
                "table, arrays, files or a stream; leave it out"
            )
        if self.skips:
            raise DatasetInputError(
                f'on_error="skip" is for images, tar files and data sets of samples, and {what} is '
                "nothing of these; leave it out"
            )


@dataclass(frozen=True, slots=True)
class Input:
    """What has been read.

    Parameters
    ----------
    arrays
        The arrays. Batches that have columns of text (as objects), a `KEY`, or no length must be
        spooled.
    values
        Returns the values of the column by which samples are divided, block by block; None if the
        batches have them as `KEY`.
    columns
        Of arrays that were made of several columns of a table: the columns' names.
    """

    arrays: Arrays
    values: Callable[[], Iterable[NDArray[Any]]] | None = None
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass
class Skipped:
    """Samples that could not be decoded."""

    is_allowed: bool
    what: str
    shown: list[str] = field(default_factory=list)
    n: int = 0

    def add(self, error: DatasetInputError) -> None:
        """Count a sample, or raise the error if none may be skipped."""
        if not self.is_allowed:
            raise error
        self.n += 1
        if self.n <= _SHOWN:
            self.shown.append(str(error))

    def tell(self, n_read: int) -> None:
        """Log how many there were, and the first ones."""
        if self.n:
            more = f"; and {self.n - _SHOWN:,} more" if self.n > _SHOWN else ""
            logger.warning(
                "%s: %s of %s samples cannot be decoded and are left out: %s%s",
                self.what,
                f"{self.n:,}",
                f"{n_read + self.n:,}",
                "; ".join(self.shown),
                more,
            )


def blocks(items: Iterable[T]) -> Iterator[list[T]]:
    """Join samples to blocks of a few megabytes; each is a mapping of arrays, texts and numbers."""
    held, n_bytes = list[T](), 0
    for item in items:
        held.append(item)
        n_bytes += sum(_bytes_of(value) for value in item.values())
        if len(held) == SAMPLES or n_bytes >= _BLOCK_BYTES:
            yield held
            held, n_bytes = [], 0
    if held:
        yield held


def _bytes_of(value: Any) -> int:
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if hasattr(value, "getbands"):  # an image of Pillow
        return int(np.prod(value.size)) * len(value.getbands())
    return 8 * len(value) if isinstance(value, list | tuple) else 8


def in_threads(decode: Callable[[S], R], items: Iterable[S]) -> Iterator[tuple[S, R]]:
    """Decode items in threads, a few ahead, in order."""
    n_threads = os.cpu_count() or 1
    with ThreadPoolExecutor(n_threads) as pool:
        waiting: deque[tuple[S, Future[R]]] = deque()
        for item in items:
            waiting.append((item, pool.submit(decode, item)))
            if len(waiting) > 4 * n_threads:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def as_objects(values: Sequence[Any]) -> NDArray[Any]:
    """Return an array of objects, whatever they are."""
    objects = np.empty(len(values), object)
    for at, value in enumerate(values):
        objects[at] = value
    return objects


def _labels(of: Any, names: Sequence[str]) -> list[str]:
    """Return the columns that are named; labels of pandas may be numbers or tuples.

    Examples
    --------
    >>> _labels(1, ["0", "1"]), _labels([0, 1], ["0", "1"]), _labels(("a", 0), ["('a', 0)", "a"])
    (['1'], ['0', '1'], ["('a', 0)"])
    """
    is_one = isinstance(of, str) or str(of) in names or not isinstance(of, Iterable)
    return [str(of)] if is_one else [str(each) for each in of]


def joined(wanted: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the arrays that are made of several columns, with the columns if they have names.

    Examples
    --------
    >>> joined({"x": ["age", "height"], "y": ["kind"], "numbered": ["0", "1"]})
    {'x': ['age', 'height']}
    """
    several = {name: list(of) for name, of in wanted.items() if len(of) > 1}
    return {name: of for name, of in several.items() if of != [*map(str, range(len(of)))]}


def check_column(name: str, names: Sequence[str], what: str) -> None:
    """Raise a `DatasetInputError` if there is no such column."""
    if name not in names:
        shown_names = ", ".join(map(repr, list(names)[:20])) + (", ..." if len(names) > 20 else "")
        raise DatasetInputError(f"{what}: there is no column {name!r}, but {shown_names}")
