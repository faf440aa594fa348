"""Whether worker processes can be started from where a script calls.

A process that Python starts by spawning imports the main script again. A script that searches while
it is imported would search again in each worker.
"""

from __future__ import annotations

import ast
import multiprocessing
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import dask.config

from dagsel.errors import ClusterError
from dagsel.garbage import kept_off

#: Names that a test of "is this the main process?" reads.
_ASKS = {"__name__", "parent_process", "current_process"}
_CURE = 'put it under  if __name__ == "__main__":'


def check_main_guard() -> None:
    """Raise a `ClusterError` if worker processes would run the caller's script again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ClusterError(
            f"a worker process imports your script again and must not search itself: {_CURE}"
        )
    main: Any = sys.modules.get("__main__")
    if getattr(main, "__file__", None) == "<stdin>":
        del main.__file__  # Python would look for a file of this name in each worker, and fail
    path = imported_again(main)
    frames = [frame for frame in _frames() if frame.f_globals is getattr(main, "__dict__", None)]
    if path is None or not any(frame.f_code.co_name == "<module>" for frame in frames):
        return
    if dask.config.get("distributed.worker.multiprocessing-method", "spawn") == "fork":
        return
    lines = [frame.f_lineno for frame in frames if frame.f_code.co_filename == main.__file__]
    try:
        guarded = not lines or is_guarded(path.read_text(), lines)
    except (OSError, UnicodeDecodeError):
        return
    if not guarded:
        raise ClusterError(
            f"dagsel starts worker processes, which import {path.name} again and must not run its "
            f"line {lines[-1]}: {_CURE}"
        )


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, which waits for a search in another one."""
    main = threading.main_thread()
    frame: FrameType | None
    if threading.current_thread() is main:
        frame = sys._getframe()
    else:
        with kept_off():  # before Python 3.11.9 it waits for its own lock (gh-106883)
            frame = sys._current_frames().get(main.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def imported_again(main: Any) -> Path | None:
    """Return the file of a main module that a spawned process imports; None if it imports none.

    It imports neither a ``__main__.py``, nor what was typed, piped in or given with ``-c``.
    """
    name = getattr(getattr(main, "__spec__", None), "name", "")
    file = getattr(main, "__file__", None)
    if not isinstance(file, str) or f".{name}".endswith(".__main__"):
        return None
    return Path(file)


def is_guarded(source: str, lines: Iterable[int]) -> bool:
    r"""Whether lines of a script run only in the main process, as far as its text tells.

    `lines` are those that are being run: of the script itself, and of its functions.

    Examples
    --------
    >>> is_guarded('if __name__ == "__main__":\n    search()', [2])
    True
    >>> is_guarded("import dagsel\nsearch()", [2])
    False
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return True
    tests = [node for node in nodes if isinstance(node, ast.If) and _asks(node.test)]
    return any(_spans(test, line) or _leaves(test, line) for test in tests for line in lines)


def _asks(test: ast.expr) -> bool:
    """Whether a test asks for the main process."""
    names = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(test))
    return any(name in _ASKS for name in names)


def _spans(test: ast.If, line: int) -> bool:
    return test.lineno <= line <= (test.end_lineno or line)


def _leaves(test: ast.If, line: int) -> bool:
    """Whether it ends a script that is imported, before it reaches the line."""
    inner = [node for statement in test.body for node in ast.walk(statement)]
    leaves = (isinstance(node, ast.Raise | ast.Return) or _is_exit(node) for node in inner)
    return test.lineno < line and any(leaves)


def _is_exit(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and "exit" in ast.dump(node.func)
