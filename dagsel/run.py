"""One call searches; what it gives back holds the best model and the record."""

from __future__ import annotations

import copy
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dagsel import __version__
from dagsel.errors import NoCompletedTrialError, SearchError
from dagsel.execution.cluster import connect
from dagsel.execution.engine import Engine, pack_workload, versions_here
from dagsel.execution.runner import Runner
from dagsel.execution.worker_plugin import RunSpec
from dagsel.flow import Flow
from dagsel.planning.dispatch import DispatchConfig
from dagsel.record import Best, Record, TrialRecord
from dagsel.state import State
from dagsel.storage import RunDir, ShardedDataset
from dagsel.study import Callback, Space, StudyDriver
from dagsel.views.progress import SearchProgress
from dagsel.workloads.base import Workload

if TYPE_CHECKING:
    import optuna
    from distributed import Client

logger = logging.getLogger("dagsel")


@dataclass(frozen=True, slots=True)
class Run:
    """What a search came to.

    Parameters
    ----------
    study
        The study, told of every trial.
    workload
        What was trained.
    metric
        Name of the metric that the search was about.
    record
        All that was done.
    run_dir
        Where states are stored.
    """

    study: optuna.Study
    workload: Workload
    metric: str
    record: Record
    run_dir: RunDir

    @property
    def best(self) -> Best:
        """The best completed trial and where its state is.

        Raises
        ------
        NoCompletedTrialError
            If no trial has completed.
        """
        if self.record.best is None:
            reasons = "; ".join(f"trial {t.number}: {t.reason}" for t in self.failures[:3])
            raise NoCompletedTrialError(f"no trial has completed ({reasons or 'none was started'})")
        return self.record.best

    @property
    def best_params(self) -> Mapping[str, Any]:
        """Parameters of the best trial."""
        return self.record.trials[self.best.trial].params

    @property
    def best_value(self) -> float:
        """Value of the best trial: its metric after its last epoch."""
        return self.best.value

    def best_model(self) -> Any:
        """Make the trained model of the best trial: a module on the CPU, an estimator."""
        best = self.best
        blob, _ = self.run_dir.states.load(best.trial, best.epoch, best.position)
        return self.workload.restore(State(blob), self.record.trials[best.trial].config)

    @property
    def failures(self) -> list[TrialRecord]:
        """Trials that have failed, each with its reason and traceback."""
        return self.record.failures

    @property
    def metrics(self) -> pd.DataFrame:
        """A row for each trial, epoch, split and metric; ``seconds`` since the run began."""
        return self.record.metrics()

    def timeline(self) -> pd.DataFrame:
        """Give a row for each unit that ran: where, when, on which shard."""
        return self.record.timeline()

    def makespans(self) -> pd.DataFrame:
        """Give a row for each round: its makespan in seconds, and that over its lower bound."""
        return self.record.makespans()

    def trials_dataframe(self) -> pd.DataFrame:
        """Give the study's own frame of all its trials."""
        frame: pd.DataFrame = self.study.trials_dataframe()
        return frame

    def leaderboard(self, n: int = 10) -> pd.DataFrame:
        """Give the best trials of this run, best first.

        Parameters
        ----------
        n
            How many.
        """
        rows = [
            {"trial": t.number, self.metric: t.epochs[-1].metrics[self.metric], **t.params}
            for t in self.record.trials.values()
            if t.state == "complete"
        ]
        # Of equal ones the best comes first: the one that completed first.
        best = self.record.best.trial if self.record.best else None
        rows.sort(key=lambda row: row["trial"] != best)
        rows.sort(key=lambda row: row[self.metric], reverse=self.study.direction.name != "MINIMIZE")
        return pd.DataFrame(rows[:n], columns=None if rows else ["trial", self.metric])

    def __repr__(self) -> str:
        trials = self.record.trials.values()
        ended = ", ".join(
            f"{sum(t.state == state for t in trials)} {state}"
            for state in ("complete", "pruned", "failed", "running")
            if any(t.state == state for t in trials)
        )
        best = self.record.best
        value = f"best {self.metric} {best.value:.4g} (trial {best.trial})" if best else "no best"
        return (
            f"<Run {self.record.run} of {self.study.study_name!r}: {ended or 'no trial'}; {value}>"
        )

    def _repr_html_(self) -> str:
        table = self.leaderboard().to_html(index=False, border=0, float_format="{:.4g}".format)
        failed = "".join(f"<li>trial {t.number}: {escape(t.reason)}</li>" for t in self.failures)
        lost = f"<p>failed:</p><ul>{failed}</ul>" if failed else ""
        return f"<p>{escape(repr(self))}</p>{table}{lost}<p>{escape(self.run_dir.url)}</p>"


