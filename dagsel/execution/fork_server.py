"""Worker processes of our own cluster come from a process that has imported what they need once.

Python's fork server has PyTorch and the like, and each worker is a copy of it; a process that is
spawned imports them anew, for seconds on each core. The server ends with this process. It is a copy
of this process itself where that is safe (`copied_server`), or a new one that imports.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from multiprocessing import forkserver, resource_tracker
from typing import Any

import dask.config
import distributed.utils
from distributed import LocalCluster
from distributed.deploy.cluster import Cluster
from distributed.utils import silence_logging_cmgr

from dagsel.execution import copied_server

logger = logging.getLogger("dagsel")

METHOD = "distributed.worker.multiprocessing-method"
#: Set it to False in Dask's configuration, and our own workers are spawned; to "new", and their
#: server is no copy of this process.
IS_WANTED = "dagsel.fork-server"

#: Packages that start no thread while they are imported: a copy of a process has one thread only.
_SAFE = frozenset(
    {"dagsel", "dask", "distributed", "lightning", "numpy", "optuna", "scipy", "sklearn", "torch"}
    | {"torchmetrics", "zarr"}
)
_OURS = ("dagsel.execution.forked", "dagsel.execution.worker_plugin")
#: What of dagsel workers need. The driver's tables need pandas, whose import takes a while.
_FOR_WORKERS = frozenset(
    {"checks", "codec", "dispatch", "errors", "flow", "messages", "metrics", "planning", "state"}
    | {"storage", "workloads"}
)

_lock = threading.Lock()
_n_open = 0
_n_silent = 0
_silence = ExitStack()
_set_here: dict[str, str] = {}  # in the environment


def is_possible() -> bool:
    """Whether workers may come from a fork server here.

    Not where somebody has chosen how Dask starts processes, and not on macOS, whose libraries do
    not bear a fork.
    """
    return (
        _is_supported()
        and bool(dask.config.get(IS_WANTED, True))
        and (_n_open > 0 or dask.config.get(METHOD, "spawn") == "spawn")
    )


def _is_supported() -> bool:
    return sys.platform == "linux" and "forkserver" in multiprocessing.get_all_start_methods()


@cache
def _say_spawned(why: str) -> None:
    logger.warning("each worker process imports all anew, which takes seconds: %s", why)


def modules_for_workers(imported: Iterable[str]) -> list[str]:
    """Choose what the server imports, of what this process has imported.

    Examples
    --------
    >>> modules_for_workers(["json", "torch", "torch.nn", "torch.nn.init.x", "dagsel.state"])[2:]
    ['torch', 'torch.nn', 'dagsel.state']
    """
    names = [*_OURS]
    for name in imported:
        package, *inner = name.split(".")
        if package == "dagsel" and inner:
            is_needed = inner[0] in _FOR_WORKERS
        else:
            is_needed = package in _SAFE and len(inner) < 2
        if is_needed:
            names.append(name)
    return list(dict.fromkeys(names))


def is_users(name: str) -> bool:
    """Whether a variable of the environment was set, and not by `prepare`."""
    return name in os.environ and os.environ[name] != _set_here.get(name)


def prepare() -> None:
    """Say what the server imports, if it does not run yet."""
    # What Dask sets before it starts a worker; libraries read it while they are imported.
    before: Mapping[str, Any] = dask.config.get("distributed.nanny.pre-spawn-environ", {})
    for name, value in before.items():
        if value is not None and name not in os.environ:
            os.environ[name] = _set_here[name] = str(value)
    # Arrow, which pandas imports if it is there, starts a thread otherwise.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    # Else Dask imports pandas and others here, so that the server imports them as well.
    distributed.utils._forkserver_preload_set = True
    forkserver.set_forkserver_preload(modules_for_workers(list(sys.modules)))


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Let threads and processes that are started here, and what these start, hear no Ctrl-C.

    A terminal sends it to all processes of a script. The driver alone is to act on it: it ends the
    search in order, and then the workers.
    """
    resource_tracker.ensure_running()  # where it starts, it lets the signal through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(*, as_copy: bool = False) -> bool:
    """Start the server, if it can be, and anew if it is a copy that holds code of before.

    With `as_copy` it is replaced by a copy alone: a new process imports for seconds.
    """
    is_free = not _n_open and not multiprocessing.active_children()
    if is_free and copied_server.is_outdated() and (not as_copy or copied_server.is_possible()):
        copied_server.end()
    return is_there()


def is_there() -> bool:
    """Whether workers can come from the server; start it if it does not run, wait for nothing."""
    if not is_possible():
        if not _is_supported():
            _say_spawned("Python has no safe fork server on this platform")
        return False
    prepare()
    is_new = dask.config.get(IS_WANTED, True) == "new"
    try:
        with deaf_to_interrupts(), nullcontext() if is_new else copied_server.copying():
            forkserver.ensure_running()
    except OSError as error:  # say, temporary files lie so deep that a socket there has no name
        _say_spawned(f"Python's fork server does not start: {error}")
        return False
    return True


class OwnCluster(LocalCluster):
    """A cluster of ours. While one is open, Dask takes processes from the fork server."""

    began_at: float | None = None  # when `connect` began to start it, by `time.monotonic`
    ended_at: float | None = None  # when its processes had ended

    def __init__(self, **options: Any) -> None:
        self._takes_from_server = begin(as_copy=True)  # it imports while the scheduler starts
        if self._takes_from_server:
            _count(+1)
        _silence_dask(+1)
        self._is_silent = True
        try:
            super().__init__(**options)  # type: ignore[no-untyped-call]
        except BaseException:
            self._give_up_server()
            raise

    def _update_worker_status(self, op: Any, msg: Any) -> None:
        """Take note of workers that come and go, and keep the nanny of one that was lost.

        It starts another one. Dask closes it for good where none is there 15 s later, which a busy
        machine, and a trial that ends each worker, take easily.
        """
        Cluster._update_worker_status(self, op, msg)

    async def _close(self) -> None:
        try:
            await super()._close()  # type: ignore[no-untyped-call]
            if self._is_silent:  # else Dask may close it again at the end of Python
                self._is_silent = False
                _silence_dask(-1)
        finally:
            self._give_up_server()

    def _give_up_server(self) -> None:
        if self._takes_from_server:
            self._takes_from_server = False
            _count(-1)


def _count(n: int) -> None:
    """Count our clusters that are open, and tell Dask of the first and of the last."""
    global _n_open
    with _lock:
        _n_open += n
        dask.config.set({METHOD: "forkserver" if _n_open else "spawn"})


def _silence_dask(n: int) -> None:
    """Count our clusters that are open; Dask logs errors alone until the last is closed.

    Each would give Dask's log the level back that it has found: then the first that is closed would
    end the silence of the others.
    """
    global _n_silent
    with _lock:
        _n_silent += n
        if not _n_silent:
            _silence.close()
        elif n > 0:  # what logs there since another was opened is silenced as well
            for name in ("distributed", "bokeh"):
                _silence.enter_context(silence_logging_cmgr(logging.ERROR, name))
