"""Metrics of trials over epochs or time."""

from __future__ import annotations

from typing import Any

from dagsel.console import shown_config
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
from dagsel.history.trial import EpochRecord, TrialRecord

TRAIN_LOSS = "train loss"


def metrics_of(record: Record) -> list[str]:
    """List the validation metrics that there are."""
    found = {
        name: None
        for trial in record.trials.values()
        for epoch in trial.epochs[:1]
        for name in epoch.metrics
    }
    return list(found)


def figure(record: Record, searched: str, metric: str, x: str) -> Figure:
    """Draw a metric of each trial; `searched` is the one that the search is about."""
    go = plotly()
    trials = [trial for trial in record.trials.values() if trial.epochs]
    if not trials:
        return empty("no trial has ended an epoch yet")
    best, colour = best_trials(record), colours(record)
    drawing = go.Figure()
    others = [trial for trial in trials if trial.number not in best]
    if others:
        grey: dict[str, list[Any]] = {"x": [], "y": [], "text": []}
        for trial in others:  # one line for all, which many trials do not make slow
            for name, values in _points(trial, searched, metric, x).items():
                grey[name] += [*values, None]
        n = len(others)
        drawing.add_scatter(
            **grey, name=f"{n} other{'s' * (n != 1)}", line={"color": GREY, "width": 1}, **_HOVER
        )
    for place, number in enumerate(best):
        trial = record.trials[number]
        points = _points(trial, searched, metric, x)
        line = {"color": colour[number], "width": 3 if place == 0 else 1.8}
        drawing.add_scatter(**points, name=f"trial {number} ({trial.state})", line=line, **_HOVER)
    drawing.update_xaxes(title="epoch" if x == "epochs" else "seconds since the run began")
    drawing.update_yaxes(title=plain(metric))
    return styled(drawing, f"{plain(metric)} of {len(trials)} trials", height=440)


_HOVER = {"mode": "lines+markers", "marker_size": 4, "hovertemplate": "%{text}<extra></extra>"}


def _points(trial: TrialRecord, searched: str, metric: str, x: str) -> dict[str, list[Any]]:
    ys = [_value(epoch, searched, metric) for epoch in trial.epochs]
    return {
        "x": [epoch.epoch if x == "epochs" else epoch.seconds for epoch in trial.epochs],
        "y": ys,
        "text": [
            f"<b>trial {trial.number}</b> ({trial.state}) after {epoch.epoch} epochs<br>"
            f"{plain(metric)} {y:.4g}<br>"
            f"{plain(shown_config(trial.params_at(epoch.epoch)))}"
            for epoch, y in zip(trial.epochs, ys, strict=True)
        ],
    }


def _value(epoch: EpochRecord, searched: str, metric: str) -> float:
    if metric == TRAIN_LOSS:
        return epoch.train_loss
    return epoch.metrics.get(metric, epoch.value if metric == searched else float("nan"))
