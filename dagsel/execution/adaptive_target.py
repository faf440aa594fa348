"""How many workers the searches of a cluster can use: it is told who adapts the cluster.

Dask counts the tasks that are ready. Of a trial one is at a time, and the dispatcher gives it to a
worker at once, so by Dask's count a search would never need a second worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Scheduler

#: Returns how many workers are busy for so many seconds with what is left.
Usable = Callable[[float], int]


class AdaptiveTarget:
    """Answers in the place of ``Scheduler.adaptive_target`` while there are searches.

    It is what Dask counts, or what the searches can use if that is more: a trial trains on one
    worker at a time, and a worker is worth its start if there is work for it for as long as
    ``distributed.adaptive.target-duration`` says.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._of_dask = scheduler, scheduler.adaptive_target
        self.searches: dict[str, Usable] = {}

    def answer(self, target_duration: Any = None) -> int:
        """Return how many workers there should be."""
        told = target_duration or dask.config.get("distributed.adaptive.target-duration")
        seconds = float(parse_timedelta(told))
        n_usable = sum(usable(seconds) for usable in self.searches.values())
        return max(self._of_dask(target_duration), n_usable)

    def withdraw(self, run: str) -> None:
        """Count a search no more; after the last one Dask answers by itself."""
        self.searches.pop(run, None)
        if not self.searches:
            _answer_by(self._scheduler, self._of_dask)


def tell(scheduler: Scheduler, run: str, usable: Usable) -> None:
    """Have a search be counted, until it withdraws."""
    target = _of(scheduler)
    if target is None:
        target = AdaptiveTarget(scheduler)
        _answer_by(scheduler, target.answer)
    target.searches[run] = usable


def withdraw(scheduler: Scheduler, run: str) -> None:
    """Have a search be counted no more."""
    target = _of(scheduler)
    if target is not None:
        target.withdraw(run)


def _of(scheduler: Scheduler) -> AdaptiveTarget | None:
    target = getattr(scheduler.adaptive_target, "__self__", None)
    return target if isinstance(target, AdaptiveTarget) else None


def _answer_by(scheduler: Any, target: Callable[..., int]) -> None:
    scheduler.adaptive_target = target  # asked by dask-gateway
    scheduler.handlers["adaptive_target"] = target  # asked by `Cluster.adapt`
