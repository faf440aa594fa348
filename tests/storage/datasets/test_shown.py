"""What is shown of a size and of a long write: short, right, and only where someone sees it."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.console import ProgressBar, readable_size


@given(st.integers(0, 10**18))
def test_a_size_is_short_and_right(n_bytes: int) -> None:
    number, unit = readable_size(n_bytes).replace(",", "").split()
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert abs(float(number) * factor - n_bytes) <= 0.051 * factor
    assert float(number) <= 1000 or unit == "TB"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "seconds", "is_shown"),
    [(Terminal, 3.0, True), (Terminal, 1.0, False), (io.StringIO, 3.0, False)],
)
def test_a_bar_shows_what_takes_long_where_someone_can_see_it(
    monkeypatch: pytest.MonkeyPatch, stream: Any, seconds: float, is_shown: bool
) -> None:
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    clock = iter([0.0, *[seconds] * 100])
    monkeypatch.setattr("dagsel.console.time.monotonic", lambda: next(clock))
    with ProgressBar(1000, "writing a set") as bar:
        bar.advance(400)
        bar.advance(600)
    assert ("writing a set" in shown.getvalue()) is is_shown
    assert bar.done == 1000
