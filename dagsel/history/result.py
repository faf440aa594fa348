"""What a search on a cluster came to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from dagsel.checks import flag, named_arguments, whole
from dagsel.codec import plain_part
from dagsel.console import Progress
from dagsel.errors import DatasetError, RunDirError, SearchError, WorkloadError
from dagsel.flow.argument_names import NAMES
from dagsel.history.exports import Exported, ExportFolder
from dagsel.history.live import config_kept
from dagsel.history.record import Best
from dagsel.history.search_result import Result as Result
from dagsel.history.settings import open_data
from dagsel.planning.budget import Budget
from dagsel.planning.prices import Price
from dagsel.state import State
from dagsel.storage import RunDir, ShardedDataset
from dagsel.storage.files import Url
from dagsel.workloads.base import GivesModels, Workload

if TYPE_CHECKING:
    from datetime import timedelta
    from os import PathLike

    from dagsel.flow import Flow
    from dagsel.planning.pools import Workers
    from dagsel.storage.shard_cache import Hold
    from dagsel.study import Callback, Space

_MORE = {
    other: f"write {name}="
    for name in ("budget", "deadline", "max_epochs", "n_trials")
    for other in NAMES[name]
}
_EPOCHS = dict.fromkeys(("max_epochs", *NAMES["max_epochs"]), "write epochs=")


@dataclass(frozen=True, slots=True)
class RunCalls:
    """The calls about a run that train. They stand above this module, so a run is given them."""

    extend: Callable[..., Run]
    refit: Callable[..., Any]


@dataclass(frozen=True, repr=False)
class Run(Result):
    """The result of a search on a cluster: its best trials, its models and all that was done.

    `dagsel.optimize` returns it, as do `Search.wait`, `dagsel.load`, `dagsel.resume` and
    `dagsel.replay`.

    Parameters
    ----------
    study
        The study; it has every trial.
    metric
        Name of the metric of the search; of several the first one.
    record
        All that was done.
    workload
        What was trained; None if the run was opened without it (`dagsel.load`).
    run_dir
        The run's folder.
    space
        That of the search; None if the run was opened without it.
    flow
        Its search procedure; None if the run was opened from its folder.

    Examples
    --------
    >>> import dagsel, optuna
    >>> from dagsel.flows import RandomSearch
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import SGDClassifier
    >>> def space(trial):
    ...     return {"alpha": trial.suggest_float("alpha", 1e-5, 1e-2, log=True)}
    >>> workload = dagsel.SklearnWorkload(SGDClassifier(), metrics=["accuracy"])
    >>> run = dagsel.optimize(
    ...     optuna.create_study(direction="maximize"),
    ...     workload,
    ...     load_iris(return_X_y=True),
    ...     space=space,
    ...     metric="accuracy",
    ...     flow=RandomSearch(max_epochs=5, n_trials=3),
    ...     run_dir="run",
    ...     progress=False,
    ... )
    >>> run.best_value > 0.5, list(run.best_params), run.best.trial in (0, 1, 2)
    (True, ['alpha'], True)
    >>> list(run.leaderboard(n=2))
    ['trial', 'accuracy', 'epoch', 'state', 'alpha']
    >>> [trial.state for trial in run.top(2)], run.failures
    (['complete', 'complete'], [])
    >>> len(run.trials()), len(run.metrics), len(run.timeline()), len(run.trials_dataframe())
    (3, 45, 30, 3)
    >>> run.best_model(), run.models(1)
    (SGDClassifier(alpha=...), [SGDClassifier(alpha=...)])
    >>> run.refit(progress=False)  # one more training, on all samples
    SGDClassifier(alpha=...)
    >>> run.data.n_train, min(run.seconds, run.worker_seconds) > 0, run.money, run.currency
    (120, True, None, '')
    >>> run.report("report.html"), list(run.makespans()), run.given_workload is workload
    ('report.html', [...], True)
    >>> figure = run.plot.curves()
    >>> run.plan
    <Run ...
    >>> longer = run.extend(n_trials=1, progress=False)
    >>> len(longer.trials())
    4
    """

    workload: Workload | None
    run_dir: RunDir
    space: Space | None = None
    flow: Flow | None = None
    _calls: RunCalls | None = None  # those that dagsel returns have them

    @named_arguments("Run.extend", _MORE, error=SearchError)
    def extend(
        self,
        client: Any = None,
        *,
        n_trials: int = 0,
        max_epochs: int | None = None,
        n_best: int | None = None,
        deadline: float | str | timedelta | None = None,
        budget: float | str | None = None,
        cluster: Any = None,
        space: Space | None = None,
        flow: Flow | None = None,
        data: ShardedDataset | Url | None = None,
        callbacks: Sequence[Callback] = (),
        max_cluster_workers: int | None = None,
        worker_startup: float | str | None = None,
        workers: Sequence[Workers] | None = None,
        worker_timeout: float | str = 60.0,
        hold: Hold = "auto",
        cache_dir: str | PathLike[str] | None = None,
        progress: Progress = "auto",
        observers: Sequence[Any] = (),
    ) -> Run:
        """Go on with a search that has ended: more trials, more epochs, or both.

        It is the same run in the same ``run_dir``: `dagsel.resume` goes on with it if it is
        interrupted, and `dagsel.replay` repeats the whole. A run of another day is opened with
        `dagsel.load` first, with its workload and space.

        A trial that trains on continues as if it had never ended. Only the states of ``top_k``
        trials are kept. Any other trial is first trained again as it was, without scores, in the
        recorded order. Ended trials of a study cannot change. So another trial stands there for
        it: with the same parameters, and its number as the user attribute ``dagsel:trial``. A
        trial that fails now keeps the result that it had.

        `ASHA` and the searches that train each trial to the end (`RandomSearch`, `SamplerSearch`,
        `Grid`, `MedianStopping`, `OptunaPruner`) can go on, and searches around them.

        Parameters
        ----------
        client, cluster
            As for `dagsel.optimize`; it may be another cluster, of another size.
        n_trials
            How many more trials to draw.
        max_epochs
            Epochs of the longest trial from now on. ASHA adds rungs up to there, and promotes by
            its rule those that had ended; other searches train the `n_best` on.
        n_best
            How many of the present trials train on to `max_epochs`, the best first; None for those
            whose states are kept (``top_k`` of `dagsel.optimize`). Not for ASHA.
        deadline, budget
            As for `dagsel.optimize`, but counted from now on. The earlier ones no longer count.
        space, data, flow
            As for `dagsel.resume`; needed only if the run does not know them.
        callbacks, max_cluster_workers, worker_startup, workers, worker_timeout
            As for `dagsel.optimize`.
        hold, cache_dir, progress, observers
            As for `dagsel.optimize`; observers hear all that happened before, too.

        Returns
        -------
        Run
            The whole run. This object stays as it was.

        Raises
        ------
        RunDirError
            If the run has not ended: `dagsel.resume` goes on with it. If it was abandoned, or
            another driver has it.
        SearchError
            If nothing would be trained, or the search procedure cannot go on.
        """
        assert self._calls is not None
        return self._calls.extend(
            self,
            client,
            n_trials=n_trials,
            max_epochs=max_epochs,
            n_best=n_best,
            deadline=deadline,
            budget=budget,
            cluster=cluster,
            space=space,
            flow=flow,
            data=data,
            callbacks=callbacks,
            max_cluster_workers=max_cluster_workers,
            worker_startup=worker_startup,
            workers=workers,
            worker_timeout=worker_timeout,
            hold=hold,
            cache_dir=cache_dir,
            progress=progress,
            observers=observers,
        )

    @property
    def data(self) -> ShardedDataset:
        """The data set that was trained on.

        Its `classes` say what numbers of text stand for, its `columns` which ones of a table are
        the model's input, in their order.
        """
        about = self.run_dir.about()
        return open_data(about["data"], about.get("data_digest", ""), self.run_dir)

    @named_arguments("Run.refit", _EPOCHS, error=SearchError)
    def refit(
        self,
        client: Any = None,
        *,
        data: Literal["all"] | ShardedDataset = "all",
        epochs: int | None = None,
        trial: int | None = None,
        cluster: Any = None,
        worker_timeout: float | str = 60.0,
        progress: Progress = "auto",
    ) -> Any:
        """Train the best configuration once more, on training and validation samples together.

        It begins anew, with the seed of the run, and nothing is scored, as no samples are left for
        that. The same call gives the same weights, on the same kind of CPU: the orders depend on
        the seed alone, and PyTorch trains with one thread. A learning rate that steps after each
        batch steps as often an epoch as in the search, though there are more batches.

        It has a folder of its own, ``refit/`` in ``run_dir``. A call that was interrupted goes on
        where it was when it is made again; one that has ended is only read. `dagsel.load` opens the
        folder as it does others, for `export` for example.

        Parameters
        ----------
        client, cluster, worker_timeout, progress
            As for `dagsel.optimize`; the loss of training is shown.
        data
            ``"all"``, or another data set, all of whose samples are trained on.
        epochs
            For how many epochs; None for as many as the trial needed for its best value. Those of a
            trial whose state it went on from count, as with a clone.
        trial
            Number of the trial whose configuration is used; None for the best one. If the trial has
            changed its configuration (`PBT`), the last one counts.

        Returns
        -------
        Any
            The model: a module on the CPU, an estimator.

        Raises
        ------
        NoCompletedTrialError
            If no trial was scored, or it fails now.
        SearchError
            If `data`, `epochs` or `trial` are not what they should be.
        RunDirError
            If another process does the same now.
        """
        assert self._calls is not None
        how = {"data": data, "epochs": epochs, "trial": trial, "cluster": cluster}
        shown = {"worker_timeout": worker_timeout, "progress": progress}
        return self._calls.refit(self, client, **how, **shown)

    def best_model(self, trial: int | None = None) -> Any:
        """Return the trained model of the best trial: a module on the CPU, or an estimator.

        Parameters
        ----------
        trial
            Number of another trial whose model is kept: one of the Pareto front, or of the `top_k`
            best.

        Raises
        ------
        SearchError
            If its model is not kept, or the search was about several metrics and no trial is named.
        """
        if trial is None:
            return self._model(self.best)
        number = whole("trial", trial, least=0)
        for best in self.record.top:
            if best.trial == number:
                return self._model(best)
        kept = ", ".join(str(best.trial) for best in self.record.top) or "none"
        raise SearchError(f"the model of trial {number} is not kept; trials with one: {kept}")

    def models(self, n: int | None = None) -> list[Any]:
        """Return the trained models of the best trials, best first.

        In a search for several metrics they are those of `pareto`.

        Parameters
        ----------
        n
            How many; None for all that are kept (``top_k`` of `dagsel.optimize`).

        Raises
        ------
        NoCompletedTrialError
            If no trial was scored.
        SearchError
            If fewer are kept.
        """
        return [self._model(best) for best in self._kept(n)]

    def ensemble(self, n: int | None = None) -> Any:
        """Make one model of the best ones: a module that returns the mean of their outputs.

        Parameters
        ----------
        n
            How many models, as for `models`; None for all that are kept.

        Raises
        ------
        WorkloadError
            If the workload cannot join models.
        SearchError
            If fewer are kept.

        Examples
        --------
        >>> run.ensemble(3)  # doctest: +SKIP
        """
        return self._gives_models("joins").ensemble(self.models(n))

    def export(self, folder: Url, n: int | None = None, *, overwrite: bool = False) -> list[str]:
        """Write the best models as files that need no dagsel to be read.

        Each gets a folder, ``1-trial-7`` and so on: its weights in the safetensors format, its
        configuration, its metrics, and a ``load.py`` that needs torch and safetensors alone. If
        the data set is still there, ``classes.json`` lists what the numbers of labels stand for
        that were text, and ``columns.json`` the columns of a table in the order of the model's
        input. Those of `HFWorkload` are what transformers and PEFT read by ``from_pretrained``.

        Parameters
        ----------
        folder
            Folder or fsspec URL to write them to. Nothing may be there, or, with `overwrite`, what
            an export has written.
        n
            How many, as for `models`; None for the best one, or all of the Pareto front.
        overwrite
            Replace the models of an earlier export. If anything else is in the folder, nothing is
            removed or written.

        Returns
        -------
        list of str
            The URLs of the models' folders, best first.

        Raises
        ------
        WorkloadError
            If the workload cannot write models, or the model holds more than tensors.
        SearchError
            If fewer models are kept, or something is in the folder that is not to be replaced.

        Examples
        --------
        >>> run.export("models", n=2)  # doctest: +SKIP
        ['/home/ada/models/1-trial-7', '/home/ada/models/2-trial-3']
        """
        workload = self._gives_models("writes")
        goal = ExportFolder(folder, overwrite=flag("overwrite", overwrite, error=SearchError))
        models = dict[str, Exported]()
        n = 1 if n is None and not self.record.goals else n
        metrics = [goal.metric for goal in self.record.goals] or [self.metric]
        names = self._names()
        for rank, best in enumerate(self._kept(n), start=1):
            trial, name = self.record.trials[best.trial], f"{rank}-trial-{best.trial}"
            values = dict(zip(metrics, trial.values, strict=True))
            about = (
                f"Trial {best.trial} of study {self.study.study_name} after {best.epoch} epochs: "
                f"{', '.join(f'{metric} {value:.6g}' for metric, value in values.items())}"
            )
            # Of a state that was copied or scored in the middle of an epoch the others are unknown.
            epochs = {e.epoch: dict(e.metrics) for e in trial.epochs if e.value == best.value}
            told = {"metric": self.metric, "value": best.value, "epoch": best.epoch}
            told |= {"trial": best.trial, "metrics": epochs.get(best.epoch, {})}
            kept, params = config_kept(self.record, trial), trial.params_kept
            labels = {name: params[name] for name in kept if name in params}
            config = labels | plain_part(kept)
            files = workload.export(self._model(best), config, about)
            files |= {f"{of}.json": json.dumps(each, indent=1).encode() for of, each in names}
            models[name] = Exported(told, files)
        goal.write(models)
        return [f"{goal.url}/{name}" for name in models]

    def _names(self) -> list[tuple[str, dict[str, tuple[str, ...]]]]:
        """Return what the data set knows of labels and inputs; nothing if it is not there."""
        try:
            data = self.data
        except (DatasetError, RunDirError):
            return []
        known = {"classes": data.classes, "columns": data.columns}
        return [(of, names) for of, names in known.items() if names]

    def _kept(self, n: int | None) -> list[Best]:
        if self.record.goals and n is None:
            by_trial = {best.trial: best for best in self.record.top}
            return [by_trial[number] for number in self.pareto()["trial"]]
        top = [self.best, *self.record.top[1:]]
        if n is None:
            return top
        wanted = whole("n", n)
        if wanted > len(top):
            kept = "1 model" if len(top) == 1 else f"{len(top)} models"
            raise SearchError(
                f"the run keeps {kept}, not {wanted}; search with top_k={wanted} to keep more"
            )
        return top[:wanted]

    def _gives_models(self, what: str) -> GivesModels:
        workload = self.given_workload
        if not isinstance(workload, GivesModels):
            kind = type(workload).__name__
            raise WorkloadError(f"a {kind} {what} no models; take run.models()")
        return workload

    @property
    def given_workload(self) -> Workload:
        """The workload; raises a `WorkloadError` if the run was opened without it."""
        if self.workload is None:
            raise WorkloadError(
                f"models need the workload: write dagsel.load({self.run_dir.url!r}, workload=...)"
            )
        return self.workload

    def _model(self, best: Best) -> Any:
        states = self.run_dir.states
        if best.check:
            blob, _ = states.load_check(best.trial, best.check)
        else:
            place = (best.trial, best.epoch, best.position)
            blob, _ = states.load(*place, partial=best.is_partial)
        return self.given_workload.restore(State(blob), self.record.trials[best.trial].config)

    @property
    def money(self) -> float | None:
        """What the workers have cost, each at its own price; None if no price was given."""
        if self.record.money is not None:
            return self.record.money
        price = self.run_dir.about().get("price_per_worker_hour")
        return None if price is None else self.worker_seconds / 3600 * price

    @property
    def currency(self) -> str:
        """That of `money`; empty if it is not known."""
        return str(self.run_dir.about().get("currency", ""))

    @property
    def _limits(self) -> tuple[float | None, Budget | None]:
        about = self.run_dir.about()
        if self.record.limits is not None:
            about |= asdict(self.record.limits)
        budget_s, per_hour = about.get("budget_s"), about.get("price_per_worker_hour")
        if about.get("budget_money") is not None:  # which bounds no worker-seconds
            budget_s = math.inf
        price = None if per_hour is None else Price(per_hour, self.currency)
        is_known = budget_s is not None or price is not None
        budget = Budget(math.inf if budget_s is None else budget_s, price) if is_known else None
        return about.get("deadline_s"), budget

    @property
    def _made(self) -> Mapping[str, Any]:
        about = self.run_dir.about()
        drop = ("format", "version", "goals", "pools", "n_before", "first_step", "trains_all")
        told = {name.replace("_", " "): about[name] for name in about if name not in drop}
        return told | {"run dir": self.run_dir.url, "notes": self.record.notes[-20:]}

    def _repr_html_(self) -> str:
        return f"{super()._repr_html_()}<p>{escape(self.run_dir.url)}</p>"
