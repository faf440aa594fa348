"""What a search will take, as a table and a drawing, in text and in a notebook."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from dagsel.console import amount, html_table, span, svg_chart, text_chart, text_table
from dagsel.planning.prices import Price


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
    money
        The same in money, if workers differ in their price.

    Examples
    --------
    >>> row = Row(0.0, 60.0, gangs=((1, 4), (2, 2)), n_workers=8, worker_seconds=480.0)
    >>> row.n_trials  # 4 on one worker each, 2 on two
    6
    """

    begins_s: float
    lasts_s: float
    gangs: tuple[tuple[int, int], ...]
    n_workers: int
    worker_seconds: float
    money: float | None = None

    @property
    def n_trials(self) -> int:
        """Trials that train in it."""
        return sum(n for _, n in self.gangs)


@dataclass(frozen=True, slots=True)
class Interval:
    """The least and the most that a search takes, over several simulations of it.

    Parameters
    ----------
    n
        How many simulations. In each, workers are taken back at other times.
    seconds
        The least and the most time, in seconds.
    worker_seconds
        The least and the most that all workers together are billed.
    money
        The same in money; None if no price is known.

    Examples
    --------
    >>> Interval(n=10, seconds=(360.0, 420.0), worker_seconds=(1440.0, 1620.0)).money is None
    True
    """

    n: int
    seconds: tuple[float, float]
    worker_seconds: tuple[float, float]
    money: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Preview:
    """What a search will take. It shows itself as a table and a drawing.

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
        What an hour of a worker costs; of pools, of the dearest. None if it is not known.
    interval
        What the search takes where workers are taken back at other times; None if they are not.

    Examples
    --------
    >>> import dagsel
    >>> from dagsel.flows import RandomSearch
    >>> flow = RandomSearch(max_epochs=3, n_trials=8)
    >>> preview = dagsel.preview(flow, epoch_seconds=60, n_workers=4)
    >>> preview.seconds, preview.worker_minutes, preview.n_workers, preview.money
    (360.0, 24.0, 4, None)
    """

    flow: str
    source: Literal["arithmetic", "simulation"]
    rows: tuple[Row, ...]
    n_trials: int
    ends_early: bool
    price: Price | None = None
    interval: Interval | None = None

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
        known = [row.money for row in self.rows if row.money is not None]
        if known or self.price is None:
            return sum(known) if known else None
        return self.price.of(self.worker_seconds)

    def _money(self, row: Row) -> float | None:
        if row.money is not None:
            return row.money
        return None if self.price is None else self.price.of(row.worker_seconds)

    def __repr__(self) -> str:
        chart = text_chart(_levels(self.rows), seconds=self.seconds, most=self.n_workers)
        lines = [f"<{self._title()}", *text_table(self._table())]
        lines += [*(f" {told}" for told in self._range()), "", *chart]
        return "\n".join(lines) + ">"

    def _repr_html_(self) -> str:
        bars = [(row.begins_s, row.lasts_s, row.n_workers) for row in self.rows]
        text = f"up to {self.n_workers} workers over {span(self.seconds)}"
        chart = svg_chart(bars, seconds=self.seconds, most=self.n_workers, text=text)
        ranges = "".join(f"<p>{escape(told)}</p>" for told in self._range())
        return f"<p>{escape(self._title())}</p>{html_table(self._table())}{ranges}{chart}"

    def _range(self) -> list[str]:
        """Say what the search takes where workers are taken back at other times."""
        if self.interval is None:
            return []
        least_s, most_s = self.interval.seconds
        few, many = (amount(seconds / 60) for seconds in self.interval.worker_seconds)
        told = f"{span(least_s)} to {span(most_s)}, {few} to {many} worker-minutes"
        if self.interval.money is not None and self.price is not None:
            low, high = self.interval.money
            told += f", {low:,.2f} to {high:,.2f} {self.price.currency}"
        return [f"of {self.interval.n} with workers taken back at other times: {told}"]

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
            minutes = amount(row.worker_seconds / 60)
            rows.append((*when, _told(row.gangs), str(row.n_workers), minutes))
        total = ("total", "", span(self.seconds), str(self.n_trials), "", str(self.n_workers))
        rows.append((*total, amount(self.worker_minutes)))
        if self.price is None:
            return rows
        money = [f"{cost:,.2f}" for cost in (*map(self._money, self.rows), self.money)]
        return [(*row, cell) for row, cell in zip(rows, [self.price.currency, *money], strict=True)]


def _told(gangs: Sequence[tuple[int, int]]) -> str:
    if len(gangs) == 1:
        return str(gangs[0][0])
    return ", ".join(f"{n} on {gang}" for gang, n in gangs)


def _levels(rows: Sequence[Row]) -> Callable[[float], tuple[float, float]]:
    """Return how many workers are billed at a time, twice: nothing else is drawn."""
    starts = [row.begins_s for row in rows]

    def at(seconds: float) -> tuple[float, float]:
        n_workers = rows[max(0, bisect_right(starts, seconds) - 1)].n_workers
        return n_workers, n_workers

    return at
