"""Attributes that runs and searches do not have: other libraries call so what they do have.

The names are those of Optuna, scikit-learn, Ray Tune, Keras Tuner, Hyperopt and dask-ml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: What to write after a run, and what others call it.
_OF_A_RUN = {
    "best.epoch": ("best_epoch", "best_step"),
    "best.trial": ("best_index_", "best_number"),
    "best_model()": (
        "best_estimator", "best_estimator_", "best_module", "get_best_model", "get_best_models",
        "model", "predict",
    ),
    "best_params": (
        "best_config", "best_configuration", "best_hyperparameters", "best_parameters",
        "best_params_", "config", "get_best_config", "get_best_hyperparameters", "params",
    ),
    "best_value": (
        "best_loss", "best_metric", "best_metrics", "best_objective", "best_score", "best_score_",
    ),
    'export("models")': ("best_checkpoint", "checkpoint", "save", "save_model", "save_models"),
    "extend(n_trials=4)": ("continue_search", "restart", "resume", "train_more"),
    "failures": ("error", "errors", "failed", "failed_trials", "num_errors"),
    "leaderboard()": ("best_trials", "ranking", "results_summary", "summary", "table"),
    "metrics": (
        "curves", "epochs", "history", "history_", "learning_curves", "metrics_dataframe", "scores",
    ),
    "plot.curves()": ("plot_curves", "plot_history", "plot_learning_curves", "plot_metrics"),
    "plot.importance()": ("param_importances", "plot_importance", "plot_param_importances"),
    "run_dir": ("dir", "directory", "folder", "local_dir", "log_dir", "logdir", "path"),
    "seconds": ("duration", "elapsed", "elapsed_seconds", "runtime", "time", "wall_time"),
    "study.study_name": ("name", "study_name"),
    "top(1)[0]": ("best_result", "best_trial", "get_best_result", "get_best_trial"),
    "trials()": (
        "all_trials", "cv_results_", "dataframe", "df", "get_dataframe", "get_trials", "results",
        "results_df", "to_dataframe", "to_pandas", "trial_dataframe",
    ),
}  # fmt: skip
#: What to write after a search that goes on, and what others call it.
_OF_A_SEARCH = {
    'add({"lr": 0.1})': ("add_trial", "enqueue", "enqueue_trial"),
    "cancel()": ("abort", "close", "kill", "shutdown", "terminate"),
    "extend()": ("set_deadline", "set_limits"),
    "finish()": ("end", "interrupt", "stop_all", "stop_search"),
    "is_running": (
        "done", "finished", "has_ended", "is_alive", "is_done", "is_finished", "running", "state",
        "status",
    ),
    "pause(0)": ("pause_trial",),
    "resume(0)": ("resume_trial",),
    "scale(4)": ("adapt", "resize", "scale_cluster", "set_workers"),
    "stop(0)": ("kill_trial", "prune", "prune_trial", "stop_trial"),
    "wait()": ("block", "get", "join", "wait_until"),
}  # fmt: skip
RUN: Mapping[str, str] = {other: it for it, others in _OF_A_RUN.items() for other in others}
SEARCH: Mapping[str, str] = {
    **{other: f"result.{it}" for other, it in RUN.items()},
    **{other: it for it, others in _OF_A_SEARCH.items() for other in others},
}


def refuse(owner: Any, name: str, elsewhere: Mapping[str, str]) -> Any:
    """Raise an `AttributeError`, which says what to write instead if the owner has it.

    It is for ``__getattr__``. What a property of the owner has raised is raised again.

    Examples
    --------
    >>> refuse(3, "imaginary", {"imaginary": "imag"})
    Traceback (most recent call last):
    ...
    AttributeError: 'int' object has no attribute 'imaginary': write .imag
    """
    written = elsewhere.get(name, "")
    if written and re.split(r"\W", written)[0] in dir(owner):
        raise AttributeError(
            f"{type(owner).__name__!r} object has no attribute {name!r}: write .{written}"
        )
    return object.__getattribute__(owner, name)
