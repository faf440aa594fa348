"""What a search has cost, over time and by trial."""

from __future__ import annotations

import math

from dagsel.history.bars import bars, busy_seconds
from dagsel.history.plots.style import COLOURS, GREY, Figure, colours, empty, plotly, styled
from dagsel.history.record import Record
from dagsel.planning.budget import Budget

#: So many trials have a bar: those that took most.
N_TRIALS = 30


def figure(record: Record, deadline_s: float | None, budget: Budget | None) -> Figure:
    """Draw what was billed over time, with the limits, and what each trial took of it."""
    plotly()
    if not record.course:
        return empty("nothing was billed yet")
    from plotly.subplots import make_subplots

    drawing = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.6, 0.4],
        subplot_titles=("billed, from request to release", "trained and scored, by trial"),
        horizontal_spacing=0.12,
    )
    drawing.add_scatter(
        x=[moment.seconds for moment in record.course],
        y=[moment.worker_seconds for moment in record.course],
        mode="lines",
        line={"color": COLOURS[0], "width": 2.5},
        name="billed",
        hovertemplate="%{y:.4g} worker-seconds after %{x:.1f} s<extra></extra>",
        row=1,
        col=1,
    )
    limit = math.inf if budget is None else budget.worker_seconds
    # The lines meet at the top right; their names are at the other ends.
    dotted = {"line_dash": "dot", "annotation_position": "bottom left", "row": 1, "col": 1}
    if limit < math.inf:
        drawing.add_hline(y=limit, annotation_text="budget", **dotted)
    if deadline_s is not None:
        drawing.add_vline(x=deadline_s, annotation_text="deadline", **dotted)
    busy, colour = busy_seconds(bars(record)), colours(record)
    most = sorted(busy.items(), key=lambda item: -item[1])[:N_TRIALS]
    drawing.add_bar(
        x=[f"{number}" for number, _ in most],
        y=[seconds for _, seconds in most],
        marker_color=[colour.get(number, GREY) for number, _ in most],
        hovertemplate="trial %{x}: %{y:.4g} worker-seconds<extra></extra>",
        row=1,
        col=2,
    )
    drawing.update_xaxes(title="seconds since the run began", rangemode="tozero", row=1, col=1)
    drawing.update_xaxes(title="trial", type="category", row=1, col=2)
    drawing.update_yaxes(title="worker-seconds", rangemode="tozero", row=1, col=1)
    end = record.course[-1]
    idle = end.worker_seconds - sum(busy.values())
    share = idle / end.worker_seconds if end.worker_seconds else 0.0
    title = f"{end.worker_seconds:,.4g} worker-seconds, {share:.0%} of them start, end or idle"
    price = None if budget is None else budget.price
    paid = end.money if end.money is not None else price and price.of(end.worker_seconds)
    if paid is not None:
        title += f"; {paid:,.2f} {'' if price is None else price.currency}".rstrip()
    return styled(drawing, title, showlegend=False, height=400)
