"""Writes a data set as a whole or not at all.

First a mark names the folder that is being filled. The manifest is written last, and then the
replaced folder is removed. So after an interruption `open` finds the old data set or the new one,
or that a write did not end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from dagsel.console import readable_size
from dagsel.errors import DatasetError, DatasetExistsError, DatasetFormatError
from dagsel.storage.datasets.manifest import (
    FOLDER_NAME,
    FORMAT,
    MANIFEST,
    OWN_FILE,
    UNFINISHED,
    VERSION,
    Manifest,
)
from dagsel.storage.datasets.plan import WritePlan
from dagsel.storage.datasets.shuffled_write import write_shards
from dagsel.storage.datasets.sources import is_in_memory
from dagsel.storage.files import Folder

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write(folder: Folder, plan_write: Callable[[str], WritePlan], *, overwrite: bool) -> Manifest:
    """Plan a write for a new folder name and perform it; see `ShardedDataset.write`."""
    new = f"data-{uuid.uuid4().hex[:16]}"
    stale, mark = existing_data(folder, overwrite=overwrite)
    plan = plan_write(new)
    # A plan may take minutes, in which another write may end. Its nameless files may show in the
    # folder on NFS, so the folder need not be empty.
    if any(folder.read(name) is not None for name in (MANIFEST, UNFINISHED)):
        stale, mark = existing_data(folder, overwrite=overwrite)
    try:
        body = {"format": FORMAT, "version": VERSION, "unfinished": [new, *stale]}
        folder.replace(UNFINISHED, json.dumps(body, indent=1).encode())
        manifest = write_shards(folder, plan)
        if unfinished_folders(folder.read(UNFINISHED))[:1] != (new,):
            raise DatasetExistsError(
                f"another write to {folder.url} has begun meanwhile; wait for it, or choose "
                "another URL"
            )
        folder.replace(MANIFEST, manifest.to_json())
    except BaseException as error:
        if not _is_current(folder, new):
            _undo(folder, new, mark, was_empty=not stale)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise DatasetError(_no_room(folder, plan, error)) from None
            raise
        # The last step got through although it raised: the data set is whole.
        if not isinstance(error, Exception):
            raise
    # The rest of the old data set only takes space. As long as the mark names it, the next write
    # removes it.
    with contextlib.suppress(Exception):
        for name in stale:
            folder.remove_own(name, OWN_FILE)
        folder.remove_file(UNFINISHED)
    return manifest


def existing_data(folder: Folder, *, overwrite: bool) -> tuple[tuple[str, ...], bytes | None]:
    """Find what a write replaces; raise a `DatasetExistsError` if it may not.

    Returns the folders to remove after it, and the mark of an unfinished write.
    """
    if folder.is_file():
        raise DatasetExistsError(f"{folder.url} is a file; choose a URL where nothing is yet")
    names = folder.names()
    if not names:
        return (), None
    data, mark = folder.read(MANIFEST), folder.read(UNFINISHED)
    stale = unfinished_folders(mark)
    if data is None and not stale:
        raise DatasetExistsError(
            f"{folder.url} is not empty and holds no data set (first found: {names[0]!r}); it is "
            "never overwritten: choose another URL or empty it yourself"
        )
    if data is not None:
        try:
            current = Manifest.from_json(data, folder.url).folder
        except DatasetFormatError as error:
            raise DatasetExistsError(
                f"{folder.url} is not overwritten, since it cannot be told whose it is ({error}); "
                "choose another URL or empty it yourself"
            ) from None
        stale = tuple(dict.fromkeys([current, *stale]))
    if not overwrite:
        what = "a data set" if data is not None else "what a write that did not end has left"
        raise DatasetExistsError(
            f"{folder.url} holds {what}; pass overwrite=True to replace it, or choose another URL"
        )
    return stale, mark


def unfinished_folders(mark: bytes | None) -> tuple[str, ...]:
    """Read from a mark which folders an unfinished write has left, its own first."""
    try:
        body = json.loads(mark or b"null")
        names = body["unfinished"] if body["format"] == FORMAT else []
        # A name from a file becomes the argument of a removal: only ours pass.
        return tuple(name for name in names if FOLDER_NAME.fullmatch(name))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def _is_current(folder: Folder, new: str) -> bool:
    try:
        return Manifest.from_json(folder.read(MANIFEST) or b"", folder.url).folder == new
    except Exception:  # noqa: BLE001  # what cannot be read is not current
        return False


def _no_room(folder: Folder, plan: WritePlan, error: OSError) -> str:
    """Say what a write needs that found no room; what it had written is removed."""
    n_bytes, largest = plan.manifest.object_bytes()
    streams = [stream for entry in plan.inputs for _, stream in entry.source.streams]
    needs_scratch = not all(map(is_in_memory, streams))
    where = folder.path() if folder.is_local else tempfile.gettempdir()
    scratch = f", and as much again in {where} while it is written" if needs_scratch else ""
    cure = "make room there, or choose another URL"
    if not folder.is_local:
        cure = "make room there, or set TMPDIR to a folder with room"
    if error.errno == errno.EFBIG:
        cure = (
            f"a file takes up to {readable_size(largest)}: raise the limit of a file's size "
            "(ulimit -f), or give more shards"
        )
    return (
        f"{folder.url}: {os.strerror(error.errno or 0)} while the data set was written; it takes "
        f"{readable_size(n_bytes)}{scratch}, and {readable_size(_free_bytes(where))} are free "
        f"in {where}; nothing of it is left: {cure}"
    )


def _free_bytes(path: str) -> int:
    """Return the free bytes of the disk of a path that may not be there."""
    place = Path(path)
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _undo(folder: Folder, new: str, mark: bytes | None, *, was_empty: bool) -> None:
    """Remove what a failed write has written; if that fails too, the mark stays."""
    with contextlib.suppress(Exception):
        folder.remove_own(new, OWN_FILE)
        if unfinished_folders(folder.read(UNFINISHED))[:1] != (new,):
            return  # Another write has taken over.
        if mark is not None:
            folder.replace(UNFINISHED, mark)
            return
        if was_empty:
            folder.remove_file("zarr.json")
        folder.remove_file(UNFINISHED)
        if was_empty:
            folder.remove_if_empty()
