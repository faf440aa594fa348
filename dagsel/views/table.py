"""A snapshot of a search as a table: in a terminal, and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dagsel.console import html_table
from dagsel.views.snapshot import Snapshot, TrialRow
from dagsel.views.words import sparkline

#: Lines of a terminal that are left for what stands around the trials.
AROUND = 8
#: Trials that a notebook shows.
IN_NOTEBOOK = 20
_NUMBERS = (2, 3)  # columns


def terminal_lines(snapshot: Snapshot, *, height: int) -> list[str]:
    """Return what a terminal of so many lines shows; it cuts what is too long for it."""
    rows = snapshot.rows[: max(1, height - AROUND)]
    if not rows:
        return snapshot.head
    table = [_names(snapshot), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if k in _NUMBERS else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    return [*snapshot.head, *lines, *_more(snapshot, rows)]


def notebook_table(snapshot: Snapshot) -> str:
    """Return what a notebook shows, in HTML."""
    rows = snapshot.rows[:IN_NOTEBOOK]
    lines = [*snapshot.head, *_more(snapshot, rows)]
    text = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return text + (html_table([_names(snapshot), *map(_cells, rows)]) if rows else "")


def _names(snapshot: Snapshot) -> tuple[str, ...]:
    return "trial", "state", "epochs", snapshot.metric, "", "configuration"


def _cells(row: TrialRow) -> tuple[str, ...]:
    epochs = str(row.n_epochs)
    if row.n_decided > row.n_epochs:
        epochs += f"/{row.n_decided}"
    value = "" if row.value is None else f"{row.value:.4g}"
    return str(row.number), row.state, epochs, value, sparkline(row.curve), row.config


def _more(snapshot: Snapshot, rows: Sequence[TrialRow]) -> list[str]:
    n_more = len(snapshot.rows) - len(rows)
    return [f"and {n_more} more trials"] if n_more else []
