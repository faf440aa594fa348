"""What a gang's ranks send each other is bytes and text: nothing is unpickled or looked up."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from dagsel.dispatch.units import Unit
from dagsel.errors import GangBrokenError, TrainingError
from dagsel.execution.gang_parts import How
from dagsel.execution.run_spec import RunSpec
from dagsel.execution.unit_runner import UnitRunner
from dagsel.messages import JoinGang
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.testing.workloads import in_gang
from dagsel.workloads.gang.gang import Gang, lead_gang

UNIT = Unit("train", 0, 1, 0)


class Mark:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


class Planted(Exception):
    """Makes a folder where it is made."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        Path(path).mkdir()


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists(), "what came by the network has run"


def test_a_rank_does_not_unpickle_what_its_leader_sends(tmp_path: Path, mark: Path) -> None:
    data = ShardedDataset.write(tmp_path / "a.zarr", {"x": np.arange(20)}, n_shards=2)
    spec = RunSpec("3f9a", b"", data, RunDir(tmp_path / "run"), seed=0, gang_timeout_s=20.0)
    runner = UnitRunner(
        spec,
        SyntheticWorkload(),
        address="tcp://127.0.0.1:1",
        tell=lambda notice: None,
        tell_surely=lambda notice: None,
        is_short_of_memory=lambda _: False,
    )
    runner.load(0)

    def join(rank: int, port: int) -> None:
        how = base64.b64encode(cloudpickle.dumps(How({}))).decode()
        call = JoinGang(UNIT, 1, 0, 1, 2, "127.0.0.1", port, how)
        runner.gangs.join(call, lambda train: threading.Thread(target=train, daemon=True).start())

    def lead() -> None:
        about: Any = {"name": "0-1-0-1", "secret": spec.secret, "timeout_s": 20.0}
        with lead_gang("127.0.0.1", size=2, call=join, **about) as gang:
            gang.send(cloudpickle.dumps(Mark(mark)))
            gang.agree(True)

    with pytest.raises(ValueError, match="invalid literal"):
        lead()


def test_an_error_is_not_made_by_a_name_that_another_rank_sends(mark: Path) -> None:
    def body(gang: Gang) -> None:
        if gang.rank == 1:
            told = {"rank": 1, "module": __name__, "kind": "Planted", "args": [str(mark)],
                    "text": "x", "traceback": ""}  # fmt: skip
            gang._rendezvous.put("error", json.dumps(told).encode())
            raise KeyError("x")
        gang.agree(False)

    with pytest.raises((TrainingError, KeyError)):
        in_gang(2, body)


@pytest.mark.parametrize("told", [b"\xff", b"[]", b'{"rank": {}}', b"[" * 10**5, b"null"])
def test_an_error_that_is_none_breaks_the_gang(told: bytes) -> None:
    def body(gang: Gang) -> None:
        if gang.rank == 1:
            gang._rendezvous.put("error", told)
            raise KeyError("x")
        gang.agree(False)

    with pytest.raises(GangBrokenError, match="gang"):
        in_gang(2, body)


def test_a_stranger_at_the_port_neither_joins_nor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from dagsel.workloads.gang import rendezvous

    monkeypatch.setattr(rendezvous, "_TOKEN_WITHIN_S", 0.05)
    server = rendezvous.RendezvousServer("127.0.0.1", "gang")
    try:
        for sent in (b"", b"x" * 32):
            with socket.create_connection((server.address, server.port), timeout=20.0) as stranger:
                stranger.sendall(sent)
                assert stranger.recv(1) == b"", "it is sent away"
    finally:
        server.close()
