"""A folder on a machine's own disk that processes share, and the last one removes.

A process that uses a part of it holds a lock on a file. The lock ends with the process, so what a
killed one has left is known for what it is. Nothing is written or removed through a link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dagsel.checks import shown
from dagsel.errors import LinkError, SearchError

_KEY = re.compile(r"[0-9a-f]{32}")


class NoRoomError(Exception):
    """The disk does not take something; the text says why."""


@contextlib.contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Tell what fails on this machine's disk from what fails in the store."""
    try:
        yield
    except LinkError:
        raise
    except OSError as error:
        raise NoRoomError(f"{folder}: {error.strerror or error}") from error


def sweep(root: Path, own: re.Pattern[str], *, besides: str = "") -> None:
    """Remove the parts of a folder that nobody uses, but for one of them; see `remove_unused`."""
    names = {path.name.removesuffix(".lock") for path in root.iterdir()}
    for key in names - {besides}:
        if _KEY.fullmatch(key):
            with contextlib.suppress(OSError):
                remove_unused(root, key, own)


def remove_unused(root: Path, key: str, own: re.Pattern[str]) -> None:
    """Remove a part of a folder unless somebody uses it: of its files those with names of ours."""
    lock = locked(root / f"{key}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        return
    try:
        folder = root / key
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(folder.lstat().st_mode):
                for path in folder.iterdir():
                    if own.fullmatch(path.name):
                        path.unlink(missing_ok=True)
                folder.rmdir()
        (root / f"{key}.lock").unlink()
    finally:
        unlock(lock)


def locked(path: Path, how: int) -> int | None:
    """Open and lock a file; None if another has it and `how` does not wait."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, how)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.lstat()):
                    return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # who had the lock before has removed the file


def unlock(lock: int) -> None:
    """Give a lock up, though a process that was forked meanwhile still has the file open."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def make_own(folder: Path) -> None:
    """Make a folder of this user's; raise a `LinkError` if it leads elsewhere or is shared."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise LinkError(
            f"{folder} is a link, or others may write to it: dagsel keeps no shards there; remove "
            "it, or give another folder with cache_dir="
        )


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read it, unless it is a link."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb", buffering=0) as file:
        yield file


def check_room(folder: Path, n_bytes: int) -> None:
    """Raise an OSError if a disk has less room than that."""
    about = os.statvfs(folder)
    free = about.f_bavail * about.f_frsize
    if free < n_bytes:
        text = f"{free:,} bytes are free, and the shard takes {n_bytes:,}"
        raise OSError(errno.ENOSPC, text)


def folder_here(name: str, value: Any) -> str:
    """Return the absolute path of a folder on each machine: working directories differ.

    Examples
    --------
    >>> folder_here("cache_dir", "s3://bucket")
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: cache_dir must be a folder on each worker's machine, got 's3://...
    """
    path: Any = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path.strip() or "://" in path:
        raise SearchError(
            f"{name} must be a folder on each worker's machine, got {shown(value)}; write "
            f'{name}="/scratch", or leave it out'
        )
    return str(Path(path).expanduser().absolute())
