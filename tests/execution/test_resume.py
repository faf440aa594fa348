"""A run whose driver dies or is interrupted goes on, and comes to what its replay comes to."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from distributed import Client, LocalCluster
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import dagsel
from dagsel.dispatch.units import visit_order
from dagsel.driver.clock import MOMENT_S
from dagsel.driver.consistency import read_run
from dagsel.errors import DatasetNotFoundError, RunDirError, RunDirLockedError, SearchError
from dagsel.execution.cluster import local_cluster
from dagsel.execution.engine import DaskEngine
from dagsel.flows import ASHA, RandomSearch
from dagsel.history import tables
from dagsel.history.record import Record
from dagsel.messages import ENTRIES
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize
from tests.waiting import slowness, wait_until

from . import interrupted
from .churn import Notices, started_units
from .interrupted import FLOWS, interrupt, space, stopping_after, workload

N_WORKERS, N_SHARDS = 2, 4


@pytest.fixture(autouse=True)
def _notices(client: Client) -> None:
    client.register_plugin(Notices())


def folded(run_dir: str) -> Record:
    """Give what the journal alone says of a run."""
    folder = RunDir(run_dir)
    record = Record(folder.about()["run"], N_SHARDS, folder.about()["direction"])
    for entry in folder.journal.read():
        record.add(ENTRIES.decode(entry))
    return record


def told(record: Record) -> dict[int, tuple[Any, ...]]:
    """List all of a record's trials that a journal can hold."""
    return {
        t.number: (t.params, t.state, t.reason, t.epochs, t.n_decided, t.adoptions, t.tallies)
        for t in record.trials.values()
    }


def check_record(run: dagsel.Run) -> None:
    """The journal says what the driver knew."""
    again = folded(run.run_dir.url)
    assert told(again) == told(run.record)
    for name in ("units", "rounds", "loads", "best", "notes", "finished", "n_epochs_decided"):
        assert getattr(again, name) == getattr(run.record, name), name


def check_best(run: dagsel.Run) -> None:
    """The best is the best epoch of all, and its model is that epoch's, as the study says."""
    for trial in run.record.trials.values():
        if trial.epochs and not trial.adoptions:
            assert trial.value == max(epoch.value for epoch in trial.epochs)
    assert run.best_value == max(max(t.values) for t in tables.ranked(run.record))
    assert run.study.best_value == run.best_value
    assert max(epoch for epoch, _, _ in run.best_model()) == run.best.epoch
    trial = run.record.trials[run.best.trial]
    if not trial.adoptions:
        value = interrupted.value(trial.config, run.best.epoch)
        assert run.best_value == pytest.approx(value)  # a mean over shards


def check_study(run: dagsel.Run) -> None:
    """Each trial of the run stands once in the study; all else there has failed, none runs."""
    names = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    stands: dict[int, list[str]] = {}
    for trial in run.study.trials:
        assert trial.state.is_finished()
        if trial.state == TrialState.FAIL:
            assert trial.user_attrs["dagsel:reason"]
        else:
            number = trial.user_attrs.get("dagsel:trial", trial.number)
            stands.setdefault(number, []).append(trial.state.name)
            recorded = run.record.trials[number]
            reports = {epoch.epoch - 1: epoch.value for epoch in recorded.epochs}
            assert trial.params == recorded.params
            assert trial.intermediate_values == reports
    assert stands == {t.number: [names[t.state]] for t in run.record.trials.values()}


def count_started(client: Client, run: str) -> int:
    """Count the training units that all sessions of a run have begun."""

    def topics(dask_scheduler: Any) -> list[str]:
        return list(dask_scheduler.plugins["notices"].told)

    names = [
        topic.removeprefix("dagsel-").removesuffix("-workers")
        for topic in client.run_on_scheduler(topics)
    ]
    return sum(started_units(client, name) for name in names if name.partition(".")[0] == run)


