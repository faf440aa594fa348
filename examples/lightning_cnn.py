"""A convolutional LightningModule on scikit-learn's digits, trained without a Trainer.

    python examples/lightning_cnn.py

The module is what Lightning's users write: steps, an optimizer, a schedule that follows a metric of
validation, hooks, an object of torchmetrics. ASHA stops the worse trials, and the best module is
saved as a checkpoint that ``DigitsCNN.load_from_checkpoint`` reads. It takes about half a minute on
two cores. Needs the extra ``lightning``.
"""

import argparse
import tempfile
from pathlib import Path

import lightning
import optuna
import torch
from lightning.pytorch import LightningModule
from optuna.samplers import TPESampler
from sklearn.datasets import load_digits
from torchmetrics.classification import MulticlassAccuracy

import dagsel
from dagsel.flows import ASHA
from dagsel.storage import ShardedDataset


class DigitsCNN(LightningModule):
    def __init__(self, channels, lr, dropout):
        super().__init__()
        self.save_hyperparameters()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, channels, 3, padding=1),
            torch.nn.BatchNorm2d(channels),
            torch.nn.ReLU(),
            torch.nn.Conv2d(channels, 2 * channels, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(dropout),
        )
        self.head = torch.nn.Linear(2 * channels * 16, 10)
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, batch_idx):
        images, digits = batch
        loss = torch.nn.functional.cross_entropy(self(images), digits)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, digits = batch
        logits = self(images)
        self.accuracy(logits, digits)
        self.log("val_acc", self.accuracy)
        self.log("val_loss", torch.nn.functional.cross_entropy(logits, digits))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.trainer.training:
            return batch
        images, digits = batch
        return images + 0.05 * torch.randn_like(images), digits

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_acc"}


def module(config):
    return DigitsCNN(config["channels"], config["lr"], config["dropout"])


def space(trial):
    return {
        "channels": trial.suggest_categorical("channels", [4, 8]),
        "lr": trial.suggest_float("lr", 1e-3, 3e-2, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
        "batch_size": trial.suggest_categorical("batch_size", [32, 64]),
    }


def checkpoint(module):
    """Return what Lightning's own checkpoints hold that ``load_from_checkpoint`` needs."""
    return {
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
    }


def main():
    parser = argparse.ArgumentParser(description="a search over CNNs of Lightning on digits")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=9)
    args = parser.parse_args()

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype("float32")
    folder = Path(tempfile.mkdtemp(prefix="dagsel-lightning-"))
    data = ShardedDataset.write(
        str(folder / "digits.zarr"), {"images": images, "digits": digits.target}, n_shards=4
    )
    print(data)

    workload = dagsel.LightningWorkload(
        module,
        metrics={"val_acc": "maximize", "val_loss": "minimize"},
        batch_size=lambda config: config["batch_size"],
        gradient_clip_val=1.0,
    )
    run = dagsel.optimize(
        optuna.create_study(
            study_name="lightning-cnn", direction="maximize", sampler=TPESampler(seed=0)
        ),
        workload,
        data,
        space=space,
        metric="val_acc",
        flow=ASHA(max_epochs=args.epochs, n_trials=args.trials),
        run_dir=str(folder / "run"),
    )
    print(run.leaderboard().to_string(index=False, float_format="{:.4g}".format))
    torch.save(checkpoint(run.best_model()), folder / "best.ckpt")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.ckpt'}")


if __name__ == "__main__":
    main()
