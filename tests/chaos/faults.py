"""Faults for a cluster on this machine; a seed decides which fault comes when.

`schedule` draws the faults and their moments, an `Injector` inflicts them on the processes of a
running search. So a search can be put through the faults of a seed again, with any workload and
flow.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, assert_never

from dagsel.dispatch.events import Drained, DrainRequested
from dagsel.execution.cluster import workers_of
from dagsel.messages import COMMANDS, REPORTS


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL a worker."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP a worker, and let it go on later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Delay:
    """Delay all messages of a worker while its unit goes on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Drain:
    """Take a worker away once its unit is done and its shards are elsewhere."""


@dataclass(frozen=True, slots=True)
class Add:
    """Start a worker."""


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Flip a bit of a trial's newest stored state."""


@dataclass(frozen=True, slots=True)
class FillDisk:
    """Fill the run's file system for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class KillDriver:
    """SIGKILL the process that called `dagsel.optimize`."""


@dataclass(frozen=True, slots=True)
class KillScheduler:
    """SIGKILL Dask's scheduler."""


Fault: TypeAlias = (
    Kill | Freeze | Delay | Drain | Add | Corrupt | FillDisk | KillDriver | KillScheduler
)
Moment: TypeAlias = tuple[float, Fault]

#: A file system with more room than this is not a small one, made to be filled.
MOST_TO_FILL = 256 << 20
_GRAIN = 4096


