"""What a search came to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import pandas as pd

from dagsel.checks import whole
from dagsel.codec import plain_part
from dagsel.errors import NoCompletedTrialError, SearchError, WorkloadError
from dagsel.history import tables
from dagsel.history.makespans import makespans
from dagsel.history.plan_report import PlanReport
from dagsel.history.record import Best, Record
from dagsel.history.settings import open_data
from dagsel.history.trial import TrialRecord
from dagsel.planning.budget import Budget
from dagsel.planning.prices import Price
from dagsel.state import State
from dagsel.storage import RunDir, ShardedDataset
from dagsel.storage.files import Folder, Url
from dagsel.workloads.base import GivesModels, Workload

if TYPE_CHECKING:
    from dagsel.study import Study


@dataclass(frozen=True, repr=False)
class Result:
    """What a search came to, on a cluster or in virtual time.

    Parameters
    ----------
    study
        The study, told of every trial.
    metric
        Name of the metric that the search was about; of several the first one.
    record
        All that was done.
    """

    study: Study
    metric: str
    record: Record

    @property
    def best(self) -> Best:
        """The best trial, whether it was completed or pruned, and its best state.

        Of a run with ``keep="last"`` the best of the completed trials as they were at their ends;
        if there is none, of those that were pruned.

        Raises
        ------
        NoCompletedTrialError
            If no trial was scored.
        SearchError
            If the search was about several metrics.
        """
        if self.record.goals:
            raise SearchError(
                f"the search was about {self._metrics}, and no trial is best in all of them: "
                "run.pareto() has those that no other one is better than"
            )
        if self.record.best is None:
            reasons = "; ".join(f"trial {t.number}: {t.reason}" for t in self.failures[:3])
            why = reasons or ("none was scored" if self.record.trials else "none was started")
            raise NoCompletedTrialError(f"no trial has completed ({why})")
        return self.record.best

    def pareto(self) -> pd.DataFrame:
        """Return the Pareto front of a search for several metrics, as rows of `leaderboard`.

        These are the trials that have ended and that no other one is better than: at least as good
        in all metrics, and better in one. Trials that break a constraint are left out. They are
        those of Optuna's ``study.best_trials``, by the first metric, the best first. A trial that a
        procedure has stopped is among them if no one that had ended was better; it is complete.

        Raises
        ------
        SearchError
            If the search was about one metric.
        """
        if not self.record.goals:
            raise SearchError(
                f"the search was about one metric, {self.metric}: run.best is its best trial, and "
                "run.leaderboard() ranks all"
            )
        return tables.pareto(self.record)

    @property
    def _metrics(self) -> str:
        return " and ".join(goal.metric for goal in self.record.goals) or self.metric

    @property
    def best_params(self) -> Mapping[str, Any]:
        """Parameters of the best trial."""
        return self.record.trials[self.best.trial].params

    @property
    def best_value(self) -> float:
        """Value of the best trial: its metric in its best epoch; with ``keep="last"`` its last."""
        return self.best.value

    @property
    def worker_seconds(self) -> float:
        """Seconds of workers that the search has used, from each one's request to its release."""
        return self.record.worker_seconds

    @property
    def plan(self) -> PlanReport:
        """What was planned, what was done and what it cost, with a sentence for each difference.

        A search without stages has no plan: then it is what was done.
        """
        return PlanReport.of(self.record, *self._limits)

    @property
    def _limits(self) -> tuple[float | None, Budget | None]:
        """Deadline in seconds, and budget with what is known of the price."""
        return None, None

    @property
    def failures(self) -> list[TrialRecord]:
        """Trials that have failed, each with its reason and traceback."""
        return self.record.failures

    @property
    def metrics(self) -> pd.DataFrame:
        """A row for each trial, epoch, split and metric; ``seconds`` since the run began."""
        return tables.metrics(self.record)

    def trials(self) -> pd.DataFrame:
        """Return a row for each trial: how it ended and why, and what is odd about it."""
        return tables.trials(self.record)

    def timeline(self) -> pd.DataFrame:
        """Return a row for each visit of a shard, in the order in which they ended.

        The first columns say what was done of which trial, where and when: ``kind`` (``"train"``,
        ``"evaluate"``, or ``"check"`` if a paused trial was scored), ``trial``, ``epoch``,
        ``position``, ``shard``, ``worker``, and ``start`` and ``stop`` in seconds since 1970 by the
        worker's clock. ``hop`` says whether the state came from another worker, ``gang`` how many
        workers trained, ``save_seconds`` how long storing the state took, and ``recovered`` that
        only the stored result was found: ``start`` and ``stop`` are the time of finding it.

        A visit that was begun more than once, because its worker or its result was lost, or because
        it was suspended, is one row: ``attempts`` says how often, and ``lost_seconds`` how long the
        attempts took that were lost.
        """
        return tables.timeline(self.record)

    def makespans(self) -> pd.DataFrame:
        """Return a row for each round: its makespan in seconds, and that over its lower bound."""
        return makespans(self.record)

    def trials_dataframe(self) -> pd.DataFrame:
        """Return the study's own frame of all its trials."""
        frame: pd.DataFrame = self.study.trials_dataframe()
        return frame

    def leaderboard(self, n: int = 10) -> pd.DataFrame:
        """Return the best trials of this run, best first: those that were scored and did not fail.

        ``epoch`` is that of the value: after how many epochs the trial was scored with it.
        ``state`` says how the trial ended. Of several metrics each has a column, and ``front`` says
        whether the trial is on the Pareto front.

        Parameters
        ----------
        n
            How many.
        """
        return tables.leaderboard(self.record, self.metric).head(n)

    def __repr__(self) -> str:
        trials = self.record.trials.values()
        ended = ", ".join(
            f"{sum(t.state == state for t in trials)} {state}"
            for state in ("complete", "pruned", "failed", "running")
            if any(t.state == state for t in trials)
        )
        best = self.record.best
        value = f"best {self.metric} {best.value:.4g} (trial {best.trial})" if best else "no best"
        if self.record.goals:
            value = f"{len(self.record.top)} on the Pareto front of {self._metrics}"
        name = f"{type(self).__name__} {self.record.run} of {self.study.study_name!r}"
        return f"<{name}: {ended or 'no trial'}; {value}>"

    def _repr_html_(self) -> str:
        table = self.leaderboard().to_html(index=False, border=0, float_format="{:.4g}".format)
        failed = "".join(f"<li>trial {t.number}: {escape(t.reason)}</li>" for t in self.failures)
        lost = f"<p>failed:</p><ul>{failed}</ul>" if failed else ""
        return f"<p>{escape(repr(self))}</p>{table}{lost}"


