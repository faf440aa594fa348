"""The best configuration is trained once more, on all samples, as a plain loop over them trains."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from distributed import Client, LocalCluster
from sklearn.linear_model import SGDClassifier
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

import dagsel
from dagsel.dispatch.units import visit_order
from dagsel.errors import (
    AllTrialsFailedError,
    NoCompletedTrialError,
    RunDirError,
    RunDirLockedError,
    SearchError,
    WorkloadError,
)
from dagsel.flow import Ask, Asked, Clone, Decision, Event, Finish, Reported, Stop, Train
from dagsel.flows import PBT, RandomSearch, Range
from dagsel.history.tables import ranked
from dagsel.storage import RunDir, ShardedDataset
from dagsel.storage.datasets.whole import WholeDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize
from tests.driver.scripted import Scripted
from tests.fused import fused
from tests.laws.test_replay import space

from . import interrupted
from .interrupted import interrupt, stopping_after
from .test_resume import files

SEED, BATCH = 3, 30


def workload() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        lambda config: torch.nn.Sequential(
            torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2),
            torch.nn.ReLU(), torch.nn.Linear(16, 10),
        ),
        torch.nn.functional.cross_entropy,
        lambda parameters, config: torch.optim.Adam(parameters, config["lr"]),
        batch_size=BATCH,
        lr_scheduler=lambda optimizer, config: ReduceLROnPlateau(
            optimizer, "max", factor=0.5, patience=0, threshold=0.1
        ),
        metrics={"accuracy": dagsel.metrics.accuracy},
    )  # fmt: skip


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def search(client: Client, data: ShardedDataset, folder: Path, **given: Any) -> dagsel.Run:
    study = optuna.create_study(direction="maximize")
    options = {"metric": "accuracy", "seed": SEED, "run_dir": str(folder / "run"), **given}
    flow = RandomSearch(max_epochs=3, n_trials=3)
    return dagsel.optimize(
        study, workload(), data, space=space, flow=flow, client=client, **options
    )


@pytest.fixture(scope="module")
def run(
    cluster: LocalCluster, digits: ShardedDataset, tmp_path_factory: pytest.TempPathFactory
) -> dagsel.Run:
    with Client(cluster, set_as_default=False) as client:
        return search(client, digits, tmp_path_factory.mktemp("refit"))


def plain_pytorch(
    run: dagsel.Run, trial: int, epochs: int, data: ShardedDataset
) -> dict[str, torch.Tensor]:
    """Train as a script does that puts each shard's samples, of both kinds, together.

    Its rate follows what the search has seen, and stays as it is after that.
    """
    torch.manual_seed(int(np.random.SeedSequence([SEED, trial]).generate_state(1)[0]))
    parts: Any = workload()
    config = run.record.trials[trial].params
    values = [done.value for done in run.record.trials[trial].epochs]
    model = parts.model(config)
    optimizer = fused(parts.optimizer(model.parameters(), config))
    schedule = parts.lr_scheduler(optimizer, config)
    for epoch in range(1, epochs + 1):
        for shard in visit_order(data.n_shards, seed=SEED, trial=trial, epoch=epoch):
            both = data.shard(shard), data.validation_shard(shard)
            x, y = (torch.from_numpy(np.concatenate([b[name] for b in both])) for name in "xy")
            order = np.random.default_rng([SEED, trial, epoch, shard]).permutation(len(x))
            for batch in torch.from_numpy(order).split(BATCH):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        if epoch <= len(values):
            schedule.step(values[epoch - 1])
    return dict(model.state_dict())


def same(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> bool:
    found = model.state_dict()
    return found.keys() == state.keys() and all(torch.equal(found[n], state[n]) for n in found)


@pytest.mark.usefixtures("one_thread")
def test_it_is_what_a_plain_loop_over_all_samples_comes_to(
    run: dagsel.Run, client: Client, digits: ShardedDataset
) -> None:
    """For as many epochs as the best one; and of another trial, for as many as are named."""
    expected = plain_pytorch(run, run.best.trial, run.best.epoch, digits)
    assert same(run.refit(client), expected)
    trial = ranked(run.record)[-1].number
    assert same(run.refit(client, trial=trial, epochs=2), plain_pytorch(run, trial, 2, digits))


def test_it_is_trained_once_and_read_then(
    run: dagsel.Run, client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    model = run.refit(client, epochs=1, progress=False)
    before = files(run.run_dir.url)
    again = dagsel.load(run.run_dir.url, workload=workload())
    found = again.refit(epochs=1, worker_timeout=1)  # no cluster is started
    assert same(found, dict(model.state_dict()))
    assert files(run.run_dir.url) == before
    folder = f"{run.run_dir.url}/refit/trial-{run.best.trial}-1-epochs-{digits.digest}"
    seen = dagsel.load(folder, workload=workload())
    assert same(seen.best_model(), dict(model.state_dict()))
    (exported,) = seen.export(tmp_path / "models")
    assert Path(exported, "load.py").exists()
    assert set(seen.metrics.split) == {"train"}
    timeline = seen.timeline()
    assert set(timeline.kind) == {"train"}
    with pytest.raises(RunDirError, match="is a refit: call run.refit of its run again"):
        dagsel.resume(folder, workload=workload(), space=space)
    with pytest.raises(RunDirError, match="is a refit"):
        dagsel.replay(folder, workload=workload(), space=space)


@pytest.mark.usefixtures("one_thread")
def test_another_data_set_is_trained_on_whole(
    run: dagsel.Run, client: Client, tmp_path: Path
) -> None:
    chance = np.random.default_rng(0)
    arrays = {"x": chance.normal(size=(90, 64)).astype("float32"), "y": np.arange(90) % 10}
    other = ShardedDataset.write(tmp_path / "other.zarr", arrays, n_shards=2)
    model = run.refit(client, data=other, epochs=1)
    assert same(model, plain_pytorch(run, run.best.trial, 1, other))


class CountsSteps(torch.nn.Linear):
    """Holds the rate of each of its training steps."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.rates: torch.Tensor
        self.register_buffer("rates", torch.full((200,), -1.0))

    @staticmethod
    def train_fn(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            n = int((model.rates >= 0).sum())
            model.rates[n] = optimizer.param_groups[0]["lr"]


N_EPOCHS = 3


def counting(n_batches: int) -> dagsel.TorchWorkload:
    n_steps = n_batches * N_EPOCHS  # one more is an error
    return dagsel.TorchWorkload(
        lambda config: CountsSteps(),
        torch.nn.functional.cross_entropy,
        lambda parameters, config: torch.optim.SGD(parameters, lr=1.0),
        batch_size=BATCH,
        metrics=["accuracy"],
        train_fn=CountsSteps.train_fn,
        lr_scheduler=lambda optimizer, config: OneCycleLR(optimizer, 0.1, total_steps=n_steps),
        lr_scheduler_interval="step",
    )


def test_a_schedule_of_a_fixed_length_steps_as_often_as_in_the_search(
    client: Client, digits: ShardedDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = digits.shard(0)
    mine = ShardedDataset.write(tmp_path / "mine.zarr", arrays, n_shards=2)
    n_batches = sum(-(-size.n_train // BATCH) for size in mine.shard_sizes)
    run = dagsel.optimize(
        optuna.create_study(direction="maximize"),
        counting(n_batches),
        mine,
        space=space,
        metric="accuracy",
        flow=RandomSearch(max_epochs=N_EPOCHS, n_trials=1),
        client=client,
        run_dir=str(tmp_path / "run"),
        keep="last",
    )
    searched = run.best_model().rates
    searched = searched[searched >= 0]
    assert len(searched) == n_batches * N_EPOCHS

    more = digits.shard(1)
    few = {name: array[:120] for name, array in more.items()}
    other = ShardedDataset.write(tmp_path / "other.zarr", more, n_shards=3)
    small = ShardedDataset.write(tmp_path / "small.zarr", few, n_shards=1)
    for data in ("all", other, small):
        rates = run.refit(client, epochs=N_EPOCHS, data=data).rates
        rates = rates[rates >= 0]
        assert rates.argmax() / len(rates) == pytest.approx(0.3, abs=0.1)  # as OneCycleLR has it
        assert rates[-1] < 0.1 * rates.max()
        if data == "all":
            assert len(rates) > len(searched)
            assert set(rates.tolist()) == set(searched.tolist())
    assert "is gone" not in caplog.text
    shutil.rmtree(tmp_path / "mine.zarr")
    run.refit(client, epochs=1, data=small)
    assert "the run's data set is gone, so the learning rate steps after each batch" in caplog.text


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("n_steps", "epochs"), [(3, 5), (9, 6), (16, 7), (23, 9)])
def test_a_call_that_was_interrupted_goes_on_when_it_is_made_again(
    n_steps: int, epochs: int, run: dagsel.Run, client: Client, digits: ShardedDataset
) -> None:
    with (
        pytest.raises(KeyboardInterrupt) as error,
        stopping_after(n_steps, interrupt),
    ):
        run.refit(client, epochs=epochs)
    if n_steps > 3:
        assert "go on with  run.refit(...) as before" in "".join(error.value.__notes__)
    model = run.refit(client, epochs=epochs)
    expected = plain_pytorch(run, run.best.trial, epochs, digits)
    assert same(model, expected)


@pytest.mark.usefixtures("one_thread")
def test_a_driver_that_is_killed_is_followed_by_another(
    run: dagsel.Run, client: Client, cluster: LocalCluster, digits: ShardedDataset
) -> None:
    script = (
        "import dagsel\n"
        "from tests.execution.interrupted import die, stopping_after\n"
        "from tests.execution.test_refit import workload\n"
        f"run = dagsel.load({run.run_dir.url!r}, workload=workload())\n"
        "with stopping_after(14, die):\n"
        f"    run.refit({cluster.scheduler_address!r}, epochs=8)\n"
    )
    driver = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    name = f"refit/trial-{run.best.trial}-8-epochs-{digits.digest}"
    assert RunDir(f"{run.run_dir.url}/{name}").has_begun()
    model = run.refit(client, epochs=8)
    assert same(model, plain_pytorch(run, run.best.trial, 8, digits))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "some data": ({"data": "some"}, SearchError, 'data must be "all" or a data set, got '),
    "a path": ({"data": "/data.zarr"}, SearchError, "data=ShardedDataset.open"),
    "arrays": ({"data": np.zeros(3)}, SearchError, 'write data="all"'),
    "no epoch": ({"epochs": 0}, SearchError, "epochs must be .*1 or more, got 0"),
    "half an epoch": ({"epochs": 0.5}, SearchError, "epochs must be a whole number"),
    "another trial": ({"trial": 99}, SearchError, "trial 99 is none of those that were scored"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_and_touches_nothing(
    name: str, run: dagsel.Run, client: Client
) -> None:
    given, kind, text = REFUSED[name]
    before = files(run.run_dir.url)
    with pytest.raises(kind, match=text):
        run.refit(client, **given)
    assert files(run.run_dir.url) == before


def test_without_its_workload_there_is_nothing_to_train(run: dagsel.Run, client: Client) -> None:
    with pytest.raises(WorkloadError, match="models need the workload"):
        dagsel.load(run.run_dir.url).refit(client)


def test_a_run_without_a_scored_trial_has_nothing_to_refit(
    optimize: Optimize, client: Client, run_dir: str
) -> None:
    with pytest.raises(AllTrialsFailedError):
        optimize(client=client, workload=Broken())
    failed = dagsel.load(run_dir, workload=Broken())
    with pytest.raises(NoCompletedTrialError, match="no trial has completed"):
        failed.refit(client)


class Broken(SyntheticWorkload):
    def train(self, *given: Any, **how: Any) -> Any:
        raise RuntimeError("broken")


def test_a_second_process_is_refused(run: dagsel.Run, client: Client, digits: Any) -> None:
    name = f"trial-{run.best.trial}-4-epochs-{digits.digest}"
    with (
        run.run_dir.refit(name).lock("other"),
        pytest.raises(RunDirLockedError, match="in use by the driver"),
    ):
        run.refit(client, epochs=4)


def test_what_fails_says_where_and_how_to_try_again(
    optimize: Optimize, client: Client, run_dir: str
) -> None:
    run = optimize(RandomSearch(2, 2), client=client, workload=FailsLater())
    with pytest.raises(NoCompletedTrialError, match=r"RuntimeError: later; delete .*refit/trial"):
        run.refit(client, epochs=5)


class FailsLater(SyntheticWorkload):
    def train(self, state: Any, shard: Any, config: Any, *, visit: Any, **how: Any) -> Any:
        if visit.epoch > 2:
            raise RuntimeError("later")
        return super().train(state, shard, config, visit=visit, **how)


def test_of_a_configuration_that_changed_the_last_one_is_trained(
    optimize: Optimize, client: Client, digits: ShardedDataset
) -> None:
    run = optimize(
        PBT(max_epochs=3, n_trials=4, mutations={"x": Range(0.0, 1.0)}),
        space=interrupted.space,
        workload=interrupted.workload(),
        data=digits,
        client=client,
    )
    seen = run.refit(cluster=client.cluster, epochs=2)
    assert [(epoch, shard) for epoch, shard, _ in seen] == [
        (epoch, shard)
        for epoch in (1, 2)
        for shard in visit_order(4, seed=0, trial=run.best.trial, epoch=epoch)
    ]


def test_what_went_on_from_another_trial_is_trained_for_the_epochs_of_both(
    optimize: Optimize, client: Client, digits: ShardedDataset, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked((0,)):
                return [Train(0, 2)]
            case Reported(0, 2):
                return [Ask(1)]
            case Asked((1,)):
                return [Clone(0, 1, {"x": 0.5}), Train(1, 2), Stop(0, "", "complete")]
            case Reported(1, 2):
                return [Stop(1, "", "complete"), Finish()]
        return []

    run = optimize(
        Scripted([Ask(1)], answer),
        space=interrupted.space,
        workload=interrupted.workload(),
        data=digits,
        client=client,
    )
    assert [len(trial.epochs) for trial in run.record.trials.values()] == [2, 2]
    kept = run.record.trials[1].kept
    assert kept is not None
    seen = run.refit(cluster=client.cluster, trial=1)
    n_epochs = 2 + kept.place.epoch
    assert [*dict.fromkeys(epoch for epoch, *_ in seen)] == [*range(1, n_epochs + 1)]
    assert f"trained anew for the {n_epochs} epochs of both" in caplog.text


def test_a_view_has_each_sample_once_and_nothing_for_validation(digits: ShardedDataset) -> None:
    whole = WholeDataset(digits.folder, digits.manifest)
    assert [s.n_train for s in whole.shard_sizes] == [
        s.n_train + s.n_validation for s in digits.shard_sizes
    ]
    assert sum(size.nbytes for size in whole.shard_sizes) == digits.nbytes
    for index in range(digits.n_shards):
        shard, empty = whole.shard(index), whole.validation_shard(index)
        for name in ("x", "y"):
            both = [digits.shard(index)[name], digits.validation_shard(index)[name]]
            assert np.array_equal(shard[name], np.concatenate(both))
            assert empty[name].shape == (0, *both[0].shape[1:])
            assert empty[name].dtype == both[0].dtype


def test_a_workload_without_a_loss_shows_no_number_for_it(
    client: Client, digits: ShardedDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = dagsel.optimize(
        optuna.create_study(direction="maximize"),
        dagsel.SklearnWorkload(SGDClassifier()),
        digits,
        space=lambda trial: {"alpha": trial.suggest_float("alpha", 1e-5, 1e-2, log=True)},
        metric="accuracy",
        flow=RandomSearch(max_epochs=2, n_trials=1),
        client=client,
        run_dir=str(tmp_path / "run"),
        progress=False,
    )
    run.refit(client=client, progress="log")
    told = capsys.readouterr().err
    assert "trial 0 complete after" in told
    assert "nan" not in told
