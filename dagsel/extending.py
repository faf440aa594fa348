"""More of a search that has ended: `Run.extend`."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagsel.arguments import checked
from dagsel.driver.consistency import read_history
from dagsel.driver.recovery import catch_up
from dagsel.driver.steered import Steered
from dagsel.errors import RunDirError, SearchError
from dagsel.execution.cluster import check_cluster
from dagsel.history.extension import (
    check_flow_extends,
    check_work,
    extension,
    limited,
    said,
)
from dagsel.history.record import Record
from dagsel.history.result import Run, RunCalls
from dagsel.history.settings import Settings
from dagsel.history.tariff import Tariff
from dagsel.interrupting import interruptible
from dagsel.messages import ENTRIES, Turn
from dagsel.observers.base import hold_observers
from dagsel.refitting import refit
from dagsel.reopening import adopt, parts_of
from dagsel.session import Call, Session
from dagsel.study import Space, Study, StudyDriver, home_of
from dagsel.study.asked import check_asked
from dagsel.tidying import tidy
from dagsel.workloads.base import checks

if TYPE_CHECKING:
    from dagsel.execution.cluster import Client
    from dagsel.flow import Flow

logger = logging.getLogger("dagsel")


def opened(run: Run, space: Space | None = None, flow: Flow | None = None) -> Run:
    """Return a run that can be extended, with what its folder cannot hold."""
    flow = flow.flow if isinstance(flow, Steered) else flow
    return replace(run, space=space or run.space, flow=flow, _calls=RunCalls(extend, refit))


def extend(
    run: Run,
    client: Client | str | None,
    *,
    n_trials: int,
    max_epochs: int | None,
    n_best: int | None,
    deadline: Any,
    budget: float | str | None,
    cluster: Any,
    worker_timeout: float | str,
    observers: Any,
    **given: Any,
) -> Run:
    """Go on with a search that has ended; see `Run.extend`."""
    began = time.monotonic()
    if isinstance(client, int):
        raise SearchError(f"Run.extend takes numbers by their names: write n_trials={client}")
    check_cluster(client, cluster)
    given["space"] = run.space if given["space"] is None else given["space"]
    may_be_none = ("space", "flow", "data", "workers", "max_cluster_workers", "worker_startup")
    how = checked(*may_be_none, "cache_dir", worker_timeout=worker_timeout, **given)
    call = Call.of(client, cluster, how, observers, began)
    folder = run.run_dir
    about = folder.about()
    settings = Settings.from_json(about, folder.url)
    with folder.lock(about["run"]) as lock, hold_observers(call.observers):
        entries, record = read_history(folder, settings, about["run"])
        _check_ended(record, settings, folder.url)
        if record.interrupted:  # of what was not reported nothing counts any more
            record.interrupted.clear()
            tidy(record, folder)
        _check_goals(settings)
        _check_study(run.study, settings, folder.url)
        check_asked(run.study, settings.asked)
        parts = parts_of(settings, folder, run.given_workload, how.space, how.data)
        workload, space, dataset = parts
        flow = Steered(settings.make_flow(how.flow or run.flow, folder.url))
        catch_up(flow, entries, folder.url)
        more = extension(flow.traits, settings, record, n_trials, max_epochs, n_best)
        check_flow_extends(flow.flow, more)
        more = limited(more, Tariff.of(settings, call.workers), record, deadline, budget)
        decisions = flow.handle(more)
        check_work(decisions, more)
        draws = (settings.seed, how.callbacks, record.run, settings.sampler_seed, flow.traits)
        counts = (settings.n_before, settings.first_step)
        driver = StudyDriver(run.study, space, settings.metric, *draws, *counts)
        driver.validate(grid=False, check=checks(workload, dataset.manifest, settings.goal))
        turn = ENTRIES.encode(Turn(more, tuple(decisions)))
        logger.info("%s", said(more, record))
        record.add(ENTRIES.decode(turn))
        adopt(driver, record)
        folder.journal.append([turn])
        within = settings.within(more.limits)
        session = Session(within, folder, driver, flow, workload, dataset, record)
        with interruptible(session.resume_call) as inbox:
            return opened(session.run(call, lock, inbox), space, flow)


def _check_ended(record: Record, settings: Settings, url: str) -> None:
    if not record.finished:
        raise RunDirError(
            f"{url}: the run has not ended, and only one that has can be extended; go on with it "
            f"first: {settings.resume_call(url)}"
        )
    why = record.abandoned or record.failed_alike or record.too_little_time
    if why:
        raise RunDirError(
            f"{url}: the run cannot be extended, it has ended early ({why.splitlines()[0]}); begin "
            "another one on the same study with dagsel.optimize"
        )


def _check_goals(settings: Settings) -> None:
    if settings.goals:
        raise SearchError(
            "a search for several metrics cannot be extended: no trial of it is the best; search "
            "again on the same study, which remembers its trials"
        )


def _check_study(study: Study, settings: Settings, url: str) -> None:
    if settings.home is not None and home_of(study) is None:
        raise SearchError(
            f"the study of the run is stored at {settings.home}, and this one is in memory; open "
            f"the run with it: dagsel.load({url!r}, study=...)"
        )
