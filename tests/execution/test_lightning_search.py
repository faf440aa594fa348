"""A search over a LightningModule on a cluster: its numbers are its own, again and after a stop.

What the best model scores is what a plain loop over the validation set finds. A replay on other
workers, and a run that was interrupted and goes on, have the same states and metrics, also where a
rate follows the metric of the search and gradients wait over the ends of shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import optuna
import pytest
import torch
from distributed import Client

import dagsel
from dagsel.flows import ASHA
from dagsel.storage import Journal, ShardedDataset
from tests.conftest import Optimize

from . import interrupted
from .helpers import threads_of_this_process, validation_of

pytestmark = pytest.mark.skipif(not find_spec("lightning"), reason="needs the extra lightning")


def make(config: Any) -> Any:
    from tests.workloads.lightning_modules import DigitsNet

    return DigitsNet(config)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 1.0, log=True)}


def workload() -> dagsel.LightningWorkload:
    return dagsel.LightningWorkload(
        make,
        metrics={"val_acc": "maximize", "val_loss": "minimize"},
        batch_size=64,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )


@pytest.fixture
def client() -> Iterator[Client]:
    """Two workers that are threads of this process: Lightning is imported once."""
    with threads_of_this_process(2) as client:
        yield client


@pytest.fixture
def search(optimize: Optimize, client: Client, digits: ShardedDataset) -> Optimize:
    def call(run_dir: str, name: str = "digits") -> dagsel.Run:
        study = optuna.create_study(
            study_name=name, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0)
        )
        flow = ASHA(max_epochs=4, n_trials=5, reduction_factor=2)
        return optimize(
            flow, workload=workload(), data=digits, space=space, metric="val_acc", study=study,
            client=client, run_dir=run_dir, deterministic=True,
        )  # fmt: skip

    return call


def numbers(run: dagsel.Run) -> dict[tuple[int, int], Any]:
    """The checksum of each epoch's state, and its metrics."""
    return {
        (trial.number, epoch.epoch): (epoch.digest, dict(epoch.metrics))
        for trial in run.record.trials.values()
        for epoch in trial.epochs
    }


def test_a_search_is_exact_and_a_replay_and_a_resumed_run_equal_it(
    search: Optimize,
    client: Client,
    digits: ShardedDataset,
    run_dir: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = search(run_dir=run_dir)
    found = numbers(run)
    assert run.best_value is not None
    assert run.best_value > 0.7
    inputs, target = validation_of(digits)
    model: Any = run.best_model()
    with torch.inference_mode():
        right = (model(inputs).argmax(1) == target).double().mean()
    assert run.best_value == pytest.approx(float(right), abs=1e-7)
    assert model.hparams["config"] == dict(run.best_params)
    for digest, metrics in found.values():
        assert digest
        assert list(metrics) == ["val_acc", "val_loss"]
    parts: dict[str, Any] = {"workload": workload(), "space": space}
    again = dagsel.replay(run_dir, client, **parts, into=f"{run_dir}-again")
    assert numbers(again) == found
    # Not where a state is saved, which a worker does, and here it is of this process.
    monkeypatch.setattr(interrupted, "STEPS", [(Journal, "append")])
    with pytest.raises(KeyboardInterrupt), interrupted.stopping_after(24, interrupted.interrupt):
        search(run_dir=f"{run_dir}-stopped", name="stopped")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(), direction="maximize")
    resumed = dagsel.resume(f"{run_dir}-stopped", client, study=study, **parts)
    assert len(resumed.record.sessions) == 2
    late = numbers(resumed)
    both = late.keys() & found.keys()
    assert len(both) >= 5  # ASHA may promote others
    assert {key: late[key] for key in both} == {key: found[key] for key in both}
