"""The dispatcher inside Dask's scheduler.

Every unit is parked when its graph arrives: it gets a worker restriction that no worker meets, so
that Dask makes it ready and does not send it anywhere. The plugin tells the dispatcher what
happens, and performs what it decides: a bound unit gets its worker as its one restriction and its
shard in its annotations.

Of the scheduler it touches what Dask does not promise to keep: ``TaskState.worker_restrictions``,
``annotations`` and ``suspicious``, and ``Scheduler.transitions``. docs/explanation/how-it-works.md
lists the rest. The range of versions in ``pyproject.toml`` is the one it is tested with.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, assert_never

from distributed import Scheduler, SchedulerPlugin
from distributed.comm.addressing import get_address_host
from distributed.scheduler import Recs, TaskState

from dagsel import messages
from dagsel.codec import to_json
from dagsel.dispatch import dispatcher, events
from dagsel.dispatch.description import DescribeWorkers, WorkersDescribed, describe
from dagsel.dispatch.unit_times import Speeds
from dagsel.dispatch.units import Unit
from dagsel.execution import adaptive_target, scheduler_state
from dagsel.execution.attempts import Attempts, unit_done
from dagsel.execution.copies import SpareCopies, WarmStates, must_hop
from dagsel.execution.gang_calls import passed_on
from dagsel.execution.run_spec import (
    CHANNEL,
    FILLED,
    Key,
    command_topic,
    key_unit,
    plugin_name,
    read_records,
    report_topic,
    unit_key,
    worker_topic,
)
from dagsel.messages import PieceRecord, UnitRecord, UnitsDone
from dagsel.workloads.memory import lost_under, restarted_at

#: A worker restriction that no worker meets.
PARKED = frozenset({"dagsel://parked"})


class DispatchPlugin(SchedulerPlugin):
    """Has a run's dispatcher decide where and when each of its units runs.

    Parameters
    ----------
    run
        Identifier of the run.
    config
        What the dispatcher is told once.
    client
        Identifier of the driver's client; when it leaves, the run is over.
    """

    def __init__(self, run: str, config: dispatcher.DispatchConfig, client: str) -> None:
        self.run, self.config, self.client = run, config, client
        self.name = plugin_name(run)

    async def start(self, scheduler: Scheduler) -> None:
        """Begin to listen."""
        self.scheduler = scheduler
        # The client's own subscription may arrive after the first report.
        scheduler.subscribe_topic(report_topic(self.run), self.client)
        scheduler_state.hear_commands(scheduler)
        self.dispatcher = dispatcher.Dispatcher(self.config)
        adaptive_target.tell(scheduler, self.run, self.dispatcher.usable)
        self._loop = asyncio.get_running_loop()
        self._events: list[events.DispatchEvent] = []
        self._turn_due = False
        self._alarm: asyncio.TimerHandle | None = None
        self._stimuli = itertools.count()
        self._attempts = Attempts(self.config.n_shards)
        self._ending: Unit | None = None  # its task is not over, and all that it does is known
        self._scored: dict[Key, None] = {}  # tasks of evaluating units that another one has done
        self._hops: dict[Unit, bool] = {}  # bound unit: whether its state had to be sent
        self._copies = SpareCopies(scheduler, self._may_read)
        self._warm = WarmStates(lambda worker, unit: self._send(worker, messages.ForgetState(unit)))
        self._tracebacks: dict[int, str] = {}  # of each trial's last unit that raised
        self._raised: dict[int, messages.UnitRaised] = {}
        self._speeds = Speeds()
        self._with_our_resource: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False

    # What Dask tells

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Any], **kwargs: Any) -> None:
        """Park the run's units before Dask can send them anywhere."""
        for key in tasks:
            if key_unit(self.run, key) is not None:
                scheduler.tasks[key].worker_restrictions = set(PARKED)

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        """See units become ready, end, come back, and shards arrive."""
        unit = key_unit(self.run, key)
        if unit is not None:
            self._unit_moved(unit, key, start, finish, kwargs)
        elif type(key) is tuple and key[0] == f"load-{self.run}":
            self._load_moved(key, start, finish, kwargs)

    def _unit_moved(
        self, unit: Unit, key: Any, start: str, finish: str, details: dict[str, Any]
    ) -> None:
        if key in self._scored:  # nobody waits for it
            return
        task = self.scheduler.tasks[key]
        match start, finish:
            case _, "no-worker":
                scheduler_state.may_wait(self.scheduler, task)
                self._push(events.UnitReady(unit))
            case _, "processing":
                self._hops[unit] = must_hop(task)
            case "processing", "memory":
                self._task_done(task, read_records(details["metadata"]))
            case "processing", "released" if unit == self._ending:
                pass
            case "processing", "erred":
                self._unit_failed(unit, details)
            case "processing" | "no-worker", "released":
                self._unit_returned(unit, task)
            case "released", "waiting" if self._attempts.has_result(unit):
                self._push(events.UnitLost(unit))
            case _, "forgotten" if unit not in self.dispatcher.bindings:
                self._attempts.forget(unit)

    def _task_done(self, task: TaskState, work: Sequence[UnitRecord | PieceRecord]) -> None:
        """Note what a task has done: its own unit, and what came after it."""
        task.worker_restrictions = set(PARKED)
        self._copies.note_read(task)
        unit, done = work[0].unit, [each for each in work if isinstance(each, UnitRecord)]
        self._attempts.task_done(unit)
        self._push(unit_done(done))
        hop, members = self._hops.pop(unit, False), self._members(unit)
        for at, each in enumerate(done):
            if each.unit.kind == unit.kind:
                self._attempts.note_result(each.unit)
                self._warm.drop(each.unit)
            else:
                self._scored[unit_key(self.run, each.unit)] = None
            attempts, lost_s = self._attempts.done(each.unit)
            done[at] = replace(
                each, hop=hop, members=members, attempts=attempts, lost_seconds=lost_s
            )
            hop, members = False, ()
        self._report(*done)
        if isinstance(piece := work[-1], PieceRecord):  # it was stopped in there
            self._hear_piece(piece)
            self._push(self._warm.returned(piece.unit))

    def _units_done(self, told: UnitsDone) -> None:
        """Note what a task has done that holds the result of a later unit's task."""
        unit, key = told.work[0].unit, unit_key(self.run, told.last)
        task, last = (self.scheduler.tasks.get(it) for it in (unit_key(self.run, unit), key))
        is_current = told.attempt == self._attempts.number(unit)
        if not (task and last and is_current and task.state == "processing"):
            self.scheduler.worker_send(told.worker, scheduler_state.free_key(key))
            return
        self._task_done(task, told.work)
        self._ending = unit
        self._drop_scored()  # before the state makes them ready
        scheduler_state.put_in_memory(self.scheduler, last, told.worker, told.state_bytes)
        self._ending = None

    def _drop_scored(self) -> None:
        """Have Dask forget tasks of evaluating units that another one has done."""
        if self._scored:
            self.scheduler.client_releases_keys(keys=[*self._scored], client=self.client)
            self._scored = {}

    def _members(self, unit: Unit) -> tuple[str, ...]:
        binding = self.dispatcher.bindings.get(unit)
        return () if binding is None else binding.members

    def _unit_failed(self, unit: Unit, details: dict[str, Any]) -> None:
        told = self._raised.get(unit.trial)
        reason = told.raised.reason if told else details.get("exception_text") or "a unit raised"
        self._tracebacks[unit.trial] = details.get("traceback_text") or ""
        self._push(events.UnitFailed(unit, details.get("worker") or "", reason))

    def _unit_returned(self, unit: Unit, task: TaskState) -> None:
        # Dask takes a lost worker's tasks back before it says that the worker is lost, and the
        # dispatcher has to know what ran there to suspect the right unit.
        worker = self.dispatcher.worker_of(unit)
        if worker is not None and worker not in self.scheduler.workers:
            self._worker_removed(worker, expected=not task.suspicious)
        task.suspicious = 0
        task.worker_restrictions = set(PARKED)
        self._attempts.returned(unit)
        self._push(self._warm.returned(unit))

    def _load_moved(self, key: Any, start: str, finish: str, details: dict[str, Any]) -> None:
        _, shard, worker, _ = key
        if start == "processing" and finish == "memory":
            self._push(events.ShardLoaded(worker, shard))
            self._report(events.ShardLoaded(worker, shard))
        elif start == "processing" and finish == "erred":
            reason = details.get("exception_text") or "a shard could not be read"
            self._push(events.ShardFailed(worker, shard, reason))

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Return those of the workers that may be closed: a gang's have no task, but its leader."""
        joined = {each for it in self.dispatcher.bindings.values() for each in it.members}
        return [worker for worker in workers if worker.address not in joined]

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """See a worker go."""
        self._worker_removed(worker, expected=False)

    def _worker_removed(self, worker: str, *, expected: bool) -> None:
        known = self.dispatcher.knows(worker)
        for event in self._events:  # what it will know
            match event:
                case events.WorkerAdded(of) | events.WorkerRemoved(of) if of == worker:
                    known = isinstance(event, events.WorkerAdded)
        if known:
            if not expected and (ran := self.dispatcher.trial_on(worker)) is not None:
                trial, filled = ran
                self._report(messages.Note(lost_under(trial, worker, filled)))
            for other in self.scheduler.workers.keys() - {worker}:
                self._send(other, messages.WorkerLost(worker))
            for unit, binding in self.dispatcher.bindings.items():
                if worker in binding.members:  # its leader may wait for it to come
                    attempt, reason = self._attempts.number(unit), f"{worker} was lost"
                    self._pass_on(messages.AbandonGang(unit, attempt, reason))
            self._push(events.WorkerRemoved(worker, expected))
            self._report(events.WorkerRemoved(worker, expected))

    def restart(self, scheduler: Scheduler) -> None:
        """End the run as Dask has forgotten its tasks."""
        if not self._closed:
            reason = "the cluster was restarted (Client.restart), and its tasks are forgotten"
            self._report(events.FailRun(reason))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End the run when its driver has gone."""
        if client == self.client and not self._closed:
            self.end()
            scheduler.remove_plugin(self.name)
            self._keep(scheduler.unregister_worker_plugin(None, self.name))

    # What workers and driver tell

    def log_event(self, topic: str, msg: Any) -> None:
        """Hear the run's workers and its driver."""
        if topic == worker_topic(self.run):
            self._hear_worker(*messages.NOTICES.from_text(msg["notice"]))
        elif topic == command_topic(self.run):
            self._hear_driver(*messages.COMMANDS.from_text(msg))
        elif topic == FILLED and (of := self.scheduler.workers.get(msg["worker"])) is not None:
            self._push(events.MemoryFilled(of.address, msg["rss"], of.memory_limit))

    def _hear_worker(self, notice: messages.Notice) -> None:
        match notice:
            case messages.WorkerJoined(worker) if worker in self.scheduler.workers:
                self._report(notice)
                if notice.owns_resource:
                    self._with_our_resource.add(worker)
                speed, node = self._speeds.rounded(notice.speed), get_address_host(worker)
                can = (frozenset[int](), speed, notice.max_shards)
                added = events.WorkerAdded(worker, *can, node, notice.process, notice.copy_room)
                room, shard_room = notice.rooms
                self._push(replace(added, room=room, shard_room=shard_room))
            case messages.WorkerRefused() | messages.Note():
                self._report(notice)
            case messages.WorkerLeaves(worker, unfit):
                self._report(messages.WorkerDrains(worker, retire=False))
                self._push(events.DrainRequested(worker, unfit))
                for unit, binding in self.dispatcher.bindings.items():
                    if worker in binding.members:  # a gang ends where its leader does
                        self._preempt(unit, binding.worker)
            case events.UnitStarted(unit):
                self._note_begun(unit)
                self._push(notice)
            case PieceRecord():
                self._hear_piece(notice)
            case UnitsDone():
                self._units_done(notice)
            case messages.GangCalls() | messages.AbandonGang():
                self._pass_on(notice)
            case events.GangBroke():
                self._push(notice)
            case events.UnitTrains(unit):
                if not self._attempts.is_running(unit):  # its input was at hand
                    self._note_begun(unit)
                self._push(notice)
                if (unit.epoch, unit.position) == (1, 0):
                    self._report(notice)
            case messages.UnitRaised(unit):
                self._raised[unit.trial] = notice

    def _hear_piece(self, piece: PieceRecord) -> None:
        unit = piece.unit
        self._attempts.stopped(unit)
        self._warm.add(piece)
        if unit.trial not in self.dispatcher.trials:  # stopped while it ran
            self._warm.drop(unit)
        hop = self._hops.get(unit, False)
        self._report(replace(piece, hop=hop, members=self._members(unit)))

    def _note_begun(self, unit: Unit) -> None:
        self._attempts.begun(unit)
        self._copies.note_read(self.scheduler.tasks.get(unit_key(self.run, unit)))

    def _hear_driver(self, command: messages.Command) -> None:
        match command:
            case events.RoundAdded(round_):
                self._attempts.note_begun(round_)  # only then it looks there
                self._push(command)
            case events.TrialStopped(trial):
                self._push(command)
                # In that turn; a unit that tells of a piece after it is known to be over.
                self._loop.call_soon(self._warm.drop_trial, trial)
            case messages.PreemptTrial(trial):
                for unit, binding in self.dispatcher.bindings.items():
                    if unit.trial == trial:
                        self._preempt(unit, binding.worker)
            case messages.LimitTime(seconds):
                self._push(events.HorizonSet(time.monotonic() + seconds))
            case messages.Shrink():
                self._shrink(command)
            case DescribeWorkers():
                self._describe()
            case messages.EndRun():
                self.end()
            case _:  # what the dispatcher knows
                self._push(command)

    def _shrink(self, command: messages.Shrink) -> None:
        """Drain the nodes whose loss costs least, down to no fewer than so many workers."""
        dispatcher = self.dispatcher
        n_over = dispatcher.n_staying - command.n_workers
        for worker in dispatcher.cheapest(n_over, nodes=command.nodes, prices=command.prices):
            self._report(messages.WorkerDrains(worker, retire=True))
            self._push(events.DrainRequested(worker))

    def _describe(self) -> None:
        """Tell the driver what each worker does, for those who watch."""
        hosts, bindings = self.dispatcher.workers.values(), self.dispatcher.bindings.values()
        described = describe(hosts, bindings, scheduler_state.processes_there(self.scheduler))
        self._report(WorkersDescribed(tuple(described)))

    # What the dispatcher decides

    def _push(self, event: events.DispatchEvent) -> None:
        self._events.append(event)
        if not self._turn_due and not self._closed:
            self._turn_due = True
            # Dask must not be asked for transitions from within one.
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._closed:
            return
        self._drop_scored()
        self._turn_due = False
        batch, self._events = self._events, []
        self._perform(self.dispatcher.handle(*batch, now_s=time.monotonic()))
        self._copies.drop()
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if (wake_at := self.dispatcher.wake_at) is not None:
            delay = max(0.0, wake_at - time.monotonic())
            self._alarm = self._loop.call_later(delay, self._push, events.TimerFired())

    def _perform(self, instructions: list[events.Instruction]) -> None:
        bound: Recs = {}
        for instruction in instructions:
            match instruction:
                case events.Bind():
                    self._bind(instruction, bound)
                case events.DropShard(worker):
                    self._send(worker, instruction)
                case events.Preempt(unit, worker):
                    self._preempt(unit, worker)
                case events.FailTrial(trial, reason, filled):
                    self._warm.drop_trial(trial)
                    told = self._raised.pop(trial, None)
                    raised = told.raised if told and told.is_the_workloads else None
                    raised = restarted_at(*filled) if filled else raised
                    traceback = self._tracebacks.pop(trial, "")
                    self._report(messages.TrialReport(trial, reason, traceback, raised))
                case events.RestartWorker(worker):
                    self._report(instruction)
                    self._restart(worker)
                case events.LoadShard() | events.TrialRests() | events.Drained() | events.FailRun():
                    self._report(instruction)
                case _:
                    assert_never(instruction)
        if bound:
            self.scheduler.transitions(bound, f"dagsel-bind-{next(self._stimuli)}")

    def _bind(self, bind: events.Bind, bound: Recs) -> None:
        unit, workers = bind.unit, {bind.worker, *bind.members}
        task = self.scheduler.tasks.get(unit_key(self.run, unit))
        if task is None or task.state != "no-worker":
            # It was withdrawn, or lost its input, in this very turn of the loop.
            self._push(self._warm.returned(unit))
            return
        gone = workers - self.scheduler.workers.keys()
        if gone:  # Dask will not say again that the unit is ready
            for worker in gone:
                self._worker_removed(worker, expected=True)
            self._push(self._warm.returned(unit))
            self._push(events.UnitReady(unit))
            return
        attempt = self._attempts.next(unit, len(bind.then))
        scheduler_state.send_next(self.scheduler, task, bind.worker)
        binding = messages.Assignment(
            bind.shard,
            attempt,
            bind.seconds,
            self.config.at_once_s,
            self.dispatcher.visits_before(unit),
            self._attempts.spare(unit),
            n_pieces=self._warm.n_pieces(unit),
            gang=len(workers),
            is_suspect=bind.is_suspect,
            then=bind.then,
            scores=bind.scores,
            alone=bind.alone,
        )
        task.annotations = {**(task.annotations or {}), "dagsel": to_json(binding)}
        bound[task.key] = "processing"

    def _pass_on(self, told: messages.GangCalls | messages.AbandonGang) -> None:
        """Call a worker of a gang to its leader, or have the leader wait no longer."""
        binding = self.dispatcher.bindings.get(told.unit)
        if binding is not None and told.attempt == self._attempts.number(told.unit):
            self._send(*passed_on(told, binding, self._is_there))

    def _may_read(self, key: Any, worker: str) -> bool:
        unit = key_unit(self.run, key)
        if unit is not None and unit.kind == "train":
            return self.dispatcher.home(unit.trial) == worker
        return unit is not None and self.dispatcher.holds(worker, unit.position)

    def _preempt(self, unit: Unit, worker: str) -> None:
        self._send(worker, messages.StopUnit(unit, self._attempts.number(unit)))

    def _send(self, worker: str, order: messages.Order) -> None:
        # One that has not joined, such as a restarted one at the same address, does not listen.
        if self._is_there(worker):
            told = {"op": CHANNEL, "run": self.run, "order": messages.ORDERS.to_text(order)}
            self.scheduler.worker_send(worker, told)

    def _is_there(self, worker: str) -> bool:
        return self.dispatcher.knows(worker) and worker in self.scheduler.stream_comms

    def _restart(self, worker: str) -> None:
        stimulus = f"dagsel-restart-{next(self._stimuli)}"
        how: dict[str, Any] = {"wait_for_workers": False, "on_error": "return"}
        self._keep(self.scheduler.restart_workers([worker], **how, stimulus_id=stimulus))

    def _keep(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine; the loop alone would forget it."""
        task = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _report(self, *told: messages.Message) -> None:
        self.scheduler.log_event(report_topic(self.run), messages.REPORTS.to_text(*told))

    def end(self) -> None:
        """Stop listening and leave the scheduler as it was."""
        if self._closed:
            return
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        scheduler_state.withdraw(self.scheduler, self.client, self.run)
        others = (p for p in self.scheduler.plugins.values() if isinstance(p, DispatchPlugin))
        if all(other._closed for other in others):
            scheduler_state.take_resources_back(self.scheduler, self._with_our_resource)
        scheduler_state.forget_messages(self.scheduler, self.run)
