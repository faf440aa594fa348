"""Where a study is stored: what is kept of its URL, how it is opened again, and what if it is lost.

A URL that stands in a ``run.json`` may have been planted there. It opens a file only if that is
there and holds the study, and a server only if its host is known.
"""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from dagsel.errors import DagselError, StudyStorageError
from dagsel.flow import Direction
from dagsel.storage.urls import KNOWN_HOSTS, hide, secrets_in, unknown_hosts

if TYPE_CHECKING:  # a search whose study is in memory does without its import
    from sqlalchemy.engine import URL

_JOURNAL = "journal://"
_NO_URL = "none://"  # before the class of a storage that no URL opens
_HIDDEN = "***"
#: SQLite gives up after five seconds.
_WAIT = "wait for who holds it longer, as by storage='sqlite:///study.db?timeout=60'"
#: Options in the query of a database's URL whose values are no secrets.
_HARMLESS = {"application_name", "cache", "charset", "check_same_thread", "client_encoding"}
_HARMLESS |= {"connect_timeout", "host", "immutable", "isolation_level", "mode", "nolock", "port"}
_HARMLESS |= {"sslmode", "timeout", "unix_socket", "uri", "use_unicode"}


def _read_url(url: Any) -> URL:
    from sqlalchemy.engine import make_url

    return make_url(url)


def home_of(study: optuna.Study) -> str | None:
    """Return the URL of a study's storage without secrets; None if it is in memory.

    ``***`` stands for what is left out, and ``none://`` before the class of a storage without URL.
    """
    storage = study._storage
    path = _journal_file(storage)
    if path is not None:
        return f"{_JOURNAL}{path}"
    rdb = getattr(storage, "_backend", storage)  # under Optuna's cache
    if isinstance(rdb, RDBStorage):
        return _kept(_read_url(rdb.url))
    return None if isinstance(storage, InMemoryStorage) else f"{_NO_URL}{type(storage).__name__}"


def opens_again(home: str | None) -> bool:
    """Whether a run's folder is enough to open a study's home, which is what `home_of` returned.

    Examples
    --------
    >>> opens_again(None), opens_again("sqlite:////data/s.db"), opens_again("mysql://host/s")
    (True, True, False)
    """
    return home is None or (home.startswith((_JOURNAL, "sqlite:///")) and _HIDDEN not in home)


def _journal_file(storage: Any) -> Path | None:
    path = getattr(storage._backend, "_file_path", None) if _is_journal(storage) else None
    return None if path is None else Path(path).absolute()


def _is_journal(storage: Any) -> bool:
    return isinstance(storage, JournalStorage)


def _kept(url: URL) -> str | None:
    """Return what is written of a database's URL; None if it is in memory."""
    if url.get_backend_name() == "sqlite":
        path = _sqlite_file(url)
        if path is None:
            return None
        place = f"file:{quote(str(path))}" if _is_uri(url) else str(path)
        place, mark, fragment = place.partition("#")
        place = f"{place}#{_HIDDEN}" if "=" in fragment else f"{place}{mark}{fragment}"
    else:
        place, mark, _ = (url.database or "").partition("#")
        place = f"{place}#{_HIDDEN}" if mark else place
    query = {name: _shown(name, value) for name, value in url.query.items()}
    kept = url.set(database=place, query=query).render_as_string(hide_password=True)
    return kept.replace(quote(_HIDDEN, safe=""), _HIDDEN).replace("///file%3A", "///file:")


def _shown(name: str, value: Any) -> Any:
    if name not in _HARMLESS or "#" in str(value):
        return _HIDDEN
    return value


def _is_uri(url: URL) -> bool:
    return str(url.query.get("uri", "")).lower() in ("true", "1", "yes", "on", "y", "t")


