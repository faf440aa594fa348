"""The folder to which `Run.export` writes models, and which a later export may replace."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dagsel.errors import SearchError
from dagsel.storage.files import Folder, Url

_MODEL = re.compile(r"[0-9]+-trial-[0-9]+")  # the folder of a model
_ABOUT = "metrics.json"  # there; it lists the files that the export has written


@dataclass(frozen=True, slots=True)
class Exported:
    """What is written of one model: what ``metrics.json`` says, and the other files."""

    about: dict[str, Any]
    files: dict[str, bytes]


class ExportFolder:
    """A folder of models: a new one, an empty one, or one that an export has written.

    Raises
    ------
    SearchError
        If something is in it and `overwrite` is False, or something that no export has written.
    """

    def __init__(self, folder: Url, *, overwrite: bool) -> None:
        self._folder = Folder(folder, error=SearchError)
        if not overwrite and self._folder.names():
            raise SearchError(
                f"{self.url} is not empty; give another folder to write models to, or "
                "overwrite=True to replace those of an earlier export"
            )
        self._former = {
            name: self._files(name, kind) for name, kind in self._folder.kinds().items()
        }

    @property
    def url(self) -> str:
        """Where the models are."""
        return self._folder.url

    def write(self, models: Mapping[str, Exported]) -> None:
        """Replace what an earlier export has written by these models.

        The list of a model's files is there while any of them is, so that what is interrupted can
        be replaced, too.
        """
        for name, old in self._former.items():
            for those in (set(old) - {_ABOUT}, {_ABOUT}):
                pattern = "|".join(map(re.escape, those)) or r"(?!)"
                self._folder.remove_own(name, re.compile(pattern))
        for name, model in models.items():
            about = model.about | {"files": sorted([*model.files, _ABOUT])}
            self._folder.replace(f"{name}/{_ABOUT}", json.dumps(about, indent=1).encode())
            for file, content in model.files.items():
                self._folder.replace(f"{name}/{file}", content)

    def _files(self, name: str, kind: str) -> list[str]:
        """Return the files of one model; raise if there is anything else."""
        keys, files = [name], list[str]()
        if kind == "directory" and _MODEL.fullmatch(name):
            keys = self._folder.keys(name)
            with suppress(ValueError, TypeError, KeyError):
                about = json.loads(self._folder.read(f"{name}/{_ABOUT}") or "")
                files = [str(file) for file in about["files"]]
        if others := sorted(set(keys) - set(files)):
            raise SearchError(
                f"{self.url} has {others[0]!r} in it, which no export has written; give another "
                "folder, or remove it yourself"
            )
        return files
