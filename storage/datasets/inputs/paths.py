"""The files that a path, a URL or a list of them names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import fsspec

from dagsel.errors import DatasetInputError
from dagsel.storage.urls import without_credentials

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


def find_files(paths: Any, suffixes: tuple[str, ...]) -> list[str]:
    """List the files of a kind at paths or URLs: files, or all of a folder.

    Raises
    ------
    DatasetInputError
        If nothing is there.
    """
    found = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        for each in expand_braces(os.fspath(path)):
            found += _find(each, suffixes)
    return found


def _find(path: str, suffixes: tuple[str, ...]) -> list[str]:
    fs, place = fsspec.core.url_to_fs(path)
    if fs.isdir(place):
        found = sorted(fs.find(place))
    elif "*" in place:
        found = sorted(fs.glob(place))
    else:
        found = [place] if path.endswith(suffixes) or fs.exists(place) else []
    if not found and not fs.exists(place):
        raise DatasetInputError(f"nothing is at {without_credentials(path)}; check the path")
    names = [name for name in found if name.endswith(suffixes)]
    return [fs.unstrip_protocol(name) for name in names]


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


def how_to_write(url: str) -> str:
    """Return the call that makes a data set of a file.

    Examples
    --------
    >>> how_to_write("x.npy")
    'ShardedDataset.write("data.zarr", {"x": ..., "y": ...}, n_shards=8)'
    """
    is_csv = url.endswith((".csv", ".csv.gz"))
    source = f"pandas.read_csv({url!r})" if is_csv else repr(url)
    if not (is_csv or url.endswith(KNOWN)):
        source = '{"x": ..., "y": ...}'
    # Without them each column is an array of its own.
    columns = ', columns={"x": [...], "y": "..."}' if is_csv or url.endswith(PARQUET) else ""
    return f'ShardedDataset.write("data.zarr", {source}{columns}, n_shards=8)'
