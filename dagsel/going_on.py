"""The calls about a run that there is: go on with it, repeat it."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from dagsel.arguments import checked
from dagsel.checks import named_arguments
from dagsel.codec import plain_part
from dagsel.console import Progress
from dagsel.driver.consistency import read_history, read_run
from dagsel.driver.recovery import catch_up
from dagsel.driver.steered import Steered
from dagsel.errors import AllTrialsFailedError, RunDirError, SearchError, TooLittleTimeError
from dagsel.execution.cluster import check_cluster
from dagsel.extending import opened
from dagsel.flow import Asked, Flow
from dagsel.history.record import Record
from dagsel.history.result import Run
from dagsel.history.script import Script, differences, drawn
from dagsel.history.settings import Settings, flow_name
from dagsel.interrupting import interruptible
from dagsel.messages import Entry, SessionBegun, Turn
from dagsel.observers import Observer
from dagsel.observers.base import hold_observers
from dagsel.planning.pools import Workers, dearest
from dagsel.planning.prices import read_price
from dagsel.reopening import adopt, parts_of, study_of
from dagsel.session import Call, Session
from dagsel.storage import RunDir, ShardedDataset
from dagsel.storage.files import Url
from dagsel.storage.shard_cache import Hold
from dagsel.study import Callback, Space, StudyDriver, open_study
from dagsel.study.asked import check_asked
from dagsel.tidying import tidy
from dagsel.workloads.base import Workload, checks

if TYPE_CHECKING:
    from dagsel.execution.cluster import Client
    from dagsel.study import Study

logger = logging.getLogger("dagsel")

_LONGER = (
    "the run keeps its own; once it has ended, write "
    'dagsel.load(run_dir, workload=..., space=...).extend(n_trials=20, deadline="10 min")'
)
#: Arguments of `dagsel.optimize` that a run keeps.
_KEPT = {
    **dict.fromkeys(("budget", "deadline", "max_epochs", "n_trials"), _LONGER),
    **dict.fromkeys(
        ("deterministic", "keep", "metric", "price_per_worker_hour", "replicas", "seed", "top_k"),
        "the run keeps its own; leave it out",
    ),
}


@named_arguments("dagsel.resume", _KEPT, error=SearchError)
def resume(
    run_dir: Url,
    client: Client | str | None = None,
    *,
    workload: Workload | None = None,
    space: Space | None = None,
    study: Study | str | None = None,
    flow: Flow | None = None,
    data: ShardedDataset | Url | None = None,
    cluster: Any = None,
    callbacks: Sequence[Callback] = (),
    count_downtime: bool = False,
    max_cluster_workers: int | None = None,
    worker_startup: float | str | None = None,
    workers: Sequence[Workers] | None = None,
    worker_timeout: float | str = 60.0,
    hold: Hold = "auto",
    cache_dir: str | PathLike[str] | None = None,
    progress: Progress = "auto",
    observers: Sequence[Observer] = (),
) -> Run:
    """Go on with a run that was interrupted, or whose driver, scheduler or cluster was lost.

    At most the work that was under way is done again: of each worker the task that it trained, half
    a second or one pass over a shard if that takes longer, and the task before if its state was
    still being stored. A run that has ended is only read, but one that Ctrl-C has ended goes on.
    Ended trials of a study cannot change. So other trials stand there for those that train on; each
    has the number of its trial as the user attribute ``dagsel:trial``.

    Parameters
    ----------
    run_dir
        The run's folder.
    client, cluster
        As for `dagsel.optimize`; the cluster may be another one, of another size.
    workload, space
        Those that the run began with; always needed, as a ``run_dir`` holds no code.
    study
        The study, or the URL of its storage. Needed if the flow asks a sampler or a pruner of it
        that is not Optuna's default, if it is on a server, or if its URL had a password. A study
        that was in memory is filled again.
    flow
        The search procedure, if it is not one of dagsel's.
    data
        The data set, if its URL has changed, needs credentials, or is on another host than
        ``run_dir``.
    callbacks, max_cluster_workers, worker_startup, worker_timeout
        As for `dagsel.optimize`.
    workers
        As for `dagsel.optimize`. Where a run that had pools has none any more, each worker costs as
        much as the dearest did.
    count_downtime
        Whether the time since the interruption counts against the deadline.
    hold, cache_dir, progress, observers
        As for `dagsel.optimize`: of this call, so they may be others than before. Observers
        hear all that happened before, too.

    Returns
    -------
    Run
        As if it had never been interrupted.

    Raises
    ------
    RunDirError
        If ``run_dir`` holds no run, another driver has it, or workload or data set are not those of
        the run. Nothing in it changes.
    AllTrialsFailedError, TooLittleTimeError
        If the run has ended by it, or does so now.
    SearchError
        If study, space or flow are not those of the run, or the study cannot be opened.
    DatasetError
        If the data set cannot be read.
    ClusterError
        If the cluster cannot run it.

    Examples
    --------
    >>> import dagsel, optuna
    >>> from dagsel.flows import RandomSearch
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import SGDClassifier
    >>> def space(trial):
    ...     return {"alpha": trial.suggest_float("alpha", 1e-5, 1e-2, log=True)}
    >>> workload = dagsel.SklearnWorkload(SGDClassifier(), metrics=["accuracy"])
    >>> run = dagsel.optimize(
    ...     optuna.create_study(direction="maximize"),
    ...     workload,
    ...     load_iris(return_X_y=True),
    ...     space=space,
    ...     metric="accuracy",
    ...     flow=RandomSearch(max_epochs=5, n_trials=3),
    ...     run_dir="run",
    ...     progress=False,
    ... )
    >>> run = dagsel.resume("run", workload=workload, space=space)
    >>> len(run.trials())  # it had ended, so it was only read
    3
    """
    began = time.monotonic()
    check_cluster(client, cluster, starts=False)
    given = checked(
        "max_cluster_workers",
        "worker_startup",
        "workers",
        "workload",
        "space",
        "study_or_url",
        "flow",
        "data",
        "cache_dir",
        run_dir=run_dir,
        workload=workload,
        space=space,
        study_or_url=study,
        flow=flow,
        data=data,
        callbacks=callbacks,
        count_downtime=count_downtime,
        max_cluster_workers=max_cluster_workers,
        worker_startup=worker_startup,
        workers=workers,
        worker_timeout=worker_timeout,
        hold=hold,
        cache_dir=cache_dir,
        progress=progress,
    )
    call = Call.of(client, cluster, given, observers, began)
    folder = given.run_dir
    about = folder.about()
    settings = Settings.from_json(about, folder.url)
    if call.workers:
        read_price(dearest(call.workers), settings.currency, name="the dearest of workers=")
    with folder.lock(about["run"]) as lock, hold_observers(call.observers):
        entries, record = read_history(folder, settings, about["run"], goes_on=True)
        settings = settings.within(record.limits)
        check_cluster(client, cluster, starts=not record.finished)
        workload, space, dataset = parts_of(settings, folder, workload, space, given.data)
        flow = Steered(settings.make_flow(flow, folder.url))
        catch_up(flow, entries, folder.url)
        study = study_of(settings, folder, given.study_or_url)
        if not record.finished:
            check_asked(study, settings.asked)
        is_asked = flow.traits.sampling == "study" and not settings.asked  # by an older dagsel
        if is_asked and type(study.sampler).__name__ != settings.sampler:
            logger.warning(
                "the run began with a %s and goes on with a %s; give study= with the same sampler",
                settings.sampler,
                type(study.sampler).__name__,
            )
        draws = (settings.seed, given.callbacks, record.run, settings.sampler_seed, flow.traits)
        counts = (settings.n_before, settings.first_step)
        driver = StudyDriver(study, space, settings.metric, *draws, *counts)
        driver.validate(grid=False, check=checks(workload, dataset.manifest, settings.goal))
        adopt(driver, record)
        if given.count_downtime and entries:
            began = next(entry.at for entry in entries if isinstance(entry, SessionBegun))
            record.seconds = max(record.seconds, time.time() - began)
        session = Session(settings, folder, driver, flow, workload, dataset, record)
        if record.finished:
            if record.abandoned:
                logger.warning("run %s is only read: %s", record.run, record.abandoned)
            driver.fail_live("the run had ended")
            tidy(record, folder)  # its driver may have died before it could
            with session.observing(call):  # nor may its observers have heard all
                pass
            if record.failed_alike:
                raise AllTrialsFailedError(record.failed_alike)
            if record.too_little_time:
                raise TooLittleTimeError(record.too_little_time)
            return opened(session.result, space, flow)
        with interruptible(session.resume_call) as inbox:
            return opened(session.run(call, lock, inbox), space, flow)


@named_arguments("dagsel.replay", _KEPT, error=SearchError)
def replay(
    run_dir: Url,
    client: Client | str | None = None,
    *,
    workload: Workload | None = None,
    space: Space | None = None,
    data: ShardedDataset | Url | None = None,
    cluster: Any = None,
    into: Url | None = None,
    worker_timeout: float | str = 60.0,
    hold: Hold = "auto",
    cache_dir: str | PathLike[str] | None = None,
    progress: Progress = "auto",
) -> Run:
    """Repeat a run: the same trials, decisions and orders of visits, so the same weights.

    On the same kind of CPU the result is the same bit for bit, on a cluster of any size. A trial
    that trained in gangs differs in its last bits if they have another size now. The metrics and
    the checksum of the state of each epoch are compared with the recorded ones.

    Parameters
    ----------
    run_dir
        The recorded run's folder; only read.
    client, cluster, worker_timeout, hold, cache_dir, progress
        As for `dagsel.optimize`.
    workload, space
        Those that the run began with.
    data
        The data set, if its URL has changed, needs credentials, or is on another host than
        ``run_dir``.
    into
        Folder for the repeated run; by default a new one under ``dagsel-runs``.

    Returns
    -------
    Run
        The repeated run, with a study of its own in memory. Differences from the recorded run are
        listed in ``record.notes`` and logged as warnings.

    Raises
    ------
    RunDirError
        If ``run_dir`` holds no run, or workload or data set are not those of the run.

    Examples
    --------
    >>> import dagsel, optuna
    >>> from dagsel.flows import RandomSearch
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import SGDClassifier
    >>> def space(trial):
    ...     return {"alpha": trial.suggest_float("alpha", 1e-5, 1e-2, log=True)}
    >>> workload = dagsel.SklearnWorkload(SGDClassifier(), metrics=["accuracy"])
    >>> run = dagsel.optimize(
    ...     optuna.create_study(direction="maximize"),
    ...     workload,
    ...     load_iris(return_X_y=True),
    ...     space=space,
    ...     metric="accuracy",
    ...     flow=RandomSearch(max_epochs=5, n_trials=3),
    ...     run_dir="run",
    ...     progress=False,
    ... )
    >>> again = dagsel.replay("run", workload=workload, space=space, into="b", progress=False)
    >>> again.best_value == run.best_value, again.record.notes
    (True, [])
    """
    check_cluster(client, cluster)
    given = checked(
        "workload",
        "space",
        "data",
        "into",
        "cache_dir",
        run_dir=run_dir,
        workload=workload,
        space=space,
        data=data,
        into=into,
        worker_timeout=worker_timeout,
        hold=hold,
        cache_dir=cache_dir,
        progress=progress,
    )
    source = given.run_dir
    settings, entries, then = read_run(source)
    workload, space, dataset = parts_of(settings, source, workload, space, given.data)
    script = Script(tuple(entry for entry in entries if isinstance(entry, Turn)))
    if not script.turns:
        raise RunDirError(
            f"{source.url}: nothing of the run has begun, so there is nothing to repeat; search "
            "with dagsel.optimize"
        )
    # The script ends when the recorded run did, however long that takes here.
    free: dict[str, Any] = {"home": None, "flow_config": None, "deadline_s": None, "budget_s": None}
    free |= {"budget_money": None, "pools": {}}
    settings = replace(settings, flow=flow_name(script), small_population="hop", **free)
    run = uuid.uuid4().hex[:8]
    study = open_study(settings.study, settings.directions, None)
    steps = settings.first_step
    driver = StudyDriver(study, space, settings.metric, settings.seed, (), run, 0, first_step=steps)
    record = Record(run, settings.n_shards, *settings.ranks_by)
    ran_out = (told for trial in then.trials.values() for told in trial.ran_out)
    first: tuple[Entry, ...] = (draws := drawn(script.turns), *ran_out)
    for entry in first:
        record.add(entry)
    adopt(driver, record)
    check = checks(workload, dataset.manifest)
    for trial in [t for t in then.trials.values() if t.state != "failed"][:1]:
        check(record.trials[trial.number].config)  # the workload learns what the run's had learnt
    folder = given.into or RunDir.fresh(f"{settings.study}-replay", run)
    orders = then.visits()
    session = Session(
        settings, folder, driver, script, workload, dataset, record, orders, first=first
    )
    with folder.lock(run) as lock:
        folder.claim(run, settings.to_json())
        held = {"hold": given.hold, "cache_dir": given.cache_dir, "progress": given.progress}
        here = Call(client, cluster, given.worker_timeout, **held)
        repeated = opened(session.run(here, lock), space)
    record.notes += [script.state.astray] if script.state.astray else []
    record.notes += [*_other_configs(draws, record), *differences(then, record)]
    for note in record.notes:
        logger.warning("replay of %s: %s", then.run, note)
    return repeated


def _other_configs(draws: Turn, record: Record) -> Iterator[str]:
    """Say of which trials the space makes another configuration than when they were drawn."""
    assert isinstance(draws.event, Asked)
    for trial, then in zip(draws.event.trials, draws.event.configs, strict=True):
        now = plain_part(record.trials[trial].config)
        texts = {json.dumps(dict(config), sort_keys=True) for config in (now, then)}
        if then and not record.trials[trial].adoptions and len(texts) > 1:
            yield f"trial {trial}: the space makes {now} of its parameters, and made {dict(then)}"
