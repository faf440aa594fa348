"""Examples in docstrings run in an empty folder, as they may write files, and say nothing."""

from __future__ import annotations

import pytest
from _pytest.doctest import DoctestItem


@pytest.fixture(autouse=True)
def folder_of_an_example(request: pytest.FixtureRequest) -> None:
    """Change to an empty folder if this is an example, and to no other if it is a test."""
    if isinstance(request.node, DoctestItem):
        folder = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").chdir(folder)
