"""The states of trials, kept so that nothing that was computed is lost.

::

    trial-000012/epoch-000003-position-000004.json                  makes the checkpoint exist
    trial-000012/epoch-000003-position-000004.9a3e01c7.safetensors  the state that it names
    trial-000012/epoch-000003-position-000005.partial.json          of a unit stopped in its shard
    trial-000012/epoch-000003-position-000004.pin                   keeps it from being pruned

The state's file bears its checksum in its name and is never changed; the JSON, written after it in
one step, names it. So a save cut off anywhere leaves what was there before, also where it replaces
a checkpoint of the same key.

The checksum is CRC32C with the length: it finds what disks and networks do to bytes, at an eighth
of what a cryptographic hash would cost in the workers' critical path (8 GB/s here; BLAKE2b 1 GB/s).
It is no seal: whoever can change the state can change the JSON too.

A save does not wait for the disk. What is written outlives the process whatever kills it, since the
kernel has it; only a power failure can tear it, in which case the checksum tells and `load_latest`
gives the state before it. So keep two states of a trial that is to survive that.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import google_crc32c
import numpy as np

from dagsel.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from dagsel.storage.files import Folder, Url

Bytes: TypeAlias = "bytes | bytearray | memoryview"
Place: TypeAlias = "tuple[int, int]"

FORMAT = "dagsel.checkpoint"
VERSION = 1
DIGEST = "digest"  # where `load` puts the state's checksum into its meta
_logger = logging.getLogger("dagsel")
_STEM = r"epoch-(\d+)-position-(\d+)"
_RECORD = re.compile(rf"{_STEM}(\.partial)?\.json")
_PIN = re.compile(rf"{_STEM}\.pin")
_CHECK = re.compile(r"check-(\d+)\..+")
_BLOB = re.compile(rf"(?:{_STEM}(?:\.partial)?|check-\d+)\.[0-9a-f]{{8}}\.safetensors")
_TRIAL = re.compile(r"trial-(\d+)")


@dataclass(frozen=True, slots=True)
class _Record:
    """What the JSON of a checkpoint says."""

    blob: str
    n_bytes: int
    crc32c: str
    meta: dict[str, Any]

    def as_json(self) -> bytes:
        """Give the JSON."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode()


