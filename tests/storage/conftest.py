"""Places to store things: a folder, memory, a real S3 server, and a file system that fails."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from tests.storage.os_calls import os_calls


@dataclass(frozen=True)
class Place:
    """Where a test may write: a URL that is free, and the options that it needs."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def fs(self) -> Any:
        return fsspec.core.url_to_fs(self.url, **self.options)[0]

    @property
    def root(self) -> str:
        return str(fsspec.core.url_to_fs(self.url, **self.options)[1])

    def files(self) -> list[str]:
        """Every object there, relative to the root."""
        self.fs.invalidate_cache()
        return sorted(name[len(self.root) :].lstrip("/") for name in self.fs.find(self.root))


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A free URL on each kind of store in turn."""
    name = uuid.uuid4().hex
    match request.param:
        case "file":
            return Place(f"file://{tmp_path}/{name}.zarr")
        case "memory":
            return Place(f"memory://{name}.zarr")
        case _:
            options = request.getfixturevalue("s3_options")
            return Place(f"s3://bucket/{name}.zarr", options)


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Three small arrays; ``id`` tells which sample is which."""
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(103, 4, 3)).astype("float32"),
        "id": np.arange(103),
        "flag": rng.random(103) < 0.5,
    }


class Crash(BaseException):
    """The process is gone: nothing that it does afterwards has an effect."""


class Faults:
    """Lets a number of operations pass; then one fails, or all do."""

    Crash = Crash

    def __init__(self) -> None:
        self.n_left: int | None = None
        self.is_crash = False
        self.n_seen = 0

    def after(self, n: int, *, crash: bool) -> None:
        self.n_left, self.is_crash, self.n_seen = n, crash, 0

    def off(self) -> None:
        self.n_left = None

    def operation(self) -> None:
        self.n_seen += 1
        if self.n_left is None:
            return
        self.n_left -= 1
        if self.is_crash and self.n_left < 0:
            raise Crash
        if self.n_left == -1:
            raise OSError("no space left on device")


FAULTS = Faults()


class FaultyFile(MemoryFile):
    def write(self, data: Any) -> int:
        FAULTS.operation()
        return super().write(data)


class FaultyFileSystem(MemoryFileSystem):
    """A store in memory whose every call is an operation that may fail."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "wb" or "data" in kwargs:  # as `pipe_file` calls it
            return super().open(path, mode, **kwargs)
        FAULTS.operation()
        file = FaultyFile(self, self._strip_protocol(path))
        self.store[self._strip_protocol(path)] = file
        return file

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        FAULTS.operation()
        super().pipe_file(path, value, mode, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        FAULTS.operation()
        return bytes(super().cat_file(path, *args, **kwargs))

    def rm(self, path: str, *args: Any, **kwargs: Any) -> None:
        FAULTS.operation()
        super().rm(path, *args, **kwargs)

    def rm_file(self, path: str) -> None:
        FAULTS.operation()
        super()._rm(path)


@pytest.fixture
def faults() -> Iterator[Faults]:
    """What makes ``faulty://`` URLs fail."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FAULTS.off()
    yield FAULTS
    FAULTS.off()


@pytest.fixture
def crash_after() -> Callable[[int], Any]:
    """Give a context in which the process crashes after n local file operations."""

    @contextlib.contextmanager
    def crashing(n: int) -> Iterator[Faults]:
        faults = Faults()
        faults.after(n, crash=True)

        def counted(_: str, function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                faults.operation()
                return function(*args, **kwargs)

            return call

        names = ("open", "write", "close", "fsync", "replace", "unlink", "mkdir", "rmdir")
        with os_calls(names, counted), contextlib.suppress(Crash):
            yield faults

    return crashing
