"""The calls that begin a search."""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from os import PathLike
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast, get_args

from dagsel.argument_names import named_arguments
from dagsel.arguments import (
    check_goals,
    check_limits,
    check_several,
    checked,
    limits_of,
)
from dagsel.checks import choice, short_traceback
from dagsel.console import Progress, has_prompt
from dagsel.driver.steered import Steered
from dagsel.errors import SearchError
from dagsel.execution.cluster import check_cluster, warm_up
from dagsel.flow import Flow, Keep
from dagsel.history.record import Record
from dagsel.history.result import Run
from dagsel.history.settings import Settings, flow_config, flow_name
from dagsel.interrupting import interruptible
from dagsel.observers import Observer
from dagsel.observers.base import hold_observers
from dagsel.planning.budget import price_for
from dagsel.planning.pools import Workers
from dagsel.planning.small_population import Policy
from dagsel.searching import Prepared, Search
from dagsel.session import Call, Session
from dagsel.storage import RunDir, ShardedDataset
from dagsel.storage.datasets.pair import ArrayPair
from dagsel.storage.files import Url
from dagsel.storage.shard_cache import Hold
from dagsel.study import Callback, Space, StudyDriver, home_of
from dagsel.study.asked import asked_of
from dagsel.study.checks import say_unasked
from dagsel.workloads.base import Workload, checks
from dagsel.workloads.describe import describe
from dagsel.workloads.gang.gang import gang_workload

if TYPE_CHECKING:
    from dagsel.execution.cluster import Client
    from dagsel.study import Study

P = ParamSpec("P")
T = TypeVar("T")


