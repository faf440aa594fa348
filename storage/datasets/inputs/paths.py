"""The files that a path, a URL or a list of them names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from mimetypes import guess_type
from typing import Any
from urllib.parse import unquote

import fsspec

from dagsel.errors import DagselError, DatasetInputError
from dagsel.storage.urls import said_of, without_credentials

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_braces(path: str) -> list[str]:
    """Return the paths that one with braces stands for.

    Examples
    --------
    >>> expand_braces("a-{08..10}.tar"), expand_braces("{x,y}/{1..2}")
    (['a-08.tar', 'a-09.tar', 'a-10.tar'], ['x/1', 'x/2', 'y/1', 'y/2'])
    """
    found = _BRACES.search(path)
    if found is None:
        return [path]
    inner = found.group(1)
    if span := _RANGE.fullmatch(inner):
        first, last = span.groups()
        width = len(first) if first.startswith("0") else 0
        words = [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    else:
        words = inner.split(",")
    head, tail = path[: found.start()], path[found.end() :]
    return [made for word in words for made in expand_braces(head + word + tail)]


@contextmanager
def reading_file(file: str) -> Iterator[None]:
    """Name a file in the errors of its store, which are of many kinds, without the URL's secrets.

    Examples
    --------
    >>> with reading_file("https://host/x.tar?sig=4711"):
    ...     raise OSError("403: https://host/x.tar?sig=4711")
    Traceback (most recent call last):
    ...
    dagsel.errors.DatasetInputError: https://host/x.tar cannot be read: 403: https://host/x.tar?***
    """
    try:
        yield
    except (DagselError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001
        told = f"{without_credentials(file)} cannot be read: {said_of(file, error)}"
        raise DatasetInputError(told) from None


def find_files(paths: Any, suffixes: tuple[str, ...]) -> list[str]:
    """List the files of a kind at paths or URLs: files, or all of a folder.

    Raises
    ------
    DatasetInputError
        If nothing is there, or some of several paths have files of the kind and others have not.
    """
    found = list[tuple[str, list[str]]]()
    for path in _given(paths):
        with reading_file(path):
            found.append((path, _find(path, suffixes)))
    without = [path for path, files in found if not files]
    if 0 < len(without) < len(found):
        raise DatasetInputError(
            f"{without_credentials(without[0])} has no {suffixes[0]} file, and other paths beside "
            "it have; give files of one kind"
        )
    return [file for _, files in found for file in files]


def _given(paths: Any) -> Iterator[str]:
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        yield from expand_braces(os.fspath(path))


def _find(path: str, suffixes: tuple[str, ...]) -> list[str]:
    fs, place = fsspec.core.url_to_fs(path)
    if fs.isdir(place):
        marks = (".", "_") if suffixes == PARQUET else (".",)  # as pyarrow and pandas
        names = sorted(fs.find(place))
        found = [name for name in names if not _is_hidden(name[len(place) :], marks)]
    elif "*" in place:
        found = sorted(fs.glob(place))
    else:
        found = [place] if path.endswith(suffixes) or fs.exists(place) else []
    if not found and not fs.exists(place):
        raise DatasetInputError(f"nothing is at {without_credentials(path)}; check the path")
    names = [name for name in found if name.endswith(suffixes)]
    return [fs.unstrip_protocol(name) for name in names]


def _is_hidden(name: str, marks: tuple[str, ...]) -> bool:
    """Whether a file, or a folder that it is in, is marked as no data by its name.

    Examples
    --------
    >>> _is_hidden("/kind=cat/0.parquet", (".", "_")), _is_hidden("/_temporary/0.parquet", ("_",))
    (False, True)
    """
    return any(part.startswith(marks) for part in name.split("/"))


def partition_of(file: str, paths: Any) -> dict[str, str]:
    """Return what the folders ``key=value`` below the paths that were given say of a file.

    Examples
    --------
    >>> partition_of("file:///d/kind=a%20b/x.parquet", "/d")
    {'kind': 'a b'}
    """
    for path in _given(paths):
        fs, place = fsspec.core.url_to_fs(path)
        fixed, has_pattern, _ = place.partition("*")
        root = fs.unstrip_protocol(fixed.rpartition("/")[0] if has_pattern else fixed)
        if file.startswith(f"{root}/"):
            folders = file[len(root) + 1 :].split("/")[:-1]
            pairs = (folder.partition("=") for folder in folders if "=" in folder)
            return {unquote(key): unquote(value) for key, _, value in pairs}
    return {}


def are_paths(source: Any) -> bool:
    """Whether something is a path or a list of paths of files that we read."""
    if isinstance(source, str | os.PathLike):
        return True
    is_list = isinstance(source, Sequence) and len(source) > 0
    return is_list and all(
        isinstance(path, os.PathLike) or (isinstance(path, str) and path.endswith(KNOWN))
        for path in source
    )


PARQUET = (".parquet", ".pq")
TAR = (".tar", ".tar.gz", ".tgz")
KNOWN = PARQUET + TAR


def how_to_write(url: str, inside: Mapping[str, str] | None = None) -> str:
    """Return the call that makes a data set of a file, or of a folder with this `inside`.

    Examples
    --------
    >>> how_to_write("x.npy")
    'ShardedDataset.write("data.zarr", {"x": ..., "y": ...}, n_shards=8)'
    >>> how_to_write("photos", {"cat": "directory", "dog": "directory"})  # doctest: +ELLIPSIS
    'ShardedDataset.write("data.zarr", ImageFolder(...), n_shards=8), for images in a folder ...'
    """
    names = [url] if inside is None else [*inside]
    is_csv = url.endswith((".csv", ".csv.gz"))
    source = f"pandas.read_csv({url!r})" if is_csv else repr(url)
    are_folders = inside is not None and {*inside.values()} == {"directory"}
    if are_folders or any((guess_type(name)[0] or "").startswith("image/") for name in names):
        made = f'ShardedDataset.write("data.zarr", ImageFolder({url!r}), n_shards=8)'
        return f"{made}, for images in a folder for each class"
    if not (is_csv or any(name.endswith(KNOWN) for name in names)):
        source = '{"x": ..., "y": ...}'
    # Without them each column is an array of its own.
    has_columns = is_csv or any(name.endswith(PARQUET) for name in names)
    columns = ', columns={"x": [...], "y": "..."}' if has_columns else ""
    return f'ShardedDataset.write("data.zarr", {source}{columns}, n_shards=8)'