def check_units(client: Client, run: dagsel.Run) -> None:
    """No more was begun again than was in flight."""
    record = run.record
    n_again = count_started(client, record.run) - record.n_epochs * N_SHARDS
    n_lost = N_WORKERS * (len(record.sessions) - 1)  # tasks whose end no driver has heard of
    # Of such a task the first unit is known, and up to all the others may be stored.
    assert -n_lost * (N_SHARDS - 1) <= n_again <= n_lost


def check_visits(run: dagsel.Run) -> None:
    """Each epoch has visited each shard once, also where no driver has heard of it."""
    trained = run.timeline().query("kind == 'train'")
    visits = trained.groupby(["trial", "epoch"]).shard.apply(sorted).to_dict()
    epochs = [(t.number, e.epoch) for t in run.record.trials.values() for e in t.epochs]
    assert all(visits.get(epoch) == list(range(N_SHARDS)) for epoch in epochs)


def check_replay(client: Client, run: dagsel.Run, of: Any = space) -> None:
    again = dagsel.replay(
        run.run_dir.url,
        client,
        workload=workload(),
        space=of,
        into=f"{run.run_dir.url}-again",
    )
    assert again.record.notes == []
    assert again.best == run.best
    assert again.best_model() == run.best_model()


def check(client: Client, run: dagsel.Run, flow: str) -> None:
    assert len(run.record.trials) == FLOWS[flow].n_trials
    assert run.record.finished
    check_best(run)
    check_record(run)
    check_study(run)
    check_units(client, run)
    check_visits(run)
    check_replay(client, run)


def go_on(client: Client, run_dir: str, **changes: Any) -> dagsel.Run:
    return dagsel.resume(run_dir, client, **{"workload": workload(), "space": space, **changes})


@pytest.fixture
def begin(
    optimize: Optimize, client: Client, digits: ShardedDataset, study: optuna.Study
) -> Optimize:
    def call(flow: Any = "asha", **given: Any) -> dagsel.Run:
        flow = FLOWS[flow] if isinstance(flow, str) else flow
        default = {"study": study, "workload": workload(), "data": digits, "client": client}
        return optimize(flow, space=space, **(default | given))

    return call


@pytest.mark.parametrize(("flow", "seed"), [("random search", 0), ("asha", 1), ("pbt", 2)])
def test_a_driver_that_is_killed_costs_no_more_than_the_units_in_flight(
    flow: str,
    seed: int,
    client: Client,
    cluster: LocalCluster,
    digits: ShardedDataset,
    run_dir: str,
    tmp_path: Path,
) -> None:
    chance = random.Random(seed)
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    command = [
        sys.executable, "-m", "tests.execution.interrupted", flow, str(chance.randint(10, 60)),
        digits.url, cluster.scheduler_address, run_dir, storage,
    ]  # fmt: skip
    driver = subprocess.run(command, capture_output=True, text=True, check=False)
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    with (
        contextlib.suppress(KeyboardInterrupt),
        stopping_after(chance.randint(5, 30), interrupt),
    ):
        go_on(client, run_dir, study=interrupted.open_study(storage))
    check(client, go_on(client, run_dir, study=interrupted.open_study(storage)), flow)


@pytest.mark.parametrize("storage", ["sqlite", "journal", "memory"])
def test_a_search_that_is_interrupted_again_and_again_goes_on_with_its_study(
    storage: str, begin: Optimize, client: Client, run_dir: str, tmp_path: Path
) -> None:
    place: Any = {
        "sqlite": f"sqlite:///{tmp_path / 'study.db'}",
        "journal": JournalStorage(JournalFileBackend(str(tmp_path / "study.log"))),
        "memory": None,
    }[storage]
    with pytest.raises(KeyboardInterrupt), stopping_after(20, interrupt):
        begin("asha", study=optuna.create_study(storage=place, direction="maximize"))
    for n_steps in (5, 8):
        with pytest.raises(KeyboardInterrupt), stopping_after(n_steps, interrupt):
            go_on(client, run_dir)
    run = go_on(client, run_dir)
    assert len(run.record.sessions) == 4
    assert (storage == "memory") == (type(run.study._storage).__name__ == "InMemoryStorage")
    check(client, run, "asha")


