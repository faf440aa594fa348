"""How all figures look: colours, fonts, and the best trials before the others."""

from __future__ import annotations

from html import escape
from typing import Any, TypeAlias

from dagsel.checks import short_traceback
from dagsel.errors import SearchError
from dagsel.history.record import Record
from dagsel.history.tables import ranked

#: A `plotly.graph_objects.Figure`; Plotly is an extra.
Figure: TypeAlias = Any
#: Colours that people with colour blindness can tell apart too (Okabe and Ito), and two more.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F5FB5",
    "#8C6D46", "#4C9F70",
)  # fmt: skip
GREY = "#B8B8B8"
#: All other trials have one of these, so that those beside each other can be told apart.
GREYS = ("#C4C4C4", "#9C9C9C", "#D6D6D6", "#B0B0B0")
#: So many of the best trials have a colour.
N_BEST = 8


@short_traceback
def plotly() -> Any:
    """Return ``plotly.graph_objects``.

    Raises
    ------
    SearchError
        If Plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise SearchError(f'plots need Plotly: pip install "dagsel[plot]" ({error})') from None
    return go


def best_trials(record: Record) -> list[int]:
    """List the best trials, those that live too, the best first."""
    return [trial.number for trial in ranked(record)[:N_BEST]]


def colours(record: Record) -> dict[int, str]:
    """Return the colour of each trial: those of the best differ, the others are grey."""
    greys = {number: GREYS[number % len(GREYS)] for number in record.trials}
    return greys | dict(zip(best_trials(record), COLOURS, strict=False))


def empty(why: str) -> Figure:
    """Return a figure that says why there is nothing to see."""
    figure = plotly().Figure()
    figure.add_annotation(text=why, showarrow=False, font_size=16)
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    return styled(figure, "")


def styled(figure: Figure, title: str, **layout: Any) -> Figure:
    """Return a figure with the look of all."""
    return figure.update_layout(
        title={"text": title, "font_size": 15},
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 80, "b": 50},
        hoverlabel_align="left",
        **layout,
    )


def plain(text: str) -> str:
    """Return a text that Plotly shows as it is; it takes some tags for its own.

    Examples
    --------
    >>> plain("lr<b>=1")
    'lr&lt;b&gt;=1'
    """
    return escape(text, quote=False)
