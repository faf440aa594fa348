"""A CSV file with a row for each epoch."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from dagsel.errors import SearchError
from dagsel.observers.base import Observer
from dagsel.observers.events import EpochEnded, SearchBegan
from dagsel.storage import disk

_FIRST = ("run", "trial", "epoch", "seconds", "train_loss")


class CSV(Observer):
    """Writes a row for each epoch of each trial, with its metrics and parameters.

    Columns are ``run``, ``trial``, ``epoch`` (from 1), ``seconds`` since the run began,
    ``train_loss``, the validation metrics, and the parameters that the epoch was trained with, as
    ``param_lr`` for ``lr``. Where a trial brings a parameter or a metric that none had before, the
    file is written anew with one more column. If the file exists, rows are appended; rows of other
    runs stay.

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

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(fspath(path))
        self._run = ""
        self._columns: list[str] = []
        self._there: set[tuple[str, str]] = set()  # trial and epoch of the rows of this run

    def check(self) -> None:
        """Raise an error if the folder of the file cannot be made."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SearchError(f"CSV cannot write {self._path}: {error}") from None

    def search_began(self, search: SearchBegan) -> None:
        """Read what is there; a last row that is cut off is left out."""
        self._run = search.run
        rows = self._read()
        self._there = {(r["trial"], r["epoch"]) for r in rows if r["run"] == self._run}
        if self._columns:
            self._write(rows)

    def epoch_ended(self, epoch: EpochEnded) -> None:
        """Append a row."""
        place = (str(epoch.trial), str(epoch.epoch))
        if place in self._there:
            return
        row = {
            **dict(zip(_FIRST, (self._run, *place, epoch.seconds, epoch.train_loss), strict=True)),
            **epoch.metrics,
            **{f"param_{name}": v for name, v in epoch.params.items()},
        }
        new = [name for name in row if name not in self._columns]
        if new:
            params = [name for name in [*self._columns, *new] if name.startswith("param_")]
            others = [name for name in [*self._columns, *new] if not name.startswith("param_")]
            rows = self._read() if self._columns else []
            self._columns = [*others, *params]
            self._write(rows)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(self._line(row))
        self._there.add(place)

    def _read(self) -> list[dict[str, str]]:
        """Return the whole rows of the file."""
        if not self._path.exists():
            return []
        text = self._path.read_text("utf-8")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        self._columns = list(reader.fieldnames or ())
        if self._columns and not {*_FIRST} <= {*self._columns}:
            raise SearchError(f"{self._path} is another file: it has no column run, trial or epoch")
        return [row for row in reader if None not in row.values()]

    def _write(self, rows: list[dict[str, str]]) -> None:
        head = self._line({}, head=True)
        disk.replace(self._path, "".join([head, *map(self._line, rows)]).encode(), sync=False)

    def _line(self, row: Mapping[str, Any], *, head: bool = False) -> str:
        line = io.StringIO(newline="")
        writer = csv.DictWriter(line, self._columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader() if head else writer.writerow(dict(row))
        return line.getvalue()
