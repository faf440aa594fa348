"""The commands about a run's folder: how it stands, what it does, stop it, a page on it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import dagsel
from dagsel.cli.answer import Answer, answered
from dagsel.console import counted, printable, text_table
from dagsel.errors import DagselError
from dagsel.steerable import READ_PAUSE
from dagsel.storage import RunDir

if TYPE_CHECKING:
    from dagsel.history.record import Record
    from dagsel.history.result import Run
    from dagsel.views.snapshot import Snapshot, TrialRow

#: So often a search that goes on is looked at.
_LOOK_S = 1.0
#: Units per second are averaged over this time.
_LAST_S = 10.0


@click.command()
@click.argument("run_dir", default="dagsel-runs")
@answered
def status(run_dir: str) -> Answer:
    """Say how the search in RUN_DIR stands, or what it came to.

    Of a folder of runs, by default dagsel-runs, it lists all.
    """
    folder = RunDir(run_dir)
    if not folder.digest() and (runs := [*folder.within()]):
        return _listed(folder, runs)
    search = dagsel.attach(run_dir)
    driver = search.driver  # first: one that ends in between has ended
    return standing(search.result, driver)


@click.command()
@click.argument("run_dir")
@answered
def watch(run_dir: str) -> Iterator[Answer]:
    """Show the search in RUN_DIR until it ends.

    In a terminal as a table that lives, elsewhere a line each minute and for each trial that ends.
    With --json a line of JSON for each change.
    """
    search = dagsel.attach(run_dir)
    if not click.get_current_context().params["as_json"]:
        run = search.watch()
        yield standing(run)
        return
    last: Any = None
    while True:
        began = time.monotonic()
        driver = search.driver
        answer = standing(search.result, driver)
        changes = [answer.body[name] for name in ("state", "epochs", "counts")]
        if changes != last:
            last = changes
            yield answer
        if not driver:
            return
        time.sleep(max(_LOOK_S, READ_PAUSE * (time.monotonic() - began)))


@click.command()
@click.argument("run_dir")
@click.argument("trial", type=int, required=False)
@click.option(
    "--token",
    envvar="DAGSEL_TOKEN",
    help="The search's token, if you may not read it in RUN_DIR; or set DAGSEL_TOKEN.",
)
@answered
def stop(run_dir: str, trial: int | None, token: str | None) -> Answer:
    """End the search in RUN_DIR, or one TRIAL of it, at the next batch.

    A search that is ended so has come to its best so far.
    """
    search = dagsel.attach(run_dir, token=token)
    if trial is not None:
        search.stop(trial)
        return Answer(f"trial {trial} is stopped", {"run_dir": search.run_dir, "stopped": trial})
    search.finish()
    return standing(search.wait())


@click.command()
@click.argument("run_dir")
@click.option("-o", "--output", default="report.html", show_default=True, help="Path or URL.")
@answered
def report(run_dir: str, output: str) -> Answer:
    """Write a page on the search in RUN_DIR.

    It is one file of HTML that needs no network.
    """
    return Answer(output, {"report": dagsel.load(run_dir).report(output)})


def _listed(folder: RunDir, runs: Iterable[RunDir]) -> Answer:
    """Return a line for each run in a folder."""
    lines, body = [("run", "procedure", "state", "best")], []
    for run in runs:
        name = run.url.rpartition("/")[2]
        try:
            told = _told(run)
        except DagselError as error:
            lines.append((name, "", "damaged", ""))
            body.append({"run_dir": run.url, "state": "damaged", "error": str(error)})
            continue
        best = "" if told["value"] is None else f"{told['metric']} {told['value']:.4g}"
        if told["front"] is not None:
            best = f"{counted(told['front'], 'trial')} on the Pareto front"
        lines.append((name, told["flow"], told["state"], best))
        body.append(told)
    text = "\n".join(map(printable, text_table(lines)))
    return Answer(text, {"folder": folder.url, "runs": body})


def _told(run: RunDir) -> dict[str, Any]:
    """Return what is said of one of several runs."""
    about, driver = run.about(), str(run.driver or "")
    record = dagsel.attach(run).result.record
    return {
        "run_dir": run.url,
        "state": _state(record, driver),
        "driver": driver,
        **{name: str(about[name]) for name in ("study", "flow", "metric")},
        "value": None if record.best is None else record.best.value,
        "front": len(record.top) if record.goals else None,
    }


def standing(run: Run, driver: str = "") -> Answer:
    """Return how a search stands, or what it came to.

    Parameters
    ----------
    run
        As far as it has come.
    driver
        Who drives it; empty if nobody does.
    """
    from dagsel.history.settings import Settings
    from dagsel.views.facts import Facts
    from dagsel.views.snapshot import Snapshot
    from dagsel.views.table import terminal_lines

    record, folder = run.record, run.run_dir
    facts = Facts.read(Settings.from_json(folder.about(), folder.url))
    snapshot = Snapshot.of(record, run.metric, _units_per_second(record), facts)
    if not driver:  # nothing trains
        snapshot = replace(
            snapshot, is_driven=False, n_workers=0, units_per_second=0.0, left_s=None
        )
    state = _state(record, driver)
    told = {
        "running": f"is driven by {driver}",
        "ended": "has ended",
        "interrupted": "was interrupted: dagsel.resume, or dagsel run SCRIPT --resume, goes on",
    }[state]
    height = shutil.get_terminal_size().lines if sys.stdout.isatty() else sys.maxsize
    lines = [printable(f"{folder.url} {told}"), *terminal_lines(snapshot, height=height)]
    body = {"run_dir": folder.url, "state": state, "driver": driver, **_body(snapshot)}
    return Answer("\n".join(lines), body | {"money": run.money, "currency": run.currency})


def _state(record: Record, driver: str) -> str:
    is_over = record.finished and not record.interrupted
    return "running" if driver else "ended" if is_over else "interrupted"


def _units_per_second(record: Record) -> float:
    """Return how fast it was last."""
    last_s = min(_LAST_S, record.seconds)
    n = sum((unit.seconds or 0.0) > record.seconds - last_s for unit in record.units)
    return n / last_s if last_s else 0.0


def _body(snapshot: Snapshot) -> dict[str, Any]:
    best = snapshot.best
    return {
        "metric": snapshot.metric,
        "best": None if best is None else {**_row(best), "after_epochs": snapshot.best_after},
        "counts": snapshot.counts,
        "epochs": snapshot.n_epochs,
        "epochs_decided": snapshot.n_decided,
        "seconds": snapshot.seconds,
        "seconds_left": snapshot.left_s,
        "worker_seconds": snapshot.worker_seconds,
        "workers": snapshot.n_workers,
        "units_per_second": snapshot.units_per_second,
        "trials": [_row(row) for row in snapshot.rows],
    }


def _row(row: TrialRow) -> dict[str, Any]:
    return {
        "trial": row.number,
        "state": row.state,
        "epochs": row.n_epochs,
        "epochs_decided": row.n_decided,
        "value": row.value,
        "curve": row.curve,
        "params": dict(row.params),
        "reason": row.reason,
    }
