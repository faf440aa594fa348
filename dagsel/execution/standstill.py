"""Ends a search on whose cluster nothing can happen any more, and says why."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dagsel.dispatch.description import WorkerNow
from dagsel.errors import NoWorkersError, WorkerMemoryError

#: While nothing happens the scheduler is asked so often what its workers do.
_ASK_S = 2.0


@dataclass(slots=True)
class Standstill:
    """Since when nothing has happened that trains a trial."""

    timeout_s: float  # how long that may be
    _since: float = field(default_factory=time.monotonic)
    _ask_at: float = 0.0

    def end(self, now: float) -> None:
        """Note that something has happened."""
        self._since, self._ask_at = now, now + _ASK_S

    def wants_to_know(self, now: float) -> bool:
        """Whether it is time to ask what the workers do."""
        if now < self._ask_at:
            return False
        self._ask_at = now + _ASK_S
        return True

    def check(self, now: float, workers: Collection[str], described: Sequence[WorkerNow]) -> None:
        """Check that somebody trains, may train, or makes ready for it.

        Workers wait for long where their trials do. Trials wait in vain where there is no worker,
        or where Dask has paused those that are to go on, and the others are idle.

        Parameters
        ----------
        now
            Time by `time.monotonic`.
        workers
            Those that can run units.
        described
            What workers did when the scheduler was last asked.

        Raises
        ------
        NoWorkersError
            If there has been no worker for longer than `timeout_s`.
        WorkerMemoryError
            If Dask has paused all that have something to do for as long.

        Examples
        --------
        >>> standstill = Standstill(60.0, 0.0)
        >>> paused = WorkerNow("a", "0", is_paused=True, n_loading=1, memory_limit=600)
        >>> standstill.check(60.0, {"a", "b"}, [paused, WorkerNow("b")])
        >>> standstill.check(61.0, {"a", "b"}, [paused, WorkerNow("b")])
        Traceback (most recent call last):
        ...
        dagsel.errors.WorkerMemoryError: no unit has run for 60 s: Dask has paused 1 of 2 workers...
        """
        there = [worker for worker in described if worker.worker in workers]
        paused = [worker for worker in there if worker.is_paused]
        with_work = [worker for worker in there if worker.unit is not None or worker.n_loading]
        in_vain = len(with_work) > 0 and all(worker.is_paused for worker in with_work)
        if workers and not in_vain:
            self._since = now
        elif now - self._since > self.timeout_s:
            if not workers:
                raise NoWorkersError(
                    f"all workers have gone and none came back within {self.timeout_s:g} s; "
                    "start some, and go on with dagsel.resume"
                )
            it = paused[0]
            raise WorkerMemoryError(
                f"no unit has run for {self.timeout_s:g} s: Dask has paused {len(paused)} of "
                f"{len(workers)} workers for their memory; the process of worker {it.name} at "
                f"{it.worker} has {it.memory_bytes:,} of {it.memory_limit:,} bytes; give "
                "workers more memory, and go on with dagsel.resume"
            )
