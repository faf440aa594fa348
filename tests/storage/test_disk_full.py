"""A write waits while a disk is full, only then, and only so long."""

from __future__ import annotations

import errno
import logging
from typing import Any

import pytest

from dagsel.storage.disk import retry_while_full


def failing(*numbers: int) -> tuple[Any, list[int]]:
    left = list(numbers)

    def write() -> str:
        if left:
            raise OSError(left.pop(0), "no")
        return "written"

    return write, left


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_it_waits_for_room(number: int, caplog: pytest.LogCaptureFixture) -> None:
    write, _ = failing(number, number, number)
    pauses: list[float] = []
    with caplog.at_level(logging.WARNING, "dagsel"):
        assert retry_while_full(write, "s3://b/run", sleep=pauses.append) == "written"
    assert len(pauses) == 3
    assert pauses == sorted(pauses)
    assert len(caplog.messages) == 2, "it warns once, and says when it goes on"
    assert all("s3://b/run" in message for message in caplog.messages)


def test_it_gives_up_in_time() -> None:
    write, left = failing(*[errno.ENOSPC] * 1000)
    pauses: list[float] = []
    with pytest.raises(OSError, match="no"):
        retry_while_full(write, "a", patience_s=30.0, sleep=pauses.append)
    assert 30.0 <= sum(pauses) < 36.0
    assert left


def test_other_errors_are_not_waited_for() -> None:
    write, left = failing(errno.ENOSPC, errno.EACCES, errno.ENOSPC)
    with pytest.raises(PermissionError):
        retry_while_full(write, "a", sleep=lambda seconds: None)
    assert left == [errno.ENOSPC]