def test_a_session_stands_in_the_journal_before_it_sends_anything(
    begin: Optimize, client: Client, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its time would not count, nor what it has begun be known to be its own."""
    with pytest.raises(KeyboardInterrupt), stopping_after(20, interrupt):
        begin("asha")
    monkeypatch.setattr(DaskEngine, "submit", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        go_on(client, run_dir)
    assert len(folded(run_dir).sessions) == 2


def test_the_line_that_goes_on_is_enough_for_a_search_that_draws_by_itself(
    begin: Optimize, client: Client, run_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler())
    with pytest.raises(KeyboardInterrupt) as error, stopping_after(30, interrupt):
        begin("random search", study=study)
    (line,) = error.value.__notes__
    assert line.endswith(f"dagsel.resume({run_dir!r}, workload=..., space=...)")
    assert dagsel.resume(run_dir, client, workload=workload(), space=space).record.finished
    assert "give study=" not in caplog.text


@pytest.mark.parametrize("n_steps", [1, 3, 6, 10, 15, 21, 28, 36, 45, 55])
def test_ctrl_c_at_ten_moments_ends_the_search_in_order_and_it_goes_on(
    n_steps: int, begin: Optimize, client: Client, study: optuna.Study, run_dir: str
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with stopping_after(n_steps, lambda: signal.raise_signal(signal.SIGINT)):
        run = begin("asha", study=study)
    assert signal.getsignal(signal.SIGINT) is before
    assert run.record.finished
    assert run.record.n_live == 0
    assert run.record.interrupted
    assert not study.get_trials(states=(TrialState.RUNNING,))
    assert repr(run)  # also of a run in which nothing has trained
    whole = go_on(client, run_dir, study=study)
    assert len(whole.record.trials) == FLOWS["asha"].n_trials
    assert told(read_run(whole.run_dir)[2]) == told(whole.record)
    check_best(whole)
    # Of those that had ended by then others of the study stand for it.
    last = {trial.user_attrs.get("dagsel:trial", trial.number): trial for trial in study.trials}
    for trial in whole.record.trials.values():
        reports = {epoch.epoch - 1: epoch.value for epoch in trial.epochs}
        assert last[trial.number].intermediate_values == reports
        assert last[trial.number].state.name.lower() == trial.state


def files(folder: str | Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def test_a_run_that_has_ended_is_only_read(begin: Optimize, client: Client, run_dir: str) -> None:
    run = begin()
    before = files(run_dir)
    again = dagsel.resume(run.run_dir, client, workload=workload(), space=space)
    assert files(run_dir) == before
    assert (again.best, again.best_params) == (run.best, run.best_params)
    assert again.metrics.equals(run.metrics)
    assert again.timeline().equals(run.timeline())
    assert again.best_model() == run.best_model()
    assert [t.state for t in again.study.trials] == [t.state for t in run.study.trials]


def test_a_second_driver_is_refused_and_told_of_the_first(
    begin: Optimize, client: Client, run_dir: str
) -> None:
    refused: list[str] = []

    def intrude(*_: Any) -> None:
        with pytest.raises(RunDirLockedError) as error:
            go_on(client, run_dir)
        refused.append(str(error.value))

    run = begin("random search", callbacks=[intrude])
    assert len(refused) == len(run.record.trials)
    for text in refused:
        assert f"run {run.record.run}: pid {os.getpid()} " in text
        assert re.search(r"since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", text)
    check_record(run)


@pytest.fixture(scope="module")
def halted(
    cluster: LocalCluster, digits: ShardedDataset, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Give the folder of a run that was interrupted."""
    folder = tmp_path_factory.mktemp("halted") / "run"
    with (
        Client(cluster, set_as_default=False) as client,
        pytest.raises(KeyboardInterrupt),
        stopping_after(25, interrupt),
    ):
        dagsel.optimize(
            interrupted.open_study(None),
            workload(),
            digits,
            space=space,
            flow=FLOWS["asha"],
            metric="value",
            client=client,
            run_dir=str(folder),
        )
    return folder


def other_space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("y", 0.0, 1.0)}


