"""A table in a CSV file: numbers in columns, a letter as label, predictions for new rows.

    python examples/csv_table.py
    python examples/csv_table.py --data mine.csv --label kind --predict new.csv

Without ``--data`` it makes a file of 16 columns and 20,000 rows and takes about a minute on two
cores. A tenth of the rows is set aside as new ones, unless ``--predict`` names a file of them.
"""

import argparse
import string
import tempfile
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import torch
from optuna.samplers import TPESampler
from sklearn.datasets import make_classification

import dagsel
from dagsel.flows import ASHA
from dagsel.storage import ShardedDataset


def made_table(n_rows: int) -> pd.DataFrame:
    x, y = make_classification(
        n_rows, 16, n_informative=14, n_redundant=0, n_classes=26, n_clusters_per_class=1,
        class_sep=2.5, flip_y=0.0, random_state=0,
    )  # fmt: skip
    table = pd.DataFrame(100 * x.round(3), columns=[f"column_{i + 1}" for i in range(16)])
    table["letter"] = [string.ascii_uppercase[number] for number in y]
    return table


def workload(n_columns: int, n_classes: int) -> dagsel.TorchWorkload:
    def model(config: dict[str, Any]) -> torch.nn.Module:
        width = config["width"]
        return torch.nn.Sequential(
            torch.nn.BatchNorm1d(n_columns, affine=False),  # brings the columns to one scale
            torch.nn.Linear(n_columns, width),
            torch.nn.ReLU(),
            torch.nn.Dropout(config["dropout"]),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, n_classes),
        )

    return dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW,
        batch_size=128,
        metrics=["accuracy"],
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "width": trial.suggest_int("width", 32, 256, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.3),
        "lr": trial.suggest_float("lr", 3e-4, 3e-2, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
    }


def predict(model: torch.nn.Module, rows: pd.DataFrame, letters: tuple[str, ...]) -> pd.DataFrame:
    x = torch.tensor(rows.to_numpy("float32"))
    with torch.no_grad():
        probabilities = model(x).softmax(1)
    best = probabilities.max(1)
    predicted = [letters[number] for number in best.indices.tolist()]
    return rows.assign(predicted=predicted, probability=best.values.numpy().round(4))


def main() -> None:
    parser = argparse.ArgumentParser(description="a search on a CSV file")
    parser.add_argument("--data", help="a CSV file; by default one is made")
    parser.add_argument("--label", default="letter", help="the column to predict")
    parser.add_argument("--predict", help="a CSV file of new rows, with the same columns")
    parser.add_argument("--rows", type=int, default=20_000, help="of the file that is made")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=27, help="of a trial, at most")
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="dagsel-csv-"))
    path = args.data or folder / "letters.csv"
    if args.data is None:
        made_table(args.rows).to_csv(path, index=False)
    table = pd.read_csv(path)
    if args.predict:
        new = pd.read_csv(args.predict)
    else:
        new = table.sample(frac=0.1, random_state=0)
        table = table.drop(new.index)

    columns = [name for name in table.columns if name != args.label]
    data = ShardedDataset.write(
        folder / "table.zarr",
        table,
        columns={"x": columns, "y": args.label},
        n_shards=4,
        stratify="y",
    )
    print(data)
    letters = data.classes["y"]
    run = dagsel.optimize(
        optuna.create_study(study_name="csv", direction="maximize", sampler=TPESampler(seed=0)),
        workload(len(columns), len(letters)),
        data,
        space=space,
        metric="accuracy",
        flow=ASHA(max_epochs=args.epochs, n_trials=args.trials),
        run_dir=folder / "run",
    )
    print(run.leaderboard(5).to_string(index=False, float_format="{:.4g}".format))

    model = run.best_model()
    torch.save(model.state_dict(), folder / "best.pt")
    predictions = predict(model, new[columns], letters)
    predictions.to_csv(folder / "predictions.csv", index=False)
    if args.label in new:
        right = (predictions["predicted"] == new[args.label]).mean()
        print(f"{right:.1%} of {len(new)} new rows are predicted rightly")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")
    print(f"{len(new)} predictions written to {folder / 'predictions.csv'}")


if __name__ == "__main__":
    main()
