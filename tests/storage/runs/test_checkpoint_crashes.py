"""A crash in the middle of whatever is done to stored states leaves a store that can be read."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagsel.errors import CheckpointNotFoundError
from dagsel.storage import CheckpointStore

Action = Callable[[CheckpointStore], object]


def save_with_fsync(store: CheckpointStore) -> None:
    store.sync = True
    store.save(1, 0, 2, b"next", {"n": 2})


ACTIONS: dict[str, Action] = {
    "save": lambda store: store.save(1, 0, 2, b"next", {"n": 2}),
    "save with fsync": save_with_fsync,
    "replace": lambda store: store.save(1, 0, 1, b"other", {"n": 3}),
    "partial": lambda store: store.save(1, 0, 2, b"more", {"n": 4}, partial=True),
    "delete": lambda store: store.delete(1, 0, 1),
    "drop": lambda store: store.drop(1),
    "save first": lambda store: store.save_first(1, 0, 2, b"next", {"n": 2}),
    "save first, but second": lambda store: store.save_first(1, 0, 1, b"other", {"n": 3}),
    "first save of a trial": lambda store: store.save(2, 0, 0, b"first", {"n": 5}),
    "keep a check": lambda store: store.keep_check(1, 2, 0, 1, partial=False),
    "drop the checks": lambda store: store.drop_checks(1),
}
KNOWN = {
    (b"zero", 0), (b"one", 1), (b"half", 9), (b"next", 2), (b"other", 3), (b"more", 4),
    (b"first", 5),
}  # fmt: skip


def prepared(path: Path) -> CheckpointStore:
    shutil.rmtree(path, ignore_errors=True)
    store = CheckpointStore(path)
    store.save(1, 0, 0, b"zero", {"n": 0})
    store.save(1, 0, 1, b"one", {"n": 1})
    store.save(1, 0, 2, b"half", {"n": 9}, partial=True)
    store.keep_check(1, 1, 0, 0, partial=False)
    return store


def content(store: CheckpointStore) -> dict[tuple[int, ...], tuple[bytes, int]]:
    """Load all that is listed, and the checks: what has a record may not fail to load."""
    found: dict[tuple[int, ...], tuple[bytes, int]] = {}
    for number in (1, 2):
        with contextlib.suppress(CheckpointNotFoundError):
            blob, meta = store.load_check(1, number)
            found[number,] = (blob, meta["n"])
    for trial in store.trials():
        for partial in (False, True):
            for place in store.list(trial, partial=partial):
                blob, meta = store.load(trial, *place, partial=partial)
                found[trial, *place, int(partial)] = (blob, meta["n"])
    return found


@pytest.mark.parametrize("name", ACTIONS)
def test_a_crash_between_any_two_system_calls_leaves_a_readable_store(
    name: str, tmp_path: Path, crash_after: Callable[[int], Any]
) -> None:
    action = ACTIONS[name]
    store = prepared(tmp_path / "store")
    before = content(store)
    action(store)
    after = content(store)
    n, is_done = 0, False
    while not is_done:
        store = prepared(tmp_path / "store")
        with crash_after(n):
            action(store)
            is_done = True
        found = content(store)
        assert set(found.values()) <= KNOWN
        for key in before.keys() & after.keys():
            assert found[key] in (before[key], after[key]), f"lost after {n} operations"
        with contextlib.suppress(CheckpointNotFoundError):
            action(store)
        assert content(store) == after, f"cannot be done again after {n} operations"
        n += 1
    assert n > 2, "the crash never came"
