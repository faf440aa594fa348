"""One page of HTML on a search, which needs no network and no other file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from dagsel.codec import finite_part
from dagsel.console import amount, shown_config, span
from dagsel.history.bars import bars, busy_seconds, worker_names
from dagsel.history.plots.style import best_trials, colours
from dagsel.history.plots.timeline import bound_s, joined
from dagsel.history.record import Record
from dagsel.history.sparks import spark
from dagsel.history.tables import ranked
from dagsel.history.trial import TrialRecord
from dagsel.planning.budget import Budget

#: At most so many points say how the cost grew.
_MOST_POINTS = 1000


def report_page(
    name: str,
    metric: str,
    record: Record,
    deadline_s: float | None,
    budget: Budget | None,
    made: Mapping[str, Any],
) -> str:
    """Return the page.

    Parameters
    ----------
    name
        Of the study.
    metric
        That the search is about; of several the first one.
    record
        What was done.
    deadline_s, budget
        The limits; None for none.
    made
        How it was made: what stands in the last table.
    """
    data = json.dumps(finite_part(_data(metric, record, deadline_s, budget)), separators=(",", ":"))
    here = files("dagsel.history.report")
    style = here.joinpath("report.css").read_text("utf-8")
    script = here.joinpath("report.js").read_text("utf-8")
    figures = [
        ("Curves", _CURVES, "curves", any(trial.epochs for trial in record.trials.values())),
        ("Workers over time", _TIMELINE, "timeline", bool(record.units)),
        ("Cost", _COST, "cost", bool(record.course)),
    ]
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">{escape(_summary(metric, record))}</p>',
        _cards(metric, record, budget),
        "<h2>Trials</h2>",
        _leaderboard(metric, record),
        *(
            f'<h2>{title}</h2><p class="note">{note}</p><div class="figure">'
            f'<canvas id="{id_}" role="img" aria-label="{title}"></canvas></div>'
            for title, note, id_, is_there in figures
            if is_there
        ),
        _failures(record),
        "<h2>How it was made</h2>",
        _table_of(made),
    ]
    # No text in a script element may end it: "<" is written as an escape there.
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(name)} – dagsel</title><style>\n{style}</style></head>\n<body>\n"
        + "\n".join(parts)
        + '\n<div id="tip" role="tooltip"></div>\n<script type="application/json" id="data">'
        + data.replace("<", "\\u003c")
        + f"</script>\n<script>\n{script}</script>\n</body></html>\n"
    )


_CURVES = "The best trials have colours. Point at one to see its parameters."
_TIMELINE = (
    "A bar is a visit of a shard, in the colour of its trial; paler ones score the trial. A dark "
    "left edge: its state came from another worker. White: idle. No schedule of these visits ends "
    "before the dotted line."
)
_COST = "What the workers have cost since the run began, from their request to their release."


def _data(
    metric: str, record: Record, deadline_s: float | None, budget: Budget | None
) -> dict[str, Any]:
    done = bars(record)
    names = worker_names(done)
    places = {worker: place for place, worker in enumerate(names)}
    best = best_trials(record)
    curves = [
        [trial.number, [[epoch.epoch, epoch.value] for epoch in trial.epochs if _is_number(epoch)]]
        for trial in record.trials.values()
    ]
    limit = None if budget is None else budget.worker_seconds
    step = -(-len(record.course) // _MOST_POINTS) or 1
    moments = [*record.course[:-1:step], *record.course[-1:]]
    begin = min((bar.begin for bar in done), default=0.0)
    return {
        "metric": metric,
        "best": best,
        "colours": colours(record),
        "states": {trial.number: trial.state for trial in record.trials.values()},
        "configs": {t.number: shown_config(t.params_kept) for t in record.trials.values()},
        "curves": sorted((c for c in curves if c[1]), key=lambda c: c[0] in best),
        "workers": list(names.values()),
        "end": max((bar.end for bar in done), default=1.0),
        "bound": begin + bound_s(done) if done else 0.0,
        "bars": [
            [places[b.worker], b.trial, int(b.kind != "train"), b.epoch, b.shard,
             round(b.begin, 3), round(b.end - b.begin, 4), int(b.hop), n_visits]
            for b, n_visits in joined(done)
        ],
        "cost": [[round(m.seconds, 3), round(m.worker_seconds, 3)] for m in moments],
        "deadline": deadline_s,
        "budget": limit if limit is not None and limit < math.inf else None,
    }  # fmt: skip


def _is_number(epoch: Any) -> bool:
    return math.isfinite(epoch.value)


def _summary(metric: str, record: Record) -> str:
    states = Counter(trial.state for trial in record.trials.values())
    told = [f"{states[s]} {s}" for s in ("running", "complete", "pruned", "failed") if states[s]]
    trials = f"{len(record.trials)} trial{'s' * (len(record.trials) != 1)}"
    sense = "larger" if record.direction == "maximize" else "smaller"
    about = " and ".join(goal.metric for goal in record.goals) or f"{metric} ({sense} is better)"
    return f"Run {record.run}: {trials} ({', '.join(told) or 'none began'}), searched for {about}."


def _cards(metric: str, record: Record, budget: Budget | None) -> str:
    cards: list[tuple[str, str]] = []
    best = record.leading
    if best is not None and best.value is not None:
        cards.append((f"{best.value:.4g}", f"best {metric}, trial {best.number}"))
    if record.goals:
        cards.append((str(len(record.top)), "trials on the Pareto front"))
    end = record.course[-1].seconds if record.course else record.seconds
    cards += [(amount(record.n_epochs), "epochs trained and scored"), (span(end), "from the call")]
    busy = sum(busy_seconds(bars(record)).values())
    share = f", {busy / record.worker_seconds:.0%} in use" if record.worker_seconds else ""
    cards.append((span(record.worker_seconds), f"of workers' time{share}"))
    price = None if budget is None else budget.price
    paid = record.money if record.money is not None else price and price.of(record.worker_seconds)
    if paid is not None:
        currency = price.currency if price is not None and price.currency else "money"
        cards.append((f"{paid:,.2f}", currency))
    inner = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in cards
    )
    return f'<div class="cards">{inner}</div>'


# ---- tables


def _leaderboard(metric: str, record: Record) -> str:
    order = ranked(record)
    ranks = {trial.number for trial in order}
    rest = [trial for trial in record.trials.values() if trial.number not in ranks]
    metrics = [goal.metric for goal in record.goals] or [metric]
    params = list({name: None for trial in record.trials.values() for name in trial.params})
    colour, busy = colours(record), busy_seconds(bars(record))
    head = ["trial", *metrics, "after epoch", "epochs", "state", "curve", "worker-s", *params]
    is_text = {"state", "curve"}
    cells = "".join(
        f'<th{" class=text" * (name in is_text)}><button type="button">{escape(name)}</button></th>'
        for name in head
    )
    rows = "".join(
        _row(trial, len(metrics), params, colour, busy.get(trial.number, 0.0))
        for trial in [*order, *rest]
    )
    return (
        f'<div class="wide"><table id="leaderboard"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(
    trial: TrialRecord,
    n_metrics: int,
    params: Sequence[str],
    colour: Mapping[int, str],
    busy_s: float,
) -> str:
    values: list[float | None] = [*trial.values] or [None] * n_metrics
    after = trial.kept.epochs if trial.kept is not None else None
    dot = f'<i class="dot" style="background:{colour[trial.number]}"></i>'
    last, kept = trial.epochs[-1].value if trial.epochs else "", trial.params_kept
    cells = [
        f'<td data-key="{trial.number}">{dot}{trial.number}</td>',
        *map(_cell, values),
        _cell(after),
        _cell(len(trial.epochs)),
        f'<td class="text" title="{escape(trial.reason, quote=True)}">{trial.state}</td>',
        f'<td class="text" data-key="{last}">{spark([e.value for e in trial.epochs])}</td>',
        _cell(busy_s),
        *(_cell(kept.get(name)) for name in params),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(value: Any) -> str:
    if value is None:
        return '<td data-key=""></td>'
    if isinstance(value, float):
        return f'<td data-key="{value!r}">{value:.4g}</td>'
    return f"<td>{escape(str(value))}</td>"


def _failures(record: Record) -> str:
    if not record.failures:
        return ""
    found = "".join(
        f"<details><summary>trial {t.number}: {escape(t.reason)}</summary>"
        f"<pre>{escape(t.traceback or 'no traceback')}</pre></details>"
        for t in record.failures
    )
    return f"<h2>Failed trials</h2>{found}"


def _table_of(made: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(_told(value))}</dd>"
        for name, value in made.items()
        if value not in (None, "", [], {})
    )
    return f"<dl>{rows}</dl>"


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_told(item)}" for name, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(_told, value))
    return str(value)
