"""`dagsel.optimize` on a real cluster: what bad input gets, and what becomes of bad trials."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import dask.config
import numpy as np
import optuna
import psutil
import pytest
import torch
from distributed import Client, LocalCluster, Scheduler
from sklearn.datasets import load_digits

import dagsel
from dagsel import errors
from dagsel.dispatch.events import TrialAllowed
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.execution import worker_plugin
from dagsel.execution.cluster import local_cluster
from dagsel.execution.run_spec import CHANNEL, RUN_TOPIC
from dagsel.flows import Grid, RandomSearch, SuccessiveHalving
from dagsel.messages import ORDERS, ForgetState
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.gang.gang import Gang
from tests.conftest import Optimize
from tests.waiting import wait_until

from .helpers import done, endless, engine_for, listen

LOCK: Any = threading.Lock()
FLOW = RandomSearch(max_epochs=2, n_trials=3)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1), "bad": trial.number % 2}


def torch_workload(**changes: Any) -> dagsel.TorchWorkload:
    parts: dict[str, Any] = {
        "model": lambda config: torch.nn.Linear(64, 10),
        "loss": torch.nn.functional.cross_entropy,
        "optimizer": lambda parameters, config: torch.optim.SGD(parameters, lr=config["lr"]),
        "batch_size": 32,
        "metrics": {"accuracy": dagsel.metrics.accuracy},
    }
    return dagsel.TorchWorkload(**{**parts, **changes})


@pytest.fixture
def optimize(
    optimize: Optimize, client: Client, digits: ShardedDataset, study: optuna.Study
) -> Optimize:
    def call(workload: Any = None, **given: Any) -> dagsel.Run:
        default = {"study": study, "data": digits, "space": space, "flow": FLOW}
        default |= {"metric": "accuracy", "client": client}
        return optimize(workload=workload or torch_workload(), **(default | given))

    return call


def nothing(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": 0.1}


def no_config(trial: optuna.Trial) -> Any:
    trial.suggest_float("lr", 0.01, 0.1)


BAD_INPUT: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a space that suggests nothing": (
        {"space": nothing}, errors.SearchError, "suggests nothing"),
    "a space that returns nothing": (
        {"space": no_config}, errors.SearchError, "as a dict, got NoneType"),
    "a metric that is not there": (
        {"metric": "f1"}, errors.SearchError, "no metric 'f1', it gives loss, accuracy"),
    "a direction that is not the metric's": (
        {"metric": "loss"}, errors.SearchError, "create the study with direction='minimize'"),
    "a grid over a continuous space": (
        {"flow": Grid(max_epochs=1)}, errors.SearchError, "'lr' is continuous"),
    "no flow": (
        {"flow": "asha"}, errors.SearchError, "must be a search procedure"),
    "a model that cannot be pickled": (
        {"workload": torch_workload(model=lambda config: LOCK and torch.nn.Linear(64, 10))},
        errors.WorkloadTransportError, "'model' of the TorchWorkload cannot be sent"),
    "a loss that cannot be pickled": (
        {"workload": torch_workload(loss=lambda output, target: LOCK and output.sum())},
        errors.WorkloadTransportError, "'loss' of the TorchWorkload cannot be sent"),
    "a batch size below one": (
        {"workload": torch_workload(batch_size=lambda config: 0)},
        errors.WorkloadError, "batch_size must be a whole number of 1 or more, got 0"),
    "a data set that is not there": (
        {"data": "nowhere.zarr"}, errors.DatasetNotFoundError, "nowhere.zarr"),
    "a scheduler that is not there": (
        {"client": "tcp://127.0.0.1:9"}, errors.ClusterError, "no scheduler at"),
}  # fmt: skip


def test_two_small_arrays_are_one_shard_that_each_worker_has(optimize: Optimize) -> None:
    bunch = load_digits()
    run = optimize(data=((bunch.data / 16).astype(np.float32), bunch.target))
    timeline = run.timeline()
    assert len(timeline) == 2 * FLOW.max_epochs * FLOW.n_trials  # a pass to train, one to score
    assert timeline.worker.nunique() == 2


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_before_any_unit_runs(
    name: str, optimize: Optimize, study: optuna.Study
) -> None:
    changes, error, text = BAD_INPUT[name]
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        with pytest.raises(error, match=text):
            optimize(**changes)
    assert study.trials == []


def test_a_study_of_several_directions_is_refused(optimize: Optimize) -> None:
    study = optuna.create_study(study_name="two", directions=["maximize", "minimize"])
    with pytest.raises(errors.SearchError, match="has 2 directions"):
        optimize(study=study)


def test_a_run_dir_that_holds_a_run_is_refused(optimize: Optimize, tmp_path: Path) -> None:
    optimize(SyntheticWorkload(), metric="value")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(errors.RunDirError, match="holds run .* already"):
        optimize(SyntheticWorkload(), metric="value")
    assert sorted(tmp_path.rglob("*")) == before


def explode(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("this loss is broken")


def test_a_trial_that_raises_fails_alone(optimize: Optimize, study: optuna.Study) -> None:
    def fragile(config: Any) -> torch.nn.Module:
        class Fragile(torch.nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if config["bad"]:
                    raise RuntimeError("this model is broken")
                return super().forward(x)

        return Fragile(64, 10)

    run = optimize(torch_workload(model=fragile), flow=RandomSearch(max_epochs=2, n_trials=6))
    assert [t.state.name for t in study.trials] == ["COMPLETE", "FAIL"] * 3
    assert [t.number for t in run.failures] == [1, 3, 5]
    for failure in run.failures:
        assert "this model is broken" in failure.reason
        assert "in forward" in failure.traceback
        assert failure.traceback == study.trials[failure.number].user_attrs["dagsel:traceback"]
    assert run.best.trial in (0, 2, 4)
    assert "3 complete, 3 failed" in repr(run)


def test_a_trial_whose_states_are_whole_and_cannot_be_read_fails_alone(
    optimize: Optimize,
) -> None:
    class Unreadable(SyntheticWorkload):
        def train(self, state: Any, shard: Any, config: Any, *, visit: Any, **rest: Any) -> Any:
            if config["bad"] and visit.epoch == 2:
                raise errors.CheckpointCorruptError("a state names a class of another version")
            return super().train(state, shard, config, visit=visit, **rest)

    run = optimize(Unreadable(), metric="value")
    assert [trial.number for trial in run.failures] == [1]
    assert "another version" in run.failures[0].reason


def test_a_trial_whose_state_could_not_be_read_once_goes_on(
    optimize: Optimize, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"

    class Flickering(SyntheticWorkload):
        def train(self, state: Any, shard: Any, config: Any, *, visit: Any, **rest: Any) -> Any:
            if config["bad"] and visit.epoch == 2 and not seen.exists():
                seen.touch()
                raise errors.CheckpointCorruptError("the disk had a moment")
            return super().train(state, shard, config, visit=visit, **rest)

    run = optimize(Flickering(), metric="value")
    assert seen.exists()
    assert run.failures == []


def test_a_trial_that_becomes_nan_fails_alone(optimize: Optimize, study: optuna.Study) -> None:
    def value(config: Any, epoch: int) -> float:
        return math.nan if config["bad"] and epoch == 2 else 0.5

    run = optimize(SyntheticWorkload(value=value), metric="value")
    assert [t.state.name for t in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert "NaN" in run.failures[0].reason


def test_a_run_without_a_completed_trial_has_no_best(optimize: Optimize) -> None:
    def diverges(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() * math.nan

    run = optimize(torch_workload(loss=diverges))
    assert len(run.failures) == 3
    with pytest.raises(errors.NoCompletedTrialError, match="the training loss of epoch 1 is NaN"):
        _ = run.best_value
    assert "3 failed" in run._repr_html_()


def test_trials_that_all_fail_alike_end_the_search(optimize: Optimize) -> None:
    with pytest.raises(errors.AllTrialsFailedError, match="this loss is broken"):
        optimize(torch_workload(loss=explode))


def test_the_cluster_is_left_as_it_was(client: Client, optimize: Optimize) -> None:
    def traces(dask_scheduler: Any) -> Any:
        return (
            sorted(dask_scheduler.plugins),
            sorted(dask_scheduler.worker_plugins),
            sorted(map(str, dask_scheduler.tasks)),
            {w: dict(ws.resources) for w, ws in dask_scheduler.workers.items()},
        )

    def on_worker(dask_worker: Any) -> Any:
        return sorted(dask_worker.plugins), dict(dask_worker.state.total_resources)

    before = client.run_on_scheduler(traces), client.run(on_worker)
    optimize(SyntheticWorkload(), metric="value")
    assert (client.run_on_scheduler(traces), client.run(on_worker)) == before


def test_the_messages_of_a_run_are_forgotten_with_it(
    client: Client, optimize: Optimize, run_dir: str
) -> None:
    def messages(dask_scheduler: Any) -> dict[str, int]:
        found = dask_scheduler.get_events().items()
        return {topic: len(told) for topic, told in found if RUN_TOPIC.fullmatch(topic)}

    optimize(SyntheticWorkload(), metric="value")
    late = client.run_on_scheduler(messages)
    assert {topic.rpartition("-")[2] for topic in late} <= {"workers"}
    optimize(SyntheticWorkload(), metric="value", run_dir=f"{run_dir}-again")
    assert not client.run_on_scheduler(messages).keys() & late.keys()


def test_a_worker_without_the_resource_gets_it_and_loses_it_again(
    optimize: Optimize,
) -> None:
    def resources(dask_scheduler: Any) -> Any:
        return {w: dict(ws.resources) for w, ws in dask_scheduler.workers.items()}

    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        before = client.run_on_scheduler(resources)
        run = optimize(SyntheticWorkload(seconds=0.01), metric="value", client=client)
        assert client.run_on_scheduler(resources) == before
    timeline = run.timeline().sort_values("start")
    assert (timeline.start.to_numpy()[1:] >= timeline.stop.to_numpy()[:-1]).all()


def test_a_run_that_ends_does_not_wait_for_the_units_of_another(
    optimize: Optimize,
    digits: ShardedDataset,
    run_dir: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_plugin, "PATIENCE_S", 1e9)
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        other = endless(cluster.scheduler_address, digits, f"{run_dir}-other")
        plugins = {*cluster.workers[0].plugins}
        optimize(SyntheticWorkload(), metric="value", client=client)
        assert {*cluster.workers[0].plugins} == plugins
        assert "does not answer" not in caplog.text
        assert other.is_running
        other.finish()
        other.wait()
        assert "TRAIN" not in cluster.workers[0].state.total_resources


def test_a_worker_on_which_no_unit_could_run_is_refused_and_named(optimize: Optimize) -> None:
    with LocalCluster(
        n_workers=1, processes=False, dashboard_address="127.0.0.1:0", resources={"TRAIN": 0}
    ) as cluster:
        address = cluster.scheduler_address
        with pytest.raises(errors.ClusterError, match=r"started with the resource TRAIN=0, so"):
            optimize(SyntheticWorkload(), metric="value", client=address)


def test_no_worker_is_an_error_that_says_so(
    optimize: Optimize, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", host="127.0.0.1") as cluster:
        address = cluster.scheduler_address  # with the cluster itself it would ask for one
        with pytest.raises(errors.NoWorkersError, match="no worker came within 0.5 s"):
            optimize(SyntheticWorkload(), metric="value", client=address, worker_timeout=0.5)
    assert "no worker is there yet: one is waited for, for 0.5 s" in caplog.text


def test_a_worker_that_is_too_small_is_named_with_its_numbers(optimize: Optimize) -> None:
    arrays = {"x": np.zeros((1000, 5_000), np.float32)}
    data = ShardedDataset.write("memory://too-large.zarr", arrays, n_shards=1, overwrite=True)
    with LocalCluster(
        n_workers=1, processes=False, memory_limit="30 MB", dashboard_address="127.0.0.1:0"
    ) as cluster:
        with pytest.raises(errors.WorkerMemoryError, match="30,000,000 bytes.*20,000,000 bytes"):
            optimize(
                SyntheticWorkload(),
                data=data,
                metric="value",
                client=None,
                cluster=cluster,
                hold="memory",
            )


def test_a_run_dir_out_of_the_workers_reach_is_named(
    optimize: Optimize,
) -> None:
    with pytest.raises(errors.ClusterError, match=r"cannot reach run_dir memory://only-here"):
        optimize(SyntheticWorkload(), metric="value", run_dir="memory://only-here")


def test_a_module_that_workers_cannot_import_is_named(
    optimize: Optimize, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(config: Any) -> torch.nn.Module:
        return torch.nn.Linear(64, 10)

    here: Any = ModuleType("only_here")
    model.__module__, model.__qualname__, here.model = "only_here", "model", model
    monkeypatch.setitem(sys.modules, "only_here", here)
    with pytest.raises(errors.ClusterError, match="'only_here'; install it on the workers, or"):
        optimize(torch_workload(model=model))


def test_a_module_that_was_changed_after_workers_had_imported_it_is_named(
    optimize: Optimize,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = tmp_path / "mine_by_path.py"
    module.write_text(
        "from dagsel.testing.synthetic import SyntheticWorkload\n\n\n"
        "class Mine(SyntheticWorkload): ...\n"
    )
    client.run(exec, f"import sys; sys.path.append({str(tmp_path)!r})")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine_by_path")
    try:
        optimize(mine.Mine(), metric="value", run_dir=tmp_path / "first")
        assert "mine_by_path" not in caplog.text
        module.write_text(f"{module.read_text()}# changed\n")
        optimize(mine.Mine(), metric="value", run_dir=tmp_path / "old")
        assert "mine_by_path" not in caplog.text  # all have what there was
        importlib.reload(mine)
        optimize(mine.Mine(), metric="value", run_dir=tmp_path / "new")
        told = "mine_by_path on the workers is not what it is here: a file was changed"
        assert caplog.text.count(told) == 1
    finally:
        client.run(exec, "import sys; sys.path.pop(); sys.modules.pop('mine_by_path', None)")
        sys.modules.pop("mine_by_path")


def test_a_data_set_out_of_the_workers_reach_is_named(optimize: Optimize) -> None:
    data = ShardedDataset.write("memory://here-alone", {"x": np.arange(40)}, n_shards=2)
    with pytest.raises(errors.ClusterError, match="cannot reach the data set memory://here-alone"):
        optimize(SyntheticWorkload(), data=data, metric="value")


def test_an_address_does_for_a_client(cluster: LocalCluster, optimize: Optimize) -> None:
    run = optimize(SyntheticWorkload(), metric="value", client=cluster.scheduler_address)
    assert run.best_value == pytest.approx(2 / 3)


def test_a_worker_of_another_version_is_named(optimize: Optimize, tmp_path: Path) -> None:
    # A worker process that finds the metadata of another dagsel first on its path.
    old = tmp_path / "elsewhere" / "dagsel-0.0.9.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: dagsel\nVersion: 0.0.9\n")
    with LocalCluster(
        n_workers=0, dashboard_address="127.0.0.1:0", host="127.0.0.1", protocol="tcp"
    ) as cluster:
        command = [
            sys.executable,
            "-m",
            "dask",
            "worker",
            cluster.scheduler_address,
            "--no-dashboard",
        ]
        environment = {**os.environ, "PYTHONPATH": str(old.parent)}
        with (
            Client(cluster, set_as_default=False) as client,
            (tmp_path / "worker.log").open("wb") as log,
            subprocess.Popen(
                command, env=environment, cwd=tmp_path, stdout=log, stderr=log
            ) as worker,
        ):
            try:
                client.wait_for_workers(1, timeout=60)
                with pytest.raises(errors.VersionMismatchError, match="and 0.0.9 on tcp:"):
                    optimize(SyntheticWorkload(), metric="value", client=client)
            finally:
                worker.terminate()


DRIVER = """
import sys, optuna, dagsel
from dagsel.flows import RandomSearch
from dagsel.testing.synthetic import SyntheticWorkload
if __name__ == "__main__":
    study = optuna.create_study(study_name="lost", direction="maximize")
    def space(trial):
        return {"x": trial.suggest_int("x", 0, 9)}
    workload = SyntheticWorkload(seconds=0.05)
    dagsel.optimize(study, workload, sys.argv[1], space=space, metric="value",
                    flow=RandomSearch(max_epochs=1000, n_trials=4), client=sys.argv[2],
                    run_dir=sys.argv[3])
