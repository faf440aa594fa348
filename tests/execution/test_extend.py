"""A search that has ended goes on: more trials, more epochs, and it is as if it had never ended."""

from __future__ import annotations

import contextlib
import math
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from distributed import Client, LocalCluster
from optuna.trial import TrialState

import dagsel
from dagsel.errors import RunDirError, RunDirLockedError, SearchError
from dagsel.flows import ASHA, PBT, EarlyStopping, OptunaPruner, RandomSearch, Range
from dagsel.history.tables import ranked
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize

from . import interrupted
from .extended import MORE
from .interrupted import FLOWS, interrupt, space, stopping_after, workload
from .test_resume import check_record, check_replay, files

N_SHARDS = 4


@pytest.fixture
def begin(optimize: Optimize, client: Client, digits: ShardedDataset, run_dir: str) -> Optimize:
    def call(flow: Any = "random search", **given: Any) -> dagsel.Run:
        flow = FLOWS[flow] if isinstance(flow, str) else flow
        study = optuna.create_study(study_name="test", direction="maximize")
        default = {"workload": workload(), "data": digits, "client": client, "study": study}
        return optimize(flow, space=space, **(default | given))

    return call


def check_best(run: dagsel.Run) -> None:
    """The best is the best epoch of all, and its model is that epoch's, as the study says."""
    for trial in run.record.trials.values():
        assert trial.value == max(epoch.value for epoch in trial.epochs)
    assert run.best_value == max(t.value for t in ranked(run.record) if t.value is not None)
    assert run.study.best_value == run.best_value
    assert max(epoch for epoch, _, _ in run.best_model()) == run.best.epoch
    config = run.record.trials[run.best.trial].config
    assert run.best_value == pytest.approx(interrupted.value(config, run.best.epoch))


def check_study(run: dagsel.Run) -> None:
    """Each trial is told as it is; what stood for it before is told as it was, and none runs.

    What a driver drew and died before it could record has failed, and says so.
    """
    states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    last: dict[int, optuna.trial.FrozenTrial] = {}
    for trial in run.study.trials:
        assert trial.state.is_finished()
        if trial.user_attrs["dagsel:run"] == run.record.run:
            number = trial.user_attrs.get("dagsel:trial", trial.number)
            if number not in run.record.trials:
                assert trial.state == TrialState.FAIL
                assert trial.user_attrs["dagsel:reason"] == "the driver died before it was recorded"
                continue
            reports = {e.epoch - 1: e.value for e in run.record.trials[number].epochs}
            assert trial.params == run.record.trials[number].params
            assert trial.intermediate_values.items() <= reports.items()
            last[number] = trial
    assert last.keys() == run.record.trials.keys()
    for number, recorded in run.record.trials.items():
        told = last[number]
        assert told.state == states[recorded.state]
        assert len(told.intermediate_values) == len(recorded.epochs)
        if told.state == TrialState.COMPLETE:
            assert told.value == recorded.value


def check(client: Client, run: dagsel.Run, of: Any = space) -> None:
    assert run.record.finished
    check_best(run)
    check_record(run)
    check_study(run)
    check_replay(client, run, of)
    kept = {best.trial for best in run.record.top}
    assert set(RunDir(run.run_dir.url).states.trials()) == kept


@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_trials_that_train_on_do_as_if_they_had_never_ended(
    top_k: int, begin: Optimize, client: Client, tmp_path: Path
) -> None:
    """Whether their states were kept or are made again; and those that are kept are not."""
    whole = begin(RandomSearch(5, 5), deterministic=True, run_dir=str(tmp_path / "whole"))
    run = begin(RandomSearch(2, 5), deterministic=True, top_k=top_k)
    n_before = len(run.record.units)
    kept = {best.trial: best.epoch for best in run.record.top}
    more = run.extend(client, max_epochs=5, n_best=5)
    for number, trial in whole.record.trials.items():
        then = [(e.value, e.digest) for e in trial.epochs]
        assert [(e.value, e.digest) for e in more.record.trials[number].epochs] == then
        again = [u for u in more.record.units[n_before:] if u.unit.trial == number]
        n_trained = sum(u.unit.kind == "train" for u in again)
        assert n_trained == (5 - kept.get(number, 0)) * N_SHARDS
    assert more.best_value == whole.best_value
    assert more.best_model() == whole.best_model()
    assert len(run.record.trials[0].epochs) == 2  # the run of before is as it was
    check(client, more)


