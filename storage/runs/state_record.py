"""The record of a stored state: its file and checksum, what goes with it, and a seal over all.

What a store promises with it is told in `dagsel.storage.runs.checkpoints`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Any

import google_crc32c
import numpy as np

FORMAT = "dagsel.checkpoint"
VERSION = 2  # version 1 had no seal
#: The place of a state in its trial's folder: epoch and position.
STEM = r"epoch-(\d+)-position-(\d+)"
#: The place of what a shard has kept of scores.
SCORES = r"scores-(?:epoch|check)-\d+-shard-\d+"
_CRC = re.compile(r"[0-9a-f]{8}")
_BLOB = re.compile(rf"(?:{STEM}(?:\.partial)?|check-\d+|{SCORES})\.[0-9a-f]{{8}}\.safetensors")


@dataclass(frozen=True, slots=True)
class StateRecord:
    """The content of a record."""

    blob: str  # name of the state's file, beside the record
    n_bytes: int
    crc32c: str
    meta: dict[str, Any]

    @classmethod
    def read(cls, text: bytes, stem: str) -> StateRecord:
        """Read the JSON text of the record at a place.

        Raises
        ------
        ValueError, KeyError, TypeError, RecursionError
            If it is not the one that was written there.
        """
        body = json.loads(text)
        record = cls(body["blob"], body["n_bytes"], body["crc32c"], body["meta"])
        is_ours = body["format"] == FORMAT and body["version"] in range(1, VERSION + 1)
        # Both become parts of names: they must not lead elsewhere.
        is_ours &= bool(_BLOB.fullmatch(record.blob) and _CRC.fullmatch(record.crc32c))
        if not (is_ours and isinstance(record.meta, dict)):
            raise ValueError("it does not describe a state of this version")
        if body["version"] > 1 and body["seal"] != record.seal(stem):
            raise ValueError("its checksum does not match: it was changed, or moved here")
        return record

    def as_json(self, stem: str) -> bytes:
        """Return the JSON text of the record at a place."""
        head = {"format": FORMAT, "version": VERSION}
        return json.dumps({**head, **self._body, "seal": self.seal(stem)}).encode()

    def seal(self, stem: str) -> str:
        """Return the checksum of the record and of the place where it is."""
        return f"{google_crc32c.value(f'{stem} {json.dumps(self._body)}'.encode()):08x}"

    @property
    def _body(self) -> dict[str, Any]:  # `asdict` would copy all of the meta
        return {field.name: getattr(self, field.name) for field in fields(self)}


def checksum_of(data: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """Return the CRC32C of bytes as 8 hexadecimal digits."""
    value: int = google_crc32c.value(data)
    return f"{value:08x}"
