"""A live view of a search below a cell of a notebook, with buttons; it needs anywidget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dagsel.codec import Json
from dagsel.errors import DagselError, SearchError
from dagsel.steering import (
    AddTrial,
    CloneTrial,
    FinishSearch,
    PauseTrial,
    ResumeTrial,
    StopTrial,
    UserCommand,
)
from dagsel.views.facts import Steer
from dagsel.views.snapshot import Snapshot, TrialRow
from dagsel.views.table import IN_NOTEBOOK, notebook_table
from dagsel.views.words import doing, from_to, memory

#: Values of a trial's curve that are drawn: the last ones.
CURVE = 40
#: The view is also kept as plain HTML, made anew so often, until the browser has shown the other.
_PLAIN_EVERY_S = 10.0
_STARTING = "starting the workers"


def has_widgets() -> bool:
    """Whether anywidget is installed."""
    return find_spec("anywidget") is not None


@cache
def _view_class() -> Any:
    import anywidget
    import traitlets

    here = Path(__file__).parent

    class SearchView(anywidget.AnyWidget):
        _esm = (here / "live.js").read_text(encoding="utf-8")
        _css = (here / "live.css").read_text(encoding="utf-8")
        data = traitlets.Dict().tag(sync=True)

    return SearchView


class LiveView:
    """Shows a search, and gives it the commands of whoever clicks.

    The browser says that it has drawn the view, and gets an answer at once if commands can be
    heard: then it shows buttons. In a cell that waits for `dagsel.optimize` that takes a kernel and
    a front end with subshells.
    """

    shows_workers = True

    def __init__(self, steer: Steer | None) -> None:
        self._steer = steer
        self._widget: Any = None
        self._handle: Any = None
        self._is_drawn = False  # by a browser, which has said so
        self._plain_due = 0.0
        self._snapshot: Snapshot | None = None

    def start(self) -> None:
        """Show that workers are started."""
        from IPython.display import display

        self._widget = _view_class()(data={"phase": "starting", "said": _STARTING})
        self._widget.on_msg(self._hear)
        _hear_beside_cells(self._widget)
        self._handle = display(self._bundle(_STARTING, _STARTING), raw=True, display_id=True)  # type: ignore[no-untyped-call]
        self._plain_due = time.monotonic() + _PLAIN_EVERY_S

    def show(self, snapshot: Snapshot) -> None:
        """Show how the search stands."""
        self._snapshot = snapshot
        self._widget.data = view_data(snapshot, "running")
        if not self._is_drawn and time.monotonic() >= self._plain_due and self._handle is not None:
            self._plain_due = time.monotonic() + _PLAIN_EVERY_S
            bundle = self._bundle(notebook_table(snapshot), _plain(snapshot))
            self._handle.update(bundle, raw=True)

    def stop(self, snapshot: Snapshot | None, error: BaseException | None) -> None:
        """Show how it stood at the end in HTML, which stays in the notebook."""
        if snapshot is not None and self._handle is not None:
            html = notebook_table(snapshot)
            self._handle.update({"text/html": html, "text/plain": _plain(snapshot)}, raw=True)
        self._widget.close()

    def _bundle(self, html: str, plain: str) -> dict[str, Any]:
        bundle, _ = self._widget._repr_mimebundle_()
        return {**bundle, "text/html": html, "text/plain": plain}

    def _hear(self, widget: Any, message: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        """Take a message of the browser; runs in a thread of the kernel."""
        if message.get("do") == "hello":
            self._is_drawn = True
            widget.send({"said": "hello", "steers": self._steer is not None})
            return
        number = message.get("id")
        try:
            command = command_of(message, self._snapshot)
            if self._steer is None:
                raise SearchError(
                    "this search takes no commands; show the one that dagsel.start returned"
                )
            answer = self._steer(command)
        except SearchError as error:
            widget.send({"id": number, "ok": False, "said": _one_line(error)})
            return
        answer.add_done_callback(lambda done: widget.send(_answer(number, command, done)))


def _hear_beside_cells(widget: Any) -> None:
    """Let the kernel take a view's messages in the subshell that the browser sends them to.

    ipykernel 7.4 takes them where the last message to the browser came from: that is a search's
    thread, which counts as the cell that has begun it, and so they wait for cells to end.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, subshell: subshell


def _plain(snapshot: Snapshot) -> str:
    return "\n".join(snapshot.head)


def _answer(number: Any, command: UserCommand, done: Future[int | None]) -> dict[str, Json]:
    error = done.exception()
    if error is not None:
        return {"id": number, "ok": False, "said": _one_line(error)}
    return {"id": number, "ok": True, "said": _said(command, done.result())}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, DagselError) else f"{type(error).__name__}: {text}"


def _said(command: UserCommand, number: int | None) -> str:
    match command:
        case StopTrial(trial):
            return f"trial {trial} ends at its next batch"
        case PauseTrial(trial):
            return f"trial {trial} rests from its next batch on"
        case ResumeTrial(trial):
            return f"trial {trial} goes on"
        case CloneTrial(trial):
            return f"trial {number} is a copy of trial {trial}"
        case AddTrial():
            return f"trial {number} is added"
        case _:
            return "the search ends at its next batch"


