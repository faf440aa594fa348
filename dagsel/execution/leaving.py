"""How a run leaves the scheduler as it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distributed import Scheduler

from dagsel.execution.run_spec import RESOURCE, key_unit


def withdraw(scheduler: Scheduler, client: str, run: str) -> None:
    """Withdraw what a client wants of a run: its units, and the loads of shards."""
    driver = scheduler.clients.get(client)
    if driver is not None:
        ours = [task.key for task in driver.wants_what if _is_of(run, task.key)]
        scheduler.client_releases_keys(keys=ours, client=client)


def _is_of(run: str, key: Any) -> bool:
    is_load = type(key) is tuple and key[0] == f"load-{run}"
    return is_load or key_unit(run, key) is not None


def take_resources_back(scheduler: Scheduler, workers: Iterable[str]) -> None:
    """Forget the resource that a run has given to workers."""
    for worker in workers:
        state = scheduler.workers.get(worker)
        if state is not None:
            state.resources.pop(RESOURCE, None)
            state.used_resources.pop(RESOURCE, None)
            scheduler.resources.get(RESOURCE, {}).pop(worker, None)
