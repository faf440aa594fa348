"""Stored states of trials.

::

    trial-000012/epoch-000003-position-000004.json                  the record; written last
    trial-000012/epoch-000003-position-000004.9a3e01c7.safetensors  the state that it names
    trial-000012/epoch-000003-position-000005.partial.json          of a unit stopped in its shard
    trial-000012/check-000002.json                                  a copy of one that was scored
    trial-000012/scores-epoch-000003-shard-000001.json              what a shard has kept of scores

The name of a state's file contains its checksum, and the file is never changed. The record is
written after it, in one step. So an interrupted save leaves what was there before, also where it
replaces a checkpoint of the same key.

A record ends with its seal, a checksum of itself and of its place: one that was changed, or copied
to another trial or unit, is damaged. The checksums are CRC32C, which finds damage by disks and
networks at an eighth of the cost of a cryptographic hash (8 GB/s; BLAKE2b 1 GB/s). They do not
protect against someone who changes the files on purpose.

A save does not wait for the disk. A state survives the death of the process; a power failure may
damage it. Then the checksum does not match, and `load_latest` returns the state before it. So keep
two states of a trial.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from dagsel.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    LinkError,
)
from dagsel.storage.files import Bytes, Folder, Url
from dagsel.storage.runs.state_record import SCORES, STEM, StateRecord, checksum_of

#: What was scored: the end of an epoch, or a state of a paused trial.
Scoring: TypeAlias = Literal["epoch", "check"]
DIGEST = "digest"  # where `load` puts the state's checksum into its meta
_logger = logging.getLogger("dagsel")
_RECORD = re.compile(rf"{STEM}(\.partial)?\.json")
_CHECK = re.compile(r"check-(\d+)\.(?:[0-9a-f]{8}\.safetensors|json)(?:\.[0-9a-f]{8}\.tmp)?")
#: Files in a trial's folder; of a save that was interrupted too.
_OWN = re.compile(
    rf"(?:{STEM}(?:\.partial)?|check-\d+|{SCORES})\.(?:[0-9a-f]{{8}}\.safetensors|json)"
    r"(?:\.[0-9a-f]{8}\.tmp)?"
)
_SCORES_OF = re.compile(r"scores-(epoch|check)-(\d+)-shard-\d+\..*")
_TRIAL = re.compile(r"trial-(\d+)")


@dataclass(frozen=True, slots=True)
class Extent:
    """How far the stored states of a trial reach."""

    epoch: int = 0  # the last epoch that has a state, complete or partial
    n_checks: int = 0  # the last check whose state was copied


class CheckpointStore:
    """Stores states under keys of trial, epoch and position.

    The position is the number of units done in the epoch. Only one process saves states of a
    trial at a time (a trial's units never overlap); any may read. Pickles as its URL and options.

    Parameters
    ----------
    url
        Any fsspec URL, or a path. Created by the first save.
    storage_options
        Passed to the file system.
    sync
        Whether each save waits until a local disk has it. If not, a save survives a crash of the
        process, but perhaps not of the machine (`load` would notice).

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
    >>> store.list(7)
    ((1, 0), (1, 1))
    >>> store.drop(7)
    >>> store.trials()
    ()
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
        """Store a state.

        Parameters
        ----------
        trial, epoch, position
            Its key. A state stored there before is replaced.
        blob
            The state: a complete safetensors file.
        meta
            JSON to store with it.
        partial
            Whether the unit was stopped inside its shard. A partial state is stored beside the
            complete one, and is removed when the complete one is saved.

        Returns
        -------
        digest
            The checksum of `blob` as 8 hexadecimal digits; `load` adds it as ``meta["digest"]``.
        """
        checksum = self._save(_stem(trial, epoch, position, partial=partial), blob, meta)
        if not partial:
            self.delete(trial, epoch, position, partial=True)
        return checksum

    def _save(self, stem: str, blob: Bytes, meta: Mapping[str, Any]) -> str:
        name, record, checksum = _body(stem, blob, meta)
        before = self._blob_of(stem)
        self._folder.replace(name, np.frombuffer(blob, np.uint8).data, sync=self.sync)
        self._folder.replace(f"{stem}.json", record, sync=self.sync)
        if before not in (None, name):
            self._folder.remove_file(str(before))
        return checksum

    def save_scores(self, trial: int, kind: Scoring, number: int, shard: int, blob: Bytes) -> None:
        """Store what a validation shard has kept for metrics of the whole set.

        `number` is that of the epoch that was scored, or of the check.
        """
        self._save(_scores_stem(trial, kind, number, shard), blob, {})

    def load_scores(self, trial: int, kind: Scoring, number: int, shard: int) -> bytes:
        """Read what `save_scores` has stored; raises as `load` does."""
        return self._load(_scores_stem(trial, kind, number, shard))[0]

    def drop_scores(self, trial: int, kind: Scoring, number: int) -> None:
        """Remove what all shards have kept of the scores of an epoch, or of a check."""
        folder = _folder_of(trial)
        for name in sorted(self._folder.names(folder), key=_records_first):
            match = _SCORES_OF.fullmatch(name)
            if match is not None and (match[1], int(match[2])) == (kind, number):
                self._folder.remove_file(f"{folder}/{name}")

    def save_first(
        self, trial: int, epoch: int, position: int, blob: Bytes, meta: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Store a complete state as `save` does, unless its key has one that is not damaged.

        If two processes run the same unit, the first result counts: a process that slept for long
        cannot replace the other's state.

        Returns
        -------
        digest, kept
            The checksum of `blob`; the meta of the state that is stored now, with its ``"digest"``,
            which is another one if another state was first.
        """
        stem = _stem(trial, epoch, position)
        name, record, checksum = _body(stem, blob, meta)
        self._folder.replace(name, np.frombuffer(blob, np.uint8).data, sync=self.sync)
        kept = {**meta, DIGEST: checksum}
        if not self._folder.create(f"{stem}.json", record, sync=self.sync):
            try:
                _, kept = self.load(trial, epoch, position)
            except CheckpointError:
                self.save(trial, epoch, position, blob, meta)
                return checksum, kept
            if self._blob_of(stem) != name:
                self._folder.remove_file(name)
        self.delete(trial, epoch, position, partial=True)
        return checksum, kept

    def load(
        self, trial: int, epoch: int, position: int, *, partial: bool = False
    ) -> tuple[bytes, dict[str, Any]]:
        """Read a state.

        Parameters
        ----------
        trial, epoch, position
            Its key.
        partial
            Whether it is the state of a unit that was stopped inside its shard.

        Returns
        -------
        blob, meta
            As they were saved, and the state's checksum as ``meta["digest"]``.

        Raises
        ------
        CheckpointNotFoundError
            If nothing is stored under the key.
        CheckpointCorruptError
            If it is damaged.
        """
        return self._load(_stem(trial, epoch, position, partial=partial))

    def load_latest(
        self, trial: int, at_most: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], bytes, dict[str, Any]] | None:
        """Read a trial's newest complete state that is not damaged; warn of each damaged one.

        Parameters
        ----------
        trial
            Number of the trial.
        at_most
            Epoch and position; later states are left out. None for all.

        Returns
        -------
        place, blob, meta
            Epoch and position, and what `load` returns; None if there is no such state.
        """
        for place in reversed(self.list(trial)):
            if at_most is not None and place > at_most:
                continue
            try:
                return place, *self.load(trial, *place)
            except CheckpointCorruptError as error:
                _logger.warning("continuing from an earlier state: %s", error)
            except CheckpointNotFoundError:
                continue  # deleted since it was listed
        return None

    def keep_check(
        self, trial: int, number: int, epoch: int, position: int, *, partial: bool
    ) -> None:
        """Copy a state that was scored, so that it stays when the state itself is removed.

        `number` is that of the trial's check that has scored it, from 1; earlier copies are
        removed. Raises a `CheckpointError` if the state is missing or damaged, and there is no
        copy yet.
        """
        stem, goal = _stem(trial, epoch, position, partial=partial), _check_stem(trial, number)
        if self._blob_of(goal) is None:
            record, folder = self._record(stem), _folder_of(trial)
            name = f"{goal}.{record.crc32c}.safetensors"
            try:
                self._folder.copy(f"{folder}/{record.blob}", name)
            except FileNotFoundError:
                raise self._corrupt(f"{folder}/{record.blob}", "it is missing") from None
            except LinkError as error:
                raise self._corrupt(f"{folder}/{record.blob}", str(error)) from None
            copied = replace(record, blob=name.rpartition("/")[2])
            self._folder.replace(f"{goal}.json", copied.as_json(goal), sync=self.sync)
        self.drop_checks(trial, but=number)

    def load_check(self, trial: int, number: int) -> tuple[bytes, dict[str, Any]]:
        """Read a copy that `keep_check` has made, as `load` does."""
        return self._load(_check_stem(trial, number))

    def drop_checks(self, trial: int, *, but: int = 0) -> None:
        """Remove the copies that `keep_check` has made, except one."""
        folder = _folder_of(trial)
        for name in sorted(self._folder.names(folder), key=_records_first):
            match = _CHECK.fullmatch(name)
            if match is not None and int(match[1]) != but:
                self._folder.remove_file(f"{folder}/{name}")

    def trials(self) -> tuple[int, ...]:
        """List the trials that have anything stored."""
        found = (_TRIAL.fullmatch(name) for name in self._folder.names())
        return tuple(sorted(int(match[1]) for match in found if match))

    def list(self, trial: int, *, partial: bool = False) -> tuple[tuple[int, int], ...]:
        """List epochs and positions of a trial's states, sorted.

        Parameters
        ----------
        trial
            Number of the trial.
        partial
            Whether to list the partial states instead of the complete ones.
        """
        found = (_RECORD.fullmatch(name) for name in self._folder.names(_folder_of(trial)))
        return tuple(sorted((int(m[1]), int(m[2])) for m in found if m and bool(m[3]) is partial))

    def extents(self) -> dict[int, Extent]:
        """Return how far the states of each trial reach; without trials that have none.

        Raises a `CheckpointCorruptError` if there is a folder in place of a file, or the reverse.
        """
        if self._folder.is_file():
            raise self._wrong_kind("", "file")
        found = {}
        for folder, kind in sorted(self._folder.kinds().items()):
            if not (match := _TRIAL.fullmatch(folder)):
                continue
            if kind == "file":
                raise self._wrong_kind(f"/{folder}", kind)
            trial, names = int(match[1]), self._folder.kinds(folder)
            for name, kind in names.items():
                if _OWN.fullmatch(name) and kind == "directory":
                    raise self._wrong_kind(f"/{folder}/{name}", kind)
            epochs = [int(match[1]) for name in names if (match := _RECORD.fullmatch(name))]
            checks = [int(match[1]) for name in names if (match := _CHECK.fullmatch(name))]
            if epochs or checks:
                found[trial] = Extent(max(epochs, default=0), max(checks, default=0))
        return found

    def latest(self, trial: int) -> tuple[int, int] | None:
        """Return epoch and position of a trial's newest complete state."""
        return max(self.list(trial), default=None)

    def delete(
        self, trial: int, epoch: int, position: int, *, partial: bool = False, digest: str = ""
    ) -> None:
        """Remove a state; a missing one is fine.

        Where its checksum is known its record need not be read. The file of a state that has
        another one stays until the trial is dropped.
        """
        stem = _stem(trial, epoch, position, partial=partial)
        blob: str | None = None
        try:
            blob = f"{stem}.{digest}.safetensors" if digest else self._recorded(stem)
        except CheckpointNotFoundError:
            return  # most often: a unit that was never stopped has left no part
        except CheckpointCorruptError:
            pass
        self._folder.remove_file(f"{stem}.json")
        if blob is not None:
            self._folder.remove_file(blob)

    def drop(self, trial: int) -> None:
        """Remove all states of a trial; what is not dagsel's, or behind a link, stays.

        Parameters
        ----------
        trial
            Number of the trial.
        """
        folder = _folder_of(trial)
        try:
            for name in sorted(self._folder.names(folder), key=_records_first):
                if _OWN.fullmatch(name):
                    self._folder.remove_file(f"{folder}/{name}")
            self._folder.remove_if_empty(folder)
        except LinkError as error:
            _logger.warning("the states of trial %d stay: %s", trial, error)

    def check_links(self) -> None:
        """Raise a `LinkError` if the store is a link in the folder of a run."""
        if self._folder.is_local:
            self._folder.own("trial")

    def _load(self, stem: str) -> tuple[bytes, dict[str, Any]]:
        record = self._record(stem)
        name = f"{stem.rpartition('/')[0]}/{record.blob}"
        blob = self._folder.read(name)
        if blob is None:
            raise self._corrupt(name, "it is missing")
        if len(blob) != record.n_bytes:
            raise self._corrupt(name, f"it has {len(blob)} bytes instead of {record.n_bytes}")
        if checksum_of(np.frombuffer(blob, np.uint8)) != record.crc32c:
            raise self._corrupt(name, "its checksum does not match")
        return blob, {**record.meta, DIGEST: record.crc32c}

    def _record(self, stem: str) -> StateRecord:
        data = self._folder.read(f"{stem}.json")
        if data is None:
            raise CheckpointNotFoundError(f"no state is stored at {self.url}/{stem}")
        try:
            return StateRecord.read(data, stem)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._corrupt(f"{stem}.json", str(error)) from None

    def _blob_of(self, stem: str) -> str | None:
        """Return the path of the state's file; ``None`` without a readable record."""
        try:
            return self._recorded(stem)
        except CheckpointError:
            return None

    def _recorded(self, stem: str) -> str:
        """Return the path of the state's file; raise an error without a readable record."""
        return f"{stem.rpartition('/')[0]}/{self._record(stem).blob}"

    def _wrong_kind(self, place: str, kind: str) -> CheckpointCorruptError:
        other = "folder" if kind == "file" else "file"
        return CheckpointCorruptError(
            f"{self.url}{place} is a {kind.replace('directory', 'folder')} and no {other}: remove "
            "it, and go on from an earlier state"
        )

    def _corrupt(self, name: str, reason: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{self.url}/{name}: {reason}; delete this state and continue from an earlier one"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(CheckpointStore, sync=self.sync), (self._folder,)

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"


def _folder_of(trial: int) -> str:
    return f"trial-{_number('trial', trial)}"


def _stem(trial: int, epoch: int, position: int, *, partial: bool = False) -> str:
    stem = f"epoch-{_number('epoch', epoch)}-position-{_number('position', position)}"
    return f"{_folder_of(trial)}/{stem}{'.partial' if partial else ''}"


def _scores_stem(trial: int, kind: Scoring, number: int, shard: int) -> str:
    name = f"scores-{kind}-{_number(kind, number)}-shard-{_number('shard', shard)}"
    return f"{_folder_of(trial)}/{name}"


def _check_stem(trial: int, number: int) -> str:
    return f"{_folder_of(trial)}/check-{_number('check', number)}"


def _records_first(name: str) -> bool:
    """Sort records first: a state without a record is ignored, the reverse is damage."""
    return not name.endswith(".json")


def _number(what: str, value: object) -> str:
    """Pad a number so that names sort. The check also keeps keys inside the store's folder."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise CheckpointError(f"{what} is {value!r}; it must be a non-negative integer")
    return f"{value:06d}"


def _body(stem: str, blob: Bytes, meta: Mapping[str, Any]) -> tuple[str, bytes, str]:
    """Return the state's file name, the record that names it, and the state's checksum."""
    data = np.frombuffer(blob, np.uint8)
    checksum = checksum_of(data)
    name = f"{stem}.{checksum}.safetensors"
    record = StateRecord(name.rpartition("/")[2], data.nbytes, checksum, dict(meta))
    if DIGEST in meta:
        raise CheckpointError(f"{stem}: meta has a {DIGEST!r}; that name is reserved")
    try:
        return name, record.as_json(stem), checksum
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{stem}: meta is no JSON: {error}") from None
