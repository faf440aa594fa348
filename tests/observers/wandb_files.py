"""Reads what W&B has written offline: it has no reader of its own that Python could call.

A file is a log as LevelDB's: after 7 bytes that say what it is, blocks of 32 kB with pieces of
records; each record is a message of W&B's own protocol.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

_BLOCK, _HEAD = 32768, struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the messages of a file, as far as they are whole."""
    message = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, held = path.read_bytes(), 7, b""
    while at + _HEAD.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEAD.size:
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        part = data[at : at + length]
        if len(part) < length or kind == 0:
            return
        at += length
        held = part if kind in (_FULL, _FIRST) else held + part
        if kind in (_FULL, _LAST):
            record: Any = message()
            record.ParseFromString(held)
            yield record


def files(folder: Path, run: str) -> list[Path]:
    """Return the files of a search's trials once they are whole.

    W&B's own process writes the last of a run a moment after `finish` has returned.
    """
    found = sorted(folder.glob(f"wandb/offline-run-*-{run}-*/run-*.wandb"))
    for path in found:
        wait_until(
            lambda path=path: any(record.HasField("exit") for record in records(path)),  # type: ignore[misc]
            f"the end of {path}",
        )
    return found


def epochs(folder: Path, run: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield trial, step and values of all that the folders of a search's trials hold."""
    for path in files(folder, run):
        trial = int(path.stem.rpartition("-")[2])
        for record in records(path):
            if record.HasField("history"):
                items = record.history.item
                values = {
                    (i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in items
                }
                yield trial, record.history.step.num, values


def configs(folder: Path, run: str) -> dict[int, dict[str, Any]]:
    """Return the parameters of each trial."""
    found: dict[int, dict[str, Any]] = {}
    for path in files(folder, run):
        for record in records(path):
            if record.HasField("run"):
                update = record.run.config.update
                found[int(path.stem.rpartition("-")[2])] = {
                    item.key: json.loads(item.value_json)
                    for item in update
                    if not item.key.startswith("_")
                }
    return found
