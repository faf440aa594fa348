"""A command prints its answer or its error, as text or as JSON, and ends with the code for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dagsel.cli.answer import Answer, answered, as_text
from dagsel.errors import SearchError

PARTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: st.lists(part) | st.dictionaries(st.text(), part),
)


@given(PARTS)
def test_what_is_printed_is_json_of_the_standard(body: Any) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    read = json.loads(as_text(body), parse_constant=refuse)
    assert read == (None if isinstance(body, float) and not math.isfinite(body) else read)
    assert json.loads(as_text(read)) == read


def test_what_a_terminal_obeys_is_not_printed() -> None:
    @click.command()
    @answered
    def command() -> Iterator[Answer]:
        yield Answer("a\x1b[8m\nb", {})
        raise SearchError("c\x1b[8m\nd")

    told = CliRunner().invoke(command, color=True)
    assert (told.stdout, told.stderr) == ("a�[8m\nb\n", "SearchError: c�[8m\nd\n")


def raising(error: BaseException) -> click.Command:
    @click.command()
    @answered
    def command() -> Answer:
        raise error

    return command


@pytest.mark.parametrize("error", [SearchError("no such trial"), OSError(28, "No space left")])
def test_an_error_is_one_line_and_1(error: Exception) -> None:
    plain = CliRunner().invoke(raising(error))
    assert (plain.exit_code, plain.stdout) == (1, "")
    assert plain.stderr == f"{type(error).__name__}: {error}\n"
    told = CliRunner().invoke(raising(error), ["--json"])
    assert (told.exit_code, told.stderr) == (1, "")
    assert json.loads(told.stdout) == {"error": type(error).__name__, "text": str(error)}


def test_a_fault_of_dagsels_own_is_not_hidden() -> None:
    done = CliRunner().invoke(raising(ZeroDivisionError()))
    assert isinstance(done.exception, ZeroDivisionError)


def test_ctrl_c_is_130() -> None:
    assert CliRunner().invoke(raising(KeyboardInterrupt())).exit_code == 130


def test_several_answers_are_a_line_each_and_the_last_one_has_the_code() -> None:
    @click.command()
    @answered
    def command() -> Iterator[Answer]:
        yield Answer("first", {"n": 1}, 1)
        yield Answer("", {"n": 2})

    assert CliRunner().invoke(command).output == "first\n"
    done = CliRunner().invoke(command, ["--json"])
    assert [json.loads(line)["n"] for line in done.output.splitlines()] == [1, 2]
    assert done.exit_code == 0
