"""Commands to the driver of a run that come through the run's folder, and its answers.

::

    control.json               the token; only its owner reads it; there while a driver listens
    commands/ID.json           a command, with a mark that only who knows the token can make
    commands/ID.answer.json    what came of it

A command is performed once: the journal keeps its identifier, and one that has an answer is not
taken again. Names begin with the time, so that commands are taken in the order they were given.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dagsel.errors import RunDirError
from dagsel.storage.files import Folder
from dagsel.storage.runs.lock import out_of_reach

FILE = "control.json"
FORMAT = "dagsel.control"
VERSION = 1
#: A command is no longer than this; whatever is was not written by dagsel.
LONGEST = 1 << 20
_FOLDER = "commands"
_COMMAND = re.compile(r"([0-9a-f]{16}-[0-9a-f]{16})\.json")
_TOKEN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Letter:
    """A command as it lies in the folder: its JSON, or why it is none."""

    id: str
    command: Any = None
    why_not: str = ""


class Control:
    """The part of a run's folder through which other processes steer it.

    Parameters
    ----------
    folder
        The run's.

    Examples
    --------
    >>> control = Control(Folder("memory://steered-run", error=RunDirError))
    >>> token = control.open()
    >>> id_ = control.post({"is": "StopTrial", "trial": 3}, token)
    >>> [letter.command for letter in control.letters(token)]
    [{'is': 'StopTrial', 'trial': 3}]
    >>> control.answer(id_, {"trial": None})
    >>> list(control.letters(token)), control.take_answer(id_)
    ([], {'trial': None})
    >>> control.close()
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk that this machine reaches by paths."""
        return self._folder.is_local

    # ---- the driver's side

    def open(self) -> str:
        """Return the token that commands are marked with: the one that is there, or a new one.

        On a disk it is taken only from a file that its owner alone reads, who is the caller:
        somebody else may have laid down any other one, or may know it.
        """
        try:
            with contextlib.suppress(RunDirError):
                if found := self._own_token() if self.is_local else self.token():
                    return found
            token = secrets.token_hex(32)
            self._write({"format": FORMAT, "version": VERSION, "token": token})
        except OSError as error:
            raise out_of_reach(self._folder, "write", error) from None
        return token

    def close(self) -> None:
        """Take the token away: nobody listens any more."""
        self._folder.remove_file(FILE)
        if not self._folder.names(_FOLDER):
            self._folder.remove_if_empty(_FOLDER)

    def letters(self, token: str) -> Iterator[Letter]:
        """Yield the commands that have no answer, in the order they were given."""
        kinds = self._folder.kinds(_FOLDER)
        for name in sorted(kinds):
            found = _COMMAND.fullmatch(name)
            if found is None or kinds[name] != "file":
                continue
            if f"{found[1]}.answer.json" in kinds:  # the driver died before it removed it
                self._folder.remove_file(f"{_FOLDER}/{name}")
            elif (letter := self._read(found[1], token)) is not None:
                yield letter

    def answer(self, id_: str, body: Mapping[str, Any]) -> None:
        """Write what came of a command, and remove it."""
        data = json.dumps(dict(body)).encode()
        self._folder.replace(f"{_FOLDER}/{id_}.answer.json", data, sync=True)
        self._folder.remove_file(f"{_FOLDER}/{id_}.json")

    # ---- the side of those who command

    def token(self) -> str | None:
        """Read the token; None if no driver listens.

        Raises
        ------
        RunDirError
            If it is another's, damaged, or from a newer version.
        """
        try:
            data = self._folder.read(FILE)
        except PermissionError:
            raise RunDirError(
                f"{self._place} is readable to {self._owner()} alone, who began the search: give "
                "the token that stands in it, token=..., or let them command"
            ) from None
        return None if data is None else self._token_in(data)

    def post(self, command: Any, token: str) -> str:
        """Lay a command there for the driver; return its identifier."""
        id_ = f"{time.time_ns():016x}-{uuid.uuid4().hex[:16]}"
        said = json.loads(json.dumps(command))  # as the driver will read it
        body = {"command": said, "mark": _mark(token, id_, said)}
        try:
            self._folder.create(f"{_FOLDER}/{id_}.json", json.dumps(body).encode(), sync=True)
        except OSError as error:
            raise out_of_reach(self._folder, "write", error) from None
        return id_

    def take_answer(self, id_: str) -> dict[str, Any] | None:
        """Read what came of a command, and remove it; None if nothing has yet.

        Raises
        ------
        RunDirError
            If it cannot be read.
        """
        key = f"{_FOLDER}/{id_}.answer.json"
        data = self._folder.read(key)
        if data is None:
            return None
        self._folder.remove_file(key)
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(body := json.loads(data), dict):
                return body
        raise RunDirError(
            f"{self._folder.url}/{key} is damaged, or not dagsel's, so nobody knows what came of "
            "the command; look at the search, and give the command again if it was not performed"
        )

    def withdraw(self, id_: str, token: str) -> bool:
        """Take a command back that no driver takes any more, as its token is gone; say whether."""
        with contextlib.suppress(RunDirError):
            if self.token() != token:
                self._folder.remove_file(f"{_FOLDER}/{id_}.json")
                return True
        return False

    # ----

    @property
    def _place(self) -> str:
        return f"{self._folder.url}/{FILE}"

    def _own_token(self) -> str | None:
        with contextlib.suppress(OSError):
            fd = os.open(self._folder.own(FILE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                about = os.fstat(fd)
                is_ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
                if is_ours and not about.st_mode & 0o077:
                    return self._token_in(os.read(fd, LONGEST))
            finally:
                os.close(fd)
        return None

    def _token_in(self, data: bytes) -> str:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise RunDirError(
                f"{self._place} is damaged, or not dagsel's; end the search and resume it to get a "
                "new one"
            )
        if body.get("version") != VERSION:
            raise RunDirError(
                f"{self._place} was written by another dagsel (control format "
                f"{body.get('version')}; this one knows {VERSION}): use the dagsel that drives "
                "the search"
            )
        token = body.get("token")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise RunDirError(
                f"{self._place} is damaged: it holds no token; end the search and resume it to "
                "get a new one"
            )
        return token

    def _read(self, id_: str, token: str) -> Letter | None:
        try:
            file, size = self._folder.open_read(f"{_FOLDER}/{id_}.json")
        except FileNotFoundError:
            return None
        with file:
            if size > LONGEST:
                return Letter(
                    id_, why_not=f"the command has {size} bytes, and may have {LONGEST}; shorten it"
                )
            data = file.read()
        try:
            body = json.loads(data)
            command, mark = body["command"], body["mark"]
            is_ours = hmac.compare_digest(str(mark), _mark(token, id_, command))
        except (ValueError, TypeError, KeyError, RecursionError):
            return Letter(id_, why_not="the file is no command of dagsel's; use dagsel.attach")
        if not is_ours:
            return Letter(
                id_,
                why_not=f"the command's token is not that of {self._folder.url}/{FILE}; "
                "give the one that stands there",
            )
        return Letter(id_, command)

    def _write(self, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        if not self._folder.is_local:  # who may read it is the store's affair
            self._folder.replace(FILE, data)
            return
        path = self._folder.own(FILE)
        aside = path.with_name(f".{FILE}.{uuid.uuid4().hex}")
        try:
            with os.fdopen(
                os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(data)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def _owner(self) -> str:
        with contextlib.suppress(OSError, KeyError):
            return self._folder.own(FILE).owner()
        return "its owner"


def _mark(token: str, id_: str, command: Any) -> str:
    said = json.dumps([id_, command], sort_keys=True).encode()
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()
