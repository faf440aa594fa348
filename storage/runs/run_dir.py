"""The folder of a run: what identifies it, what happened in it, the states of its trials.

::

    lock.json      who drives it; only while someone does
    control.json   the token for commands from other processes (a Control); while someone listens
    commands/      those commands, and their answers
    run.json       which run, and everything that a resume needs; written first, and never changed
                   once something has begun
    journal.jsonl  a Journal (`journal/` on object stores)
    states/        a CheckpointStore
    best.json      the best trial and where its state is; written last
    refit/         a folder like this one for each configuration that was trained once more

Opening it writes nothing. No file is a pickle: reading a stranger's folder runs no code.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c

from dagsel.checks import short_traceback
from dagsel.errors import JournalCorruptError, RunDirError
from dagsel.storage.files import Folder, Url
from dagsel.storage.runs.checkpoints import CheckpointStore
from dagsel.storage.runs.control import Control
from dagsel.storage.runs.journal import Journal
from dagsel.storage.runs.lock import (
    BEAT_S,
    STALE_AFTER_S,
    Holder,
    RunLock,
    acquire,
    driver_of,
    out_of_reach,
)

FORMAT = "dagsel.run"
VERSION = 1
BEST = "best.json"
#: An identifier becomes part of the names of what observers write and remove.
_RUN = re.compile(r"[\w-]{1,100}")
_FRESH = re.compile(r".*-(\d{8}-\d{6})-\w+")  # as `RunDir.fresh` names it


class RunDir:
    """A run's folder at any fsspec URL; it may be given wherever a ``run_dir`` is asked for.

    Parameters
    ----------
    url
        Where; driver and workers must reach it.
    storage_options
        Passed to the file system.

    Attributes
    ----------
    states
        The `CheckpointStore` with the states of the run's trials.
    journal
        The run's `Journal`, its append-only record.
    control
        Its `Control`, through which other processes steer it.

    Examples
    --------
    >>> folder = RunDir("memory://example-run")
    >>> folder.claim("3f9a", {"study": "digits"})
    >>> folder.belongs_to("3f9a"), folder.about()
    (True, {'run': '3f9a', 'study': 'digits'})
    >>> folder.journal.append([{"is": "session"}])
    >>> folder.claim("77aa", {"study": "digits"})
    Traceback (most recent call last):
    ...
    dagsel.errors.RunDirError: memory://example-run holds run 3f9a already; go on with it ...
    >>> folder.has_begun(), folder.has_best()
    (True, False)
    """

    def __init__(self, url: Folder | Url, storage_options: Mapping[str, Any] | None = None) -> None:
        if not isinstance(url, Folder):
            url = Folder(url, storage_options, error=RunDirError)
        self._folder = url
        self.states = CheckpointStore(url.child("states"))
        self.journal = Journal(url)
        self.control = Control(url.impatient())

    @property
    def url(self) -> str:
        """Its URL, without credentials."""
        return self._folder.url

    def __fspath__(self) -> str:
        """Return the URL, so that ``dagsel.replay(run.run_dir)`` finds the run."""
        return self.url

    @short_traceback
    def claim(self, run: str, about: Mapping[str, Any]) -> None:
        """Make the folder that of a new run; the caller holds the lock.

        The folder of a run of which nothing has begun is used again.

        Parameters
        ----------
        run
            Identifier of the run.
        about
            JSON to store with it: everything that a resume needs.

        Raises
        ------
        RunDirError
            If a run that has begun has it already, or it cannot be written.
        """
        if taken := about.keys() & {"format", "version", "run"}:
            raise RunDirError(f"{sorted(taken)} in about are the folder's own; rename them")
        body = {"format": FORMAT, "version": VERSION, "run": run, **about}
        try:
            data = json.dumps(body, indent=1).encode()
        except (TypeError, ValueError) as error:
            raise RunDirError(f"about is no JSON: {error}") from None
        try:
            if self._folder.create("run.json", data, sync=True):
                return
            if self._is_free():
                self._folder.replace("run.json", data, sync=True)
                return
            found = self._folder.read("run.json")
        except OSError as error:
            raise out_of_reach(self._folder, "write", error) from None
        raise RunDirError(
            f"{self.url} holds run {_run_of(found or b'')} already; go on with it by "
            "dagsel.resume, or choose another run_dir"
        )

    def has_begun(self) -> bool:
        """Return whether the run has a journal, a state or a best trial."""
        try:
            has_entries = bool(self.journal.read())
        except JournalCorruptError:
            return True
        return has_entries or bool(self.states.trials()) or self.has_best()

    def has_best(self) -> bool:
        """Return whether the run has ended: its best trial is written."""
        return self._folder.read(BEST) is not None

    @classmethod
    def fresh(cls, study: str, run: str) -> RunDir:
        """Return a new folder for a run of a study, under ``dagsel-runs``; nothing is written."""
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in study)
        name = f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}-{run}"
        return cls(Path("dagsel-runs").absolute() / name)

    def digest(self) -> str:
        """Return the checksum of ``run.json``, which the journal holds; empty if it is missing."""
        data = self._read_about()
        return "" if data is None else f"{google_crc32c.value(data):08x}"

    def about(self) -> dict[str, Any]:
        """Read what the run was claimed with, and its identifier as ``"run"``.

        Raises
        ------
        RunDirError
            If it is no run of dagsel, is from a newer version, or cannot be read.
        """
        data = self._read_about()
        if data is None:
            newest = None
            with suppress(OSError):
                newest = next(self.within(), None)
            if newest is not None:
                raise RunDirError(
                    f"{self.url} is a folder of runs; take one of them, such as the newest: "
                    f"{newest.url}"
                )
            raise RunDirError(f"{self.url} holds no run: run.json is missing; check the path")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            raise RunDirError(
                f"{self.url}/run.json is no JSON: it is damaged, or not dagsel's; restore it "
                "from a copy"
            ) from None
        if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
            raise RunDirError(f"{self.url} is not the run_dir of a run of dagsel; check the path")
        version = body.pop("version", None)
        run = body.get("run")
        if type(version) is not int or not (isinstance(run, str) and _RUN.fullmatch(run)):
            raise RunDirError(f"{self.url}/run.json is damaged; restore it from a copy")
        if version > VERSION:
            wanted = f"dagsel {body['dagsel']} or newer" if body.get("dagsel") else "a newer one"
            raise RunDirError(
                f"{self.url} was written by a newer dagsel (run format {version}; this one reads "
                f"up to {VERSION}): install {wanted} to use it"
            )
        return body

    def within(self) -> Iterator[RunDir]:
        """Go over the runs in a folder of runs, those that `fresh` has named first, the newest."""
        folders = [name for name, kind in self._folder.kinds().items() if kind == "directory"]
        for name in sorted(folders, key=_began, reverse=True):
            child = self._folder.child(name)
            if child.read("run.json") is not None:
                yield RunDir(child)

    @short_traceback
    def lock(
        self, run: str, *, stale_after_s: float = STALE_AFTER_S, beat_s: float = BEAT_S
    ) -> RunLock:
        """Keep all other drivers out until the lock is released or this process ends.

        The lock of a dead process of this machine is taken over at once, that of another machine
        when its heartbeat is old. `dagsel.storage.runs.lock` says what each kind of store can
        promise.

        Parameters
        ----------
        run
            Identifier of the run, for those that are refused.
        stale_after_s
            How old a heartbeat from another machine may be.
        beat_s
            How often the lock is renewed.

        Returns
        -------
        lock
            A context manager with ``release()``, and ``check()``, which raises if the lock is
            lost.

        Raises
        ------
        RunDirLockedError
            If another driver has it; names that driver.
        RunDirError
            If the folder cannot be written.
        LinkError
            If the folder of the states is a symbolic link.

        Examples
        --------
        >>> folder = RunDir("memory://locked-run")
        >>> with folder.lock("3f9a"):
        ...     folder.lock("3f9a")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        dagsel.errors.RunDirLockedError: memory://locked-run is in use by the driver of run 3f9a...
        """
        self.states.check_links()
        return acquire(self._folder.impatient(), run, stale_after_s=stale_after_s, beat_s=beat_s)

    @property
    def driver(self) -> Holder | None:
        """Who drives the run now; None if nobody does."""
        return driver_of(self._folder)

    def belongs_to(self, run: str) -> bool:
        """Whether the folder is that of the run, as this process sees it."""
        found = self._folder.read("run.json")
        return found is not None and _run_of(found) == run

    @property
    def data(self) -> Folder:
        """Where the run has a data set of its own: arrays that were given in place of one."""
        return self._folder.child("data")

    def refit(self, name: str) -> RunDir:
        """Return the folder, below this one, of a run that trains a configuration once more."""
        return RunDir(self._folder.child("refit").child(name))

    def check_free(self) -> None:
        """Raise a `RunDirError` if a run that has begun has the folder already."""
        found = self._read_about()
        if found is not None and not self._is_free():
            raise RunDirError(
                f"{self.url} holds run {_run_of(found)} already; go on with it by dagsel.resume, "
                "or choose another run_dir"
            )

    def write_best(self, about: Mapping[str, Any]) -> None:
        """Write which trial is the best and where its state is."""
        self._folder.replace(BEST, json.dumps(dict(about), indent=1, default=str).encode())

    def _read_about(self) -> bytes | None:
        try:
            return self._folder.read("run.json")
        except OSError as error:
            raise out_of_reach(self._folder, "read", error) from None

    def _is_free(self) -> bool:
        return not self.has_begun() and self._is_ours()

    def _is_ours(self) -> bool:
        try:
            self.about()
        except RunDirError:
            return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return RunDir, (self._folder,)

    def __repr__(self) -> str:
        return f"RunDir({self.url!r})"


def _run_of(data: bytes) -> str:
    try:
        return str(json.loads(data)["run"])[:100]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown"


def _began(name: str) -> tuple[str, str]:
    """Return when a run began, by the name of its folder, and the name."""
    fresh = _FRESH.fullmatch(name)
    return fresh[1] if fresh else "", name
