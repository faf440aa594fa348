"""Where all trials fail in one way, a search ends with that error, in the user's own words."""

from __future__ import annotations

import logging
import pickle
import re
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from distributed import Client

import dagsel
from dagsel import errors
from dagsel.execution.process import QUIET
from dagsel.execution.worker_plugin import TrainingPlugin
from dagsel.flows import ASHA, Grid, RandomSearch
from dagsel.metrics import over_set
from dagsel.storage import RunDir, ShardedDataset

F = torch.nn.functional
ARRAYS = np.random.default_rng(0)


def write(folder: Path, x: Any = None, y: Any = None) -> ShardedDataset:
    x = ARRAYS.normal(size=(80, 4)).astype(np.float32) if x is None else x
    y = (np.arange(80) % 2) if y is None else y
    return ShardedDataset.write(str(folder / "data.zarr"), {"x": x, "y": y}, n_shards=2)


def workload(**options: Any) -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        **{
            "model": lambda config: torch.nn.Linear(4, 2),
            "loss": F.cross_entropy,
            "optimizer": lambda parameters, config: torch.optim.SGD(parameters, lr=config["lr"]),
            "batch_size": 8,
            "metrics": {"accuracy": dagsel.metrics.accuracy},
            **options,
        }
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1), "bad": trial.number in (1, 2)}


def search(client: Any, folder: Path, data: Any, trained: Any, **how: Any) -> dagsel.Run:
    study = how.pop("study", None) or optuna.create_study(direction="minimize")
    arguments = {
        "space": space,
        "flow": RandomSearch(max_epochs=1, n_trials=30),
        "metric": "loss",
        "client": client,
        "run_dir": str(folder / "run"),
    }
    return dagsel.optimize(study, trained, data, **{**arguments, **how})


def vector_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="none")


def wrong_shape(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target[: len(target) // 2])


def broken_metric(output: torch.Tensor, target: torch.Tensor) -> float:
    raise TypeError("this metric takes no tensors")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs)


def last_line(error: BaseException) -> str:
    return str(error).splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "kind", "frame", "cure"),
    [
        ({"loss": vector_loss}, RuntimeError, "vector_loss", ".mean()"),
        ({"loss": wrong_shape}, ValueError, "wrong_shape", "reshape"),
        ({"model": lambda config: Net()}, RuntimeError, "forward", "does not fit"),
        (
            {"input_fn": lambda batch, config: (batch["x"].double(), batch["y"])},
            RuntimeError,
            "input_fn",
            'x.astype("float32")',
        ),
    ],
)
def test_the_search_ends_at_once_with_the_users_own_frame(
    client: Client,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    kind: type[Exception],
    frame: str,
    cure: str,
) -> None:
    study, data = optuna.create_study(), write(tmp_path)
    trained = workload(**options)
    with caplog.at_level(logging.DEBUG), pytest.raises(errors.AllTrialsFailedError) as caught:
        search(client, tmp_path, data, trained, study=study)
    text = str(caught.value)
    assert isinstance(caught.value.__cause__, kind)
    assert text.startswith("all trials that have ended (")
    assert Path(__file__).name in text
    assert frame in text  # of a loss that has returned: where it is
    assert last_line(caught.value).startswith(f"{kind.__name__}: ")
    assert cure in last_line(caught.value)
    assert not {"distributed", "site-packages", "worker_plugin"} & set(
        text.replace("/", " ").split()
    )
    assert len(text.splitlines()) < 12
    said = capfd.readouterr()
    for log in (said.out, said.err, caplog.text):
        assert "Compute Failed" not in log
        assert "\\n" not in log
        lines = log.splitlines()
        of_trials = [line for line in lines if line.startswith("dagsel 0:")]
        assert len(of_trials) <= len(study.trials) + 2  # how many had begun is chance
        of_trials += [line for line in lines if re.search(r"dagsel.driver.* trial \d+ ", line)]
        assert len(of_trials) <= 4 * len(study.trials) + 2
        assert all(len(line) < 200 for line in of_trials)
        assert len(log) - sum(map(len, of_trials)) < 3000
    # What was drawn is told as failed; the same is said again, and nothing is trained.
    assert {trial.state for trial in study.trials} == {optuna.trial.TrialState.FAIL}
    resume: dict[str, Any] = {"workload": trained, "space": space, "study": study}
    with pytest.raises(errors.AllTrialsFailedError) as again:
        dagsel.resume(str(tmp_path / "run"), client, **resume)
    assert str(again.value) == text
    assert pickle.loads(pickle.dumps(again.value)).args == again.value.args
    printed = "".join(traceback.format_exception(caught.value)).rstrip().splitlines()
    assert printed[-1] == last_line(caught.value)
    assert not [line for line in printed if "distributed" in line]


