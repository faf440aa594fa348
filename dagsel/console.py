"""Tables, drawings, and progress of what takes long, in terminals and notebooks."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Literal, TypeAlias

_PATIENCE_S = 2.0
#: How a search shows what it does (`dagsel.views.progress`).
Progress: TypeAlias = Literal["auto", "table", "line", "log", False]
#: Columns and lines of a drawing in text, and its size in a notebook.
COLUMNS, LINES = 60, 8
WIDTH_PX, HEIGHT_PX = 480, 96


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with right-aligned columns.

    Examples
    --------
    >>> text_table([("n", "speed"), ("10", "1.5")])
    ['  n  speed', ' 10    1.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" " + "  ".join(map(str.rjust, row, widths)) for row in rows]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML; its first row is the head.

    Examples
    --------
    >>> html_table([("n", "speed"), ("10", "1.5")])
    '<table><tr><th>n</th><th>speed</th></tr><tr><td>10</td><td>1.5</td></tr></table>'
    """
    head, *body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = [head.replace("td>", "th>"), *body]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def amount(number: float) -> str:
    """Return a number in three digits, or more if it has more before the point.

    Examples
    --------
    >>> amount(0), amount(85.71), amount(999.6), amount(12345.6)
    ('0', '85.7', '1,000', '12,346')
    """
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def counted(n: float, what: str) -> str:
    """Return a number of things.

    Examples
    --------
    >>> counted(1, "trial"), counted(2.5, "epoch")
    ('1 trial', '2.5 epochs')
    """
    number = amount(n)
    return f"{number} {what}{'s' * (number != '1')}"


