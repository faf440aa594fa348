"""A Gantt chart of the visits of shards on the workers."""

from __future__ import annotations

from collections.abc import Sequence

from dagsel.history.bars import Bar, bars, busy_seconds, lanes, worker_names
from dagsel.history.plots.style import (
    GREY,
    Figure,
    best_trials,
    colours,
    empty,
    plain,
    plotly,
    styled,
)
from dagsel.history.record import Record

#: If there are more bars, those of a trial that follow each other are joined.
MOST_BARS = 3000
#: Gaps of up to this share of the whole time are joined then.
_GAP_SHARE = 0.005
#: So many trials stand in the legend.
_N_NAMED = 24


def figure(record: Record, name: str) -> Figure:
    """Draw what each worker did and when."""
    go = plotly()
    done = bars(record)
    if not done:
        return empty("no visit of a shard has ended yet")
    names, colour = worker_names(done), colours(record)
    drawn = joined(done)
    drawing = go.Figure()
    by_trial: dict[int, list[tuple[Bar, int]]] = {}
    for bar, n_visits in drawn:
        by_trial.setdefault(bar.trial, []).append((bar, n_visits))
    best = best_trials(record)
    order = [*(number for number in best if number in by_trial), *sorted(by_trial.keys() - {*best})]
    for position, trial in enumerate(order):
        parts = by_trial[trial]
        drawing.add_bar(
            name=f"trial {trial}",
            legendgroup=str(trial),
            showlegend=position < _N_NAMED,
            orientation="h",
            y=[names[bar.worker] for bar, _ in parts],
            x=[bar.end - bar.begin for bar, _ in parts],
            base=[bar.begin for bar, _ in parts],
            marker={
                "color": colour.get(trial, GREY),
                "opacity": [1.0 if bar.kind == "train" else 0.45 for bar, _ in parts],
                "line": {"color": "#202020", "width": [1.5 if b.hop else 0.0 for b, _ in parts]},
            },
            text=[_told(bar, n_visits) for bar, n_visits in parts],
            hovertemplate="%{text}<extra></extra>",
            textposition="none",
        )
    begin, end = min(bar.begin for bar in done), max(bar.end for bar in done)
    bound = begin + bound_s(done)
    drawing.add_vline(x=bound, line_dash="dot", line_color="#404040")
    busy = sum(busy_seconds(done).values()) / (len(names) * (end - begin) or 1.0)
    n = len(names)
    title = (
        f"{plain(name)}: {n} worker{'s' * (n != 1)}, {busy:.0%} busy from the first visit on; "
        f"dotted: no schedule ends before {bound:.3g} s"
    )
    drawing.update_xaxes(title="seconds since the run began", rangemode="tozero")
    drawing.update_yaxes(autorange="reversed", categoryarray=list(names.values()))
    height = 160 + 26 * max(4, min(n, 60))
    return styled(drawing, title, barmode="overlay", bargap=0.15, height=height)


def bound_s(done: Sequence[Bar]) -> float:
    """Return a time that these visits take at least, from the first one on.

    A trial is on one worker at a time, or on those of a gang; and the workers can at best be always
    busy.
    """
    chains: dict[int, dict[tuple[float, float], float]] = {}
    for bar in done:
        if bar.kind == "train":  # the members of a gang have one time
            chains.setdefault(bar.trial, {})[bar.begin, bar.end] = bar.end - bar.begin
    longest = max((sum(times.values()) for times in chains.values()), default=0.0)
    return max(longest, sum(busy_seconds(done).values()) / len({bar.worker for bar in done}))


def joined(done: Sequence[Bar]) -> list[tuple[Bar, int]]:
    """Return bars with the number of visits of each; of many, those that follow are one.

    Examples
    --------
    >>> one = Bar("a", 0, "train", 1, 0, 0.0, 1.0, False)
    >>> many = [one._replace(begin=float(k), end=k + 0.9) for k in range(4000)]
    >>> [(bar.begin, bar.end, n) for bar, n in joined(many)]
    [(0.0, 3999.9, 4000)]
    """
    if len(done) <= MOST_BARS:
        return [(bar, 1) for bar in done]
    gap = _GAP_SHARE * max(bar.end for bar in done)
    found: list[tuple[Bar, int]] = []
    for _, lane in lanes(done):
        row: list[tuple[Bar, int]] = []
        for bar in sorted(lane, key=lambda bar: bar.begin):
            last, n = row[-1] if row else (None, 0)
            is_same = last is not None and (last.trial, last.kind) == (bar.trial, bar.kind)
            if last is not None and is_same and bar.begin - last.end <= gap:
                row[-1] = (last._replace(end=max(last.end, bar.end), epoch=bar.epoch), n + 1)
            else:
                row.append((bar, 1))
        found += row
    return found


def _told(bar: Bar, n_visits: int) -> str:
    where = f"epoch {bar.epoch}, shard {bar.shard}" if n_visits == 1 else f"{n_visits} visits"
    kind = {"train": "trains", "evaluate": "is scored", "check": "is scored"}[bar.kind]
    hop = "<br>its state came from another worker" if bar.hop else ""
    times = f"{bar.begin:.2f} s to {bar.end:.2f} s ({bar.end - bar.begin:.3g} s)"
    return f"<b>trial {bar.trial}</b> {kind}: {where}<br>{times}{hop}"
