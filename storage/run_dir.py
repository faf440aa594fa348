"""The folder of a run: what identifies it, and the states of its trials.

::

    run.json     which run, which study; written first, never changed
    states/      a CheckpointStore
    best.json    the best trial and where its state is; written last
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dagsel.errors import RunDirError
from dagsel.storage.checkpoints import CheckpointStore
from dagsel.storage.files import Folder, Url

FORMAT = "dagsel.run"
VERSION = 1


class RunDir:
    """A run's folder at any fsspec URL.

    Parameters
    ----------
    url
        Where; driver and workers must reach it.
    storage_options
        Passed to the file system.

    Examples
    --------
    >>> folder = RunDir("memory://example-run")
    >>> folder.claim("3f9a", {"study": "digits"})
    >>> folder.belongs_to("3f9a")
    True
    >>> folder.claim("77aa", {"study": "digits"})
    Traceback (most recent call last):
    ...
    dagsel.errors.RunDirError: memory://example-run holds run 3f9a already; choose another run_dir
    """

    def __init__(self, url: Url, storage_options: Mapping[str, Any] | None = None) -> None:
        self._folder = Folder(url, storage_options, error=RunDirError)
        self.states = CheckpointStore(f"{str(url).rstrip('/')}/states", storage_options)

    @property
    def url(self) -> str:
        """Its URL, without credentials."""
        return self._folder.url

    def claim(self, run: str, about: Mapping[str, Any]) -> None:
        """Make the folder that of a new run.

        Parameters
        ----------
        run
            Identifier of the run.
        about
            JSON to keep with it.

        Raises
        ------
        RunDirError
            If it is another run's already, or cannot be written.
        """
        try:
            found = self._folder.read("run.json")
            if found is not None:
                raise RunDirError(
                    f"{self.url} holds run {_run_of(found)} already; choose another run_dir"
                )
            body = {"format": FORMAT, "version": VERSION, "run": run, **about}
            self._folder.replace("run.json", json.dumps(body, indent=1).encode())
        except OSError as error:
            if isinstance(error, RunDirError):
                raise
            raise RunDirError(f"cannot write run_dir {self.url}: {error}") from error

    def belongs_to(self, run: str) -> bool:
        """Whether this process sees the folder as that of the run."""
        found = self._folder.read("run.json")
        return found is not None and _run_of(found) == run

    def write_best(self, about: Mapping[str, Any]) -> None:
        """Say which trial was the best and where its state is."""
        self._folder.replace("best.json", json.dumps(dict(about), indent=1, default=str).encode())

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._folder, self.states)

    def __repr__(self) -> str:
        return f"RunDir({self.url!r})"


def _restore(folder: Folder, states: CheckpointStore) -> RunDir:
    run_dir = RunDir.__new__(RunDir)
    run_dir._folder, run_dir.states = folder, states
    return run_dir


def _run_of(data: bytes) -> str:
    try:
        return str(json.loads(data)["run"])
    except (ValueError, KeyError, TypeError):
        return "unknown"
