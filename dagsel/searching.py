"""A search that can be held: it runs in the background, and is looked at and steered meanwhile."""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakMethod

from dagsel.console import span
from dagsel.driver.inbox import Inbox, Order, driven_here
from dagsel.extending import opened
from dagsel.history.result import Run
from dagsel.interrupting import interruptible
from dagsel.loading import load
from dagsel.planning.budget import to_seconds
from dagsel.session import Call, Session
from dagsel.steerable import Steerable, answer
from dagsel.steering import UserCommand
from dagsel.storage.runs.lock import RunLock
from dagsel.study import Space

logger = logging.getLogger("dagsel")

#: `Search.wait` looks up so often, so that Ctrl-C is heard.
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A search whose arguments are checked and whose folder is locked; nothing runs yet."""

    session: Session
    call: Call
    lock: RunLock
    space: Space
    held: ExitStack  # what is released when it has ended

    def run(self, inbox: Inbox) -> Run:
        """Search until the end; release the lock."""
        with self.held:
            result = self.session.run(self.call, self.lock, inbox)
            return opened(result, self.space, self.session.flow)


class Search(Steerable):
    """A search that runs in the background. `dagsel.start` returns it.

    A command returns when it is written to the run's journal. It is performed once, also if this
    process is killed and `dagsel.resume` goes on. A trial stops or pauses at its next batch. A
    command that cannot be performed raises an error and changes nothing. You may call the methods
    from any thread, and in a running event loop.

    In a callback, which the search itself calls, a command returns at once and is performed when
    the callback has returned. If it cannot be performed, that is said in the log.

    Attributes
    ----------
    run_dir
        The run's folder.

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
    ...     flow=RandomSearch(max_epochs=10_000, n_trials=2),  # nobody waits for that many
    ...     run_dir="run",
    ...     progress=False,
    ... )
    >>> number = search.add({"alpha": 1e-3})  # one more trial, with parameters of your own
    >>> search.pause(number)
    >>> search.resume(number)
    >>> search.extend(deadline="10 min")
    >>> search.stop(number)
    >>> search.result.metric, search.is_running
    ('accuracy', True)
    >>> search.finish()
    >>> run = search.wait(timeout="1 min")
    >>> run.trials().set_index("trial")["state"][number] in ("pruned", "complete")
    True
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._inbox = Inbox()
        self._ended: Future[Run] = Future()
        self.run_dir = prepared.session.folder.url
        name = f"dagsel-search-{prepared.session.record.run}"
        # What it shows in a notebook stands below the cell that has begun it.
        here = contextvars.copy_context()
        self._thread = threading.Thread(target=here.run, args=(self._run,), name=name, daemon=True)
        _before_exit(WeakMethod(self._wait_at_exit))
        self._thread.start()

    def __repr__(self) -> str:
        about = "goes on" if not self._ended.done() else "has ended"
        return f"<dagsel.Search in {self.run_dir}: {about}>"

    def _run(self) -> None:
        try:
            run = self._prepared.run(self._inbox)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._ended.set_exception(error)
        else:
            self._ended.set_result(run)

    # ---- looking

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.done()

    @property
    def result(self) -> Run:
        """The run so far; when the search has ended, what `wait` returns.

        Raises
        ------
        DagselError
            What has ended the search, if it was an error.
        """
        if self._ended.done():
            return self._ended.result()
        session = self._prepared.session
        study, workload = session.driver.study, session.workload
        return load(session.folder.url, workload=workload, space=self._prepared.space, study=study)

    def wait(
        self,
        timeout: float | str | timedelta | None = None,
        *,
        until: Callable[[Run], object] | None = None,
    ) -> Run:
        """Wait until the search has ended, or until something holds.

        Ctrl-C ends the search in order, as in `dagsel.optimize`; a second one cancels it.

        Parameters
        ----------
        timeout
            Seconds to wait at most, or a text such as ``"5 min"``; None for no limit.
        until
            A function of the `Run` so far, such as ``lambda run: run.record.n_epochs >= 10``: the
            search goes on, and the call returns when it is true.

        Returns
        -------
        Run
            What `dagsel.optimize` would return; with `until` the run as far as it has come.

        Raises
        ------
        TimeoutError
            If it has not ended by then, and `until` is not true; it goes on.
        DagselError
            What has ended the search, if it was an error; `SearchCancelledError` after `cancel`.
        SearchError
            If a callback of the search calls it.
        """
        self._check_not_here("wait")
        timeout_s = left_s = math.inf if timeout is None else to_seconds("timeout", timeout)
        ends = time.monotonic() + left_s
        look = self._looks_for(until, _LOOK_S)
        with interruptible(self._prepared.session.resume_call, self._inbox):
            try:
                while left_s > 0:
                    self._thread.join(min(left_s, _LOOK_S))
                    if self._ended.done():
                        return self._ended.result()
                    if (run := look()) is not None:
                        return run
                    left_s = ends - time.monotonic()
            except KeyboardInterrupt:
                self._inbox.cancel()
                raise
        raise TimeoutError(
            f"the search goes on after {span(timeout_s)}; wait longer, or call finish()"
        )

    def _wait_at_exit(self) -> None:
        """Let the search end before Python does, as threads that are no daemons do."""
        if not self._ended.done():
            logger.warning("the search in %s goes on; Ctrl-C ends it", self.run_dir)
            with interruptible(self._prepared.session.resume_call, self._inbox):
                self._thread.join()

    def cancel(self) -> None:
        """End the search at once. `wait` raises a `SearchCancelledError`; the run is kept.

        `dagsel.resume` goes on with it, and `dagsel.abandon` gives it up.

        Examples
        --------
        >>> search.cancel()  # doctest: +SKIP
        >>> run = dagsel.resume("run", workload=workload, space=space)  # doctest: +SKIP
        """
        self._inbox.cancel()
        if driven_here(self.run_dir) is None:
            self._thread.join()

    @property
    def _goes_on(self) -> bool:
        return not self._prepared.session.record.finished

    def _command(self, command: UserCommand) -> int | None:
        return answer(self._inbox.post(Order(command)))


def _before_exit(method: WeakMethod[Callable[[], None]]) -> None:
    """Have something called when the main thread has ended, while threads still serve others.

    It does not keep a search alive that has ended.
    """

    def call() -> None:
        if (found := method()) is not None:
            found()

    register = getattr(threading, "_register_atexit", None)
    if register is not None:  # else the search ends with Python, and can be resumed
        register(call)