def _sqlite_file(url: URL) -> Path | None:
    """Return the file of an SQLite database; None if it is in memory."""
    name = url.database or ""
    if _is_uri(url) and url.query.get("mode") == "memory":
        return None
    if _is_uri(url) and name.startswith("file:"):
        # As SQLite reads it: what is looked at here must be what it opens.
        name = name.removeprefix("file:").partition("#")[0]
        if name.startswith("//"):
            name = f"/{name[2:].partition('/')[2]}"
        name = unquote(name)
    return None if name in ("", ":memory:") else Path(name).absolute()


def open_study(
    name: str,
    direction: Direction | Sequence[Direction],
    home: str | None,
    run_dir: str | None = None,
) -> optuna.Study:
    """Load a study from its storage; create it in memory if it has none.

    Parameters
    ----------
    name, direction
        Those of the study, which may have several directions.
    home
        What `home_of` returned, or a URL of the user's.
    run_dir
        Whose ``run.json`` names the home; None if the user does. Then any host may be reached.

    Raises
    ------
    StudyStorageError
        If the storage is gone, damaged, without the study, or on an unknown host.
    """
    if home is None:
        directions = [direction] if isinstance(direction, str) else list(direction)
        with _silent_optuna():  # the user has made no study
            return optuna.create_study(study_name=name, directions=directions)
    what = f"study {name!r} {_at(home)}"
    if home.startswith(_NO_URL):
        raise StudyStorageError(f"study {name!r} is in a {home[len(_NO_URL) :]}; {_give(name)}")
    try:
        if home.startswith(_JOURNAL):
            path = Path(home.removeprefix(_JOURNAL))
            if not path.is_file():
                raise StudyStorageError(f"{what}: there is no such file; {_give(name)}")
            storage: Any = JournalStorage(JournalFileBackend(str(path)))
        else:
            storage = home
            _check_database(_read_url(home), name, what, run_dir)
        return optuna.load_study(study_name=name, storage=storage)
    except DagselError:
        raise
    except Exception as error:  # noqa: BLE001 - what a storage raises is another library's
        text = hide(_reason(error), _secrets(home))
        raise StudyStorageError(f"{what} cannot be opened: {text}; {_give(name)}") from None


@contextmanager
def _silent_optuna() -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)


def _check_database(url: URL, name: str, what: str, run_dir: str | None) -> None:
    """Raise an error if a database must not be opened, or is a file without the study."""
    if run_dir is not None and _HIDDEN in str(_kept(url)):
        raise StudyStorageError(f"{what}: its credentials are not kept in a run_dir; {_give(name)}")
    if url.get_backend_name() == "sqlite" and (run_dir is None or _is_plain(url)):
        path = _sqlite_file(url)
        if path is None or not path.is_file():  # SQLite would create it
            raise StudyStorageError(f"{what}: there is no such file; {_give(name)}")
        _look_into(path, name, what)
    elif run_dir is not None:
        unknown = unknown_hosts(_hosts(url), run_dir)
        if unknown:
            raise StudyStorageError(
                f"{what}: {run_dir}/run.json names that place, and nobody else does; if it is "
                f"yours, {_give(name)}, or set {KNOWN_HOSTS}={' '.join(unknown)!r}"
            )


