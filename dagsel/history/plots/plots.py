"""The figures that a `Result` offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dagsel.checks import choice, short_traceback
from dagsel.errors import SearchError
from dagsel.history.plots import cost, curves, timeline, workers
from dagsel.history.plots.style import Figure, plotly
from dagsel.history.record import Record
from dagsel.planning.budget import Budget
from dagsel.study.plots import importance_plot, parallel_plot

if TYPE_CHECKING:
    from dagsel.study import Study


@dataclass(frozen=True)
class Plots:
    """Draws a search, while it runs or afterwards, as Plotly figures. `Run.plot` is one.

    They need Plotly: ``pip install "dagsel[plot]"``.

    Parameters
    ----------
    study
        Its study.
    metric
        Name of the metric that it is about; of several the first one.
    record
        What was done.
    deadline_s, budget
        Its limits; None for no limit.

    Examples
    --------
    >>> import dagsel
    >>> from dagsel.flows import RandomSearch
    >>> from dagsel.simulation import PowerLaw, SimulatedCluster
    >>> run = dagsel.simulate(
    ...     RandomSearch(max_epochs=3, n_trials=8),
    ...     PowerLaw(epoch_s=60.0),
    ...     SimulatedCluster(n_workers=4),
    ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
    ... )
    >>> plot = run.plot
    >>> figures = [plot.timeline(), plot.curves(x="seconds"), plot.workers(), plot.cost()]
    >>> plot.parallel(["lr"]).write_html("parallel.html")
    >>> plot.importance(["lr"]).layout.title.text is not None
    True
    """

    study: Study
    metric: str
    record: Record
    deadline_s: float | None = None
    budget: Budget | None = None

    def __call__(self) -> Figure:
        """Draw the curves of the search's metric."""
        return self.curves()

    def timeline(self) -> Figure:
        """Draw what each worker did and when: a Gantt chart of the visits of shards.

        A bar is a visit and has the colour of its trial; paler ones score a trial. A dark edge says
        that the trial's state came from another worker. Where there is no bar a worker was
        idle. The dotted line is a lower bound: no schedule of these visits ends before it.

        In a large search visits of a trial that follow each other are drawn as one bar.
        """
        return timeline.figure(self.record, self.study.study_name)

    @short_traceback
    def curves(
        self, metric: str | None = None, *, x: Literal["epochs", "seconds"] = "epochs"
    ) -> Figure:
        """Draw a metric of each trial over time; the best trials in colour.

        Parameters
        ----------
        metric
            Any validation metric, or ``"train loss"``; None for the one that the search is about.
        x
            Whether to draw it over epochs, or over the seconds since the run began.

        Raises
        ------
        SearchError
            If there is no such metric.
        """
        plotly()
        choice("x", x, ("epochs", "seconds"))
        name = self.metric if metric is None else metric
        names = [*curves.metrics_of(self.record), curves.TRAIN_LOSS]
        if metric is not None and name not in names:
            raise SearchError(f"there is no metric {name!r}; take one of {', '.join(names)}")
        return curves.figure(self.record, self.metric, name, x)

    def workers(self) -> Figure:
        """Draw how many workers each trial had, over time.

        Each of the best trials has a colour, all others together are grey: as in Figure 1 of
        Dunlap et al., Elastic Hyperparameter Tuning on the Cloud, SoCC 2021 (SEER).
        """
        return workers.figure(self.record)

    def cost(self) -> Figure:
        """Draw what the workers have cost over time, with budget and deadline, and by trial."""
        return cost.figure(self.record, self.deadline_s, self.budget)

    def parallel(self, params: Sequence[str] | None = None) -> Figure:
        """Draw the parameters of all trials of the study beside their values.

        Parameters
        ----------
        params
            Which parameters; None for all.

        Raises
        ------
        SearchError
            If the study is empty, as one that was in memory is after `dagsel.load`.
        """
        plotly()
        return parallel_plot(self._filled, self._names(params), self.metric)

    def importance(self, params: Sequence[str] | None = None) -> Figure:
        """Draw how much each parameter matters for the metric, as Optuna estimates it.

        Parameters
        ----------
        params
            Which parameters; None for all.

        Raises
        ------
        SearchError
            If the study is empty, has fewer than two trials that are complete, or they do not
            differ.
        """
        plotly()
        return importance_plot(self._filled, self._names(params), self.metric)

    @property
    def _filled(self) -> Study:
        if self.record.trials and not self.study.get_trials(deepcopy=False):
            raise SearchError(
                "this figure is drawn from the study, which is empty here: it was in memory, or "
                "cannot be opened; open the run with its space: dagsel.load(run_dir, space=...)"
            )
        return self.study

    def _names(self, params: Any) -> list[str] | None:
        if params is None:
            return None
        names = [params] if isinstance(params, str) else list(params)
        known = {name for trial in self.record.trials.values() for name in trial.params}
        for name in names:
            if name not in known:
                raise SearchError(
                    f"there is no parameter {name!r}; take one of {', '.join(sorted(known))}"
                )
        return names
