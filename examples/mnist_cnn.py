"""A search over small convolutional networks on MNIST.

    python examples/mnist_cnn.py
    python examples/mnist_cnn.py --data PATH

PATH is a folder with a pair of the original files, gzipped or not, such as
``train-images-idx3-ubyte.gz`` and ``train-labels-idx1-ubyte.gz`` (60,000 images, from any mirror of
MNIST). Any pair of ``*images-idx3-ubyte*`` and ``*labels-idx1-ubyte*`` will do; of several, the
largest is taken. Without it scikit-learn's digits are scaled up to MNIST's size, and the search
takes about a minute on two cores.
"""

import argparse
import gzip
import tempfile
from pathlib import Path

import numpy as np
import optuna
import torch

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset


def read_idx(path):
    """Read an IDX file: magic number, big-endian sizes, bytes."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        magic = int.from_bytes(file.read(4), "big")
        shape = [int.from_bytes(file.read(4), "big") for _ in range(magic & 0xFF)]
        return np.frombuffer(file.read(), np.uint8).reshape(shape)


def read_mnist(folder):
    """Find and read the images and labels in a folder."""
    found = []
    for part in ("images-idx3", "labels-idx1"):
        files = sorted(Path(folder).glob(f"*{part}-ubyte*"), key=lambda path: path.stat().st_size)
        if not files:
            raise SystemExit(f"no *{part}-ubyte* in {folder}: give --data the folder of the files")
        found.append(read_idx(files[-1]))
    return found


def large_digits():
    """Return scikit-learn's digits of 8 x 8 as images of 28 x 28."""
    from sklearn.datasets import load_digits  # takes a second, and files of MNIST do without

    digits = load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8).repeat(3, axis=1).repeat(3, axis=2)
    return np.pad(images, ((0, 0), (2, 2), (2, 2))), digits.target


def model(config):
    channels, width = config["channels"], config["width"]
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, channels, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(channels, 2 * channels, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * channels * 49, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )


def arrays(images, labels):
    """Make the arrays as the model takes them: once, when they are written, not in each epoch."""
    scaled = (images[:, np.newaxis].astype(np.float32) / 255 - 0.1307) / 0.3081
    return {"images": scaled.astype(np.float32), "labels": labels.astype(np.int64)}


def optimizer(parameters, config):
    return torch.optim.Adam(parameters, lr=config["lr"])


def space(trial):
    return {
        "channels": trial.suggest_categorical("channels", [4, 8, 16]),
        "width": trial.suggest_int("width", 32, 128, log=True),
        "lr": trial.suggest_float("lr", 3e-4, 1e-2, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [64, 128, 256]),
    }


def workload():
    return dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=optimizer,
        batch_size=lambda config: config["batch_size"],
        metrics={"accuracy": dagsel.metrics.accuracy},
    )


def main():
    parser = argparse.ArgumentParser(description="a search over CNNs on MNIST")
    parser.add_argument("--data", help="folder with the IDX files")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--shards", type=int, default=4)
    args = parser.parse_args()

    images, labels = read_mnist(args.data) if args.data else large_digits()
    folder = Path(tempfile.mkdtemp(prefix="dagsel-mnist-"))
    data = ShardedDataset.write(
        str(folder / "mnist.zarr"),
        arrays(images, labels),
        n_shards=args.shards,
    )
    print(data)
    run = dagsel.optimize(
        optuna.create_study(study_name="mnist-cnn", direction="maximize"),
        workload(),
        data,
        space=space,
        metric="accuracy",
        flow=RandomSearch(max_epochs=args.epochs, n_trials=args.trials),
        run_dir=str(folder / "run"),
    )
    print(run.leaderboard().to_string(index=False, float_format="{:.4g}".format))
    torch.save(run.best_model().state_dict(), folder / "best.pt")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")


if __name__ == "__main__":
    main()
