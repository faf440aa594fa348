"""Trackers, read by their own readers, have each epoch once, wherever their process was killed."""

from __future__ import annotations

import builtins
import csv
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.observers import (
    CSV,
    EpochEnded,
    MLflow,
    Observer,
    SearchBegan,
    SearchEnded,
    TensorBoard,
    TrialBegan,
    TrialEnded,
    WandB,
)
from dagsel.observers.base import tell
from dagsel.observers.events import Told
from tests.observers import wandb_files

BEGAN = SearchBegan("3f9a", "digits", "accuracy", "maximize", "runs/1")
N_EPOCHS = {0: 3, 1: 1, 2: 4}


def lr(trial: int, epoch: int) -> float:
    """What an epoch is trained with: the search changes it twice, and then it is as drawn."""
    return 0.2 if (trial, epoch) == (2, 3) else 0.1


#: Where a tracker that has one set of parameters has it by epoch.
CHANGED = {3: 0.2, 4: 0.1}


def story(run: str = "3f9a", *, is_past: bool = False) -> list[Told]:
    """A search of three trials; the last one has a parameter that the others lack."""
    told: list[Told] = [SearchBegan(run, "digits", "accuracy", "maximize", "runs/1", is_past)]
    for trial, n_epochs in N_EPOCHS.items():
        params = {"lr": 0.1, "act": "relu, or", **({"depth": 3} if trial == 2 else {})}
        told.append(TrialBegan(trial, params, is_past))
        for epoch in range(1, n_epochs + 1):
            value = trial + epoch / 10
            metrics = {"accuracy": value, "train_loss": 9.0}
            metrics |= {"f1": value / 2} if trial == 2 else {}
            at = 1.7e9 + trial * 100 + epoch
            now = {**params, "lr": lr(trial, epoch)}
            told.append(EpochEnded(trial, epoch, value, metrics, 1 / epoch, 1.0, at, is_past, now))
        state = ("complete", "failed", "pruned")[trial]
        told.append(TrialEnded(trial, state, value, n_epochs, "why", is_past))
    return told


END = SearchEnded(2, 2.4, 3, 8, 60.0, 120.0)
Read = Callable[[Path], Counter[tuple[int, int, str]]]