def command_of(message: Mapping[str, Any], snapshot: Snapshot | None) -> UserCommand:
    """Return the command that a message of the browser gives.

    Raises
    ------
    SearchError
        If it has a value that is no number where one is needed, or is no command.
    """
    what, trial = message.get("do"), message.get("trial")
    match what, trial:
        case "stop", int():
            return StopTrial(trial)
        case "pause", int():
            return PauseTrial(trial)
        case "resume", int():
            return ResumeTrial(trial)
        case "clone", int():
            now = {} if snapshot is None else snapshot.rows.params_of(trial)
            return CloneTrial(trial, _read(message.get("params", {}), now))
        case "add", _:
            now = {} if snapshot is None else _template(snapshot)
            return AddTrial(_read(message.get("params", {}), now))
        case "finish", _:
            return FinishSearch()
    raise SearchError(f"the view has sent what is no command: {dict(message)!r}; reload the page")


def _template(snapshot: Snapshot) -> Mapping[str, Any]:
    """Return parameters that a new trial may begin from: those of the best one."""
    row = snapshot.best or next(iter(snapshot.rows), None)
    return {} if row is None else row.params


def _read(given: Mapping[str, str], now: Mapping[str, Any]) -> dict[str, Any]:
    """Read parameters as they were typed, each as the kind of value that it has now."""
    return {name: read_value(name, text, now.get(name, text)) for name, text in given.items()}


def read_value(name: str, text: str, now: Any) -> Any:
    """Read a parameter as it was typed.

    Examples
    --------
    >>> read_value("lr", "1e-3", 0.1), read_value("width", "64", 32), read_value("act", "relu", "x")
    (0.001, 64, 'relu')
    >>> read_value("nesterov", "true", False), read_value("clip", "None", None)
    (True, None)
    >>> read_value("lr", "small", 0.1)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: lr must be a number such as 0.1, got 'small'
    """
    text = text.strip()
    if isinstance(now, str):
        return text
    if isinstance(now, bool):
        if text.lower() not in ("true", "false"):
            raise SearchError(f"{name} must be true or false, got {text!r}")
        return text.lower() == "true"
    if text == "None":
        return None
    kinds: tuple[Callable[[str], Any], ...] = (int, float)
    for kind in kinds if isinstance(now, int) or now is None else kinds[1:]:
        with suppress(ValueError):
            return kind(text)
    if isinstance(now, int | float):
        raise SearchError(f"{name} must be a number such as {now!r}, got {text!r}")
    return text


# ---- what the browser gets


def view_data(snapshot: Snapshot, phase: str) -> dict[str, Json]:
    """Return what the browser draws; `live.js` reads it."""
    rows, workers = snapshot.rows[:IN_NOTEBOOK], snapshot.workers[:IN_NOTEBOOK]
    best: Json = None
    if snapshot.best is not None:
        row, after = snapshot.best, snapshot.best_after
        best = [row.number, _number(row.value), after, row.config]
    return {
        "phase": phase,
        "seconds": round(snapshot.seconds, 1),
        "metric": snapshot.metric,
        "epochs": [snapshot.n_epochs, snapshot.n_decided],
        "left": "" if snapshot.left_s is None else from_to(*snapshot.left_s),
        "trials": [snapshot.n_ended, len(snapshot.rows), snapshot.n_total],
        "counts": list(map(list, snapshot.counts.items())),
        "n_workers": snapshot.n_workers,
        "rate": f"{snapshot.units_per_second:.1f}",
        "best": best,
        "front": snapshot.n_front,
        "gauges": [[g.name, g.used, g.limit, g.left, g.share] for g in snapshot.gauges],
        "rows": [_row(row) for row in rows],
        "more": len(snapshot.rows) - len(rows),
        "workers": [
            [now.name, doing(now), now.unit is not None, now.n_held, memory(now), _share(now)]
            for now in workers
        ],
        "more_workers": len(snapshot.workers) - len(workers),
        "dashboard": snapshot.dashboard,
        "add": _typed(_template(snapshot)),
    }


def _row(row: TrialRow) -> list[Json]:
    return [
        row.number,
        row.state,
        row.n_epochs,
        row.n_decided,
        round(row.progress, 2),
        _number(row.value),
        drawn_curve(row.curve),
        row.config,
        row.reason if row.state == "failed" else "",
        row.is_paused_by_user,
        _typed(row.params) if row.is_live else {},
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _share(now: Any) -> float | None:
    return round(now.memory_bytes / now.memory_limit, 3) if now.memory_limit else None


def _typed(params: Mapping[str, Any]) -> dict[str, Json]:
    return {
        name: value if isinstance(value, str) else repr(value) for name, value in params.items()
    }


def drawn_curve(values: Sequence[float]) -> list[Json]:
    """Return the last values of a curve as heights from 0 to 100; None for what is no number.

    Examples
    --------
    >>> drawn_curve([0.5, 0.75, float("nan"), 1.0])
    [0, 50, None, 100]
    >>> drawn_curve([2.0])
    [50]
    """
    last = values[-CURVE:]
    finite = [value for value in last if math.isfinite(value)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    if not most > least:
        return [50 if math.isfinite(value) else None for value in last]
    scale = 100 / (most - least)
    return [round((value - least) * scale) if math.isfinite(value) else None for value in last]
