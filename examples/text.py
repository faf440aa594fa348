"""Texts of unequal length: lists of tokens are stored as they are, and padded batch by batch.

    python examples/text.py
    python examples/text.py --data reviews.csv --text review --label liked

Without ``--data`` it makes 4,000 short film reviews, in which "not" turns the next word round, and
takes about half a minute on two cores. Batches hold texts of similar length, so little is padded.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import torch
from optuna.samplers import TPESampler

import dagsel
from dagsel.flows import ASHA
from dagsel.storage import ShardedDataset

OPINIONS = {"good": 1, "fine": 1, "funny": 1, "bad": -1, "dull": -1, "sad": -1}
FILLERS = ["the", "a", "film", "plot", "actor", "was", "quite", "it", "and", "end"]


def made_reviews(n: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(n):
        words: list[str] = []
        liked = 0
        for word in rng.choice(list(OPINIONS), size=rng.integers(1, 8, endpoint=True)):
            words += rng.choice(FILLERS, size=rng.integers(1, 5)).tolist()
            negated = bool(rng.random() < 0.4)
            liked += OPINIONS[word] * (-1 if negated else 1)
            words += ["not", str(word)] if negated else [str(word)]
        if liked:
            rows.append({"text": " ".join(words), "label": "liked" if liked > 0 else "disliked"})
    return pd.DataFrame(rows)


def tokens(text: str, numbers: dict[str, int]) -> list[int]:
    """Return the number of each word; 0 pads and 1 stands for a word that is rare."""
    return [numbers.get(word, 1) for word in text.lower().split()] or [1]


def workload(n_words: int, n_classes: int) -> dagsel.TorchWorkload:
    class Reader(torch.nn.Module):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            width = config["width"]
            self.table = torch.nn.Embedding(n_words, width)
            self.pairs = torch.nn.Conv1d(width, width, 2, padding=1)
            self.head = torch.nn.Linear(width, n_classes)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            words = self.table(ids) * mask[..., None]
            pairs = self.pairs(words.transpose(1, 2)).tanh()[..., :-1]
            return self.head((pairs * mask[:, None]).sum(2))

    return dagsel.TorchWorkload(
        model=Reader,
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.Adam,
        batch_size=32,
        metrics=["accuracy"],
        collate=dagsel.collate.pad(ids=0),
        bucket_by="ids",
        input_fn=lambda batch, config: (
            {"ids": batch["ids"], "mask": batch["ids_mask"]},
            batch["label"],
        ),
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "width": trial.suggest_int("width", 8, 64, log=True),
        "lr": trial.suggest_float("lr", 1e-3, 3e-2, log=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a search on texts")
    parser.add_argument("--data", help="a CSV file; by default reviews are made")
    parser.add_argument("--text", default="text", help="the column of texts")
    parser.add_argument("--label", default="label", help="the column to predict")
    parser.add_argument("--reviews", type=int, default=4000, help="that are made")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=9, help="of a trial, at most")
    args = parser.parse_args()

    table = pd.read_csv(args.data) if args.data else made_reviews(args.reviews)
    counted = Counter(word for text in table[args.text] for word in text.lower().split())
    numbers = {word: at + 2 for at, (word, _) in enumerate(counted.most_common(20_000))}
    table["ids"] = [tokens(text, numbers) for text in table[args.text]]

    folder = Path(tempfile.mkdtemp(prefix="dagsel-text-"))
    columns = {"ids": "ids", "label": args.label}
    data = ShardedDataset.write(folder / "texts.zarr", table, columns=columns, n_shards=4)
    print(data)
    classes = data.classes["label"]
    run = dagsel.optimize(
        optuna.create_study(study_name="text", direction="maximize", sampler=TPESampler(seed=0)),
        workload(len(numbers) + 2, len(classes)),
        data,
        space=space,
        metric="accuracy",
        flow=ASHA(max_epochs=args.epochs, n_trials=args.trials),
        run_dir=folder / "run",
    )
    print(run.leaderboard(5).to_string(index=False, float_format="{:.4g}".format))

    model = run.best_model()
    torch.save(model.state_dict(), folder / "best.pt")
    for text in table[args.text][:3]:
        one = torch.tensor([tokens(text, numbers)])
        with torch.no_grad():
            best = int(model(one, torch.ones_like(one, dtype=torch.bool)).argmax())
        print(f"{classes[best]:>10}: {text}")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")


if __name__ == "__main__":
    main()
