"""What a notebook shows of a search."""

from __future__ import annotations

from html import escape

from dagsel.console import amount, shown_config, span
from dagsel.history.record import Record
from dagsel.history.sparks import spark
from dagsel.history.tables import ranked

#: So many of the best trials are shown.
N_TRIALS = 10


def summary_html(head: str, metric: str, record: Record) -> str:
    """Return the best trials with their curves, the cost, and the failed ones, as HTML.

    Parameters
    ----------
    head
        The first line.
    metric
        That the search is about; of several the first one.
    record
        What was done.
    """
    metrics = [goal.metric for goal in record.goals] or [metric]
    head_of = ["trial", *metrics, "after epoch", "epochs", "state", "curve", "parameters"]
    titles = "".join(f'<th style="text-align:left">{escape(title)}</th>' for title in head_of)
    rows = ""
    for trial in ranked(record)[:N_TRIALS]:
        assert trial.kept is not None
        cells = [
            str(trial.number),
            *(f"{value:.4g}" for value in trial.values),
            amount(trial.kept.epochs),
            str(len(trial.epochs)),
            trial.state,
        ]
        config = escape(shown_config(trial.params_kept))
        curve = spark([epoch.value for epoch in trial.epochs])
        known = "".join(f"<td>{cell}</td>" for cell in cells)
        rows += f'<tr>{known}<td>{curve}</td><td style="text-align:left">{config}</td></tr>'
    n_more = len(record.trials) - min(N_TRIALS, len(ranked(record)))
    more = f"<p>and {n_more} more; run.leaderboard(n), run.trials()</p>" if n_more else ""
    end = record.course[-1].seconds if record.course else record.seconds
    cost = f"{record.n_epochs} epochs in {span(end)}, {span(record.worker_seconds)} of workers"
    failed = "".join(
        f"<li>trial {trial.number}: {escape(trial.reason)}</li>" for trial in record.failures
    )
    lost = f"<p>failed:</p><ul>{failed}</ul>" if failed else ""
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    return f"<p>{escape(head)}</p>{table}{more}<p>{cost}</p>{lost}"
