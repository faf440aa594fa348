"""Few trials: in gangs where that was asked for or measured to be faster, said, and not for long.

A search procedure that gives gangs itself is left alone, and workers that are let go come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from distributed import Client, LocalCluster
from hypothesis import given
from hypothesis import strategies as st

import dagsel
from dagsel.dispatch.units import Unit
from dagsel.driver import idle_workers
from dagsel.driver.idle_workers import IdleWorkers
from dagsel.errors import SearchError, WorkloadError
from dagsel.execution.cluster import why_no_room, workers_of
from dagsel.flow import Ask, Asked, Decision, Event, Finish, Flow, Reported, Stop, Train
from dagsel.flows import ASHA
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.messages import UnitRecord
from dagsel.planning.small_population import RESTART_S
from dagsel.profiling import Profile, architecture_of
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.profiles import write_profile
from dagsel.testing.synthetic import CountingWorkload, SyntheticWorkload
from tests.conftest import Optimize
from tests.driver.scripted import Scripted

from .helpers import own_cluster

N_SHARDS = 4


@pytest.fixture
def data(tmp_path: Path) -> ShardedDataset:
    return ShardedDataset.write(str(tmp_path / "data"), {"x": np.arange(40)}, n_shards=N_SHARDS)


@pytest.fixture
def search(optimize: Optimize, data: ShardedDataset) -> Optimize:
    def call(flow: Flow, workload: Any, **given: Any) -> dagsel.Run:
        given = {"study": optuna.create_study(), "data": data, "metric": "loss", **given}
        return optimize(flow, workload=workload, **given)

    return call


def trains(*epochs: int, then: Callable[[Reported], Sequence[Decision]] = lambda e: ()) -> Scripted:
    """Train each trial for so many epochs."""

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked(trials):
                n_of.update((t, n) for t, n in zip(trials, epochs, strict=False) if t not in n_of)
                left.update(trials)
                return [Train(trial, n_of[trial]) for trial in trials]
            case Reported(trial, epoch):
                if epoch < n_of[trial]:
                    return list(then(event))
                left.discard(trial)
                return [Stop(trial, "the end", "complete"), *([] if left else [Finish()])]
        return []

    n_of: dict[int, int] = {}
    left: set[int] = set()
    return Scripted([Ask(len(epochs))], answer)


def gangs(run: dagsel.Run, trial: int) -> list[int]:
    return [u.gang for u in run.record.units if u.unit.kind == "train" and u.unit.trial == trial]


def counting(speedup: float = 2.0) -> CountingWorkload:
    return CountingWorkload(
        seconds=0.1, n_batches=5, n_shards=N_SHARDS, speedup=lambda config, n: speedup
    )


def test_the_last_trial_of_a_search_trains_in_a_gang(search: Optimize, client: Client) -> None:
    run = search(trains(1, 10), counting(), client=client, small_population="gang")
    short, long = gangs(run, 0), gangs(run, 1)
    assert set(short) == {1}
    assert long == sorted(long)
    assert (long[0], long[-1]) == (1, 2)
    (note,) = run.record.notes
    assert "1 trials for 2 workers: each trains in a gang of 2" in note
    assert "last bits" in note
    assert set(run.metrics.query("name == 'miscounted'").value) == {0.0}


def test_a_gang_comes_to_what_hopping_comes_to(
    search: Optimize, client: Client, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    arrays = {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}
    data = ShardedDataset.write(str(tmp_path / "one"), arrays, n_shards=1)  # one order of visits
    workload = dagsel.TorchWorkload(
        lambda config: torch.nn.Linear(8, 2),
        torch.nn.functional.cross_entropy,
        lambda parameters, config: torch.optim.Adam(parameters, lr=0.01),
        batch_size=16,
    )
    losses = {}
    for policy in ("gang", "hop"):
        run = search(
            trains(3), workload, data=data, client=client, small_population=policy,
            run_dir=str(tmp_path / policy),
        )  # fmt: skip
        losses[policy] = [v for e in run.record.trials[0].epochs for v in (e.train_loss, e.value)]
        assert gangs(run, 0)[-1] == (2 if policy == "gang" else 1)
        assert len(run.record.notes) == (policy == "gang")
    assert losses["gang"] == pytest.approx(losses["hop"], rel=1e-5)

    again = dagsel.replay(
        str(tmp_path / "gang"), client, workload=workload, into=str(tmp_path / "again"),
        space=lambda trial: {"x": trial.suggest_float("x", 0, 1)},
    )  # fmt: skip
    assert set(gangs(again, 0)) == {1}
    assert again.record.notes


@pytest.mark.parametrize(("known", "gang"), [(None, 1), (1.9, 2), (0.9, 1)])
def test_of_itself_only_what_a_profile_says_is_faster(
    search: Optimize, client: Client, data: ShardedDataset, known: float | None, gang: int
) -> None:
    workload = SyntheticWorkload(seconds=0.02)
    if known is not None:
        name = architecture_of(workload, {"x": 0.5})
        Profile.given({1: 1, 2: known}, architecture=name).save(data)
    run = search(trains(3), workload, client=client)
    assert max(gangs(run, 0)) == gang  # it may go back, if this machine is too busy for two
    assert bool(run.record.notes) == (gang > 1)


def test_a_damaged_profile_is_left_aside(
    search: Optimize, client: Client, data: ShardedDataset, caplog: pytest.LogCaptureFixture
) -> None:
    workload = SyntheticWorkload()
    write_profile(data, architecture_of(workload, {"x": 0.5}), b"{")
    run = search(trains(3), workload, client=client)
    assert set(gangs(run, 0)) == {1}
    assert "are not used" in caplog.text


def test_what_the_run_has_seen_counts_more_than_the_profile(
    search: Optimize, client: Client, data: ShardedDataset
) -> None:
    workload = counting(speedup=0.4)
    name = architecture_of(workload, {"x": 0.5})
    Profile.given({1: 1, 2: 1.9}, architecture=name).save(data)
    run = search(trains(1, 12), workload, client=client)
    sizes = gangs(run, 1)
    assert (sizes[0], sizes[-1]) == (1, 1)
    assert 2 <= sizes.count(2) <= 6
    there, back = run.record.notes
    assert "e(2) = 0.95" in there
    assert "each trains on one worker from here on" in back


def test_asha_does_not_change_sizes_at_every_turn(search: Optimize, client: Client) -> None:
    flow, workload = ASHA(max_epochs=27, n_trials=6), SyntheticWorkload(seconds=0.03, n_batches=3)
    run = search(flow, workload, client=client, small_population="gang")
    assert any(unit.gang == 2 for unit in run.record.units)
    assert len(run.record.notes) <= 2
    assert len(run.record.pieces) <= 2


def test_a_flow_that_gives_gangs_is_left_alone(search: Optimize, client: Client) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 4, gang=2)]
            case Reported(0, 1):
                return [Train(0, 0, gang=1)]
            case Reported(0, 4):
                return [Stop(0, "the end", "complete"), Finish()]
        return []

    workload = SyntheticWorkload(seconds=0.4, n_batches=10)
    run = search(Scripted([Ask(1)], answer), workload, client=client, small_population="gang")
    sizes = gangs(run, 0)
    assert (sizes[0], sizes[-1]) == (2, 1)
    assert sizes == sorted(sizes, reverse=True)
    assert run.record.notes == []


def test_trials_that_cannot_be_shared_stay_on_one_worker_and_the_record_says_why(
    search: Optimize, client: Client
) -> None:
    workload = SyntheticWorkload(speedup=lambda config, n: 0.0)
    run = search(trains(4), workload, client=client, small_population="gang")
    assert set(gangs(run, 0)) == {1}
    (note,) = run.record.notes
    assert "each trains on one worker: WorkloadError: speedup must be above 0" in note
    assert not run.failures


@pytest.mark.parametrize(
    ("how", "is_told"),
    [
        ({"replicas": 2, "hold": "memory"}, True),
        ({"replicas": 2}, False),  # what does not fit is on the disk
        ({"replicas": 1, "hold": "memory"}, False),
        ({"hold": "memory"}, False),
    ],
)
def test_more_copies_than_memory_holds_are_told_of_with_the_numbers(
    search: Optimize, client: Client, data: ShardedDataset, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], is_told: bool,
) -> None:  # fmt: skip
    there, n = workers_of(client), data.n_shards
    largest = max(size.nbytes for size in data.shard_sizes)
    limit = 10 * (n - 1) * largest  # a tenth of it is for shards, as a process takes the rest
    limits = {worker: {"memory_limit": limit} for worker in there}
    monkeypatch.setattr("dagsel.execution.cluster.workers_of", lambda client: limits)
    assert search(trains(1), SyntheticWorkload(), client=client, **how).record.best is not None
    told = [r.getMessage() for r in caplog.records if "as many are held" in r.getMessage()]
    n_workers = len(there)
    text = (
        f"replicas=2 asks {n_workers} workers to hold {2 * n} shards, and their memory holds "
        f"{n_workers * (n - 1)}: as many are held; give workers more memory, lower replicas, or "
        "leave hold= out"
    )
    assert told == [text] * is_told


def test_no_gang_is_formed_that_would_wait_for_memory(client: Client, data: ShardedDataset) -> None:
    assert why_no_room(client, data, share=0.5) == ""
    why = why_no_room(client, data, share=1e-9)
    assert "hold 0 of 4 shards" in why
    settled = IdleWorkers("gang", why_no_gangs=why)
    (change,) = settled.settle(record_of(1), 4, 0.0)
    assert why in change.note
    assert settled.settle(record_of(1), 4, 0.0) == []
    assert settled.gang_of(0) == 1


class NoGangs(SyntheticWorkload):
    """A workload that trains on one worker."""

    train_gang: Any = None  # how a protocol says that a method is not there


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"small_population": "gang", "deterministic": True}, SearchError, "'hop' or 'release'"),
        ({"small_population": "gangs"}, SearchError, "must be one of"),
        ({"small_population": "gang", "workload": NoGangs()}, WorkloadError, "train_gang"),
    ],
)
def test_bad_input_is_told_before_anything_begins(
    search: Optimize, run_dir: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    workload = options.pop("workload", SyntheticWorkload())
    with pytest.raises(error, match=says):
        search(trains(1), workload, client="tcp://nowhere:1", **options)
    assert not Path(run_dir).exists()


@pytest.fixture
def three() -> Iterator[LocalCluster]:
    with own_cluster(3) as cluster:
        yield cluster


def test_workers_are_let_go_and_taken_again(
    search: Optimize, three: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_workers, "RESTART_S", 0.3)

    asked = False

    def then(event: Reported) -> list[Decision]:
        nonlocal asked
        if asked or len(three.worker_spec) == 3:
            return []
        asked = True  # a worker has gone, and there is work for it again
        return [Ask(2)]

    flow, workload = trains(24, 24, then=then), SyntheticWorkload(seconds=0.05)
    run = search(flow, workload, cluster=three, small_population="release")
    notes = [note for note in run.record.notes if "trials for" in note]
    assert "2 trials for 3 workers: 1 workers are let go" in notes[0]
    assert any("3 workers are wanted again" in note for note in notes[1:])
    assert max(max(gangs(run, trial)) for trial in run.record.trials) == 1
    assert len(three.worker_spec) == 3  # the last one may still be on its way


def test_a_cluster_that_cannot_shrink_is_told_of_once(
    search: Optimize, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_workers, "RESTART_S", 0.0)
    assert client.scheduler is not None
    address, workload = client.scheduler.address, SyntheticWorkload(seconds=0.01)
    run = search(trains(8), workload, client=address, small_population="release")
    (note,) = run.record.notes
    assert "none can be let go: only a cluster object can be scaled" in note


STEPS = st.lists(st.tuples(st.floats(0, 2 * RESTART_S), st.integers(1, 8)), max_size=20)


def record_of(n_trials: int) -> Record:
    return Record("3f9a", trials={n: TrialRecord(n, {}, {}, n_decided=1) for n in range(n_trials)})


def test_a_trial_that_is_scored_is_not_gone() -> None:
    settled, record = IdleWorkers("gang"), record_of(2)
    (change,) = settled.settle(record, 4, 0.0)
    assert change.trials == (0, 1)
    unit = Unit("train", 0, 1, 0)
    record.add(UnitRecord(unit, "w", 0, 0.0, 9.0, hop=False, n_samples=1, loss=0.5))
    assert not record.trials[0].has_work
    assert settled.settle(record, 4, 9.0) == []
    assert settled.gang_of(1) == 2


@given(STEPS)
def test_workers_idle_before_they_go_and_none_is_missing(
    steps: list[tuple[float, int]],
) -> None:
    settled, n_workers, now, needed_at = (
        IdleWorkers("release"),
        6,
        0.0,
        dict.fromkeys(range(9), 0.0),
    )
    for after, n_trials in steps:
        now += after
        for change in settled.settle(record_of(n_trials), n_workers, now):
            assert change.note
            if change.n_workers is not None:
                if change.n_workers < n_workers:
                    last = max(needed_at[n] for n in range(change.n_workers + 1, 9))
                    assert now - last >= RESTART_S
                n_workers = change.n_workers
        assert n_workers >= min(n_trials, 6)
        needed_at[n_trials] = now


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=20))
def test_all_trials_have_room(steps: list[tuple[int, int]]) -> None:
    settled = IdleWorkers("gang")
    settled.settle(record_of(1), 8, 0.0)
    assert settled.gang_of(0) == 8
    units = [
        UnitRecord(Unit("train", trial, 1, 0), "w", 0, 0.0, 1e-3, False, False, 9)
        for trial in range(8)
    ]
    for n_trials, n_workers in steps:  # with so little left that only need changes a gang
        record = record_of(n_trials)
        record.units += units
        settled.settle(record, n_workers, 0.0)
        assert n_trials * settled.gang_of(0) <= max(n_trials, n_workers)
