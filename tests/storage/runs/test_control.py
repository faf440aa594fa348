"""Commands through a run's folder: which are taken, and what strangers' files come to."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import RunDirError
from dagsel.storage.files import Folder
from dagsel.storage.runs.control import LONGEST, Control, Letter

STOP = {"is": "StopTrial", "trial": 3}
NAME = f"{'0' * 16}-{'a' * 16}"


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control(Folder(tmp_path, error=RunDirError))


def test_the_token_of_a_driver_that_was_killed_is_that_of_the_next_one(control: Control) -> None:
    token = control.open()
    assert control.open() == token
    control.close()
    assert control.token() is None
    assert control.open() != token


def as_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def as_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere.json")))


def as_readable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o640)


def as_pipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()
    os.mkfifo(path)  # whoever opened it would wait for ever


@pytest.mark.parametrize("plant", [as_others, as_link, as_readable, as_pipe])
def test_a_token_that_somebody_else_may_know_is_replaced(
    control: Control, tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, file = control.open(), tmp_path / "control.json"
    plant(file, monkeypatch)
    kept = (tmp_path / "elsewhere.json").read_bytes() if file.is_symlink() else None
    token = control.open()
    assert token != known
    assert control.token() == token
    assert stat.S_ISREG(file.lstat().st_mode)
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    assert kept is None or (tmp_path / "elsewhere.json").read_bytes() == kept


def test_commands_are_taken_in_their_order_and_each_is_answered(control: Control) -> None:
    token = control.open()
    ids = [control.post({"is": "StopTrial", "trial": n}, token) for n in range(5)]
    letters = [*control.letters(token)]
    assert [letter.id for letter in letters] == ids
    assert [letter.command["trial"] for letter in letters] == [0, 1, 2, 3, 4]
    control.answer(ids[2], {"trial": None})
    assert [letter.id for letter in control.letters(token)] == [*ids[:2], *ids[3:]]
    assert control.take_answer(ids[2]) == {"trial": None}
    assert control.take_answer(ids[2]) is None


def test_an_answered_command_is_not_taken_again(control: Control, tmp_path: Path) -> None:
    """A driver was killed before it removed it: it told the user that it was refused."""
    token = control.open()
    command = tmp_path / "commands" / f"{control.post(STOP, token)}.json"
    data = command.read_bytes()
    control.answer(command.stem, {"error": "SearchError", "text": "no"})
    command.write_bytes(data)
    assert [*control.letters(token)] == []
    assert not command.exists()


def test_a_command_of_another_name_or_of_other_words_is_not_taken(
    control: Control, tmp_path: Path
) -> None:
    token = control.open()
    written = tmp_path / "commands" / f"{control.post(STOP, token)}.json"
    body = json.loads(written.read_text())
    written.rename(written.with_name(f"{NAME}.json"))
    (again,) = control.letters(token)
    assert again.why_not.startswith("the command's token is not that of")
    body["command"]["trial"] = 4
    written.write_text(json.dumps(body))
    assert all("token is not that of" in letter.why_not for letter in control.letters(token))


@given(
    data=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["command", "mark", "x"]), inner, max_size=3)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_bytes_are_a_command(data: bytes) -> None:
    folder = Folder("memory://control-bytes", error=RunDirError)
    control = Control(folder)
    folder.replace(f"commands/{NAME}.json", data)
    (letter,) = control.letters(control.open())
    assert letter.command is None
    assert letter.why_not


@pytest.mark.parametrize("data", [b"{", b"[]", b"[" * 10**5])
def test_an_answer_that_is_none_is_named(control: Control, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands" / f"{NAME}.answer.json").write_bytes(data)
    with pytest.raises(RunDirError, match=rf"commands/{NAME}.answer.json is damaged"):
        control.take_answer(NAME)


def test_other_peoples_files_stay_and_long_ones_are_not_read(
    control: Control, tmp_path: Path
) -> None:
    token = control.open()
    there = tmp_path / "commands"
    (there / f"{NAME[:-1]}b.json").mkdir(parents=True)
    (there / "notes.txt").write_text("mine")
    os.mkfifo(there / f"{NAME[:-1]}c.json")  # whoever opened it would wait for ever
    (there / f"{NAME}.json").write_bytes(b"[" * (LONGEST + 1))
    (letter,) = control.letters(token)
    assert letter == Letter(NAME, why_not=letter.why_not)
    assert "and may have" in letter.why_not
    control.answer(NAME, {"error": "DagselError", "text": letter.why_not})
    control.take_answer(NAME)
    control.close()
    assert (there / "notes.txt").read_text() == "mine"


def test_nothing_is_written_through_a_link(control: Control, tmp_path: Path) -> None:
    token = control.open()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "commands").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match="is a symbolic link"):
        control.post(STOP, token)
    assert not [*(tmp_path / "elsewhere").iterdir()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "damaged, or not dagsel's"),
        ("{}", "damaged, or not dagsel's"),
        ('{"format": "dagsel.control", "version": 2}', "written by another dagsel"),
        ('{"format": "dagsel.control", "version": 1, "token": 3}', "holds no token"),
    ],
)
def test_a_damaged_token_is_named_and_a_driver_writes_a_new_one(
    control: Control, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "control.json").write_text(text)
    with pytest.raises(RunDirError, match=says):
        control.token()
    assert control.open() == control.token()