def test_the_kept_best_trains_on_and_new_ones_come(begin: Optimize, client: Client) -> None:
    run = begin(top_k=2)
    kept = {best.trial for best in run.record.top}
    more = run.extend(client, n_trials=3, max_epochs=4, progress=False)
    epochs = {t.number: len(t.epochs) for t in more.record.trials.values()}
    new = epochs.keys() - run.record.trials.keys()
    assert len(new) == 3
    assert epochs == {n: 4 if n in kept | new else 2 for n in epochs}
    assert len(more.study.trials) == 5 + 2 + 3
    assert len({tuple(t.params.values()) for t in more.record.trials.values()}) == 8
    check(client, more)


@pytest.mark.parametrize("flow", ["random search", "asha"])
@pytest.mark.parametrize("storage", ["sqlite", "memory"])
def test_another_day_it_goes_on_again_and_again(
    flow: str, storage: str, begin: Optimize, client: Client, run_dir: str, tmp_path: Path
) -> None:
    home = f"sqlite:///{tmp_path / 'study.db'}" if storage == "sqlite" else None
    begin(flow, study=interrupted.open_study(home))
    for n_trials in (1, 2):
        study = interrupted.open_study(home)  # with the sampler
        run = dagsel.load(run_dir, workload=workload(), space=space, study=study)
        n_before, most = len(run.record.trials), max(len(t.epochs) for t in ranked(run.record))
        best = run.best_value
        run = run.extend(client, n_trials=n_trials, max_epochs=most + 1)
        assert len(run.record.trials) == n_before + n_trials
        assert max(len(t.epochs) for t in ranked(run.record)) == most + 1
        assert run.best_value >= best
    check(client, run)
    again = dagsel.resume(run_dir, workload=workload(), space=space)
    assert again.best == run.best


@pytest.mark.parametrize(
    ("flow", "seed"), [("random search", 0), ("random search", 1), ("asha", 2)]
)
def test_a_driver_that_is_killed_as_it_extends_is_resumed(
    flow: str,
    seed: int,
    begin: Optimize,
    client: Client,
    cluster: LocalCluster,
    run_dir: str,
    tmp_path: Path,
) -> None:
    chance = random.Random(seed)
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    before = begin(flow, study=interrupted.open_study(storage))
    command = [
        sys.executable, "-m", "tests.execution.extended", flow, str(chance.randint(8, 60)),
        cluster.scheduler_address, run_dir, storage,
    ]  # fmt: skip
    driver = subprocess.run(command, capture_output=True, text=True, check=False)
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    given: dict[str, Any] = {"workload": workload(), "space": space}
    with pytest.raises(RunDirError, match=r"has not ended.*dagsel.resume\(.*run"):
        dagsel.load(run_dir, **given).extend(client, n_trials=1)
    given["study"] = interrupted.open_study(storage)
    with (
        contextlib.suppress(KeyboardInterrupt),
        stopping_after(chance.randint(5, 30), interrupt),
    ):
        dagsel.resume(run_dir, client, **given)
    run = dagsel.resume(run_dir, client, **given)
    assert len(run.record.trials) == len(before.record.trials) + MORE[flow]["n_trials"]
    assert run.best_value >= before.best_value
    check(client, run)


