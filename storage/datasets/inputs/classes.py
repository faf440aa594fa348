"""Text and categories as numbers; which number stands for what is in the manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import DatasetInputError

logger = logging.getLogger("dagsel")

#: So many classes may be those of as many samples.
_MANY = 100


@dataclass
class Classes:
    """The values of arrays that hold classes, in the order of their numbers."""

    known: dict[str, list[str]] = field(default_factory=dict)
    is_fixed: bool = False  # of validation data: no further class may come
    _numbers: dict[str, dict[str, int]] = field(default_factory=dict)

    def encode(self, name: str, values: NDArray[Any], where: str) -> NDArray[np.int64]:
        """Return the number of each value; raise a `DatasetInputError` for one that has none."""
        self._check_known(name, where)
        _check_text(name, values, where)
        numbers = {value: number for number, value in enumerate(self.known[name])}
        unseen = sorted(set(values) - numbers.keys())
        if unseen:
            at = int(np.flatnonzero(values == unseen[0])[0])
            raise DatasetInputError(
                f"{where}: {name!r} has the class {unseen[0][:60]!r} in row {at}, which the "
                "training data lacks; put such samples there, or leave them out, or leave out "
                f"{name!r}, as by columns=, if no model takes it"
            )
        return np.array([numbers[value] for value in values], np.int64)

    def takes_over(self, name: str, values: Sequence[str] | None, where: str) -> bool:
        """Whether the numbers of these classes, or of none, can stay as they are.

        The first data decides what they stand for. Numbers of a data set for validation that stand
        for nothing, where those of the training data do, are told in the log.
        """
        if values is None:
            if self.is_fixed and name in self.known:
                logger.warning(
                    "%s: %r is numbers, and text in the training data: make sure that 0 stands for "
                    "%r, or give text",
                    where,
                    name,
                    self.known[name][0],
                )
            return True
        if self.is_fixed:
            self._check_known(name, where)
            return self.known[name] == list(values)
        self.known[name] = list(values)
        return True

    def _check_known(self, name: str, where: str) -> None:
        if name not in self.known:
            raise DatasetInputError(
                f"{where}: {name!r} is text, and something else in the training data; make both "
                "text, or both numbers"
            )

    def learn(self, name: str, values: NDArray[Any], where: str) -> NDArray[np.int64]:
        """Return a number for each value, in the order in which they come first; see `settle`."""
        _check_text(name, values, where)
        numbers = self._numbers.setdefault(name, {})
        return np.array([numbers.setdefault(str(v), len(numbers)) for v in values], np.int64)

    def settle(self, name: str) -> NDArray[np.int64]:
        """Order what was learnt; return the number in that order of each number of `learn`.

        Examples
        --------
        >>> classes = Classes()
        >>> numbers = classes.learn("y", np.array(["dog", "cat", "dog"]), "here")
        >>> classes.settle("y")[numbers].tolist(), classes.known
        ([1, 0, 1], {'y': ['cat', 'dog']})
        """
        self.known[name] = sorted(self._numbers[name])
        place = {value: number for number, value in enumerate(self.known[name])}
        return np.array([place[value] for value in self._numbers[name]], np.int64)

    def say_unlike(self, n_rows: int) -> None:
        """Say in the log which text has another value in almost every row, as no class has."""
        for name, values in self.known.items():
            if len(values) > max(_MANY, 0.9 * n_rows):
                logger.warning(
                    "%r holds %d different texts in %d rows, and each becomes a number, as a class "
                    "does: %s",
                    name,
                    len(values),
                    n_rows,
                    f"they are numbers, so write {name}.astype(float)"
                    if all(map(_is_number, values))
                    else "leave it out, as by columns=, if no model takes it",
                )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_text(name: str, values: NDArray[Any], where: str) -> None:
    missing = [at for at, value in enumerate(values) if not isinstance(value, str)]
    if missing:
        raise DatasetInputError(
            f"{where}: row {missing[0]} of {name!r} is {values[missing[0]]!r}, and others are "
            "text; fill it in, or leave the row out"
        )
