"""The lock of a run: one process drives it at a time, and a dead one does not block it.

`lock.json` names the holder. The lock is stale if

- the holder was on this machine and its process is gone (a new process with its number was started
  at another time), or
- the holder is elsewhere and has not renewed its heartbeat for a minute. Since clocks differ, we
  also watch for two heartbeats.

On a local disk ``flock`` on the folder lets one process at a time look at the file. S3
(``If-None-Match``) lets one of two writers win. Where one replaces a stale lock, or the store
cannot decide, each waits a moment after its write and has lost if it then reads another's. If two
get through even so, the overwritten one finds out with its next heartbeat (`RunLock.check`), and
no journal accepts the appends of both.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from dagsel.codec import from_json
from dagsel.errors import RunDirError, RunDirLockedError
from dagsel.storage.files import Folder

FILE = "lock.json"
BEAT_S = 5.0
STALE_AFTER_S = 60.0
_SETTLE_S = 0.5  # more than a store needs between the look and the write of another
_DECIDES = {"s3", "s3a", "memory"}  # stores whose `create` was seen to let one writer win
_logger = logging.getLogger("dagsel")


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock.

    `machine` identifies one boot of one machine or container, `process` a process among all that
    had its number, and `token` the lock; `since` is in ISO 8601, `beat` in seconds since 1970.
    """

    run: str
    host: str
    pid: int
    user: str
    machine: str
    process: str
    since: str
    beat: float
    token: str

    def __str__(self) -> str:
        """Say what someone needs to find it."""
        return f"pid {self.pid} of {self.user} on {self.host} since {self.since}"


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """A lock that this process holds, and renews from a thread; made by `RunDir.lock`."""

    def __init__(self, folder: Folder, holder: Holder, beat_s: float) -> None:
        self._folder, self.holder = folder, holder
        self._lost: str | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, args=(beat_s,), name="dagsel-lock", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise a `RunDirLockedError` if another driver has taken the lock."""
        if self._lost is not None:
            raise RunDirLockedError(self._lost)

    def release(self) -> None:
        """Release the lock; again is fine."""
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join()
        try:
            with _alone(self._folder):
                holder = _read(self._folder)
                if holder is not None and holder.token == self.holder.token:
                    self._folder.remove_file(FILE)
        except OSError as error:
            text = self._folder.hide(str(error))
            _logger.warning("%s/%s could not be removed: %s", self._folder.url, FILE, text)

    def _beat(self, beat_s: float) -> None:
        while self._lost is None and not self._done.wait(beat_s):
            # A store that is out of reach now may be back in time.
            with contextlib.suppress(Exception):
                self._renew()

    def _renew(self) -> None:
        with _alone(self._folder):
            found = _read(self._folder)
            if found is not None and found.token != self.holder.token:
                self._lost = _taken(self._folder, found)
                _logger.warning("%s", self._lost)
                return
            self.holder = replace(self.holder, beat=time.time())
            self._folder.replace(FILE, _written(self.holder))

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<RunLock of {self._folder.url}: {self.holder}>"


def acquire(folder: Folder, run: str, *, stale_after_s: float, beat_s: float) -> RunLock:
    """Take the lock of a run's folder; see `RunDir.lock`."""
    mine = _this_process(run)
    try:
        is_new = _take(folder, mine, stale_after_s=stale_after_s, watch_s=2 * beat_s)
        if not folder.is_local and not (is_new and _DECIDES & folder.protocols):
            time.sleep(_SETTLE_S)
        found = _read(folder)
    except RunDirError:
        raise
    except OSError as error:
        raise out_of_reach(folder, "write", error) from None
    if found is None or found.token != mine.token:
        raise RunDirLockedError(_taken(folder, found or mine))
    return RunLock(folder, mine, beat_s)


def out_of_reach(folder: Folder, what: str, error: OSError) -> RunDirError:
    """Return the error for a run's folder that cannot be read, or written."""
    text = folder.hide(str(error))
    return RunDirError(f"cannot {what} run_dir {folder.url}: {text}; check path and permissions")


def driver_of(folder: Folder) -> Holder | None:
    """Return who drives a run now; None if nobody does, or whoever did is gone."""
    found = _read(folder)
    if found is None:
        return None
    if found.machine == _machine():
        return found if _is_alive(found) else None
    return found if time.time() - found.beat <= STALE_AFTER_S else None


def _take(folder: Folder, mine: Holder, *, stale_after_s: float, watch_s: float) -> bool:
    """Write the lock; return whether nothing was there before."""
    watched: Holder | None = None
    while True:
        with _alone(folder):
            if folder.create(FILE, _written(mine)):
                return True
            found = _read(folder)
            if found is None:
                continue  # released since
            is_here = found.machine == mine.machine
            is_stale = not _is_alive(found) if is_here else time.time() - found.beat > stale_after_s
            if not is_stale or watched not in (None, found):
                raise RunDirLockedError(_taken(folder, found))
            if is_here or watched == found:
                folder.replace(FILE, _written(mine))
                _logger.info("%s: took over the lock of %s, which is gone", folder.url, found)
                return False
        watched = found
        time.sleep(watch_s)


def _read(folder: Folder) -> Holder | None:
    data = folder.read(FILE)
    if data is None:
        return None
    try:
        holder: Holder = from_json(Holder, json.loads(data))
    except (ValueError, RecursionError):
        raise RunDirLockedError(
            f"{folder.url}/{FILE} is damaged; if no driver uses this run_dir, delete that file"
        ) from None
    return holder


def _written(holder: Holder) -> bytes:
    return json.dumps(asdict(holder), indent=1).encode()


def _taken(folder: Folder, holder: Holder) -> str:
    return (
        f"{folder.url} is in use by the driver of run {holder.run}: {holder}; stop it or wait for "
        f"it (if it is gone for certain, delete {folder.url}/{FILE})"
    )


@contextlib.contextmanager
def _alone(folder: Folder) -> Iterator[None]:
    """Keep other processes of this machine away from the lock file inside the block."""
    if not folder.is_local:
        yield
        return
    folder.make()
    fd = os.open(folder.path(), os.O_RDONLY)
    try:
        # Some network file systems know no such locks; then the moments are short, that is all.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _this_process(run: str) -> Holder:
    now = datetime.now(UTC)
    return Holder(
        run=run,
        host=platform.node(),
        pid=os.getpid(),
        user=psutil.Process().username(),
        machine=_machine(),
        process=_started(os.getpid()),
        since=now.isoformat(timespec="seconds"),
        beat=now.timestamp(),
        token=uuid.uuid4().hex,
    )


def _machine() -> str:
    """Name this boot of this machine, and the namespace of its process numbers."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _is_alive(holder: Holder) -> bool:
    """Whether the holder still runs on this machine, not another process with its number."""
    try:
        if not psutil.pid_exists(holder.pid):
            return False
        if psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE:
            return False
        return _started(holder.pid) == holder.process
    except OverflowError:
        return False  # no process has such a number
    except (psutil.Error, OSError):
        return True  # someone else's, hidden from us


def _started(pid: int) -> str:
    """Return what tells a process from others with its number."""
    if Path("/proc/self/stat").exists():
        # Counted from the boot: `create_time` moves when the clock is set.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return str(psutil.Process(pid).create_time())
