"""The call that gives up a run."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from dagsel.arguments import checked
from dagsel.driver.consistency import read_history
from dagsel.errors import StudyStorageError
from dagsel.history.settings import Settings
from dagsel.messages import ENTRIES, Abandoned
from dagsel.reopening import study_of, told
from dagsel.storage.files import Url
from dagsel.study import give_up, guarded
from dagsel.tidying import tidy

if TYPE_CHECKING:
    from dagsel.study import Study

logger = logging.getLogger("dagsel")


def abandon(
    run_dir: Url, *, study: Study | str | None = None, reason: str = "the run was abandoned"
) -> None:
    """Give up a run that was interrupted: its live trials fail, and no resume goes on with it.

    Until then they stay RUNNING in the study, as the run may go on; samplers of other searches in
    the same study may take that into account. The best model so far is kept: `dagsel.resume` only
    reads the run from now on. States of other trials are deleted. No cluster and no code of the run
    is needed.

    If the study's storage is gone, the run is given up all the same, and a warning says so. Call it
    again with ``study=`` to tell the study.

    Parameters
    ----------
    run_dir
        The run's folder.
    study
        The study or the URL of its storage, if the one in ``run_dir`` does not open it.
    reason
        Why; written to the run and to each of the trials.

    Raises
    ------
    RunDirError
        If ``run_dir`` holds no run, another driver has it, or it cannot be written.

    Examples
    --------
    >>> dagsel.abandon("run", reason="the data was wrong")  # doctest: +SKIP
    """
    given = checked("study_or_url", run_dir=run_dir, study_or_url=study)
    folder = given.run_dir
    about = folder.about()
    settings = Settings.from_json(about, folder.url)
    with folder.lock(about["run"]):
        _, record = read_history(folder, settings, about["run"])
        if not record.finished or record.interrupted:
            given_up = Abandoned(time.time(), reason)
            folder.journal.append([ENTRIES.encode(given_up)])
            record.add(given_up)
        try:
            if study is not None or settings.home is not None:  # one in memory is gone
                theirs = study_of(settings, folder, given.study_or_url)
                give_up(guarded(theirs), record.run, told(record, settings.first_step))
        except StudyStorageError as error:
            logger.warning(
                "run %s is abandoned, but its trials are still running in the study: %s",
                record.run,
                error,
            )
        tidy(record, folder)
