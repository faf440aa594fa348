"""Writes to a local disk, whole or not at all; and a wait while a disk is full.

What a process has written survives its death, since the kernel has it. Only with `sync` does it
survive a power failure too; the journal needs that.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: How long a write waits for space on a full disk.
PATIENCE_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_logger = logging.getLogger("dagsel")


def replace(path: Path, data: bytes | memoryview, *, sync: bool) -> None:
    """Write a file so that readers see the old one or the new one, whole."""
    aside = _write_aside(path, data, sync=sync)
    try:
        aside.replace(path)
    except BaseException:
        _forget(aside)
        raise
    if sync:
        _sync_directory(path.parent)


def create(path: Path, data: bytes, *, sync: bool) -> bool:
    """Write a file whole if there is none yet; return whether there was none."""
    aside = _write_aside(path, data, sync=sync)
    try:
        # Unlike an exclusive open, a link shows the file only when all of it is there.
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without links, such as exFAT: one writer wins, a crash may leave half.
        try:
            _write_new(path, data, sync=sync)
        except FileExistsError:
            return False
    finally:
        _forget(aside)
    if sync:
        _sync_directory(path.parent)
    return True


def copy(source: Path, path: Path) -> None:
    """Copy a file so that readers see the old one or the new one, whole."""
    aside = _aside(path)
    try:
        shutil.copyfile(source, aside)
        aside.replace(path)
    except BaseException:
        _forget(aside)
        raise


def append(path: Path, data: bytes, *, at: int) -> None:
    """Append bytes and wait until the disk has them, all or none; see `Folder.append`."""
    if at == 0:
        make_directory(path.parent, sync=True)
    _unshare(path)
    how = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | (0 if at else os.O_CREAT)
    fd = os.open(path, how, 0o666)
    try:
        if os.fstat(fd).st_size != at:
            raise OSError(errno.ESTALE, "another process writes to it too")
        try:
            write_all(fd, data)
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, at)
            raise
    finally:
        os.close(fd)
    if at == 0:
        _sync_directory(path.parent)


def cut(path: Path, n_bytes: int) -> None:
    """Shorten a file."""
    _unshare(path)
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        os.ftruncate(fd, n_bytes)
    finally:
        os.close(fd)


def _unshare(path: Path) -> None:
    """Copy a file that has another name too: what is there under that name must not change."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_nlink > 1:
            replace(path, path.read_bytes(), sync=True)


def make_directory(path: Path, *, sync: bool) -> None:
    """Make a directory and its parents, if they are missing."""
    if path.is_dir():
        return
    make_directory(path.parent, sync=sync)
    path.mkdir(exist_ok=True)
    if sync:
        _sync_directory(path.parent)


def _write_aside(path: Path, data: bytes | memoryview, *, sync: bool) -> Path:
    aside = _aside(path)
    try:
        _write_new(aside, data, sync=sync)
    except FileNotFoundError:
        make_directory(path.parent, sync=sync)
        _write_new(aside, data, sync=sync)
    return aside


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def _write_new(path: Path, data: bytes | memoryview, *, sync: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        _forget(path)
        raise


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes to an open file."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def retry_while_full(
    write: Callable[[], T],
    where: str,
    *,
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Write; if the disk is full, warn and try again until it has space or `patience_s` is over.

    `write` writes all or nothing; `where` is what it writes to, for the warning.
    """
    return retry_while(
        lambda error: error.errno in (errno.ENOSPC, errno.EDQUOT),
        write,
        lambda error: (
            f"no room for {where} ({error}); waiting up to {patience_s:g} s for some: delete "
            "something there"
        ),
        f"there is room again for {where}",
        patience_s=patience_s,
        sleep=sleep,
    )


def retry_while(
    passes: Callable[[OSError], bool],
    call: Callable[[], T],
    waits: Callable[[OSError], str],
    goes_on: str,
    *,
    patience_s: float,
    sleep: Callable[[float], object],
) -> T:
    """Call; after an error that `passes`, warn and call again until `patience_s` is over.

    `waits` returns the warning; `goes_on` is said when it goes on.
    """
    waited_s, pause_s = 0.0, _FIRST_PAUSE_S
    while True:
        try:
            result = call()
        except OSError as error:
            if not passes(error) or waited_s >= patience_s:
                raise
            if not waited_s:
                _logger.warning("%s", waits(error))
        else:
            if waited_s:
                _logger.warning("%s, after %.1f s", goes_on, waited_s)
            return result
        sleep(pause_s)
        waited_s += pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