@pytest.mark.parametrize("of_the_whole_set", [False, True])
def test_a_metric_that_raises_ends_the_search_before_all_have_trained(
    client: Client, tmp_path: Path, *, of_the_whole_set: bool
) -> None:
    metric: Any = broken_metric
    if of_the_whole_set:
        metric = dagsel.metrics.over_set(broken_metric, direction="maximize")
    broken = workload(metrics={"bad": metric})
    with pytest.raises(errors.AllTrialsFailedError, match="in broken_metric") as caught:
        search(client, tmp_path, write(tmp_path), broken, flow=RandomSearch(1, 300))
    assert last_line(caught.value) == "TypeError: this metric takes no tensors"
    assert 5 <= dagsel.load(str(tmp_path / "run")).timeline().trial.nunique() < 300


@pytest.mark.parametrize(
    ("metric", "returned"),
    [
        (lambda output, target: (output.argmax(1) == target).float(), r"a Tensor of shape \(8,\)"),
        (lambda output, target: None, "None"),
    ],
)
def test_a_metric_that_returns_no_number_is_named(
    client: Client, tmp_path: Path, metric: Any, returned: str
) -> None:
    with pytest.raises(errors.AllTrialsFailedError) as caught:
        search(client, tmp_path, write(tmp_path), workload(metrics={"odd": metric}))
    wanted = f"WorkloadError: metric 'odd' must return a number for a batch, and returns {returned}"
    assert re.match(wanted, last_line(caught.value))


def fails_on_bad(batch: Any, config: Any) -> Any:
    if config["bad"]:
        raise ValueError("no\nsuch thing")
    return batch["x"], batch["y"]


