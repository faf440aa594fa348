"""LightningWorkload keeps the laws of a workload, and says first of all what it cannot do.

A hook that is not called is refused by name, and so is what a module asks of its Trainer that is
not known; what is answered is true. A trial goes on with another configuration, and metrics that
are not logged are found before the first unit.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import dagsel.collate
from dagsel.errors import WorkloadError
from dagsel.flow import Goal
from dagsel.storage import ShardSize
from dagsel.testing import WorkloadSuite
from dagsel.workloads import Visit
from dagsel.workloads.base import DataOutline

from .test_lightning import arrays

pytestmark = [
    pytest.mark.skipif(not find_spec("lightning"), reason="needs the extra lightning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec"),
]
SCORES = {"val_loss": "minimize", "val_acc": "maximize"}
OUTLINE = DataOutline((22,), {"x": (np.dtype("f4"), (6,)), "y": (np.dtype("i8"), ())})


def modules() -> Any:
    from tests.workloads import lightning_modules

    return lightning_modules


def workload(module: Any = None, **options: Any) -> Any:
    from dagsel.workloads import LightningWorkload

    given: dict[str, Any] = {"metrics": SCORES, "batch_size": 5} | options
    return LightningWorkload(module or modules().Plain, **given)


def trained(work: Any, config: Any, n_epochs: int = 1, value: float | None = None) -> Any:
    state, shard = work.init(config, 0), work.prepare(arrays(0, 22))
    for epoch in range(1, n_epochs + 1):
        visit = Visit(0, 0, epoch, 0, True, value)
        state = work.train(state, shard, config, visit=visit).state
    return state


class Suite(WorkloadSuite):
    config: Mapping[str, Any] = {"lr": 0.3}
    habit = ""
    options: Mapping[str, Any] = {}

    def make_workload(self) -> Any:
        return workload(getattr(modules(), self.habit), **self.options)

    def make_arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        return arrays(seed, 18)


class TestEverything(Suite):
    habit = "Everything"
    options: Mapping[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}


class TestManual(Suite):
    habit = "Rivals"


def refuses(words: str, **changes: Any) -> None:
    """Check that a module with these changes is refused before anything trains."""
    kind = type("Mine", (modules().Plain,), changes)
    with pytest.raises(WorkloadError, match=words):
        workload(kind).validate({})


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("train_dataloader", "write the data with ShardedDataset.write"),
        ("val_dataloader", "write the data with ShardedDataset.write"),
        ("prepare_data", "write the data with ShardedDataset.write"),
        ("configure_callbacks", "a flow stops trials, an observer logs them"),
        ("configure_sharded_model", "build layers in configure_model"),
        ("on_fit_end", "do it with run.best_model"),
        ("on_train_end", "do it with run.best_model"),
        ("teardown", "do it with run.best_model"),
        ("on_validation_epoch_end", "log a value or an object of torchmetrics"),
        ("on_validation_end", "need not be swapped back"),
        ("on_validation_model_train", "need not be swapped back"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_by_name(hook: str, words: str) -> None:
    refuses(f"Mine.{hook} cannot be called: .*{words}", **{hook: lambda self, *a: None})


def test_every_hook_of_lightning_is_called_refused_or_no_part_of_a_search() -> None:
    from lightning.pytorch.core import hooks

    from dagsel.workloads.lightning.hooks import BUILDING, CALLED, REFUSED

    known = {
        name
        for kind in (hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks)
        for name in vars(kind)
        if not name.startswith(("_", "on_test", "on_predict", "test_", "predict_"))
    }
    apart = {"allow_zero_length_dataloader_with_multiple_devices", "prepare_data_per_node"}
    assert known - apart <= {*BUILDING, *CALLED, *REFUSED}
    assert not {*BUILDING, *CALLED} & set(REFUSED)


def asks(name: str) -> Callable[[Any], Any]:
    """Make a hook whose code asks for something of the trainer."""
    space: dict[str, Any] = {}
    exec(f"def hook(self):\n    return self.trainer.{name}", space)
    return space["hook"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("datamodule", "let batch_fn make the batches of dagsel's shards"),
        ("should_stop", "let a flow stop trials"),
        ("estimated_stepping_batches", "give LightningWorkload max_epochs= and shard_sizes="),
        ("num_training_batches", "shard_sizes=data.shard_sizes"),
        ("max_epochs", "max_epochs="),
        ("save_checkpoint('a')", "states are kept in the run's folder"),
        ("num_val_batches", "leave it out of on_train_epoch_end"),
    ],
)
def test_what_is_not_known_of_a_trainer_is_refused_before_anything_trains(
    name: str, words: str
) -> None:
    refuses(f"Mine.on_train_epoch_end asks for self.trainer.{name[:8]}.*{words}",
            on_train_epoch_end=asks(name))  # fmt: skip


def test_code_that_cannot_be_seen_beforehand_is_told_when_it_asks() -> None:
    def indirectly(self: Any) -> None:
        getattr(self, "train" + "er").should_stop = True

    kind = type("Mine", (modules().Plain,), {"on_train_epoch_start": indirectly})
    with pytest.raises(WorkloadError, match="sets self.trainer.should_stop = True, and dagsel"):
        trained(workload(kind), {})
    for hidden, words in (
        (lambda self: self.helper.fit_loop.epoch_loop, "asks for self.trainer.fit_loop.epoch_loop"),
        (lambda self: self.helper.callback_metrics["val_loss"], "has no metric 'val_loss', it has"),
        (lambda self: self.helper.callback_metrics.get("val_loss"), "scored after its epoch"),
    ):
        parts = {"helper": property(lambda self: self._trainer), "on_train_epoch_end": hidden}
        with pytest.raises(WorkloadError, match=words):
            trained(workload(type("Mine", (modules().Plain,), parts)), {})


def test_what_optimizers_ask_of_a_trainer_is_refused_only_where_they_ask_it() -> None:
    def configure(self: Any) -> Any:
        optimizer = self.sgd()
        if self.steps_by_batch:
            return [optimizer], [self.trainer.estimated_stepping_batches]
        return optimizer

    parts = {"configure_optimizers": configure, "steps_by_batch": False}
    workload(type("Mine", (modules().Plain,), parts)).validate({})
    refuses("Mine.configure_optimizers asks for self.trainer.estimated.*give LightningWorkload max",
            **parts | {"steps_by_batch": True})  # fmt: skip


def test_a_trainer_is_that_of_one_unit() -> None:
    kept: list[Any] = []
    kind = type("Mine", (modules().Plain,), {"on_fit_start": lambda self: kept.append(self.trainer),
                "on_train_epoch_end": lambda self: kept[0].current_epoch})  # fmt: skip
    with pytest.raises(
        WorkloadError, match="the trainer of an earlier unit; ask self.trainer each"
    ):
        trained(workload(kind), {})


def test_a_module_may_say_late_that_it_optimizes_by_itself() -> None:
    def late(self: Any, stage: str) -> None:
        assert stage == "fit"
        self.automatic_optimization = False

    def early(self: Any, config: Any) -> None:
        modules().Rivals.__init__(self, config)
        self.automatic_optimization = True

    kind = type("Mine", (modules().Rivals,), {"setup": late, "__init__": early})
    found = [trained(workload(module), {}) for module in (kind, modules().Rivals)]
    assert found[0].tensors["model.rival.weight"].data.tobytes() == (
        found[1].tensors["model.rival.weight"].data.tobytes()
    )
    assert found[0].meta["tree"]["loop"] == found[1].meta["tree"]["loop"]


def test_what_is_answered_is_true() -> None:
    told: list[dict[str, Any]] = []
    names = (
        "current_epoch", "global_step", "is_last_batch", "max_epochs", "num_training_batches",
        "estimated_stepping_batches", "logger", "loggers", "world_size", "global_rank",
        "is_global_zero", "training", "validating", "sanity_checking", "accumulate_grad_batches",
        "gradient_clip_val", "precision", "device_ids", "callbacks", "log_every_n_steps",
    )  # fmt: skip

    def note(self: Any, batch: Any, batch_idx: int) -> None:
        trainer = self._trainer
        told.append({name: getattr(trainer, name) for name in names[:-1]})
        assert trainer.lightning_module is trainer.model is self
        assert trainer.optimizers == [self.optimizers(use_pl_optimizer=False)]
        assert trainer.callback_metrics.get("no such thing") is None
        assert self.current_epoch == trainer.current_epoch
        assert self.global_step == trainer.global_step
        assert trainer.state.fn == "fit"
        assert "train_loss" in trainer.callback_metrics or len(told) == 1
        with pytest.raises(WorkloadError, match="asks for self.trainer.log_every_n_steps"):
            getattr(trainer, names[-1])

    kind = type("Mine", (modules().Plain,), {"on_train_batch_start": note})
    sizes = [ShardSize(22, 5, 100), ShardSize(11, 5, 100)]  # as a data set has them
    work = workload(kind, max_epochs=4, shard_sizes=sizes, accumulate_grad_batches=2)
    trained(work, {}, 2)
    steps = [(at["current_epoch"], at["global_step"], at["is_last_batch"]) for at in told]
    first = [(0, number // 2, number == 4) for number in range(5)]
    assert steps == first + [(1, 3 + number // 2, number == 4) for number in range(5)]
    assert told[0] | {} == {
        "current_epoch": 0, "global_step": 0, "is_last_batch": False, "max_epochs": 4,
        "num_training_batches": 8, "estimated_stepping_batches": 16, "logger": None, "loggers": [],
        "world_size": 1, "global_rank": 0, "is_global_zero": True, "training": True,
        "validating": False, "sanity_checking": False, "accumulate_grad_batches": 2,
        "gradient_clip_val": None, "precision": "32-true", "device_ids": [0], "callbacks": (),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"configure_optimizers": lambda self: [self.sgd(), self.sgd()]},
         "Mine.configure_optimizers: Training with multiple optimizers is only supported with man"),
        ({"configure_optimizers": lambda self: {"optimizer": self.sgd(), "lr_scheduler": {}}},
         'must have the key "scheduler"'),
        ({"configure_optimizers": lambda self: None}, "Mine.configure_optimizers returns None"),
        ({"training_step": lambda self, dataloader_iter: None}, "takes a dataloader_iter"),
        ({"training_step": lambda self, batch, batch_idx, more: None}, "give other argu"),
        ({"on_save_checkpoint": lambda self, checkpoint: checkpoint.update(epoch=7)},
         "changes 'epoch' of the checkpoint"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_said_before_anything_trains(changes: Any, words: str) -> None:
    refuses(words, **changes)


def test_errors_of_the_module_itself_stay_what_they_are() -> None:
    def broken(self: Any) -> Any:
        raise ZeroDivisionError("mine")

    kind = type("Mine", (modules().Plain,), {"configure_optimizers": broken})
    with pytest.raises(ZeroDivisionError, match="mine"):
        workload(kind).validate({})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"module": 3}, r"module must be a function, called as module\(config\), got 3"),
        ({"metrics": {}}, 'write metrics={"val_loss": "minimize"}'),
        ({"metrics": "val_loss"}, r"got 'val_loss'; write metrics=\['val_loss'\]"),
        ({"metrics": {"a": "up"}}, r"metrics\['a'\] must be 'minimize', 'maximize' or None"),
        ({"batch_size": 0}, "batch_size must be a whole number of 1 or more"),
        ({"eval_batch_size": 0}, "eval_batch_size must be"),
        ({"accumulate_grad_batches": 0.5}, "accumulate_grad_batches must be a whole number"),
        ({"gradient_clip_val": -1}, "gradient_clip_val must be a number of 0 or more"),
        ({"gradient_clip_algorithm": "l1"}, "must be one of 'value', 'norm'"),
        ({"max_epochs": 0}, "max_epochs must be"),
        ({"shard_sizes": [0.5]}, "shard_sizes must be"),
        ({"shard_sizes": 3}, "shard_sizes must be the samples of each shard, got 3"),
        ({"precision": "fp16"}, "'fp32', 'tf32' or 'bf16', got 'fp16'"),
        ({"device_memory": 2.0}, "device_memory is 2.0"),
        ({"drop_last": 1}, "drop_last is 1"),
        ({"batch_fn": 1}, r"batch_fn must be a function, called as batch_fn\(batch, config\)"),
        ({"collate": 1}, "collate must be a function"),
        ({"augment": 1}, "augment must be a function"),
    ],
)  # fmt: skip
def test_a_wrong_option_names_the_cure(options: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        workload(options.pop("module", None), **options)


def test_a_factory_must_give_a_lightning_module() -> None:
    with pytest.raises(WorkloadError, match="module gave a Linear, not a LightningModule"):
        workload(lambda config: torch.nn.Linear(1, 1)).validate({})
    old = type("Old", (torch.nn.Module,), {"__module__": "pytorch_lightning.core"})
    with pytest.raises(WorkloadError, match="derive it from lightning.pytorch, not from pytorch_"):
        workload(lambda config: old()).validate({})


def test_a_class_that_takes_a_parameter_and_no_configuration_is_refused() -> None:
    class Net(torch.nn.Module):
        def __init__(self, lr: float = 0.1, width: int = 3) -> None:
            super().__init__()

    with pytest.raises(WorkloadError, match=r"lambda config: Net\(lr=config\['lr'\]\)$"):
        workload(Net).validate({"lr": 0.1, "depth": 2})


def test_what_a_configuration_is_not_read_for_is_known() -> None:
    config = {"lr": 0.1, "width": 3}
    made: Any = modules().LightningModule  # without save_hyperparameters, which keeps what it sees
    assert workload(lambda config: made()).unread(config) == {"lr", "width"}
    assert workload(lambda config: [made(), config["lr"]][0]).unread(config) == {"width"}
    assert workload(lambda config: modules().Plain(config)).unread(config) == frozenset()
    own = workload(lambda config: made(), batch_fn=lambda batch, config: batch)
    assert own.unread(config) == frozenset()  # who knows


def test_options_that_a_module_without_automatic_optimization_cannot_have() -> None:
    for options in ({"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}):
        with pytest.raises(
            WorkloadError, match=f"{next(iter(options))} has no effect; do it in tr"
        ):
            workload(modules().Rivals, **options).validate({})


def test_metrics_that_are_not_logged_are_found_before_the_first_unit() -> None:
    work = workload(metrics=["val_los", "val_acc"])
    words = "metrics names 'val_los', and Plain logs 'val_loss', 'val_acc' in validation; write"
    for _ in range(2):  # as configurations are tried one after the other
        with pytest.raises(WorkloadError, match=words):
            work.validate_data({}, OUTLINE)
    with pytest.raises(WorkloadError, match=words):  # if zeros could not be scored
        work.evaluate(work.init({}, 0), work.prepare(arrays(1, 8)), {})
    with pytest.raises(WorkloadError, match="monitors 'val_loss' of validation, which is not in"):
        workload(modules().Plateau, metrics=["val_acc"]).validate_data({}, OUTLINE)
    workload().validate_data({}, OUTLINE)


def test_a_plateau_follows_the_metric_of_the_search_alone() -> None:
    work, plain = workload(modules().Plateau), workload()
    assert work.follows_metric({}, Goal("val_loss", "minimize"))
    assert not plain.follows_metric({}, Goal("val_loss", "minimize"))
    assert not workload(modules().PlateauOfTraining).follows_metric({}, Goal("x", "maximize"))
    with pytest.raises(WorkloadError, match="the search is about 'val_acc'; monitor 'val_acc', or"):
        work.follows_metric({}, Goal("val_acc", "maximize"))
    with pytest.raises(WorkloadError, match=r"write ReduceLROnPlateau\(optimizer, mode='max'\)"):
        work.follows_metric({}, Goal("val_loss", "maximize"))
    wrong = type("Mine", (modules().PlateauOfTraining,), {"training_step": modules().Closure
                 .training_step, "log": lambda self, *a, **k: None})  # fmt: skip
    with pytest.raises(WorkloadError, match="monitors 'train_loss_epoch', and training logs noth"):
        trained(workload(wrong), {})


def test_a_plateau_of_every_second_epoch_has_its_turn_then() -> None:
    def rarely(self: Any) -> Any:
        made = modules().Plateau.configure_optimizers(self)
        held = {"scheduler": made["lr_scheduler"], "monitor": "val_loss", "frequency": 2}
        return {"optimizer": made["optimizer"], "lr_scheduler": held}

    work = workload(type("Mine", (modules().Plain,), {"configure_optimizers": rarely}))
    for n_epochs, rate in ((4, 0.4), (5, 0.2), (6, 0.2), (7, 0.1)):  # the first one is the best
        (group,) = trained(work, {}, n_epochs, 0.5).meta["tree"]["optimizer"]["param_groups"]
        assert group["lr"] == rate


def test_another_configuration_goes_on_where_the_trial_is() -> None:
    work, old = workload(modules().Everything), {"lr": 0.4}
    state = trained(work, old, 3, value=0.5)
    (group,) = state.meta["tree"]["optimizer"]["param_groups"]
    assert group["lr"] == 0.1  # lowered twice
    (group,) = work.reconfigure(state, old, {"lr": 0.8}).meta["tree"]["optimizer"]["param_groups"]
    assert group["lr"] == 0.2
    several = workload(modules().ByEpochs)
    state = trained(several, {}, 3)
    assert several.reconfigure(state, {}, {"more": 1}) == state
    held = workload(modules().PlateauOfTraining)
    lowered = trained(held, {})
    with pytest.raises(WorkloadError, match="several schedules, one of which follows a metric"):
        held.reconfigure(lowered, {}, {"more": 1})


def test_ragged_samples_and_chances_are_made_as_a_torch_workload_makes_them() -> None:
    from dagsel.storage import RaggedArray

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        assert sorted(batch) == ["ids", "ids_mask", "y"]
        rows = torch.zeros(len(batch["y"]), 6) + batch["ids"].sum(1)[:, None]
        return modules().Plain.training_step(self, (rows, batch["y"]), batch_idx)

    def double(sample: Any, config: Any) -> Any:
        return sample | {"ids": sample["ids"] * 2.0}

    kind = type("Mine", (modules().Plain,), {"training_step": step})
    options = {"collate": dagsel.collate.pad(ids=0), "batch_fn": lambda batch, config: batch,
               "bucket_by": "ids", "eval_batch_size": 3}  # fmt: skip
    ids = RaggedArray.of([np.ones(n % 5 + 1, "f4") for n in range(22)])
    data = {"ids": ids, "y": arrays(0, 22)["y"]}
    y = OUTLINE.arrays["y"]
    outline = DataOutline((22,), {"ids": (np.dtype("f4"), ()), "y": y}, frozenset({"ids"}))
    found = []
    for augment in (None, double):
        work = workload(kind, augment=augment, **options)
        work.validate_data({}, outline)
        visit = Visit(0, 0, 1, 0, True)
        found.append(work.train(work.init({}, 0), work.prepare(data), {}, visit=visit))
    assert found[0].loss != found[1].loss
    with pytest.raises(WorkloadError, match="collate=dagsel.collate.pad"):
        workload().validate_data({}, outline)
    with pytest.raises(
        WorkloadError, match="batch_size is 5 with drop_last=True, and the smallest"
    ):
        workload(drop_last=True).validate_data({}, DataOutline((4, 22), OUTLINE.arrays))


def test_objects_of_torchmetrics_need_a_configuration_that_can_be_kept() -> None:
    work = workload(modules().Everything)
    config = {"lr": 0.1, "activation": len}
    shard = work.prepare(arrays(1, 8))
    with pytest.raises(WorkloadError, match="'activation' there has no form in JSON; suggest a na"):
        work.evaluate(work.init(config, 0), shard, config)


def test_what_training_has_accumulated_is_not_scored() -> None:
    work, config = workload(modules().Everything), {"lr": 0.1}
    shard = work.prepare(arrays(0, 22))
    stops = iter([False, False, True])
    half = work.train(
        work.init(config, 0), shard, config, visit=Visit(0, 0, 1, 0, True),
        should_stop=lambda: next(stops),
    )  # fmt: skip
    assert not half.finished
    score = arrays(5, 12)
    found = work.pool([work.evaluate(half.state, work.prepare(score), config).kept])
    guess = work.restore(half.state, config)(torch.from_numpy(score["x"])).argmax(1).numpy()
    assert found["val_acc"] == pytest.approx((guess == score["y"]).mean())


def test_a_model_that_was_restored_needs_no_dagsel() -> None:
    work = workload(modules().Everything)
    model = work.restore(trained(work, {"lr": 0.1}), {"lr": 0.1})
    assert not model.training
    assert model._trainer is None
    assert torch.equal(pickle.loads(cloudpickle.dumps(model))(torch.ones(2, 6)),
                       model(torch.ones(2, 6)))  # fmt: skip
    assert "weights.safetensors" in work.export(model, {"lr": 0.1}, "a test")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import dagsel.workloads

    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "dagsel.workloads.lightning", raising=False)
    with pytest.raises(WorkloadError, match=r'pip install "dagsel\[lightning\]"'):
        _ = dagsel.workloads.LightningWorkload