@pytest.mark.parametrize("n_steps", range(1, 8))
def test_wherever_its_beginning_is_interrupted_nothing_is_lost(
    n_steps: int, begin: Optimize, client: Client, run_dir: str
) -> None:
    run = begin(top_k=2)
    more: dict[str, Any] = {"max_epochs": 3, "n_best": 3, "n_trials": 1}
    with pytest.raises(KeyboardInterrupt), stopping_after(n_steps, interrupt):
        run.extend(client, **more)
    given: dict[str, Any] = {"workload": workload(), "space": space, "study": run.study}
    seen = dagsel.resume(run_dir, client, **given)
    if len(seen.record.trials) == 5:  # it had not begun
        assert seen.best == run.best
        assert seen.models() == run.models()
        seen = seen.extend(client, **more)
    assert len(seen.record.trials) == 6
    check(client, seen)


def test_a_trial_that_fails_as_it_trains_on_keeps_what_it_had(
    begin: Optimize, client: Client
) -> None:
    """Also the best of all."""
    run = begin(workload=Fragile(value=interrupted.value), top_k=2)
    more = run.extend(client, max_epochs=4, n_trials=1)
    assert [t.state for t in more.record.trials.values()][:5] == ["complete"] * 5
    assert more.best.trial == run.best.trial
    assert more.best_model() == run.best_model()
    table = more.trials().set_index("trial")
    assert "failed as it trained on: RuntimeError: brittle" in table.warning[run.best.trial]
    check_study_told(more)


def check_study_told(run: dagsel.Run) -> None:
    assert run.study.best_value == run.best_value
    assert all(trial.state.is_finished() for trial in run.study.trials)


class Fragile(SyntheticWorkload):
    """Trains no third epoch."""

    def train(self, state: Any, shard: Any, config: Any, *, visit: Any, **how: Any) -> Any:
        if visit.epoch == 3:
            raise RuntimeError("brittle")
        return super().train(state, shard, config, visit=visit, **how)


def test_its_time_is_new_and_its_best_is_kept_if_that_is_short(
    begin: Optimize, client: Client
) -> None:
    run = begin(deadline="10 min", budget="30 worker-minutes", workload=slow())
    longer = run.extend(client, n_trials=2, budget="60 worker-minutes")
    assert longer.plan.deadline_s is None
    assert len(longer.record.trials) == 7
    short = longer.extend(client, max_epochs=400, n_best=5, deadline=1.5)
    assert short.record.finished
    assert short.best_value >= longer.best_value
    assert ranked(short.record)[0].number == short.best.trial
    assert short.best_model() is not None
    assert all(len(trial.epochs) < 400 for trial in short.record.trials.values())
    limit = short.plan.deadline_s
    assert limit is not None
    assert longer.record.seconds + 1.5 == pytest.approx(limit)
    check_study_told(short)


def slow() -> SyntheticWorkload:
    return SyntheticWorkload(seconds=0.02, value=interrupted.value)