def test_bad_configurations_among_good_ones_do_not_end_a_search(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flow, made = RandomSearch(max_epochs=1, n_trials=6), workload(input_fn=fails_on_bad)
    with caplog.at_level(logging.WARNING, logger="dagsel"):
        run = search(client, tmp_path, write(tmp_path), made, flow=flow)
    said = [r.getMessage() for r in caplog.records if "failed" in r.getMessage()]
    states = {t.number: t.state for t in run.record.trials.values()}
    assert states == {n: "failed" if n in (1, 2) else "complete" for n in range(6)}
    assert [failed.reason for failed in run.failures] == ["ValueError: no such thing"] * 2
    line = fails_on_bad.__code__.co_firstlineno + 2
    where = f"({__file__}:{line} in fails_on_bad)"
    assert said == ["2 of 6 trials failed", f"trial 1, 2 failed: ValueError: no such thing {where}"]


def waits(batch: Any, config: Any) -> Any:
    """The good one comes to its first batch after all others have failed."""
    marks = Path(config["marks"])
    if not config["good"]:
        (marks / str(config["number"])).touch()
        raise ValueError("bad")
    for _ in range(3000):
        if len(list(marks.iterdir())) == 8:
            return batch["x"], batch["y"]
        torch.cuda._sleep(0) if torch.cuda.is_available() else __import__("time").sleep(0.01)
    raise TimeoutError


def test_a_trial_that_trains_counts_against_the_verdict(client: Client, tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()

    def mixed(trial: optuna.Trial) -> dict[str, Any]:
        number = trial.suggest_int("number", 0, 8)
        return {
            "lr": 0.1, "marks": str(tmp_path / "marks"), "number": number, "good": number == 0,
        }  # fmt: skip

    made = workload(input_fn=waits)
    run = search(client, tmp_path, write(tmp_path), made, space=mixed, flow=Grid(max_epochs=1))
    assert sorted(t.state for t in run.record.trials.values()) == ["complete"] + ["failed"] * 8


def test_a_search_of_two_trials_that_fail_alike_raises_at_its_end(
    client: Client, tmp_path: Path
) -> None:
    flow = ASHA(max_epochs=2, n_trials=2)
    with pytest.raises(errors.AllTrialsFailedError, match=r"\(2\) failed alike"):
        search(client, tmp_path, write(tmp_path), workload(loss=vector_loss), flow=flow)


def test_other_workers_logs_are_heard(client: Client, tmp_path: Path) -> None:
    with pytest.raises(errors.AllTrialsFailedError):
        search(client, tmp_path, write(tmp_path), workload(loss=vector_loss))
    filters = client.run(lambda: logging.getLogger("distributed.worker").filters)
    assert not any(filters.values())


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_worker_of_ours_does_not_log_that_another_one_has_gone(
    monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """As the cluster shrinks, one may ask another for a state that has just been released."""
    monkeypatch.delenv(QUIET, raising=False)
    if is_ours:
        monkeypatch.setenv(QUIET, "1")
    spec: Any = SimpleNamespace(run="run")
    where, told = ("distributed.worker", logging.ERROR, "", 0), ("tcp://127.0.0.1:1",)
    gone = logging.LogRecord(*where, "Worker stream died during communication: %s", told, None)
    broken = logging.LogRecord(*where, "Removing key %s failed", told, None)
    plugin = TrainingPlugin(spec)
    assert [plugin._is_news(it) for it in (gone, broken)] == [not is_ours, True]


@pytest.mark.parametrize("metric", ["loss", "mae"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss])
def test_arrays_of_pandas_are_cast_with_a_word(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: Any, metric: str
) -> None:
    x = ARRAYS.normal(size=(80, 4))
    data = write(tmp_path, x, x[:, :1].copy())
    made = workload(
        model=lambda config: torch.nn.Linear(4, 1),
        loss=loss,
        metrics={"mae": lambda output, target: (output - target).abs().mean()},
    )
    flow = RandomSearch(max_epochs=1, n_trials=2)
    with caplog.at_level(logging.INFO, logger="dagsel"):
        run = search(client, tmp_path, data, made, flow=flow, metric=metric)
    assert {t.state for t in run.record.trials.values()} == {"complete"}
    said = [r.getMessage() for r in caplog.records if "float64" in r.getMessage()]
    assert len(said) == 1
    again = dagsel.replay(
        str(tmp_path / "run"), client, workload=made, space=space, into=str(tmp_path / "again")
    )
    assert again.record.notes == []


def test_a_model_of_float64_keeps_float64(client: Client, tmp_path: Path) -> None:
    x = ARRAYS.normal(size=(80, 4))
    made = workload(
        model=lambda config: torch.nn.Linear(4, 1).double(), loss=F.mse_loss, metrics={}
    )
    flow = RandomSearch(max_epochs=1, n_trials=1)
    run = search(client, tmp_path, write(tmp_path, x, x[:, :1].copy()), made, flow=flow)
    assert run.best_model().weight.dtype is torch.float64


def test_labels_of_bytes_are_refused_before_anything_starts(tmp_path: Path) -> None:
    labels = np.array([b"cat", b"dog"] * 40)  # stored as they are; text becomes numbers
    with pytest.raises(errors.DagselError, match=r"classes, y = np.unique\(y, return_inverse=True"):
        search("tcp://127.0.0.1:9", tmp_path, write(tmp_path, y=labels), workload())
    assert not (tmp_path / "run").exists()


def test_what_trains_at_that_moment_leaves_no_state(client: Client, tmp_path: Path) -> None:
    def slow(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)  # a worker trains the second epoch as the first one's metric raises
        return F.cross_entropy(output, target)

    broken = workload(loss=slow, metrics={"broken": over_set(broken_metric)})
    with pytest.raises(errors.AllTrialsFailedError, match="takes no tensors"):
        search(client, tmp_path, write(tmp_path), broken, flow=RandomSearch(3, n_trials=3))
    assert RunDir(tmp_path / "run").states.trials() == ()
