"""Laws of a worker that waits for a critical trial, and of what a worker holds."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import ShardLoaded, WorkerAdded, WorkerRemoved
from dagsel.dispatch.units import Chain, Round
from dagsel.simulation.virtual_cluster import VirtualCluster

from .families import times_of

N_TRIALS, N_WORKERS, N_SHARDS = 5, 4, 4


@pytest.mark.parametrize("family", ["het", "hetC"])
def test_a_worker_that_waits_for_a_critical_trial_is_asked_again_in_time(family: str):
    n_waits = 0
    for seed in range(6):
        times = times_of(family, N_TRIALS, N_WORKERS, seed)
        dispatcher = Dispatcher(DispatchConfig(n_shards=N_SHARDS))

        def check(out: object, dispatcher: Dispatcher = dispatcher) -> None:
            nonlocal n_waits
            rule = dispatcher.list_scheduler
            for host in dispatcher.workers.staying:
                if host.bound or rule.pick(host.worker, dispatcher.state.now) is not None:
                    continue
                if rule.wait_until < inf:
                    n_waits += 1
                    assert dispatcher.wake_at is not None
                    assert dispatcher.wake_at <= rule.wait_until

        for trial in range(N_TRIALS):
            dispatcher.times.add_trial(trial, cost=float(np.mean(times[trial])))

        def seconds(unit: Any, worker: str, shard: Any, times: Any = times) -> float:
            return float(times[unit.trial, int(worker)])

        cluster = VirtualCluster(
            dispatcher,
            seconds,
            watch=check,
        )
        cluster.add_workers({str(i): 1.0 for i in range(N_WORKERS)})
        chains = (Chain(i, range(1, 3), N_SHARDS, evaluate=False) for i in range(N_TRIALS))
        cluster.add_round(Round(0, tuple(chains)))
        cluster.run()
    assert n_waits > 0


@settings(deadline=None)
@given(st.frozensets(st.integers(0, 3)), st.frozensets(st.integers(0, 3)))
def test_a_worker_holds_what_it_brought_and_what_it_loaded_until_it_goes(
    brought: frozenset[int], loaded: frozenset[int]
):
    dispatcher = Dispatcher(DispatchConfig(n_shards=4, rebalance=False))

    def held(worker: str) -> set[int]:
        return {shard for shard in range(4) if dispatcher.holds(worker, shard)}

    assert held("a") == set()
    dispatcher.handle(WorkerAdded("a", brought), now_s=0.0)
    assert held("a") == brought
    dispatcher.handle(*(ShardLoaded("a", shard) for shard in sorted(loaded)), now_s=1.0)
    assert held("a") == brought | loaded
    dispatcher.handle(WorkerRemoved("a"), now_s=2.0)
    assert held("a") == set()
