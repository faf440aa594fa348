"""Whether ``run.json``, journal and states of a run belong together, before anyone goes on with it.

The journal is written before a decision takes effect. So it knows of every trial that has a state,
and has ordered every epoch of which there is one. A journal that does not was deleted, cut, or is
another run's: going on with it would begin another search in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

from dagsel.codec import Json
from dagsel.errors import RunDirError
from dagsel.history.record import Record
from dagsel.history.settings import Settings
from dagsel.messages import ENTRIES, Abandoned, Entry, SessionBegun, SessionEnded, Turn
from dagsel.steering import Commanded, FinishSearch
from dagsel.storage import RunDir
from dagsel.storage.runs.checkpoints import Extent


def read_run(folder: RunDir) -> tuple[Settings, list[Entry], Record]:
    """Read what a run was called with, its journal, and what it comes to; raise as below."""
    about = folder.about()
    settings = Settings.from_json(about, folder.url)
    return settings, *read_history(folder, settings, about["run"])


def read_history(
    folder: RunDir, settings: Settings, run: str, *, goes_on: bool = False
) -> tuple[list[Entry], Record]:
    """Read the journal of a run, and check that it is the whole one of this run.

    Parameters
    ----------
    folder, settings, run
        Where it is, what it was called with, and its identifier.
    goes_on
        Whether an end by Ctrl-C counts no more.

    Returns
    -------
    entries, record
        What the journal holds, and what it comes to.

    Raises
    ------
    RunDirError
        If it is damaged or shortened, or ``run.json`` was changed.
    """
    # Listed before the journal is read: what a driver stores now, the journal knows by then.
    stored, has_ended = folder.states.extents(), folder.has_best()
    entries = read_entries(folder.journal.read(), folder.url, settings.dagsel)
    entries = without_interruptions(entries, goes_on=goes_on)
    check_settings(entries, folder.digest(), folder.url)
    record = Record(run, settings.n_shards, *settings.ranks_by, not settings.trains_all)
    for number, entry in enumerate(entries):
        try:
            record.add(entry)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise RunDirError(
                f"the journal of {folder.url} contradicts itself (entry {number}: "
                f"{type(error).__name__}: {error}); restore it from a copy"
            ) from None
    missing = what_is_missing(record, stored, has_ended=has_ended)
    if missing:
        what = "lacks its end" if entries else "is missing or empty"
        raise RunDirError(
            f"the journal of {folder.url} {what}: {missing}; restore the journal from a copy, or "
            "start anew in another run_dir"
        )
    return entries, record


def read_entries(entries: Iterable[Json], url: str, begun_with: str) -> list[Entry]:
    """Read a journal.

    Parameters
    ----------
    entries
        What it holds.
    url
        Where it is, for the error.
    begun_with
        The version of dagsel that the run began with, for the error.

    Raises
    ------
    RunDirError
        If it holds what this version does not know.
    """
    read: list[Entry] = []
    for entry in entries:
        # Units that found their state stored once said of whom a clone had it.
        entry = {key: item for key, item in entry.items() if key != "adoptions"}
        try:
            read.append(ENTRIES.decode(entry))
        except ValueError as error:
            raise RunDirError(
                f"the journal of {url} cannot be read by dagsel {version('dagsel')} (entry "
                f"{len(read)}: {error}): the run began with dagsel {begun_with}, or a newer one "
                "has gone on with it; install the newer of these"
            ) from error
    return read


def without_interruptions(entries: Sequence[Entry], *, goes_on: bool) -> list[Entry]:
    """Leave out ends by Ctrl-C after which the run went on, and what was noted of them.

    What such a session has taken stays.

    Parameters
    ----------
    entries
        A journal.
    goes_on
        Whether it goes on after its last entry.

    Examples
    --------
    >>> from dagsel.steering import Commanded, FinishSearch
    >>> end = Turn(Commanded(FinishSearch(resumable=True), "a", seconds=9.0), ())
    >>> entries = [Turn(None, ()), end, SessionEnded(0.0, 9.5, 19.0)]
    >>> len(without_interruptions(entries, goes_on=False))
    3
    >>> len(without_interruptions([*entries, SessionBegun(10.0, 9.0)], goes_on=False))
    3
    """
    kept: list[Entry] = []
    end: int | None = None  # where the last end by Ctrl-C stands
    for entry in [*entries, *([None] if goes_on else [])]:
        if end is not None and (entry is None or isinstance(entry, SessionBegun)):
            # None, if a second Ctrl-C was faster than the end.
            kept[end:] = [later for later in kept[end:] if isinstance(later, SessionEnded)]
            end = None
        match entry:
            case Turn(Commanded(FinishSearch(resumable=True))):
                end = len(kept)
            case Turn() | Abandoned():  # it was extended, or given up
                end = None
        if entry is not None:
            kept.append(entry)
    return kept


def check_settings(entries: Iterable[Entry], digest: str, url: str) -> None:
    """Raise a `RunDirError` if ``run.json`` is not what a session of the journal began with."""
    for entry in entries:
        if isinstance(entry, SessionBegun) and entry.about not in (None, digest):
            raise RunDirError(
                f"{url}/run.json is not the one that the run began with (checksum {digest}, in "
                f"the journal {entry.about}): it was changed, or is another run's; restore it from "
                "a copy"
            )


def what_is_missing(record: Record, stored: Mapping[int, Extent], *, has_ended: bool) -> str:
    """Say what a journal lacks that must have been in it; empty if nothing is known to.

    Parameters
    ----------
    record
        What the journal comes to.
    stored
        By trial, how far its stored states reach.
    has_ended
        Whether the folder says which trial was the best, which is written at the end.
    """
    for number, extent in stored.items():
        trial = record.trials.get(number)
        if trial is None:
            return f"it does not know trial {number}, which has states"
        if extent.epoch > trial.n_decided:
            return (
                f"trial {number} has a state of epoch {extent.epoch}, and no more than "
                f"{trial.n_decided} are ordered"
            )
        if extent.n_checks > trial.n_checks:
            return (
                f"trial {number} has the state of its check {extent.n_checks}, of {trial.n_checks}"
            )
    was_over = record.extended is not None or any(moment.mark == "end" for moment in record.course)
    if has_ended and not record.finished and not was_over:
        return "there is a best.json, which is written when a run ends"
    return ""
