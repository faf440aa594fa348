"""What a search will take, as a table and a drawing, in text and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from dagsel.console import html_table, text_table
from dagsel.planning.prices import Price

#: Columns and lines of the drawing in text, and its size in a notebook.
COLUMNS, LINES = 60, 8
WIDTH_PX, HEIGHT_PX = 480, 96


@dataclass(frozen=True, slots=True)
class Row:
    """A span of a search.

    Parameters
    ----------
    begins_s
        Its begin, in seconds since the first workers are asked for.
    lasts_s
        Its length in seconds.
    gangs
        Pairs: a number of workers, and how many trials train on so many.
    n_workers
        The most workers that are billed at a time.
    worker_seconds
        What all workers are billed.
    """

    begins_s: float
    lasts_s: float
    gangs: tuple[tuple[int, int], ...]
    n_workers: int
    worker_seconds: float

    @property
    def n_trials(self) -> int:
        """Trials that train in it."""
        return sum(n for _, n in self.gangs)


@dataclass(frozen=True, slots=True, repr=False)
class Preview:
    """What a search will take; it shows itself as a table and a drawing.

    Parameters
    ----------
    flow
        Name of the search procedure.
    source
        ``"arithmetic"``: the procedure's own plan, which holds if nothing fails and workers come at
        once. ``"simulation"``: what it did in virtual time.
    rows
        One for each stage. In a simulation: one for each span with the same number of workers, or
        equal parts of the time if that never changes.
    n_trials
        Number of trials that train.
    ends_early
        Whether deadline or budget end the run before its own end.
    price
        What an hour of a worker costs; None if it is not known.
    """

    flow: str
    source: Literal["arithmetic", "simulation"]
    rows: tuple[Row, ...]
    n_trials: int
    ends_early: bool
    price: Price | None = None

    @property
    def seconds(self) -> float:
        """From the request for the first workers to the end."""
        return sum(row.lasts_s for row in self.rows)

    @property
    def worker_seconds(self) -> float:
        """What all workers together are billed."""
        return sum(row.worker_seconds for row in self.rows)

    @property
    def worker_minutes(self) -> float:
        """What all workers together are billed, in minutes."""
        return self.worker_seconds / 60

    @property
    def n_workers(self) -> int:
        """The most workers that are billed at a time."""
        return max(row.n_workers for row in self.rows)

    @property
    def money(self) -> float | None:
        """What it costs; None if the price is not known."""
        return None if self.price is None else self.price.of(self.worker_seconds)

    def __repr__(self) -> str:
        lines = [f"<{self._title()}", *text_table(self._table()), "", *_draw(self.rows)]
        return "\n".join(lines) + ">"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._title())}</p>{html_table(self._table())}{_svg(self.rows)}"

    def _title(self) -> str:
        how = "its own plan" if self.source == "arithmetic" else "a simulation"
        end = ", ended by deadline or budget" if self.ends_early else ""
        return f"Preview of {self.flow}, from {how}{end}"

    def _table(self) -> list[tuple[str, ...]]:
        titles: tuple[str, ...] = (
            "stage" if self.source == "arithmetic" else "part",
            "begins",
            "lasts",
            "trials",
            "workers a trial",
            "workers",
            "worker-minutes",
        )
        rows = [titles]
        for number, row in enumerate(self.rows, 1):
            when = (str(number), span(row.begins_s), span(row.lasts_s), str(row.n_trials))
            minutes = _amount(row.worker_seconds / 60)
            rows.append((*when, _told(row.gangs), str(row.n_workers), minutes))
        total = ("total", "", span(self.seconds), str(self.n_trials), "", str(self.n_workers))
        rows.append((*total, _amount(self.worker_minutes)))
        if self.price is None:
            return rows
        costs = [*(row.worker_seconds for row in self.rows), self.worker_seconds]
        money = [f"{self.price.of(cost):,.2f}" for cost in costs]
        return [(*row, cell) for row, cell in zip(rows, [self.price.currency, *money], strict=True)]


def _told(gangs: Sequence[tuple[int, int]]) -> str:
    if len(gangs) == 1:
        return str(gangs[0][0])
    return ", ".join(f"{n} on {gang}" for gang, n in gangs)


def span(seconds: float) -> str:
    """Return a span of time as a text.

    Examples
    --------
    >>> span(0), span(85.7), span(343), span(86400)
    ('0 s', '85.7 s', '5.72 min', '24 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{_amount(seconds / size)} {unit}"
    return f"{_amount(seconds)} s"


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _draw(rows: Sequence[Row]) -> list[str]:
    """Draw workers over time: a column is as high as the workers in its middle, rounded up."""
    most, seconds = max(row.n_workers for row in rows), sum(row.lasts_s for row in rows)
    height = min(LINES, most)
    starts = [row.begins_s for row in rows]
    tops = []
    for column in range(COLUMNS):
        middle = (column + 0.5) * seconds / COLUMNS
        index = max(i for i, start in enumerate(starts) if i == 0 or start <= middle)
        tops.append(-(-rows[index].n_workers * height // most))
    width = len(str(most))
    lines = [
        f" {most if line == height else '':>{width}} |"
        + "".join(" #"[top >= line] for top in tops).rstrip()
        for line in range(height, 0, -1)
    ]
    end = span(seconds)
    axis = f" {'0':>{width}} +{'-' * COLUMNS}"
    return [*lines, axis, " " * (width + 3) + "0 s" + end.rjust(COLUMNS - 3)]


def _svg(rows: Sequence[Row]) -> str:
    most, seconds = max(row.n_workers for row in rows), sum(row.lasts_s for row in rows)
    bars = []
    for row in rows:
        x, width = (WIDTH_PX * s / seconds for s in (row.begins_s, row.lasts_s))
        height = HEIGHT_PX * row.n_workers / most
        told = f"{row.n_workers} workers for {span(row.lasts_s)}"
        bars.append(
            f'<rect x="{x:.1f}" y="{HEIGHT_PX - height:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"><title>{told}</title></rect>'
        )
    text = f"up to {most} workers over {span(seconds)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX}" height="{HEIGHT_PX}" '
        f'role="img" aria-label="{text}" fill="#4c78a8">{"".join(bars)}</svg><p>{text}</p>'
    )
