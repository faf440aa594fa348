"""Runs of MLflow: one for the search, and below it one for each trial."""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from dagsel.errors import SearchError
from dagsel.observers.base import ChangedParams, Observer, metrics_beside
from dagsel.observers.events import EpochEnded, SearchBegan, SearchEnded, TrialBegan, TrialEnded
from dagsel.storage.urls import hide, secrets_in, without_credentials

_RUN, _TRIAL, _PARENT = "dagsel.run", "dagsel.trial", "mlflow.parentRunId"
_UNWANTED = re.compile(r"[^\w\-. /]+")
_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}


def _named(name: str) -> str:
    """Return a name as MLflow takes it: letters, digits, blanks, and ``_ - . /``.

    Examples
    --------
    >>> _named("confusion[0,1]"), _named("acc@3"), _named("val/f1"), _named("weight decay (L2)")
    ('confusion_0_1', 'acc_3', 'val/f1', 'weight decay _L2')
    """
    plain = _UNWANTED.sub("_", name).rstrip("_") or "_"
    return plain if posixpath.normpath(f"./{plain}") == plain else plain.replace("/", "_")


def _all_named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by names as MLflow takes them; two that would be one are numbered.

    Examples
    --------
    >>> _all_named({"acc@3": 0.5, "acc#3": 0.6, "acc_3": 0.7})
    {'acc_3': 0.7, 'acc_3_2': 0.6, 'acc_3_3': 0.5}
    """
    named: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: (name != _named(name), name)):
        plain = _named(name)
        tries = (plain, *(f"{plain}_{n}" for n in range(2, len(values) + 2)))
        named[next(it for it in tries if it not in named)] = values[name]
    return named


class MLflow(Observer):
    """Writes a run of MLflow for the search, and one below it for each trial.

    The runs of trials have their parameters, and by epoch the validation metrics and
    ``train_loss``; a validation metric of that name is ``validation_train_loss``. Numbers among the
    parameters that the search changes later are metrics, such as ``params/lr``. A trial that was
    pruned is ``KILLED`` there. Where a search goes on, it goes on in the same runs.

    Needs ``pip install "dagsel[mlflow]"``.

    Parameters
    ----------
    uri
        MLflow's tracking URI, such as ``"sqlite:///mlflow.db"`` or ``"http://127.0.0.1:5000"``.
    experiment
        Name of the experiment; None for the study's.

    Examples
    --------
    Give it to `dagsel.optimize`:

    >>> observers = [MLflow("http://127.0.0.1:5000", experiment="digits")]
    """

    _is_of_one_search = True

    def __init__(self, uri: str = "sqlite:///mlflow.db", experiment: str | None = None) -> None:
        self._uri, self._experiment = uri, experiment
        self._url_secrets = secrets_in(str(uri))
        self._client: Any = None
        self._parent = self._experiment_id = ""
        self._runs: dict[int, str] = {}  # by trial
        self._params: dict[int, set[str]] = {}  # the names that its run has, by trial
        self._there: dict[int, set[int]] = {}  # epochs of trials of before
        self._changed = ChangedParams()

    def check(self) -> None:
        """Raise an error if MLflow is not installed, or cannot be reached."""
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise SearchError(
                f'MLflow is not installed: pip install "dagsel[mlflow]" ({error})'
            ) from None
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        try:
            self._client = MlflowClient(self._uri)
            self._client.search_experiments(max_results=1)
        except Exception as error:  # noqa: BLE001 - a store may raise anything
            place, why = without_credentials(str(self._uri)), hide(str(error), self._url_secrets)
            raise SearchError(f"MLflow cannot use {place}: {why}") from None

    def search_began(self, search: SearchBegan) -> None:
        """Begin the run of the search, or find it and those of its trials."""
        name = self._experiment or search.study
        found = self._client.get_experiment_by_name(name)
        self._experiment_id = (
            self._client.create_experiment(name) if found is None else found.experiment_id
        )
        self._runs, self._params, self._there, self._parent = {}, {}, {}, ""
        self._changed = ChangedParams()
        ours = f"tags.`{_RUN}` = '{search.run}'"
        token = None
        while True:
            page = self._client.search_runs([self._experiment_id], ours, page_token=token)
            for run in page:
                trial = run.data.tags.get(_TRIAL)
                if trial is None:
                    self._parent = run.info.run_id
                else:
                    self._runs[int(trial)] = run.info.run_id
                    self._params[int(trial)] = {*run.data.params}
            token = page.token
            if not token:
                break
        tags = {_RUN: search.run, "dagsel.run_dir": search.run_dir}
        if not self._parent:
            created = self._client.create_run(
                self._experiment_id, tags=tags, run_name=f"search {search.run}"
            )
            self._parent = created.info.run_id
        else:
            self._client.update_run(self._parent, status="RUNNING")
        self._tags = {**tags, _PARENT: self._parent}

    def trial_began(self, trial: TrialBegan) -> None:
        """Begin a run, unless there is one; give it the parameters that it lacks."""
        from mlflow.entities import Param

        self._changed.began(trial)
        if trial.trial not in self._runs:
            created = self._client.create_run(
                self._experiment_id,
                tags={**self._tags, _TRIAL: str(trial.trial)},
                run_name=f"trial {trial.trial}",
            )
            self._runs[trial.trial] = created.info.run_id
            self._there[trial.trial] = set()
        there = self._params.get(trial.trial, set())  # a kill may have come before all were
        params = {k: v for k, v in _all_named(trial.params).items() if k not in there}
        if params:
            told = [Param(name, str(value)) for name, value in params.items()]
            self._client.log_batch(self._runs[trial.trial], params=told)

    def epoch_ended(self, epoch: EpochEnded) -> None:
        """Write its metrics, unless they are there."""
        from mlflow.entities import Metric

        run = self._runs[epoch.trial]
        own = {"train_loss": epoch.train_loss, **self._changed.numbers(epoch)}
        values = _all_named({**metrics_beside(epoch, own), **own})
        if epoch.trial not in self._there:  # the run is of an earlier process
            last = self._client.get_metric_history(run, "train_loss")
            self._there[epoch.trial] = {metric.step for metric in last}
        if epoch.epoch in self._there[epoch.trial]:
            return
        at = int(epoch.at * 1000)
        half = {  # a kill may have cut it in the middle
            name
            for name in values
            if epoch.is_past
            and any(m.step == epoch.epoch for m in self._client.get_metric_history(run, name))
        }
        metrics = [Metric(k, v, at, epoch.epoch) for k, v in values.items() if k not in half]
        self._client.log_batch(run, metrics=metrics)
        self._there[epoch.trial].add(epoch.epoch)

    def trial_ended(self, trial: TrialEnded) -> None:
        """End its run."""
        run = self._runs[trial.trial]
        self._client.set_tag(run, "dagsel.reason", trial.reason)
        self._client.set_terminated(run, _STATUS[trial.state])

    def search_ended(self, search: SearchEnded) -> None:
        """End the run of the search, with the best value."""
        if search.best_value is not None:
            self._client.log_metric(self._parent, "best_value", search.best_value)
            self._client.set_tag(self._parent, "dagsel.best_trial", str(search.best_trial))
        self._client.set_terminated(self._parent, "FAILED" if search.error else "FINISHED")