@named_arguments
def optimize(
    study: Study,
    workload: Workload,
    data: ShardedDataset | Url | tuple[Any, Any],
    *,
    space: Space,
    flow: Flow,
    metric: str | Sequence[str],
    client: Client | str | None = None,
    cluster: Any = None,
    run_dir: Url | None = None,
    seed: int | None = 0,
    deadline: float | str | timedelta | None = None,
    budget: float | str | None = None,
    price_per_worker_hour: float | str | None = None,
    small_population: Policy = "auto",
    keep: Keep | None = None,
    top_k: int = 1,
    replicas: int | Literal["auto"] = "auto",
    deterministic: bool = False,
    callbacks: Sequence[Callback] = (),
    max_cluster_workers: int | None = None,
    worker_startup: float | str | None = None,
    workers: Sequence[Workers] | None = None,
    worker_timeout: float | str = 60.0,
    unit_timeout: float | str | None = None,
    hold: Hold = "auto",
    cache_dir: str | PathLike[str] | None = None,
    progress: Progress = "auto",
    observers: Sequence[Observer] = (),
) -> Run:
    """Search for the best configuration of a model on a Dask cluster.

    The data stays on the workers and the models hop between them (model hopper parallelism:
    Nakandala, Zhang and Kumar, Cerebro, VLDB 2020): each epoch every trial visits every shard once,
    and many trials train at once.

    All that happens is written to ``run_dir`` first. If this process, the scheduler or the cluster
    is lost, `dagsel.resume` goes on with the run. `dagsel.replay` repeats a run.

    Parameters
    ----------
    study
        An Optuna study, with one direction or several. This process alone writes its trials to it.
    workload
        What to train: a `TorchWorkload`, one of the others (`HFWorkload`, `LightningWorkload`,
        `FlaxWorkload`, `KerasWorkload`, `SklearnWorkload`) or your own.
    data
        A data set that `ShardedDataset.write` wrote, or its URL. Or a pair ``(x, y)`` of arrays,
        tensors, or a data frame and a series: they are written as a data set into ``run_dir``, a
        fifth of the samples for validation, in shards of about 16 MB, or of 256 samples where these
        are larger.
    space
        Optuna's define-by-run function: suggests parameters on a trial and returns the
        configuration as a dict. A choice may be a class, a function or a tuple: the configuration
        has it itself; a study that is stored, tables and `Run.best_params` have its name.
    flow
        The search procedure, from `dagsel.flows` or your own.
    metric
        Name of one of the workload's metrics. For a study with several directions a list of names,
        one for each; then a trial has a value for each, and `Run.pareto` returns the trials that no
        other trial beats.
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
        When the search ends with what it has: seconds, a text such as ``"10 min"``, or a
        `timedelta`; None for the flow's own deadline, if it has one. No unit starts that is
        expected to end later. Trials that train at the deadline stop at their next batch and are
        pruned, but for the best one, which is complete.
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
    keep
        Which of a trial's scored states is its model: ``"best"``, that of the epoch in which the
        metric was best, or ``"last"``. Its value, the study's, and which trial is best follow it.
        Among trials of ``"last"`` one that was pruned is not better than one that was not. None for
        ``"best"``; of several metrics the last epoch counts.
    top_k
        How many trials keep their model when the search has ended: those that are best
        (`Run.models`, `Run.ensemble`, `Run.export`). Of several metrics those of the Pareto front.
    replicas
        Workers that hold each shard. More than one helps if workers differ in speed or may be lost,
        and takes as many times the memory. There are no more copies than workers; more are made as
        workers come, and a line says if the cluster, or memory, cannot have so many. ``"auto"``
        for as many as a tenth of each worker's memory takes: small data is on every worker, and
        models hop only to balance them.
    deterministic
        Whether the order of a trial's visits depends on seed, trial and epoch alone, so that its
        weights do not depend on the cluster. PyTorch then trains with one thread a worker.
    callbacks
        Called with study and trial after the end of each trial, as Optuna does.
    max_cluster_workers
        Workers that the cluster may have, over all trials; None for what it can have: one a core on
        this machine, those that are there on a cluster that cannot grow. Of fewer workers than
        cores on this machine each trains with several threads, unless ``OMP_NUM_THREADS`` is set.
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
    hold
        Where a worker holds its shards: in ``"memory"``, of whose limit they may take half, or on
        its ``"disk"``: fetched once, checked, and read as they are needed, mostly from what the
        system keeps of files in memory. ``"auto"`` puts on the disk what does not fit into memory.
        All give the same weights. With ``"memory"`` a run ends if the shards do not fit.
    cache_dir
        Folder on each worker's machine for shards on its disk; None for one beside Dask's own
        (``temporary-directory`` in its configuration). What is put there is removed at the end.
    progress
        How the search is shown, on standard error: a ``"table"`` of the trials, one ``"line"``, a
        ``"log"`` with a line on each trial that ends and some on all, or False for nothing.
        ``"auto"`` is a table in a terminal or a notebook, and a log elsewhere.
    observers
        Objects that hear of trials and epochs, such as ``[TensorBoard("tb"), CSV("epochs.csv")]``:
        see `dagsel.observers`.

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
        cannot be sent. `AllTrialsFailedError` if all trials fail in one way before any was scored.
    DatasetError
        If the data set cannot be read.
    RunDirError
        If ``run_dir`` holds a run already or cannot be written.
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
    >>> run = dagsel.optimize(
    ...     optuna.create_study(direction="maximize"),
    ...     dagsel.SklearnWorkload(SGDClassifier(), metrics=["accuracy"]),
    ...     load_iris(return_X_y=True),
    ...     space=space,
    ...     metric="accuracy",
    ...     flow=RandomSearch(max_epochs=5, n_trials=3),
    ...     run_dir="run",
    ...     progress=False,
    ... )
    >>> run
    <Run ... of ...: 3 complete; best accuracy ... (trial ...)>
    >>> run.best_value > 0.5, list(run.best_params)
    (True, ['alpha'])
    """
    prepared = _prepared(**locals())
    with interruptible(prepared.session.resume_call) as inbox:
        return prepared.run(inbox)


#: Arguments that are not checked each by itself, as the others are.
_NOT_ALONE = {
    "budget", "client", "cluster", "data", "deadline", "metric", "observers",
    "price_per_worker_hour", "small_population",
}  # fmt: skip


