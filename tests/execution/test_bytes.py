"""What is read and what hops, by our counters and by Dask's own logs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cloudpickle
from distributed import Client
from helpers import done, engine_for, final_state, listen

from dagsel.execution.engine import Engine
from dagsel.planning.rounds import Chain, Round
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload, seen

N_TRIALS, N_EPOCHS, STATE_BYTES = 6, 2, 50_000


def transfers(run: str, dask_worker: Any) -> list[tuple[tuple[Any, ...], int]]:
    """List the states of a run that this worker fetched: key and bytes, from Dask's own log."""
    return [
        (key, n_bytes)
        for entry in dask_worker.transfer_incoming_log
        for key, n_bytes in entry["keys"].items()
        if key[0] == f"train-{run}"
    ]


def counters(run: str, dask_worker: Any) -> tuple[int, int, list[int]]:
    plugin = dask_worker.plugins[f"dagsel-{run}"]
    return (
        plugin.counters.shard_bytes_read,
        plugin.counters.units_started,
        sorted(plugin.shards),
    )


def run_trials(engine: Engine, n_shards: int, *, evaluate: bool) -> list[dict[str, Any]]:
    chains = tuple(
        Chain(t, range(1, N_EPOCHS + 1), n_shards, evaluate=evaluate) for t in range(N_TRIALS)
    )
    engine.submit(Round(1, chains), {t: {} for t in range(N_TRIALS)})
    n_units = N_TRIALS * N_EPOCHS * n_shards * (2 if evaluate else 1)
    return listen(engine, until=lambda heard: len(done(heard)) == n_units)


def test_our_counters_agree_with_dasks_log(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    workload = SyntheticWorkload(seconds=0.005, state_bytes=STATE_BYTES)
    with engine_for(client, digits, workload, run_dir, dispatch={"rebalance": False}) as engine:
        heard = run_trials(engine, digits.n_shards, evaluate=False)
        run = engine.spec.run
        fetched = [pair for pairs in client.run(transfers, run).values() for pair in pairs]
        counted = client.run(counters, run)
    hops = [m for m in heard if m["op"] == "done" and m["hop"]]
    assert len(fetched) == len(hops) > 0
    assert max(Counter(key for key, _ in fetched).values()) == 1
    assert all(STATE_BYTES <= n_bytes <= 1.1 * STATE_BYTES for _, n_bytes in fetched)
    visits = N_EPOCHS * digits.n_shards * N_TRIALS
    assert sum(n_bytes for _, n_bytes in fetched) <= 1.05 * visits * 1.1 * STATE_BYTES
    assert sum(started for _, started, _ in counted.values()) == visits
    # Each shard is on one worker, and was read there once.
    assert sorted(s for _, _, shards in counted.values() for s in shards) == [0, 1, 2, 3]
    assert sum(n_bytes for n_bytes, _, _ in counted.values()) == digits.nbytes


def test_replicas_are_read_once_each_and_save_hops(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    options = {"rebalance": False, "replicas": 2}
    with engine_for(
        client, digits, SyntheticWorkload(seconds=0.005), run_dir, dispatch=options
    ) as engine:
        heard = run_trials(engine, digits.n_shards, evaluate=False)
        listen(engine, until=lambda more: loaded(heard + more) == 2 * digits.n_shards)
        counted = client.run(counters, engine.spec.run)
    assert all(shards == [0, 1, 2, 3] for _, _, shards in counted.values())
    assert sum(n_bytes for n_bytes, _, _ in counted.values()) == 2 * digits.nbytes


def loaded(heard: list[dict[str, Any]]) -> int:
    return sum(message["op"] == "loaded" for message in heard)


def test_states_wait_in_the_store_where_memory_is_short(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    workload = SyntheticWorkload(state_bytes=STATE_BYTES)
    with engine_for(client, digits, workload, run_dir, spec={"state_share": 0.0}) as engine:
        run_trials(engine, digits.n_shards, evaluate=True)
        run = engine.spec.run
        fetched = [pair for pairs in client.run(transfers, run).values() for pair in pairs]
        states = [
            final_state(engine, trial, N_EPOCHS, digits.n_shards) for trial in range(N_TRIALS)
        ]
    assert all(n_bytes < 1_000 for _, n_bytes in fetched), "a state hopped through memory"
    for state in states:
        assert len(set(seen(state))) == len(seen(state)) == N_EPOCHS * digits.n_shards


def count_states(run: str, dask_scheduler: Any) -> int:
    """Count the copies of states that workers hold."""
    tasks = dask_scheduler.tasks.values()
    return sum(len(t.who_has or ()) for t in tasks if t.key[0] == f"train-{run}")


def test_at_most_two_states_a_trial_are_in_memory(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    # With few trials a worker, the copies that hops leave for a moment weigh more.
    n_trials = 12
    workload = SyntheticWorkload(seconds=0.01, state_bytes=STATE_BYTES)
    copies = []
    with engine_for(client, digits, workload, run_dir) as engine:
        chains = tuple(Chain(t, range(1, N_EPOCHS + 1), digits.n_shards) for t in range(n_trials))
        engine.submit(Round(1, chains), {t: {} for t in range(n_trials)})
        heard: list[dict[str, Any]] = []
        while len(done(heard)) < n_trials * N_EPOCHS * digits.n_shards * 2:
            heard += listen(engine, until=bool)
            copies.append(client.run_on_scheduler(count_states, engine.spec.run))
    assert 0 < max(copies) <= 2 * n_trials


cloudpickle.register_pickle_by_value(__import__(__name__))
