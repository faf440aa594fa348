"""Lightning's modules of different habits, and how each is trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules


class Plain(LightningModule):
    """Adam, dropout, batch normalization; the base of the others."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters({"config": dict(config)})
        self.first, self.norm = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(F.relu(self.norm(self.first(x))), 0.3, self.training))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def sgd(self, lr: float = 0.1) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)


class ByEpochs(Plain):
    """A schedule by epochs, of which every second is its turn, and one of every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = self.sgd()
        rare = {"scheduler": schedules.StepLR(optimizer, 1, 0.5), "frequency": 2}
        return [optimizer], [rare, schedules.ExponentialLR(optimizer, 0.9)]


class BySteps(Plain):
    """A schedule by steps that needs to know how many there will be."""

    def configure_optimizers(self) -> Any:
        optimizer = self.sgd()
        total = int(self.trainer.estimated_stepping_batches)
        assert self.trainer.max_epochs == 3
        schedule = schedules.OneCycleLR(optimizer, 0.2, total_steps=total)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Plateau(Plain):
    """A rate that is lowered by a metric of validation."""

    def configure_optimizers(self) -> Any:
        optimizer = self.sgd(0.4)
        schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


class PlateauOfTraining(Plain):
    """A rate that is lowered by what training logs, and another schedule by every third step."""

    def configure_optimizers(self) -> Any:
        optimizer = self.sgd(0.4)
        held = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        steps = {"scheduler": schedules.StepLR(optimizer, 1, 0.9), "interval": "step"}
        return [optimizer], [
            {"scheduler": held, "monitor": "train_loss_epoch"},
            {**steps, "frequency": 3},
        ]


class Clips(Plain):
    """Gradients are clipped by its own hook, other ones in other epochs."""

    def configure_gradient_clipping(  # type: ignore[override]
        self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
    ) -> None:
        if self.current_epoch != 1:
            self.clip_gradients(
                optimizer,
                gradient_clip_val=gradient_clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
            )


class Ema(Plain):
    """A moving average of the weights in buffers, which validation uses."""

    ema: torch.Tensor

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.register_buffer("ema", self.last.weight.detach().clone())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ema.lerp_(self.last.weight.detach(), 0.1)

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log("norm", self.ema.norm(), batch_size=1)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = F.linear(F.relu(self.norm(self.first(x))), self.ema, self.last.bias)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean())


class Named(Plain):
    """Dict batches, and metrics of many kinds."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.acc = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.both = torchmetrics.MetricCollection(
            {
                "f1": torchmetrics.classification.MulticlassF1Score(3),
                "confusion": torchmetrics.classification.MulticlassAUROC(3),
            },
            prefix="val_",
        )

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        return {"loss": loss, "more": loss.detach() * 2}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["more"] == outputs["loss"] * 2

    def validation_step(self, batch: Any) -> Any:  # type: ignore[override]
        logits, y = self(batch["x"]), batch["y"]
        self.acc(logits, y)
        self.both.update(logits, y)
        loss = F.cross_entropy(logits, y, reduction="none")
        self.log("val_acc", self.acc)
        self.log_dict(self.both)
        self.log_dict({"val_loss": loss.mean(), "weighted": loss.mean()}, batch_size=2)
        self.log("worst", loss.max(), reduce_fx="max")
        self.log("total", loss.sum(), reduce_fx=torch.sum)
        self.log("both_ways", loss.mean(), on_step=True, on_epoch=True)


class Accumulates(Plain):
    """Steps after several batches, over the ends of shards; a schedule by those steps."""

    def configure_optimizers(self) -> Any:
        optimizer = self.sgd()
        schedule = schedules.StepLR(optimizer, 2, 0.8)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1},
        }

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.steps_seen = self.global_step


