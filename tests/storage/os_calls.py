"""Functions of `os` that do something else for a while, in one thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def os_calls(names: Sequence[str], instead: Callable[[str, Any], Any]) -> Iterator[None]:
    """Replace functions by what `instead` makes of their name and themselves.

    Other threads have the originals: Dask's count the open files of their process now and then.
    """
    here = threading.get_ident()

    def of_here(name: str) -> Any:
        original = getattr(os, name)
        replaced = instead(name, original)

        def call(*args: Any, **kwargs: Any) -> Any:
            function = replaced if threading.get_ident() == here else original
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, of_here(name))
        yield
