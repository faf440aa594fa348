"""The commands about a script that defines a search: what it will take, and run it."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import cloudpickle

import dagsel
from dagsel.argument_names import missing
from dagsel.cli.answer import INTERRUPTED, Answer, amount, answered
from dagsel.cli.runs import standing
from dagsel.errors import DagselError, SearchError

#: Name of the function that a script defines.
SEARCH = "search"
_MODULE = "__dagsel_script__"
#: What `dagsel.preview` takes of the arguments of a search.
_PREVIEWED = (
    "space",
    "deadline",
    "budget",
    "price_per_worker_hour",
    "small_population",
    "max_cluster_workers",
    "worker_startup",
    "seed",
)
#: What `dagsel.resume` takes of them.
_RESUMED = (
    "workload",
    "space",
    "study",
    "flow",
    "data",
    "client",
    "cluster",
    "callbacks",
    "max_cluster_workers",
    "worker_startup",
    "workers",
    "worker_timeout",
    "hold",
    "cache_dir",
    "progress",
    "observers",
)

script_argument = click.argument("script", type=click.Path(exists=True, dir_okay=False))


@click.command()
@script_argument
@click.option("--scheduler", metavar="ADDRESS", help="Of the Dask cluster to run on.")
@click.option("--workers", type=click.IntRange(1), help="Worker processes on this machine.")
@click.option("--gpus", is_flag=True, help="A worker for each GPU of this machine.")
@click.option("--run-dir", help="Path or URL of the run's folder, a new one.")
@click.option("--resume", metavar="RUN_DIR", help="Go on with the run in this folder.")
@click.option(
    "--deadline", callback=amount, help='Such as "30 min", for the one that the script names.'
)
@click.option(
    "--budget", callback=amount, help='Such as "2 worker-hours", for the one that the script names.'
)
@click.option(
    "--progress",
    type=click.Choice(["auto", "table", "line", "log", "none"]),
    default="auto",
    help="How it is shown, on standard error.",
)
@answered
def run(
    script: str,
    scheduler: str | None,
    workers: int | None,
    gpus: bool,
    run_dir: str | None,
    resume: str | None,
    progress: str,
    deadline: float | str | None,
    budget: float | str | None,
) -> Answer:
    """Run the search that SCRIPT defines.

    SCRIPT has a function search() that returns the arguments of dagsel.optimize by name. Without
    --scheduler, --workers or --gpus it runs where they say, by default on all cores.
    """
    if sum(map(bool, (scheduler, workers, gpus))) > 1:
        raise click.UsageError("give one of --scheduler, --workers and --gpus")
    if resume and (run_dir or deadline or budget):
        raise click.UsageError("a run that goes on has its own folder, deadline and budget")
    limits = {"run_dir": run_dir, "deadline": deadline, "budget": budget}
    given = arguments_of(script)
    given |= {name: value for name, value in limits.items() if value is not None}
    given["progress"] = progress != "none" and progress
    with _where(scheduler, workers, gpus) as where:
        if where:
            given = {**given, "client": None, "cluster": None, **where}
        found = _resumed(resume, given) if resume else _called(dagsel.optimize, given, script)
    answer = standing(found)
    is_cut = bool(found.record.interrupted)
    return Answer(answer.text, answer.body, INTERRUPTED if is_cut else answer.code)


@click.command()
@script_argument
@click.option("--workers", type=click.IntRange(1), help="Workers, for a search that plans none.")
@click.option("--epoch", callback=amount, help='Time of one on one worker, such as "40 s".')
@answered
def preview(script: str, workers: int | None, epoch: float | str | None) -> Answer:
    """Say what SCRIPT's search will take; nothing is trained.

    A search with a plan of its own (SEER, ElasticHyperband) needs no options; any other is
    simulated, which needs both.
    """
    given = arguments_of(script)
    if "flow" not in given:
        raise SearchError(
            f"{script}: {SEARCH}() names no flow; add one to the dict that it returns"
        )
    known = {name: given[name] for name in _PREVIEWED if name in given}
    known["seed"] = known.get("seed") or 0
    metric, directions = given.get("metric"), getattr(given.get("study"), "directions", ())
    if isinstance(metric, str) and len(directions) > 1:
        raise SearchError(
            f"{script}: the study has {len(directions)} directions, and metric= names one; write "
            f"metric=[{metric!r}, ...] with a metric for each direction, or create the study with "
            "one direction"
        )
    if isinstance(metric, str) and directions:
        known["direction"] = directions[0].name.lower()
    try:
        told = dagsel.preview(given["flow"], n_workers=workers, epoch_seconds=epoch, **known)
    except SearchError as error:
        if workers and epoch:
            raise
        raise SearchError(f"{error} (here: --workers and --epoch)") from None
    rows = [
        {
            "begins_s": row.begins_s,
            "lasts_s": row.lasts_s,
            "trials": row.n_trials,
            "workers": row.n_workers,
            "worker_seconds": row.worker_seconds,
        }
        for row in told.rows
    ]
    body = {
        "flow": told.flow,
        "source": told.source,
        "trials": told.n_trials,
        "seconds": told.seconds,
        "workers": told.n_workers,
        "worker_seconds": told.worker_seconds,
        "money": told.money,
        "ends_early": told.ends_early,
        "rows": rows,
    }
    return Answer(repr(told).strip("<>"), body)


def arguments_of(script: str) -> dict[str, Any]:
    """Return the arguments of a search that a script defines.

    Raises
    ------
    SearchError
        If the script raises an error, or defines no search.
    """
    path = Path(script).resolve()
    sys.path.insert(0, str(path.parent))
    module = ModuleType(_MODULE)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module
    cloudpickle.register_pickle_by_value(module)  # workers cannot import it
    with _told(script):
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # noqa: S102 - it is the user's
    search = getattr(module, SEARCH, None)
    if not callable(search):
        raise SearchError(
            f"{script} defines no function {SEARCH}() that returns the arguments of "
            "dagsel.optimize as a dict; a script that calls dagsel.optimize itself is run by "
            f"python {script}"
        )
    with _told(script):
        given = search()
    if not isinstance(given, dict):
        raise SearchError(
            f"{SEARCH}() in {script} returns {type(given).__name__}, and must return the "
            "arguments of dagsel.optimize as a dict"
        )
    return dict(given)


@contextmanager
def _told(script: str) -> Iterator[None]:
    """Make a `SearchError` of an error in a script, with the lines of the script alone."""
    try:
        yield
    except DagselError:
        raise
    except Exception as error:
        path = str(Path(script).resolve())
        lines = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in lines.stack if frame.filename == path]
        where = f", line {frames[-1].lineno}" if frames else ""
        raise SearchError(f"{script}{where}: {type(error).__name__}: {error}") from error


def _called(call: Callable[..., Any], given: dict[str, Any], script: str) -> Any:
    is_known = given.keys() <= inspect.signature(call).parameters.keys()
    if is_known and (lacks := missing(given)):
        raise SearchError(f"{SEARCH}() in {script} does not return {lacks}")
    try:
        return call(**given)
    except TypeError as error:
        if f"{call.__name__}()" not in str(error):
            raise
        raise SearchError(f"what {SEARCH}() in {script} returns is not right: {error}") from None


def _resumed(run_dir: str, given: dict[str, Any]) -> Any:
    """Go on with a run; arrays that were given as data stand in its folder."""
    known = {name: given[name] for name in _RESUMED if name in given}
    if isinstance(known.get("data"), tuple):
        del known["data"]
    return dagsel.resume(run_dir, **known)


@contextmanager
def _where(scheduler: str | None, workers: int | None, gpus: bool) -> Iterator[dict[str, Any]]:
    """Yield the arguments that say where to run; those of the script count if it is empty."""
    if scheduler:
        yield {"client": scheduler}
    elif gpus:
        yield {"cluster": "cuda"}
    elif workers:
        from dagsel.execution.cluster import close, local_cluster

        cluster = local_cluster(workers)
        try:
            yield {"cluster": cluster}
        finally:
            close(cluster)
    else:
        yield {}
