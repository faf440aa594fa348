"""What a task has done, beside its result: it travels in the message that the task is done.

Dask sends a task's metadata along: it is one message, and none is lost or early.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagsel.messages import REPORTS, UnitRecord

_PLACE = "dagsel"


def write(metadata: dict[str, Any], *done: UnitRecord) -> None:
    """Write down the records of the units that a task has done, its own unit's first."""
    metadata[_PLACE] = [REPORTS.encode(record) for record in done]


def read(metadata: Mapping[str, Any]) -> list[UnitRecord]:
    """Return the records of the units that a task has done."""
    records = [REPORTS.decode(told) for told in metadata[_PLACE]]
    return [record for record in records if isinstance(record, UnitRecord)]
