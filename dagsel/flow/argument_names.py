"""Arguments that procedures do not take: other libraries call them so, or they belong elsewhere.

The names are those of Ray Tune, Optuna, Keras, Keras Tuner, scikit-learn, Hyperopt, SMAC, dask-ml,
Syne Tune and Determined.
"""

from __future__ import annotations

from collections.abc import Container

#: How a search procedure is written that has a number of epochs and trials, and one with patience.
RANDOM = "flow=dagsel.flows.RandomSearch(max_epochs=9, n_trials=20)"
PATIENT = "flow=dagsel.flows.EarlyStopping(flow, patience=5)"
#: Arguments of a procedure, and what others call them.
NAMES = {
    "budget": ("max_cost",),
    "deadline": (
        "max_time", "max_wallclock_time", "time_budget", "time_budget_s", "time_limit", "timeout",
        "walltime_limit",
    ),
    "factors": ("perturbation_factors",),
    "flow": ("scheduler", "search"),
    "grace_epochs": ("grace_period", "grace_time", "min_epochs"),
    "max_epochs": (
        "R", "epochs", "max_budget", "max_epoch", "max_fidelity", "max_iter", "max_length",
        "max_resource", "max_resources", "max_t", "n_epochs", "num_epochs",
    ),
    "min_delta": ("early_stopping_threshold", "tol"),
    "min_epochs": (
        "grace_period", "min_budget", "min_fidelity", "min_resource", "min_resources",
        "n_initial_iter",
    ),
    "min_trials": ("grace_population", "min_samples_required", "n_min_trials"),
    "mode": ("type",),
    "mutations": ("hyperparam_mutations",),
    "n_concurrent": ("max_concurrent", "max_concurrent_trials", "n_parallel"),
    "n_trials": (
        "max_evals", "max_trials", "n_candidates", "n_initial_parameters", "n_iter", "num_samples",
        "num_trials", "population_size",
    ),
    "patience": ("early_stopping_patience", "n_iter_no_change"),
    "pruner": ("wrapped_pruner",),
    "quantile": ("quantile_fraction",),
    "reduction_factor": ("aggressiveness", "divisor", "eta", "factor"),
}  # fmt: skip
#: Arguments of `dagsel.optimize`, and what others call them.
SEARCH_NAMES = {
    **dict.fromkeys(("client", "cluster", "keep", "observers", "replicas", "study", "top_k"), ()),
    "budget": NAMES["budget"],
    "callbacks": ("callback",),
    "data": ("dataset", "train_data"),
    "deadline": NAMES["deadline"],
    "max_cluster_workers": ("n_jobs", "n_workers", "num_workers", "workers"),
    "metric": ("monitor", "objective", "scoring"),
    "progress": ("show_progress_bar", "verbose"),
    "run_dir": ("directory", "local_dir", "output_directory", "storage_path"),
    "seed": ("random_seed", "random_state", "rstate"),
    "space": (
        "config_space", "configspace", "hyperparameters", "param_distributions", "param_grid",
        "param_space", "parameters", "search_space",
    ),
    "workload": ("estimator", "hypermodel", "model", "trainable"),
}  # fmt: skip
#: What the study of a search is made with.
STUDY_NAMES = {
    **dict.fromkeys(
        ("direction", "do_minimize", "maximize", "mode", "smaller_is_better"),
        'write study=optuna.create_study(direction="maximize")',
    ),
    **dict.fromkeys(
        ("algo", "sampler", "search_alg", "searcher"),
        "write study=optuna.create_study(sampler=optuna.samplers.TPESampler())",
    ),
    **dict.fromkeys(
        ("experiment_name", "project_name", "study_name"),
        'write study=optuna.create_study(study_name="digits")',
    ),
}
#: What is said of arguments, whatever the procedure.
_NOWHERE = {
    **dict.fromkeys(
        ("resource", "resource_attr", "time_attr"),
        "a resource is an epoch, one pass over the training data; leave it out",
    ),
    **dict.fromkeys(("refit", "restore_best_weights"), "the best model is kept; leave it out"),
    "cv": "one validation set scores all trials; leave it out",
    "points_to_evaluate": 'write study.enqueue_trial({"lr": 0.1}) for each, before dagsel.optimize',
}
_PRUNER = "write dagsel.flows.OptunaPruner(max_epochs=9, n_trials=20, pruner=optuna.pruners."
_BRACKETS = ("brackets", "hyperband_iterations", "n_brackets")
#: What is said of arguments beside one that the procedure takes.
_BESIDE = {
    "deadline": dict.fromkeys(
        ("n_trials", *NAMES["n_trials"], *_BRACKETS),
        "deadline and budget say how many; leave it out",
    ),
    "epochs_by": dict.fromkeys(
        ("max_epochs", *NAMES["max_epochs"]),
        "each configuration says its own; write dagsel.flows.Grid(max_epochs=9) for one number",
    ),
    "flow": {
        other: "write flow=dagsel.flows.ASHA(max_epochs=9, n_trials=20), which takes it"
        for name in ("max_epochs", "n_concurrent", "n_trials")
        for other in (name, *NAMES[name])
    },
    "min_trials": {
        "n_startup_trials": "write min_trials=, the others that have trained as long",
        "n_warmup_steps": "write grace_epochs=, the first epoch after which a trial may stop",
        "percentile": f"{_PRUNER}PercentilePruner(25.0))",
    },
    "perturbation_interval": {"synch": "generations are synchronous; leave it out"},
    "pruner": dict.fromkeys(
        ("interval_steps", "n_min_trials", "n_startup_trials", "n_warmup_steps"),
        "write pruner=optuna.pruners.MedianPruner(n_warmup_steps=0), which takes it",
    ),
}
_ASHA = "write dagsel.flows.ASHA(max_epochs=9, n_trials=20, reduction_factor=3), which takes it"
_PATIENCE = "write dagsel.flows.EarlyStopping(flow, patience=5, min_delta=0.001), which takes it"
#: What is said of an argument, and of its other names, if the procedure takes none of that kind.
_LACKING = {
    "min_delta": _PATIENCE,
    "min_epochs": _ASHA,
    "patience": _PATIENCE,
    "pruner": f"{_PRUNER}MedianPruner())",
    "reduction_factor": _ASHA,
}
#: How an argument that a procedure needs is written.
NEEDED = {
    "max_epochs": "9",
    "n_trials": "20",
    "deadline": '"10 min"',
    "budget": '"30 worker-minutes"',
    "flow": "dagsel.flows.ASHA(max_epochs=9, n_trials=20)",
    "mutations": '{"lr": dagsel.flows.Range(1e-4, 1e-1, log=True)}',
}


