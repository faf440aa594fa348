"""The best configuration trained once more, on all samples: `Run.refit`."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from dagsel.arguments import checked
from dagsel.checks import short_traceback, shown, whole
from dagsel.codec import plain_part
from dagsel.console import Progress
from dagsel.driver.consistency import read_history
from dagsel.driver.recovery import catch_up
from dagsel.errors import DatasetError, NoCompletedTrialError, SearchError
from dagsel.execution.cluster import check_cluster
from dagsel.flow import Asked
from dagsel.history.live import config_kept, epochs_behind
from dagsel.history.record import Record
from dagsel.history.refit import Refit
from dagsel.history.result import Run
from dagsel.history.settings import Settings
from dagsel.history.tables import ranked
from dagsel.messages import Entry, Turn
from dagsel.reopening import adopt
from dagsel.session import Call, Session
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.whole import WholeDataset
from dagsel.study import StudyDriver, open_study
from dagsel.workloads.base import StepsByBatch, Workload, checks

if TYPE_CHECKING:
    from dagsel.execution.cluster import Client

logger = logging.getLogger("dagsel")

_AGAIN = "run.refit(...) as before"


def refit(
    run: Run,
    client: Client | str | None,
    *,
    data: Literal["all"] | ShardedDataset,
    epochs: int | None,
    trial: int | None,
    cluster: Any,
    worker_timeout: float | str,
    progress: Progress,
) -> Any:
    """Train a configuration on all samples and return the model; see `Run.refit`."""
    check_cluster(client, cluster)
    given = checked(worker_timeout=worker_timeout, progress=progress)
    shows = {"progress": given.progress}
    workload, number = run.given_workload, _chosen(run, trial)
    n_needed, seen = _epochs_behind(run, number)
    n_epochs = n_needed if epochs is None else whole("epochs", epochs)
    folder = run.run_dir
    settings = Settings.from_json(folder.about(), folder.url)
    workload = settings.as_begun(workload)
    dataset = _whole(data, settings, run)
    flow = Refit(number, n_epochs)
    settings = replace(
        settings,
        home=None,
        flow="Refit",
        flow_config={"trial": number, "epochs": n_epochs},
        metric="train_loss",
        direction="minimize",
        goals=(),
        data=dataset.url,
        data_digest=dataset.digest,
        n_shards=dataset.n_shards,
        trains_all=True,
        deterministic=True,
        keep="last",
        top_k=1,
        small_population="hop",
        deadline_s=None,
        budget_s=None,
        budget_money=None,
        pools={},
        n_before=0,
    )
    config = config_kept(run.record, run.record.trials[number])
    checks(workload, dataset.manifest)(config)  # the workload learns what the run's had learnt
    workload = _stepping(workload, run, dataset)
    goal = folder.refit(f"trial-{number}-{n_epochs}-epochs-{dataset.digest}")
    entries, first = list[Entry](), tuple[Turn, ...]()
    name = goal.about()["run"] if goal.has_begun() else uuid.uuid4().hex[:8]
    with goal.lock(name) as lock:
        if goal.has_begun():
            entries, record = read_history(goal, settings, name)
            catch_up(flow, entries, goal.url)
        else:
            goal.claim(name, settings.to_json())
            record = Record(name, dataset.n_shards, *settings.ranks_by, validates=False)
            drawn = Asked((number,), configs=(plain_part(config),))
            first = (Turn(drawn, (), seconds=0.0, params={number: {}}),)
            record.add(first[0])
        study = open_study(settings.study, ("minimize",), None)
        driver = StudyDriver(study, lambda trial: config, "train_loss", settings.seed, (), name, 0)
        adopt(driver, record)
        parts = (settings, goal, driver, flow, workload, dataset, record)
        session = Session(*parts, first=first, again=_AGAIN, foreseen=seen)
        done = session.result
        if not record.finished:
            done = session.run(Call(client, cluster, given.worker_timeout, **shows), lock)
    if record.failures:
        raise NoCompletedTrialError(
            f"trial {number} has failed as it was trained on all samples: "
            f"{record.failures[0].reason}; delete {goal.url} to try it again"
        )
    return done.best_model()


def _chosen(run: Run, trial: int | None) -> int:
    if trial is None:
        return run.best.trial
    number = whole("trial", trial, least=0)
    scored = {known.number for known in ranked(run.record)}
    if number not in scored:
        raise SearchError(
            f"trial {number} is none of those that were scored and did not fail; take one of "
            "run.leaderboard()"
        )
    return number


def _stepping(workload: Workload, run: Run, dataset: WholeDataset) -> Workload:
    """Let a schedule that steps after each batch do so as often as in the search."""
    if not (isinstance(workload, StepsByBatch) and workload.steps_by_batch):
        return workload
    try:
        before = [size.n_train for size in run.data.shard_sizes]
    except DatasetError:
        logger.warning(
            "the run's data set is gone, so the learning rate steps after each batch of this one, "
            "which may have more of them an epoch than a schedule of a fixed length is for"
        )
        return workload
    now = [size.n_train for size in dataset.shard_sizes]
    refitted: Workload = workload.refitting(before, now)
    return refitted


def _epochs_behind(run: Run, number: int) -> tuple[int, tuple[float, ...]]:
    """Return how long a trial's best state was trained, and what all epochs have scored."""
    trial = run.record.trials[number]
    assert trial.kept is not None
    n_needed, _ = epochs_behind(run.record, number, trial.kept.place.epoch)
    _, seen = epochs_behind(run.record, number, max(len(trial.epochs), trial.kept.place.epoch))
    if trial.adoptions:
        logger.warning(
            "trial %d went on from the state of another trial: it is trained anew for the %d "
            "epochs of both, all with the configuration that it had in the end",
            number, n_needed,
        )  # fmt: skip
    return n_needed, seen


@short_traceback
def _whole(data: Any, settings: Settings, run: Run) -> WholeDataset:
    if isinstance(data, ShardedDataset):
        return WholeDataset(data.folder, data.manifest)
    if isinstance(data, str) and data == "all":
        opened = run.data
        settings.check_data(opened.digest, opened.url)
        return WholeDataset(opened.folder, opened.manifest)
    raise SearchError(
        f'data must be "all" or a data set, got {shown(data)}; write data="all" for the training '
        "and validation samples of the run, or data=ShardedDataset.open(...)"
    )
