"""Images in a folder for each class, stored as files: decoded and augmented on the workers.

    python examples/image_folder.py
    python examples/image_folder.py --data photos

Without ``--data`` it draws 900 small pictures of circles, squares and triangles and takes about a
minute on two cores. The folder holds a folder of image files for each class. Needs the extra
``images``.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from optuna.samplers import TPESampler
from PIL import Image, ImageDraw

import dagsel
from dagsel.flows import ASHA
from dagsel.storage import ImageFolder, ShardedDataset

SIZE = 32  # to which each image is scaled when it is decoded


def draw_pictures(folder: Path, n: int) -> None:
    """Draw n pictures of each shape: any colour, size and place, on a noisy ground."""
    rng = np.random.default_rng(0)
    for shape in ("circle", "square", "triangle"):
        (folder / shape).mkdir(parents=True)
        for number in range(n):
            size = int(rng.integers(40, 65))
            picture = Image.fromarray(rng.integers(0, 120, (size, size, 3), dtype=np.uint8))
            radius = int(rng.integers(8, 16))
            x, y = rng.integers(radius, size - radius, 2).tolist()
            pen = ImageDraw.Draw(picture)
            colour = tuple(rng.integers(60, 256, 3).tolist())
            corners = {"circle": 0, "square": 4, "triangle": 3}[shape]
            if corners:
                turn = int(rng.integers(360))
                pen.regular_polygon((x, y, radius), corners, rotation=turn, fill=colour)
            else:
                pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
            picture.save(folder / shape / f"{number:04}.png")


def augment(sample: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Flip and shift an image, and change its brightness: in training alone."""
    image = sample["x"].float()  # height, width, colour
    for axis in (0, 1):
        if torch.rand(()) < 0.5:
            image = image.flip(axis)
    image = image.roll(tuple(torch.randint(-3, 4, (2,)).tolist()), (0, 1))
    image = image * (1 + config["brightness"] * (2 * torch.rand(()) - 1))
    return {**sample, "x": image.clamp(0, 255).byte()}


def inputs(batch: dict[str, Any], config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["x"].permute(0, 3, 1, 2).float() / 127.5 - 1, batch["y"]


def workload(n_classes: int) -> dagsel.TorchWorkload:
    def model(config: dict[str, Any]) -> torch.nn.Module:
        layers: list[torch.nn.Module] = []
        before, channels = 3, config["channels"]
        for _ in range(3):
            layers += [
                torch.nn.Conv2d(before, channels, 3, padding=1),
                torch.nn.BatchNorm2d(channels),
                torch.nn.ReLU(),
                torch.nn.MaxPool2d(2),
            ]
            before, channels = channels, 2 * channels
        return torch.nn.Sequential(
            *layers, torch.nn.AdaptiveMaxPool2d(1), torch.nn.Flatten(),
            torch.nn.Linear(before, n_classes),
        )  # fmt: skip

    return dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW,
        batch_size=32,
        metrics=["accuracy"],
        collate=dagsel.collate.images(size=(SIZE, SIZE)),
        augment=augment,
        input_fn=inputs,
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "channels": trial.suggest_categorical("channels", [8, 16]),
        "brightness": trial.suggest_float("brightness", 0.0, 0.5),
        "lr": trial.suggest_float("lr", 1e-3, 3e-2, log=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a search on a folder of images")
    parser.add_argument("--data", help="a folder with a folder for each class")
    parser.add_argument("--pictures", type=int, default=300, help="drawn of each class")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=9, help="of a trial, at most")
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="dagsel-images-"))
    photos = args.data or folder / "pictures"
    if args.data is None:
        draw_pictures(photos, args.pictures)
    data = ShardedDataset.write(
        folder / "images.zarr", ImageFolder(photos, decode=False), n_shards=4, stratify="y"
    )
    print(data)
    classes = data.classes["y"]
    run = dagsel.optimize(
        optuna.create_study(study_name="images", direction="maximize", sampler=TPESampler(seed=0)),
        workload(len(classes)),
        data,
        space=space,
        metric="accuracy",
        flow=ASHA(max_epochs=args.epochs, n_trials=args.trials),
        run_dir=folder / "run",
    )
    print(run.leaderboard(5).to_string(index=False, float_format="{:.4g}".format))
    torch.save(run.best_model().state_dict(), folder / "best.pt")
    print(f"the classes are {', '.join(classes)}")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")


if __name__ == "__main__":
    main()
