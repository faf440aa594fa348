"""What a run changes in Dask's scheduler by hand, and how it leaves it as it was.

None of it is promised to stay; docs/explanation/how-it-works.md lists what else is not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from distributed import Scheduler, Status
from distributed.scheduler import TaskState

from dagsel.dispatch.description import ProcessNow
from dagsel.execution import adaptive_target
from dagsel.execution.run_spec import (
    CHANNEL,
    RESOURCE,
    RUN_TOPIC,
    command_topic,
    key_unit,
    plugin_name,
)

logger = logging.getLogger("dagsel")


def hear_commands(scheduler: Scheduler) -> None:
    """Have the plugin of a run hear what its client sends with `CHANNEL`, as an event's message."""
    scheduler.stream_handlers.setdefault(CHANNEL, partial(_hear, scheduler))


def _hear(scheduler: Scheduler, client: str, run: str, command: str) -> None:
    # Dask closes a client that sends what nobody handles, or whose message raises. This one
    # therefore stays when the run has ended: a command may be on its way until then.
    plugin = scheduler.plugins.get(plugin_name(run))
    if plugin is not None:
        try:
            plugin.log_event(command_topic(run), command)
        except Exception:
            logger.exception("run %s, %s", run, command)


def send_next(scheduler: Scheduler, task: TaskState, worker: str) -> None:
    """Have Dask send a task to a worker, behind all that it has been sent before.

    A worker takes tasks of older graphs first. A search's are as old as its round: other searches,
    and other work, would wait for as long as it has some.
    """
    task.worker_restrictions = {worker}
    first, *_ = task.priority or (0,)  # what somebody has asked for
    task.priority = (first, scheduler.generation, time.monotonic())


def put_in_memory(scheduler: Scheduler, task: TaskState, worker: str, n_bytes: int) -> None:
    """Have Dask take what a worker has as the result of a task that waits, and go on from there.

    What the task waits for is needed no more, as if it had run. Dask has no such step of its own:
    data that are scattered do not set free what waits for them. If Dask has forgotten the task, the
    worker is to forget the data.
    """
    if scheduler.tasks.get(task.key) is not task:
        scheduler.worker_send(worker, free_key(task.key))
        return
    recommended: dict[Any, Any] = {}
    client_messages: dict[str, list[Any]] = {}
    task.waiting_on = None
    task.set_nbytes(n_bytes)
    scheduler._add_to_memory(
        task, scheduler.workers[worker], recommended, client_messages, b"", "State"
    )
    scheduler.send_all(client_messages, {})
    scheduler.transitions(recommended, f"dagsel-pass-on-{task.key}")


def may_wait(scheduler: Scheduler, task: TaskState) -> None:
    """Have Dask let a parked task wait for ever; it may have been told to fail such ones."""
    if scheduler.no_workers_timeout is not None and task in scheduler.unrunnable:
        scheduler.unrunnable[task] = math.inf


def free_key(key: Any) -> dict[str, Any]:
    """Return the order to a worker to forget the result of a task."""
    return {"op": "free-keys", "keys": [key], "stimulus_id": f"dagsel-free-{key}"}


def processes_there(scheduler: Scheduler) -> dict[str, ProcessNow]:
    """Return each worker's process, as it last told of itself."""
    return {
        worker: ProcessNow(
            str(it.name),
            memory_bytes=int(it.metrics.get("memory", 0)),
            memory_limit=it.memory_limit or 0,
            is_paused=it.status is Status.paused,
        )
        for worker, it in scheduler.workers.items()
    }


def withdraw(scheduler: Scheduler, client: str, run: str) -> None:
    """Withdraw what a client wants of a run: its units, the loads of shards, and workers."""
    adaptive_target.withdraw(scheduler, run)
    driver = scheduler.clients.get(client)
    if driver is not None:
        ours = [task.key for task in driver.wants_what if _is_of(run, task.key)]
        scheduler.client_releases_keys(keys=ours, client=client)


def _is_of(run: str, key: Any) -> bool:
    is_load = type(key) is tuple and key[0] == f"load-{run}"
    return is_load or key_unit(run, key) is not None


def forget_messages(scheduler: Scheduler, run: str) -> None:
    """Forget the messages of a run that ends, and what came late of those that have ended before.

    Else Dask keeps the last thousand of each topic until the scheduler is closed.
    """
    topics, there = scheduler._broker._topics, scheduler.plugins.keys() - {plugin_name(run)}
    for topic in list(topics):
        if (match := RUN_TOPIC.fullmatch(str(topic))) and match[1] not in there:
            del topics[topic]


def take_resources_back(scheduler: Scheduler, workers: Iterable[str]) -> None:
    """Forget the resource that a run has given to workers."""
    for worker in workers:
        state = scheduler.workers.get(worker)
        if state is not None:
            state.resources.pop(RESOURCE, None)
            state.used_resources.pop(RESOURCE, None)
            scheduler.resources.get(RESOURCE, {}).pop(worker, None)
