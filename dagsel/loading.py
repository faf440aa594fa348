"""The call that opens a run to look at it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from dagsel.arguments import checked
from dagsel.driver.consistency import read_run
from dagsel.errors import StudyStorageError
from dagsel.extending import opened
from dagsel.flow import Asked, Traits
from dagsel.history.record import Record
from dagsel.history.result import Run
from dagsel.messages import Entry, Turn
from dagsel.reopening import adopt, study_of, told
from dagsel.storage.files import Url
from dagsel.study import Space, Study, StudyDriver, open_study
from dagsel.study.resume import recall
from dagsel.workloads.base import Workload

logger = logging.getLogger("dagsel")


def load(
    run_dir: Url,
    *,
    workload: Workload | None = None,
    space: Space | None = None,
    study: Study | str | None = None,
) -> Run:
    """Open a run to look at it, whether it has ended, was interrupted, or still goes on.

    Nothing is written and nothing is trained. The run's code is needed only to make its models.

    Parameters
    ----------
    run_dir
        The run's folder.
    workload
        That of the run, for `Run.best_model` and the like.
    space
        That of the run; needed for models if their configurations hold something that has no form
        in JSON, such as a class, and to fill a study that was in memory.
    study
        The study or the URL of its storage, if the one in ``run_dir`` does not open it. If there is
        none, the run has one in memory: with all its trials if `space` is given, else empty. The
        run's own tables are whole.

    Returns
    -------
    Run
        As far as the run has come.

    Raises
    ------
    RunDirError
        If ``run_dir`` holds no run or is damaged, or the workload is not that of the run.
    SearchError
        If the space is not that of the run.

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
    >>> dagsel.load("run").best_value == run.best_value  # on another day, in another process
    True
    >>> dagsel.load("run", workload=workload).best_model()
    SGDClassifier(alpha=...)
    """
    run, why_no_study = read(run_dir, workload, space, study)
    if why_no_study:
        logger.warning("the run is opened without its study: %s", why_no_study)
    return run


def read(
    run_dir: Url,
    workload: Workload | None = None,
    space: Space | None = None,
    study: Study | str | None = None,
) -> tuple[Run, str]:
    """Open a run as `load` does; return why its study cannot be opened, too, if it cannot."""
    given = checked(
        "workload",
        "space",
        "study_or_url",
        run_dir=run_dir,
        workload=workload,
        space=space,
        study_or_url=study,
    )
    folder = given.run_dir
    settings, entries, record = read_run(folder)
    known = None if given.workload is None else settings.as_begun(given.workload)
    is_lost = settings.home is None and study is None
    why_no_study = ""
    try:
        theirs = study_of(settings, folder, given.study_or_url)
    except StudyStorageError as error:
        if study is not None:
            raise
        why_no_study = str(error)
        theirs, is_lost = open_study(settings.study, settings.directions, None), True
    if is_lost and given.space is not None:
        draws = (settings.seed, (), record.run, settings.sampler_seed, Traits())
        counts = (settings.n_before, settings.first_step)
        adopt(StudyDriver(theirs, given.space, settings.metric, *draws, *counts), record)
    else:
        record.configure(_configs(entries, record, given.space, theirs))
    run = Run(theirs, settings.metric, record, known, folder)
    return opened(run, given.space), why_no_study


def _configs(
    entries: Iterable[Entry], record: Record, space: Space | None, study: Study
) -> dict[int, dict[str, Any]]:
    """Return the configurations that were drawn: by the space, or what the journal has of them."""
    if space is not None:
        return {
            number: recall(space, number, adopted, study, record.run)[0]
            for number, adopted in told(record).items()
        }
    drawn = {number: dict(trial.params) for number, trial in record.trials.items()}
    for entry in entries:
        if isinstance(entry, Turn) and isinstance(entry.event, Asked):
            configs = entry.event.configs or ({},) * len(entry.event.trials)
            for number, config in zip(entry.event.trials, configs, strict=True):
                drawn[number] |= config
    return drawn