def read_csv(folder: Path) -> Counter[tuple[int, int, str]]:
    with (folder / "epochs.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == "3f9a"]
    for row in rows:
        assert float(row["accuracy"]) == int(row["trial"]) + int(row["epoch"]) / 10
        assert float(row["param_lr"]) == lr(int(row["trial"]), int(row["epoch"]))
        assert float(row["train_loss"]) == 1 / int(row["epoch"])
        assert float(row["validation_train_loss"]) == 9.0
        assert row["param_act"] == "relu, or"
        assert row.get("param_depth", "") == ("3" if row["trial"] == "2" else "")
    return Counter((int(row["trial"]), int(row["epoch"]), "accuracy") for row in rows)


def read_tensorboard(folder: Path) -> Counter[tuple[int, int, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    found: Counter[tuple[int, int, str]] = Counter()
    for place in sorted((folder / "tb" / "3f9a").glob("trial-*")):
        trial = int(place.name.partition("-")[2])
        read = EventAccumulator(str(place))
        read.Reload()
        for event in read.Scalars("validation/accuracy"):
            assert event.value == pytest.approx(trial + event.step / 10)
            assert event.wall_time == 1.7e9 + trial * 100 + event.step
            found[trial, event.step, "accuracy"] += 1
        if "params/lr" in read.Tags()["scalars"]:
            changed = {event.step: event.value for event in read.Scalars("params/lr")}
            assert trial == 2
            assert changed == pytest.approx(CHANGED)
        data = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        params = plugin_data_pb2.HParamsPluginData.FromString(data).session_start_info.hparams
        assert params["lr"].number_value == 0.1
    return found


def read_mlflow(uri: str, *, has_ended: bool) -> Counter[tuple[int, int, str]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "digits"]
    runs = client.search_runs([experiment.experiment_id], "tags.`dagsel.run` = '3f9a'")
    (parent,) = [run for run in runs if "dagsel.trial" not in run.data.tags]
    assert (parent.info.status == "FINISHED") == has_ended
    found: Counter[tuple[int, int, str]] = Counter()
    for run in runs:
        if run is parent:
            continue
        trial = int(run.data.tags["dagsel.trial"])
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        if has_ended:
            assert run.info.status == ("FINISHED", "FAILED", "KILLED")[trial]
        assert run.data.params["lr"] == "0.1"
        for metric in client.get_metric_history(run.info.run_id, "accuracy"):
            assert metric.value == trial + metric.step / 10
            found[trial, metric.step, "accuracy"] += 1
        changed = client.get_metric_history(run.info.run_id, "params/lr")
        assert {m.step: m.value for m in changed} == (CHANGED if trial == 2 else {})
        losses = client.get_metric_history(run.info.run_id, "train_loss")
        assert len(losses) == len({loss.step for loss in losses})
    return found


WHOLE = Counter((t, e, "accuracy") for t, n in N_EPOCHS.items() for e in range(1, n + 1))


def after_kills(
    make: Callable[[], Observer], kills: list[int], damage: Callable[[], None] = lambda: None
) -> None:
    """Tell the story to observers of processes that are killed after so many messages."""
    for n in kills:
        observer = make()
        observer.check()
        for told in story(is_past=False)[:n]:
            tell(observer, told)
        damage()
    last = make()
    last.check()
    for told in [*story(is_past=bool(kills)), END]:
        tell(last, told)


KILLS = st.lists(st.integers(0, len(story())), max_size=3)
CUT = st.integers(0, 40)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=KILLS, cut=CUT)
def test_a_csv_file_has_each_epoch_once_also_if_its_end_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    path = folder / "epochs.csv"

    def damage() -> None:
        if path.exists():
            data = path.read_bytes()
            path.write_bytes(data[: max(data.find(b"\n") + 1, len(data) - cut)])

    other = CSV(path)
    for told in story("another"):
        tell(other, told)
    after_kills(lambda: CSV(path), kills, damage)
    assert read_csv(folder) == WHOLE


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def of_run(run: str, params: dict[str, Any], metric: str, n_epochs: int) -> list[Told]:
    """Two searches with other parameters and another metric have other columns."""
    told: list[Told] = [SearchBegan(run, "digits", metric, "maximize", f"runs/{run}")]
    told += [
        EpochEnded(0, n, n / 10, {metric: n / 10}, 2.0, 1.0, 1.7e9, params=params)
        for n in range(1, n_epochs + 1)
    ]
    return told


@given(order=st.permutations([0] * 5 + [1] * 5), cuts=st.sets(st.integers(0, 9)))
def test_two_searches_write_to_one_csv_file_at_once(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], cuts: set[int]
) -> None:
    """A third process may have been killed in the middle of a row."""
    path = tmp_path_factory.mktemp("csv") / "epochs.csv"
    stories = [of_run("a", {"lr": 0.1}, "accuracy", 4), of_run("b", {"width": 7}, "f1", 4)]
    both = [(CSV(path), iter(told)) for told in stories]
    for n, which in enumerate(order):
        observer, told = both[which]
        tell(observer, next(told))
        if n in cuts and path.exists():
            with path.open("a") as file:
                file.write("c,0,1")
    tell(CSV(path), SearchBegan("d", "digits", "f1", "maximize", "runs/d"))
    for run, metric, param, value in (
        ("a", "accuracy", "param_lr", "0.1"),
        ("b", "f1", "param_width", "7"),
    ):
        mine = [row for row in rows(path) if row["run"] == run]
        assert [(r["epoch"], r[metric]) for r in mine] == [
            (str(n), str(n / 10)) for n in range(1, 5)
        ]
        assert {row[param] for row in mine} == {value}
    assert len(rows(path)) == 8


def test_rows_of_two_threads_are_all_there(tmp_path: Path) -> None:
    """Each row has a column that is new, so that the file is replaced all the time."""
    path = tmp_path / "epochs.csv"

    def write(run: str) -> None:
        observer = CSV(path)
        observer.search_began(SearchBegan(run, "digits", "accuracy", "maximize", "runs/1"))
        for n in range(1, 41):
            params = {f"{run}{n}": n}
            observer.epoch_ended(EpochEnded(0, n, 0.5, {}, 2.0, 1.0, 1.7e9, params=params))

    with ThreadPoolExecutor() as threads:
        list(threads.map(write, "ab"))
    found = rows(path)
    assert Counter(row["run"] for row in found) == {"a": 40, "b": 40}
    assert all(row[f"param_{row['run']}{row['epoch']}"] == row["epoch"] for row in found)


def test_a_csv_file_whose_only_row_is_cut_off_has_it_again(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    texts = []
    for _ in range(2):
        observer = CSV(path)
        for told in story():
            tell(observer, told)
        texts.append(path.read_text())
        head, row, *_ = texts[0].splitlines(keepends=True)
        path.write_text(head + row[:-8])
    assert texts[0] == texts[1]


@settings(max_examples=10)
@given(kills=KILLS, cut=CUT)
def test_event_files_of_tensorboard_have_each_epoch_once(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("tb")
    n_files = 0

    def make() -> Observer:
        nonlocal n_files
        n_files += 1
        observer = TensorBoard(folder=folder / "tb")
        observer._session += f".{n_files}"  # of another process
        return observer

    def damage() -> None:
        files = sorted((folder / "tb").rglob("events.*"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[-1:]:
            data = path.read_bytes()
            path.write_bytes(data[: max(40, len(data) - cut)])

    after_kills(make, kills, damage)
    assert read_tensorboard(folder) == WHOLE


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_runs_of_mlflow_have_each_epoch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"sqlite:///{tmp_path}/mlflow.db" if kind == "sqlite" else f"file://{tmp_path}/mlruns"
    after_kills(lambda: MLflow(uri), [3])
    assert read_mlflow(uri, has_ended=True) == WHOLE


def test_offline_runs_of_wandb_have_each_epoch_and_the_parameters(tmp_path: Path) -> None:
    """What SIGKILL leaves of them is in tests/execution/test_observers.py."""
    observer = WandB(folder=tmp_path)
    observer.check()
    for told in [*story(), END]:
        tell(observer, told)
    found = list(wandb_files.epochs(tmp_path, "3f9a"))
    assert Counter((trial, step, "accuracy") for trial, step, _ in found) == WHOLE
    for trial, step, values in found:
        assert values["accuracy"] == trial + step / 10
        assert values["train_loss"] == 1 / step
        assert values["validation_train_loss"] == 9.0
        assert ("f1" in values) == (trial == 2)
        assert values.get("params/lr") == (CHANGED.get(step) if trial == 2 else None)
    configs = wandb_files.configs(tmp_path, "3f9a")
    assert configs[0] == {"lr": 0.1, "act": "relu, or"}
    assert configs[2] == {"lr": 0.1, "act": "relu, or", "depth": 3}


@pytest.mark.parametrize("study", ["cifar/resnet", "2026-11-30 10:00", "50%", "\\#?", 200 * "x"])
def test_a_study_of_any_name_has_a_project_of_wandb(tmp_path: Path, study: str) -> None:
    observer = WandB(folder=tmp_path)
    observer.check()
    for told in [replace(BEGAN, study=study), *story()[1:], END]:
        tell(observer, told)
    assert len([*wandb_files.epochs(tmp_path, "3f9a")]) == sum(N_EPOCHS.values())
    with pytest.raises(SearchError, match=r"W&B takes no project .*; write '"):
        WandB(study, folder=tmp_path).check()


def test_a_search_that_goes_on_writes_offline_runs_of_wandb_anew(tmp_path: Path) -> None:
    """As it does after Ctrl-C; those of other searches stay."""
    for told in ([*story("77aa"), END], [*story()[:-3], END], [*story(is_past=True), END]):
        observer = WandB(folder=tmp_path)
        for one in told:
            tell(observer, one)
    for run in ("3f9a", "77aa"):
        found = wandb_files.epochs(tmp_path, run)
        assert Counter((trial, step, "accuracy") for trial, step, _ in found) == WHOLE


def test_old_runs_of_wandb_go_though_its_process_for_a_killed_driver_still_writes(
    tmp_path: Path,
) -> None:
    old = tmp_path / "wandb" / "offline-run-20261130_100000-3f9a-0001" / "files"
    old.mkdir(parents=True)
    first = threading.Event()

    def write() -> None:
        for number in itertools.count():
            try:
                (old / f"{number}.json").touch()
            except OSError:
                return  # it is gone
            if number == 500:
                first.set()
            if number == 5000:
                return

    writer = threading.Thread(target=write)
    writer.start()
    assert first.wait(60)
    WandB(folder=tmp_path).search_began(replace(BEGAN, goes_on=True))
    writer.join()
    assert not old.parent.exists()


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_names_that_mlflow_does_not_take_are_written_otherwise(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    names = {
        "confusion[0,1]": "confusion_0_1",
        "acc#3": "acc_3",
        "acc@3": "acc_3_2",
        "val/f1": "val/f1",
        "/x": "_x",
        "train_loss": "validation_train_loss",
    }
    metrics = dict(zip(names, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), strict=True))
    observer = MLflow(uri)
    observer.check()
    for is_past in (False, True):
        for told in (
            BEGAN,
            TrialBegan(0, {"weight decay (L2)": 0.1}),
            EpochEnded(0, 1, 0.5, metrics, 0.4, 1.0, 1.7e9, is_past),
        ):
            tell(observer, told)
    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "digits"]
    (run,) = client.search_runs([experiment.experiment_id], "tags.`dagsel.trial` = '0'")
    assert run.data.params == {"weight decay _L2": "0.1"}
    found = {names[name]: value for name, value in metrics.items()}
    assert run.data.metrics == found | {"train_loss": 0.4}
    assert len(client.get_metric_history(run.info.run_id, "acc_3")) == 1


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_a_run_of_mlflow_that_was_begun_without_parameters_is_given_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    params = {"lr": 0.1, "act@1": "relu", "act#1": "tanh", "act_1": 3}

    def begin(*, is_past: bool) -> None:
        observer = MLflow(uri)
        observer.check()
        for told in (replace(BEGAN, goes_on=is_past), TrialBegan(0, params, is_past)):
            tell(observer, told)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            begin(is_past=False)
    begin(is_past=True)
    begin(is_past=True)
    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "digits"]
    (run,) = client.search_runs([experiment.experiment_id], "tags.`dagsel.trial` = '0'")
    assert run.data.params == {"lr": "0.1", "act_1": "3", "act_1_2": "tanh", "act_1_3": "relu"}


def test_what_is_missing_or_cannot_be_written_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SearchError, match="CSV cannot write"):
        CSV(tmp_path / "file" / "epochs.csv").check()
    with pytest.raises(SearchError, match="TensorBoard cannot write"):
        TensorBoard(tmp_path / "file").check()
    with pytest.raises(SearchError, match="WandB cannot write"):
        WandB(folder=tmp_path / "file").check()
    with pytest.raises(SearchError, match="mode must be one of 'offline', 'online', got 'dryrun'"):
        WandB(mode="dryrun")  # type: ignore[arg-type]
    monkeypatch.setenv("HOME", str(tmp_path))  # where nobody has logged in
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(SearchError, match='run wandb login, or give mode="offline"'):
        WandB("digits", mode="online", entity="us").check()
    with pytest.raises(SearchError, match="MLflow cannot use nothing://here"):
        MLflow("nothing://here", experiment="mine").check()
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SearchError, match="is another file"):
        CSV(tmp_path / "mine.csv").search_began(BEGAN)
    find = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith(("tensorboard", "mlflow", "wandb")):
            raise ImportError(f"No module named {name!r}")
        return find(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SearchError, match=r'pip install "dagsel\[tensorboard\]"'):
        TensorBoard(tmp_path).check()
    with pytest.raises(SearchError, match=r'pip install "dagsel\[mlflow\]"'):
        MLflow().check()
    with pytest.raises(SearchError, match=r'pip install "dagsel\[wandb\]"'):
        WandB().check()
