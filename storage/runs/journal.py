"""The append-only record of a run.

::

    journal.jsonl                 in a local folder: one file, a record a line
    journal/00000001.jsonl        elsewhere, where nothing can be appended to: an object a group

    {"crc32c":"1f0c9a3e","n":17,"group":[16,18],"record":{"kind":"reported","trial":4}}

Records are appended in groups, and a group is there as a whole or not at all. A line has the
record's number, the first and last number of its group, and a CRC32C of the rest of the line. A
crash can only damage the last group, since a group is begun when the one before it is on the disk.
If that group is cut off, or full of the zeros that a power failure leaves, the next append
overwrites it. All other damage is reported, a flipped bit in the last group too.

A journal that was copied from a folder to an object store or back can be read: first the file,
then the objects. NaN and infinities are written as Python's `json` writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c

from dagsel.errors import JournalCorruptError, RunDirError
from dagsel.storage.files import Folder, Url

FILE = "journal.jsonl"
SEGMENTS = "journal"
_SEGMENT = re.compile(r"(\d{8,})\.jsonl")
_HEAD = len('{"crc32c":"00000000",')
_HOLE = bytes(8)
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """A run's record under any fsspec URL. One process appends at a time; any may read.

    Pickles as its URL and options. Reading writes nothing.

    Parameters
    ----------
    folder
        The run's folder, or its URL.
    storage_options
        Passed to the file system.

    Examples
    --------
    >>> journal = Journal("memory://example-journal")
    >>> journal.append([{"kind": "asked", "trial": 0}, {"kind": "told", "value": float("inf")}])
    >>> Journal("memory://example-journal").read()
    [{'kind': 'asked', 'trial': 0}, {'kind': 'told', 'value': inf}]
    """

    def __init__(
        self, folder: Folder | Url, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        if not isinstance(folder, Folder):
            folder = Folder(folder, storage_options, error=RunDirError)
        self._folder = folder
        self._end: _End | None = None

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records, all or none; afterwards they survive SIGKILL and a power failure.

        Parameters
        ----------
        records
            JSON objects.

        Raises
        ------
        RunDirError
            If it cannot be written, or another process has written to it since it was read.
        JournalCorruptError
            If it is damaged.
        """
        if not records:
            return
        end = self._end or self._clear_end()
        last = end.n_records + len(records) - 1
        try:
            group = [end.n_records, last]
            data = b"".join(_line(group[0] + i, group, r) for i, r in enumerate(records))
        except (TypeError, ValueError, RecursionError) as error:
            raise RunDirError(f"{self._folder.url}: a record is no JSON: {error}") from None
        self._end = None  # until it is known again
        try:
            if self._folder.is_local and not end.n_segments:
                self._folder.append(FILE, data, at=end.n_bytes)
                self._end = _End(last + 1, end.n_bytes + len(data), 0)
            else:
                if not self._folder.create(_segment(end.n_segments + 1), data, sync=True):
                    raise OSError("another process writes to it too")
                self._end = _End(last + 1, end.n_bytes, end.n_segments + 1)
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError) and end.n_records > 0
            text = self._folder.hide(str(error))
            failed = RunDirError(
                f"the journal of {self._folder.url} was deleted while the search ran, which nobody "
                "can resume; begin again with another run_dir"
                if is_gone
                else f"cannot append to the journal of {self._folder.url}: {text}; mend that, and "
                "go on with dagsel.resume"
            )
            failed.errno = error.errno  # a full disk may have room again
            raise failed from None

    def read(self) -> list[dict[str, Any]]:
        """Read all records, in order, without a last group that is cut off.

        Raises
        ------
        JournalCorruptError
            If it is damaged elsewhere.
        """
        return self._read()[0]

    def _clear_end(self) -> _End:
        """Find where the next group goes, and remove what a crash has left there."""
        _, end, torn = self._read()
        if torn == FILE and self._folder.is_local:
            self._folder.cut(FILE, end.n_bytes)
        elif torn == FILE and end.n_bytes:  # copied from a local folder
            self._folder.replace(FILE, (self._folder.read(FILE) or b"")[: end.n_bytes])
        elif torn is not None:
            self._folder.remove_file(torn)
        return end

    def _read(self) -> tuple[list[dict[str, Any]], _End, str | None]:
        """Return the records, where they end, and the object that is cut off behind them."""
        matches = (_SEGMENT.fullmatch(name) for name in self._folder.names(SEGMENTS))
        numbers = sorted(int(match[1]) for match in matches if match)
        data = self._folder.read(FILE)
        for expected, number in enumerate(numbers, 1):
            if number != expected:
                raise self._corrupt(_segment(expected), 0, 0, "it is missing")
        names = [_segment(number) for number in numbers]
        parts = list(zip(names, self._folder.read_all(names), strict=True))
        if data is not None:
            parts.insert(0, (FILE, data))
        records: list[dict[str, Any]] = []
        n_bytes, n_segments, torn = 0, 0, None
        for name, data in parts:
            if torn is not None:
                raise self._corrupt(torn, n_bytes, len(records), "it is cut off")
            found = scan(data, len(records))
            if found.damage is not None:
                raise self._corrupt(name, found.n_bytes, len(records + found.records), found.damage)
            records += found.records
            torn = name if found.is_torn or not found.records else None
            if name == FILE:
                n_bytes = found.n_bytes
            elif torn is None:
                n_segments += 1
        return records, _End(len(records), n_bytes, n_segments), torn

    def _corrupt(self, name: str, place: int, n_records: int, reason: str) -> JournalCorruptError:
        cure = "restore it from a copy"
        if name == FILE:
            cure += f", or cut it to {place} bytes to keep the {n_records} records before"
        else:
            cure += ", or remove it and all that follow it to keep what is before"
        return JournalCorruptError(f"{self._folder.url}/{name}, byte {place}: {reason}; {cure}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Journal, (self._folder,)

    def __repr__(self) -> str:
        return f"Journal({self._folder.url!r})"


@dataclass(frozen=True, slots=True)
class _End:
    """Where the next group goes: after so many records, bytes of the file, and objects."""

    n_records: int
    n_bytes: int
    n_segments: int


@dataclass(frozen=True, slots=True)
class Scan:
    """The records of all whole groups, how many bytes these take, and what follows them.

    That is a group that a crash cut off (`is_torn`), or other damage, or nothing.
    """

    records: list[dict[str, Any]]
    n_bytes: int
    is_torn: bool = False
    damage: str | None = None


def scan(data: bytes, first: int) -> Scan:
    r"""Read the lines of a journal, whose first record has the number `first`.

    Examples
    --------
    >>> scan(b'{"crc32c":"00', 0)
    Scan(records=[], n_bytes=0, is_torn=True, damage=None)
    >>> scan(b"no journal\n", 0).damage
    'the checksum of a line does not match'
    """
    records: list[dict[str, Any]] = []
    group: list[dict[str, Any]] = []
    n_bytes = place = 0
    while (end := data.find(b"\n", place)) >= 0:
        entry = _entry(data[place:end])
        if entry is None:
            break
        number, group_first, group_last, record = entry
        n_whole = first + len(records)
        if group_first != n_whole or number != n_whole + len(group) or number > group_last:
            reason = f"record {number} stands where {n_whole + len(group)} should"
            return Scan(records, n_bytes, damage=reason)
        group.append(record)
        place = end + 1
        if number == group_last:
            records += group
            group, n_bytes = [], place
    rest = data[place:]
    if not rest:
        return Scan(records, n_bytes, is_torn=bool(group))
    if _is_torn(rest, first + len(records)):
        return Scan(records, n_bytes, is_torn=True)
    return Scan(records, n_bytes, damage="the checksum of a line does not match")


def _is_torn(rest: bytes, group_first: int) -> bool:
    """Whether the bytes after the last good line are those of an interrupted group."""
    if b"\n" not in rest:
        # One byte behind a good line was its end once.
        return _entry(rest[:-1]) is None
    # Power failures leave blocks of zeros, of this group only: the one before it is on the disk.
    is_holed = rest.startswith(b"\0") or _HOLE in rest
    lines = re.split(rb"[\n\0]+", rest)
    others = (entry for line in lines if (entry := _entry(line)) is not None)
    return is_holed and all(entry[1] == group_first for entry in others)


def _line(number: int, group: Sequence[int], record: Mapping[str, Any]) -> bytes:
    text = _encode(record if type(record) is dict else dict(record))
    body = f'"n":{number},"group":[{group[0]},{group[1]}],"record":{text}}}'.encode()
    return b'{"crc32c":"%08x",%b\n' % (google_crc32c.value(body), body)


def _entry(line: bytes) -> tuple[int, int, int, dict[str, Any]] | None:
    """Return number, first and last of the group, record; None if it is no good line."""
    if line[:_HEAD] != b'{"crc32c":"%08x",' % google_crc32c.value(line[_HEAD:]):
        return None
    try:
        entry = json.loads(line)
        number, (first, last), record = entry["n"], entry["group"], entry["record"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_sound = isinstance(record, dict) and all(type(n) is int for n in (number, first, last))
    return (number, first, last, record) if is_sound else None


def _segment(number: int) -> str:
    return f"{SEGMENTS}/{number:08d}.jsonl"
