"""How much dagsel logs."""

from __future__ import annotations

import logging
import sys
from typing import Literal, TypeAlias

from dagsel.checks import choice, short_traceback
from dagsel.console import printable_lines

Verbosity: TypeAlias = Literal["debug", "info", "warning", "error"]

_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


class PrintableFormatter(logging.Formatter):
    """Leaves out what a terminal obeys: names and texts of files may be another's."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        return printable_lines(super().format(record))


class _OnStandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what standard error is at that moment, as in a notebook it changes."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(PrintableFormatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@short_traceback
def set_verbosity(level: Verbosity | int) -> None:
    """Set how much dagsel logs, by Python's `logging` under the name ``"dagsel"``.

    By default there are warnings. ``"info"`` adds when a search begins and ends, workers that come
    and go, trials as they end, and commands; ``"debug"`` each visit of a shard. Lines are written
    to standard error, unless the program has handlers of its own, for ``"dagsel"`` or for all: then
    they are left to those.

    Parameters
    ----------
    level
        ``"debug"``, ``"info"``, ``"warning"`` or ``"error"``, or a number as of `logging`.

    Raises
    ------
    SearchError
        If it is neither.

    Examples
    --------
    >>> set_verbosity("info")
    >>> logging.getLogger("dagsel").level
    20
    >>> set_verbosity("warning")
    """
    number = level if isinstance(level, int) and not isinstance(level, bool) else None
    if number is None:
        number = logging.getLevelNamesMapping()[
            choice("level", level, ("debug", "info", "warning", "error")).upper()
        ]
    logger = logging.getLogger("dagsel")
    logger.setLevel(number)
    if not logger.hasHandlers():
        logger.addHandler(_OnStandardError())