def test_early_stopping_lets_rest_what_got_no_better(begin: Optimize, client: Client) -> None:
    flat = SyntheticWorkload(value=lambda config, epoch: config["x"] if epoch > 1 else 1.0)
    run = begin(EarlyStopping(RandomSearch(3, 3), patience=1), workload=flat)
    assert {len(trial.epochs) for trial in run.record.trials.values()} == {2}
    more = run.extend(client, max_epochs=9, n_trials=1, n_best=3)
    assert {len(trial.epochs) for trial in more.record.trials.values()} == {2}
    assert len(more.record.trials) == 4


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing more": ({}, SearchError, "say how much more is to be trained: n_trials="),
    "fewer epochs": ({"max_epochs": 1}, SearchError, "max_epochs must be .*2 or more, got 1"),
    "as many epochs": ({"max_epochs": 2}, SearchError, "nothing is left to train"),
    "fewer trials": ({"n_trials": -1}, SearchError, "n_trials must be .*0 or more"),
    "no number": ({"n_trials": 2.5}, SearchError, "n_trials must be a whole number"),
    "the best to no end": ({"n_best": 2, "n_trials": 1}, SearchError, "give max_epochs="),
    "none of the best": ({"n_best": 0, "max_epochs": 3}, SearchError, "nothing is left to train"),
    "another space": (
        {"n_trials": 1, "space": lambda trial: {"y": trial.suggest_int("y", 0, 9)}},
        SearchError, "the space is not the one"),
    "another flow": ({"n_trials": 1, "flow": RandomSearch(9)}, SearchError, "flow= is Random"),
    "no time": ({"n_trials": 1, "deadline": 0}, SearchError, "deadline must be"),
    "no money": ({"n_trials": 1, "budget": "5 USD"}, SearchError, "what a worker costs is not"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(
    cluster: LocalCluster, digits: ShardedDataset, tmp_path_factory: pytest.TempPathFactory
) -> dagsel.Run:
    with Client(cluster, set_as_default=False) as client:
        return dagsel.optimize(
            interrupted.open_study(None),
            workload(),
            digits,
            space=space,
            flow=FLOWS["random search"],
            metric="value",
            client=client,
            run_dir=str(tmp_path_factory.mktemp("ended") / "run"),
        )


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_and_touches_nothing(
    name: str, ended: dagsel.Run, client: Client
) -> None:
    more, kind, text = REFUSED[name]
    before, n_told = files(ended.run_dir.url), len(ended.study.trials)
    with pytest.raises(kind, match=text):
        ended.extend(client, **more)
    assert files(ended.run_dir.url) == before
    assert len(ended.study.trials) == n_told


def test_what_is_missing_is_asked_for(ended: dagsel.Run, client: Client, tmp_path: Path) -> None:
    url = ended.run_dir.url
    with pytest.raises(Exception, match=r"models need the workload|give workload="):
        dagsel.load(url).extend(client, n_trials=1)
    with pytest.raises(RunDirError, match="give workload= and space="):
        dagsel.load(url, workload=workload()).extend(client, n_trials=1)


def test_a_run_whose_study_is_lost_is_not_extended_in_another_one(
    begin: Optimize, client: Client, run_dir: str, tmp_path: Path
) -> None:
    begin(study=interrupted.open_study(f"sqlite:///{tmp_path / 'study.db'}"))
    (tmp_path / "study.db").unlink()
    run = dagsel.load(run_dir, workload=workload(), space=space)
    with pytest.raises(SearchError, match=r"stored at sqlite.*study=\.\.\."):
        run.extend(client, n_trials=1)


def test_a_search_that_cannot_go_on_says_so(begin: Optimize, client: Client) -> None:
    run = begin(PBT(max_epochs=2, n_trials=4, mutations={"x": Range(0.0, 1.0)}))
    with pytest.raises(SearchError, match="PBT cannot go on once it has ended.*same study"):
        run.extend(client, n_trials=1)


def test_asha_decides_itself_who_goes_on(begin: Optimize, client: Client) -> None:
    run = begin("asha")
    with pytest.raises(SearchError, match="ASHA decides by itself what n_best would say"):
        run.extend(client, max_epochs=9, n_best=2)


def test_a_run_that_another_driver_has_or_that_was_given_up_is_refused(
    begin: Optimize, client: Client, run_dir: str
) -> None:
    refused: list[str] = []

    def intrude(*_: Any) -> None:
        with pytest.raises(RunDirLockedError) as error:
            dagsel.load(run_dir, workload=workload(), space=space).extend(client, n_trials=1)
        refused.append(str(error.value))

    begin(callbacks=[intrude])
    assert refused
    with pytest.raises(KeyboardInterrupt), stopping_after(20, interrupt):
        begin("asha", run_dir=f"{run_dir}-2")
    dagsel.abandon(f"{run_dir}-2")
    with pytest.raises(RunDirError, match="it has ended early .the run was abandoned"):
        dagsel.load(f"{run_dir}-2", workload=workload(), space=space).extend(client, n_trials=1)


def test_a_pruner_that_no_json_holds_is_given_again(begin: Optimize, client: Client) -> None:
    flow = OptunaPruner(2, 3, pruner=optuna.pruners.ThresholdPruner(lower=-math.inf))
    run = begin(flow, top_k=3)
    opened = dagsel.load(run.run_dir, workload=workload(), space=space)
    with pytest.raises(SearchError, match="cannot hold this OptunaPruner.*with flow="):
        opened.extend(client, n_trials=1)
    more = run.extend(client, n_trials=1, max_epochs=3)  # here it is known
    assert {len(trial.epochs) for trial in more.record.trials.values()} == {3}
    opened = dagsel.load(run.run_dir, workload=workload(), space=space)
    more = opened.extend(client, n_trials=1, flow=flow)
    assert len(more.record.trials) == 5


def test_a_trial_trains_on_with_what_it_was_enqueued_with(
    optimize: Optimize, digits: ShardedDataset, client: Client, run_dir: str
) -> None:
    def boosted(trial: optuna.Trial) -> dict[str, Any]:
        return space(trial) | {"boost": trial.user_attrs.get("boost", 0)}

    study = optuna.create_study(direction="maximize")
    study.enqueue_trial({}, user_attrs={"boost": 5, "no form in JSON": object()})
    parts: dict[str, Any] = {"workload": workload(), "data": digits, "client": client}
    run = optimize(RandomSearch(2, 3), study=study, space=boosted, **parts)
    more = run.extend(client, max_epochs=4)
    assert more.record.trials[0].config["boost"] == 5
    for again in (
        dagsel.load(run_dir, space=boosted),
        dagsel.resume(run_dir, client, workload=workload(), space=boosted, study=study),
    ):
        assert again.record.trials[0].config == run.record.trials[0].config
    check(client, more, boosted)


def test_a_run_does_not_go_on_with_another_pruner(
    begin: Optimize, client: Client, run_dir: str, tmp_path: Path
) -> None:
    home = f"sqlite:///{tmp_path / 'study.db'}"
    pruner = optuna.pruners.ThresholdPruner(lower=-math.inf)
    study = optuna.create_study(study_name="s", storage=home, pruner=pruner, direction="maximize")
    with pytest.raises(KeyboardInterrupt), stopping_after(20, interrupt):
        begin(OptunaPruner(2, 3), study=study)
    parts: dict[str, Any] = {"workload": workload(), "space": space}
    with pytest.raises(SearchError, match=r"was ThresholdPruner\(\), and is MedianPruner"):
        dagsel.resume(run_dir, client, **parts)
    study = optuna.load_study(study_name="s", storage=home, pruner=pruner)
    assert dagsel.resume(run_dir, client, study=study, **parts).record.finished
    run = dagsel.load(run_dir, **parts)
    with pytest.raises(SearchError, match="storages keep no pruner"):
        run.extend(client, n_trials=1)
    run = dagsel.load(run_dir, study=study, **parts)
    assert len(run.extend(client, n_trials=1).record.trials) == 4


def test_callbacks_and_a_cluster_of_its_own(begin: Optimize) -> None:
    heard: list[int] = []
    more = begin().extend(
        n_trials=1,
        callbacks=[lambda study, trial: heard.append(trial.number)],
        max_cluster_workers=1,
        worker_startup=1.0,
        worker_timeout=60,
    )
    assert heard == [5]
    assert len(more.record.trials) == 6


def test_asha_promotes_on_from_its_last_rung(begin: Optimize, client: Client) -> None:
    run = begin(ASHA(max_epochs=2, n_trials=8, reduction_factor=2, n_concurrent=4))
    done = sorted(
        (t for t in run.record.trials.values() if len(t.epochs) == 2),
        key=lambda t: (-t.epochs[-1].value, t.number),
    )
    more = run.extend(client, max_epochs=4)
    longer = {t.number for t in more.record.trials.values() if len(t.epochs) == 4}
    assert longer == {t.number for t in done[: max(1, len(done) // 2)]}
    check(client, more)
