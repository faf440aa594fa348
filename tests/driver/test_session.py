"""What a run was called with reaches those whom it concerns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig
from dagsel.flows import RandomSearch
from dagsel.history.record import Record
from dagsel.history.settings import Settings
from dagsel.session import Call, Session

TIMES = st.floats(1.0, 1e6)


@given(st.integers(1, 64), st.integers(1, 9), st.none() | TIMES, TIMES)
def test_the_dispatcher_is_told_of_replicas_and_time_limits(
    n_shards: int, replicas: int, unit_timeout_s: float | None, worker_timeout_s: float
) -> None:
    settings = Settings(
        *("study", None, "TPESampler", 0, "minimize", "loss", 0),
        *("RandomSearch", {}, "digits.zarr", "00000000", n_shards),
        replicas=replicas,
        unit_timeout_s=unit_timeout_s,
    )
    other: Any = None
    data: Any = SimpleNamespace(n_shards=n_shards)
    flow = RandomSearch(max_epochs=1, n_trials=1)
    session = Session(settings, other, other, flow, other, data, Record("run"))
    assert session.dispatch_config(Call(None, None, worker_timeout_s)) == DispatchConfig(
        n_shards,
        replicas,
        unit_timeout_s=unit_timeout_s,
        capacity_timeout_s=worker_timeout_s,
    )
