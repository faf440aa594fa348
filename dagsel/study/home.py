"""Where a study lives, so that another process can open it."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.engine import make_url

from dagsel.flow import Direction

_JOURNAL = "journal://"


def home_of(study: optuna.Study) -> str | None:
    """Give the URL of a study's storage; None if it has none, or if it holds a password."""
    storage = study._storage
    if isinstance(storage, JournalStorage):
        path = getattr(storage._backend, "_file_path", None)
        return None if path is None else f"{_JOURNAL}{Path(path).absolute()}"
    storage = getattr(storage, "_backend", storage)  # under Optuna's cache
    if isinstance(storage, RDBStorage):
        url = make_url(storage.url)
        if url.password is not None:
            return None
        if url.get_backend_name() == "sqlite":
            if url.database in (None, "", ":memory:"):
                return None
            url = url.set(database=str(Path(str(url.database)).absolute()))
        return url.render_as_string()
    return None


def open_study(name: str, direction: Direction, home: str | None) -> optuna.Study:
    """Open a study where it lives; one that was in memory begins anew."""
    if home is None:
        return optuna.create_study(study_name=name, direction=direction)
    if home.startswith(_JOURNAL):
        backend = JournalFileBackend(home.removeprefix(_JOURNAL))
        return optuna.load_study(study_name=name, storage=JournalStorage(backend))
    return optuna.load_study(study_name=name, storage=home)