def _look_into(path: Path, name: str, what: str) -> None:
    """Raise an error unless an SQLite file holds the study.

    It changes nothing; only what a killed process has left half written is taken back.
    """
    try:
        found = _is_in(path, name, "ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        found = _is_in(path, name, "rw")
    if not found:
        raise StudyStorageError(f"{what}: no study of that name is there; {_give(name)}")


def _is_in(path: Path, name: str, mode: str) -> bool:
    query = "SELECT 1 FROM studies WHERE study_name = ?"
    with closing(sqlite3.connect(f"{path.as_uri()}?mode={mode}", uri=True)) as database:
        return database.execute(query, (name,)).fetchone() is not None


def _is_plain(url: URL) -> bool:
    return url.drivername in ("sqlite", "sqlite+pysqlite")


def _hosts(url: URL) -> list[str]:
    """Return the hosts that a database's URL reaches."""
    listed = url.query.get("host", ())
    hosts = [url.host, *([listed] if isinstance(listed, str) else listed)]
    names = [part for host in hosts if host for part in host.split(",")] or ["localhost"]
    return [f"{url.get_backend_name()}://{name.lower()}" for name in names]


def _at(home: str) -> str:
    """Say where a study is, without secrets."""
    if home.startswith(_JOURNAL):
        return f"at {home}"
    from sqlalchemy.exc import ArgumentError

    try:
        return f"at {_kept(_read_url(home))}"
    except (ArgumentError, ValueError):
        return "at a place that is no URL"


def _secrets(home: str) -> set[str]:
    return set() if home.startswith(_JOURNAL) else secrets_in(home, harmless=_HARMLESS)


def _give(name: str) -> str:
    return f"give study=optuna.load_study(study_name={name!r}, storage=...), or its URL as study="


def _reason(error: BaseException) -> str:
    """Say in a line what a storage has against it."""
    if isinstance(error, KeyError):  # Optuna's word for a study or a trial that is not there
        return "it does not hold the study, or lacks a trial of it"
    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    error = getattr(error, "orig", None) or error  # under SQLAlchemy's SQL and parameters
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def guarded(study: optuna.Study) -> optuna.Study:
    """Return a study over the same storage whose errors are dagsel's; in memory the study itself.

    Raises a `StudyStorageError` from each call of the storage that fails.
    """
    if isinstance(study._storage, InMemoryStorage):
        return study
    twin = copy.copy(study)
    twin._storage = _Guard(study)  # type: ignore[assignment]
    return twin


def has_trial(study: optuna.Study, number: int) -> bool:
    """Whether a study has a trial of this number; storages answer it without reading trials."""
    storage: Any = study._storage
    ask = storage.has_trial if isinstance(storage, _Guard) else partial(_has_trial, storage)
    return bool(ask(study._study_id, number))


def _has_trial(storage: Any, study_id: int, number: int) -> bool:
    try:
        storage.get_trial_id_from_study_id_trial_number(study_id, number)
    except KeyError:
        return False
    return True


class _Guard:
    """A storage whose failures name the study and its place."""

    def __init__(self, study: optuna.Study) -> None:
        self._storage = study._storage
        rdb = getattr(self._storage, "_backend", self._storage)
        self._secrets: set[str] = set()
        self._file = _journal_file(self._storage)
        if isinstance(rdb, RDBStorage):
            url = _read_url(rdb.url)
            self._secrets = secrets_in(str(rdb.url), harmless=_HARMLESS)
            self._file = _sqlite_file(url) if url.get_backend_name() == "sqlite" else None
        home = home_of(study) or ""
        place = f"in a {home[len(_NO_URL) :]}" if home.startswith(_NO_URL) else _at(home)
        self._what = f"study {study.study_name!r} {place}"

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        return self._watched(found) if callable(found) else found

    def has_trial(self, study_id: int, number: int) -> bool:
        """Whether there is a trial of this number."""
        return bool(self._watched(_has_trial)(self._storage, study_id, number))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            """Call it; say which study is lost or damaged if that fails."""
            try:
                # A lost file is written to as if nothing were wrong, or created anew.
                if self._file is not None and not self._file.exists():
                    raise FileNotFoundError("the file is gone")
                return call(*args, **options)
            except (DagselError, UpdateFinishedTrialError, TypeError):
                raise
            except Exception as error:
                if isinstance(error, ValueError) and not isinstance(
                    error, json.JSONDecodeError | UnicodeError
                ):
                    raise  # of what it was given
                text = hide(_reason(error), self._secrets)
                cure = _WAIT if "database is locked" in text else "bring its storage back"
                raise StudyStorageError(
                    f"{self._what} cannot be read or written: {text}; {cure}, or give another "
                    "study with study="
                ) from None

        return watched