class Closure(Plain):
    """An optimizer that computes the loss itself, more than once a step."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.norm = torch.nn.Identity()  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=3)


class Hooks(Plain):
    """Warm-up in `optimizer_step`, noise on gradients, parts that are frozen for an epoch."""

    def on_train_start(self) -> None:
        self.scale = 0.01
        torch.nn.init.zeros_(self.last.bias)

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch != 1)
        self.norm.train(self.current_epoch != 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.trainer.is_last_batch == (batch_idx == self.trainer.num_training_batches - 1)
        if batch_idx % 2:
            batch[0].mul_(1.1)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter), alpha=self.scale)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.last.weight.grad.norm())  # type: ignore[union-attr]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 20)
        optimizer.step(closure=optimizer_closure)

    def on_train_epoch_end(self) -> None:
        is_steep = bool(self.trainer.callback_metrics["norm"] > 0.5)
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["weight_decay"] = 0.1 if is_steep else 0.2


class Draws(Plain):
    """Augmentation on batches by all three random streams; it may leave a batch out."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        noise = torch.randn_like(batch[0]) * random.random() * np.random.random()
        return [batch[0] + noise, batch[1]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 4 else super().training_step(batch, batch_idx)


class Rivals(Plain):
    """Two optimizers that it steps itself, and two schedules."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.automatic_optimization = False
        self.rival = torch.nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        optimizers: Any = self.optimizers()
        mine, other = optimizers
        hidden = F.relu(self.first(x))
        gap = -F.mse_loss(self.rival(hidden.detach()), self.last(hidden.detach()).detach())
        self.manual_backward(gap)
        if batch_idx % 5 == 4:  # some gradients are left at the end of an epoch
            self.clip_gradients(other, 0.5, "norm")
            other.step()
            other.zero_grad()
        self.toggle_optimizer(mine)
        loss = F.cross_entropy(self.last(hidden), y) + 0.01 * self.rival(hidden).pow(2).mean()
        self.manual_backward(loss)
        mine.step()
        mine.zero_grad(set_to_none=False)
        self.untoggle_optimizer(mine)
        if batch_idx % 5 == 4:
            for schedule in self.lr_schedulers():  # type: ignore[union-attr]
                schedule.step()
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        mine = torch.optim.Adam([*self.first.parameters(), *self.last.parameters()], lr=0.01)
        other = torch.optim.SGD(self.rival.parameters(), lr=0.1, momentum=0.9)
        return [mine, other], [
            schedules.StepLR(mine, 4, 0.9),
            schedules.ExponentialLR(other, 0.95),
        ]


class Remembers(Plain):
    """A counter in its checkpoint, and an object of torchmetrics over the epoch of training."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.n, self.acc = 0, torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.n += len(y)
        self.acc(logits, y)
        self.log("train_acc", self.acc, on_epoch=True)
        self.log("samples", float(self.n), reduce_fx=max, on_epoch=True, on_step=False)
        return F.cross_entropy(logits, y) * (1 + 1 / self.n)

    def on_train_epoch_end(self) -> None:
        known = self.trainer.callback_metrics
        assert known["samples"] == self.n
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["weight_decay"] = float(known["train_acc_epoch"] + known["train_acc_step"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["n"] = self.n

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.n = checkpoint["n"]


@dataclass(frozen=True)
class Habit:
    """How a module is trained: with a workload, and with a Trainer."""

    module: type[LightningModule]
    #: What both are given.
    options: dict[str, Any] = field(default_factory=dict)
    scores: tuple[str, ...] = ("val_loss", "val_acc")
    follows: bool = False
    batch_fn: Callable[[Any, Any], Any] | None = None


def by_name(batch: dict[str, Any], config: Any) -> dict[str, Any]:
    return batch


HABITS = {
    "plain": Habit(Plain),
    "by epochs": Habit(ByEpochs),
    "by steps": Habit(BySteps),
    "plateau": Habit(Plateau, follows=True),
    "plateau of training": Habit(PlateauOfTraining),
    "clips": Habit(Clips, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "ema": Habit(Ema, scores=("val_loss", "val_acc", "norm")),
    "named": Habit(
        Named,
        scores=("val_loss", "val_acc", "val_f1", "weighted", "worst", "total", "both_ways",
                "both_ways_epoch"),
        batch_fn=by_name,
    ),
    "accumulates": Habit(Accumulates, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "closure": Habit(Closure),
    "hooks": Habit(Hooks),
    "draws": Habit(Draws),
    "rivals": Habit(Rivals),
    "remembers": Habit(Remembers),
    "bf16": Habit(Clips, {"precision": "bf16"}),
}  # fmt: skip


class Everything(Plateau):
    """Much of the above at once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.acc = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.register_buffer("ema", self.last.weight.detach().clone())

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch % 2 == 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.acc(self(batch[0]), batch[1])
        self.log("train_acc", self.acc, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ema.lerp_(self.last.weight.detach(), 0.1)  # type: ignore[operator]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.acc(self(batch[0]), batch[1])
        self.log("val_acc", self.acc)
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = self.sgd(self.hparams["config"]["lr"])
        schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


class DigitsNet(Plain):
    """A network for scikit-learn's digits whose rate follows the search's metric."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.first, self.norm = torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32)
        self.last = torch.nn.Linear(32, 10)
        self.acc = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.acc(logits, y)
        self.log("val_acc", self.acc)
        self.log("val_loss", F.cross_entropy(logits, y))

    def configure_optimizers(self) -> Any:
        optimizer = self.sgd(self.hparams["config"]["lr"])
        schedule = schedules.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_acc"}