@dataclass(frozen=True, repr=False)
class Run(Result):
    """What a search on a cluster came to.

    Parameters
    ----------
    study
        The study, told of every trial.
    metric
        Name of the metric that the search was about.
    record
        All that was done.
    workload
        What was trained; None if the run was opened without it (`dagsel.load`).
    run_dir
        Where states are stored.
    """

    workload: Workload | None
    run_dir: RunDir

    @property
    def data(self) -> ShardedDataset:
        """The data set that was trained on; its `classes` say what numbers of text stand for."""
        return open_data(self.run_dir.about()["data"], self.run_dir.url)

    def best_model(self, trial: int | None = None) -> Any:
        """Make the trained model of the best trial: a module on the CPU, an estimator.

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
        """Make the trained models of the best trials, best first; of several metrics of `pareto`.

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

        `n` is as for `models`. Raises a `WorkloadError` if the workload cannot join models.
        """
        return self._gives_models("joins").ensemble(self.models(n))

    def export(self, folder: Url, n: int | None = None) -> list[str]:
        """Write the best models as files that need no dagsel to be read.

        Each gets a folder, ``1-trial-7`` and so on: its weights in the safetensors format, its
        configuration, its metrics, and a ``load.py`` that needs torch and safetensors alone.

        Parameters
        ----------
        folder
            Folder or fsspec URL to write them to. No model may be there.
        n
            How many, as for `models`; None for the best one, or all of the Pareto front.

        Returns
        -------
        list of str
            The URLs of the models' folders, best first.

        Raises
        ------
        WorkloadError
            If the workload cannot write models, or the model holds more than tensors.
        SearchError
            If fewer models are kept, or the folder has some already.
        """
        workload, goal = self._gives_models("writes"), Folder(folder, error=SearchError)
        if goal.names():
            raise SearchError(f"{goal.url} is not empty; give another folder to write models to")
        models = dict[str, dict[str, bytes]]()
        n = 1 if n is None and not self.record.goals else n
        metrics = [goal.metric for goal in self.record.goals] or [self.metric]
        for rank, best in enumerate(self._kept(n), start=1):
            trial, name = self.record.trials[best.trial], f"{rank}-trial-{best.trial}"
            values = dict(zip(metrics, trial.values, strict=True))
            about = (
                f"Trial {best.trial} of study {self.study.study_name} after {best.epoch} epochs: "
                f"{', '.join(f'{metric} {value:.6g}' for metric, value in values.items())}"
            )
            epochs = {epoch.epoch: dict(epoch.metrics) for epoch in trial.epochs}
            told = {"metric": self.metric, "value": best.value, "epoch": best.epoch}
            told |= {"trial": best.trial, "metrics": epochs.get(best.epoch, {})}
            config = {**trial.params, **plain_part(trial.config)}
            files = workload.export(self._model(best), config, about)
            files["metrics.json"] = json.dumps(told, indent=1).encode()
            models[name] = files
        for name, files in models.items():
            for file, content in files.items():
                goal.replace(f"{name}/{file}", content)
        return [f"{goal.url}/{name}" for name in models]

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
            raise WorkloadError(f"no {type(workload).__name__} {what} models; take run.models()")
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
        budget_s, per_hour = about.get("budget_s"), about.get("price_per_worker_hour")
        if about.get("budget_money") is not None:  # which bounds no worker-seconds
            budget_s = math.inf
        price = None if per_hour is None else Price(per_hour, self.currency)
        is_known = budget_s is not None or price is not None
        budget = Budget(math.inf if budget_s is None else budget_s, price) if is_known else None
        return about.get("deadline_s"), budget

    def _repr_html_(self) -> str:
        return f"{super()._repr_html_()}<p>{escape(self.run_dir.url)}</p>"
