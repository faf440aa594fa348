"""Metrics of the whole validation set on a cluster: of the pooled set, whatever is interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from distributed import Client
from sklearn import metrics as sk

import dagsel
from dagsel.errors import AllTrialsFailedError, SearchError
from dagsel.flows import RandomSearch
from dagsel.metrics import over_set
from dagsel.storage import RunDir, ShardedDataset
from tests.conftest import Optimize

from .helpers import own_cluster, validation_of
from .interrupted import interrupt, stopping_after

N_SHARDS = 4
FLOW = RandomSearch(max_epochs=3, n_trials=3)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


def workload(**more: Any) -> dagsel.TorchWorkload:
    # Here, as its import takes seconds in each process that collects tests.
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {
        "auroc": dagsel.metrics.auroc,
        "f1": dagsel.metrics.f1,
        "torch_auroc": torchmetrics.classification.MulticlassAUROC(10),
        "confusion": over_set(lambda o, t: sk.confusion_matrix(t, o.argmax(1), labels=range(10))),
        "accuracy": dagsel.metrics.accuracy,
        **more,
    }
    return dagsel.TorchWorkload(
        model=lambda config: torch.nn.Linear(64, 10),
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.SGD,
        batch_size=32,
        metrics=metrics,
    )


@pytest.fixture
def search(
    optimize: Optimize, client: Client, digits: ShardedDataset, study: optuna.Study
) -> Optimize:
    def call(flow: Any = FLOW, **given: Any) -> dagsel.Run:
        default = {"study": study, "data": digits, "space": space, "workload": workload()}
        return optimize(flow, **{**default, "metric": "auroc", "client": client, **given})

    return call


def check(run: dagsel.Run, data: ShardedDataset) -> None:
    """What the epoch of the best model was scored with is what its model has on the pooled set."""
    inputs, target = validation_of(data)
    with torch.inference_mode():
        output = run.best_model()(inputs)
    predicted = output.argmax(1)
    found = run.record.trials[run.best.trial].epochs[run.best.epoch - 1].metrics
    wanted = sk.roc_auc_score(target, output.double().softmax(1), multi_class="ovr")
    assert run.best_value == found["auroc"] == pytest.approx(wanted, abs=1e-12)
    assert found["f1"] == pytest.approx(sk.f1_score(target, predicted, average="macro"), abs=1e-12)
    assert found["torch_auroc"] == pytest.approx(wanted, abs=1e-5)
    matrix = sk.confusion_matrix(target, predicted)
    assert all(found[f"confusion[{i},{j}]"] == matrix[i, j] for i in range(10) for j in range(10))
    assert found["accuracy"] == pytest.approx(float((predicted == target).double().mean()))
    assert not list(Path(run.run_dir.url, "states").rglob("scores-*")), "they are known by now"


def test_metrics_of_the_whole_set_are_those_of_the_pooled_set(
    search: Optimize, digits: ShardedDataset
) -> None:
    run = search()
    check(run, digits)
    assert run.study.best_value == run.best_value
    assert {"auroc", "f1", "confusion[3,5]"} <= set(run.metrics["name"])


def test_r2_is_that_of_the_pooled_set(search: Optimize, digits: ShardedDataset) -> None:
    regression = dagsel.TorchWorkload(
        model=lambda config: torch.nn.Linear(64, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        batch_size=32,
        metrics=["r2"],
        input_fn=lambda batch, config: (batch["x"] / 64, batch["y"][:, None].float()),
    )
    run = search(workload=regression, metric="r2")
    inputs, target = validation_of(digits)
    with torch.inference_mode():
        guess = run.best_model()(inputs / 64)[:, 0]
    # The search scores shard by shard: float32 sums of another number of rows.
    assert run.best_value == pytest.approx(sk.r2_score(target, guess.double()), abs=1e-7)
    assert run.best_value < 1


@pytest.mark.parametrize(("n_workers", "n_shards"), [(1, 1), (3, 5), (4, 16)])
def test_they_are_the_same_whatever_the_shards_and_workers(
    n_workers: int,
    n_shards: int,
    optimize: Optimize,
    digits: ShardedDataset,
    study: optuna.Study,
    run_dir: str,
) -> None:
    data = ShardedDataset.write(f"{run_dir}.zarr", digits, n_shards=n_shards)
    with own_cluster(n_workers) as cluster, Client(cluster, set_as_default=False) as client:
        given: dict[str, Any] = {"study": study, "data": data, "workload": workload()}
        run = optimize(FLOW, space=space, metric="auroc", client=client, **given)
        check(run, data)


def test_a_driver_that_is_stopped_anywhere_goes_on_with_the_same_numbers(
    search: Optimize, client: Client, digits: ShardedDataset, run_dir: str, study: optuna.Study
) -> None:
    whole = search(run_dir=f"{run_dir}-whole", deterministic=True, study=optuna.create_study(
        study_name="whole", direction="maximize"))  # fmt: skip
    with pytest.raises(KeyboardInterrupt), stopping_after(14, interrupt):
        search(deterministic=True)
    for n_steps in (8, 10, 12):
        try:
            with stopping_after(n_steps, interrupt):
                run = dagsel.resume(run_dir, client, workload=workload(), space=space, study=study)
        except KeyboardInterrupt:
            for path in list(Path(run_dir, "states").rglob("scores-*.json"))[:1]:
                path.write_text("damaged")
        else:
            break
    else:
        run = dagsel.resume(run_dir, client, workload=workload(), space=space, study=study)
    check(run, digits)
    assert len(run.record.sessions) >= 3
    of = {t.number: [e.metrics for e in t.epochs] for t in run.record.trials.values()}
    assert of == {t.number: [e.metrics for e in t.epochs] for t in whole.record.trials.values()}


def test_a_replay_has_the_same_numbers(
    search: Optimize, client: Client, digits: ShardedDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, Any] = {"workload": workload(), "space": space}
    run = search(progress="log")
    told = capsys.readouterr().err
    for number in run.record.trials:
        assert told.count(f"trial {number} complete after") == 1
    run_dir = run.run_dir.url
    again = dagsel.replay(run_dir, client, **parts, into=f"{run_dir}-again", progress=False)
    dagsel.resume(run_dir, client, **parts, progress=False)  # it has ended, and is only read
    assert capsys.readouterr().err == ""
    assert again.record.notes == []
    check(again, digits)


def test_a_metric_that_fails_fails_trials_and_says_why(search: Optimize, run_dir: str) -> None:
    def broken(output: Any, target: Any) -> float:
        raise ZeroDivisionError("no such class")

    with pytest.raises(AllTrialsFailedError, match="in broken\n(.*\n)*ZeroDivisionError: no such"):
        search(workload=workload(mine=over_set(broken)))
    run = dagsel.load(run_dir)
    assert {trial.state for trial in run.record.trials.values()} == {"failed"}
    (reason,) = {trial.reason for trial in run.failures}
    assert reason == "ZeroDivisionError: no such class (in a metric of epoch 1)"
    assert not list(Path(run.run_dir.url, "states").rglob("scores-*"))


def test_a_matrix_cannot_be_searched_for(search: Optimize, run_dir: str) -> None:
    with pytest.raises(SearchError, match="'f2', it gives loss, auroc, f1, torch_auroc, confusion"):
        search(metric="f2")
    run = search(metric="confusion", run_dir=f"{run_dir}-2")
    reasons = {trial.reason for trial in run.failures}
    assert len(reasons) == 1
    assert "confusion is no single number, it is loss, accuracy" in reasons.pop()
    assert RunDir(f"{run_dir}-2").states.trials() == ()
