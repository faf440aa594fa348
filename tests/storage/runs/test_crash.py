"""A run that stops at any operation, writes cut in half too, loses only what was under way.

All of a run's writing goes through `os` (a local folder) or the file system of fsspec, so both are
made to stop after the n-th operation, for every n, and what is found afterwards is held against
what had been reported as done.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem

from dagsel.errors import CheckpointError
from dagsel.storage import CheckpointStore, RunDir
from tests.storage.os_calls import os_calls

CALLS = (
    "open", "write", "close", "fsync", "replace", "link", "unlink", "mkdir", "rmdir", "truncate",
    "ftruncate",
)  # fmt: skip
State = tuple[int, int, int]


class Crash(BaseException):
    """The process is gone: nothing that it does afterwards has an effect."""


class Fuse:
    """Lets n operations pass. The next one does not happen, or half, and none after it does."""

    def __init__(self) -> None:
        self.n_left, self.is_torn = 10**9, False

    def burns(self) -> bool:
        """Count an operation; tell whether half of it is to happen."""
        self.n_left -= 1
        if self.n_left == -1 and self.is_torn:
            return True
        if self.n_left < 0:
            raise Crash
        return False


FUSE = Fuse()


class CrashFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        if FUSE.burns():
            self._file.write(bytes(data)[: len(data) // 2])
            self._file.flush()
            raise Crash
        return int(self._file.write(data))

    def __enter__(self) -> CrashFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        FUSE.burns()


class CrashFileSystem(AbstractFileSystem):
    """A folder of this machine as a store of no special kind: writes show as they are made."""

    protocol = "crash"
    cachable = False

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if FUSE.burns():
            raise Crash
        file = Path(path).open(mode)  # noqa: SIM115  # the caller closes it
        return file if mode == "rb" else CrashFile(file)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return self._open(self._strip_protocol(path), mode, **kwargs)

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        with self.open(path) as file:
            return bytes(file.read())

    def rm_file(self, path: str) -> None:
        if FUSE.burns():
            raise Crash
        Path(path).unlink()

    def rm(self, path: str, *_: Any, **__: Any) -> None:
        if not Path(path).exists():
            raise FileNotFoundError(path)
        if FUSE.burns():  # half of a folder
            names = sorted(Path(path).rglob("*"))
            for name in names[: len(names) // 2]:
                name.unlink()
            raise Crash
        shutil.rmtree(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not Path(path).is_dir():
            if FUSE.burns():
                raise Crash
            Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        found = sorted(Path(path).iterdir())
        if not detail:
            return [str(name) for name in found]
        return [self.info(str(name)) for name in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        size = Path(path).stat().st_size
        kind = "directory" if Path(path).is_dir() else "file"
        return {"name": path, "size": size, "type": kind}


@contextlib.contextmanager
def crashing_os() -> Iterator[None]:
    """Make the file operations of `os` go through the fuse."""

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if FUSE.burns():
                if name == "write":
                    function(args[0], bytes(args[1])[: len(args[1]) // 2])
                raise Crash
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        # What a process that dies leaves behind does not depend on it.
        patch.setattr(os, "fsync", lambda fd: None)
        with os_calls(CALLS, counted):
            yield


@dataclass
class Done:
    """What has been reported as done, and what was under way when the crash came."""

    claimed: bool = False
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    saved: dict[State, bytes] = field(default_factory=dict)
    under_way: set[State] = field(default_factory=set)
    checked: dict[int, bytes] = field(default_factory=dict)

    def save(self, run: RunDir, key: State, blob: bytes, *, half: bool = False) -> None:
        self.under_way = {key}
        if half or key in self.saved:
            run.states.save(*key, blob, {"n": len(blob)}, partial=half)
        else:
            run.states.save_first(*key, blob, {"n": len(blob)})
        if not half:
            self.saved[key] = blob
        self.under_way = set()

    def remove(self, keys: set[State], act: Callable[[], Any]) -> None:
        self.under_way = keys & self.saved.keys()
        act()
        for key in keys:
            self.saved.pop(key, None)
        self.under_way = set()

    def append(self, run: RunDir, *records: dict[str, Any]) -> None:
        run.journal.append(records)
        self.groups.append(list(records))


def drive(url: str, done: Done) -> None:
    """Write as a run does: two trials, four units, old states deleted, an end."""
    run = RunDir(url)
    run.claim("3f9a", {"study": "digits"})
    done.claimed = True
    done.append(run, {"kind": "asked", "trial": 0}, {"kind": "asked", "trial": 1})
    for position in range(4):
        for trial in (0, 1):
            if position == 2:
                done.save(run, (trial, 1, position), b"half", half=True)
                run.states.keep_check(trial, 1, 1, position, partial=True)
                done.checked[trial] = b"half"
            done.save(run, (trial, 1, position), b"%d of %d" % (position, trial))
        done.append(run, *({"kind": "done", "trial": t, "position": position} for t in (0, 1)))
        if position >= 2:
            old = (0, 1, position - 2)
            done.remove({old}, partial(run.states.delete, *old))
    done.save(run, (1, 1, 3), b"another 3 of 1")
    for position in range(2):
        old = (1, 1, position)
        done.remove({old}, partial(run.states.delete, *old))
    done.append(run, {"kind": "best", "trial": 1})
    done.checked.pop(0)
    done.remove({key for key in done.saved if key[0] == 0}, lambda: run.states.drop(0))
    run.write_best({"trial": 1})


def check(url: str, done: Done, *, is_atomic: bool) -> None:
    """Open what is there as another process would, and go on.

    Where a rename is atomic nothing that is listed may fail to load, elsewhere what was under way.
    """
    run = RunDir(url)
    if done.claimed:
        assert run.about() == {"run": "3f9a", "study": "digits"}
    expected = [record for group in done.groups for record in group]
    found = run.journal.read()
    # The group under way may have got through.
    assert found[: len(expected)] == expected
    assert len(found) <= len(expected) + 2
    assert len(found) != len(expected) + 1 or found[-1]["kind"] == "best", "half a group"
    for (trial, epoch, position), blob in done.saved.items():
        if (trial, epoch, position) not in done.under_way:
            assert run.states.load(trial, epoch, position)[0] == blob
    for trial, blob in done.checked.items():
        assert run.states.load_check(trial, 1)[0] == blob
    if is_atomic:
        for trial in run.states.trials():
            for place in run.states.list(trial):
                run.states.load(trial, *place)
    for trial in {key[0] for key in done.saved}:
        places = [key[1:] for key in done.saved if key[0] == trial and key not in done.under_way]
        latest = run.states.load_latest(trial)
        assert not places or (latest is not None and latest[0] >= max(places)), "older than saved"
    run.journal.append([{"kind": "resumed"}])
    assert RunDir(url).journal.read() == [*found, {"kind": "resumed"}]
    for trial in (0, 1):
        run.states.save(trial, 2, 0, b"next", {})
        latest = run.states.load_latest(trial)
        assert latest is not None
        assert latest[:2] == ((2, 0), b"next")


@pytest.fixture(params=["a local folder", "another store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """Give a URL and what to drive it in."""
    if request.param == "a local folder":
        yield f"{tmp_path}/run", crashing_os
        return
    fsspec.register_implementation("crash", CrashFileSystem, clobber=True)
    yield f"crash://{tmp_path}/run", contextlib.nullcontext


@pytest.mark.parametrize("torn", [False, True])
def test_a_run_that_stops_anywhere_goes_on(
    store: tuple[str, Any], tmp_path: Path, torn: bool
) -> None:
    url, scene = store
    for n in range(10**6):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        done = Done()
        FUSE.n_left, FUSE.is_torn = n, torn
        try:
            with scene():
                drive(url, done)
            break
        except Crash:
            pass
        finally:
            FUSE.n_left = 10**9
        try:
            check(url, done, is_atomic=scene is crashing_os)
        except (AssertionError, CheckpointError) as error:
            raise AssertionError(f"stopped at operation {n}, {done}") from error
    assert n > 100, "the crash came too late or never"
    assert len(RunDir(url).journal.read()) == 11


def test_what_was_appended_claimed_or_saved_with_sync_survives_a_power_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[Path, bytes] = {}
    entries: dict[Path, set[str]] = {}
    sync = os.fsync

    def noted(fd: int) -> None:
        sync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_dir():
            entries[path] = {name.name for name in path.iterdir()}
        else:
            # Written aside: what counts is what it is when it has its name.
            files[path] = path.read_bytes()

    def is_safe(path: Path) -> bool:
        above = [path, *path.parents]
        return all(
            name.name in entries.get(name.parent, set()) for name in above[: above.index(tmp_path)]
        )

    monkeypatch.setattr(os, "fsync", noted)
    run = RunDir(tmp_path / "new" / "run")
    run.claim("3f9a", {})
    about = tmp_path / "new/run/run.json"
    assert is_safe(about)
    assert about.read_bytes() in files.values()
    journal = tmp_path / "new/run/journal.jsonl"
    for number in range(3):
        run.journal.append([{"n": number}] * 4)
        assert is_safe(journal)
        assert files[journal] == journal.read_bytes()
    states = tmp_path / "new/run/states"
    CheckpointStore(states, sync=True).save(1, 1, 0, b"a state", {})
    kept = [path for path in states.rglob("*") if path.is_file()]
    assert len(kept) == 2
    for path in kept:
        assert is_safe(path)
        assert path.read_bytes() in files.values()