def elsewhere(known: Container[str]) -> dict[str, str]:
    """Return what is said of each argument that a procedure with these parameters does not take.

    Examples
    --------
    >>> said = elsewhere(["max_epochs", "n_trials"])
    >>> said["num_samples"], said["metric"]
    ('write n_trials=', 'write metric= for dagsel.optimize')
    """
    said = {name: f"{text} for dagsel.optimize" for name, text in STUDY_NAMES.items()}
    for name, others in SEARCH_NAMES.items():
        said |= dict.fromkeys((name, *others), f"write {name}= for dagsel.optimize")
    said |= _NOWHERE
    said |= dict.fromkeys(_BRACKETS, "write dagsel.flows.Hyperband(max_epochs=9), which has them")
    for name, text in _LACKING.items():
        said |= dict.fromkeys((name, *NAMES[name]), text)
    if "reduction_factor" in known and "n_trials" not in known:
        how_many = "max_epochs, min_epochs and reduction_factor say how many; leave it out"
        said |= dict.fromkeys(("n_trials", *NAMES["n_trials"], *_BRACKETS), how_many)
    for name in (name for name in _BESIDE if name in known):
        said |= _BESIDE[name]
    for name in (name for name in NAMES if name in known):
        said |= dict.fromkeys(NAMES[name], f"write {name}=")
    return said
