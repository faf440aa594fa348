"""A fork server that is a copy of this process, where that is safe: nothing is imported twice.

Python's fork server is a new interpreter, which takes seconds to import what the script that starts
a search has imported already. A copy has it. But a copy has one thread only, and the locks of all
others as they were; so it is made only while no other thread could hold one.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any, NamedTuple

import distributed.utils
import psutil
from dask.system import CPU_COUNT

from dagsel.execution.user_modules import digests_here, users_modules

#: What a process has in memory that has imported PyTorch and Dask, and nothing else.
_IMPORTS_BYTES = 400 << 20
#: More than that may be this share of a worker's part of the memory: it would count for each copy.
_SHARE = 0.1
#: Threads that wait, and whose libraries begin anew in a copy: zarr's, fsspec's and Arrow's. Dask's
#: is left of a search before, and is made to.
_AWARE = re.compile(r"zarr_io|fsspecIO|asyncio_\d+|Dask-Offload_\d+")
_AWARE_NATIVE = frozenset({"jemalloc_bg_thd"})
#: So long the threads that OpenMP was told to end may take for it.
_PAUSE_S = 0.1
#: omp_pause_hard of the OpenMP API, version 5.0.
_PAUSE_HARD = 2
#: CUDA_ERROR_NOT_INITIALIZED of CUDA's driver API.
_NOT_INITIALIZED = 3
_TASKS = Path("/proc/self/task")

_in_copy = False
#: What the modules of the user's held when the server was copied; None if it is no copy.
_held: dict[str, dict[str, _Kept]] | None = None
_thread = threading.local()


def is_possible() -> bool:
    """Whether a copy of this process would be as good as a new one, and is not too large."""
    return (
        threading.current_thread() is threading.main_thread()
        and all(_AWARE.fullmatch(thread.name) for thread in _others())
        and psutil.Process().memory_info().rss < _most_bytes()
        and not _cuda_has_begun()
        and not _jax_has_begun()
        and _has_no_native_threads()
    )


def _cuda_has_begun() -> bool:
    """Whether anything here has begun to use CUDA, which no copy can use then.

    CUDA's own driver is asked: PyTorch does not know what other libraries do.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # nothing has loaded it
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def _jax_has_begun() -> bool:
    """Whether JAX has looked for its devices. It has threads then, and warns of each fork."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    begun = getattr(bridge, "backends_are_initialized", lambda: True)
    return bridge is not None and bool(begun())


def _most_bytes() -> float:
    return _IMPORTS_BYTES + _SHARE * float(psutil.virtual_memory().total) / CPU_COUNT


def _others() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t is not threading.main_thread()]


def _has_no_native_threads() -> bool:
    """Whether libraries have no threads, once those of OpenMP and OpenBLAS have ended.

    Both start them again when they need them. OpenBLAS ends its own before a fork.
    """
    if not _TASKS.exists():
        return False
    _pause_openmp()
    if (child := _fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    known = {thread.native_id for thread in threading.enumerate()}
    ends_at = time.monotonic() + _PAUSE_S
    while unknown := [task for task in _TASKS.iterdir() if int(task.name) not in known]:
        if {_name(task) for task in unknown} <= _AWARE_NATIVE | {""}:
            break
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.001)
    return True


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of any other thread; which ones there may be is known here.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _name(thread: Path) -> str:
    """Return what the system calls a thread; nothing if it has ended."""
    with suppress(OSError):
        return (thread / "comm").read_text().strip()
    return ""


def _openmp() -> Iterator[Any]:
    """Yield the OpenMP libraries of GCC that are loaded here; each package brings its own."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in sorted(loaded):
        if "libgomp" in path:
            with suppress(OSError):  # its file was replaced
                yield ctypes.CDLL(path)


def _pause_openmp() -> None:
    for library in _openmp():
        pause = getattr(library, "omp_pause_resource_all", None)  # since GCC 9
        if pause is not None:
            pause(_PAUSE_HARD)


