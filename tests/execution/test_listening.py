"""A search goes on though nobody can write to its folder's ear."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import ANY

import pytest

from dagsel.driver.inbox import Inbox
from dagsel.errors import RunDirError
from dagsel.listening import Listener
from dagsel.storage.files import Folder
from dagsel.storage.runs.control import Control
from tests.waiting import wait_until

ID = f"{'0' * 16}-{'a' * 16}"


def test_where_no_token_can_be_written_nobody_steers_and_the_search_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with Listener(Control(Folder(tmp_path / "file", error=RunDirError)), Inbox()):
        pass
    assert "dagsel.attach cannot steer this search" in caplog.text


@pytest.mark.parametrize(
    "command",
    [
        {"is": "SetLimits", "deadline_s": 1.0},  # the driver's own
        {"is": "StopTrial", "trial": "all"},
        {"is": "AddTrial"},
        ["StopTrial", 3],
    ],
)
def test_what_is_no_command_is_answered_and_never_reaches_the_driver(
    tmp_path: Path, command: object
) -> None:
    control, inbox = Control(Folder(tmp_path, error=RunDirError)), Inbox()
    with Listener(control, inbox):
        token = control.token()
        assert token is not None
        id_ = control.post(command, token)
        answer = tmp_path / "commands" / f"{id_}.answer.json"
        wait_until(answer.exists, "an answer")
    assert control.take_answer(id_) == {"error": "DagselError", "text": ANY}
    assert inbox.next() is None


def test_a_command_that_comes_at_the_end_is_answered(tmp_path: Path) -> None:
    control, inbox = Control(Folder(tmp_path, error=RunDirError)), Inbox()
    with Listener(control, inbox) as listener:
        token = control.token()
        assert token is not None
        listener._is_over.set()  # it looks once more, when the search has ended
        listener._thread.join()
        id_ = control.post({"is": "StopTrial", "trial": 0}, token)
        inbox.close()
    answer = control.take_answer(id_)
    assert answer is not None
    assert answer["text"] == "the search has ended, so it takes no command"
