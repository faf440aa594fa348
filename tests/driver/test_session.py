"""What a run was called with reaches those whom it concerns."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig
from dagsel.errors import ClusterError
from dagsel.flows import RandomSearch
from dagsel.history.record import Record
from dagsel.history.settings import Settings
from dagsel.session import Call, Session
from dagsel.storage import RunDir
from tests.conftest import Optimize

TIMES = st.floats(1.0, 1e6)


@given(st.integers(1, 64), st.integers(1, 9) | st.just("auto"), st.none() | TIMES, TIMES)
def test_the_dispatcher_is_told_of_replicas_and_time_limits(
    n_shards: int, replicas: Any, unit_timeout_s: float | None, worker_timeout_s: float
) -> None:
    settings = Settings(
        *("study", None, "TPESampler", 0, "minimize", "loss", 0),
        *("RandomSearch", {}, "digits.zarr", "00000000", n_shards),
        replicas=replicas,
        unit_timeout_s=unit_timeout_s,
    )
    other: Any = None
    sizes = [SimpleNamespace(nbytes=n) for n in (5, 7)]
    data: Any = SimpleNamespace(n_shards=n_shards, shard_sizes=sizes)
    flow = RandomSearch(max_epochs=1, n_trials=1)
    session = Session(settings, other, other, flow, other, data, Record("run"))
    told = DispatchConfig(
        n_shards,
        None if replicas == "auto" else replicas,
        unit_timeout_s=unit_timeout_s,
        capacity_timeout_s=worker_timeout_s,
        room_timeout_s=worker_timeout_s,
        shard_bytes=7,
    )
    assert session.dispatch_config(Call("there", None, worker_timeout_s)) == told
    own = replace(told, room_timeout_s=0.0)  # no larger worker comes
    assert session.dispatch_config(Call(None, None, worker_timeout_s)) == own
    disk = Call("there", None, worker_timeout_s, hold="disk")
    assert session.dispatch_config(disk) == replace(told, shard_bytes=0)


def test_a_run_keeps_the_replicas_and_the_time_limit_that_it_was_called_with(
    optimize: Optimize, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"tcp://127.0.0.1:{server.getsockname()[1]}"  # nobody listens there any more
    soon = dask.config.set({"distributed.comm.timeouts.connect": "0.2 s"})
    with soon, pytest.raises(ClusterError, match="no scheduler at"):
        optimize(client=nobody, run_dir=tmp_path / "run", replicas=3, unit_timeout="7 s")
    about = RunDir(tmp_path / "run").about()
    assert (about["replicas"], about["unit_timeout_s"]) == (3, 7.0)