def span(seconds: float) -> str:
    """Return a span of time as a text.

    Examples
    --------
    >>> span(0), span(85.7), span(343), span(86400)
    ('0 s', '85.7 s', '5.72 min', '24 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{amount(seconds / size)} {unit}"
    return f"{amount(seconds)} s"


def printable(text: str) -> str:
    r"""Return a text without what a terminal obeys, such as an escape sequence or a new line.

    Examples
    --------
    >>> printable("two\nlines, \x1b[8mhidden")
    'two�lines, �[8mhidden'
    """
    return "".join(c if c.isprintable() else "�" for c in text)


def printable_lines(text: str) -> str:
    r"""Return a text of several lines without what a terminal obeys.

    Examples
    --------
    >>> printable_lines("two\nlines, \x1b[8mhidden")
    'two\nlines, �[8mhidden'
    """
    return "\n".join(map(printable, text.split("\n")))


def shown_config(config: Mapping[str, Any]) -> str:
    """Return a configuration as a short text.

    Examples
    --------
    >>> shown_config({"lr": 0.0123456, "width": 64, "act": "relu"})
    'lr=0.0123, width=64, act=relu'
    """
    return printable(", ".join(f"{name}={_shown(value)}" for name, value in config.items()))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


def text_chart(
    levels: Callable[[float], tuple[float, float]], *, seconds: float, most: int
) -> list[str]:
    """Return the lines of a drawing of two numbers over time, each column that of its middle.

    Parameters
    ----------
    levels
        Returns both numbers at a time. Up to the smaller one there is ``#``; from there on ``.`` if
        the first is larger, ``+`` if the second is. They are rounded up.
    seconds, most
        How far it goes to the right and up.

    Examples
    --------
    >>> for line in text_chart(lambda at: (2, 1) if at < 5 else (1, 2), seconds=10, most=2):
    ...     print(line)
     2 |..............................++++++++++++++++++++++++++++++
       |############################################################
     0 +------------------------------------------------------------
        0 s                                                     10 s
    """
    height = min(LINES, most)
    middles = ((column + 0.5) * seconds / COLUMNS for column in range(COLUMNS))
    tops = [tuple(math.ceil(n * height / most) for n in levels(at)) for at in middles]
    width = len(str(most))
    lines = []
    for line in range(height, 0, -1):
        cells = [" .+#"[(first >= line) + 2 * (second >= line)] for first, second in tops]
        lines.append(f" {most if line == height else '':>{width}} |{''.join(cells).rstrip()}")
    axis = f" {'0':>{width}} +{'-' * COLUMNS}"
    return [*lines, axis, " " * (width + 3) + "0 s" + span(seconds).rjust(COLUMNS - 3)]


Bar: TypeAlias = tuple[float, float, float]  # begin and length in seconds, and a number


def svg_chart(
    bars: Sequence[Bar],
    *,
    seconds: float,
    most: float,
    text: str,
    outline: Sequence[Bar] = (),
) -> str:
    """Return a drawing of workers over time in SVG, and a text below it.

    `outline` is drawn as frames without a filling, over the bars.
    """
    rects = [_rect(bar, seconds, most, "") for bar in bars]
    frame = ' fill="none" stroke="#e45756"'
    rects += [_rect(bar, seconds, most, frame) for bar in outline]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX}" height="{HEIGHT_PX}" '
        f'role="img" aria-label="{escape(text)}" fill="#4c78a8">{"".join(rects)}</svg>'
        f"<p>{escape(text)}</p>"
    )


def _rect(bar: Bar, seconds: float, most: float, style: str) -> str:
    begins_s, lasts_s, n = bar
    x, width = (WIDTH_PX * s / seconds for s in (begins_s, lasts_s))
    height = HEIGHT_PX * n / most
    told = f"{amount(n)} workers for {span(lasts_s)}"
    return (
        f'<rect x="{x:.1f}" y="{HEIGHT_PX - height:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}"{style}><title>{told}</title></rect>'
    )


def is_watched() -> bool:
    """Whether standard error is a terminal or this is a Jupyter kernel."""
    stream = sys.stderr
    return "ipykernel" in sys.modules or (stream is not None and stream.isatty())


def is_notebook() -> bool:
    """Whether this is a Jupyter kernel, whose cells show HTML; also in threads of its own.

    What rich looks for is there only while a cell runs.
    """
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    # Colab and Spyder have a class of their own below it.
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(get_ipython()).__mro__)


def has_prompt() -> bool:
    """Whether somebody types at a prompt of Python or IPython in a terminal."""
    return (hasattr(sys, "ps1") or bool(sys.flags.interactive)) and "ipykernel" not in sys.modules


class ProgressBar(contextlib.AbstractContextManager["ProgressBar"]):
    """Shows how many bytes are done, of a total if one is known.

    Examples
    --------
    >>> with ProgressBar(100, "writing") as progress:
    ...     progress.advance(60)
    ...     progress.done
    60
    """

    def __init__(self, total: int | None, description: str) -> None:
        self.total, self.description, self.done = total, description, 0
        self._shown_from = time.monotonic() + _PATIENCE_S if is_watched() else float("inf")
        self._bar: Any = None
        self._task: Any = None

    def advance(self, n_bytes: int) -> None:
        """Count bytes as done."""
        self.done += n_bytes
        if self._bar is None and time.monotonic() > self._shown_from:
            self._show()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)

    def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self.description, total=self.total)
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class Waiting(contextlib.AbstractContextManager["Waiting"]):
    """Shows a line with a spinner while the block runs.

    Examples
    --------
    >>> with Waiting("measuring") as waiting:
    ...     waiting.say("measuring 2 of 4")
    """

    def __init__(self, text: str) -> None:
        from rich.console import Console
        from rich.text import Text

        self._status: Any = Console(stderr=True).status(Text(text))
        self._timer = threading.Timer(_PATIENCE_S, self._status.start)
        self._timer.daemon = True

    def say(self, text: str) -> None:
        """Change the line."""
        from rich.text import Text

        self._status.update(Text(text))

    def __enter__(self) -> Waiting:
        if is_watched():
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()  # it may be starting the line at this moment
        self._status.stop()


def readable_size(n_bytes: float) -> str:
    """Return a number of bytes as text for people.

    Examples
    --------
    >>> readable_size(999), readable_size(1_234_000), readable_size(5e12)
    ('999 B', '1.2 MB', '5.0 TB')
    """
    if n_bytes < 1000:
        return f"{n_bytes:.0f} B"
    power = min(4, int(math.log10(n_bytes)) // 3)
    return f"{n_bytes / 1000**power:,.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
