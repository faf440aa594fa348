"""Optuna's storages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(verbosity)


@pytest.fixture(params=["memory", "sqlite", "journal"])
def open_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Open a storage; again and again the same one, where it is on disk, and else an empty one."""
    opened: list[RDBStorage] = []

    def open_it() -> Any:
        match request.param:
            case "sqlite":
                opened.append(RDBStorage(f"sqlite:///{tmp_path / 'study.db'}"))
                return opened[-1]
            case "journal":
                return JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
        return InMemoryStorage()

    yield open_it
    for rdb in opened:
        rdb.remove_session()
        rdb.engine.dispose()
