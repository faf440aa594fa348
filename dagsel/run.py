"""The calls that search: begin a run, go on with one, repeat one."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dagsel.arguments import check_goal, check_limits, checked
from dagsel.checks import choice, short_traceback
from dagsel.driver.consistency import read_history
from dagsel.driver.recovery import catch_up
from dagsel.errors import (
    AllTrialsFailedError,
    RunDirError,
    SearchError,
    TooLittleTimeError,
)
from dagsel.execution.cluster import check_cluster
from dagsel.execution.pools import check_pools
from dagsel.flow import Asked, Flow, limits_of
from dagsel.history.record import Record
from dagsel.history.result import Run
from dagsel.history.script import Script
from dagsel.history.settings import Settings, flow_config, flow_name
from dagsel.messages import SessionBegun, Turn
from dagsel.planning.budget import price_for
from dagsel.planning.pools import Workers, dearest
from dagsel.planning.prices import read_price
from dagsel.planning.small_population import Policy
from dagsel.reopening import adopt, parts_of, study_of
from dagsel.session import Call, Session, tidy
from dagsel.storage import RunDir, ShardedDataset
from dagsel.storage.datasets.pair import ArrayPair
from dagsel.storage.files import Url
from dagsel.study import Callback, Space, StudyDriver, home_of, open_study
from dagsel.workloads.base import Workload, checks
from dagsel.workloads.describe import describe
from dagsel.workloads.gang.gang import gang_workload

if TYPE_CHECKING:
    from dagsel.execution.cluster import Client
    from dagsel.study import Study

logger = logging.getLogger("dagsel")


def optimize(
    study: Study,
    workload: Workload,
    data: ShardedDataset | Url | tuple[Any, Any],
    *,
    space: Space,
    flow: Flow,
    metric: str,
    client: Client | str | None = None,
    cluster: Any = None,
    run_dir: Url | None = None,
    seed: int | None = 0,
    deadline: float | str | timedelta | None = None,
    budget: float | str | None = None,
    price_per_worker_hour: float | str | None = None,
    small_population: Policy = "auto",
    replicas: int = 1,
    deterministic: bool = False,
    callbacks: Sequence[Callback] = (),
    max_cluster_workers: int | None = None,
    worker_startup: float | str | None = None,
    workers: Sequence[Workers] | None = None,
    worker_timeout: float | str = 60.0,
    unit_timeout: float | str | None = None,
) -> Run:
    """Search for the best configuration of a model on a Dask cluster.

    The data stays on the workers and the models hop between them (model hopper parallelism:
    Nakandala, Zhang and Kumar, Cerebro, VLDB 2020): each epoch every trial visits every shard once,
    and many trials train at once.

    What happens is written to ``run_dir`` before it takes effect. If driver, scheduler or cluster
    are lost, `dagsel.resume` goes on with the run; `dagsel.replay` repeats a run.

    Parameters
    ----------
    study
        An Optuna study with one direction. This process alone writes its trials to it.
    workload
        What to train: a `TorchWorkload`, a `SklearnWorkload` or your own.
    data
        A data set that `ShardedDataset.write` wrote, or its URL. Or a pair ``(x, y)`` of arrays,
        tensors, or a data frame and a series: they are written as a data set into ``run_dir``, a
        fifth of the samples for validation, in shards of at most 16 MB. If that is one shard, each
        worker holds it, and models hop only where that balances the workers.
    space
        Optuna's define-by-run function: suggests parameters on a trial and returns the
        configuration as a dict.
    flow
        The search procedure, from `dagsel.flows` or your own.
    metric
        Name of one of the workload's metrics.
    client
        A Dask client or the address of a scheduler; it stays open. Without client and cluster, one
        worker process a core is started on this machine and closed at the end.
    cluster
        A Dask cluster object; it stays open. A search procedure may make it grow and shrink.
        ``"cuda"`` starts one worker for each GPU of this machine.
    run_dir
        Folder or fsspec URL for journal and states, which this process and all workers must reach.
        By default a new folder under ``dagsel-runs``.
    seed
        Seeds initial weights, the order of batches, and random draws of configurations. With None
        a seed is drawn; ``run.json`` has it.
    deadline
        When the search ends with what it has: seconds, or a text such as ``"10 min"``; None for the
        flow's own deadline, if it has one. No unit starts that is expected to end later. Trials
        that train at the deadline stop at their next batch and are pruned.
    budget
        What all workers together may cost: worker-seconds, ``"30 worker-minutes"``, or money such
        as ``"12.50 USD"``; None for the flow's own budget, if it has one. A worker costs from its
        request to its release.
    price_per_worker_hour
        Price of an hour of a worker, such as ``"2.50 USD"``; a number if the budget is money, whose
        currency it then has. None for the flow's own price.
    small_population
        What idle workers do when fewer trials are left than there are workers: ``"hop"`` keeps them
        idle, ``"gang"`` trains each trial on several workers, ``"release"`` releases them.
        ``"auto"`` makes gangs if the data set has a profile of each trial (`dagsel.profile`) that
        says that they are faster; if not, it releases workers if there is a budget. Gangs change
        the last bits of results, and more if a loss is no mean over samples; the record says so. A
        deterministic run makes none. A search procedure that makes gangs or scales the cluster
        itself is left alone.
    replicas
        Workers that hold each shard. More than one helps if workers differ in speed or may be lost,
        and takes as many times the memory.
    deterministic
        Whether the order of a trial's visits depends on seed, trial and epoch alone, so that its
        weights do not depend on the cluster. PyTorch then trains with one thread a worker.
    callbacks
        Called with study and trial after the end of each trial, as Optuna does.
    max_cluster_workers
        Workers that the cluster may have, over all trials; None for what it can have: one a core on
        this machine, those that are there on a cluster that cannot grow.
    worker_startup
        Time from the request for a worker to its first unit, such as ``"90 s"``, for a search that
        plans with it; None for what is known of the kind of cluster. It is measured on the way.
    workers
        Pools of workers that the cluster may have, each with its price, such as on-demand and spot
        machines (`dagsel.Workers`). The cheapest that has room is asked first; those that are lost
        are replaced. A budget in money then bounds the sum of what each worker costs, and a search
        plans with the price of the dearest.
    worker_timeout
        Time to wait for a worker when there is none: seconds, or a text such as ``"2 min"``.
    unit_timeout
        Time that one pass over one shard may take; None for no limit. If it takes longer it is
        stopped at its next batch; if it does not stop there, its worker is restarted. Its trial
        fails at the third time, unless a batch was trained in between.

    Returns
    -------
    Run
        The best model and the record. A failed trial does not end the run; see `Run.failures`.

    Raises
    ------
    SearchError
        If study, space, flow and metric do not fit together, or nothing can be trained within
        deadline and budget: `TooLittleTimeError` once a first unit has shown it.
    WorkloadError
        If the workload cannot be trained with the space's configurations or on the data set, or
        cannot be sent. `AllTrialsFailedError` if all trials fail in one way before any has trained.
    DatasetError
        If the data set cannot be read.
    RunDirError
        If ``run_dir`` holds a run already or cannot be written.
    ClusterError
        If the cluster cannot run it.
    """
    began = time.monotonic()
    check_cluster(client, cluster)
    given = checked(
        "max_cluster_workers",
        "worker_startup",
        "workers",
        "unit_timeout",
        "run_dir",
        study=study,
        workload=workload,
        space=space,
        flow=flow,
        callbacks=callbacks,
        seed=seed,
        replicas=replicas,
        deterministic=deterministic,
        max_cluster_workers=max_cluster_workers,
        worker_startup=worker_startup,
        workers=workers,
        worker_timeout=worker_timeout,
        unit_timeout=unit_timeout,
        run_dir=run_dir,
        data_or_pair=data,
    )
    bounds = (given.worker_timeout, given.max_cluster_workers, given.worker_startup)
    call = Call(client, cluster, *bounds, began, given.workers or ())
    check_pools(client, cluster, call.workers)
    limits = (flow.traits, deadline, budget, price_per_worker_hour, call.workers)
    deadline_s, cost = limits_of(*limits)
    check_limits(flow.traits, deadline_s, cost)
    price = cost.price if cost else price_for(price_per_worker_hour, call.workers)
    check_goal(study, metric, workload)
    policy = _idle_policy(small_population, given.deterministic, workload)
    run = uuid.uuid4().hex[:8]
    seed = given.seed
    driver = StudyDriver(study, space, metric, seed, given.callbacks, run, traits=flow.traits)
    grid = flow.traits.sampling == "grid"
    dataset = given.data_or_pair
    driver.validate(grid=grid, check=checks(workload, dataset.manifest))
    assert driver.sampler_seed is not None
    folder = given.run_dir or RunDir(_new_run_dir(driver.name, run))
    with folder.lock(run) as lock:
        if isinstance(dataset, ArrayPair):
            folder.check_free()
            dataset = dataset.write(folder.data)
        settings = Settings(
            study=driver.name,
            home=home_of(study),
            sampler=type(study.sampler).__name__,
            sampler_seed=driver.sampler_seed,
            direction="maximize" if driver.maximize else "minimize",
            metric=metric,
            seed=seed,
            flow=flow_name(flow),
            flow_config=flow_config(flow),
            data=dataset.url,
            data_digest=dataset.digest,
            n_shards=dataset.n_shards,
            workload=describe(workload),
            replicas=given.replicas,
            deterministic=given.deterministic,
            deadline_s=deadline_s,
            unit_timeout_s=given.unit_timeout,
            budget_s=None if cost is None else cost.worker_seconds,
            price_per_worker_hour=None if price is None else price.per_hour,
            currency="" if price is None else price.currency,
            pools={pool.name: str(pool.cost) for pool in call.workers},
            budget_money=cost.amount if cost and call.workers else None,
            small_population=policy,
        )
        folder.claim(run, settings.to_json())
        record = Record(run, dataset.n_shards, settings.direction)
        session = Session(settings, folder, driver, flow.fresh(), workload, dataset, record)
        return session.run(call, lock)


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
) -> Run:
    """Go on with a run that was interrupted, or whose driver, scheduler or cluster was lost.

    At most the units that were in flight train again. A run that has ended is only read.

    Parameters
    ----------
    run_dir
        The run's folder.
    client, cluster
        As for `dagsel.optimize`; the cluster may be another one, of another size.
    workload, space
        Those that the run began with; always needed, as a ``run_dir`` holds no code.
    study
        The study, or the URL of its storage. Needed if its sampler is not Optuna's default, if it
        is on a server, or if its URL had a password. A study that was in memory is filled again.
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
    )
    bounds = (given.worker_timeout, given.max_cluster_workers, given.worker_startup)
    call = Call(client, cluster, *bounds, began, given.workers or ())
    check_pools(client, cluster, call.workers)
    folder = given.run_dir
    about = folder.about()
    settings = Settings.from_json(about, folder.url)
    if call.workers:
        read_price(dearest(call.workers), settings.currency, name="the dearest of workers=")
    with folder.lock(about["run"]) as lock:
        entries, record = read_history(folder, settings, about["run"])
        check_cluster(client, cluster, starts=not record.finished)
        workload, space, dataset = parts_of(settings, folder, workload, space, given.data)
        flow = settings.make_flow(flow, folder.url)
        catch_up(flow, entries, folder.url)
        study = study_of(settings, folder, given.study_or_url)
        if type(study.sampler).__name__ != settings.sampler:
            logger.warning(
                "the run began with a %s and goes on with a %s; give study= with the same sampler",
                settings.sampler,
                type(study.sampler).__name__,
            )
        draws = (settings.seed, given.callbacks, record.run, settings.sampler_seed, flow.traits)
        driver = StudyDriver(study, space, settings.metric, *draws)
        driver.validate(grid=False, check=checks(workload, dataset.manifest))
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
            if record.failed_alike:
                raise AllTrialsFailedError(record.failed_alike)
            if record.too_little_time:
                raise TooLittleTimeError(record.too_little_time)
            return session.result
        return session.run(call, lock)


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
) -> Run:
    """Repeat a run: the same trials, decisions and orders of visits, so the same weights.

    On the same kind of CPU the result is the same bit for bit, on a cluster of any size. A trial
    that trained in gangs differs in its last bits if they have another size now. The metrics and
    the checksum of the state of each epoch are compared with the recorded ones.

    Parameters
    ----------
    run_dir
        The recorded run's folder; only read.
    client, cluster, worker_timeout
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
    """
    check_cluster(client, cluster)
    given = checked(
        "workload",
        "space",
        "data",
        "into",
        run_dir=run_dir,
        workload=workload,
        space=space,
        data=data,
        into=into,
        worker_timeout=worker_timeout,
    )
    source = given.run_dir
    about = source.about()
    settings = Settings.from_json(about, source.url)
    entries, then = read_history(source, settings, about["run"])
    workload, space, dataset = parts_of(settings, source, workload, space, given.data)
    script = Script(tuple(entry for entry in entries if isinstance(entry, Turn)))
    if not script.turns:
        raise RunDirError(f"{source.url}: nothing of the run has begun, so nothing can be repeated")
    # The script ends when the recorded run did, however long that takes here.
    free: dict[str, Any] = {"home": None, "flow_config": None, "deadline_s": None, "budget_s": None}
    free |= {"budget_money": None, "pools": {}}
    settings = replace(settings, flow=flow_name(script), small_population="hop", **free)
    run = uuid.uuid4().hex[:8]
    study = open_study(settings.study, settings.direction, None)
    driver = StudyDriver(study, space, settings.metric, settings.seed, (), run, sampler_seed=0)
    record = Record(run, settings.n_shards, settings.direction)
    trials = tuple(then.trials)
    params = {trial: dict(then.trials[trial].params) for trial in trials}
    drawn = Turn(Asked(trials), (), seconds=0.0, params=params)
    record.add(drawn)
    adopt(driver, record)
    check = checks(workload, dataset.manifest)
    for trial in [t for t in then.trials.values() if t.state != "failed"][:1]:
        check(record.trials[trial.number].config)  # the workload learns what the run's had learnt
    folder = given.into or RunDir(_new_run_dir(f"{settings.study}-replay", run))
    orders = then.visits()
    session = Session(
        settings, folder, driver, script, workload, dataset, record, orders, first=(drawn,)
    )
    with folder.lock(run) as lock:
        folder.claim(run, settings.to_json())
        repeated = session.run(Call(client, cluster, given.worker_timeout), lock)
    record.notes += [script.state.astray] if script.state.astray else []
    record.notes += then.differences(record)
    for note in record.notes:
        logger.warning("replay of %s: %s", then.run, note)
    return repeated


@short_traceback
def _idle_policy(policy: Policy, deterministic: bool, workload: Workload) -> Policy:
    choice("small_population", policy, get_args(Policy))
    if deterministic and policy == "gang":
        raise SearchError(
            "small_population='gang' changes the last bits of results, and the run is to be "
            "deterministic; take 'hop' or 'release'"
        )
    if policy == "gang":
        gang_workload(workload, instead="take small_population='hop' or 'release'")
    return "hop" if deterministic and policy == "auto" else policy


def _new_run_dir(study: str, run: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in study)
    return str(Path("dagsel-runs").absolute() / f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}-{run}")
