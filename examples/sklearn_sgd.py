"""An estimator of scikit-learn with ``partial_fit``: no PyTorch in your own code.

    python examples/sklearn_sgd.py

It searches the loss, the penalty and the learning rate of ``SGDClassifier`` on handwritten digits
by Optuna's TPE sampler, saves the best estimator with joblib and reads it back. It takes about 15
seconds on two cores. Needs the extra ``sklearn``.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import joblib
import optuna
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split

import dagsel
from dagsel.flows import SamplerSearch


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "loss": trial.suggest_categorical("loss", ["hinge", "log_loss", "modified_huber"]),
        "penalty": trial.suggest_categorical("penalty", ["l2", "l1"]),
        "alpha": trial.suggest_float("alpha", 1e-6, 1e-1, log=True),
        "eta0": trial.suggest_float("eta0", 1e-4, 1.0, log=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a search over linear classifiers")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=0)
    folder = Path(tempfile.mkdtemp(prefix="dagsel-sklearn-"))
    workload = dagsel.SklearnWorkload(
        SGDClassifier(learning_rate="constant", random_state=0), classes=range(10), batch_size=64
    )
    sampler = optuna.samplers.TPESampler(seed=0)
    run = dagsel.optimize(
        optuna.create_study(study_name="sgd", direction="maximize", sampler=sampler),
        workload,
        (x, y),
        space=space,
        metric="accuracy",
        flow=SamplerSearch(max_epochs=args.epochs, n_trials=args.trials),
        run_dir=folder / "run",
    )
    print(run.leaderboard(5).to_string(index=False, float_format="{:.4g}".format))

    joblib.dump(run.best_model(), folder / "best.joblib")
    again = joblib.load(folder / "best.joblib")
    print(f"{again.score(x_test, y_test):.4f} of samples that the search has not seen are right")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.joblib'}")


if __name__ == "__main__":
    main()
