"""`Run.plan`: what was planned, what was done and what it cost, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from dagsel.console import amount, html_table, span, svg_chart, text_chart, text_table
from dagsel.history.course import Course
from dagsel.history.plan_differences import differences
from dagsel.history.plan_rows import PlanRow, PlanSpan, plan_rows, planned_stages
from dagsel.history.record import Record
from dagsel.planning.budget import Budget

_Bar = tuple[float, float, float]


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport:
    """What was planned, what was done and what it cost. It shows itself as a table and a drawing.

    Parameters
    ----------
    run
        Name of the run.
    rows
        One for the start of the cluster until the first unit trains, one for each planned stage,
        one for the release of the workers. Without a plan: one for each span with the same number
        of workers instead of the stages. What is done adds up to `seconds` and `worker_seconds`.
    differences
        A sentence for each difference.
    n_trials
        Trials that have trained.
    deadline_s, budget
        The limits of the run; None for no limit. `budget` has the price of a worker, if it is
        known.
    billed, planned
        Workers over time, as triples: begin, length, and a number of workers.

    Examples
    --------
    >>> import dagsel
    >>> from dagsel.flows import RandomSearch
    >>> from dagsel.simulation import PowerLaw, SimulatedCluster
    >>> run = dagsel.simulate(
    ...     RandomSearch(max_epochs=3, n_trials=8),
    ...     PowerLaw(epoch_s=60.0),
    ...     SimulatedCluster(n_workers=4),
    ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
    ... )
    >>> run.plan.seconds, run.plan.worker_seconds, run.plan.money
    (360.0, 1440.0, None)
    >>> run.plan.rows[0].name, run.plan.rows[0].done.n_workers
    ('part 1', 4.0)
    """

    run: str
    rows: tuple[PlanRow, ...]
    differences: tuple[str, ...]
    n_trials: int
    deadline_s: float | None
    budget: Budget | None
    billed: tuple[_Bar, ...]
    planned: tuple[_Bar, ...]

    @classmethod
    def of(
        cls, record: Record, deadline_s: float | None = None, budget: Budget | None = None
    ) -> PlanReport:
        """Compare what a run has done with its plans."""
        rows = tuple(plan_rows(record))
        planned = [
            (s.begins_s, s.seconds, float(s.n_workers)) for s in planned_stages(record.plans)
        ]
        start = rows[0].planned if rows and rows[0].name == "start" else None
        if start is not None and planned:
            planned = [(0.0, start.lasts_s, start.n_workers), *planned]
        return cls(
            record.run,
            rows,
            tuple(differences(record, rows, deadline_s, budget)),
            len({one.trial for one in record.trained}),
            deadline_s,
            budget,
            tuple(Course(record.course).bars()) if record.course else (),
            tuple(planned),
        )

    @property
    def seconds(self) -> float:
        """From the call to the release of the workers."""
        return sum(row.done.lasts_s for row in self.rows if row.done is not None)

    @property
    def worker_seconds(self) -> float:
        """What all workers together were billed."""
        return sum(row.done.worker_seconds for row in self.rows if row.done is not None)

    @property
    def money(self) -> float | None:
        """What it cost; None if the price is not known."""
        return self._money([row.done for row in self.rows])

    def _money(self, parts: Sequence[PlanSpan | None]) -> float | None:
        there = [part for part in parts if part is not None]
        paid = [part.money for part in there if part.money is not None]
        if paid:
            return sum(paid)
        price = None if self.budget is None else self.budget.price
        return None if price is None else price.of(sum(part.worker_seconds for part in there))

    def __repr__(self) -> str:
        lines = [f"<{self._title()}"]
        if self.rows:
            lines += [*self._text_table(), "", *self._text_chart()]
        lines += ["", *(f"- {told}" for told in self.differences)] if self.differences else []
        return "\n".join(lines) + ">"

    def _repr_html_(self) -> str:
        told = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.differences)
        drawn = f"{html_table(self._html_rows())}{self._svg()}" if self.rows else ""
        return f"<p>{escape(self._title())}</p>{drawn}<ul>{told}</ul>"

    def _title(self) -> str:
        if not self.rows:
            return f"Run {self.run}: nothing was done"
        limit = "" if self.deadline_s is None else f" of {span(self.deadline_s)}"
        cost, unit = amount(self.worker_seconds / 60), "worker-minutes"
        budget = self.budget
        if budget is not None and budget.worker_seconds < math.inf:
            cost += f" of {amount(budget.worker_seconds / 60)}"
        money = "" if self.money is None else f", {self.money:,.2f} {self._currency}"
        searched_s = sum(
            row.done.lasts_s for row in self.rows if row.done is not None and row.name != "release"
        )
        return f"Run {self.run}: {span(searched_s)}{limit}, {cost} {unit}{money}"

    @property
    def _currency(self) -> str:
        price = None if self.budget is None else self.budget.price
        return "money" if price is None else price.currency or "money"

    # ---- the table

    def _titles(self) -> tuple[str, ...]:
        titles = ("begins", "lasts", "trials", "workers", "worker-min")
        return titles if self.money is None else (*titles, self._currency)

    def _cells(self, part: PlanSpan | None) -> tuple[str, ...]:
        if part is None:
            return ("",) * len(self._titles())
        n_trials = str(part.n_trials) if part.n_trials else ""
        when = (span(part.begins_s), span(part.lasts_s), n_trials)
        return (*when, amount(part.n_workers), *self._cost([part]))

    def _cost(self, parts: Sequence[PlanSpan]) -> tuple[str, ...]:
        minutes, money = sum(part.worker_seconds for part in parts) / 60, self._money(parts)
        return (amount(minutes), *(() if money is None else (f"{money:,.2f}",)))

    def _total(self, parts: Sequence[PlanSpan | None], n_trials: int) -> tuple[str, ...]:
        there = [part for part in parts if part is not None]
        if not there:
            return self._cells(None)
        trials = str(n_trials) if n_trials else ""
        return ("", span(sum(part.lasts_s for part in there)), trials, "", *self._cost(there))

    def _side(self, parts: Sequence[PlanSpan | None], n_trials: int) -> list[tuple[str, ...]]:
        return [self._titles(), *map(self._cells, parts), self._total(parts, n_trials)]

    def _sides(self) -> tuple[list[str], list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Return the names of the rows, and the cells of what was planned and of what was done."""
        planned = [row.planned for row in self.rows]
        most = max((part.n_trials for part in planned if part is not None), default=0)
        names = ["", *(row.name for row in self.rows), "total"]
        done = self._side([row.done for row in self.rows], self.n_trials)
        return names, self._side(planned, most), done

    def _text_table(self) -> list[str]:
        names, planned, done = self._sides()
        width = max(map(len, names))
        right = text_table(done)
        if not self.planned:
            return [f" {name:<{width}}{cells}" for name, cells in zip(names, right, strict=True)]
        left = text_table(planned)
        head = f" {'':<{width}} {'planned':<{len(left[0])}}| done"
        rows = zip(names, left, right, strict=True)
        return [head, *(f" {name:<{width}}{one} |{other}" for name, one, other in rows)]

    def _html_rows(self) -> list[tuple[str, ...]]:
        names, planned, done = self._sides()
        if not self.planned:
            return [(name, *cells) for name, cells in zip(names, done, strict=True)]
        head = [
            tuple(f"{title}, {what}" for title in self._titles()) for what in ("planned", "done")
        ]
        body = zip(names[1:], planned[1:], done[1:], strict=True)
        return [("", *head[0], *head[1]), *((name, *one, *other) for name, one, other in body)]

    # ---- the drawing

    @property
    def _ends_s(self) -> float:
        return max(begins + lasts for begins, lasts, _ in (*self.billed, *self.planned))

    @property
    def _most(self) -> int:
        return max(1, *(round(n) for _, _, n in (*self.billed, *self.planned)))

    def _text_chart(self) -> list[str]:
        if not self.billed:
            return []
        billed = _level(self.billed)
        planned = _level(self.planned) if self.planned else billed
        lines = text_chart(
            lambda at: (planned(at), billed(at)), seconds=self._ends_s, most=self._most
        )
        if not self.planned:
            return lines
        return [*lines, "   workers: # planned and billed, . only planned, + only billed"]

    def _svg(self) -> str:
        if not self.billed:
            return ""
        text = f"billed workers over {span(self._ends_s)}"
        text += "; the frames are what was planned" if self.planned else ""
        return svg_chart(
            self.billed, seconds=self._ends_s, most=self._most, text=text, outline=self.planned
        )


def _level(bars: Sequence[_Bar]) -> Callable[[float], float]:
    """Return how many workers there are at a time, without what rounding has added."""

    def at(seconds: float) -> float:
        found = (n for begins, lasts, n in bars if begins <= seconds < begins + lasts)
        return max(0.0, next(found, 0.0) - 1e-6)

    return at
