"""One session of a run: what one driver does of it, from finding a cluster to tidying the store.

A run has one session, and one more each time that it goes on after an interruption.
"""

from __future__ import annotations

import errno
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dagsel.checks import short_traceback
from dagsel.console import Progress
from dagsel.dispatch.dispatcher import DispatchConfig
from dagsel.dispatch.units import visit_order
from dagsel.driver.idle_workers import IdleWorkers
from dagsel.driver.inbox import Inbox, Order, driving
from dagsel.driver.runner import Runner
from dagsel.errors import (
    AllTrialsFailedError,
    DagselError,
    RunDirError,
    RunDirLockedError,
    TooLittleTimeError,
)
from dagsel.execution.cluster import (
    capacity_here,
    connect,
    dashboard_of,
    own_until,
    threads_here,
    why_fewer_copies,
    why_no_room,
    workers_of,
)
from dagsel.execution.cluster_driver import ClusterDriver
from dagsel.execution.compatibility import pack_workload
from dagsel.execution.engine import DaskEngine
from dagsel.execution.pools import check_pools, driver_for
from dagsel.execution.process import torch_dtype
from dagsel.execution.run_spec import RunSpec
from dagsel.execution.user_modules import digests_here
from dagsel.flow import Context, Flow, Goal
from dagsel.history.record import Record
from dagsel.history.result import Run
from dagsel.history.settings import Settings
from dagsel.history.tariff import Tariff
from dagsel.history.trial import TrialRecord
from dagsel.listening import Listener
from dagsel.messages import ENTRIES, Entry, SessionEnded
from dagsel.observers import Observer, SearchBegan
from dagsel.observers.base import check_observers
from dagsel.observers.observing import Observing
from dagsel.planning.bill import Bill
from dagsel.planning.capacity import ClusterCapacity, fewer
from dagsel.planning.pools import Workers
from dagsel.profiling import MemoryNeeds, stored_scaling
from dagsel.state import State
from dagsel.storage import Journal, RunDir, ShardedDataset
from dagsel.storage.disk import retry_while_full
from dagsel.storage.runs.lock import RunLock
from dagsel.storage.shard_cache import Hold
from dagsel.study import StudyDriver
from dagsel.tidying import drop_states, tidy
from dagsel.views.facts import Facts
from dagsel.views.progress import SearchProgress
from dagsel.workloads.base import (
    FollowsMetric,
    PoolsScores,
    Reconfigurable,
    Workload,
)
from dagsel.workloads.gang.gang import GangWorkload, gang_workload
from dagsel.workloads.unread import saying_checks

if TYPE_CHECKING:
    from dagsel.execution.cluster import Client

logger = logging.getLogger("dagsel")


@dataclass(slots=True)
class LockedJournal:
    """A journal that is not written to once another driver has taken the lock."""

    journal: Journal
    lock: RunLock
    has_entries: bool = False  # with them, the run can be resumed

    def append(self, entries: Sequence[Entry]) -> None:
        """Keep entries, all or none; waits while the disk is full."""
        records = [ENTRIES.encode(entry) for entry in entries]
        retry_while_full(lambda: self._append(records), f"{self.journal!r}")

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.lock.check()
        self.journal.append(records)
        self.has_entries = True


@dataclass(frozen=True, slots=True)
class Call:
    """On what a search is to run, and since when its time counts."""

    client: Client | str | None
    cluster: Any
    worker_timeout_s: float
    max_cluster_workers: int | None = None
    worker_startup_s: float | None = None
    began: float = field(default_factory=time.monotonic)
    workers: tuple[Workers, ...] = ()
    hold: Hold = "auto"
    cache_dir: str | None = None
    progress: Progress = "auto"
    observers: tuple[Observer, ...] = ()

    @classmethod
    @short_traceback
    def of(cls, client: Any, cluster: Any, given: Any, observers: Any, began: float) -> Call:
        """Return a call with arguments that `checked` has returned; check observers and pools."""
        bounds = (given.worker_timeout, given.max_cluster_workers, given.worker_startup)
        held: Any = (given.hold, given.cache_dir, given.progress, check_observers(observers))
        workers = given.workers or ()
        check_pools(client, cluster, workers)
        return cls(client, cluster, *bounds, began, workers, *held)

    @property
    def seconds(self) -> float:
        """Time since the call."""
        return time.monotonic() - self.began

    @property
    def threads(self) -> int | None:
        """Threads that CPU workers train with which are started for the call; None for one."""
        if self.own_capacity is None or self.cluster == "cuda":
            return None
        n = threads_here(self.own_capacity.most_workers)
        return n if n > 1 else None

    @property
    def own_capacity(self) -> ClusterCapacity | None:
        """What a cluster can have that is started for the call; None if there is one."""
        if self.client is not None or self.cluster not in (None, "cuda"):
            return None
        return capacity_here(self.cluster, self.max_cluster_workers, self.worker_startup_s)