def _takes(what: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of another one."""

    def decorate(call: Callable[..., T]) -> Callable[P, T]:
        returns = inspect.signature(call).return_annotation
        taken = inspect.signature(what).replace(return_annotation=returns)
        call.__signature__ = taken  # type: ignore[attr-defined]
        return cast("Callable[P, T]", call)

    return decorate


@named_arguments
@_takes(optimize)
def start(*args: Any, **options: Any) -> Search:
    """Begin a search in the background, and return at once.

    It takes the arguments of `dagsel.optimize`, and raises at once what that raises if an argument
    cannot be used. `Search.wait` raises what goes wrong later. The process has to live on: at its
    end Python waits for the search. At a prompt in a terminal ``progress="auto"`` is a log.

    Parameters
    ----------
    *args, **options
        As for `dagsel.optimize`.

    Returns
    -------
    Search
        To look at the search, to steer it, and to wait for its end.

    Examples
    --------
    >>> import dagsel, optuna
    >>> from dagsel.flows import RandomSearch
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import SGDClassifier
    >>> def space(trial):
    ...     return {"alpha": trial.suggest_float("alpha", 1e-5, 1e-2, log=True)}
    >>> search = dagsel.start(
    ...     optuna.create_study(direction="maximize"),
    ...     dagsel.SklearnWorkload(SGDClassifier(), metrics=["accuracy"]),
    ...     load_iris(return_X_y=True),
    ...     space=space,
    ...     metric="accuracy",
    ...     flow=RandomSearch(max_epochs=5, n_trials=3),
    ...     run_dir="run",
    ...     progress=False,
    ... )
    >>> run = search.wait()
    >>> len(run.trials())
    3
    """
    given = inspect.signature(optimize).bind(*args, **options)
    given.apply_defaults()
    if given.arguments["progress"] == "auto" and has_prompt():
        given.arguments["progress"] = "log"  # a table would draw over what is typed
    return Search(_prepared(**given.arguments))


@short_traceback
def _prepared(**arguments: Any) -> Prepared:
    """Check the arguments of a search, claim its folder, and write down what it was called with."""
    began = time.monotonic()
    asked = SimpleNamespace(**arguments)
    client, cluster = asked.client, asked.cluster
    check_cluster(client, cluster)
    given = checked(
        "max_cluster_workers",
        "worker_startup",
        "workers",
        "unit_timeout",
        "run_dir",
        "keep",
        "cache_dir",
        **{name: value for name, value in arguments.items() if name not in _NOT_ALONE},
    )
    study, workload, space, flow = given.study, given.workload, given.space, given.flow
    warm_up(client, cluster)  # while the study is checked and arrays are read and written
    dataset = checked(data_or_pair=asked.data).data_or_pair
    call = Call.of(client, cluster, given, asked.observers, began)
    limits = (asked.deadline, asked.budget, asked.price_per_worker_hour, call.workers)
    deadline_s, cost = limits_of(flow.traits, *limits)
    check_limits(flow.traits, deadline_s, cost)
    price = cost.price if cost else price_for(asked.price_per_worker_hour, call.workers)
    goals = check_goals(study, asked.metric, workload)
    kept = check_several(goals, flow, given.keep, given.top_k)
    policy = _idle_policy(asked.small_population, given.deterministic, workload)
    run = uuid.uuid4().hex[:8]
    seed = given.seed
    metric, direction = goals[0].metric, goals[0].direction
    driver = StudyDriver(study, space, metric, seed, given.callbacks, run, traits=flow.traits)
    say_unasked(study, flow_name(flow), flow.traits)
    grid = flow.traits.sampling == "grid"
    fits = checks(workload, dataset.manifest, goals[0])

    def check(config: Any) -> None:
        flow.check_config(config)
        fits(config)

    driver.validate(grid=grid, check=check)
    assert driver.sampler_seed is not None
    assert driver.n_before is not None
    assert driver.first_step is not None
    folder = given.run_dir or RunDir.fresh(driver.name, run)
    with ExitStack() as stack:
        lock = stack.enter_context(folder.lock(run))
        stack.enter_context(hold_observers(call.observers))
        if isinstance(dataset, ArrayPair):
            folder.check_free()
            dataset = dataset.write(folder.data)
        settings = Settings(
            study=driver.name,
            home=home_of(study),
            sampler=type(study.sampler).__name__,
            sampler_seed=driver.sampler_seed,
            asked=asked_of(study, flow.traits),
            n_before=driver.n_before,
            first_step=driver.first_step,
            direction=direction,
            metric=metric,
            seed=seed,
            flow=flow_name(flow),
            flow_config=flow_config(flow),
            data=dataset.url,
            data_digest=dataset.digest,
            n_shards=dataset.n_shards,
            workload=describe(workload),
            keep=kept,
            top_k=given.top_k,
            goals=goals if len(goals) > 1 else (),
            replicas=given.replicas,
            deterministic=given.deterministic,
            threads=None if given.deterministic else call.threads,
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
        record = Record(run, dataset.n_shards, *settings.ranks_by)
        steered = Steered(flow.fresh())
        session = Session(settings, folder, driver, steered, workload, dataset, record)
        return Prepared(session, call, lock, space, stack.pop_all())


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