class CheckpointStore:
    """Keeps states under keys of trial, epoch and position.

    A position is a number of units done in an epoch. Only one process saves states of a trial at
    a time (a trial's units never overlap); any may read. Pickles as its URL and options.

    Parameters
    ----------
    url
        Any fsspec URL, or a path. Made when first written to.
    storage_options
        Passed to the file system.
    sync
        Whether each save waits until a local disk has it. Without, a save outlives any crash of
        the process, but perhaps not one of the machine (which `load` would notice).

    Examples
    --------
    >>> store = CheckpointStore("memory://checkpoints")
    >>> digests = [
    ...     store.save(7, 1, 0, b"a state", {"loss": 0.5}),
    ...     store.save(7, 1, 1, b"its successor", {"loss": 0.25}),
    ... ]
    >>> store.load(7, 1, 1)
    (b'its successor', {'loss': 0.25, 'digest': '1c7ad1f5'})
    >>> store.load_latest(7, at_most=(1, 0))
    ((1, 0), b'a state', {'loss': 0.5, 'digest': '328cca05'})
    >>> store.prune(7, keep=1)
    >>> store.list(7)
    ((1, 1),)
    >>> store.drop(7)
    """

    def __init__(
        self,
        url: Folder | Url,
        storage_options: Mapping[str, Any] | None = None,
        *,
        sync: bool = False,
    ) -> None:
        if not isinstance(url, Folder):
            url = Folder(url, storage_options, error=CheckpointError)
        self._folder = url
        self.sync = sync

    @property
    def url(self) -> str:
        """Its URL, without credentials."""
        return self._folder.url

    def save(
        self,
        trial: int,
        epoch: int,
        position: int,
        blob: Bytes,
        meta: Mapping[str, Any],
        *,
        partial: bool = False,
    ) -> str:
        """Keep a state.

        Parameters
        ----------
        trial, epoch, position
            Its key. What is there already is replaced.
        blob
            The state: a complete safetensors file.
        meta
            JSON to keep with it.
        partial
            The state of a unit that was stopped inside its shard. It stands beside the complete
            one, never counts as complete, and goes when the complete one is saved.

        Returns
        -------
        digest
            The checksum of `blob` as 8 hexadecimal digits; `load` gives it in ``meta["digest"]``.
        """
        stem = _stem(trial, epoch, position, partial=partial)
        name, record, checksum = _body(stem, blob, meta)
        before = self._blob_of(stem)
        self._folder.replace(name, np.frombuffer(blob, np.uint8).data, sync=self.sync)
        self._folder.replace(f"{stem}.json", record, sync=self.sync)
        if before not in (None, name):
            self._folder.remove_file(str(before))
        if not partial:
            self.delete(trial, epoch, position, partial=True)
        return checksum

    def save_first(
        self, trial: int, epoch: int, position: int, blob: Bytes, meta: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Keep a complete state unless one is kept already under its key.

        Of two processes that each believe a unit to be theirs, the first one's result counts: one
        that was stopped for long and wakes cannot put its state in the place of another.

        Parameters
        ----------
        trial, epoch, position, blob, meta
            As for `save`. A damaged state under the key is replaced.

        Returns
        -------
        meta
            Of the state that is kept, with its ``"digest"``.
        """
        stem = _stem(trial, epoch, position)
        name, record, checksum = _body(stem, blob, meta)
        self._folder.replace(name, np.frombuffer(blob, np.uint8).data, sync=self.sync)
        kept = {**meta, DIGEST: checksum}
        if not self._folder.create(f"{stem}.json", record, sync=self.sync):
            try:
                _, kept = self.load(trial, epoch, position)
            except CheckpointError:
                return {**meta, DIGEST: self.save(trial, epoch, position, blob, meta)}
            if self._blob_of(stem) != name:
                self._folder.remove_file(name)
        self.delete(trial, epoch, position, partial=True)
        return kept

    def load(
        self, trial: int, epoch: int, position: int, *, partial: bool = False
    ) -> tuple[bytes, dict[str, Any]]:
        """Give back a state.

        Returns
        -------
        blob, meta
            As they were saved; in meta the state's checksum besides, as ``"digest"``.

        Raises
        ------
        CheckpointNotFoundError
            If nothing is stored under the key.
        CheckpointCorruptError
            If what is stored is not what was saved.
        """
        return self._load(_stem(trial, epoch, position, partial=partial))

    def load_latest(
        self, trial: int, at_most: Place | None = None
    ) -> tuple[Place, bytes, dict[str, Any]] | None:
        """Give back a trial's newest complete state that is whole, with a warning for each damaged.

        Parameters
        ----------
        trial
            Its number.
        at_most
            Epoch and position that it may be of at most.

        Returns
        -------
        place, blob, meta
            Its epoch and position, and what `load` gives; ``None`` if there is none.
        """
        for place in reversed(self.list(trial)):
            if at_most is not None and place > at_most:
                continue
            try:
                return place, *self.load(trial, *place)
            except CheckpointCorruptError as error:
                _logger.warning("going on from an earlier state: %s", error)
            except CheckpointNotFoundError:
                continue  # deleted since it was listed
        return None

    def keep_check(
        self, trial: int, number: int, epoch: int, position: int, *, partial: bool
    ) -> None:
        """Keep a copy of a state that was scored, whatever becomes of the state itself.

        Earlier such copies of the trial go.

        Parameters
        ----------
        trial, epoch, position, partial
            The state's key.
        number
            Which of the trial's checks has scored it, from 1.

        Raises
        ------
        CheckpointError
            If the state is missing or damaged, and no copy has been made before.
        """
        stem, goal = _stem(trial, epoch, position, partial=partial), _check_stem(trial, number)
        if self._folder.read(f"{goal}.json") is None:
            record, folder = self._record(stem), _folder_of(trial)
            name = f"{goal}.{record.crc32c}.safetensors"
            try:
                self._folder.copy(f"{folder}/{record.blob}", name)
            except FileNotFoundError:
                raise self._corrupt(f"{folder}/{record.blob}", "it is missing") from None
            copied = replace(record, blob=name.rpartition("/")[2])
            self._folder.replace(f"{goal}.json", copied.as_json(), sync=self.sync)
        self.drop_checks(trial, but=number)

    def load_check(self, trial: int, number: int) -> tuple[bytes, dict[str, Any]]:
        """Give back a copy that `keep_check` has made, as `load` does."""
        return self._load(_check_stem(trial, number))

    def drop_checks(self, trial: int, *, but: int = 0) -> None:
        """Remove the copies that `keep_check` has made, but for one."""
        folder = _folder_of(trial)
        for name in sorted(self._folder.names(folder), key=_records_first):
            match = _CHECK.fullmatch(name)
            if match is not None and int(match[1]) != but:
                self._folder.remove_file(f"{folder}/{name}")

    def trials(self) -> tuple[int, ...]:
        """List the trials of which anything is stored."""
        found = (_TRIAL.fullmatch(name) for name in self._folder.names())
        return tuple(sorted(int(match[1]) for match in found if match))

    def list(self, trial: int, *, partial: bool = False) -> tuple[Place, ...]:
        """List epochs and positions of a trial's complete states (or partial ones), sorted."""
        found = (_RECORD.fullmatch(name) for name in self._folder.names(_folder_of(trial)))
        return tuple(sorted((int(m[1]), int(m[2])) for m in found if m and bool(m[3]) is partial))

    def latest(self, trial: int) -> Place | None:
        """Give epoch and position of a trial's newest complete state."""
        return max(self.list(trial), default=None)

    def delete(self, trial: int, epoch: int, position: int, *, partial: bool = False) -> None:
        """Remove a state; a missing one is fine."""
        stem = _stem(trial, epoch, position, partial=partial)
        blob = self._blob_of(stem)
        self._folder.remove_file(f"{stem}.json")
        if blob is not None:
            self._folder.remove_file(blob)
        if not partial:
            self._folder.remove_file(f"{stem}.pin")

    def pin(self, trial: int, epoch: int | None = None, position: int | None = None) -> None:
        """Keep a state from being pruned: that of the key, else the newest complete one."""
        place = self.latest(trial) if epoch is None or position is None else (epoch, position)
        if place is None or place not in self.list(trial):
            raise CheckpointNotFoundError(f"{self.url}: trial {trial} has no state {place} to pin")
        self._folder.replace(f"{_stem(trial, *place)}.pin", b"")

    def pinned(self, trial: int) -> tuple[Place, ...]:
        """List epochs and positions of a trial's pinned states, sorted."""
        found = (_PIN.fullmatch(name) for name in self._folder.names(_folder_of(trial)))
        return tuple(sorted((int(match[1]), int(match[2])) for match in found if match))

    def unpin(self, trial: int, epoch: int | None = None, position: int | None = None) -> None:
        """Let a state be pruned again: that of the key, else all of the trial."""
        one = epoch is not None and position is not None
        for place in self.pinned(trial):
            if not one or place == (epoch, position):
                self._folder.remove_file(f"{_stem(trial, *place)}.pin")

    def prune(self, trial: int, keep: int = 2) -> None:
        """Remove a trial's states but for the newest complete ones and the pinned ones.

        Partial states up to the newest complete one go too, and what saves that were cut off have
        left behind them.

        Parameters
        ----------
        trial
            Its number.
        keep
            How many to keep, from 1 up.
        """
        if keep < 1:
            raise CheckpointError(f"keep is {keep}; keep at least 1, or drop the trial")
        complete = self.list(trial)
        if not complete:
            return
        kept = {*complete[-keep:], *self.pinned(trial)}
        for place in complete:
            if place not in kept:
                self.delete(trial, *place)
        for place in self.list(trial, partial=True):
            if place <= complete[-1]:
                self.delete(trial, *place, partial=True)
        self._sweep(trial, before=complete[-1])

    def drop(self, trial: int) -> None:
        """Remove all states of a trial."""
        folder = _folder_of(trial)
        for name in sorted(self._folder.names(folder), key=_records_first):
            self._folder.remove_file(f"{folder}/{name}")
        self._folder.remove(folder)

    def _sweep(self, trial: int, *, before: Place) -> None:
        """Remove states that no record names; newer ones may be just being saved."""
        folder = _folder_of(trial)
        names = self._folder.names(folder)
        named = {
            blob
            for name in names
            if _RECORD.fullmatch(name)
            and (blob := self._blob_of(f"{folder}/{name.removesuffix('.json')}"))
        }
        for name in names:
            match = re.match(_STEM, name)
            if match is None or (int(match[1]), int(match[2])) >= before:
                continue
            is_blob = _BLOB.fullmatch(name) is not None
            if name.endswith(".tmp") or (is_blob and f"{folder}/{name}" not in named):
                self._folder.remove_file(f"{folder}/{name}")

    def _load(self, stem: str) -> tuple[bytes, dict[str, Any]]:
        record = self._record(stem)
        name = f"{stem.rpartition('/')[0]}/{record.blob}"
        blob = self._folder.read(name)
        if blob is None:
            raise self._corrupt(name, "it is missing")
        if len(blob) != record.n_bytes:
            raise self._corrupt(name, f"it has {len(blob)} bytes instead of {record.n_bytes}")
        if _checksum(np.frombuffer(blob, np.uint8)) != record.crc32c:
            raise self._corrupt(name, "its checksum does not match")
        return blob, {**record.meta, DIGEST: record.crc32c}

    def _record(self, stem: str) -> _Record:
        data = self._folder.read(f"{stem}.json")
        if data is None:
            raise CheckpointNotFoundError(f"no state is stored at {self.url}/{stem}")
        try:
            body = json.loads(data)
            record = _Record(body["blob"], body["n_bytes"], body["crc32c"], body["meta"])
            is_ours = body["format"] == FORMAT and body["version"] == VERSION
            if not (is_ours and _BLOB.fullmatch(record.blob) and isinstance(record.meta, dict)):
                raise ValueError("it does not describe a state of this version")
        except (ValueError, KeyError, TypeError) as error:
            raise self._corrupt(f"{stem}.json", str(error)) from None
        return record

    def _blob_of(self, stem: str) -> str | None:
        """Name the state's file; ``None`` if nothing is stored or the record is damaged."""
        try:
            return f"{stem.rpartition('/')[0]}/{self._record(stem).blob}"
        except CheckpointError:
            return None

    def _corrupt(self, name: str, reason: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{self.url}/{name}: {reason}; delete this state and go on from an earlier one"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._folder, self.sync)

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"


def _restore(folder: Folder, sync: bool) -> CheckpointStore:
    store = CheckpointStore.__new__(CheckpointStore)
    store._folder, store.sync = folder, sync
    return store


def _folder_of(trial: int) -> str:
    return f"trial-{_number('trial', trial)}"


def _stem(trial: int, epoch: int, position: int, *, partial: bool = False) -> str:
    stem = f"epoch-{_number('epoch', epoch)}-position-{_number('position', position)}"
    return f"{_folder_of(trial)}/{stem}{'.partial' if partial else ''}"


def _check_stem(trial: int, number: int) -> str:
    return f"{_folder_of(trial)}/check-{_number('check', number)}"


def _records_first(name: str) -> bool:
    """Order names for removal: a state without a record is nothing, the reverse is damage."""
    return not name.endswith(".json")


def _number(what: str, value: object) -> str:
    """Pad a number so that names sort; also what keeps a key inside the store's folder."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise CheckpointError(f"{what} is {value!r}; give a non-negative integer")
    return f"{value:06d}"


def _body(stem: str, blob: Bytes, meta: Mapping[str, Any]) -> tuple[str, bytes, str]:
    """Give the state's file name, the record that names it, and the state's checksum."""
    data = np.frombuffer(blob, np.uint8)
    checksum = _checksum(data)
    name = f"{stem}.{checksum}.safetensors"
    record = _Record(name.rpartition("/")[2], data.nbytes, checksum, dict(meta))
    if DIGEST in meta:
        raise CheckpointError(f"{stem}: meta has a {DIGEST!r}; that name is the store's own")
    try:
        return name, record.as_json(), checksum
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{stem}: meta is no JSON: {error}") from None


def _checksum(data: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    value: int = google_crc32c.value(data)
    return f"{value:08x}"
