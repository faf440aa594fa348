"""The page of the command line has each command, each option and each field, and its examples run.

An example that needs a running search is refused by one that has ended, in the words of the errors
page.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dagsel.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
TEXT = PAGE.read_text()
#: What is said of a command, by its name.
SECTIONS = dict(re.findall(r"^### dagsel (\w+)\n(.*?)(?=^##)", TEXT, re.DOTALL | re.MULTILINE))
TABLE, SCRIPT = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def examples(name: str) -> list[str]:
    (block,) = re.findall(r"^```sh\n(.*?)^```$", SECTIONS[name], re.DOTALL | re.MULTILINE)
    return block.splitlines()


def call(line: str) -> Result:
    program, *words = shlex.split(line)
    assert program == "dagsel"
    return CliRunner().invoke(main, words, catch_exceptions=False)


def fields(body: dict[str, object]) -> set[str]:
    trials = body["trials"]
    assert isinstance(trials, list)
    return {*body, *trials[0], "after_epochs"}


def test_it_has_each_command_and_option() -> None:
    assert SECTIONS.keys() == main.commands.keys()
    for name, command in main.commands.items():
        options = [part for part in command.params if isinstance(part, click.Option)]
        real = {word for part in options for word in part.opts}
        rows = re.findall(r"^\| (`-.*?) \|", SECTIONS[name], re.MULTILINE)
        told = {word for row in rows for word in re.findall(r"`(--?[\w-]+)", row)}
        assert told == real, name
        arguments = [part for part in command.params if isinstance(part, click.Argument)]
        assert all(part.human_readable_name in SECTIONS[name] for part in arguments), name


@pytest.mark.slow
def test_its_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "table.py").write_text(TABLE)
    runpy.run_path("table.py")
    (tmp_path / "search.py").write_text(SCRIPT)
    for name in SECTIONS:
        for line in examples(name):
            done = call(line)
            if name == "stop":
                assert (done.exit_code, "the search has ended" in done.output) == (1, True)
            else:
                assert done.exit_code == 0, done.output
    body = json.loads(call("dagsel status first --json").stdout)
    said = TEXT.partition("## For programs")[2]
    assert fields(body) <= set(re.findall(r"`(\w+)`", said))
    assert (tmp_path / "first.html").exists()