BAD_INPUT: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no workload": ({"workload": None}, RunDirError, "give workload= and space="),
    "no space": ({"space": None}, RunDirError, "give workload= and space="),
    "another workload": (
        {"workload": SyntheticWorkload(seconds=0.01, n_batches=2, value=interrupted.value)},
        RunDirError, r"not the one that the run began with: 'n_batches' was 1 and is 2$"),
    "another space": ({"space": other_space}, SearchError, "the space is not the one"),
    "another flow": (
        {"flow": RandomSearch(max_epochs=2)}, SearchError, "flow= is RandomSearch .* with ASHA"),
    "another flow's configuration": (
        {"flow": ASHA(max_epochs=9, n_trials=6)}, SearchError, "'max_epochs': 9.*'max_epochs': 3"),
    "a data set that is not there": (
        {"data": "/nowhere.zarr"}, DatasetNotFoundError, "nowhere.zarr"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_and_touches_nothing(name: str, halted: Path, client: Client) -> None:
    changes, kind, text = BAD_INPUT[name]
    before = files(halted)
    with pytest.raises(kind, match=text):
        go_on(client, str(halted), **{"study": interrupted.open_study(None), **changes})
    assert files(halted) == before


def test_another_data_set_is_refused(halted: Path, client: Client, tmp_path: Path) -> None:
    other = ShardedDataset.write(tmp_path / "other.zarr", {"x": np.zeros((80, 64))}, n_shards=4)
    before = files(halted)
    with pytest.raises(RunDirError, match="other.zarr is not the data set that the run began with"):
        go_on(client, str(halted), data=other)
    assert files(halted) == before


def test_another_runs_study_is_refused_and_left_alone(halted: Path, client: Client) -> None:
    other = interrupted.open_study(None)
    other.add_trial(optuna.trial.create_trial(value=1.0))
    before = files(halted)
    with pytest.raises(SearchError, match="trial 0 of study 'test' is not of run"):
        go_on(client, str(halted), study=other)
    assert files(halted) == before
    assert len(other.trials) == 1


def test_a_newer_run_dir_and_none_at_all_are_refused(
    halted: Path, client: Client, tmp_path: Path
) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(halted, newer)
    about = json.loads((newer / "run.json").read_text())
    (newer / "run.json").write_text(json.dumps({**about, "version": 9}))
    before = files(newer)
    with pytest.raises(RunDirError, match=r"newer dagsel \(run format 9"):
        go_on(client, str(newer))
    assert files(newer) == before
    with pytest.raises(RunDirError, match="holds no run"):
        go_on(client, str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_a_run_dir_that_cannot_be_written_is_refused(
    halted: Path, digits: ShardedDataset, client: Client
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(halted, folder / "run")
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before, user = files(folder), os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            with pytest.raises(RunDirError, match=rf"cannot write run_dir {folder}/run: .*denied"):
                go_on(client, str(folder / "run"), data=digits)
        finally:
            os.seteuid(user)
        assert files(folder) == before
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)


def damageable(client: Client, run_dir: str, *, paused: bool) -> list[int]:
    """List trials with two states or more, once no worker is in a unit of the interrupted run."""
    wait_until(
        lambda: not any(client.run(lambda dask_worker: len(dask_worker.state.executing)).values()),
        "no worker is in a unit",
    )
    store, trials = RunDir(run_dir).states, folded(run_dir).trials.values()
    live = [t.number for t in trials if t.is_live and t.is_paused == paused]
    return [number for number in live if len(store.list(number)) > 1]


@pytest.mark.parametrize(("flow", "paused"), [("asha", True), ("random search", False)])
def test_a_damaged_state_costs_a_unit_and_changes_nothing(
    flow: str,
    paused: bool,
    begin: Optimize,
    client: Client,
    run_dir: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(KeyboardInterrupt), stopping_after(30, interrupt):
        begin(flow)
    while not (trials := damageable(client, run_dir, paused=paused)):
        with pytest.raises(KeyboardInterrupt), stopping_after(24, interrupt):
            go_on(client, run_dir)
    epoch, position = RunDir(run_dir).states.list(trials[0])[-1]
    name = f"trial-{trials[0]:06d}/epoch-{epoch:06d}-position-{position:06d}"
    (blob,) = Path(run_dir, "states").glob(f"{name}.*.safetensors")
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    run = go_on(client, run_dir)
    assert any(name in r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert len(run.record.trials) == FLOWS[flow].n_trials
    assert {t.state for t in run.record.trials.values()} <= {"complete", "pruned"}
    check_record(run)
    check_study(run)
    check_replay(client, run)


def test_a_deadline_ends_a_search_with_what_it_has(
    begin: Optimize, client: Client, study: optuna.Study, run_dir: str
) -> None:
    slow = slowness()
    begun = time.monotonic()
    run = begin(RandomSearch(max_epochs=1000, n_trials=4), deadline=3.0 * slow)
    assert time.monotonic() - begun < 12 * slow
    assert 3.0 * slow - MOMENT_S <= run.record.seconds < 5.0 * slow
    assert run.best.is_complete  # what was best when the time was over
    assert run.best_value == max(max(t.values) for t in tables.ranked(run.record))
    assert len(run.best_model()) >= N_SHARDS * run.best.epoch
    assert Counter(t.state for t in study.trials) == {TrialState.PRUNED: 3, TrialState.COMPLETE: 1}
    assert study.best_value == run.best_value
    check_record(run)
    check_replay(client, run)
    before = files(run_dir)
    assert go_on(client, run_dir).best == run.best
    assert files(run_dir) == before


@pytest.mark.parametrize(
    ("shift", "count_downtime", "goes_on"),
    [
        ({"at": -3600.0}, False, True),
        ({"at": -3600.0}, True, False),
        ({"seconds": 3600.0}, False, False),
    ],
)
def test_time_that_a_run_lies_dead_counts_only_where_it_is_to(
    shift: dict[str, float],
    count_downtime: bool,
    goes_on: bool,
    begin: Optimize,
    client: Client,
    run_dir: str,
) -> None:
    with pytest.raises(KeyboardInterrupt), stopping_after(25, interrupt):
        begin("random search", deadline=600.0)
    journal = RunDir(run_dir).journal
    entries = [
        {**entry, **{key: entry[key] + by for key, by in shift.items() if key in entry}}
        for entry in journal.read()
    ]
    Path(run_dir, "journal.jsonl").unlink()
    RunDir(run_dir).journal.append(entries)
    n_units = len(folded(run_dir).units)
    n_started = count_started(client, json.loads(Path(run_dir, "run.json").read_text())["run"])
    run = go_on(client, run_dir, count_downtime=count_downtime)
    assert run.record.finished
    assert (len(run.record.units) > n_units) == goes_on
    assert (count_started(client, run.record.run) > n_started) == goes_on
    assert bool([t for t in run.record.trials.values() if t.state == "pruned"]) != goes_on
    check_study(run)


def digests(run: dagsel.Run) -> dict[tuple[int, int], str]:
    trials = run.record.trials.values()
    return {(t.number, e.epoch): e.digest for t in trials for e in t.epochs}


def test_a_deterministic_run_comes_to_the_same_on_any_cluster(
    begin: Optimize, client: Client, tmp_path: Path
) -> None:
    def search(client: Client, seed: int, *, deterministic: bool = True) -> dagsel.Run:
        return begin(
            "random search",
            study=interrupted.open_study(None),
            workload=SyntheticWorkload(seconds=interrupted.delay, value=interrupted.value),
            client=client,
            run_dir=str(tmp_path / uuid.uuid4().hex),
            seed=seed,
            deterministic=deterministic,
        )

    with local_cluster(1) as small, Client(small, set_as_default=False) as alone:
        for seed in range(3):
            run = search(client, seed)
            assert len(digests(run)) == 10
            assert "" not in digests(run).values()
            assert digests(search(alone, seed)) == digests(run)
            assert run.record.visits() == {
                (t, e): visit_order(N_SHARDS, seed=seed, trial=t, epoch=e) for t, e in digests(run)
            }
    assert digests(search(client, 2, deterministic=False)) != digests(run)
