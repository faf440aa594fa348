"""A CSV file with a row for each epoch."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TextIO

from dagsel.errors import SearchError
from dagsel.observers.base import Observer, metrics_beside
from dagsel.observers.events import EpochEnded, SearchBegan
from dagsel.storage import disk

_FIRST = ("run", "trial", "epoch", "seconds", "train_loss")


class CSV(Observer):
    """Writes a row for each epoch of each trial, with its metrics and parameters.

    Columns are ``run``, ``trial``, ``epoch`` (from 1), ``seconds`` since the run began,
    ``train_loss``, the validation metrics, and the parameters that the epoch was trained with, as
    ``param_lr`` for ``lr``. A metric called as another column is ``validation_`` and its name.
    Where a trial brings a parameter or a metric that none had before, the file is written anew with
    one more column. If the file exists, rows are appended; rows of other runs stay. Several
    searches may write to one file at once.

    Parameters
    ----------
    path
        The file, on this machine.

    Raises
    ------
    SearchError
        If it cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "epochs.csv"
    >>> observer = CSV(path)
    >>> observer.search_began(SearchBegan("3f9a", "digits", "accuracy", "maximize", "runs/1"))
    >>> about = {"train_loss": 2.25, "seconds": 1.5, "at": 1.7e9, "params": {"lr": 0.1}}
    >>> observer.epoch_ended(EpochEnded(0, 1, 0.5, {"accuracy": 0.5}, **about))
    >>> print(path.read_text())
    run,trial,epoch,seconds,train_loss,accuracy,param_lr
    3f9a,0,1,1.5,2.25,0.5,0.1
    <BLANKLINE>
    """

    _is_of_one_search = True

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(fspath(path))
        self._run = ""
        self._there: set[tuple[str, str]] = set()  # trial and epoch of the rows of this run

    def check(self) -> None:
        """Raise an error if the folder of the file cannot be made."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SearchError(f"CSV cannot write {self._path}: {error}") from None

    def search_began(self, search: SearchBegan) -> None:
        """Read what is there; a last row that is cut off is left out."""
        self._run, self._there = search.run, set()
        if not self._path.exists():
            return
        with _alone(self._path) as file:
            columns, rows = self._read(file)
            self._there = {(r["trial"], r["epoch"]) for r in rows if r["run"] == self._run}
            if columns:
                self._write(columns, rows)

    def epoch_ended(self, epoch: EpochEnded) -> None:
        """Append a row."""
        place = (str(epoch.trial), str(epoch.epoch))
        if place in self._there:
            return
        first = zip(_FIRST, (self._run, *place, epoch.seconds, epoch.train_loss), strict=True)
        params = {f"param_{name}": value for name, value in epoch.params.items()}
        row = {**dict(first), **metrics_beside(epoch, {*_FIRST, *params}), **params}
        with _alone(self._path) as file:
            columns = self._columns(file) if _is_whole(file) else []
            if row.keys() <= {*columns}:
                file.write(_line(columns, row))
                file.flush()
            else:
                columns, rows = self._read(file)
                names = dict.fromkeys([*columns, *row])
                params_last = sorted(names, key=lambda name: name.startswith("param_"))
                self._write(params_last, [*rows, row])
        self._there.add(place)

    def _columns(self, file: TextIO) -> list[str]:
        """Return the columns of the file; none if it is empty."""
        file.seek(0)
        columns = next(csv.reader(file), [])
        if columns and not {*_FIRST} <= {*columns}:
            raise SearchError(f"{self._path} is another file: it has no column run, trial or epoch")
        return columns

    def _read(self, file: TextIO) -> tuple[list[str], list[dict[str, str]]]:
        """Return the columns and the whole rows of the file."""
        file.seek(0)
        text = file.read()
        whole = io.StringIO(text[: text.rfind("\n") + 1], newline="")
        columns = self._columns(whole)
        rows = csv.DictReader(whole, columns)
        return columns, [row for row in rows if None not in row.values()]

    def _write(self, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [_line(columns, row) for row in (dict(zip(columns, columns, strict=True)), *rows)]
        disk.replace(self._path, "".join(lines).encode(), sync=False)


def _line(columns: Sequence[str], row: Mapping[str, Any]) -> str:
    line = io.StringIO(newline="")
    csv.DictWriter(line, columns, lineterminator="\n", extrasaction="ignore").writerow(dict(row))
    return line.getvalue()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[TextIO]:
    """Open a file to read it and to append; others that do so wait, also if it is replaced."""
    while True:
        with path.open("a+", newline="", encoding="utf-8") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                if _is_at(path, file):
                    yield file
                    return
            finally:  # a process that was forked meanwhile has the file open, too
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)


def _is_at(path: Path, file: TextIO) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_whole(file: TextIO) -> bool:
    """Whether the last line of a file has its end; one that was killed may have cut it off."""
    size = os.fstat(file.fileno()).st_size
    return size == 0 or os.pread(file.fileno(), 1, size - 1) == b"\n"
