"""What a search came to, on a cluster or in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dagsel.checks import short_traceback, whole
from dagsel.errors import NoCompletedTrialError, SearchError
from dagsel.history import attribute_names, tables
from dagsel.history.makespans import makespans
from dagsel.history.plan_report import PlanReport
from dagsel.history.plots import Plots
from dagsel.history.record import Best, Record
from dagsel.history.report import report_page
from dagsel.history.summary import summary_html
from dagsel.history.trial import TrialRecord
from dagsel.planning.budget import Budget
from dagsel.storage.files import Folder, Url

if TYPE_CHECKING:
    import pandas as pd

    from dagsel.study import Study


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a search, on a cluster or in virtual time.

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
        """The best trial, whether it was completed or pruned, and where its best state is.

        In a run with ``keep="last"`` it is the best of the completed trials, by their last epochs;
        if there is none, the best of those that were pruned.

        Raises
        ------
        NoCompletedTrialError
            If no trial was scored, or none that was has ended yet.
        SearchError
            If the search was about several metrics.
        """
        if self.record.goals:
            raise SearchError(
                f"the search was about {self._metrics}, and no trial is best in all of them: "
                "run.pareto() has those that no other one is better than"
            )
        if self.record.best is None:
            trials = self.record.trials.values()
            reasons = "; ".join(f"trial {t.number}: {t.why}" for t in self.failures[:3])
            if n := sum(trial.is_live and bool(trial.epochs) for trial in trials):
                reasons = f"{n} that are scored still train, see run.leaderboard()"
            why = reasons or ("none was scored" if trials else "none was started")
            raise NoCompletedTrialError(f"no trial has completed ({why})")
        return self.record.best

    def pareto(self) -> pd.DataFrame:
        """Return the Pareto front of a search for several metrics, as rows of `leaderboard`.

        These are the trials that have ended and that no other trial beats: none is at least as good
        in all metrics and better in one. Trials that break a constraint are left out. They are
        those of Optuna's ``study.best_trials``, sorted by the first metric, the best first; but an
        infinite value counts as the worst here, whatever its sign. A trial that was stopped by a
        procedure counts as complete if no trial that had ended was better.

        Raises
        ------
        SearchError
            If the search was about one metric.

        Examples
        --------
        >>> import dagsel
        >>> from dagsel.flows import RandomSearch
        >>> from dagsel.simulation import PowerLaw, SimulatedCluster
        >>> run = dagsel.simulate(
        ...     RandomSearch(max_epochs=2, n_trials=8),
        ...     {"error": PowerLaw(), "ms": PowerLaw(asymptote=(5, 50))},
        ...     SimulatedCluster(n_workers=4),
        ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
        ...     metric=["error", "ms"],
        ...     direction=["minimize", "minimize"],
        ... )
        >>> front = run.pareto()
        >>> front["error"].is_monotonic_increasing, front["ms"].is_monotonic_decreasing
        (True, True)
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
        """Parameters of the best trial, with those that a search has changed, as `PBT` does.

        The study keeps those that were drawn first. A choice such as a class or a tuple stands
        under its name.
        """
        return self.record.trials[self.best.trial].params_kept

    @property
    def best_value(self) -> float:
        """Value of the best trial: its metric in its best epoch; with ``keep="last"`` its last."""
        return self.best.value

    @property
    def seconds(self) -> float:
        """Seconds that the search took, from its beginning to the last that it noted.

        Time in which it lay dead before `dagsel.resume` is left out, unless ``count_downtime`` was
        given there. In virtual time it begins with the request for the first workers.
        """
        return self.record.seconds

    @property
    def worker_seconds(self) -> float:
        """Seconds of workers that the search has used, from each one's request to its release."""
        return self.record.worker_seconds

    @property
    def plan(self) -> PlanReport:
        """What was planned, what was done and what it cost, with a sentence for each difference.

        A search without stages has no plan; then it shows what was done.
        """
        return PlanReport.of(self.record, *self._limits)

    @property
    def _limits(self) -> tuple[float | None, Budget | None]:
        """Deadline in seconds, and budget with what is known of the price."""
        return None, None

    @property
    def plot(self) -> Plots:
        """Figures of the search: `Plots.timeline`, `Plots.curves`, `Plots.workers` and others.

        They need Plotly: ``pip install "dagsel[plot]"``.
        """
        return Plots(self.study, self.metric, self.record, *self._limits)

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
        """Return a row for each visit of a trial to a shard, in the order in which they ended.

        The first columns say what was done of which trial, where and when: ``kind`` (``"train"``,
        ``"evaluate"``, or ``"check"`` if a paused trial was scored), ``trial``, ``epoch``,
        ``position``, ``shard``, ``worker``, and ``start`` and ``stop`` in seconds since 1970 by the
        worker's clock. ``hop`` says whether the state came from another worker, ``gang`` how many
        workers trained, ``save_seconds`` how long storing the state took after ``stop``, while the
        worker trains another trial. ``recovered`` says that only the stored result was found:
        ``start`` and ``stop`` are the time of finding it. It has no worker if the search was killed
        before it knew which one had trained.

        A visit may begin more than once, because its worker or its result was lost, or because it
        was suspended. It is one row all the same: ``attempts`` says how often it began, and
        ``lost_seconds`` how long the lost attempts took.
        """
        return tables.timeline(self.record)

    def makespans(self) -> pd.DataFrame:
        """Return a row for each round: its makespan in seconds, and that over its lower bound.

        A round is a group of trials that were told to train at the same time. Its makespan is the
        time from its first visit to its last.
        """
        return makespans(self.record)

    def trials_dataframe(self) -> pd.DataFrame:
        """Return the study's own frame of all its trials."""
        frame: pd.DataFrame = self.study.trials_dataframe()
        return frame

    @short_traceback
    def top(self, n: int = 3) -> list[TrialRecord]:
        """Return the best trials, best first, as `leaderboard` ranks them.

        Each has its ``number``, ``params``, ``config``, ``value``, ``state`` and ``epochs``. Where
        a search changes parameters, as `PBT` does, ``params`` are those that were drawn first, and
        ``params_kept`` those that the value was trained with.

        Parameters
        ----------
        n
            How many; fewer if fewer were scored.

        Raises
        ------
        SearchError
            If `n` is no whole number of 1 or more.
        """
        return tables.ranked(self.record)[: whole("n", n)]

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

    if not TYPE_CHECKING:  # else any attribute would be right

        def __getattr__(self, name: str) -> Any:
            return attribute_names.refuse(self, name, attribute_names.RUN)

    def __call__(self) -> NoReturn:
        """Refuse what is written ``search.result()`` by habit: the attribute is the run so far."""
        raise TypeError(
            "write search.result without brackets, the run so far, or search.wait(), which returns "
            "it when the search has ended"
        )

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

    @short_traceback
    def report(self, path: Url = "report.html") -> str:
        """Write a page on the search: a file of HTML that needs no network and no other file.

        It has the leaderboard, which sorts by a click on a heading, curves, a Gantt chart of the
        workers, cost, failed trials with their tracebacks, and how the search was made. It can be
        written while the search runs (``search.result.report()``).

        Parameters
        ----------
        path
            Where to; any URL that fsspec knows. A file that is there is replaced, as a whole.

        Returns
        -------
        str
            The path.

        Raises
        ------
        SearchError
            If it cannot be written.
        """
        place = Folder(path, error=SearchError)
        parent, _, name = place.url.rstrip("/").rpartition("/")
        about = (self.study.study_name, self.metric, self.record, *self._limits, self._made)
        try:
            Folder(parent or "/", error=SearchError).replace(name, report_page(*about).encode())
        except OSError as error:
            raise SearchError(f"the report cannot be written to {place.url}: {error}") from None
        return str(path)

    @property
    def _made(self) -> Mapping[str, Any]:
        """What the report says of how the search was made."""
        return {"run": self.record.run}

    def _repr_html_(self) -> str:
        return summary_html(repr(self), self.metric, self.record)