@dataclass(frozen=True, slots=True)
class Session:
    """All that one driver's part of a run needs but a cluster."""

    settings: Settings
    folder: RunDir
    driver: StudyDriver
    flow: Flow
    workload: Workload
    data: ShardedDataset
    record: Record
    # Orders of visits of a recorded run; None leaves them to the dispatcher, or to the seed if the
    # run is deterministic.
    visits: Mapping[tuple[int, int], tuple[int, ...]] | None = None
    first: tuple[Entry, ...] = ()  # what the journal begins with; the record has it already
    again: str = ""  # what goes on with the run, if not `dagsel.resume`
    # Metrics by epoch that training follows, where they are not the run's own.
    foreseen: tuple[float, ...] | None = None

    @property
    def result(self) -> Run:
        """The run as it stands."""
        return Run(self.driver.study, self.settings.metric, self.record, self.workload, self.folder)

    @property
    def resume_call(self) -> str:
        """The call that goes on with the run, for messages."""
        return self.settings.resume_call(self.folder.url)

    def orders(self, trial: int, epoch: int) -> tuple[int, ...] | None:
        """Order of a trial's visits, where it is not left to the dispatcher."""
        settings = self.settings
        if self.visits is not None:
            return self.visits.get((trial, epoch))
        if not settings.deterministic:
            return None
        return visit_order(settings.n_shards, seed=settings.seed, trial=trial, epoch=epoch)

    def run(self, call: Call, lock: RunLock, inbox: Inbox | None = None) -> Run:
        """Search on a cluster until the run ends; only the holder of the lock may.

        Commands come from `inbox`, which takes no more when the run has ended.
        """
        inbox = inbox or Inbox()
        with ExitStack() as stack:
            if self.visits is None:  # a replay takes no commands
                stack.enter_context(Listener(self.folder.control, inbox))
            stack.enter_context(inbox)
            stack.enter_context(driving(self.folder.url, inbox))
            return self._run(call, lock, inbox)

    def _run(self, call: Call, lock: RunLock, inbox: Inbox) -> Run:
        record = self.record
        own = call.own_capacity
        n_own = None if own is None else self._workers_to_begin(call, own)
        if own is not None and (n := self.settings.threads):
            logger.warning(
                "each worker trains with %d threads: there are more cores than workers", n
            )
        spec = self._spec(call)
        journal = LockedJournal(self.folder.journal, lock, has_entries=len(record.sessions) > 0)
        with ExitStack() as stack:
            stack.enter_context(self._kept(journal))
            over = [trial.number for trial in record.trials.values() if not trial.is_live]
            facts = self._facts(inbox)
            shown = SearchProgress(self.settings.metric, call.progress, ended=over, facts=facts)
            progress = stack.enter_context(shown)
            observing = stack.enter_context(self.observing(call))
            stack.enter_context(inbox)  # an observer that is waited for may command
            left_s = self._left(call)[0]
            within_s = left_s if left_s > 0 else math.inf  # a run that is over is only ended
            most = None if own is None else own.most_workers
            if own is None:
                within_s = min(within_s, call.worker_timeout_s)
            where = (call.client, call.cluster)
            here = stack.enter_context(
                connect(*where, n_workers=n_own, most_workers=most, within_s=within_s)
            )
            cluster_driver = self._cluster_driver(call, here)
            engine = stack.enter_context(self._engine(call, here, cluster_driver, spec))
            progress.follow(engine.workers_now, dashboard_of(here))
            if self.first:
                journal.append(self.first)
            before = record.seconds, record.worker_seconds, record.money or 0.0
            has_room = spec.hold != "memory"  # on the disk
            why_not = "" if has_room else why_no_room(here, self.data, share=spec.shard_share)
            idle_workers = self._idle_workers(cluster_driver, why_not)
            inbox.wake = engine.wake
            observe = (progress.update, observing.update)
            with inbox:
                self._runner(call, engine, journal, idle_workers, observe, inbox).run()
            self.driver.fail_live("the run ended before the trial did")
        ended = _ended(call, engine.bill, cluster_driver, before)
        journal.append([ended])
        record.add(ended)
        tidy(record, self.folder)
        if self.driver.error is not None:
            self.driver.error.add_note(
                f"a callback raised it, and so the search has ended; it is kept: {self.result!r}, "
                f"{self.resume_call} reads it"
            )
            raise self.driver.error
        return self.result

    def _facts(self, inbox: Inbox) -> Facts:
        """Return what a view is told beside the record; a replay takes no commands."""
        steer = None if self.visits is not None else lambda command: inbox.post(Order(command))
        return Facts.of(self.settings, lambda: self.flow.traits.n_trials, steer, self.folder.url)

    def observing(self, call: Call) -> Observing:
        """Return what tells observers; they hear first of what was before."""
        settings, record = self.settings, self.record
        about = (record.run, settings.study, settings.metric, settings.direction, self.folder.url)
        began = SearchBegan(*about, goes_on=bool(record.sessions))
        return Observing(call.observers, began, record)

    def _spec(self, call: Call) -> RunSpec:
        # What a dead driver has left on the cluster, if only for a moment, is not this session's.
        name = f"{self.record.run}.{uuid.uuid4().hex[:4]}"
        return RunSpec(
            name,
            pack_workload(self.workload),
            self.data,
            self.folder,
            self.settings.seed,
            threads=1 if self.settings.deterministic else self.settings.threads,
            dtype=torch_dtype(),
            hold=call.hold,
            cache_dir=call.cache_dir,
            modules=digests_here(),
        )

    def _cluster_driver(self, call: Call, here: Client) -> ClusterDriver:
        """Return what lets the cluster grow and shrink."""
        driver = driver_for(here, call.cluster, call.workers)
        if self.settings.pools and not call.workers:  # none is dearer than these were
            driver.prices = {"": self.settings.price_per_worker_hour or 0.0}
        return driver

    def _engine(
        self, call: Call, here: Client, cluster_driver: ClusterDriver, spec: RunSpec
    ) -> DaskEngine:
        bounds = call.max_cluster_workers, call.worker_startup_s
        capacity = call.own_capacity or cluster_driver.capacity(*bounds)
        _warn_of_copies(self.settings.replicas, capacity.most_workers)
        if why := why_fewer_copies(here, spec, self.settings.replicas):
            logger.warning("%s", why)
        n_first = self._workers_to_begin(call, capacity, len(workers_of(here)))
        return DaskEngine(
            here,
            spec,
            self.dispatch_config(call),
            min(call.worker_timeout_s, max(1.0, self._left(call)[0])),
            cluster_driver,
            began=call.began,
            n_first=1 if n_first is None else n_first,
            known=capacity,
        )

    def dispatch_config(self, call: Call) -> DispatchConfig:
        """Return what the dispatcher is told of the run."""
        largest = max(size.nbytes for size in self.data.shard_sizes)
        return DispatchConfig(
            self.data.n_shards,
            None if self.settings.replicas == "auto" else self.settings.replicas,
            unit_timeout_s=self.settings.unit_timeout_s,
            capacity_timeout_s=call.worker_timeout_s,
            # Workers that are started for the call are all alike.
            room_timeout_s=call.worker_timeout_s if call.own_capacity is None else 0.0,
            shard_bytes=0 if call.hold == "disk" else largest,
        )

    def _runner(
        self,
        call: Call,
        engine: DaskEngine,
        journal: LockedJournal,
        idle_workers: IdleWorkers,
        observe: Sequence[Callable[[Record], None]],
        inbox: Inbox,
    ) -> Runner:
        settings = self.settings
        return Runner(
            self.flow,
            self.driver,
            engine,
            self.folder.states,
            journal,
            self.record,
            settings.metric,
            seed=settings.seed,
            about=self.folder.digest(),
            check=self._check(),
            follows=self._follows_metric,
            foreseen=self.foreseen,
            needs=MemoryNeeds(self.workload, self.data),
            check_gang=self._check_gang,
            adapt=self._adapt,
            pool=self._pool,
            orders=self.orders,
            idle_workers=idle_workers,
            deadline_s=settings.deadline_s,
            budget_s=settings.budget_s if settings.budget_money is None else None,
            budget_money=settings.budget_money,
            observe=lambda record: [look(record) for look in observe],
            lead_s=call.seconds,
            inbox=inbox,
            tariff=Tariff.of(settings, call.workers),
        )

    def _left(self, call: Call) -> tuple[float, float]:
        """Return the seconds and the worker-seconds that are left of deadline and budget."""
        settings, record = self.settings, self.record
        deadline_s, budget_s = settings.deadline_s, settings.budget_s
        price = settings.price_per_worker_hour
        if settings.budget_money is not None and price is not None:
            budget_s = record.worker_seconds
            budget_s += (settings.budget_money - (record.money or 0.0)) / price * 3600
        return (
            math.inf if deadline_s is None else deadline_s - record.seconds - call.seconds,
            math.inf if budget_s is None else budget_s - record.worker_seconds,
        )

    def _workers_to_begin(
        self, call: Call, capacity: ClusterCapacity, n_there: int = 0
    ) -> int | None:
        """Return how many workers to start; raise if nothing can be trained in time with them."""
        record, settings = self.record, self.settings
        if record.finished:
            return 1
        if record.context is not None:  # the cluster may be another one than before
            return None if record.wanted is None else fewer(record.wanted, capacity)
        left = self._left(call)
        capacity.check(*left, n_there)
        spent = record.worker_seconds + n_there * call.seconds  # at most
        taken = (capacity, record.seconds + call.seconds, spent)
        context = Context(n_there, record.direction, settings.seed, *taken)
        n_wanted = self.flow.workers_to_begin(context)
        if n_wanted is not None:
            return n_wanted
        # A cluster of the user's is as large as they want, unless they leave it to us.
        is_ours = call.own_capacity is not None or call.max_cluster_workers is not None
        if not is_ours:
            return None
        n_workers = capacity.affordable(*left, n_there)
        if not n_there and (why := capacity.why_fewer(n_workers, *left)):
            logger.warning("%s", why)
        return n_workers

    @contextmanager
    def _kept(self, journal: LockedJournal) -> Iterator[None]:
        """Say with an error that the run can be resumed, if it can.

        Its trials stay running in the study until it is resumed or abandoned.
        """
        try:
            yield
        except BaseException as error:
            # Of a run that has ended, a resume tells the study what it lacks.
            is_over = isinstance(error, AllTrialsFailedError | TooLittleTimeError)
            is_lost = isinstance(error, RunDirLockedError)
            if isinstance(error, RunDirError) and error.errno == errno.ENOENT:
                self.driver.fail_live("its run_dir was deleted")
            elif is_over:
                drop_states(self.record, self.folder)
            elif journal.has_entries and self.visits is None and not is_lost:
                kept = f"the run is kept: go on with  {self.again or self.resume_call}"
                if isinstance(error, DagselError) and len(error.args) == 1:
                    error.args = (f"{error}; {kept}",)
                else:
                    error.add_note(kept)
            raise

    def _idle_workers(self, driver: ClusterDriver, why_no_gangs: str) -> IdleWorkers:
        settings = self.settings
        policy = settings.small_population
        costs = settings.bounds_cost
        why_not = driver.why_not if policy == "release" or costs else ""
        costs = policy == "auto" and costs and not why_not
        return IdleWorkers(policy, self._profiled, self._check_gang, costs, why_no_gangs, why_not)

    def _profiled(self, trial: TrialRecord) -> Callable[[int], float] | None:
        """Return the efficiency of a trial's gangs, if a readable profile is kept with the data."""
        if not isinstance(self.workload, GangWorkload):
            return None
        scaling = stored_scaling(self.data, self.workload, trial.config)
        return None if scaling is None else scaling.efficiency

    def _check(self) -> Callable[[Any], None]:
        reads = self.flow.traits.reads_configs != ""
        manifest = self.data.manifest
        return saying_checks(self.workload, manifest, self._followed, flow_reads=reads)

    def _check_gang(self, config: Mapping[str, Any], size: int) -> None:
        workload = gang_workload(
            self.workload, instead=f"let the search use gangs of 1, not {size}"
        )
        workload.validate_gang(config, size)

    @property
    def _followed(self) -> Goal | None:
        """The metric that training may follow; None if it follows those of another run."""
        return self.settings.goal if self.foreseen is None else None

    def _follows_metric(self, config: Mapping[str, Any]) -> bool:
        workload, goal = self.workload, self._followed
        if goal is None or not isinstance(workload, FollowsMetric):
            return False
        return workload.follows_metric(config, goal)

    @property
    def _pool(self) -> Callable[[list[bytes]], dict[str, float]] | None:
        """What makes metrics of the whole validation set; None if the workload has none."""
        workload = self.workload
        if not isinstance(workload, PoolsScores) or not workload.pooled_metrics:
            return None
        return lambda kept: workload.pool([State(blob) for blob in kept])

    def _adapt(self, blob: bytes, config: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
        if not isinstance(self.workload, Reconfigurable):
            return blob
        return self.workload.reconfigure(State(blob), config, new).buffer


def _ended(
    call: Call, bill: Bill, cluster_driver: ClusterDriver, before: tuple[float, float, float]
) -> SessionEnded:
    """Return what is written once all workers are released."""
    now, released = time.monotonic(), bill.at  # when nothing more was billed
    if cluster_driver.own_since is not None:
        released = max(released, own_until(cluster_driver.cluster) or now)
    paid = bill.money(released)
    return SessionEnded(
        time.time() - (now - released),
        before[0] + released - call.began,
        before[1] + bill.worker_seconds(released),
        None if paid is None else before[2] + paid,
    )


def _warn_of_copies(replicas: int | Literal["auto"], most_workers: int | None) -> None:
    if replicas != "auto" and most_workers is not None and replicas > most_workers:
        logger.warning(
            "replicas=%d, and the cluster can have %d worker%s: each holds a shard once, so there "
            "are no more copies than that",
            replicas, most_workers, "s" * (most_workers > 1),
        )  # fmt: skip