@contextmanager
def copying() -> Iterator[None]:
    """Let a fork server that is started meanwhile be a copy of this process, where it can be."""
    spawn = util.spawnv_passfds

    def start(path: Any, command: Sequence[Any], passed: Sequence[int]) -> int:
        global _held
        is_server = "forkserver" in os.fsdecode(command[-1])  # Python's tracker of resources is not
        if is_server:
            _held = None
        begin = _copy if is_server and is_possible() else spawn
        return begin(path, command, passed)

    util.spawnv_passfds = start  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def is_outdated() -> bool:
    """Whether the server is a copy, and a module of the user's holds something else by now.

    A value may have been set, or the module been loaded again.
    """
    if _held is None:
        return False
    now = _held_by_users()
    return any(
        not _is_same(before, now.get(name, {}).get(key))
        for name, held in _held.items()
        for key, before in held.items()
    )


def end() -> None:
    """End the server."""
    global _held
    _held = None
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _held_by_users() -> dict[str, dict[str, _Kept]]:
    """Return what each module of the user's holds."""
    return {
        name: {key: _kept(held) for key, held in [*vars(module).items()] if key[:2] != "__"}
        for name, module in users_modules().items()
    }


class _Kept(NamedTuple):
    """What a name stands for, which it keeps from being freed only if it is plain."""

    value: Any
    content: Any  # of a list, a dict or a set


def _kept(value: Any) -> _Kept:
    content = copy.copy(value) if type(value) in (list, dict, set) else None
    with suppress(TypeError):
        value = weakref.ref(value)
    return _Kept(value, content)


def _is_same(before: _Kept, now: _Kept | None) -> bool:
    """Whether it is the same object, with the same in it, or an equal one that is plain."""
    if now is None:
        return False
    try:
        if isinstance(before.value, weakref.ref) or before.value is now.value:
            return before.value is now.value and bool(before.content == now.content)
        return type(before.value) is type(now.value) and bool(before.value == now.value)
    except Exception:  # noqa: BLE001 - other arrays in a list, say
        return False


def _copy(path: Any, command: Sequence[Any], passed: Sequence[int]) -> int:
    """Run the program of ``python -c`` in a copy; return its process identifier."""
    global _held
    _held = _held_by_users()
    digests_here()  # the copy has what was imported here, be the files changed by then
    for stream in (sys.stdout, sys.stderr):  # or the copy would have the text as well
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    if child := _fork():
        return child
    status = 1
    try:
        _begin_anew(passed)
        exec(os.fsdecode(command[-1]), {"__name__": "dagsel fork server"})  # noqa: S102
        status = 0
    except SystemExit:
        status = 0
    except BaseException:  # noqa: BLE001 - nothing of the caller may run here
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _begin_anew(passed: Sequence[int]) -> None:
    """Make a copy what a new process would be, but for what it has imported."""
    global _in_copy
    _in_copy = True
    gc.freeze()  # looking through it would copy all of its memory
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # is held here
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    # Whoever has them open here may close them once more: the numbers stay taken.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd not in passed and fd != nothing:
            with suppress(OSError):
                os.dup2(nothing, fd, inheritable=False)
    distributed.utils._offload_executor = ThreadPoolExecutor(1, "Dask-Offload")
    limit_threads(everywhere=True)


def limit_threads(*, everywhere: bool = False) -> None:
    """Have as many threads compute in a copy as ``OMP_NUM_THREADS`` says; it was read too early.

    Of OpenMP that is one number a thread, so each thread that trains has to call this.
    """
    if not _in_copy or (not everywhere and getattr(_thread, "is_limited", False)):
        return
    _thread.is_limited = True
    n = os.environ.get("OMP_NUM_THREADS", "")
    if not n.isdecimal():
        return
    for library in _openmp():
        library.omp_set_num_threads(int(n))
    if everywhere:
        for limit in _blas_limits():
            limit(int(n))
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(int(n))


def _blas_limits() -> list[Callable[[int], object]]:
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    return [library.set_num_threads for library in found]
