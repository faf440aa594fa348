"""A snapshot of a search as a table: in a terminal, and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dagsel.console import html_table, printable
from dagsel.dispatch.description import WorkerNow
from dagsel.views.snapshot import Snapshot, TrialRow
from dagsel.views.words import doing, memory, sparkline

#: Lines of a terminal that are left for what stands around the trials.
AROUND = 8
#: Lines of `Snapshot.head` that are among them.
_HEAD = 3
#: Trials and workers that a notebook shows.
IN_NOTEBOOK = 50
_NUMBERS = (2, 3)  # columns
_WORKERS = ("worker", "does", "shards", "memory")


def terminal_lines(snapshot: Snapshot, *, height: int) -> list[str]:
    """Return what a terminal of so many lines shows; it cuts what is too long for it.

    Trials come first: workers get what they leave, or a quarter of the lines.
    """
    room = max(1, height - AROUND - max(0, len(snapshot.head) - _HEAD))
    spare = max(room - len(snapshot.rows), room // 4) - 2  # for a title and an empty line
    workers = snapshot.workers[: max(0, spare)]
    n_around = len(workers) + 2 if workers else 0
    rows = snapshot.rows[: max(1, room - n_around)]
    if not rows:
        return [*map(printable, snapshot.head)]
    lines = [*snapshot.head, *_columns([_names(snapshot), *map(_cells, rows)], _NUMBERS)]
    lines += _more(len(snapshot.rows) - len(rows), "trial")
    if workers:
        lines += ["", *_columns([_WORKERS, *map(_worker_cells, workers)], ())]
        lines += _more(len(snapshot.workers) - len(workers), "worker")
    return [*map(printable, lines)]


def _columns(table: Sequence[Sequence[str]], numbers: Sequence[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if k in numbers else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def notebook_table(snapshot: Snapshot) -> str:
    """Return what a notebook shows, in HTML."""
    rows, workers = snapshot.rows[:IN_NOTEBOOK], snapshot.workers[:IN_NOTEBOOK]
    text = "".join(f"<div>{escape(line)}</div>" for line in snapshot.head)
    text += _link(snapshot.dashboard)
    if rows:
        text += html_table([_names(snapshot), *map(_cells, rows)])
        text += "".join(
            f"<div>{line}</div>" for line in _more(len(snapshot.rows) - len(rows), "trial")
        )
    if workers:
        text += html_table([_WORKERS, *map(_worker_cells, workers)])
        n_more = len(snapshot.workers) - len(workers)
        text += "".join(f"<div>{line}</div>" for line in _more(n_more, "worker"))
    return text


def _link(dashboard: str) -> str:
    if not dashboard.startswith(("http://", "https://")):
        return ""
    return f'<div><a href="{escape(dashboard)}" target="_blank">Dask\'s dashboard</a></div>'


def _names(snapshot: Snapshot) -> tuple[str, ...]:
    return "trial", "state", "epochs", snapshot.metric, "", "configuration"


def _cells(row: TrialRow) -> tuple[str, ...]:
    epochs = str(row.n_epochs)
    if row.n_decided > row.n_epochs:
        epochs += f"/{row.n_decided}"
    value = "" if row.value is None else f"{row.value:.4g}"
    return str(row.number), row.state, epochs, value, sparkline(row.curve), row.config


def _worker_cells(now: WorkerNow) -> tuple[str, ...]:
    return now.name, doing(now), str(now.n_held), memory(now)


def _more(n_more: int, what: str) -> list[str]:
    return [f"and {n_more} more {what}{'s' * (n_more != 1)}"] if n_more > 0 else []
