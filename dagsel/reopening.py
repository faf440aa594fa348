"""What a run began with, opened again: its data set and its study, if it is safe to open them."""

from __future__ import annotations

from dagsel.errors import RunDirError
from dagsel.history.record import Record
from dagsel.history.settings import Settings, open_data
from dagsel.storage import RunDir, ShardedDataset
from dagsel.study import Adopted, Space, Study, StudyDriver, open_study
from dagsel.workloads.base import Workload


def parts_of(
    settings: Settings,
    folder: RunDir,
    workload: Workload | None,
    space: Space | None,
    data: ShardedDataset | None,
) -> tuple[Workload, Space, ShardedDataset]:
    """Return the parts of a resumed run; raise an error if they are not those it began with."""
    if settings.trains_all:
        raise RunDirError(
            f"{folder.url} is a refit: call run.refit of its run again, which goes on with it"
        )
    if workload is None or space is None:
        raise RunDirError(
            "a run_dir holds no code: give workload= and space= as the run began with them"
        )
    workload = settings.as_begun(workload)
    if data is None:
        data = open_data(settings.data, settings.data_digest, folder)
    settings.check_data(data.digest, data.url)
    return workload, space, data


def study_of(settings: Settings, folder: RunDir, given: Study | str | None) -> Study:
    """Return a run's study: the user's, the one at the user's URL, or the one at the run's."""
    name = (settings.study, settings.directions)
    if isinstance(given, str):
        return open_study(*name, given)
    return given or open_study(*name, settings.home, folder.url)


def adopt(driver: StudyDriver, record: Record) -> None:
    """Write what the study lacks of the record, and add configurations to the record's trials."""
    record.configure(driver.adopt(told(record, driver.first_step or 0)))


def told(record: Record, first_step: int = 0) -> dict[int, Adopted]:
    """Return what the study is to hold of the record's trials, with `Settings.first_step`."""
    found = {}
    for trial in record.trials.values():
        epochs = tuple((e.epoch, *record.values(e.value, e.metrics)) for e in trial.epochs)
        end = (trial.state, trial.reason, trial.traceback)
        about = (epochs, trial.values, *end, first_step, trial.attrs)
        found[trial.number] = Adopted(trial.params, *about)
    return found
