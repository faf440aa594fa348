"""How many workers each trial had, over time."""

from __future__ import annotations

from dagsel.history.bars import bars, occupancy
from dagsel.history.plots.style import GREY, Figure, best_trials, colours, empty, plotly, styled
from dagsel.history.record import Record


def figure(record: Record) -> Figure:
    """Draw the workers of the best trials in colours, and those of all others in grey."""
    go = plotly()
    done = bars(record)
    if not done:
        return empty("no visit of a shard has ended yet")
    times, workers = occupancy(done)
    colour = colours(record)
    best = [number for number in best_trials(record) if number in workers]
    drawing = go.Figure()
    shared = {"mode": "lines", "stackgroup": "all", "x": times}
    template = "%{y:.2f} workers at %{x:.1f} s"
    for number in best:
        drawing.add_scatter(
            **shared,
            y=workers[number],
            name=f"trial {number}",
            line={"width": 0, "color": colour[number], "shape": "hv"},
            hovertemplate=f"trial {number}: {template}<extra></extra>",
        )
    others = [number for number in workers if number not in best]
    if others:
        drawing.add_scatter(
            **shared,
            y=sum(workers[number] for number in others),
            name=f"{len(others)} other trials",
            line={"width": 0, "color": GREY, "shape": "hv"},
            hovertemplate=f"others: {template}<extra></extra>",
        )
    there = [(moment.seconds, moment.n_workers) for moment in record.course]
    if there:
        drawing.add_scatter(
            x=[seconds for seconds, _ in there],
            y=[n for _, n in there],
            name="workers",
            mode="lines",
            line={"color": "#404040", "dash": "dot", "width": 1.5, "shape": "hv"},
            hovertemplate="%{y} workers from %{x:.1f} s on<extra></extra>",
        )
    drawing.update_xaxes(title="seconds since the run began", rangemode="tozero")
    drawing.update_yaxes(title="workers", rangemode="tozero")
    return styled(drawing, "Workers of each trial; white below the dotted line: idle", height=400)