def schedule(
    seed: int,
    kinds: Sequence[Fault],
    *,
    duration_s: float,
    between_s: tuple[float, float] = (0.5, 1.5),
    once: Sequence[Fault] = (),
) -> tuple[Moment, ...]:
    """Draw which fault comes when.

    Parameters
    ----------
    seed
        The same one gives the same faults at the same moments.
    kinds
        What to draw from, each equally likely; name one twice to see it twice as often.
    duration_s
        Length of the schedule.
    between_s
        Least and greatest time from one fault to the next, and from the start to the first.
    once
        Faults that each come once, in the place of one that was drawn. They change no moment.

    Returns
    -------
    moments
        Seconds from the start, and the fault; sorted.

    Raises
    ------
    ValueError
        If there is no room for all of `once`, or the arguments make no sense.
    """
    least, most = between_s
    if not 0 < least <= most:
        raise ValueError(f"between_s must be two positive numbers, the less first: {between_s}")
    moments, chosen, places = (random.Random(f"{seed} {of}") for of in ("at", "what", "once"))
    found: list[Moment] = []
    at_s = moments.uniform(least, most)
    while at_s < duration_s and kinds:
        found.append((at_s, chosen.choice(kinds)))
        at_s += moments.uniform(least, most)
    if len(once) > len(found):
        raise ValueError(f"{len(once)} faults do not fit into {len(found)} moments; take longer")
    for place, fault in zip(places.sample(range(len(found)), len(once)), once, strict=True):
        found[place] = (found[place][0], fault)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was inflicted, and on what: a worker, a path, the driver or the scheduler."""

    fault: Fault
    victim: str


@dataclass(slots=True)
class Injector:
    """Inflicts faults on a Dask cluster whose processes are on this machine.

    Parameters
    ----------
    client
        A client of the cluster; any cluster object's, or one of a scheduler's address.
    seed
        Seeds the choice of victims.
    run_dir
        The run's folder, a local one: its states are corrupted, its file system is filled.
    add
        Starts a worker.
    driver, scheduler
        Their process ids.

    Attributes
    ----------
    done
        What was inflicted, in order. A fault that finds no victim is left out.
    """

    client: Any
    seed: int = 0
    run_dir: str | None = None
    add: Callable[[], object] | None = None
    driver: int | None = None
    scheduler: int | None = None
    done: list[Done] = field(default_factory=list)
    _chance: random.Random = field(init=False, repr=False)
    _pids: dict[str, int] = field(default_factory=dict)
    _stopped: dict[str, int] = field(default_factory=dict)
    _leaving: set[str] = field(default_factory=set)
    _released: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.seed} victims")

    def inject(self, fault: Fault) -> Done | None:
        """Inflict a fault now; one that lasts ends in a thread."""
        victim = self._inject(fault)
        if victim is None:
            return None
        self.done.append(Done(fault, victim))
        return self.done[-1]

    def release(self) -> None:
        """End all faults that last: resume paused workers, empty the disk."""
        self._released.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._released.clear()

    def _inject(self, fault: Fault) -> str | None:
        match fault:
            case Kill():
                return self._to_worker(self._kill)
            case Freeze(seconds):
                return self._to_worker(lambda worker: self._pause(worker, seconds))
            case Delay(seconds):
                return self._to_worker(lambda worker: self._delay(worker, seconds))
            case Drain():
                return self._to_worker(self._drain)
            case Add():
                return None if self.add is None else f"{self.add() or 'a new worker'}"
            case Corrupt():
                return None if self.run_dir is None else corrupt(self.run_dir, self._chance)
            case FillDisk(seconds):
                return None if self.run_dir is None else self._fill(self.run_dir, seconds)
            case KillDriver():
                return _kill(self.driver, "driver")
            case KillScheduler():
                return _kill(self.scheduler, "scheduler")
            case _:
                assert_never(fault)

    # ---- workers

    def _to_worker(self, harm: Callable[[str], bool]) -> str | None:
        """Pick a worker that is neither paused nor leaving, and harm it."""
        there = workers_of(self.client)
        unknown = [worker for worker in there if worker not in self._pids]
        if unknown:  # the others may be paused and would not answer
            self._pids |= self.client.run(os.getpid, workers=unknown, on_error="ignore")
        busy = self._stopped.keys() | self._leaving
        fit = [worker for worker in there if worker in self._pids and worker not in busy]
        if not fit:
            return None
        # By process id, which is in the order of their starts: addresses are drawn by the kernel.
        victim = self._chance.choice(sorted(fit, key=self._pids.__getitem__))
        return victim if harm(victim) else None

    def _kill(self, worker: str) -> bool:
        return _kill(self._pids[worker], worker) is not None

    def _pause(self, worker: str, seconds: float) -> bool:
        pid = self._pids[worker]
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return False
        self._stopped[worker] = pid

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            del self._stopped[worker]

        self._later(seconds, go_on)
        return True

    def _delay(self, worker: str, seconds: float) -> bool:
        self.client.run(_block, seconds, workers=[worker], wait=False, on_error="ignore")
        return True

    def _drain(self, worker: str) -> bool:
        self._leaving.add(worker)
        self.client.run_on_scheduler(_drain, worker, wait=False)
        return True

    # ---- the disk

    def _fill(self, folder: str, seconds: float) -> str | None:
        if shutil.disk_usage(folder).free > MOST_TO_FILL:
            raise ValueError(
                f"{folder} has {shutil.disk_usage(folder).free >> 20} MB free; only a file system "
                f"of at most {MOST_TO_FILL >> 20} MB is filled: mount a tmpfs for the run_dir"
            )
        ballast = Path(folder) / "ballast"
        ends_at = time.monotonic() + seconds

        def fill() -> None:
            try:
                with ballast.open("ab", buffering=0) as file:
                    while time.monotonic() < ends_at and not self._released.is_set():
                        fill_up(file.fileno())  # again: something may have been deleted
                        self._released.wait(0.02)
            finally:
                ballast.unlink()

        self._start(threading.Thread(target=fill, daemon=True))
        return str(ballast)

    # ---- what lasts

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        def wait() -> None:
            self._released.wait(seconds)
            act()

        self._start(threading.Thread(target=wait, daemon=True))

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()


def fill_up(fd: int) -> None:
    """Write to a file until its file system has no room left."""
    size = _GRAIN << 8
    while size >= 1:
        try:
            os.write(fd, bytes(size))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            size //= 16


def corrupt(run_dir: str, chance: random.Random) -> str | None:
    """Flip a bit of the newest stored state of a trial.

    Parameters
    ----------
    run_dir
        A run's folder, a local one.
    chance
        Draws trial and bit.

    Returns
    -------
    path
        Of the file; None if nothing is stored, or it went while we looked.
    """
    trials = sorted(Path(run_dir, "states").glob("trial-*"))
    chance.shuffle(trials)
    for trial in trials:
        # The names sort as epochs and positions do.
        states = sorted(p for p in trial.glob("*.safetensors") if ".partial." not in p.name)
        if states:
            with contextlib.suppress(FileNotFoundError), states[-1].open("r+b") as file:
                file.seek(chance.randrange(os.fstat(file.fileno()).st_size))
                byte = file.read(1)[0] ^ 1 << chance.randrange(8)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte]))
                return str(states[-1])
    return None


def _kill(pid: int | None, victim: str) -> str | None:
    if pid is None:
        return None
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return victim


async def _block(seconds: float) -> None:
    time.sleep(seconds)  # in the worker's event loop: that is the point


async def _drain(worker: str, dask_scheduler: Any) -> None:
    """Ask all runs on a scheduler to drain a worker, wait for them, and retire it."""
    runs = [name for name in dask_scheduler.plugins if name.startswith("dagsel-")]
    for run in runs:
        dask_scheduler.log_event(f"{run}-commands", COMMANDS.to_text(DrainRequested(worker)))
    while worker in dask_scheduler.workers and any(
        run in dask_scheduler.plugins and not _is_drained(dask_scheduler, run, worker)
        for run in runs
    ):
        await asyncio.sleep(0.05)
    if worker in dask_scheduler.workers:
        await dask_scheduler.retire_workers([worker], close_workers=True)


def _is_drained(dask_scheduler: Any, run: str, worker: str) -> bool:
    said = dask_scheduler.get_events(f"{run}-reports")
    return any(Drained(worker) in REPORTS.from_text(told) for _, told in said)
