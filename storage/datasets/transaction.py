"""Writing a data set all or nothing.

A mark says first which folder is being filled, the manifest says last that it is full, the folder
that it replaces goes after that. Whatever happens between two of these steps, what `open` finds is
the old data set or the new one, whole, or that a write did not end.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from dataclasses import dataclass

from dagsel.errors import DatasetExistsError, DatasetFormatError
from dagsel.storage.datasets.manifest import FORMAT, MANIFEST, UNFINISHED, VERSION, Manifest
from dagsel.storage.datasets.plan import plan_write
from dagsel.storage.datasets.shuffled_write import pour_all
from dagsel.storage.datasets.sources import Arrays
from dagsel.storage.files import Folder

_FOLDER = re.compile(r"data-[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True)
class Site:
    """What a write finds where it is to write.

    Parameters
    ----------
    is_empty
        Whether nothing is there.
    stale
        Folders that go when the new data set exists.
    mark
        Bytes of the mark that an unfinished write has left.
    """

    is_empty: bool
    stale: tuple[str, ...] = ()
    mark: bytes | None = None


def write(
    folder: Folder,
    arrays: Arrays,
    *,
    n_shards: int,
    validation: float | Arrays,
    seed: int,
    overwrite: bool,
) -> Manifest:
    """Write a data set into a folder; see `ShardedDataset.write`.

    Returns
    -------
    manifest
        Of the data set, which exists now.
    """
    new = f"data-{uuid.uuid4().hex[:16]}"
    plan = plan_write(arrays, n_shards=n_shards, validation=validation, seed=seed, folder=new)
    site = survey(folder, overwrite=overwrite)
    try:
        body = {"format": FORMAT, "version": VERSION, "unfinished": [new, *site.stale]}
        folder.replace(UNFINISHED, json.dumps(body, indent=1).encode())
        pour_all(folder, plan)
        if marked(folder.read(UNFINISHED))[:1] != (new,):
            raise DatasetExistsError(f"another write to {folder.url} has begun meanwhile")
        folder.replace(MANIFEST, plan.manifest.to_json())
    except BaseException as error:
        if not _is_current(folder, new):
            _withdraw(folder, new, site)
            raise
        # The last step got through although it raised: the data set is whole.
        if not isinstance(error, Exception):
            raise
    # What is left of the old one costs room, nothing else, and as long as the mark names it the
    # next write clears it away.
    with contextlib.suppress(Exception):
        for name in site.stale:
            folder.remove(name)
        folder.remove(UNFINISHED)
    return plan.manifest


def survey(folder: Folder, *, overwrite: bool) -> Site:
    """Find what a write replaces; refuse what is not ours, or ours and not to be replaced.

    Raises
    ------
    DatasetExistsError
        Naming what is there.
    """
    if folder.is_file():
        raise DatasetExistsError(f"{folder.url} is a file; choose a URL where nothing is yet")
    names = folder.names()
    if not names:
        return Site(is_empty=True)
    data, mark = folder.read(MANIFEST), folder.read(UNFINISHED)
    stale = marked(mark)
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
    return Site(is_empty=False, stale=stale, mark=mark)


def marked(mark: bytes | None) -> tuple[str, ...]:
    """Read from a mark which folders a write that did not end has left, its own first."""
    try:
        body = json.loads(mark or b"null")
        names = body["unfinished"] if body["format"] == FORMAT else []
        # A name from a file becomes the argument of a removal: only ours pass.
        return tuple(name for name in names if _FOLDER.fullmatch(name))
    except (ValueError, TypeError, KeyError):
        return ()


def _is_current(folder: Folder, new: str) -> bool:
    try:
        return Manifest.from_json(folder.read(MANIFEST) or b"", folder.url).folder == new
    except Exception:  # noqa: BLE001  # what cannot be read is not current
        return False


def _withdraw(folder: Folder, new: str, site: Site) -> None:
    """Take back what a failed write has written; where that fails too, the mark stays and tells."""
    with contextlib.suppress(Exception):
        folder.remove(new)
        if marked(folder.read(UNFINISHED))[:1] != (new,):
            return  # Another write has taken over.
        if site.mark is not None:
            folder.replace(UNFINISHED, site.mark)
            return
        if site.is_empty:
            folder.remove("zarr.json")
        folder.remove(UNFINISHED)
        if site.is_empty:
            folder.remove_if_empty()