"""


def test_a_driver_that_is_killed_leaves_nothing_on_the_cluster(
    client: Client, cluster: LocalCluster, digits: ShardedDataset, run_dir: str
) -> None:
    def ours(dask_scheduler: Any) -> list[str]:
        tasks = [str(key) for key in dask_scheduler.tasks]
        plugins = [name for name in dask_scheduler.plugins if name.startswith("dagsel")]
        return tasks + plugins + list(dask_scheduler.worker_plugins)

    def units(dask_scheduler: Any) -> int:
        return sum(task.state == "processing" for task in dask_scheduler.tasks.values())

    before = client.run_on_scheduler(ours)
    command = [sys.executable, "-c", DRIVER, digits.url, cluster.scheduler_address, run_dir]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as driver:
        wait_until(
            lambda: client.run_on_scheduler(units) or driver.poll() is not None,
            "units of the driver",
        )
        assert driver.poll() is None
        driver.kill()
    wait_until(lambda: client.run_on_scheduler(ours) == before, "nothing of the driver is left")


def test_callbacks_get_what_optuna_gives_them(optimize: Optimize, study: optuna.Study) -> None:
    heard: list[tuple[str, int, str]] = []
    optimize(
        SyntheticWorkload(),
        metric="value",
        callbacks=[lambda s, trial: heard.append((s.study_name, trial.number, trial.state.name))],
    )
    assert sorted(heard) == [("test", n, "COMPLETE") for n in range(3)]


def test_a_space_without_further_points_is_told_of(
    optimize: Optimize, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"x": trial.suggest_categorical("x", [1, 2, 3])}

    given: dict[str, Any] = {"workload": SyntheticWorkload(), "metric": "value", "space": space}
    flow = RandomSearch(max_epochs=1, n_trials=5)
    run = optimize(flow=flow, run_dir=tmp_path / "first", **given)
    assert len(run.record.trials) == 3
    assert caplog.messages[-1].endswith("has no further points: this run has drawn 3")
    run = optimize(flow=flow, run_dir=tmp_path / "second", **given)
    assert not run.record.trials
    assert "drawn 0, and 3 are in the study already" in caplog.messages[-1]
    assert run.record.notes == caplog.messages[-1:]
    caplog.clear()
    run = optimize(flow=Grid(max_epochs=1), run_dir=tmp_path / "third", **given)
    assert len(run.record.trials) == 3
    assert caplog.messages == []


def test_constraints_rank_as_optuna_ranks_them(
    optimize: Optimize, study: optuna.Study, client: Client, run_dir: str
) -> None:
    def constrained(trial: optuna.Trial) -> dict[str, Any]:
        x = trial.suggest_float("x", 0.0, 1.0)
        trial.set_constraint("small", x - 0.5)  # feasible up to 0.5
        return {"x": x}

    workload = SyntheticWorkload(value=lambda config, epoch: config["x"])
    flow = RandomSearch(max_epochs=1, n_trials=8)
    run = optimize(workload, flow=flow, metric="value", space=constrained, run_dir=run_dir)
    assert run.best_value == study.best_value <= 0.5
    assert run.best.trial == study.best_trial.number
    assert max(run.leaderboard()["value"]) > 0.5
    assert list(run.leaderboard()["feasible"]) == sorted(run.leaderboard()["feasible"])[::-1]
    again = dagsel.resume(run_dir, client, workload=workload, space=constrained, study=study)
    assert again.best == run.best


@pytest.mark.filterwarnings("ignore:.*constraints_func.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*constraints_func.*:optuna.exceptions.ExperimentalWarning")
def test_constraints_of_a_sampler_rank_as_optuna_ranks_them(optimize: Optimize) -> None:
    sampler = optuna.samplers.TPESampler(
        seed=0, constraints_func=lambda trial: (trial.params["x"] - 0.5,)
    )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    workload = SyntheticWorkload(value=lambda config, epoch: config["x"])
    flow = RandomSearch(max_epochs=1, n_trials=8)
    run = optimize(
        workload, flow=flow, metric="value", study=study,
        space=lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)},
    )  # fmt: skip
    assert {trial.is_feasible for trial in run.record.trials.values()} == {True, False}
    assert run.best_value == study.best_value <= 0.5
    assert run.best.trial == study.best_trial.number


def test_a_trial_that_breaks_a_constraint_takes_no_place_in_a_rung(
    optimize: Optimize, study: optuna.Study, client: Client, run_dir: str
) -> None:
    def constrained(trial: optuna.Trial) -> dict[str, Any]:
        x = trial.suggest_float("x", 0.0, 1.0)
        trial.set_constraint("small", x - 0.5)
        return {"x": x}

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    workload = SyntheticWorkload(value=lambda config, epoch: config["x"])
    flow = SuccessiveHalving(max_epochs=4, n_trials=8, reduction_factor=2)
    with pytest.raises(KeyboardInterrupt):
        optimize(
            workload, flow=flow, metric="value", space=constrained, run_dir=run_dir,
            callbacks=[interrupt],
        )  # fmt: skip
    # What the flow heard is put to it once more, and it must decide as it did.
    run = dagsel.resume(run_dir, client, workload=workload, space=constrained, study=study)
    trained: dict[bool, list[int]] = {True: [], False: []}
    for trial in run.record.trials.values():
        trained[trial.is_feasible].append(len(trial.epochs))
    assert all(trained.values())
    assert max(trained[True]) == 4
    assert min(trained[True]) >= max(trained[False])
    assert run.best_value == study.best_value <= 0.5


def stop_at_once(study: optuna.Study, trial: Any) -> None:
    study.stop()


@pytest.mark.parametrize("callback", [optuna.study.MaxTrialsCallback(2), stop_at_once])
def test_a_callback_stops_the_search_in_order(
    callback: Any, optimize: Optimize, study: optuna.Study, client: Client
) -> None:
    flow = RandomSearch(max_epochs=2, n_trials=40, n_concurrent=2)
    run = optimize(SyntheticWorkload(), flow=flow, metric="value", callbacks=[callback])
    states = Counter(trial.state.name for trial in study.trials)
    assert set(states) <= {"COMPLETE", "PRUNED"}
    assert states.total() < 40
    assert run.record.finished
    pruned = {trial.reason for trial in run.record.trials.values() if trial.state == "pruned"}
    assert pruned <= {"the search was ended by the user"}
    assert run.best_value == study.best_value
    assert run.best_model()


def test_an_error_in_a_callback_ends_the_search_in_order_and_is_raised(
    optimize: Optimize, study: optuna.Study, client: Client, run_dir: str
) -> None:
    def broken(study: optuna.Study, trial: Any) -> None:
        raise ZeroDivisionError("mine")

    flow = RandomSearch(max_epochs=2, n_trials=40, n_concurrent=2)
    options: dict[str, Any] = {"flow": flow, "metric": "value", "run_dir": run_dir}
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        optimize(SyntheticWorkload(), callbacks=[broken], **options)
    (note,) = raised.value.__notes__
    assert "a callback raised it" in note
    assert "best value" in note
    assert {trial.state.name for trial in study.trials} <= {"COMPLETE", "PRUNED"}
    again = dagsel.resume(run_dir, client, workload=SyntheticWorkload(), space=space, study=study)
    assert again.best_value == study.best_value
    assert again.best_model()


def test_a_run_that_is_interrupted_leaves_nothing_on_the_cluster_and_its_trials_running(
    optimize: Optimize, study: optuna.Study, client: Client
) -> None:
    def interrupt(study: optuna.Study, trial: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimize(SyntheticWorkload(), metric="value", callbacks=[interrupt])
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "RUNNING"}
    assert not client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))


def test_what_a_worker_hears_after_the_end_of_its_run_does_no_harm(
    optimize: Optimize, client: Client
) -> None:
    optimize(SyntheticWorkload(), metric="value")
    before = client.run(os.getpid)

    def tell(dask_scheduler: Scheduler, worker: str) -> None:
        order = ORDERS.encode(ForgetState(Unit("train", 0, 1, 0)))
        told = {"op": CHANNEL, "run": "ended", "order": order}
        dask_scheduler.worker_send(worker, told)

    for worker in before:
        client.run_on_scheduler(tell, worker=worker)
        # What the scheduler sends to a worker comes in order: the task, after the message.
        assert client.submit(os.getpid, workers=[worker], pure=False).result() == before[worker]
    assert client.run(os.getpid) == before


def _listening(*processes: psutil.Process) -> set[tuple[str, int]]:
    sockets = [s for process in processes for s in process.net_connections("inet")]
    return {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}


def _family() -> list[psutil.Process]:
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def test_a_cluster_of_ours_listens_on_loopback_only(
    digits: ShardedDataset, tmp_path: Path, run_dir: str
) -> None:
    class Watched(SyntheticWorkload):
        def train_gang(self, *args: Any, gang: Gang, **rest: Any) -> Any:
            sockets = sorted(_listening(psutil.Process()))
            (tmp_path / f"rank-{gang.rank}").write_text(json.dumps(sockets))
            return super().train_gang(*args, gang=gang, **rest)

    before = _listening(*_family())  # other tests' clusters
    with local_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
        opened = _listening(*_family()) - before
        port = urlsplit(cluster.scheduler_address).port
        with engine_for(client, digits, Watched(), run_dir) as engine:
            engine.tell(TrialAllowed(0, 2, None, 1))
            engine.submit(Round(1, (Chain(0, range(1, 2), 4, evaluate=False),)), {0: {}})
            listen(engine, until=lambda heard: len(done(heard)) == 4)
    leads, follows = (
        {(address, port) for address, port in json.loads((tmp_path / f"rank-{rank}").read_text())}
        for rank in range(2)
    )
    assert ("127.0.0.1", port) in opened
    assert leads - opened  # where its gang has met
    assert {address for address, _ in opened | leads | follows} <= {"127.0.0.1", "::1"}
