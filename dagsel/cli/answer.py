"""How a command answers: a text for people or JSON for programs, and an exit code."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from dagsel.codec import finite_part
from dagsel.console import printable_lines
from dagsel.errors import DagselError

#: Exit codes; click itself ends with 2 where it was not called rightly.
WELL, NOT_WELL, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has to say.

    Parameters
    ----------
    text
        For people.
    body
        The same for programs: JSON, but for numbers that have no form in it (NaN becomes null).
    code
        The exit code.
    """

    text: str
    body: Any
    code: int = WELL


def answered(command: Callable[..., Answer | Iterable[Answer]]) -> Callable[..., None]:
    """Give a command the option ``--json``, and have its answers, or its error, told.

    Of several answers each is told when it comes, in JSON on a line of its own.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
    @functools.wraps(command)
    def call(*args: Any, as_json: bool, **options: Any) -> None:
        code = WELL
        try:
            found = command(*args, **options)
            is_one = isinstance(found, Answer)
            for answer in [found] if isinstance(found, Answer) else found:
                code = answer.code
                if as_json:
                    click.echo(as_text(answer.body, indent=1 if is_one else None))
                elif answer.text:
                    click.echo(printable_lines(answer.text))  # names in it may be another's
        except (DagselError, OSError) as error:
            _fail(error, as_json)
        except KeyboardInterrupt:
            code = INTERRUPTED
        if code:
            raise click.exceptions.Exit(code)

    return call


def amount(_context: click.Context, _option: click.Parameter, given: str | None) -> Any:
    """Return a number that was given as one; texts such as ``10 min`` dagsel reads itself."""
    try:
        return None if given is None else float(given)
    except ValueError:
        return given


def as_text(body: Any, indent: int | None = None) -> str:
    """Return JSON as every parser reads it: numbers that are none in it become null.

    Examples
    --------
    >>> as_text({"value": float("nan"), "at": (1, 2.5)})
    '{"value": null, "at": [1, 2.5]}'
    """
    return json.dumps(finite_part(body), indent=indent, default=str)


def _fail(error: Exception, as_json: bool) -> NoReturn:
    kind, text = type(error).__name__, str(error)
    if as_json:
        click.echo(as_text({"error": kind, "text": text}, indent=1))
    else:
        click.echo(printable_lines(f"{kind}: {text}"), err=True)
    raise click.exceptions.Exit(NOT_WELL)