def optimize(
    study: optuna.Study,
    workload: Workload,
    data: ShardedDataset | str,
    *,
    space: Space,
    flow: Flow,
    metric: str,
    client: Client | str | None = None,
    cluster: Any = None,
    run_dir: str | None = None,
    seed: int = 0,
    replicas: int = 1,
    callbacks: Sequence[Callback] = (),
    worker_timeout: float = 60.0,
    unit_timeout: float | None = None,
) -> Run:
    """Search for the best configuration of a model on a Dask cluster.

    The data stays on the workers and the models hop between them (model hopper parallelism:
    Nakandala, Zhang and Kumar, Cerebro, VLDB 2020): each epoch every trial visits every shard once,
    and many trials train at once.

    Parameters
    ----------
    study
        An Optuna study with one direction; told of every trial, by this process alone.
    workload
        What to train: a `TorchWorkload`, a `SklearnWorkload` or your own.
    data
        A data set that `ShardedDataset.write` wrote, or its URL.
    space
        Optuna's define-by-run function: suggests parameters on a trial and returns the
        configuration as a dict.
    flow
        The search procedure, from `dagsel.flows` or your own.
    metric
        Name of one of the workload's metrics.
    client
        A Dask client or the address of a scheduler; left as it was. With neither client nor
        cluster, one worker process a core is started on this machine and closed again.
    cluster
        A Dask cluster object; left as it was.
    run_dir
        Folder or fsspec URL for the states, which this process and all workers must reach. By
        default a new folder under ``dagsel-runs``.
    seed
        Seeds initial weights, the order of batches, and random draws of configurations.
    replicas
        Workers that hold each shard; more than one helps where workers differ in speed or may be
        lost, and takes as many times the memory.
    callbacks
        Called with study and trial after each trial that ended, as Optuna does.
    worker_timeout
        Seconds to wait for a worker when there is none.
    unit_timeout
        Seconds that one pass over one shard may take. A unit that takes longer and does not stop
        at a batch has its worker restarted; its trial fails after three strikes. None for no limit.

    Returns
    -------
    Run
        The best model and the record. A trial that failed does not end the run; see
        `Run.failures`.

    Raises
    ------
    SearchError
        If study, space, flow and metric do not fit together.
    WorkloadError
        If the workload cannot be trained with the space's configurations, or cannot be sent.
    DatasetError
        If the data set cannot be read.
    ClusterError
        If the cluster cannot run it.
    """
    if isinstance(data, str):
        data = ShardedDataset.open(data)
    if not isinstance(flow, Flow):
        raise SearchError(f"flow must be a search procedure such as RandomSearch, got {flow!r}")
    flow = copy.deepcopy(flow)  # the user's stays as it is, for another run
    driver = StudyDriver(study, space, metric, seed, callbacks)
    grid = getattr(flow, "sampling", "study") == "grid"
    driver.validate(workload.metrics, grid=grid, check=workload.validate)
    packed = pack_workload(workload)
    run = uuid.uuid4().hex[:8]
    url = run_dir or _new_run_dir(driver.name, run)
    folder = RunDir(url)
    folder.claim(run, {"study": driver.name, "metric": metric, "dagsel": __version__})
    record = Record(run)
    spec = RunSpec(run, packed, data, folder, seed, versions_here())
    result = Run(study, workload, metric, record, folder)
    with ExitStack() as stack:
        progress = stack.enter_context(SearchProgress(metric))
        stack.callback(driver.fail_live, "the run ended before the trial did")
        here = stack.enter_context(connect(client, cluster))
        dispatch = DispatchConfig(data.n_shards, replicas, unit_timeout_s=unit_timeout)
        engine = stack.enter_context(Engine(here, spec, dispatch, worker_timeout))
        runner = Runner(
            flow,
            driver,
            engine,
            folder.states,
            data.n_shards,
            record,
            check=workload.validate,
            observe=progress.update,
        )
        runner.run()
    _tidy(result)
    return result


def _tidy(run: Run) -> None:
    """Leave the best state alone in the store, and say which trials failed."""
    best = run.record.best
    for trial in run.record.trials:
        if best is None or trial != best.trial:
            run.run_dir.states.drop(trial)
    if best is not None:
        run.run_dir.states.prune(best.trial, keep=1)
        winner = run.record.trials[best.trial]
        run.run_dir.write_best({**asdict(best), "params": winner.params, "config": winner.config})
    if run.failures:
        reasons = "; ".join(f"trial {t.number}: {t.reason}" for t in run.failures)
        logger.warning(
            "%d of %d trials failed: %s", len(run.failures), len(run.record.trials), reasons
        )


def _new_run_dir(study: str, run: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in study)
    return str(Path("dagsel-runs").absolute() / f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}-{run}")
